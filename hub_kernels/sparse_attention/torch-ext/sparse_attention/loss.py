"""The indexer's loss: how far its scores' softmax over the selected keys is from a target distribution.

Legend: T queries, S keys, I index heads, K width of an index head, k selected keys of a query; R queries whose
gradients of scores exist at a time, densely, B parts of them.
"""

import torch
import triton

from ._ops import op
from .index import check_indexer, check_place
from .loss_kernels import key_gradients_kernel, loss_kernel, query_gradients_kernel

# Bytes of the dense gradients of scores that exist at a time; partial sums take half as many.
DENSE_BYTES = 128 * 2**20
# Queries of a part.
PART = 256
LOSS_TILES = {"BS": 64, "num_warps": 4, "num_stages": 3}
QUERY_TILES = {"BS": 64, "num_warps": 4, "num_stages": 3}
KEY_TILES = {"BS": 128, "num_warps": 4, "num_stages": 3}
# Operands of fp32 take twice the memory, and twice again in two halves.
EXACT_TILES = {"BS": 64, "num_warps": 8, "num_stages": 1}


def _sizes(q_TIK: torch.Tensor) -> dict[str, int | bool]:
    _, heads, K = q_TIK.shape
    exact = q_TIK.dtype == torch.float32 or not q_TIK.is_cuda
    return {"H": heads, "K": K, "BH": max(16, triton.next_power_of_2(heads)), "EXACT": exact}


def _tiles(q_TIK: torch.Tensor, tiles: dict[str, int]) -> dict[str, int]:
    return EXACT_TILES if q_TIK.dtype == torch.float32 else tiles


