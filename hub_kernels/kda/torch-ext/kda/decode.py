"""One token per sequence: convolutions, gate, recurrent step, norm and output gate in a single launch.

A program owns one head of one sequence. Its state, K x V in fp32, is read once into registers, 16 bytes at a time along
V, and written once; one pass over it gives both products that the step needs, S^T k and S^T q, because
o = S'^T q = (diag(a) S)^T q + (q . k) u for the update S' = diag(a) S + k u^T. A head's channels belong to no other
program, so its convolution inputs and its state are updated in place.

Legend: B sequences, H heads, K key width, V value width, W taps, P channels of a stream (H * K or H * V), N rows of
        the pools that keep states and the last W - 1 inputs of the convolutions.
"""

# Kernels know no starred expressions:
# ruff: noqa: RUF005

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ._ops import op

LOG2_E = tl.constexpr(1.4426950408889634)
L2_EPS = tl.constexpr(1e-6)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (16, 32, 64, 128)
MAX_TAPS = 8


@triton.jit
def _load(p):
    return tl.load(p).to(tl.float32)


@triton.jit
def _step(
    b_q, b_k, b_v, b_S, p_f, p_beta, p_A_log, p_dt_bias, i_bh, i_h, lower_bound, K: tl.constexpr, BOUNDED: tl.constexpr
):
    """One token of the recurrence from raw f and beta logits: (o [V], new state [K, V])."""
    o_k = tl.arange(0, K)
    rate, b_z = tl.exp(_load(p_A_log + i_h)), _load(p_f + i_bh * K + o_k) + _load(p_dt_bias + i_h * K + o_k)
    if BOUNDED:
        b_g = lower_bound * tl.sigmoid(rate * b_z)
    else:
        b_g = -rate * (tl.maximum(b_z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_z))))
    beta = tl.sigmoid(_load(p_beta + i_bh))
    b_q *= tl.rsqrt(tl.sum(b_q * b_q) + L2_EPS) * K**-0.5
    b_k *= tl.rsqrt(tl.sum(b_k * b_k) + L2_EPS)
    b_S *= tl.exp2(LOG2_E * b_g)[:, None]
    b_u = beta * (b_v - tl.sum(b_S * b_k[:, None], axis=0))
    b_o = tl.sum(b_S * b_q[:, None], axis=0) + tl.sum(b_q * b_k) * b_u
    return b_o, b_S + b_k[:, None] * b_u[None, :]


