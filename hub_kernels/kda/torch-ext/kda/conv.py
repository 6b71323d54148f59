"""Causal depthwise convolution and SiLU of q, k and v: one launch forward, one backward.

A program owns BP neighbouring channels and walks down a tile of tokens with the taps and the last inputs in registers,
so every input is read once (and the W - 1 tokens around a tile once more, from L2). Nothing but the inputs is saved:
the backward walks the same way, recomputes the pre-activation z, and carries the unfinished input gradients along.
Weight gradients leave as one partial sum per tile and are added up in a fixed order.

Legend: M tokens of all documents in order, D documents, P channels of a stream (streams may differ), W taps,
        BP channels of a program, BT tokens of a tile, N tiles, U tokens loaded at a time.
"""

# Kernels know no starred expressions:
# ruff: noqa: RUF005

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ._ops import op

LOG2_E = tl.constexpr(1.4426950408889634)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_STREAMS, MAX_TAPS = 3, 8
WARPS = 4
# Channels of a program and tokens at a time: a thread owns eight channels forward (16-byte loads of bf16), and four
# backward, where it needs more registers. Waves are the programs that an H200 holds at a time (four and three per
# multiprocessor, by their registers); the grid fills whole ones. Constants: sums have the same order on every device.
FORWARD, FORWARD_WAVE = {"BP": 1024, "U": 8}, 528
BACKWARD, BACKWARD_WAVE = {"BP": 512, "U": 8}, 396
# A thread adds up a tile's weight gradient in one fp32 number: longer sums would lose digits.
LONGEST_TILE = 512


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)); the square of rsqrt takes fewer instructions than a division."""
    root = tl.rsqrt(1.0 + tl.exp2(-LOG2_E * x))
    return root * root


@triton.jit
def _select(i_p, x_0, x_1, x_2, P0, P1, BP: tl.constexpr):
    """Of three values, that of the stream which block i_p of channels belongs to."""
    n_0, n_1 = tl.cdiv(P0, BP), tl.cdiv(P1, BP)
    x = x_0
    if i_p >= n_0 + n_1:
        x = x_2
    elif i_p >= n_0:
        x = x_1
    return x


@triton.jit
def _taps(p_w, o_p, m_p, W: tl.constexpr):
    """The W weights of every channel, from rows of W neighbours."""
    o_j = tl.arange(0, 8)
    b_w = tl.load(p_w + o_p[:, None] * W + o_j[None, :], mask=m_p[:, None] & (o_j < W)[None, :], other=0.0)
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.sum(tl.where(o_j[None, :] == j, b_w, 0.0), axis=1),)
    return taps


@triton.jit
def _rows(p_x, t, end, o_p, m_p, stride, U: tl.constexpr):
    """U rows from token t on; zeros before the first token and from `end` on."""
    rows = ()
    for i in tl.static_range(U):
        b_x = tl.load(p_x + (t + i) * stride + o_p, mask=m_p & (t + i >= 0) & (t + i < end), other=0.0)
        rows = rows + (b_x,)
    return rows


@triton.jit
def _wide(rows, U: tl.constexpr):
    wide = ()
    for i in tl.static_range(U):
        wide = wide + (rows[i].to(tl.float32),)
    return wide


@triton.jit
def _convolve(
    taps, window, position, document, p_tail, o_p, m_p, P, W: tl.constexpr, DOCUMENTS: tl.constexpr, TAILS: tl.constexpr
):
    """Pre-activation of a token whose last W inputs are `window`, and the inputs that its taps have seen."""
    seen = ()
    b_z = taps[W - 1] * window[W - 1]
    for j in tl.static_range(W - 1):
        b_x = window[j]
        if DOCUMENTS:
            b_x = tl.where(position >= W - 1 - j, b_x, 0.0)
        if TAILS:
            p_row = p_tail + (document * (W - 1) + position + j) * P
            b_x += tl.load(p_row + o_p, mask=m_p & (position < W - 1 - j), other=0.0).to(tl.float32)
        b_z += taps[j] * b_x
        seen = seen + (b_x,)
    return b_z, seen + (window[W - 1],)


@triton.jit
def _forward_tokens(
    t, window, taps, p_x, p_tail, p_y, p_position, p_document, o_p, m_p, M, P, stride,
    W: tl.constexpr, U: tl.constexpr, DOCUMENTS: tl.constexpr, TAILS: tl.constexpr,
):  # fmt: skip
    """Tokens t to t + U; returns the W - 1 inputs before the next one."""
    rows = _rows(p_x, t, M, o_p, m_p, stride, U)
    for i in tl.static_range(U):
        position, document = 0, 0
        if DOCUMENTS:
            position = tl.load(p_position + t + i, mask=t + i < M, other=0)
            document = tl.load(p_document + t + i, mask=t + i < M, other=0).to(tl.int64)
        window = window + (rows[i].to(tl.float32),)
        b_z, _ = _convolve(taps, window, position, document, p_tail, o_p, m_p, P, W, DOCUMENTS, TAILS)
        window = window[1:]
        b_y = (b_z * _sigmoid(b_z)).to(p_y.dtype.element_ty)
        tl.store(p_y + (t + i) * P + o_p, b_y, mask=m_p & (t + i < M))
    return window


@triton.jit(do_not_specialize=["M", "BT"])
def _forward_kernel(
    p_x0, p_x1, p_x2, p_w0, p_w1, p_w2, p_tail0, p_tail1, p_tail2, p_y0, p_y1, p_y2, p_position, p_document,
    M, BT, P0, P1, P2, stride0, stride1, stride2,
    W: tl.constexpr, BP: tl.constexpr, U: tl.constexpr, DOCUMENTS: tl.constexpr, TAILS: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0)
    p_x = _select(i_p, p_x0, p_x1, p_x2, P0, P1, BP)
    p_w = _select(i_p, p_w0, p_w1, p_w2, P0, P1, BP)
    p_tail = _select(i_p, p_tail0, p_tail1, p_tail2, P0, P1, BP)
    p_y = _select(i_p, p_y0, p_y1, p_y2, P0, P1, BP)
    P = _select(i_p, P0, P1, P2, P0, P1, BP)
    stride = _select(i_p, stride0, stride1, stride2, P0, P1, BP)
    i_p -= _select(i_p, 0, tl.cdiv(P0, BP), tl.cdiv(P0, BP) + tl.cdiv(P1, BP), P0, P1, BP)
    o_p = i_p * BP + tl.arange(0, BP)
    m_p = o_p < P
    first = tl.program_id(1).to(tl.int64) * BT
    taps = _taps(p_w, o_p, m_p, W)
    window = _wide(_rows(p_x, first - (W - 1), M, o_p, m_p, stride, W - 1), W - 1)
    # Whether any of U tokens looks over the start of its document shows at the last one's position.
    reach = 0
    if DOCUMENTS:
        reach = tl.load(p_position + first + U - 1, mask=first + U - 1 < M, other=0)
    for u in range(0, BT, U):
        t = first + u
        if DOCUMENTS:
            alone = reach < U + W - 2
            reach = tl.load(p_position + t + 2 * U - 1, mask=t + 2 * U - 1 < M, other=0)
            if alone:
                for i in range(U):
                    window = _forward_tokens(
                        t + i, window, taps, p_x, p_tail, p_y, p_position, p_document, o_p, m_p, M, P, stride,
                        W, 1, True, TAILS,
                    )  # fmt: skip
            else:
                window = _forward_tokens(
                    t, window, taps, p_x, p_tail, p_y, p_position, p_document, o_p, m_p, M, P, stride,
                    W, U, False, False,
                )  # fmt: skip
        else:
            window = _forward_tokens(
                t, window, taps, p_x, p_tail, p_y, p_position, p_document, o_p, m_p, M, P, stride, W, U, False, False
            )


@triton.jit
def _backward_tokens(
    t, first, end, window, open, sums, taps, p_x, p_tail, p_dy, p_dx, p_dz, p_position, p_document, o_p, m_p,
    M, P, stride, dy_stride,
    W: tl.constexpr, U: tl.constexpr, BP: tl.constexpr, DOCUMENTS: tl.constexpr, TAILS: tl.constexpr,
    TAIL_GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Tokens t to t + U of a tile from `first` to `end`.

    open[j] is what is known of the gradient of the input W - 1 - j tokens before t, sums[j] that of tap j.
    """
    reach = tl.minimum(end + W - 1, M)
    x_rows = _rows(p_x, t, reach, o_p, m_p, stride, U)
    dy_rows = _rows(p_dy, t, reach, o_p, m_p, dy_stride, U)
    for i in tl.static_range(U):
        position, document = 0, 0
        if DOCUMENTS:
            position = tl.load(p_position + t + i, mask=t + i < M, other=0)
            document = tl.load(p_document + t + i, mask=t + i < M, other=0).to(tl.int64)
        window = window + (x_rows[i].to(tl.float32),)
        b_z, seen = _convolve(taps, window, position, document, p_tail, o_p, m_p, P, W, DOCUMENTS, TAILS)
        window = window[1:]
        b_s = _sigmoid(b_z)
        b_dz = dy_rows[i].to(tl.float32) * (b_s + b_z * (b_s - b_s * b_s))
        b_own = tl.where(t + i < end, b_dz, 0.0)
        summed, closer = (), ()
        open = open + (tl.zeros([BP], tl.float32),)
        for j in tl.static_range(W):
            summed = summed + (sums[j] + b_own * seen[j],)
            b_share = b_dz
            if DOCUMENTS:
                b_share = tl.where(position >= W - 1 - j, b_dz, 0.0)
            closer = closer + (open[j] + taps[j] * b_share,)
        sums, open = summed, closer[1:]
        done = t + i - (W - 1)
        b_dx = closer[0].to(p_dx.dtype.element_ty)
        tl.store(p_dx + done * P + o_p, b_dx, mask=m_p & (done >= first) & (done < tl.minimum(end, M)))
        if TAIL_GRADIENTS:
            p_row = p_dz + (document * (W - 1) + position) * P
            tl.store(p_row + o_p, b_dz, mask=m_p & (position < W - 1) & (t + i < tl.minimum(end, M)))
    return window, open, sums