@torch.library.custom_op(op("indexer_loss"), mutates_args=())
def _indexer_loss(
    q_TIK: torch.Tensor, k_SK: torch.Tensor, weight_TI: torch.Tensor, index_Tk: torch.Tensor, target_Tk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, log-sum-exp of the selected scores, sum of the target."""
    q_TIK, k_SK, weight_TI, index_Tk, target_Tk = (
        x.contiguous() for x in (q_TIK, k_SK, weight_TI, index_Tk, target_Tk)
    )
    T, k = index_Tk.shape
    loss_T, lse_T, total_T = (torch.empty(T, dtype=torch.float32, device=q_TIK.device) for _ in range(3))
    if T:
        with torch.cuda.device_of(q_TIK):
            loss_kernel[(T,)](
                q_TIK,
                k_SK,
                weight_TI,
                index_Tk,
                target_Tk,
                loss_T,
                lse_T,
                total_T,
                k,
                q_TIK.shape[2] ** -0.5,
                **_sizes(q_TIK),
                **_tiles(q_TIK, LOSS_TILES),
            )
    return loss_T, lse_T, total_T


@_indexer_loss.register_fake
def _(q_TIK, k_SK, weight_TI, index_Tk, target_Tk):
    return tuple(target_Tk.new_empty(len(q_TIK)) for _ in range(3))


@torch.library.custom_op(op("indexer_loss_bwd"), mutates_args=())
def _indexer_loss_bwd(
    dloss_T: torch.Tensor,
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    index_Tk: torch.Tensor,
    target_Tk: torch.Tensor,
    lse_T: torch.Tensor,
    total_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, of k in fp32, and of the weights."""
    dloss_T, q_TIK, k_SK, weight_TI, index_Tk, target_Tk = (
        x.contiguous() for x in (dloss_T, q_TIK, k_SK, weight_TI, index_Tk, target_Tk)
    )
    (T, k), (S, K) = index_Tk.shape, k_SK.shape
    fp32 = {"dtype": torch.float32, "device": q_TIK.device}
    dq_TIK, dweight_TI, dk_SK = torch.empty_like(q_TIK), torch.empty_like(weight_TI), torch.zeros(S, K, **fp32)
    rows = max(1, min(T, DENSE_BYTES // (4 * max(S, 1))))
    dscore_RS = torch.empty(rows, S, **fp32)
    low_R, high_R = (torch.empty(rows, dtype=torch.int32, device=q_TIK.device) for _ in range(2))
    partial_BSK = torch.empty(triton.cdiv(rows, PART), S, K, **fp32)
    scale, sizes, key_tiles = K**-0.5, _sizes(q_TIK), _tiles(q_TIK, KEY_TILES)
    with torch.cuda.device_of(q_TIK):
        for query in range(0, T, rows):
            here = min(rows, T - query)
            dscore_RS.zero_()
            query_gradients_kernel[(here,)](
                q_TIK,
                k_SK,
                weight_TI,
                index_Tk,
                target_Tk,
                lse_T,
                total_T,
                dloss_T,
                dq_TIK,
                dweight_TI,
                dscore_RS,
                low_R,
                high_R,
                query,
                k,
                S,
                scale,
                **sizes,
                **_tiles(q_TIK, QUERY_TILES),
            )
            parts = triton.cdiv(here, PART)
            key_gradients_kernel[(triton.cdiv(S, key_tiles["BS"]), parts)](
                q_TIK,
                k_SK,
                weight_TI,
                dscore_RS,
                low_R,
                high_R,
                partial_BSK,
                query,
                here,
                S,
                scale,
                BR=PART,
                **sizes,
                **key_tiles,
            )
            dk_SK += partial_BSK[:parts].sum(0)
    return dq_TIK, dk_SK, dweight_TI


@_indexer_loss_bwd.register_fake
def _(dloss_T, q_TIK, k_SK, weight_TI, index_Tk, target_Tk, lse_T, total_T):
    # Contiguous, whatever the inputs are.
    dk_SK = k_SK.new_empty(k_SK.shape, dtype=torch.float32)
    return q_TIK.new_empty(q_TIK.shape), dk_SK, weight_TI.new_empty(weight_TI.shape)


def _save(ctx, inputs, output):
    _, lse_T, total_T = output
    ctx.mark_non_differentiable(lse_T, total_T)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, lse_T, total_T)


def _backward(ctx, dloss_T, *_):
    if dloss_T is None:
        return None, None, None, None, None
    dq_TIK, dk_SK, dweight_TI = _indexer_loss_bwd(dloss_T, *ctx.saved_tensors)
    return dq_TIK, dk_SK.to(dq_TIK.dtype), dweight_TI, None, None


_indexer_loss.register_autograd(_backward, setup_context=_save)


def check_loss(
    q_TIK: torch.Tensor, k_SK: torch.Tensor, weight_TI: torch.Tensor, index_Tk: torch.Tensor, target_Tk: torch.Tensor
) -> None:
    """ValueError naming the argument whose shape or dtype `indexer_loss` does not take."""
    check_indexer(q_TIK, k_SK, weight_TI)
    if q_TIK.dtype == torch.float16:
        raise ValueError("q_TIK: expected bfloat16 or float32, got float16, whose range gradients of scores leave")
    if index_Tk.dim() != 2 or len(index_Tk) != len(q_TIK) or index_Tk.shape[1] < 1 or index_Tk.dtype != torch.int32:
        raise ValueError(
            f"index_Tk: expected int32 [{len(q_TIK)}, selected keys], got {index_Tk.dtype} {list(index_Tk.shape)}"
        )
    if target_Tk.shape != index_Tk.shape or target_Tk.dtype != torch.float32:
        raise ValueError(
            f"target_Tk: expected float32 {list(index_Tk.shape)}, got {target_Tk.dtype} {list(target_Tk.shape)}"
        )
    check_place("index_Tk", index_Tk, q_TIK.device)
    check_place("target_Tk", target_Tk, q_TIK.device)


def indexer_loss(
    q_TIK: torch.Tensor, k_SK: torch.Tensor, weight_TI: torch.Tensor, index_Tk: torch.Tensor, target_Tk: torch.Tensor
) -> torch.Tensor:
    """KL(p || softmax of the index scores) of every query over its selected keys, fp32 [T] in nats.

    q [T, I, K], k [S, K], weight [T, I] as `index_topk` takes them, q and k in bf16 or fp32; index int32 [T, k] as it
    returns them: ascending, -1 at the end. p is the target fp32 [T, k], not negative, over its sum. A query without
    keys, or whose target is all zeros, has a loss of 0. Gradients to q, k and weight only, the same bits in every run.
    ValueError names an argument.
    """
    check_loss(q_TIK, k_SK, weight_TI, index_Tk, target_Tk)
    return _indexer_loss(q_TIK, k_SK, weight_TI, index_Tk, target_Tk.detach())[0]
