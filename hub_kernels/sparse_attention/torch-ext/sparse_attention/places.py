"""Places of shares: all shares of a key side by side, in the order of the queries.

A bit for every query and key says whether the one selected the other. The place of a share is where those of its key
start, plus the number of earlier queries whose bit is set. Where a key's shares start is taken from a counter, which
may put keys in another order every time; what is summed for a key, and in which order, is always the same.

Legend: T queries, S keys, KS selected keys per query, W words of 32 queries; BK selected keys of a tile, BS keys, BW
        words.
"""

import torch
import triton
import triton.language as tl

KEYS, WORDS, SELECTED, WARPS = 128, 32, 512, 4
# Elements in front of the bits, of which the first one is the counter: 16 bytes.
ALIGNED = 4


@triton.jit
def _ones(x):
    """How many bits of an int32 are set. Shifts copy the sign, and the masks leave the copies out."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _selected(index, i_t, i_k, KS, BK: tl.constexpr):
    o_k = i_k * BK + tl.arange(0, BK)
    return o_k, tl.load(index + i_t.to(tl.int64) * KS + o_k, mask=o_k < KS, other=-1)


@triton.jit(do_not_specialize=["S"])
def mark_kernel(index, bits, S, KS, BK: tl.constexpr):
    """bits [W, S] of index [T, KS]; they are 0 before."""
    i_t = tl.program_id(0)
    _, b_s = _selected(index, i_t, tl.program_id(1), KS, BK)
    p_word = bits + (i_t // 32).to(tl.int64) * S + b_s
    tl.atomic_or(p_word, tl.full([BK], 1, tl.int32) << (i_t % 32), mask=b_s >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["S", "W"])
def starts_kernel(bits, total, start, end, before, S, W, BS: tl.constexpr, BW: tl.constexpr):
    """Shares start[s] to end[s] are those of key s, and before[w, s] is the place of its first one from word w on."""
    o_s, o_w = tl.program_id(0) * BS + tl.arange(0, BS), tl.arange(0, BW)
    o_ws = o_w.to(tl.int64)[:, None] * S + o_s[None, :]
    b_sum = tl.zeros([BS], tl.int32)
    for i_w in range(0, W, BW):
        m_ws = (i_w + o_w < W)[:, None] & (o_s < S)[None, :]
        b_sum += tl.sum(_ones(tl.load(bits + tl.cast(i_w, tl.int64) * S + o_ws, mask=m_ws, other=0)), 0)
    b_end = tl.cumsum(b_sum, 0) + tl.atomic_add(total, tl.sum(b_sum), sem="relaxed")
    b_place = b_end - b_sum
    tl.store(start + o_s, b_place, mask=o_s < S)
    tl.store(end + o_s, b_end, mask=o_s < S)
    for i_w in range(0, W, BW):
        m_ws = (i_w + o_w < W)[:, None] & (o_s < S)[None, :]
        b_ones = _ones(tl.load(bits + tl.cast(i_w, tl.int64) * S + o_ws, mask=m_ws, other=0))
        b_before = b_place[None, :] + tl.cumsum(b_ones, 0) - b_ones
        tl.store(before + tl.cast(i_w, tl.int64) * S + o_ws, b_before, mask=m_ws)
        b_place += tl.sum(b_ones, 0)


@triton.jit(do_not_specialize=["S"])
def places_kernel(index, bits, before, place, S, KS, BK: tl.constexpr):
    """place [T, KS] of the share of every query and key that it selected."""
    i_t = tl.program_id(0)
    o_k, b_s = _selected(index, i_t, tl.program_id(1), KS, BK)
    o_word = (i_t // 32).to(tl.int64) * S + b_s
    b_earlier = tl.load(bits + o_word, mask=b_s >= 0, other=0) & ~(tl.full([BK], -1, tl.int32) << (i_t % 32))
    b_place = tl.load(before + o_word, mask=b_s >= 0, other=0) + _ones(b_earlier)
    tl.store(place + i_t.to(tl.int64) * KS + o_k, b_place, mask=b_s >= 0)


class Places:
    """Room for the places of some queries' shares, which is used again and again."""

    # Of a query: a bit for each of them, and as much of what is before a word.
    KEYS_PER_BYTE = 4

    def __init__(self, queries: int, k: int, keys: int, device: torch.device):
        self.keys, words = keys, triton.cdiv(queries, 32)
        self.counted = torch.empty(ALIGNED + words * keys, dtype=torch.int32, device=device)
        self.before = torch.empty(words * keys, dtype=torch.int32, device=device)
        self.start, self.end = (torch.empty(keys, dtype=torch.int32, device=device) for _ in range(2))
        self.place = torch.empty(queries, k, dtype=torch.int32, device=device)

    def set(self, index_Tk: torch.Tensor) -> None:
        """place[t, i] of the share of query t for its key i, and start[s] to end[s] of the shares of key s."""
        T, k = index_Tk.shape
        total, bits = self.counted[:1], self.counted[ALIGNED:]
        self.counted.zero_()
        BK = min(SELECTED, triton.next_power_of_2(k))
        grid = T, triton.cdiv(k, BK)
        mark_kernel[grid](index_Tk, bits, self.keys, k, BK=BK, num_warps=WARPS)
        starts_kernel[(triton.cdiv(self.keys, KEYS),)](
            bits, total, self.start, self.end, self.before, self.keys, triton.cdiv(T, 32), BS=KEYS, BW=WORDS,
            num_warps=WARPS,
        )  # fmt: skip
        places_kernel[grid](index_Tk, bits, self.before, self.place, self.keys, k, BK=BK, num_warps=WARPS)