@triton.jit(do_not_specialize=["M", "BT"])
def _backward_kernel(
    p_x0, p_x1, p_x2, p_w0, p_w1, p_w2, p_tail0, p_tail1, p_tail2, p_dy0, p_dy1, p_dy2, p_position, p_document,
    p_dx0, p_dx1, p_dx2, p_dw0, p_dw1, p_dw2, p_dz0, p_dz1, p_dz2,
    M, BT, P0, P1, P2, stride0, stride1, stride2, dy_stride0, dy_stride1, dy_stride2,
    W: tl.constexpr, BP: tl.constexpr, U: tl.constexpr,
    DOCUMENTS: tl.constexpr, TAILS: tl.constexpr, TAIL_GRADIENTS: tl.constexpr,
):  # fmt: skip
    i_p, i_t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_x = _select(i_p, p_x0, p_x1, p_x2, P0, P1, BP)
    p_w = _select(i_p, p_w0, p_w1, p_w2, P0, P1, BP)
    p_tail = _select(i_p, p_tail0, p_tail1, p_tail2, P0, P1, BP)
    p_dy = _select(i_p, p_dy0, p_dy1, p_dy2, P0, P1, BP)
    p_dx = _select(i_p, p_dx0, p_dx1, p_dx2, P0, P1, BP)
    p_dw = _select(i_p, p_dw0, p_dw1, p_dw2, P0, P1, BP)
    p_dz = _select(i_p, p_dz0, p_dz1, p_dz2, P0, P1, BP)
    P = _select(i_p, P0, P1, P2, P0, P1, BP)
    stride = _select(i_p, stride0, stride1, stride2, P0, P1, BP)
    dy_stride = _select(i_p, dy_stride0, dy_stride1, dy_stride2, P0, P1, BP)
    i_p -= _select(i_p, 0, tl.cdiv(P0, BP), tl.cdiv(P0, BP) + tl.cdiv(P1, BP), P0, P1, BP)
    o_p = i_p * BP + tl.arange(0, BP)
    m_p = o_p < P
    first = i_t * BT
    end = first + BT
    taps = _taps(p_w, o_p, m_p, W)
    window = _wide(_rows(p_x, first - (W - 1), M, o_p, m_p, stride, W - 1), W - 1)
    zeros = ()
    for _ in tl.static_range(W):
        zeros = zeros + (tl.zeros([BP], tl.float32),)
    open, sums = zeros[1:], zeros
    # As in the forward.
    reach = 0
    if DOCUMENTS:
        reach = tl.load(p_position + first + U - 1, mask=first + U - 1 < M, other=0)
    # The last W - 1 inputs of a tile are owed gradients by the W - 1 tokens behind it.
    for u in range(0, BT + W - 1, U):
        t = first + u
        if DOCUMENTS:
            alone = reach < U + W - 2
            reach = tl.load(p_position + t + 2 * U - 1, mask=t + 2 * U - 1 < M, other=0)
            if alone:
                for i in range(U):
                    window, open, sums = _backward_tokens(
                        t + i, first, end, window, open, sums, taps, p_x, p_tail, p_dy, p_dx, p_dz, p_position,
                        p_document, o_p, m_p, M, P, stride, dy_stride, W, 1, BP, True, TAILS, TAIL_GRADIENTS,
                    )  # fmt: skip
            else:
                window, open, sums = _backward_tokens(
                    t, first, end, window, open, sums, taps, p_x, p_tail, p_dy, p_dx, p_dz, p_position,
                    p_document, o_p, m_p, M, P, stride, dy_stride, W, U, BP, False, False, False,
                )  # fmt: skip
        else:
            window, open, sums = _backward_tokens(
                t, first, end, window, open, sums, taps, p_x, p_tail, p_dy, p_dx, p_dz, p_position,
                p_document, o_p, m_p, M, P, stride, dy_stride, W, U, BP, False, False, False,
            )  # fmt: skip
    for j in tl.static_range(W):
        tl.store(p_dw + (i_t * W + j) * P + o_p, sums[j], mask=m_p)


