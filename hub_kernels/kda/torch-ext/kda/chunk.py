"""Chunked KDA for training and prefill: the operation, its shapes, and its backward, which recomputes from the inputs.

Legend: B batch, T tokens, M = B * T tokens of all documents in order, X documents, N chunks, H heads, K key width,
        V value width.
"""

import torch
import triton

from ._ops import op
from .passes import WIDTHS, Passes
from .tiles import BT

# Earlier versions have no Gluon, or one with other functions.
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6):
    from .hopper import HopperPasses
else:
    HopperPasses = None

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float | None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The KDA recurrence over whole documents: (o [B, T, H, V], final states [X, H, K, V] fp32 or None).

    q, k, f: [B, T, H, K], v: [B, T, H, V], all of one dtype, bfloat16, float16 or float32; q and k are normalised
    here, f is the raw decay input. beta: [B, T, H], logits. A_log: [H]; dt_bias: [H, K]. K and V are 16, 32, 64 or
    128. lower_bound: the gate's bound, negative, or None for the gate without a bound. cu_seqlens: int [X + 1],
    borders of packed documents (B must be 1) from 0 to T, empty documents allowed; without it every row of the batch
    is a document, and of tokens that it leaves out outputs are NaN and gradients zero. initial_state: [X, H, K, V]
    float32. Everything but lower_bound and cu_seqlens has a gradient; nothing but the inputs is kept for it. ValueError
    names the argument that does not fit.

    Products are taken in float16 of scaled rows and in tf32, which is finer than the rounding of bfloat16 outputs;
    with float32 inputs they are taken in float32. See `reference.py` for the definition.
    """
    _check(q, k, v, f, beta, A_log, dt_bias, lower_bound, cu_seqlens, initial_state)
    o, final = _forward(
        q, k, v, f, beta, A_log, dt_bias, cu_seqlens, initial_state, lower_bound, output_final_state
    )  # fmt: skip
    return o, final if output_final_state else None


def _check(q, k, v, f, beta, A_log, dt_bias, lower_bound, cu_seqlens, initial_state) -> None:
    if q.ndim != 4 or q.dtype not in DTYPES or q.shape[-1] not in WIDTHS:
        raise ValueError(f"q must be [B, T, H, K], bfloat16, float16 or float32, K one of {WIDTHS}: {_form(q)}")
    B, T, H, K = q.shape
    if v.ndim != 4 or v.shape[:3] != q.shape[:3] or v.shape[-1] not in WIDTHS:
        raise ValueError(f"v must be [{B}, {T}, {H}, V], V one of {WIDTHS}: {_form(v)}")
    X = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shapes = {
        "k": (k, (B, T, H, K)),
        "f": (f, (B, T, H, K)),
        "beta": (beta, (B, T, H)),
        "A_log": (A_log, (H,)),
        "dt_bias": (dt_bias, (H, K)),
        "initial_state": (initial_state, (X, H, K, v.shape[-1])),
    }
    for name, (x, shape) in shapes.items():
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}: {_form(x)}")
    tensors = {"v": v, **{name: x for name, (x, _) in shapes.items()}, "cu_seqlens": cu_seqlens}
    for name, x in tensors.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be where q is, on {q.device}: on {x.device}")
    for name, x in {"k": k, "v": v, "f": f}.items():
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}: {_form(x)}")
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise ValueError(f"initial_state must be float32: {_form(initial_state)}")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound must be negative, or None for the gate without a bound: {lower_bound}")
    if cu_seqlens is not None and (
        B != 1 or cu_seqlens.ndim != 1 or not len(cu_seqlens) or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(f"cu_seqlens must be int32 or int64 [X + 1], with B = 1: {_form(cu_seqlens)}, B = {B}")
    if T * B >= 2**31:
        raise ValueError(f"q has {T * B} tokens, at most 2**31 - 1 are supported")


def _form(x: torch.Tensor) -> str:
    return f"got {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


@torch.library.custom_op(op("chunk_forward"), mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    lower_bound: float | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, f, beta, A_log, dt_bias, initial_state = _contiguous(q, k, v, f, beta, A_log, dt_bias, initial_state)
    o, final = _outputs(q, v, cu_seqlens, output_final_state)
    if v.numel() == 0:
        return o, _passed_on(final, initial_state)
    with torch.cuda.device_of(q):
        passes = _passes(q, v, cu_seqlens, lower_bound)
        work = passes.prepare(q, k, f, beta, A_log, dt_bias, backward=False)
        passes.forward(work, v, initial_state, final if output_final_state else None, o)
    return o, final


def _passes(q, v, cu_seqlens, lower_bound) -> Passes:
    hopper = HopperPasses is not None and HopperPasses.take(q, v, cu_seqlens)
    return (HopperPasses if hopper else Passes)(q, v, cu_seqlens, lower_bound)


def _contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _outputs(q, v, cu_seqlens, output_final_state):
    """Room for the outputs; tokens that are in no document are not a number, so that no one takes them for results."""
    B, _, H, K = q.shape
    X = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = (X, H, K, v.shape[-1]) if output_final_state else (0,)
    o = q.new_empty(v.shape) if cu_seqlens is None else q.new_full(v.shape, torch.nan)
    return o, q.new_empty(final, dtype=torch.float32)


def _passed_on(state: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    """Without tokens a state stays what it was."""
    if state.dim() == 1 or source is None:
        return state.zero_()
    return state.copy_(source)


@_forward.register_fake
def _(q, k, v, f, beta, A_log, dt_bias, cu_seqlens, initial_state, lower_bound, output_final_state):
    return _outputs(q, v, cu_seqlens, output_final_state)


@torch.library.custom_op(op("chunk_backward"), mutates_args=())
def _backward(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    lower_bound: float | None,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    inputs = _contiguous(q, k, v, f, beta, A_log, dt_bias)
    do, dfinal, initial_state = _contiguous(do, dfinal, initial_state)
    dinitial = q.new_empty((0,) if initial_state is None else initial_state.shape, dtype=torch.float32)
    if v.numel() == 0:
        return *(torch.zeros_like(x) for x in inputs), _passed_on(dinitial, dfinal)
    with torch.cuda.device_of(q):
        grads = _gradients(do, dfinal, *inputs, cu_seqlens, initial_state, dinitial, lower_bound)
    return *grads, dinitial


def _gradients(do, dfinal, q, k, v, f, beta, A_log, dt_bias, cu_seqlens, initial_state, dinitial, lower_bound):
    passes = _passes(q, v, cu_seqlens, lower_bound)
    M, N, H, K, V = passes.M, passes.N, passes.H, passes.K, passes.V
    work = passes.prepare(q, k, f, beta, A_log, dt_bias, backward=True)
    betas = beta.float().sigmoid().view(M, H).t().contiguous()
    do_scale, s_scale, c_scale, ds_scale, dy_scale = (passes.empty(N, H, V) for _ in range(5))
    states, values = passes.empty(N, H, V, K, dtype=passes.work), passes.empty(H, M, V, dtype=passes.work)
    passes.forward(work, v, initial_state, None, None, states, s_scale, values, c_scale)
    work = work._replace(solve=None)
    dstates, dvalues = torch.empty_like(states), torch.empty_like(values)
    passes.backward(
        work, do, betas, dfinal, None if initial_state is None else dinitial,
        do_scale, dstates, ds_scale, dvalues, dy_scale,
    )  # fmt: skip
    work = work._replace(inverse=None)
    dtotal, ratios = passes.empty(N, H, K), passes.empty(N, H, 4)
    dscores = passes.empty(2, H, M, BT.value, dtype=torch.float32 if passes.exact else torch.bfloat16)
    dots = tuple(passes.empty(H, M) for _ in range(3))
    # Tokens that are in no document have no gradient.
    new = torch.empty_like if cu_seqlens is None else torch.zeros_like
    dv, dbeta = new(v), new(beta)
    passes.value_gradients(
        work, do, v, betas, do_scale, states, s_scale, dstates, ds_scale, values, c_scale, dvalues, dy_scale,
        dv, dbeta, dtotal, dscores, dots, ratios,
    )  # fmt: skip
    # Their memory serves the gradients.
    del states, dstates, values, dvalues
    dq, dk, df = new(q), new(k), new(f)
    dA_log, ddt_bias = passes.key_gradients(
        work, q, k, f, A_log, dt_bias, beta, dscores, ratios, dots, dtotal, dq, dk, df
    )  # fmt: skip
    return dq, dk, dv, df, dbeta, dA_log.sum((0, 2)).to(A_log.dtype), ddt_bias.sum(0).to(dt_bias.dtype)


@_backward.register_fake
def _(do, dfinal, q, k, v, f, beta, A_log, dt_bias, cu_seqlens, initial_state, lower_bound):
    dinitial = q.new_empty((0,) if initial_state is None else initial_state.shape, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v, f, beta, A_log, dt_bias)), dinitial


def _setup_context(ctx, inputs, output) -> None:
    *tensors, lower_bound, output_final_state = inputs
    ctx.save_for_backward(*tensors)
    ctx.lower_bound, ctx.output_final_state = lower_bound, output_final_state


def _autograd(ctx, do, dfinal):
    *tensors, cu_seqlens, initial_state = ctx.saved_tensors
    *grads, dinitial = _backward(
        do, dfinal if ctx.output_final_state else None, *tensors, cu_seqlens, initial_state, ctx.lower_bound
    )
    return *grads, None, None if initial_state is None else dinitial, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
