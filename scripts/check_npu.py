"""Check on an Ascend card every operator that the model uses there: its results, its gradients, and its speed.

    python scripts/check_npu.py                 # a few minutes; the exit code is 0 where everything agrees
    python scripts/check_npu.py sparse experts  # some of it

Every operation runs three times from the same numbers: by operators of torch-npu, by small operators on the card (the
torch definition), and by the torch definition on the CPU in float32, which is the truth. The table has the largest
relative error, of norms, of outputs and of gradients, both for the operators and for small operators in the same dtype;
an operation agrees if its error is at most twice that of small operators, or below 1 %. `not used` says why no operator
took the call. Nothing of the model's weights is needed.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from modeling_latentmoe import npu, ops, sparse
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.mxfp4 import encode
from modeling_latentmoe.npu_sparse import Heads
from modeling_latentmoe.training.commands import Parser, run_command

SCALE = 192**-0.5
ACTIVATION = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "hidden_act": "situ"}
ENOUGH = 0.01
REPEATS = 5


class Case(NamedTuple):
    """leaves: inputs with gradients, others: without. run(leaves, others, kernels) -> outputs, in a fixed order."""

    name: str
    leaves: list[Tensor]
    others: list[Tensor]
    run: Callable[[list[Tensor], list[Tensor], str], tuple[Tensor, ...]]


class Sizes(NamedTuple):
    """Tokens of most operations, and of sparse attention, its heads, those of its indexer, and keys that it chooses;
    experts and their widths."""

    tokens: int = 2048
    sparse_tokens: int = 1280
    heads: int = 96
    index_heads: int = 32
    chosen: int = 1024
    experts: int = 32
    width: int = 3584
    hidden: int = 3072


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
    return (torch.randn(shape) * std).to(dtype)


def two_documents(tokens: int, device: torch.device | str = "cpu") -> Documents:
    borders = torch.tensor([0, tokens * 5 // 6, tokens], dtype=torch.int32)
    return Documents.of_batch((1, tokens), torch.device(device), cu_seqlens=borders)


def ranges(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return two_documents(tokens, device).key_ranges


def indexer(tokens: int, sizes: Sizes) -> list[Tensor]:
    return [
        randn(tokens, sizes.index_heads, 128),
        randn(tokens, 128),
        randn(tokens, sizes.index_heads, dtype=torch.float32, std=0.2),
    ]


def small_cases(sizes: Sizes) -> list[Case]:
    T = sizes.tokens
    target = torch.randint(0, 4096, (T,)).masked_fill(torch.rand(T) < 0.2, -100)
    gate = torch.randn(sizes.experts * 8)

    def loss(leaves, others, kernels):
        return (ops.linear_cross_entropy(leaves[0], others[0], others[1], kernels=kernels),)

    def weights_of(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        order = ids.argsort(dim=1)
        return ids.gather(1, order).float(), weights.gather(1, order)

    def route(leaves, others, kernels):
        return weights_of(*ops.route(leaves[0], others[0], 16, scaling_factor=2.5, kernels=kernels))

    def attention(leaves, others, kernels):
        documents = two_documents(T, leaves[0].device)
        return (ops.causal_attention(*leaves, documents, SCALE, True, None, None, kernels),)

    return [
        Case("rms_norm", [randn(T, 7168)], [], lambda x, _, kernels: (norm(x[0], kernels),)),
        Case("cross_entropy", [randn(T, 512)], [randn(4096, 512, std=0.1), target], loss),
        Case("route", [randn(T, len(gate), dtype=torch.float32)], [gate], route),
        Case("causal_attention", [randn(1, 16, T, width) for width in (192, 192, 128)], [], attention),
    ]


def kernel_cases(sizes: Sizes) -> list[Case]:
    """What Triton-Ascend compiles from hub_kernels/: an activation, attention residuals, the norm of KDA's output."""
    T = sizes.tokens
    rows = [randn(1, T, 2 * sizes.width) for _ in range(8)]
    score = randn(2 * sizes.width, dtype=torch.float32, std=sizes.width**-0.5)
    weight = 1 + randn(128, dtype=torch.float32, std=0.2)

    def glu(leaves, _, kernels):
        return (ops.glu(*leaves, SimpleNamespace(kernels=kernels, **ACTIVATION)),)

    def mixture(leaves, _, kernels):
        return (ops.attn_residual(leaves[:-1], leaves[-1], 1e-5, kernels),)

    def head_norm(leaves, _, kernels):
        return (ops.gated_rms_norm(*leaves, 1e-5, kernels),)

    return [
        Case("glu", [randn(T, sizes.hidden, std=4) for _ in range(2)], [], glu),
        Case("attn_residual", [*rows, score], [], mixture),
        Case("gated_rms_norm", [randn(T, sizes.heads, 128), randn(T, sizes.heads, 128, std=4), weight], [], head_norm),
    ]


def norm(x: Tensor, kernels: str) -> Tensor:
    """The norms of the model have no choice of their own."""
    return ops.rms_norm(x, 1e-5) if kernels == "auto" else torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-5)


