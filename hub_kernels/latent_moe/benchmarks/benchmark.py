"""The expert MLP at the released model's widths: errors, times, memory, adapters, and the first product alone.

python hub_kernels/latent_moe/benchmarks/benchmark.py [--quick] [--tokens 512 8192]

Rows are drawn by uniform routing of 56 experts. The other implementations get rows that are sorted already and leave
the weighted sum out, except transformers', which does both; ours includes gathering and summing. What is verified is
the sum, its gradient of the tokens, against float64 on the experts of a sample of tokens. Every row is written to
results/h200.json as soon as it is measured, under the command that measures its number of tokens alone.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "torch-ext"), str(HERE.parents[2])]

from latent_moe import ExpertMatrices, LowRank, Rows, expert_mlp, expert_mlp_reference, mlp, sort_slots  # noqa: E402
from latent_moe.mxfp4 import decode  # noqa: E402
from measure import floor_ms, peak_gib, record, relative_error, row, samples_ms  # noqa: E402

L, H, E, S = 3584, 3072, 56, 16
TOKENS = (512, 2100, 8192)
BETA, LINEAR_BETA = 4.0, 25.0
OURS, OTHERS = 2.0, 4.0
# Tokens whose results are computed in float64.
SAMPLE = 48

# From tokens to the sum [T, L], or from sorted rows to the results of rows [R, L].
Mlp = Callable[[torch.Tensor], torch.Tensor]


def situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    g, u = gate.float(), up.float()
    y = BETA * torch.tanh(g / BETA) * torch.sigmoid(g) * LINEAR_BETA * torch.tanh(u / LINEAR_BETA)
    return y.to(gate.dtype)


def packed_weights() -> tuple[ExpertMatrices, ExpertMatrices]:
    stacks = []
    for rows, columns in ((2 * H, L), (L, H)):
        weight = torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scale = torch.randint(118, 123, (E, rows, columns // 32), dtype=torch.uint8, device="cuda")
        stacks.append(ExpertMatrices(weight, scale))
    return stacks[0], stacks[1]


def decoded(matrices: ExpertMatrices, out: torch.Tensor | None = None) -> torch.Tensor:
    experts, rows, columns = matrices.weight.shape
    if out is None:
        out = torch.empty(experts, rows, 2 * columns, dtype=torch.bfloat16, device="cuda")
    decode(matrices.weight, matrices.scale, out)
    return out


class Setting:
    """Tokens that all choose 16 of the 56 experts, their sorted rows, and float copies of the weights for others."""

    def __init__(self, tokens: int, gate_up: ExpertMatrices, down: ExpertMatrices) -> None:
        self.gate_up, self.down = gate_up, down
        self.ids = torch.rand(tokens, E, device="cuda").topk(S).indices
        self.rows: Rows = sort_slots(self.ids, E)
        self.x = torch.randn(tokens, L, device="cuda", dtype=torch.bfloat16)
        self.weights = torch.rand(tokens, S, device="cuda")
        self.gradient = torch.randn(tokens, L, device="cuda").bfloat16().float()
        self.token_R = self.rows.slot_R // S
        self.ends = self.rows.offset[1:]

    def ours(self, gate_up: ExpertMatrices, down: ExpertMatrices) -> Mlp:
        options = {"activation": "situ", "beta": BETA, "linear_beta": LINEAR_BETA}
        return lambda x: expert_mlp(x, self.rows, self.weights, gate_up, down, **options)

    def sum_of(self, rows_mlp: Mlp) -> Mlp:
        """Around what others compute: rows gathered before, weighted sums after, differentiable."""

        def whole(x: torch.Tensor) -> torch.Tensor:
            y_TSL = rows_mlp(x[self.token_R])[self.rows.row_TS]
            return (y_TSL.float() * self.weights.unsqueeze(-1)).sum(1)

        return whole


def others(setting: Setting, up: torch.Tensor, down: torch.Tensor) -> dict[str, Mlp]:
    """Plain torch on sorted rows: with bf16 weights kept, or with weights decoded every time."""
    product = getattr(F, "grouped_mm", torch._grouped_mm)
    ends, counts = setting.ends, setting.rows.load_E.tolist()

    def grouped(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, act) -> torch.Tensor:
        gate, value = product(x, up.transpose(1, 2), offs=ends).chunk(2, -1)
        return product(act(gate, value), down.transpose(1, 2), offs=ends)

    def loop(x: torch.Tensor) -> torch.Tensor:
        parts = []
        for e, part in enumerate(x.split(counts)):
            gate, value = F.linear(part, up[e]).chunk(2, -1)
            parts.append(F.linear(situ(gate, value), down[e]))
        return torch.cat(parts)

    compiled = torch.compile(situ)
    return {
        "bf16 grouped_mm + compiled act": lambda x: grouped(x, up, down, compiled),
        "decode + grouped_mm": lambda x: grouped(x, decoded(setting.gate_up), decoded(setting.down), compiled),
        "bf16 loop": loop,
    }


def transformers_experts(setting: Setting, up: torch.Tensor, down: torch.Tensor) -> dict[str, Mlp]:
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward
    except ImportError as missing:
        print(f"transformers: not installed ({missing})")
        return {}
    module = torch.nn.Module()
    module.num_experts, module.has_gate, module.has_bias, module.is_transposed = E, True, False, False
    module._is_expert_parallel = module.has_post_expert_norm = False
    module.gate_up_proj, module.down_proj = up, down
    module._apply_gate = lambda x: situ(*x.chunk(2, -1))
    weights = setting.weights.bfloat16()
    return {"transformers grouped_mm": lambda x: grouped_mm_experts_forward(module, x, setting.ids, weights)}


def with_gradient(whole: Mlp, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = whole(x)
    return y.detach(), torch.autograd.grad(y, x, gradient.to(y.dtype))[0]


def verified(setting: Setting, candidates: dict[str, Mlp], plain: str) -> tuple[dict[str, Mlp], float]:
    """Those whose sums and gradients are right on a sample of tokens, and our worst error over that of `plain`."""
    some = torch.randperm(len(setting.x), device="cuda")[:SAMPLE]
    sample = sort_slots(setting.ids[some], E)

    def exact(x: torch.Tensor) -> torch.Tensor:
        options = {"activation": "situ", "beta": BETA, "linear_beta": LINEAR_BETA}
        weights = setting.weights[some].double()
        return expert_mlp_reference(x, sample, weights, setting.gate_up, setting.down, **options)

    truth = with_gradient(exact, setting.x[some].double(), setting.gradient[some])
    errors: dict[str, list[float]] = {}
    for name, whole in candidates.items():
        # A public implementation that does not run here is no candidate; ours has to.
        try:
            results = with_gradient(whole, setting.x, setting.gradient)
        except Exception as problem:
            if name == "ours":
                raise
            print(f"{name}: dropped, {type(problem).__name__}: {problem}")
            continue
        errors[name] = [relative_error(x[some], t) for x, t in zip(results, truth, strict=True)]
        print(f"{name:32s} sum {errors[name][0]:.1e}, d x {errors[name][1]:.1e}", flush=True)
    ratio = {name: max(e / p for e, p in zip(es, errors[plain], strict=True)) for name, es in errors.items()}
    assert ratio["ours"] <= OURS, f"error {ratio['ours']:.2f} x torch"
    for name in [name for name, value in ratio.items() if value > OTHERS]:
        print(f"{name}: dropped, error {ratio.pop(name):.1f} x torch")
    return {name: candidates[name] for name in ratio}, ratio["ours"]


def adapted(matrices: ExpertMatrices, rank: int) -> ExpertMatrices:
    experts, rows, columns = matrices.weight.shape
    a = (torch.randn(experts, rank, 2 * columns, device="cuda") * 0.02).requires_grad_()
    b = (torch.randn(experts, rows, rank, device="cuda") * 0.02).requires_grad_()
    return matrices._replace(adapters=(LowRank(a, b, 1.0),))


def first_product(setting: Setting, up: torch.Tensor, repeats: int, rows: int, shape: str) -> dict:
    """The gate-and-up product alone, our activation included."""
    product = getattr(F, "grouped_mm", torch._grouped_mm)
    matrices = mlp.Matrices(setting.gate_up.weight, setting.gate_up.scale, None, None, 1.0)
    plan = mlp.Plan(setting.rows.slot_R, setting.rows.row_TS, setting.rows.offset, "situ", BETA, LINEAR_BETA)
    ordered = mlp.decodes_inside(setting.x, matrices, rows)
    x_R, scratch = setting.x[setting.token_R], torch.empty_like(up)
    runs = {
        "ours": lambda: mlp._gate_up(setting.x, None, matrices, plan, True, ordered),
        "bf16 grouped_mm": lambda: product(x_R, up.transpose(1, 2), offs=setting.ends),
        "decode + grouped_mm": lambda: product(
            x_R, decoded(setting.gate_up, scratch).transpose(1, 2), offs=setting.ends
        ),
    }
    packed = setting.gate_up.weight.nbytes + setting.gate_up.scale.nbytes
    floor = floor_ms(4 * rows * L * H, packed + 2 * rows * (L + 2 * H))
    return row("MXFP4 gate+up GEMM fwd", shape, samples_ms(runs, repeats), floor, None, None)


def measured(tokens: int, gate_up: ExpertMatrices, down: ExpertMatrices, quick: bool) -> Iterator[dict]:
    """The rows of one number of tokens, each as soon as it is there."""
    setting, repeats, rows = Setting(tokens, gate_up, down), 3 if quick else 12, tokens * S
    up, low = decoded(gate_up), decoded(down)
    on_rows = others(setting, up, low)
    whole = {"ours": setting.ours(gate_up, down), **{n: setting.sum_of(f) for n, f in on_rows.items()}}
    whole |= transformers_experts(setting, up, low)
    kept, error = verified(setting, whole, "bf16 grouped_mm + compiled act")
    x_R, dy_R = setting.x[setting.token_R], torch.randn(rows, L, device="cuda", dtype=torch.bfloat16)
    shape, packed = (
        f"M={rows / 1000:.3g}k rows, 56 local",
        sum(m.weight.nbytes + m.scale.nbytes for m in (gate_up, down)),
    )
    flops, moved = 6 * rows * L * H, packed + 4 * tokens * L

    def run(name: str, backward: bool) -> Callable[[], torch.Tensor]:
        function, x, gradient = whole[name], setting.x, setting.gradient
        if name in on_rows:
            function, x, gradient = on_rows[name], x_R, dy_R
        if backward:
            return lambda: with_gradient(function, x, gradient)
        return torch.no_grad()(lambda: function(x))

    for op, backward in (("experts fwd", False), ("experts fwd+dX", True)):
        runs = {name: run(name, backward) for name in kept}
        times, memory = samples_ms(runs, repeats), {name: peak_gib(f) for name, f in runs.items()}
        floor = floor_ms((1 + backward) * flops, (1 + backward) * moved)
        yield row(f"{op}, MXFP4 W", shape, times, floor, memory["ours"], error)
        print("peak GiB above inputs and weights: " + ", ".join(f"{n} {gib:.2f}" for n, gib in memory.items()))
    yield first_product(setting, up, repeats, rows, shape)
    frozen = run("ours", True)
    for rank in (2, 16):
        stacks = adapted(gate_up, rank), adapted(down, rank)
        step, factors = setting.ours(*stacks), [f for m in stacks for f in m.adapters[0][:2]]

        def train(step=step, factors=factors) -> tuple[torch.Tensor, ...]:
            x = setting.x.detach().requires_grad_()
            return torch.autograd.grad(step(x), [x, *factors], setting.gradient)

        times = samples_ms({"ours": train, "without adapters": frozen}, repeats)
        floor = floor_ms(2 * flops, 2 * moved)
        yield row(f"experts fwd+bwd, rank {rank}", shape, times, floor, peak_gib(train), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three samples, nothing written")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="numbers of tokens, 16 rows each")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    gate_up, down = packed_weights()
    for tokens in arguments.tokens:
        found = []
        for line in measured(tokens, gate_up, down, arguments.quick):
            found.append(line)
            if not arguments.quick:
                record(f"python hub_kernels/latent_moe/benchmarks/benchmark.py --tokens {tokens}", found)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
