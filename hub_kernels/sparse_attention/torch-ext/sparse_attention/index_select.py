"""Triton kernel: the best keys of every query, one chunk of keys after the other.

A program has a query. It merges the scores of a chunk with the list of what was selected from earlier chunks: it finds
the threshold by counting, all scores in registers, and then writes what reaches it in order, which is that of the
positions. The threshold is one of the scores, so that the result is exact.

Sizes: T queries, C keys of a chunk, k selected keys. Tiles: BK, k up to a power of two; BW keys written at a time.
"""

import torch
import triton
import triton.language as tl

# Scores of a thread while it counts.
COUNTED = 32
# Scores of a thread while it writes: neighbours, so that most of a running sum is its own.
RUN = tl.constexpr(4)
# Of a thread, so that two programs of the largest chunk share a multiprocessor.
REGISTERS = 64
# Steps of the search that interpolate; later ones halve, so that there are never more than 32 of those.
INTERPOLATED = tl.constexpr(12)
# First steps of it that take scores for normal, and how far they go beyond, in standard deviations of a count.
GUESSED, MARGIN = tl.constexpr(2), tl.constexpr(1.5)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _mark(x):
    """An integer in the order of the floats, which has another for each of them; both zeros are the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(mark):
    """The float of a mark."""
    bits = mark.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _reached(b_x, b_list, value, FIRST: tl.constexpr):
    """How many scores are at least `value`."""
    n = tl.sum((b_x >= value).to(tl.int32))
    if not FIRST:
        n += tl.sum((b_list >= value).to(tl.int32))
    return n


@triton.jit
def _normal_guess(b_x, here, seen, k):
    """(value, slope) were scores normal: k of the `seen` keys would reach the value, and `slope` fewer per unit above.

    b_x: scores of the last `here` of these keys, 0 where there is none.
    """
    mean = tl.sum(b_x) / here
    deviation = tl.sqrt(tl.maximum(tl.sum(b_x * b_x) / here - mean * mean, 1e-30))
    share = k / seen
    # Quantile of the normal distribution, right to 4.5e-4: Abramowitz and Stegun, 26.2.23.
    t = tl.sqrt(-2.0 * tl.log(tl.minimum(share, 1.0 - share)))
    z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    slope = seen * 0.3989423 * tl.exp(-0.5 * z * z) / deviation
    return mean + tl.where(share < 0.5, z, -z) * deviation, slope


@triton.jit
def _threshold(b_x, b_list, n, k, here, seen, FIRST: tl.constexpr):
    """(value, how many of the n scores reach it): k do, or more than k do and fewer reach the next higher float.

    A score is a sum over heads, and nearly normal: the first counts are where k of the `seen` keys would be if it were,
    by the scores of the last `here` of them, and a little beyond what that count says, so that k are in between.
    Then, between a value that more reach and one that fewer reach, count at the place where a straight line would have
    k; what is known of an end that stays is halved each time (the Illinois rule), so that both ends move.
    """
    b_known = tl.where(b_x > NOTHING, b_x, 0.0)
    guess, slope = _normal_guess(b_known, here.to(tl.float32), seen.to(tl.float32), k.to(tl.float32))
    least, most = tl.min(b_known), tl.max(b_known)
    if not FIRST:
        b_known = tl.where(b_list > NOTHING, b_list, 0.0)
        least, most = tl.minimum(least, tl.min(b_known)), tl.maximum(most, tl.max(b_known))
    low, high = _mark(least), _mark(most) + 1
    count = n
    over, under = (n - k).to(tl.float32), k.to(tl.float32)
    last, step = n * 0, n * 0
    while high - low > 1:
        v_low, v_high = _value(low), _value(high)
        line = v_low + (v_high - v_low) * (over / (over + under))
        mark = tl.where(step < INTERPOLATED, _mark(tl.where(step < GUESSED, guess, line)), (low + high) // 2)
        mark = tl.minimum(tl.maximum(mark, low + 1), high - 1)
        reached = _reached(b_x, b_list, _value(mark), FIRST)
        more = reached >= k
        missed = (reached - k).to(tl.float32)
        guess += (missed + tl.where(more, MARGIN, -MARGIN) * tl.sqrt(tl.abs(missed) + 1.0)) / slope
        side = tl.where(more, 1, -1)
        same = tl.where(side == last, 0.5, 1.0)
        over, under = (
            tl.where(more, missed, over * same),
            tl.where(more, under * same, -missed),
        )
        low = tl.where(more, mark, low)
        high = tl.where(reached == k, mark + 1, tl.where(more, high, mark))
        count = tl.where(more, reached, count)
        last = side
        step += 1
    return _value(low), count


@triton.jit
def _behind_tied(b_x, b_s, b_list, b_position, value, excess, S, FIRST: tl.constexpr):
    """The position of the first of the last `excess` keys whose score is `value`."""
    low, high = S * 0, S
    while high - low > 1:
        middle = (low + high) // 2
        n = tl.sum(((b_x == value) & (b_s >= middle)).to(tl.int32))
        if not FIRST:
            n += tl.sum(((b_list == value) & (b_position >= middle)).to(tl.int32))
        low = tl.where(n >= excess, middle, low)
        high = tl.where(n >= excess, high, middle)
    return low


@triton.jit
def _chosen(b_x, b_position, value, behind):
    return (b_x > value) | ((b_x == value) & (b_position < behind))


@triton.jit
def _write(index, list_score, b_x, b_position, chosen, written, LAST: tl.constexpr):
    """Append what is chosen of [B, RUN] to what has been written; how much that is then."""
    b_one = chosen.to(tl.int32)
    b_run = tl.sum(b_one, axis=1)
    b_before = written + tl.cumsum(b_run, axis=0) - b_run
    b_place = b_before[:, None] + tl.cumsum(b_one, axis=1) - 1
    tl.store(index + b_place, b_position, mask=chosen)
    if not LAST:
        tl.store(list_score + b_place, b_x, mask=chosen)
    return written + tl.sum(b_run)


@triton.jit(do_not_specialize=["i_0", "start", "S"])
def select_kernel(
    scores,
    first,
    end,
    list_score,
    index,
    i_0,
    start,
    S,
    C: tl.constexpr,
    k: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    low = tl.maximum(tl.load(first + i_0 + i_r) - start, 0)
    high = tl.minimum(tl.load(end + i_0 + i_r) - start, C)
    if low < high:
        scores += i_r * C
        list_score += i_r * k
        index += (i_0 + i_r) * k
        o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
        # Loads are masked in fours, so that they are 16 bytes wide.
        m_4 = (o_c // 4 * 4 + 3 >= low) & (o_c // 4 * 4 < high)
        b_x = tl.load(scores + o_c, mask=m_4, other=0.0)
        b_x = tl.where((o_c >= low) & (o_c < high), b_x, NOTHING)
        n = high - low
        if FIRST:
            b_list, b_position = tl.full([BK], NOTHING, tl.float32), tl.full([BK], -1, tl.int32)
        else:
            b_position = tl.load(index + o_k, mask=o_k < k, other=-1)
            b_list = tl.load(list_score + o_k, mask=b_position >= 0, other=NOTHING)
            n += tl.sum((b_position >= 0).to(tl.int32))
        # What has a score above the value is selected, and what has it before this position.
        value, behind = n.to(tl.float32) * 0.0 + NOTHING, S
        if n > k:
            seen = high + start - tl.load(first + i_0 + i_r)
            value, count = _threshold(b_x, b_list, n, n * 0 + k, high - low, seen, FIRST)
            if count > k:
                behind = _behind_tied(b_x, start + o_c, b_list, b_position, value, count - k, S, FIRST)

        written = n * 0
        if not FIRST:
            # The list is written over: all of it has been read.
            tl.debug_barrier()
            m_k = _chosen(b_list, b_position, value, behind) & (b_position >= 0)
            written = _write(
                index,
                list_score,
                tl.reshape(b_list, [BK // RUN, RUN]),
                tl.reshape(b_position, [BK // RUN, RUN]),
                tl.reshape(m_k, [BK // RUN, RUN]),
                written,
                LAST,
            )
        for i_w in range(low // BW * BW, high, BW):
            o_w = i_w + tl.arange(0, BW // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
            m_w = (o_w >= low) & (o_w < high)
            b_w = tl.load(scores + o_w, mask=o_w < C, other=0.0)
            m_w = _chosen(b_w, start + o_w, value, behind) & m_w
            written = _write(index, list_score, b_w, start + o_w, m_w, written, LAST)


def merge_best(
    scores_RC: torch.Tensor,
    first_T: torch.Tensor,
    end_T: torch.Tensor,
    list_score_Rk: torch.Tensor,
    index_Tk: torch.Tensor,
    query: int,
    start: int,
    keys: int,
) -> None:
    """Merge the chunk of keys from `start` on into the rows of index_Tk, -1 before the first, from `query` on."""
    (R, C), (T, k) = scores_RC.shape, index_Tk.shape
    warps = max(1, min(16, C // (32 * COUNTED)))
    select_kernel[(min(R, T - query),)](
        scores_RC,
        first_T,
        end_T,
        list_score_Rk,
        index_Tk,
        query,
        start,
        keys,
        C=C,
        k=k,
        BK=max(RUN.value, triton.next_power_of_2(k)),
        BW=min(C, 32 * warps * RUN.value),
        FIRST=start == 0,
        LAST=start + C >= keys,
        num_warps=warps,
        maxnreg=REGISTERS,
    )