def sparse_cases(sizes: Sizes) -> list[Case]:
    T, N = sizes.sparse_tokens, sizes.heads
    student = indexer(T, sizes)
    index = ops.index_topk(*student, *ranges(T, torch.device("cpu")), sizes.chosen)
    latents = [randn(T, N, 576, std=0.3), randn(T, 576)]
    lse = sparse.sparse_attention(*latents, index, SCALE, 512)[1]
    target = sparse.head_probabilities(*latents, index, lse, SCALE)
    # so many that one call has them: the value of several is not the operator's
    heads = [randn(T, 64, width) for width in (192, 192, 128)]

    def choose(_, others, kernels):
        chosen = ops.index_topk(*others, *ranges(T, others[0].device), sizes.chosen, kernels=kernels)
        # which keys, whatever their order
        return (torch.zeros(T, T + 1, device=chosen.device).scatter_(1, chosen.long() % (T + 1), 1)[:, :T],)

    def attend(leaves, others, kernels):
        limits = ranges(T, leaves[0].device)
        out, lse = ops.sparse_attention(*leaves, others[0], SCALE, 512, None, kernels, limits)
        # which nothing learns from
        return out, lse.detach()

    def listed(leaves, others, kernels):
        return (ops.indexer_loss(*leaves, *others, True, kernels, ranges(T, leaves[0].device)),)

    def fused(leaves, others, kernels):
        limits, teacher = ranges(T, leaves[0].device), sparse.Teacher(others[0], others[1], SCALE)
        student = sparse.Student(*leaves)
        found = ops.fused_indexer_loss(teacher, student, *others[2:], 512, True, limits, kernels)
        if found is None:
            given = ops.head_probabilities(*others, SCALE, 512, "torch")
            found = ops.indexer_loss(*leaves, others[2], given).sum()
        return (found,)

    def dense(leaves, others, kernels):
        limits, student = ranges(T, leaves[0].device), sparse.Student(*leaves)
        teacher = sparse.Teacher(others[0], others[1][:, 0], SCALE)
        found = ops.fused_dense_indexer_loss(teacher, lambda: Heads(*others), student, limits, None, True, kernels)
        return (dense_loss(others, student, limits) if found is None else found,)

    return [
        Case("index_topk", [], student, choose),
        Case("sparse_attention", latents, [index], attend),
        Case("indexer_loss of listed keys", student, [index, target], listed),
        Case("indexer_loss with its teacher", student, [*latents, index, lse], fused),
        Case("dense_indexer_loss", student, heads, dense),
    ]


def dense_loss(heads: list[Tensor], student: sparse.Student, limits: tuple[Tensor, Tensor]) -> Tensor:
    """KL of attention, summed over heads and normalised, from the scores of all visible keys; small operators."""
    place = torch.arange(len(heads[1]), device=heads[1].device)
    visible = (place >= limits[0][:, None]) & (place < limits[1][:, None])
    with torch.no_grad():
        target = torch.zeros_like(visible, dtype=torch.float32)
        for q, k in zip(heads[0].unbind(1), heads[1].unbind(1), strict=True):
            score = (q.float() @ k.float().T) * SCALE
            target += score.masked_fill(~visible, -torch.inf).softmax(-1)
        target /= target.sum(-1, keepdim=True)
    parts = []
    for rows in torch.arange(len(target), device=place.device).split(128):
        score = sparse.index_scores(student.q_TIK[rows], student.k_GK, student.weight_TI[rows])
        given, log = target[rows], score.masked_fill(~visible[rows], -torch.inf).log_softmax(-1)
        parts.append((torch.xlogy(given, given) - given * log.masked_fill(~visible[rows], 0)).sum())
    return torch.stack(parts).sum()


