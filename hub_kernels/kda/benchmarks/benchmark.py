"""KDA on one GPU: verified against float64, then timed beside every public peer that is installed.

    python hub_kernels/kda/benchmarks/benchmark.py                      # writes results/h200.json
    python hub_kernels/kda/benchmarks/benchmark.py --quick --ops chunk  # few repeats, nothing written

Rows of the chunked recurrence start from convolved q, k and v, raw decay inputs f and beta logits; a peer that wants
log decays or betas gets them computed inside the timed function. The others are described in conv.py and decode.py.

Legend: T tokens, H heads, K key and value width.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

HUB_KERNELS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HUB_KERNELS), str(HUB_KERNELS.parent), str(HUB_KERNELS / "kda" / "torch-ext")]

import conv  # noqa: E402
import decode  # noqa: E402
import measure  # noqa: E402
from kda import chunk_kda  # noqa: E402

from modeling_latentmoe import ops  # noqa: E402
from modeling_latentmoe.documents import Documents  # noqa: E402

COMMAND = "python hub_kernels/kda/benchmarks/benchmark.py"
H, K, LOWER_BOUND = 96, 128, -5.0
LENGTHS = (1024, 8192, 32768)
# The definition keeps a 16 x 16 x K tensor of decays per head and chunk: it is timed up to this length.
LONGEST_DEFINITION = 8192
VERIFIED, CHECKED_HEADS = 1024, [0, H - 1]
RESULTS = ("o", "dq", "dk", "dv", "df", "dbeta", "dA_log", "ddt_bias")
# Ours may err twice as much as the definition where results have the inputs' dtype. Peers may round more often, but
# must compute the same function: bounds for their o, dq, dk and dv.
OURS, PEERS = 2.0, 2e-2
# Forward reads q, k, v, f and writes o: five bf16 streams of T x H x K. Forward and backward: five streams, then nine
# (q, k, v, f and the gradient of o read, four gradients written), and the state of each chunk of 64 tokens written and
# read, which in bf16 are four more. At T = 8192 these 18 streams take 0.84 ms; 0.80 is used, and grows with T.
FORWARD_STREAMS, BOTH_MS_PER_TOKEN = 5, 0.80 / 8192

Function = Callable[..., torch.Tensor]


def inputs(T: int) -> list[torch.Tensor]:
    """q, k, v, f, beta, A_log, dt_bias, all of which require gradients."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, T, *shape, device="cuda", dtype=torch.bfloat16)

    A_log = torch.rand(H, device="cuda").add(0.1).log()
    dt_bias = torch.randn(H, K, device="cuda") / 2 - 2
    streams = [draw(H, K), draw(H, K), draw(H, K), draw(H, K), draw(H)]
    return [x.requires_grad_() for x in (*streams, A_log, dt_bias)]


def ours(*x: torch.Tensor) -> torch.Tensor:
    return chunk_kda(*x, lower_bound=LOWER_BOUND)[0]


def definition(q, k, v, f, beta, A_log, dt_bias) -> torch.Tensor:
    tokens = [x.squeeze(0) for x in (q, k, v, f, beta)]
    documents = Documents(torch.zeros(1, len(tokens[0]), dtype=torch.long, device=q.device))
    return ops.kda_chunk(*tokens, A_log, dt_bias, LOWER_BOUND, documents)[0].unsqueeze(0)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def shown(name: str, found: list[float]) -> None:
    print(f"KDA chunk: {name:36s}", *(f"{n} {e:.1e}" for n, e in zip(RESULTS, found, strict=True)), flush=True)


def fla_candidates() -> dict[str, Function]:
    try:
        from fla.ops.kda import chunk_kda as fla_kda
    except ImportError as error:
        print(f"KDA chunk: flash-linear-attention is not installed ({one_line(error)})")
        return {}

    def with_backend(tilelang: bool, keep: bool) -> Function:
        def run(q, k, v, f, beta, A_log, dt_bias):
            # Read at every call.
            os.environ["FLA_TILELANG"] = "1" if tilelang else "0"
            return fla_kda(
                q, k, v, f, beta, A_log=A_log, dt_bias=dt_bias.flatten(), lower_bound=LOWER_BOUND, safe_gate=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                disable_recompute=keep,
            )[0]  # fmt: skip

        return run

    found = {"fla": with_backend(False, False), "fla, nothing recomputed": with_backend(False, True)}
    try:
        import tilelang  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"KDA chunk: fla with TileLang is left out, TileLang does not import ({one_line(error)})")
        return found
    from fla.utils import has_usable_nvcc

    if not has_usable_nvcc():
        print("KDA chunk: fla with TileLang is left out, there is no nvcc")
        return found
    found["fla + TileLang"] = with_backend(True, False)
    found["fla + TileLang, nothing recomputed"] = with_backend(True, True)
    return found


