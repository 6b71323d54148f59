"""Chunked KDA for training and prefill: the operation, its shapes, and its backward, which recomputes from the inputs.

Legend: B batch, T tokens, M = B * T tokens of all documents in order, X documents, N chunks, H heads, K key width,
        V value width.
"""

import logging
from typing import NamedTuple

import torch

from ._ops import op
from .documents import chunk_tables
from .gate import gate_kernel
from .gradients import key_gradients_kernel, value_gradients_kernel
from .prepare import scores_kernel, solve_kernel
from .recurrence import backward_kernel, forward_kernel
from .tiles import BQ, BT

try:
    from . import hopper_recurrence
except ImportError:  # Triton without Gluon.
    hopper_recurrence = None

WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Launch settings, and channels of a step or program of the kernels that take them in parts.
GATE = {"num_warps": 1}
SCORES, SCORE_CHANNELS = {"num_warps": 4, "num_stages": 1}, 64
SOLVE = {"num_warps": 2}
SERIAL, VALUES_AT_A_TIME = {"num_warps": 8, "num_stages": 1}, 128
VALUES = {"num_warps": 4}
KEYS, KEY_CHANNELS = {"num_warps": 2, "num_stages": 1}, 32
logging.getLogger(__name__).info(
    "launch settings, fixed on all devices: gate %s, scores %s, solve %s, serial %s, values %s, keys %s",
    GATE, SCORES, SOLVE, SERIAL, VALUES, KEYS,
)  # fmt: skip
# With decays of at most exp(-5) per token one reference serves 32 tokens: see scores.py.
NARROWEST_BOUND = -5.0


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


class _Chunks(NamedTuple):
    """What the first pass leaves for the others."""

    sums: torch.Tensor
    quarters: torch.Tensor
    q_in: torch.Tensor
    k_in: torch.Tensor
    k_out: torch.Tensor
    attend: torch.Tensor
    keys: torch.Tensor
    decay: torch.Tensor
    q_rstds: torch.Tensor
    k_rstds: torch.Tensor
    solve: torch.Tensor | None
    inverse: torch.Tensor | None


