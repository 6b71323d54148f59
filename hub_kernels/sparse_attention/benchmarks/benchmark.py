"""Sparse latent attention at the released model's sizes: errors, times, memory, and dense attention in the same run.

    python hub_kernels/sparse_attention/benchmarks/benchmark.py                          # writes results/h200.json
    python hub_kernels/sparse_attention/benchmarks/benchmark.py --quick --ops attention  # few repeats, nothing written

Every query selects 2048 earlier keys, a random one of as many runs of equal length, or all where there are fewer.
Beside ours: the definition in torch by gathered keys, a few queries at a time; TileLang's example, if TILELANG_EXAMPLES
names its folder (examples/deepseek_v32 of a checkout), with heads padded to 128; and cuDNN's dense causal attention
with the 192 + 128 columns of expanded heads, which is another function: rows "DSA" compare with it what replaces it,
index and attention. The indexer's own rows, "index" and "loss", are described in index.py.

Legend: T queries and keys, N heads, L columns of a key, V of them values, k selected keys per query.
"""

import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "torch-ext"), str(HERE.parents[2])]

import index  # noqa: E402
import measure  # noqa: E402
import sparse_attention as kernel  # noqa: E402

COMMAND = "python hub_kernels/sparse_attention/benchmarks/benchmark.py"
N, L, V, k = 96, 576, 512, 2048
HEAD, HEAD_VALUES, INDEX_HEADS, INDEX_WIDTH = 192, 128, 64, 128
SCALE = HEAD**-0.5
LENGTHS, LONGEST = (8192, 32768, 131072), 131072
# Queries and keys of the verification; the definition keeps all scores.
VERIFIED, VERIFIED_KEYS = 256, 4096
OURS, PEERS = 2.0, 2e-2
# Queries at a time of the definition by gathered keys, and the longest sequence for which it is timed.
GATHERED, LONGEST_DEFINITION = 64, 8192
# How often what is slow is timed: definition and peers, and everything at the greatest length.
FEW = 2

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def selection(T: int, S: int) -> torch.Tensor:
    """int32 [T, k]: keys that the last T of S positions may see, ascending, -1 behind the last."""
    index = torch.empty(T, k, dtype=torch.int32, device="cuda")
    runs = torch.arange(k + 1, device="cuda")
    for block in torch.arange(T, device="cuda").split(8192):
        seen = (block + S - T + 1)[:, None]
        edge = runs * seen.clamp_min(k) // k
        key = edge[:, :-1] + (torch.rand(len(block), k, device="cuda") * edge.diff(dim=1)).long()
        index[block] = torch.where(key < seen, key, -1).int()
    return index