def nemo_candidates() -> dict[str, Function]:
    try:
        from nemo_automodel.components.models.kimi_k3.kda_fused import fused_chunk_kda
    except ImportError as error:
        print(f"KDA chunk: NeMo AutoModel's fused kernels are not installed ({one_line(error)})")
        return {}
    try:
        from fla.ops.kda.gate import fused_kda_gate
    except ImportError:
        print("KDA chunk: NeMo's gate is computed by a compiled torch function, for lack of fla")
        gate = torch.compile(lambda f, A_log, dt_bias: ops.kda_gate(f, A_log, dt_bias, LOWER_BOUND))
    else:

        def gate(f, A_log, dt_bias):
            return fused_kda_gate(f, A_log, dt_bias.flatten(), lower_bound=LOWER_BOUND)

    def run(q, k, v, f, beta, A_log, dt_bias):
        return fused_chunk_kda(q, k, v, gate(f, A_log, dt_bias), beta.float().sigmoid(), None)[0]

    return {"NeMo fused": run}


def with_gradients(function: Function, given: list[torch.Tensor], do: torch.Tensor) -> list[torch.Tensor]:
    """o and the gradients of all inputs."""
    o = function(*given)
    return [o.detach(), *torch.autograd.grad(o, given, do)]


def of_heads(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The checked heads of streams [1, T, H, ...] and parameters [H, ...]; heads are independent."""
    return [x.detach()[:, :, CHECKED_HEADS] if x.shape[0] == 1 else x.detach()[CHECKED_HEADS] for x in tensors]


def errors(function: Function, given: list[torch.Tensor], do: torch.Tensor, truth: list[torch.Tensor]) -> list[float]:
    results = of_heads(with_gradients(function, given, do))
    return [measure.relative_error(x, t) for x, t in zip(results, truth, strict=True)]


def verified(candidates: dict[str, Function]) -> tuple[dict[str, Function], float, float]:
    """Candidates that pass, and our error over torch's: of the output, and the worst over the gradients too."""
    given, do = inputs(VERIFIED), torch.randn(1, VERIFIED, H, K, device="cuda", dtype=torch.bfloat16)
    few = [x.requires_grad_() for x in of_heads(given)]
    exact = [x.detach().double().requires_grad_() for x in few]
    (few_do,) = of_heads([do])
    truth = with_gradients(definition, exact, few_do.double())
    plain = [
        measure.relative_error(x, t) for x, t in zip(with_gradients(definition, few, few_do), truth, strict=True)
    ]  # fmt: skip
    passed: dict[str, Function] = {}
    for name, function in candidates.items():
        try:
            found = errors(function, given, do, truth)
        except Exception as error:
            if name == "ours":
                raise
            print(f"KDA chunk: {name} is left out, it does not run: {one_line(error)}")
            continue
        shown(name, found)
        if name == "ours":
            # The parameters and their gradients are float32, and the definition's are nearly exact.
            ratios = [e / p for e, p, x in zip(found, plain, [do, *given], strict=True) if x.dtype == do.dtype]
        elif not max(found[:4]) <= PEERS:
            print(f"KDA chunk: {name} is left out, relative error {max(found[:4]):.1e}")
            continue
        passed[name] = function
    shown("torch definition", plain)
    if not max(ratios) <= OURS:
        raise SystemExit(f"KDA chunk: error {max(ratios):.2f} times that of torch")
    return passed, ratios[0], max(ratios)


def chunk_rows(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    candidates, o_ratio, worst_ratio = verified({"ours": ours, **fla_candidates(), **nemo_candidates()})
    for T in LENGTHS[:2] if quick else LENGTHS:
        given, do = inputs(T), torch.randn(1, T, H, K, device="cuda", dtype=torch.bfloat16)

        def forward(function: Function, given=given) -> torch.Tensor:
            with torch.no_grad():
                return function(*given)

        def both(function: Function, given=given, do=do) -> list[torch.Tensor]:
            return with_gradients(function, given, do)

        floors = {"fwd": measure.floor_ms(0, FORWARD_STREAMS * 2 * T * H * K), "fwd+bwd": BOTH_MS_PER_TOKEN * T}
        for name, work, ratio in (("fwd", forward, o_ratio), ("fwd+bwd", both, worst_ratio)):
            timed = {key: (lambda work=work, function=function: work(function)) for key, function in candidates.items()}
            times = measure.samples_ms(timed, 4 if quick else 12)
            if T <= LONGEST_DEFINITION:
                slow = {"torch": lambda work=work: work(definition)}
                times |= measure.samples_ms(slow, 1 if quick else 3, warmup=1)
                torch.cuda.empty_cache()
            row = measure.row(f"KDA {name}", f"T={T}", times, floors[name], measure.peak_gib(timed["ours"]), ratio)
            public = {key: row["peers_ms"][key] for key in candidates if key != "ours"}
            peaks = {key: measure.peak_gib(timed[key]) for key in public}
            for key, ms in sorted(public.items(), key=lambda item: item[1]):
                ratio_text = f"{ms / row['ours_ms']:.2f} x ours"
                print(f"    {key:36s} {ms:8.3f} ms = {ratio_text} | {peaks[key]:.2f} GiB", flush=True)
            yield row | {"peers_peak_gib": peaks}
        del given, do
        torch.cuda.empty_cache()


OPS: dict[str, Callable[[bool], Iterable[dict[str, Any]]]] = {
    "chunk": chunk_rows,
    "conv": conv.rows,
    "decode": decode.rows,
}


if __name__ == "__main__":
    measure.main(__doc__, COMMAND, OPS)
