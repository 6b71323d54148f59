"""Attention over selected keys: the operation, its launches, and its backward.

Legend: T queries, N heads, S keys, L columns of a key, V of them values, k selected keys per query, C queries at a
        time.
"""

import logging

import torch
import triton

from ._ops import op
from .backward import add_shares_kernel, delta_kernel, query_gradients_kernel, shares_kernel
from .checks import check_selection, check_sink, check_values
from .forward import probabilities_kernel, values_kernel
from .places import Places
from .tiles import head_tiles

# Launch settings, chosen for 96 heads and keys of 576 columns on an H200.
TILE, COLUMNS, STEP, VALUES = 256, 64, 64, 256
PROBABILITIES, PRODUCT = {"num_warps": 8, "num_stages": 4}, {"num_warps": 8, "num_stages": 3}
SHARES, DELTA, ROWS = {"num_warps": 8, "num_stages": 3}, {"num_warps": 4}, 16
SUM, QUERIES_SUMMED = {"num_warps": 4}, 8
FUSED, FEWEST = {"num_warps": 8}, 128
# Gluon is experimental, and another language in every release of Triton.
GLUON = triton.__version__.startswith("3.6.")
# What one step hands to the next is kept for as many queries as fit in here, bytes.
SCRATCH_BYTES = 3 * 2**29
logging.getLogger(__name__).info(
    "launch settings, fixed on all devices: probabilities %s, products %s, shares %s, sums %s",
    PROBABILITIES, PRODUCT, SHARES, SUM,
)  # fmt: skip