def ours(q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return kernel.sparse_attention(q, kv, index, SCALE, V)[0]


def masked(q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return kernel.sparse_attention_reference(q, kv, index, SCALE, V)[0]


def gathered(q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The definition without a mask over all keys, for rows that select some."""
    parts = []
    for q_TNL, index_Tk in zip(q.split(GATHERED), index.split(GATHERED), strict=True):
        keys_TkL = kv[index_Tk.clamp_min(0)]
        score_TNk = (q_TNL @ keys_TkL.mT).float() * SCALE
        p_TNk = score_TNk.masked_fill(index_Tk[:, None] < 0, -torch.inf).softmax(-1).to(q.dtype)
        parts.append(p_TNk @ keys_TkL[..., :V])
    return torch.cat(parts)


def tilelang_example() -> dict[str, Function]:
    folder = os.environ.get("TILELANG_EXAMPLES")
    if folder is None:
        print("TileLang is left out: TILELANG_EXAMPLES is not set")
        return {}
    sys.path.insert(0, folder)
    try:
        from sparse_mla_fwd import sparse_mla_fwd_interface
    except (ImportError, OSError) as error:
        print(f"TileLang is left out: {error}")
        return {}

    def run(q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        T = len(q)
        q = F.pad(q, (0, 0, 0, 128 - N))
        # It leaves out what lies behind the query; a key behind the last one has to be readable.
        index = torch.where(index < 0, T, index)
        kv = F.pad(kv, (0, 0, 0, 1))
        return sparse_mla_fwd_interface(q[None], kv[None, :, None], index[None, :, None], sm_scale=SCALE)[0][0, :, :N]

    return {"TileLang, padded to 128": run}


def with_gradients(function: Function, q, kv, index, dout) -> list[torch.Tensor]:
    out = function(q, kv, index)
    return [out.detach(), *torch.autograd.grad(out, (q, kv), dout)]


def verified() -> float:
    """Our worst error over that of the definition in the same dtype: output, gradients of queries and keys."""
    q, kv, dout = draw(VERIFIED, N, L), draw(VERIFIED_KEYS, L), draw(VERIFIED, N, V).detach()
    index = selection(VERIFIED, VERIFIED_KEYS)
    wide = [x.detach().double().requires_grad_() for x in (q, kv)]
    truth = with_gradients(masked, *wide, index, dout.double())
    errors = {
        name: [
            measure.relative_error(x, t)
            for x, t in zip(with_gradients(function, q, kv, index, dout), truth, strict=True)
        ]
        for name, function in (("ours", ours), ("torch", masked))
    }
    for name, found in errors.items():
        print(f"{name:8s}", *(f"{n} {e:.1e}" for n, e in zip(("out", "dq", "dkv"), found, strict=True)), flush=True)
    worst = max(a / b for a, b in zip(errors["ours"], errors["torch"], strict=True))
    if not worst <= OURS:
        raise SystemExit(f"sparse attention: error {worst:.2f} times that of torch")
    return worst


def peers(q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor) -> dict[str, Function]:
    """Those that run and give what ours gives."""
    expected, found = ours(q, kv, index), {}
    for name, function in tilelang_example().items():
        # A public implementation that does not run here is no candidate.
        try:
            error = measure.relative_error(function(q, kv, index), expected)
        except Exception as problem:
            print(f"{name} is left out: {type(problem).__name__}: {str(problem)[:200]}")
            continue
        if error <= PEERS:
            found[name] = function
        else:
            print(f"{name} is left out: it differs from ours by {error:.1e}")
    return found


def floors(pairs: int, T: int, S: int) -> tuple[float, float]:
    """Forward, and forward and backward: two and seven products of all pairs of a query and a selected key; bytes of
    queries, keys, outputs and gradients once each."""
    flops, moved = 2 * pairs * N, 2 * T * N * (L + V) + 2 * S * L + 4 * T * k
    return (
        measure.floor_ms(flops * (L + V), moved),
        measure.floor_ms(flops * (L + V + 3 * L + 2 * V), 3 * moved),
    )


def timed(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Ours often enough, and others a few times."""
    slow = {name: function for name, function in candidates.items() if name != "ours"}
    return measure.samples_ms({"ours": candidates["ours"]}, repeats, 1) | measure.samples_ms(slow, FEW, 1)


def rows_at(T: int, repeats: int, error: float) -> Iterator[dict[str, Any]]:
    q, kv, dout, index = draw(T, N, L), draw(T, L), draw(T, N, V).detach(), selection(T, T)
    candidates = {"ours": ours}
    if T <= LONGEST_DEFINITION:
        candidates["torch"] = gathered
        with torch.no_grad():
            candidates |= peers(q, kv, index)

    def forward(function: Function) -> Callable[[], torch.Tensor]:
        return torch.no_grad()(lambda: function(q, kv, index))

    def both(function: Function) -> Callable[[], list[torch.Tensor]]:
        return lambda: with_gradients(function, q, kv, index, dout)

    functions = (
        {name: forward(function) for name, function in candidates.items()},
        {name: both(function) for name, function in candidates.items() if name in ("ours", "torch")},
    )
    names = "sparse attention fwd", "sparse attention fwd+bwd"
    for op, run, floor in zip(names, functions, floors(int((index >= 0).sum()), T, T), strict=True):
        peak = measure.peak_gib(run["ours"])
        yield measure.row(op, f"T={T}, top-{k}, {N} heads", timed(run, repeats), floor, peak, error)


def attention_rows(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    error = verified()
    for T in LENGTHS[:1] if quick else LENGTHS:
        yield from rows_at(T, FEW if quick or T == LONGEST else 12, error)
        torch.cuda.empty_cache()


def dense(T: int) -> Callable[[], list[torch.Tensor]]:
    """cuDNN's causal attention with expanded heads, forward and backward."""
    q, keys, values = draw(1, N, T, HEAD), draw(1, N, T, HEAD), draw(1, N, T, HEAD_VALUES)
    dout = draw(1, N, T, HEAD_VALUES).detach()

    def run() -> list[torch.Tensor]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=SCALE)
        return [out, *torch.autograd.grad(out, (q, keys, values), dout)]

    return run


def dsa(T: int) -> Callable[[], list[torch.Tensor]]:
    """Choice of the keys, attention over them, and backward."""
    q, kv, dout = draw(T, N, L), draw(T, L), draw(T, N, V).detach()
    q_index, k_index = draw(T, INDEX_HEADS, INDEX_WIDTH).detach(), draw(T, INDEX_WIDTH).detach()
    weight = torch.randn(T, INDEX_HEADS, device="cuda")
    first, end = torch.zeros(T, dtype=torch.int32, device="cuda"), torch.arange(1, T + 1, device="cuda").int()

    def run() -> list[torch.Tensor]:
        index = kernel.index_topk(q_index, k_index, weight, first, end, k)
        return with_gradients(ours, q, kv, index, dout)

    return run


def dsa_rows(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    peaks = {}
    for T in LENGTHS[:1] if quick else LENGTHS:
        candidates = {"ours": dsa(T), "dense cuDNN": dense(T)}
        times = measure.samples_ms(candidates, FEW if quick or T == LONGEST else 5, 1)
        pairs = sum(min(t + 1, k) for t in range(T))
        index_flops = T * (T + 1) * INDEX_HEADS * INDEX_WIDTH
        floor = floors(pairs, T, T)[1] + measure.floor_ms(index_flops, 0)
        peaks[T] = measure.peak_gib(candidates["ours"])
        row = measure.row("DSA fwd+bwd", f"T={T}, top-{k}, {N} heads", times, floor, peaks[T], None)
        share = row["ours_ms"] / row["peers_ms"]["dense cuDNN"]
        print(f"    {share:.2f} of dense attention's time", flush=True)
        yield row | {"of_dense": share}
        del candidates
        torch.cuda.empty_cache()
    for (T, peak), (later, more) in pairwise(peaks.items()):
        print(f"    peak memory: {(more - peak) / (later - T) * 2**20:.1f} KiB a token from {T} to {later}")


OPS: dict[str, Callable[[bool], Iterator[dict[str, Any]]]] = {
    "index": index.rows,
    "attention": attention_rows,
    "loss": index.loss_rows,
    "dsa": dsa_rows,
}


if __name__ == "__main__":
    measure.main(__doc__, COMMAND, OPS)
