"""Gate and scores of a chunk for Hopper, in one kernel: what `gate_kernel` and `scores_kernel` write, which are its
definition, for half precision, K = 128 and NARROW decays.

Four warps have a half of 32 tokens at a time, a warp 64 channels of a quarter, a thread 2 channels of its 16 tokens:
sums of decays run within threads. What the products multiply goes to shared memory once, rows of q and k together, and
they run while the next half is worked on. A step is of four tokens of each quarter, so that results leave registers
before the next ones need them. In shared memory rows are [step, q or k, quarter, token of four], columns [step,
quarter, token].

Legend: as in scores.py and prepare.py; S the 4 steps, Q the two quarters of a half, J the 4 tokens of a step and
quarter, R the 64 rows of q and k of a half.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .gate import L2_EPS, LOG2_E, decay_rate
from .scores import LIFT, exp2, once, reciprocal
from .tiles import BC, BQ, BT, chunk_of

# With 168 registers a thread three programs fit a multiprocessor, and as many by shared memory.
LAUNCH = {"num_warps": 4, "maxnreg": 168}
BJ, STEPS = gl.constexpr(4), gl.constexpr(4)
# A step, [Q, J, K].
STEP = gl.constexpr(gl.BlockedLayout([1, 4, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0]))
# All steps, [Q, BQ, K].
HALF = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0]))
# A step of what lies in memory in the order of steps, [Q J, K].
STEP_ROWS = gl.constexpr(gl.BlockedLayout([4, 2], [1, 32], [2, 2], [1, 0]))
TOKENS = gl.constexpr(gl.SliceLayout(2, STEP))
QUARTERS = gl.constexpr(gl.SliceLayout(1, STEP))
CHANNELS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(0, STEP)))
# [R, partial sums of squares]: four rows are one load, and no two of eight threads meet in a bank.
SQUARES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [0, 1], [0, 2], [0, 32]],
        lane_bases=[[4, 0], [8, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
SQUARES_IN_MEMORY = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [0, 1]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
SMALL = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
WIDE_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 8]))
SMALL_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
# Scores [R, BC] on their way out, q above k, tokens in order, and where these are among the products: neighbouring
# threads have neighbouring columns.
SCORES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
PRODUCTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 4], [1, 0], [2, 0], [16, 0]],
        warp_bases=[[32, 0], [4, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)
PRODUCTS_IN_MEMORY = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tf32(x):
    """x so that cutting off its last 13 bits rounds it: see scores.py."""
    return (x.to(gl.int32, bitcast=True) + (1 << 12)).to(gl.float32, bitcast=True)


@triton.jit
def _wide(x):
    """fp32 of 16-bit x, each time from x: while that is kept, it takes half as many registers."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, is_pure=False, pack=2
        )
    else:
        return once(x).to(tl.float32)


@gluon.jit
def _over_tokens(x_K):
    """[1, 1, K]."""
    return gl.expand_dims(gl.expand_dims(x_K, 0), 0)


@gluon.jit
def _places(i: gl.constexpr, STRIDE: gl.constexpr, K: gl.constexpr):
    """Of step i's tokens, STRIDE apart, and channels."""
    o_q, o_j = gl.arange(0, 2, layout=gl.SliceLayout(1, TOKENS)), gl.arange(0, BJ, layout=gl.SliceLayout(0, TOKENS))
    o_t = gl.expand_dims(o_q * (BQ * STRIDE), 1) + gl.expand_dims((BJ * i + o_j) * STRIDE, 0)
    return gl.expand_dims(o_t, 2) + _over_tokens(gl.arange(0, K, layout=CHANNELS))


@gluon.jit
def _exist(i: gl.constexpr, left):
    """Which of step i's tokens, [Q, J, 1]."""
    o_q, o_j = gl.arange(0, 2, layout=gl.SliceLayout(1, TOKENS)), gl.arange(0, BJ, layout=gl.SliceLayout(0, TOKENS))
    return gl.expand_dims(gl.expand_dims(BQ * o_q, 1) + gl.expand_dims(BJ * i + o_j, 0) < left, 2)