def sparse_attention(
    q_TNL: torch.Tensor,
    kv_SL: torch.Tensor,
    index_Tk: torch.Tensor,
    scale: float,
    value_width: int = 512,
    sink_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every query over its selected keys, which all heads share: (out [T, N, V], lse [T, N] fp32).

    q_TNL, kv_SL: bfloat16, float16 or float32, both alike; a key is all L columns of a row of kv, its value the first
    `value_width`, both multiples of 16. N: 1 to 128. index_Tk: int32 rows of kv, each at most once, -1 for none at
    the end of a row. scale multiplies the logits; sink_N: float32, one more logit per head that has no value and is
    not scaled. lse is the logarithm of the sum of all exponentials, of the sink too. Where no key is selected out is
    zero and lse the sink, or without one minus infinity. Gradients flow from out to q, kv and sink, not from lse;
    each sum is taken in a fixed order. ValueError names the argument that does not fit.

    Absorbed multi-head latent attention with the selection of DeepSeek-V3.2; see `reference.py` for the definition.
    """
    check_selection(q_TNL, kv_SL, index_Tk)
    check_values(value_width, q_TNL.shape[-1])
    check_sink(sink_N, q_TNL.shape[1], q_TNL.device)
    return _forward(q_TNL, kv_SL, index_Tk, sink_N, scale, value_width)


class Launch:
    """Sizes that the kernels share, as keyword arguments, and ranges of queries that go together."""

    def __init__(self, q_TNL: torch.Tensor, index_Tk: torch.Tensor, value_width: int, columns: int, besides: int = 0):
        """columns: what is kept per query and selected key until the next step has read it.

        besides: bytes per query that do not depend on what it selected.
        """
        (self.T, N, L), k = q_TNL.shape, index_Tk.shape[1]
        BN0, BN1 = head_tiles(N)
        BK = min(TILE, max(16, triton.next_power_of_2(k)))
        self.KT, self.k = triton.cdiv(k, BK), k
        self.KP = self.KT * BK
        # The largest power of two that divides the values.
        BC = min(COLUMNS, value_width & -value_width)
        self.BV = min(VALUES, triton.next_power_of_2(value_width))
        self.tiles = ((0, BN0), (BN0, BN1)) if BN1 else ((0, BN0),)
        self.heads = {"BN0": BN0, "BN1": BN1}
        # Float32 is multiplied as such, not as tf32.
        precision = {"PRECISION": "ieee" if q_TNL.dtype == torch.float32 else "tf32"}
        selection = {"N": N, "L": L, "KS": k, "KT": self.KT, "BK": BK}
        self.scores = {**self.heads, **selection, "BC": BC, **precision}
        self.product = {**selection, "BP": min(STEP, BK), **precision}
        C = max(1, SCRATCH_BYTES // (self.KP * columns * q_TNL.element_size() + besides))
        if q_TNL.is_cuda:
            # As many programs for each multiprocessor.
            processors = torch.cuda.get_device_properties(q_TNL.device).multi_processor_count
            C = max(C - C % processors, min(C, processors))
        self.ranges = [slice(i, min(i + C, self.T)) for i in range(0, self.T, C)]
        self.C = min(C, self.T)


def counts(index_Tk: torch.Tensor) -> torch.Tensor:
    """int32 [T]: selected keys of every query."""
    return (index_Tk >= 0).sum(1, dtype=torch.int32)


def _fused(q_TNL: torch.Tensor, value_width: int) -> bool:
    """Whether one kernel makes the forward pass: for the sizes it was written for, and enough queries to fill a GPU."""
    T, N, L = q_TNL.shape
    return (
        GLUON
        and q_TNL.is_cuda
        and torch.cuda.get_device_capability(q_TNL.device)[0] == 9
        and q_TNL.dtype != torch.float32
        and (L, value_width) == (576, 512)
        and N > 32
        and T >= FEWEST
    )


def some_keys(kv_SL: torch.Tensor) -> torch.Tensor:
    """The keys, contiguous; one where there are none, as what nobody selects is multiplied by zero."""
    return kv_SL.contiguous() if len(kv_SL) else kv_SL.new_zeros(1, kv_SL.shape[1])


@torch.library.custom_op(op("forward"), mutates_args=())
def _forward(
    q_TNL: torch.Tensor,
    kv_SL: torch.Tensor,
    index_Tk: torch.Tensor,
    sink_N: torch.Tensor | None,
    scale: float,
    value_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, kv, index = q_TNL.contiguous(), some_keys(kv_SL), index_Tk.contiguous()
    out, lse = _outputs(q, value_width)
    if not q.shape[0]:
        return out, lse
    count, sink = counts(index), None if sink_N is None else sink_N.contiguous()
    # There, maxima are those of scores that have not been scaled.
    if _fused(q, value_width) and scale > 0:
        from .forward_hopper import attention_kernel

        with torch.cuda.device_of(q):
            T, N, L = q.shape
            group = 96 if 64 < N <= 96 else 64
            attention_kernel[(T * triton.cdiv(N, group),)](
                q, kv, index, count, sink, out, lse, scale, N=N, L=L, V=value_width, KS=index.shape[1], GROUP=group,
                HAS_SINK=sink is not None, **FUSED,
            )  # fmt: skip
        return out, lse
    launch = Launch(q, index, value_width, q.shape[1])
    p = q.new_empty(launch.C, launch.KP, q.shape[1])
    maxima, sums = (lse.new_empty(launch.C, launch.KT, q.shape[1]) for _ in range(2))
    with torch.cuda.device_of(q):
        for r in launch.ranges:
            C = r.stop - r.start
            probabilities_kernel[(C * launch.KT,)](
                q[r], kv, index[r], p, maxima, sums, scale, **launch.scores, **PROBABILITIES
            )
            # A tile of heads at a time: for two, ptxas of Triton 3.6 left descriptors of the second one undefined.
            for first, BN in launch.tiles:
                values_kernel[(C * triton.cdiv(value_width, launch.BV),)](
                    p, maxima, sums, kv, index[r], count[r], sink, out[r], lse[r],
                    V=value_width, BV=launch.BV, FIRST=first, BN=BN, HAS_SINK=sink is not None, **launch.product,
                    **PRODUCT,
                )  # fmt: skip
    return out, lse


def _outputs(q_TNL: torch.Tensor, value_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    T, N, _ = q_TNL.shape
    return q_TNL.new_empty(T, N, value_width), q_TNL.new_empty(T, N, dtype=torch.float32)


@_forward.register_fake
def _(q_TNL, kv_SL, index_Tk, sink_N, scale, value_width):
    return _outputs(q_TNL, value_width)


@torch.library.custom_op(op("backward"), mutates_args=())
def _backward(
    dout_TNV: torch.Tensor,
    q_TNL: torch.Tensor,
    kv_SL: torch.Tensor,
    index_Tk: torch.Tensor,
    out_TNV: torch.Tensor,
    lse_TN: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q and kv, and delta [T, N] fp32, the sums of out * dout."""
    q, kv, index, dout = q_TNL.contiguous(), some_keys(kv_SL), index_Tk.contiguous(), dout_TNV.contiguous()
    (T, N, L), S, V = q.shape, kv_SL.shape[0], dout.shape[-1]
    dq, dkv, delta = torch.empty_like(q), lse_TN.new_zeros(S, L), torch.empty_like(lse_TN)
    if not T * S:
        return dq.zero_(), dkv.to(kv.dtype), delta.zero_()
    launch = Launch(q, index, V, N + L, triton.cdiv(S, Places.KEYS_PER_BYTE))
    ds, shares = q.new_empty(launch.C, launch.KP, N), q.new_empty(launch.C * launch.k, L)
    count, places = counts(index), Places(launch.C, launch.k, S, q.device)
    # Columns behind the values, as the tensor cores take them.
    BR = max(16, triton.next_power_of_2(L - V)) if L > V else 0
    with torch.cuda.device_of(q):
        delta_kernel[(triton.cdiv(T * N, ROWS),)](
            out_TNV, dout, delta, T * N, V=V, BR=ROWS, BV=triton.next_power_of_2(V), **DELTA
        )
        for r in launch.ranges:
            C = r.stop - r.start
            places.set(index[r])
            arguments = q[r], dout[r], kv, index[r], places.place, lse_TN[r], delta[r], ds, shares, scale
            if _fused(q, V) and N <= 96:
                from .backward_hopper import shares_kernel as fused_kernel

                fused_kernel[(C,)](*arguments, count[r], V=V, N=N, L=L, KS=launch.k, KP=launch.KP, **FUSED)
            else:
                shares_kernel[(C * launch.KT,)](*arguments, V=V, **launch.scores, **SHARES)
            query_gradients_kernel[(C * triton.cdiv(V, launch.BV),)](
                ds, kv, index[r], count[r], dq[r], V=V, BV=launch.BV, BR=BR, **launch.heads, **launch.product, **PRODUCT
            )
            add_shares_kernel[(S,)](
                shares, places.start, places.end, dkv, L=L, V=V, BQ=QUERIES_SUMMED, BV=triton.next_power_of_2(V),
                BR=BR, **SUM,
            )  # fmt: skip
    return dq, dkv.to(kv.dtype), delta


@_backward.register_fake
def _(dout_TNV, q_TNL, kv_SL, index_Tk, out_TNV, lse_TN, scale):
    # Contiguous, whatever the inputs are.
    return q_TNL.new_empty(q_TNL.shape), kv_SL.new_empty(kv_SL.shape), lse_TN.new_empty(lse_TN.shape)


def _save(ctx, inputs, output) -> None:
    q, kv, index, sink, ctx.scale, _ = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, kv, index, sink, out, lse)


def _autograd(ctx, dout, _):
    q, kv, index, sink, out, lse = ctx.saved_tensors
    dq, dkv, delta = _backward(dout, q, kv, index, out, lse, ctx.scale)
    # Without keys and with a sink of minus infinity there is nothing, and lse is minus infinity too.
    dsink = None if sink is None else -(torch.exp(sink - lse).masked_fill(lse == -torch.inf, 0) * delta).sum(0)
    return dq, dkv, None, dsink, None, None


_forward.register_autograd(_autograd, setup_context=_save)
