"""One odd shape through the kernels, forward and backward, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python hub_kernels/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python hub_kernels/sanitize.py kda

Without the cache of torch's allocator every tensor is an allocation of its own, so that a read or write beside it is
seen. Lengths are no multiple of a tile, documents are empty, of one token and of more than one chunk, experts have no
row, one row, rows for every size of tile and more than the largest. Names of packages choose among those below.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

for folder in Path(__file__).resolve().parent.glob("*/torch-ext"):
    sys.path.insert(0, str(folder))

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# Triton's interpreter multiplies bfloat16 wrongly.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def draw(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def backward(name: str, *outputs: torch.Tensor) -> None:
    """Gradients of everything the outputs came from; FloatingPointError where an output is not a number."""
    for output in outputs:
        if not output.isfinite().all():
            raise FloatingPointError(f"{name}: an output is not finite")
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
    print(f"{name}: done", flush=True)


def kda() -> None:
    from kda import chunk_kda, short_conv

    cu_seqlens = torch.tensor([0, 0, 1, 66, 66, 131, 133], device=DEVICE)
    T, H, K, documents = 133, 3, 128, 6
    q, k, v, f = (draw(1, T, H, K) for _ in range(4))
    A_log, dt_bias = draw(H, dtype=torch.float32), draw(H, K, dtype=torch.float32)
    initial = draw(documents, H, K, K, dtype=torch.float32)
    options = {"lower_bound": -5.0, "cu_seqlens": cu_seqlens, "initial_state": initial, "output_final_state": True}
    backward("kda", *chunk_kda(q, k, v, f, draw(1, T, H), A_log, dt_bias, **options))
    streams, weights = [draw(T, 72) for _ in range(3)], [draw(72, 4, dtype=torch.float32) for _ in range(3)]
    backward("kda, convolution", *short_conv(streams, weights, cu_seqlens))


def sparse_attention() -> None:
    from sparse_attention import index_topk, sparse_attention

    T, S, N, k = 131, 131, 96, 65
    q, kv = draw(T, N, 576), draw(S, 576)
    last = torch.arange(T, device=DEVICE, dtype=torch.int32)
    first = torch.where(last < 70, 0, 70).int()
    q_I, k_I, weight = (x.detach() for x in (draw(T, 32, 128), draw(S, 128), draw(T, 32, dtype=torch.float32)))
    index = index_topk(q_I, k_I, weight, first, last + 1, k)
    backward("sparse_attention", sparse_attention(q, kv, index, 576**-0.5, 512, draw(N, dtype=torch.float32))[0])


def latent_moe() -> None:
    from latent_moe import ExpertMatrices, LowRank, expert_mlp, sort_slots

    counts, L, F = (0, 1, 15, 129, 170, 200, 300), 192, 320
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None].to(DEVICE)
    rows = sort_slots(ids[torch.randperm(len(ids))].contiguous(), len(counts))

    def matrices(out: int, width: int, rank: int) -> ExpertMatrices:
        weight = torch.randint(0, 256, (len(counts), out, width // 2), dtype=torch.uint8, device=DEVICE)
        scale = torch.randint(0x78, 0x7B, (len(counts), out, width // 32), dtype=torch.uint8, device=DEVICE)
        a, b = draw(len(counts), rank, width, dtype=torch.float32), draw(len(counts), out, rank, dtype=torch.float32)
        return ExpertMatrices(weight, scale, (LowRank(a, b, 1.0),))

    options = {"activation": "situ", "beta": 4.0, "linear_beta": 25.0}
    # a rank of one step of the contraction, and of two
    for rank in (3, 40):
        weights = draw(len(ids), 1, dtype=torch.float32)
        out = expert_mlp(draw(len(ids), L), rows, weights, matrices(2 * F, L, rank), matrices(L, F, rank), **options)
        backward("latent_moe", out)


def residual() -> None:
    from residual import attn_residual, gated_rms_norm

    backward(
        "residual, mixture", attn_residual([draw(67, 200) for _ in range(5)], draw(200, dtype=torch.float32), 1e-5)
    )
    backward(
        "residual, gated norm", gated_rms_norm(draw(67, 3, 72), draw(67, 3, 72), draw(72, dtype=torch.float32), 1e-5)
    )


def linear_cross_entropy() -> None:
    from linear_cross_entropy import linear_cross_entropy

    target = torch.randint(0, 1003, (67,), device=DEVICE)
    backward("linear_cross_entropy", linear_cross_entropy(draw(67, 72), draw(1003, 72).detach(), target))


def low_rank() -> None:
    from low_rank import add_low_rank

    a, b = draw(5, 72, dtype=torch.float32), draw(200, 5, dtype=torch.float32)
    backward("low_rank", add_low_rank(draw(67, 200), draw(67, 72), a, b, 0.5))


PACKAGES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (kda, sparse_attention, latent_moe, residual, linear_cross_entropy, low_rank)
}


if __name__ == "__main__":
    names = sys.argv[1:] or list(PACKAGES)
    if unknown := set(names) - set(PACKAGES):
        print(f"{', '.join(sorted(unknown))}: none of {', '.join(PACKAGES)}", file=sys.stderr)
        sys.exit(2)
    torch.manual_seed(0)
    for name in names:
        PACKAGES[name]()