@gluon.jit
def _load(p, left, STRIDE: gl.constexpr, K: gl.constexpr, FULL: gl.constexpr):
    """Steps [Q, J, K] as they are, zero behind the end of the document."""
    steps = ()
    for i in gl.static_range(STEPS):
        if FULL:
            steps += (gl.load(p + _places(i, STRIDE, K)),)
        else:
            steps += (gl.load(p + _places(i, STRIDE, K), mask=_exist(i, left), other=0.0),)
    return steps


@gluon.jit
def _store(p, i: gl.constexpr, x, left, K: gl.constexpr, FULL: gl.constexpr):
    """Step i to tokens that follow each other."""
    if FULL:
        gl.store(p + _places(i, K, K), x.to(p.dtype.element_ty))
    else:
        gl.store(p + _places(i, K, K), x.to(p.dtype.element_ty), mask=_exist(i, left))


@gluon.jit
def _columns(x):
    """A step as rows of an operand, [Q J, K]."""
    return gl.reshape(x, [2 * BJ, x.shape[2]])


@gluon.jit
def _rows(x, y):
    """Steps of q and k as rows of an operand, [2 Q J, K]."""
    return gl.reshape(gl.permute(gl.join(x, y), (3, 0, 1, 2)), [4 * BJ, x.shape[2]])


@gluon.jit
def _joined(x):
    """Rows of all steps."""
    y = gl.permute(gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3])), (2, 3, 0, 1))
    return gl.reshape(y, [STEPS * x[0].shape[0], x[0].shape[1]])


@gluon.jit
def _apart(x):
    """The four parts of x [Q, D, 4]."""
    x_02, x_13 = gl.split(gl.reshape(x, [2, x.shape[1], 2, 2]))
    x_0, x_2 = gl.split(x_02)
    x_1, x_3 = gl.split(x_13)
    return x_0, x_1, x_2, x_3


@gluon.jit
def _sums(f, slope, shift_K, bound, left, K: gl.constexpr, FULL: gl.constexpr):
    """Sums of the base-2 log decay from the middle of a half, steps [Q, J, K], and over each quarter, [Q, K].

    bound times the sigmoid, which is 1 / (1 + exp2(slope f + shift)).
    """
    steps = ()
    for i in gl.static_range(STEPS):
        s = reciprocal(1.0 + exp2(_wide(f[i]) * slope + _over_tokens(shift_K)))
        if not FULL:
            s = gl.where(_exist(i, left), s, 0.0)
        steps += (s,)
    # [Q, J, K, S]
    s = gl.join(gl.join(steps[0], steps[2]), gl.join(steps[1], steps[3]))
    s = gl.reshape(gl.permute(gl.reshape(s, [2, BJ, K, STEPS]), (0, 3, 1, 2)), [2, BQ, K])
    s = gl.convert_layout(s, HALF, assert_trivial=True)
    s = gl.reshape(gl.associative_scan(s, 1, _add), [2, STEPS, BJ * K])
    steps = _apart(gl.permute(s, (0, 2, 1)))
    totals_QK = _apart(gl.permute(gl.reshape(steps[3], [2, BJ, K]), (0, 2, 1)))[3]
    totals_QK = gl.convert_layout(totals_QK, QUARTERS, assert_trivial=True) * bound
    # Up to the middle its own quarter's total is missing.
    o_q = gl.arange(0, 2, layout=gl.SliceLayout(1, QUARTERS))
    before_QK = gl.expand_dims(gl.where(gl.expand_dims(o_q, 1) == 0, totals_QK, 0.0), 1)
    c = ()
    for i in gl.static_range(STEPS):
        c += (gl.convert_layout(gl.reshape(steps[i], [2, BJ, K]), STEP, assert_trivial=True) * bound - before_QK,)
    return c, totals_QK