@triton.jit(do_not_specialize=["lower_bound"])
def _step_kernel(
    p_q, p_k, p_v, p_f, p_beta, p_A_log, p_dt_bias, p_old, p_o, p_new, lower_bound,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    o_k, o_v = tl.arange(0, K), tl.arange(0, V)
    o_S = i_bh * K * V + o_k[:, None] * V + o_v[None, :]
    b_S = tl.load(p_old + o_S)
    b_q, b_k, b_v = _load(p_q + i_bh * K + o_k), _load(p_k + i_bh * K + o_k), _load(p_v + i_bh * V + o_v)
    # Loads stay on this side: the compiler would let the state's wait for the norms of q and k.
    tl.debug_barrier()
    b_o, b_S = _step(b_q, b_k, b_v, b_S, p_f, p_beta, p_A_log, p_dt_bias, i_bh, i_bh % H, lower_bound, K, BOUNDED)
    tl.store(p_o + i_bh * V + o_v, b_o.to(p_o.dtype.element_ty))
    tl.store(p_new + o_S, b_S)


@triton.jit
def _inputs(p_x, p_pool, i_bh, i_h, i_n, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """The last W inputs of a head's D channels, the newest last."""
    o_d = tl.arange(0, D)
    rows = ()
    for j in tl.static_range(W - 1):
        rows = rows + (tl.load(p_pool + ((i_n * (W - 1) + j) * H + i_h) * D + o_d),)
    return rows + (tl.load(p_x + i_bh * D + o_d),)


@triton.jit
def _keep(rows, p_pool, i_h, i_n, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    o_d = tl.arange(0, D)
    for j in tl.static_range(W - 1):
        tl.store(p_pool + ((i_n * (W - 1) + j) * H + i_h) * D + o_d, rows[j + 1])


@triton.jit
def _convolved(rows, p_w, i_h, D: tl.constexpr, W: tl.constexpr):
    o_p = i_h * D + tl.arange(0, D)
    b_y = tl.zeros([D], tl.float32)
    for j in tl.static_range(W):
        b_y += tl.load(p_w + o_p * W + j) * rows[j].to(tl.float32)
    return b_y * tl.sigmoid(b_y)


@triton.jit(do_not_specialize=["lower_bound", "eps"])
def _decode_kernel(
    p_x_q, p_x_k, p_x_v, p_w_q, p_w_k, p_w_v, p_pool_q, p_pool_k, p_pool_v, p_f, p_beta, p_A_log, p_dt_bias, p_S,
    p_gate, p_norm, p_slots, p_y, lower_bound, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BOUNDED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    i_h, i_n = i_bh % H, i_bh // H
    if SLOTS:
        i_n = tl.load(p_slots + i_n).to(tl.int64)
    o_v = tl.arange(0, V)
    p_state = p_S + (i_n * H + i_h) * K * V + tl.arange(0, K)[:, None] * V + o_v[None, :]
    b_S = tl.load(p_state)
    q_rows = _inputs(p_x_q, p_pool_q, i_bh, i_h, i_n, H, K, W)
    k_rows = _inputs(p_x_k, p_pool_k, i_bh, i_h, i_n, H, K, W)
    v_rows = _inputs(p_x_v, p_pool_v, i_bh, i_h, i_n, H, V, W)
    b_gate, b_norm = _load(p_gate + i_bh * V + o_v), _load(p_norm + o_v)
    # Loads stay on this side: the compiler would let the state's wait for the norms of q and k.
    tl.debug_barrier()
    b_q, b_k = _convolved(q_rows, p_w_q, i_h, K, W), _convolved(k_rows, p_w_k, i_h, K, W)
    b_v = _convolved(v_rows, p_w_v, i_h, V, W)
    b_o, b_S = _step(b_q, b_k, b_v, b_S, p_f, p_beta, p_A_log, p_dt_bias, i_bh, i_h, lower_bound, K, BOUNDED)
    tl.store(p_state, b_S)
    b_y = b_o * tl.rsqrt(tl.sum(b_o * b_o) / V + eps) * b_norm * tl.sigmoid(b_gate)
    tl.store(p_y + i_bh * V + o_v, b_y.to(p_y.dtype.element_ty))
    # Several warps have read the same kept inputs: none may be replaced before all have.
    tl.debug_barrier()
    _keep(q_rows, p_pool_q, i_h, i_n, H, K, W)
    _keep(k_rows, p_pool_k, i_h, i_n, H, K, W)
    _keep(v_rows, p_pool_v, i_h, i_n, H, V, W)


def _warps(K: int, V: int) -> int:
    """One thread per channel. With more, the compiler would load and gate every channel once per row of threads.

    Two programs of 128 x 128 fit a multiprocessor: one loads its 64 KB while the other computes.
    """
    return max(1, max(K, V) // 32)


@torch.library.custom_op(op("step_kda"), mutates_args=())
def _step_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, K, V = state.shape
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    new = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    if B > 0:
        with torch.cuda.device_of(state):
            _step_kernel[(B * H,)](
                q, k, v, f, beta, A_log, dt_bias, state, o, new, lower_bound or 0.0,
                H=H, K=K, V=V, BOUNDED=lower_bound is not None, num_warps=_warps(K, V),
            )  # fmt: skip
    return o, new


@_step_op.register_fake
def _(q, k, v, f, beta, A_log, dt_bias, state, lower_bound):
    return v.new_empty(v.shape), state.new_empty(state.shape)


def step_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the KDA recurrence: (o [B, H, V] in v's dtype, new state); `state` stays as it is. No gradients.

    q, k, f: [B, H, K], v: [B, H, V], beta: [B, H], each bfloat16, float16 or float32: q and k after their convolutions
    and before the l2 norm, f the raw input of the decay, beta logits. A_log: [H], dt_bias: [H, K]. state: [B, H, K, V]
    float32. K and V are 16, 32, 64 or 128. lower_bound: the gate's bound, or None for the gate without one.
    ValueError names the argument that does not fit. See `reference.py` for the definition.
    """
    B, H, K, V = _check_state("state", state)
    shapes = {"q": (B, H, K), "k": (B, H, K), "v": (B, H, V), "f": (B, H, K), "beta": (B, H)}
    shapes |= {"A_log": (H,), "dt_bias": (H, K)}
    tensors = [q, k, v, f, beta, A_log, dt_bias]
    _check_shapes(shapes, tensors, state.device)
    return _step_op(*(x.contiguous() for x in tensors), state.contiguous(), lower_bound)


@torch.library.custom_op(op("decode_kda"), mutates_args=("pool_q", "pool_k", "pool_v", "state"))
def _decode_op(
    x_q: torch.Tensor,
    x_k: torch.Tensor,
    x_v: torch.Tensor,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    pool_q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    slots: torch.Tensor | None,
    lower_bound: float | None,
    eps: float,
) -> torch.Tensor:
    _, H, K, V = state.shape
    y = torch.empty(x_v.shape, dtype=x_v.dtype, device=x_v.device)
    if len(x_v) > 0:
        with torch.cuda.device_of(state):
            _decode_kernel[(len(x_v) * H,)](
                x_q, x_k, x_v, w_q, w_k, w_v, pool_q, pool_k, pool_v, f, beta, A_log, dt_bias, state, gate,
                norm_weight, slots, y, lower_bound or 0.0, eps,
                H=H, K=K, V=V, W=w_q.shape[1], BOUNDED=lower_bound is not None, SLOTS=slots is not None,
                num_warps=_warps(K, V),
            )  # fmt: skip
    return y


@_decode_op.register_fake
def _(x_q, x_k, x_v, *others):
    return x_v.new_empty(x_v.shape)


def decode_kda(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    conv_states: Sequence[torch.Tensor],
    f: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    lower_bound: float | None,
    eps: float,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of a KDA mixer between its projections: [B, H * V] in x's dtype. No gradients.

    xs: q, k [B, H * K] and v [B, H * V], before their convolutions, in bfloat16, float16 or float32. weights: [P, W]
    float32, one per stream, W from 2 to 8. conv_states: [N, W - 1, P] in x's dtype, one per stream, the last inputs,
    oldest first. f: [B, H, K], beta: [B, H] logits, gate: [B, H, V] before its sigmoid. A_log: [H], dt_bias: [H, K],
    norm_weight: [V]. state: [N, H, K, V] float32. K and V are 16, 32, 64 or 128.
    Sequence b works on row slots[b] of the pools (int32 [B], each row at most once, all inside the pools), without
    `slots` on row b. conv_states and state are updated in place and must be contiguous.
    lower_bound: the decay gate's bound, or None for the gate without one; eps: of the norm.
    ValueError names the argument that does not fit. See `reference.py` for the definition.
    """
    N, H, K, V = _check_state("state", state)
    B, W = len(xs[0]), weights[0].shape[-1]
    if not 2 <= W <= MAX_TAPS:
        raise ValueError(f"weights must have 2 to {MAX_TAPS} taps, got {W}")
    widths = {"q": H * K, "k": H * K, "v": H * V}
    _check_shapes({f"xs ({name})": (B, P) for name, P in widths.items()}, xs, state.device)
    _check_shapes({f"weights ({name})": (P, W) for name, P in widths.items()}, weights, state.device)
    _check_shapes({f"conv_states ({name})": (N, W - 1, P) for name, P in widths.items()}, conv_states, state.device)
    shapes = {"f": (B, H, K), "beta": (B, H), "A_log": (H,), "dt_bias": (H, K), "gate": (B, H, V), "norm_weight": (V,)}
    _check_shapes(shapes, [f, beta, A_log, dt_bias, gate, norm_weight], state.device)
    if any(pool.dtype != xs[0].dtype for pool in [*xs, *conv_states]):
        raise ValueError(f"xs and conv_states must have one dtype, got {[p.dtype for p in [*xs, *conv_states]]}")
    if not all(pool.is_contiguous() for pool in [*conv_states, state]):
        raise ValueError("conv_states and state are updated in place and must be contiguous")
    if slots is None and N != B:
        raise ValueError(f"state has {N} rows for {B} sequences: slots must say which are whose")
    if slots is not None and (slots.shape != (B,) or slots.dtype != torch.int32 or slots.device != state.device):
        raise ValueError(f"slots must be [{B}] int32 on {state.device}, got {_form(slots)}")
    inputs = [x.contiguous() for x in [*xs, *weights]]
    rest = [x.contiguous() for x in (f, beta, A_log, dt_bias)]
    return _decode_op(
        *inputs, *conv_states, *rest, state, gate.contiguous(), norm_weight.contiguous(), slots, lower_bound, eps
    )


def _check_state(name: str, state: torch.Tensor) -> tuple[int, int, int, int]:
    if state.ndim != 4 or state.dtype != torch.float32 or not {*state.shape[2:]} <= {*WIDTHS}:
        raise ValueError(
            f"{name} must be [N, H, K, V] float32 with K and V of {WIDTHS}, got {tuple(state.shape)} {state.dtype}"
        )
    return tuple(state.shape)


def _check_shapes(shapes: dict[str, tuple[int, ...]], tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    if len(tensors) != len(shapes):
        raise ValueError(f"expected {' and '.join(shapes)}, got {len(tensors)} tensors")
    for (name, shape), x in zip(shapes.items(), tensors, strict=True):
        if x.shape != shape or x.dtype not in DTYPES or x.device != device:
            raise ValueError(f"{name} must be {list(shape)} in one of {DTYPES} on {device}, got {_form(x)}")


def _form(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"