def expert_cases(sizes: Sizes) -> list[Case]:
    """Experts in MXFP4 with adapters in fp32; all of them held, and a half, and one."""
    cases = []
    for name, held in (("all", sizes.experts), ("half of them", sizes.experts // 2), ("one", 1)):
        weights, factors = [], []
        for shape in ((held, 2 * sizes.hidden, sizes.width), (held, sizes.width, sizes.hidden)):
            stacks = [encode(torch.randn(shape[1:]) * 0.02) for _ in range(held)]
            weights += [torch.stack(part) for part in zip(*stacks, strict=True)]
            factors += [randn(held, 4, shape[2], dtype=torch.float32, std=0.02)]
            factors += [randn(held, shape[1], 4, dtype=torch.float32, std=0.02)]
        ids = torch.rand(sizes.tokens, sizes.experts).argsort(dim=1)[:, : min(8, sizes.experts // 2)]
        mixture = torch.rand(ids.shape)

        def run(leaves, others, kernels):
            x, mixture, *factors = leaves
            ids, *weights = others
            pairs = zip(weights[::2], weights[1::2], factors[::2], factors[1::2], strict=True)
            stacks = [ops.ExpertMatrices(w, s, (ops.LowRank(a, b, 0.5),)) for w, s, a, b in pairs]
            config = SimpleNamespace(kernels=kernels, num_experts=sizes.experts, **ACTIVATION)
            return (ops.expert_mlp(x, ids, mixture, *stacks, config),)

        cases.append(
            Case(f"expert_mlp, {name}", [randn(sizes.tokens, sizes.width), mixture, *factors], [ids, *weights], run)
        )
    return cases


def kda_cases(sizes: Sizes) -> list[Case]:
    """Decays from none to the strongest of the released model."""
    T, H = sizes.tokens, 8
    tokens = [randn(T, H, 128) for _ in range(3)] + [randn(T, H, 128, std=4), randn(T, H)]
    gate = [torch.linspace(-2, 3, H), torch.randn(H, 128)]
    state = torch.randn(4, H, 128, 128)

    def chunk(leaves, others, kernels):
        documents = two_documents(T, leaves[0].device)
        return (ops.kda_chunk(*leaves, *others, -5.0, documents, keep_state=False, kernels=kernels)[0],)

    def step(_, others, kernels):
        with torch.no_grad():
            return ops.kda_step(*others[:5], *others[5:7], -5.0, others[7], kernels)

    one = [x[:4] for x in tokens]
    return [Case("kda_chunk", tokens, gate, chunk), Case("kda_step", [], [*one, *gate, state], step)]


GROUPS = {
    "small": small_cases,
    "kernels": kernel_cases,
    "sparse": sparse_cases,
    "experts": expert_cases,
    "kda": kda_cases,
}


def on(device: torch.device, tensors: list[Tensor], dtype: torch.dtype | None, grad: bool) -> list[Tensor]:
    moved = [x.to(device, dtype if x.is_floating_point() else None, copy=True) for x in tensors]
    return [x.requires_grad_(grad and x.is_floating_point()) for x in moved]


def results(case: Case, device: torch.device, kernels: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs and gradients, on the CPU; the gradient of the outputs is the same for every device."""
    leaves, others = on(device, case.leaves, dtype, True), on(device, case.others, dtype, False)
    outputs = case.run(leaves, others, kernels)
    found = [x.detach() for x in outputs]
    if leaves:
        generator = torch.Generator().manual_seed(7)
        pairs = [(x, torch.randn(x.shape, generator=generator)) for x in outputs if x.requires_grad]
        grads = [grad.to(x.device, x.dtype) for x, grad in pairs]
        found += torch.autograd.grad([x for x, _ in pairs], leaves, grads)
    return [x.cpu() for x in found]


def seconds(case: Case, device: torch.device, kernels: str) -> float:
    """Median time of forward and backward."""
    samples = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        results(case, device, kernels)
        synchronize(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative error of a norm; infinity where something is not finite where it should be."""
    worst = 0.0
    for x, y in zip(got, want, strict=True):
        some = y.isfinite()
        x, y = x.double()[some], y.double()[some]
        found = float((x - y).norm() / y.norm().clamp(min=1e-30))
        worst = max(worst, found if found == found else float("inf"))
    return worst


def check(names: Sequence[str], device: torch.device, sizes: Sizes) -> int:
    """Print the table; the number of operations that disagree."""
    wrong = 0
    print(f"{'operation':32} {'error':>8} {'small':>8} {'ms':>9} {'small ms':>9}  ")
    for group in names:
        for case in GROUPS[group](sizes):
            npu.SAID.clear()
            got, plain = results(case, device, "auto"), results(case, device, "torch")
            # of the operation itself, not of a part that has operators of its own
            said = [line for line in npu.SAID if case.name.startswith(line.partition(":")[0])]
            refused = [line.partition(", ")[2] for line in said]
            truth = results(case, torch.device("cpu"), "torch", torch.float32)
            errors = error(got, truth), error(plain, truth)
            agrees = errors[0] <= max(2 * errors[1], ENOUGH)
            wrong += not agrees
            times = [1e3 * seconds(case, device, kernels) for kernels in ("auto", "torch")]
            verdict = f"not used: {refused[0]}" if refused else "agrees" if agrees else "DIFFERS"
            figures = f"{errors[0]:8.1e} {errors[1]:8.1e} {times[0]:9.2f} {times[1]:9.2f}"
            print(f"{case.name:32} {figures}  {verdict}", flush=True)
    return wrong


def main_command(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    args = parser.parse_args(argv)
    if unknown := set(args.groups) - GROUPS.keys():
        raise ValueError(f"there is no group {', '.join(sorted(unknown))}, but {', '.join(GROUPS)}")
    if problem := npu.torch_npu_problem():
        raise ValueError(problem)
    torch.manual_seed(0)
    print(f"{npu.device_name()}, torch {torch.__version__}")
    if wrong := check(args.groups or list(GROUPS), torch.device("npu"), Sizes()):
        raise ValueError(f"{wrong} operations differ from the torch definition")


def main(argv: Sequence[str]) -> int:
    return run_command(main_command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