@gluon.jit
def _squares(x, K: gl.constexpr):
    """[Q, J, K / 2]: what a thread has of the squares of a step's tokens."""
    x = _wide(x)
    return gl.sum(gl.reshape(x * x, [2, BJ, K // 2, 2]), 3)


@gluon.jit
def _rstds(q, k, p_q, p_k, place, rstds, left, K: gl.constexpr):
    """1 / sqrt(sum x^2 + eps) of a half's rows to p_q and p_k, and, of q times K^-1/2, to rstds."""
    s = ()
    for i in gl.static_range(STEPS):
        s += (_rows(_squares(q[i], K), _squares(k[i], K)),)
    place.store(_joined(s))
    b_r = gl.rsqrt(gl.sum(place.load(SQUARES), 1) + L2_EPS)
    o_r = gl.arange(0, 2 * BC, layout=gl.SliceLayout(1, SQUARES))
    o_t = o_r // BJ % 2 * BQ + o_r // (4 * BJ) * BJ + o_r % BJ
    of_q = o_r // (2 * BJ) % 2 == 0
    gl.store(p_q + o_t, b_r, mask=of_q & (o_t < left))
    gl.store(p_k + o_t, b_r, mask=(~of_q) & (o_t < left))
    rstds.store(gl.where(of_q, b_r * K**-0.5, b_r))


@gluon.jit
def _unit(x, rstds, i_x: gl.constexpr, i: gl.constexpr):
    """Step i of q (i_x is 0) or k, of unit length."""
    return _wide(x[i]) * gl.expand_dims(rstds.index(2 * i + i_x).load(TOKENS), 2)


@gluon.jit
def _write_scores(attend, keys, place, left, i_c: gl.constexpr, FULL: gl.constexpr, DIAGONAL: gl.constexpr):
    """Products in `place` to attend and keys, whose rows lie BT apart, from column BC i_c on; DIAGONAL: no score of
    later tokens, and of keys none of a token with itself."""
    b_s = gl.reshape(place.load(PRODUCTS), [STEPS, 2, 2, BJ, STEPS, 2, BJ])
    b_s = gl.reshape(gl.permute(b_s, (1, 2, 0, 3, 5, 4, 6)), [2 * BC, BC])
    b_s = gl.convert_layout(b_s, SCORES, assert_trivial=True)
    if DIAGONAL:
        o_r = gl.arange(0, 2 * BC, layout=gl.SliceLayout(1, SCORES))
        o_c = gl.arange(0, BC, layout=gl.SliceLayout(0, SCORES))
        m_s = gl.expand_dims(o_r % BC - o_r // BC, 1) >= gl.expand_dims(o_c, 0)
        b_s = gl.where(m_s, b_s, gl.full_like(b_s, 0.0))
    _write_block(attend, keys, b_s, left, i_c, FULL)


@gluon.jit
def _write_block(attend, keys, b_s, left, i_c: gl.constexpr, FULL: gl.constexpr):
    """b_s [R, BC], q above k, to attend and keys from column BC i_c on."""
    o_r = gl.arange(0, 2 * BC, layout=gl.SliceLayout(1, SCORES))
    o_c = gl.arange(0, BC, layout=gl.SliceLayout(0, SCORES))
    p = gl.expand_dims(gl.where(o_r < BC, attend + o_r * BT, keys + (o_r - BC) * BT), 1)
    p += gl.expand_dims(BC * i_c + o_c, 0)
    if FULL:
        gl.store(p, b_s)
    else:
        gl.store(p, b_s, mask=gl.expand_dims(o_r % BC < left, 1))


@gluon.jit
def _chunk(
    q, k, f, A_log, dt_bias, sums, quarters, q_in, k_in, k_out, attend, keys, decay, q_rstds, k_rstds,
    lower_bound, i_t, i_nh, i_h, length, M, H: gl.constexpr, K: gl.constexpr, BACKWARD: gl.constexpr,
    FULL: gl.constexpr,
):  # fmt: skip
    """All of a chunk; FULL: it has BT tokens."""
    STRIDE: gl.constexpr = H * K
    left = length - BC
    p_in, row = (i_t * H + i_h) * K, i_h * M + i_t
    q, k, f = q + p_in, k + p_in, f + p_in
    q_in, k_in, k_out = q_in + row * K, k_in + row * K, k_out + row * K
    attend, keys = attend + row * BT, keys + row * BT
    q_rstds, k_rstds = q_rstds + row, k_rstds + row

    f_2 = _load(f + BC * STRIDE, left, STRIDE, K, FULL)
    f_1 = _load(f, length, STRIDE, K, FULL)
    q_1 = _load(q, length, STRIDE, K, FULL)
    k_1 = _load(k, length, STRIDE, K, FULL)

    o_k = gl.arange(0, K, layout=CHANNELS)
    slope = decay_rate(A_log, i_h) * -LOG2_E
    shift_K = gl.load(dt_bias + i_h * K + o_k).to(gl.float32) * slope
    bound = lower_bound * LOG2_E
    c_2, totals2_QK = _sums(f_2, slope, shift_K, bound, left, K, FULL)
    c_1, totals1_QK = _sums(f_1, slope, shift_K, bound, length, K, FULL)

    rows = gl.allocate_shared_memory(gl.float32, [2 * BC, K], WIDE)
    columns = gl.allocate_shared_memory(gl.float32, [BC, K], WIDE)
    across_rows = gl.allocate_shared_memory(gl.float16, [2 * BC, K], SMALL)
    across_columns = gl.allocate_shared_memory(gl.float16, [BC, K], SMALL)
    rstds = gl.allocate_shared_memory(gl.float32, [2 * STEPS, 2, BJ], PLAIN_ROWS)
    rstds_R = rstds._reinterpret(gl.float32, [2 * BC], PLAIN)
    decays1 = gl.allocate_shared_memory(gl.float32, [2, K], PLAIN_ROWS)
    decays2 = gl.allocate_shared_memory(gl.float32, [2, K], PLAIN_ROWS)
    # Until the operands are there. Sums of the second half wait in memory: registers are few.
    squares = rows._reinterpret(gl.float32, [2 * BC, K // 2], SQUARES_IN_MEMORY)
    sums_2 = across_rows._reinterpret(gl.float32, [BC, K], PLAIN_ROWS)
    sums_2.store(_joined((_columns(c_2[0]), _columns(c_2[1]), _columns(c_2[2]), _columns(c_2[3]))))

    decays1_QK, decays2_QK = exp2(totals1_QK), exp2(totals2_QK)
    decays1.store(decays1_QK)
    decays2.store(decays2_QK)
    if BACKWARD:
        for i in gl.static_range(STEPS):
            _store(sums + row * K, i, c_1[i], length, K, FULL)
            _store(sums + row * K + BC * K, i, c_2[i], left, K, FULL)
        o_q = gl.arange(0, 2, layout=gl.SliceLayout(1, QUARTERS))
        o_qk = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, QUARTERS)), 0)
        p_quarters = quarters + i_nh * (BT // BQ * K) + (gl.expand_dims(o_q * K, 1) + o_qk)
        gl.store(p_quarters, decays1_QK)
        gl.store(p_quarters + 2 * K, decays2_QK)
    _rstds(q_1, k_1, q_rstds, k_rstds, squares, rstds_R, length, K)
    decays1 = decays1._reinterpret(gl.float32, [2, K], PLAIN)
    decays2 = decays2._reinterpret(gl.float32, [2, K], PLAIN)
    first1, second1 = decays1.index(0).load(CHANNELS), decays1.index(1).load(CHANNELS)
    first2, second2 = decays2.index(0).load(CHANNELS), decays2.index(1).load(CHANNELS)
    total1, total2 = first1 * second1, first2 * second2
    gl.store(decay + i_nh * K + o_k, total1 * total2)

    into, out, end = _over_tokens(first1 * LIFT), _over_tokens(second1), _over_tokens(total2 * LIFT)
    for i in gl.static_range(STEPS):
        b_row = exp2(c_1[i])
        b_k = _unit(k_1, rstds, 1, i)
        x = b_k * reciprocal(b_row)
        columns.slice(2 * BJ * i, 2 * BJ).store(_columns(_tf32(x)))
        x *= out
        across_columns.slice(2 * BJ * i, 2 * BJ).store(_columns(x.to(gl.float16)))
        _store(k_out, i, x * end, length, K, FULL)
        x, y = _unit(q_1, rstds, 0, i) * b_row, b_k * b_row
        rows.slice(4 * BJ * i, 4 * BJ).store(_rows(_tf32(x), _tf32(y)))
        _store(q_in, i, x * into, length, K, FULL)
        _store(k_in, i, y * into, length, K, FULL)
    fence_async_shared()
    zeros = gl.zeros([2 * BC, BC], gl.float32, layout=WIDE_SUMS)
    s_11 = warpgroup_mma(rows, columns.permute((1, 0)), zeros, use_acc=False, is_async=True)

    q_2 = _load(q + BC * STRIDE, left, STRIDE, K, FULL)
    k_2 = _load(k + BC * STRIDE, left, STRIDE, K, FULL)
    s_11 = warpgroup_mma_wait(0, deps=(s_11,))
    # Every warp's products are done before any writes squares and the next operands where theirs were.
    gl.thread_barrier()
    _rstds(q_2, k_2, q_rstds + BC, k_rstds + BC, squares, rstds_R, left, K)
    c_2 = ()
    for i in gl.static_range(STEPS):
        x = gl.reshape(sums_2.slice(2 * BJ * i, 2 * BJ).load(STEP_ROWS), [2, BJ, K])
        c_2 += (gl.convert_layout(x, STEP, assert_trivial=True),)
    # Loaded anew, also for registers.
    start = _over_tokens(decays1.index(0).load(CHANNELS) * decays1.index(1).load(CHANNELS) * LIFT)
    into = _over_tokens(decays2.index(0).load(CHANNELS))
    out = _over_tokens(decays2.index(1).load(CHANNELS) * LIFT)
    for i in gl.static_range(STEPS):
        b_row = exp2(c_2[i])
        b_k = _unit(k_2, rstds, 1, i)
        x = b_k * reciprocal(b_row)
        columns.slice(2 * BJ * i, 2 * BJ).store(_columns(_tf32(x)))
        _store(k_out + BC * K, i, x * out, left, K, FULL)
        x, y = _unit(q_2, rstds, 0, i) * b_row, b_k * b_row
        rows.slice(4 * BJ * i, 4 * BJ).store(_rows(_tf32(x), _tf32(y)))
        x, y = x * into, y * into
        across_rows.slice(4 * BJ * i, 4 * BJ).store(_rows(x.to(gl.float16), y.to(gl.float16)))
        _store(q_in + BC * K, i, x * start, left, K, FULL)
        _store(k_in + BC * K, i, y * start, left, K, FULL)
    fence_async_shared()
    s_22 = warpgroup_mma(rows, columns.permute((1, 0)), zeros, use_acc=False, is_async=True)
    zeros = gl.zeros([2 * BC, BC], gl.float32, layout=SMALL_SUMS)
    s_21 = warpgroup_mma(across_rows, across_columns.permute((1, 0)), zeros, use_acc=False, is_async=True)
    _write_block(attend, keys, gl.zeros([2 * BC, BC], gl.float16, layout=SCORES), length, 1, FULL)
    s_22, s_21 = warpgroup_mma_wait(0, deps=(s_22, s_21))
    # Every warp's products are done before any writes scores where operands were.
    gl.thread_barrier()
    place_11 = rows._reinterpret(gl.float16, [2 * BC, BC], PRODUCTS_IN_MEMORY)
    place_21 = columns._reinterpret(gl.float16, [2 * BC, BC], PRODUCTS_IN_MEMORY)
    place_22 = across_rows._reinterpret(gl.float16, [2 * BC, BC], PRODUCTS_IN_MEMORY)
    place_11.store(s_11.to(gl.float16))
    place_21.store(s_21.to(gl.float16))
    place_22.store(s_22.to(gl.float16))
    _write_scores(attend, keys, place_11, length, 0, FULL, True)
    _write_scores(attend + BC * BT, keys + BC * BT, place_21, left, 0, FULL, False)
    _write_scores(attend + BC * BT, keys + BC * BT, place_22, left, 1, FULL, True)


@gluon.jit(do_not_specialize=["M"])
def gate_and_scores_kernel(
    q, k, f, A_log, dt_bias, chunks, sums, quarters, q_in, k_in, k_out, attend, keys, decay, q_rstds, k_rstds,
    lower_bound, M, H: gl.constexpr, K: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """Of a chunk: what scores_kernel writes, and with BACKWARD what gate_kernel writes."""
    i_nh = gl.program_id(0).to(gl.int64)
    i_h = i_nh % H
    i_t, length = chunk_of(chunks, i_nh // H)
    # Most chunks need no masks.
    if length == BT:
        _chunk(
            q, k, f, A_log, dt_bias, sums, quarters, q_in, k_in, k_out, attend, keys, decay, q_rstds, k_rstds,
            lower_bound, i_t, i_nh, i_h, length, M, H, K, BACKWARD, True,
        )  # fmt: skip
    elif length > 0:
        _chunk(
            q, k, f, A_log, dt_bias, sums, quarters, q_in, k_in, k_out, attend, keys, decay, q_rstds, k_rstds,
            lower_bound, i_t, i_nh, i_h, length, M, H, K, BACKWARD, False,
        )  # fmt: skip