class _Call:
    """Sizes and launch settings shared by the passes of one call."""

    def __init__(self, q, v, cu_seqlens, lower_bound):
        self.B, self.T, self.H, self.K = q.shape
        self.V = v.shape[-1]
        self.M = self.B * self.T
        self.documents, self.chunks = chunk_tables(self.B, self.T, cu_seqlens, q.device)
        self.X, self.N = self.documents.shape[0], self.chunks.shape[0]
        self.exact = q.dtype == torch.float32
        self.work = torch.float32 if self.exact else torch.float16
        self.bounded, self.lower_bound = lower_bound is not None, lower_bound or 0.0
        self.narrow = self.bounded and lower_bound >= NARROWEST_BOUND
        self.hopper = hopper_recurrence is not None and hopper_recurrence.supported(q, v, self.N)
        # Exact products hold their operands in registers: small tiles.
        self.BV = 16 if self.exact else min(self.V, VALUES_AT_A_TIME)

    def empty(self, q, *shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=q.device)

    def channels(self, most: int) -> int:
        """Of a step or program; exact products and decays without one reference take more registers."""
        return min(self.K, most if self.narrow and not self.exact else 16)

    def gate(self, f, A_log, dt_bias):
        sums = self.empty(f, self.H, self.M, self.K)
        quarters = self.empty(f, self.N, self.H, BT.value // BQ.value, self.K)
        gate_kernel[(self.N * self.H,)](
            f, A_log, dt_bias, self.chunks, sums, quarters, self.lower_bound,
            self.M, self.H, self.K, BOUNDED=self.bounded, NARROW=self.narrow, **GATE,
        )  # fmt: skip
        return sums, quarters

    def prepare(self, q, k, f, beta, A_log, dt_bias, backward: bool) -> _Chunks:
        M, N, H, K = self.M, self.N, self.H, self.K
        sums, quarters = self.gate(f, A_log, dt_bias)
        q_in, k_in, k_out = (self.empty(q, H, M, K, dtype=self.work) for _ in range(3))
        attend, keys = (self.empty(q, H, M, BT.value, dtype=self.work) for _ in range(2))
        decay = self.empty(q, N, H, K)
        q_rstds, k_rstds = self.empty(q, H, M), self.empty(q, H, M)
        scores_kernel[(N * H,)](
            q, k, sums, quarters, self.chunks, q_in, k_in, k_out, attend, keys, decay, q_rstds, k_rstds,
            M, H, K, self.channels(SCORE_CHANNELS), NARROW=self.narrow, EXACT=self.exact, **SCORES,
        )  # fmt: skip
        solve, inverse = torch.empty_like(keys), torch.empty_like(keys) if backward else None
        solve_kernel[(N * H,)](
            beta, self.chunks, keys, solve, inverse, M, H, BACKWARD=backward, EXACT=self.exact, **SOLVE
        )
        return _Chunks(sums, quarters, q_in, k_in, k_out, attend, keys, decay, q_rstds, k_rstds, solve, inverse)

    def run(self, work: _Chunks, v, initial, final, o, states=None, states_scale=None, values=None, values_scale=None):
        if self.hopper:
            rows, K, V, H = hopper_recurrence.rows, self.K, self.V, self.H
            backward = states is not None
            hopper_recurrence.forward_kernel[(self.X * H,)](
                rows(v, H * V), rows(work.k_in, K), rows(work.solve, BT.value), rows(work.k_out, K),
                None if backward else rows(work.q_in, K), None if backward else rows(work.attend, BT.value),
                work.decay, self.documents, initial, final, o,
                rows(states, K, V) if backward else None, states_scale, values, values_scale,
                self.M, H, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None, BACKWARD=backward,
                num_warps=hopper_recurrence.WARPS.value,
            )  # fmt: skip
            return
        forward_kernel[(self.X * self.H * self.V // self.BV,)](
            work.q_in, work.k_in, work.k_out, v, work.solve, work.attend, work.decay, self.documents,
            initial, final, o, states, states_scale, values, values_scale,
            self.M, self.H, self.K, self.V, self.BV, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
            BACKWARD=states is not None, EXACT=self.exact, **SERIAL,
        )  # fmt: skip

    def run_back(
        self, work: _Chunks, do, beta, dfinal, dinitial, do_scale, dstates, dstates_scale, dvalues, dvalues_scale
    ):
        has = {"HAS_INITIAL": dinitial is not None, "HAS_FINAL": dfinal is not None}
        if self.hopper:
            rows, K, V, H = hopper_recurrence.rows, self.K, self.V, self.H
            hopper_recurrence.backward_kernel[(self.X * H,)](
                rows(do, H * V), rows(work.attend, BT.value), rows(work.k_out, K), rows(work.q_in, K),
                rows(work.inverse, BT.value), rows(work.k_in, K), beta, work.decay, self.documents, dfinal, dinitial,
                do_scale, rows(dstates, K, V), dstates_scale, dvalues, dvalues_scale, self.M, H, **has,
                num_warps=hopper_recurrence.WARPS.value,
            )  # fmt: skip
            return
        backward_kernel[(self.X * self.H * self.V // self.BV,)](
            do, work.q_in, work.k_in, work.k_out, work.inverse, beta, work.attend, work.decay, self.documents,
            dfinal, dinitial, do_scale, dstates, dstates_scale, dvalues, dvalues_scale,
            self.M, self.H, self.K, self.V, self.BV, **has, EXACT=self.exact, **SERIAL,
        )  # fmt: skip


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
        call = _Call(q, v, cu_seqlens, lower_bound)
        work = call.prepare(q, k, f, beta, A_log, dt_bias, backward=False)
        call.run(work, v, initial_state, final if output_final_state else None, o)
    return o, final


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
    call = _Call(q, v, cu_seqlens, lower_bound)
    M, N, H, K, V = call.M, call.N, call.H, call.K, call.V
    work = call.prepare(q, k, f, beta, A_log, dt_bias, backward=True)
    do_scale, s_scale, c_scale, ds_scale, dy_scale = (call.empty(q, N, H, V) for _ in range(5))
    states = call.empty(q, N, H, V, K, dtype=call.work)
    values = call.empty(q, H, M, V, dtype=call.work)
    call.run(work, v, initial_state, None, None, states, s_scale, values, c_scale)
    work = work._replace(solve=None)
    dstates, dvalues = torch.empty_like(states), torch.empty_like(values)
    betas = beta.float().sigmoid().view(M, H).t().contiguous()
    call.run_back(
        work,
        do,
        betas,
        dfinal,
        dinitial if initial_state is not None else None,
        do_scale,
        dstates,
        ds_scale,
        dvalues,
        dy_scale,
    )
    work = work._replace(inverse=None)
    dtotal = call.empty(q, N, H, K)
    dscores = call.empty(q, 2, H, M, BT.value, dtype=torch.float32 if call.exact else torch.bfloat16)
    own_scores, q_dots, k_dots = (call.empty(q, H, M) for _ in range(3))
    ratios = call.empty(q, N, H, 4)
    # Tokens that are in no document have no gradient.
    new = torch.empty_like if cu_seqlens is None else torch.zeros_like
    dv, dbeta = new(v), new(beta)
    value_gradients_kernel[(N * H,)](
        do, v, beta, call.chunks, work.q_in, work.k_in, work.k_out, work.attend, work.keys, work.decay,
        do_scale, states, s_scale, dstates, ds_scale, values, c_scale, dvalues, dy_scale,
        dv, dbeta, dtotal, dscores, own_scores, q_dots, k_dots, ratios, M, H, K, V, EXACT=call.exact, **VALUES,
    )  # fmt: skip
    # Their memory serves the gradients.
    del states, dstates, values, dvalues
    dq, dk, df = new(q), new(k), new(f)
    BK = call.channels(KEY_CHANNELS)
    ddt_bias, dA_log = call.empty(q, N, H, K), call.empty(q, N, H, K // BK)
    key_gradients_kernel[(N * H * K // BK,)](
        q, k, f, work.sums, work.quarters, A_log, dt_bias, work.q_in, work.k_in, work.k_out, dscores, beta,
        call.chunks, ratios, work.q_rstds, work.k_rstds,
        own_scores, q_dots, k_dots, dtotal, dq, dk, df, ddt_bias, dA_log, call.lower_bound,
        M, H, K, BK, BOUNDED=call.bounded, NARROW=call.narrow, EXACT=call.exact, **KEYS,
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