def _tiles(M: int, blocks: int, wave: int, U: int) -> tuple[int, int]:
    """Tokens of a tile, and the number of tiles that fills whole waves of programs."""
    longest = triton.cdiv(M, LONGEST_TILE)
    waves = triton.cdiv(blocks * longest, wave)
    BT = triton.cdiv(triton.cdiv(M, waves * wave // blocks), U) * U
    return BT, triton.cdiv(M, BT)


def _three(tensors: Sequence[torch.Tensor], filler: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Arguments for three streams; those of absent streams are never read."""
    tensors = tensors or filler
    return [*tensors, *tensors[:1] * (MAX_STREAMS - len(tensors))]


def _channels(xs: Sequence[torch.Tensor]) -> list[int]:
    return [*(x.shape[1] for x in xs), 0, 0, 0][:MAX_STREAMS]


@torch.library.custom_op(op("short_conv"), mutates_args=())
def _forward(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    position: torch.Tensor | None,
    document: torch.Tensor | None,
    tails: list[torch.Tensor],
) -> list[torch.Tensor]:
    ys = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    M, blocks = len(xs[0]), sum(triton.cdiv(x.shape[1], FORWARD["BP"]) for x in xs)
    if M > 0:
        BT, N = _tiles(M, blocks, FORWARD_WAVE, FORWARD["U"])
        with torch.cuda.device_of(xs[0]):
            _forward_kernel[(blocks, N)](
                *_three(xs, xs), *_three(weights, xs), *_three(tails, xs), *_three(ys, xs), position, document,
                M, BT, *_channels(xs), *(x.stride(0) for x in _three(xs, xs)),
                W=weights[0].shape[1], DOCUMENTS=position is not None, TAILS=len(tails) > 0, **FORWARD,
                num_warps=WARPS,
            )  # fmt: skip
    return ys


@_forward.register_fake
def _(xs, weights, position, document, tails):
    return [x.new_empty(x.shape) for x in xs]


@torch.library.custom_op(op("short_conv_backward"), mutates_args=())
def _backward(
    dys: list[torch.Tensor],
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    position: torch.Tensor | None,
    document: torch.Tensor | None,
    tails: list[torch.Tensor],
    tail_gradients: bool,
) -> list[torch.Tensor]:
    """Gradients of the inputs, of the weights, and of the tails if they are asked for."""
    M, W = len(xs[0]), weights[0].shape[1]
    dxs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    # Gradients of the pre-activations of every document's first tokens, all that tails have a part in.
    dzs = [torch.zeros(tail.shape, dtype=torch.float32, device=tail.device) for tail in tails] if tail_gradients else []
    blocks = sum(triton.cdiv(x.shape[1], BACKWARD["BP"]) for x in xs)
    BT, N = _tiles(M, blocks, BACKWARD_WAVE, BACKWARD["U"]) if M > 0 else (0, 0)
    parts = [torch.empty(N, W, x.shape[1], dtype=torch.float32, device=x.device) for x in xs]
    if M > 0:
        dys = [_rows_contiguous(dy) for dy in dys]
        strides = [x.stride(0) for x in (*_three(xs, xs), *_three(dys, xs))]
        with torch.cuda.device_of(xs[0]):
            _backward_kernel[(blocks, N)](
                *_three(xs, xs), *_three(weights, xs), *_three(tails, xs), *_three(dys, xs), position, document,
                *_three(dxs, xs), *_three(parts, xs), *_three(dzs, xs), M, BT, *_channels(xs), *strides,
                W=W, DOCUMENTS=position is not None, TAILS=len(tails) > 0, TAIL_GRADIENTS=tail_gradients, **BACKWARD,
                num_warps=WARPS,
            )  # fmt: skip
    dws = [part.sum(0).t().contiguous() for part in parts]
    return dxs + dws + [_tail_gradient(*three) for three in zip(dzs, weights, tails, strict=False)]


def _tail_gradient(dz_DRP: torch.Tensor, w_PW: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Row r of a tail is seen by tokens p = 0 .. r of its document, through tap r - p."""
    R = dz_DRP.shape[1]
    rows = [sum(dz_DRP[:, p] * w_PW[:, r - p] for p in range(r + 1)) for r in range(R)]
    return torch.stack(rows, dim=1).to(tail.dtype)


@_backward.register_fake
def _(dys, xs, weights, position, document, tails, tail_gradients):
    changed = [*xs, *weights, *(tails if tail_gradients else [])]
    return [x.new_empty(x.shape) for x in changed]


def _setup_context(ctx, inputs, output):
    xs, weights, position, document, tails = inputs
    ctx.streams, ctx.tailed = len(xs), len(tails) > 0
    ctx.save_for_backward(*xs, *weights, *tails, position, document)


def _autograd(ctx, dys):
    *tensors, position, document = ctx.saved_tensors
    n = ctx.streams
    xs, weights, tails = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
    tail_gradients = any(ctx.needs_input_grad[4]) if ctx.tailed else False
    dys = [torch.zeros_like(x) if dy is None else dy for dy, x in zip(dys, xs, strict=True)]
    gradients = _backward(dys, xs, weights, position, document, tails, tail_gradients)
    dtails = gradients[2 * n :] if tail_gradients else [None] * len(tails)
    return gradients[:n], gradients[n : 2 * n], None, None, dtails


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def short_conv(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor | None = None,
    tails: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """SiLU of the causal depthwise convolution of one to three streams, all in one launch.

    xs: [M, P] each, all of one dtype (bfloat16, float16 or float32) with any P; rows may be strided.
    weights: [P, W] each, float32, W from 2 to 8 the same for all; tap W - 1 multiplies the current token.
    cu_seqlens: [D + 1] int32 or int64, ascending from 0 to M: document d is tokens cu_seqlens[d] to cu_seqlens[d + 1],
    empty ones allowed. None means one document. Taps do not leave a document.
    tails: [D, W - 1, P] each, in x's dtype: the inputs before every document, zeros where None.
    Returns one [M, P] per stream in x's dtype; sums are in fp32. Streams, weights and tails have gradients, the same
    bits in every run. Raises ValueError, naming the argument, for other shapes and dtypes. See `reference.py`.
    """
    _check(xs, weights, cu_seqlens, tails)
    M, device = len(xs[0]), xs[0].device
    position = document = None
    if cu_seqlens is not None:
        # A document starts at each bound: how many of them are at or before a token says which it is in. All bounds,
        # not only the inner ones: compiled, torch's search takes a part of a tensor for one that starts at its first
        # element (seen with torch 2.11).
        token = torch.arange(M, device=device, dtype=cu_seqlens.dtype)
        document = torch.searchsorted(cu_seqlens.contiguous(), token, right=True, out_int32=True) - 1
        position = (token - cu_seqlens[document]).to(torch.int32)
    elif tails is not None:
        position = torch.arange(M, device=device, dtype=torch.int32)
        document = torch.zeros_like(position)
    streams = [_rows_contiguous(x) for x in xs]
    tails = [tail.contiguous() for tail in tails] if tails is not None else []
    return tuple(_forward(streams, [w.contiguous() for w in weights], position, document, tails))


def _check(xs, weights, cu_seqlens, tails) -> None:
    if not 1 <= len(xs) <= MAX_STREAMS:
        raise ValueError(f"xs must be one to {MAX_STREAMS} streams, got {len(xs)}")
    x = xs[0]
    if any(y.ndim != 2 or len(y) != len(x) or y.dtype != x.dtype for y in xs) or x.dtype not in DTYPES:
        found = [(tuple(y.shape), y.dtype) for y in xs]
        raise ValueError(f"xs must be [M, P], with one M and one dtype of {DTYPES}, got {found}")
    if len(weights) != len(xs):
        raise ValueError(f"weights must be as many as xs: {len(xs)}, got {len(weights)}")
    W = weights[0].shape[-1]
    if not 2 <= W <= MAX_TAPS or any(
        w.shape != (y.shape[1], W) or w.dtype != torch.float32 for w, y in zip(weights, xs, strict=True)
    ):
        found = [(tuple(w.shape), w.dtype) for w in weights]
        raise ValueError(f"weights must be [P, W] float32 for each stream, W from 2 to {MAX_TAPS}, got {found}")
    if cu_seqlens is not None and (
        cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(f"cu_seqlens must be [D + 1] int32 or int64, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}")
    D = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    if tails is not None and (
        len(tails) != len(xs)
        or any(tail.shape != (D, W - 1, y.shape[1]) or tail.dtype != x.dtype for tail, y in zip(tails, xs, strict=True))
    ):
        found = [(tuple(tail.shape), tail.dtype) for tail in tails]
        raise ValueError(f"tails must be [{D}, {W - 1}, P] {x.dtype} for each stream, got {found}")
    for name, group in {"xs": xs, "weights": weights, "tails": tails or (), "cu_seqlens": [cu_seqlens]}.items():
        if places := [str(y.device) for y in group if y is not None and y.device != x.device]:
            raise ValueError(f"{name} must be where xs[0] is, on {x.device}, got {places}")
