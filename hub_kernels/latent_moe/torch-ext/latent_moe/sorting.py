"""Slots sorted by expert, without a sort: every token chooses an expert at most once, so counting bits is enough.

A block of 32 tokens has a word for every expert; bit j says that token j of the block chose it. The rank of a token at
its expert is the number of bits in the words of earlier blocks and below its own. Three launches: words, the bits
before every block, rows. Setting bits is the only atomic operation, and its order cannot show.

Legend: T tokens, E experts, S slots per token, N blocks of tokens, R = T * S rows. BE experts, BN blocks and BR slots
        of a program.
"""

import torch
import triton
import triton.language as tl

from ._ops import op
from .route_reference import Rows

BLOCK = 32
_BLOCK = tl.constexpr(BLOCK)
# Columns and blocks of tokens that one program of `count_kernel` counts at a time: a sector of 32 bytes of each row.
COUNTED_EXPERTS, COUNTED_BLOCKS = 8, 256


@triton.jit
def _ones(word):
    """How many bits of each uint32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def clear_words(words, i_n, E: tl.constexpr, BE: tl.constexpr):
    """Zero the words of block i_n; the program may set bits afterwards."""
    o_e = tl.arange(0, BE)
    tl.store(words + i_n * E + o_e, 0, mask=o_e < E)
    # The bits are set by other threads than the zeros.
    tl.debug_barrier()


@triton.jit
def set_bits(words, i_n, b_e, b_j, m, E: tl.constexpr):
    """Token b_j of block i_n chose expert b_e, where m."""
    b_bit = (tl.full(b_e.shape, 1, tl.uint32) << b_j.to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(words + i_n * E + b_e, b_bit, mask=m, sem="relaxed")


@triton.jit(do_not_specialize=["T"])
def mark_kernel(ids, words, T, E: tl.constexpr, S: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr):
    """The words of a block of tokens."""
    i_n = tl.program_id(0).to(tl.int64)
    clear_words(words, i_n, E, BE)
    o_r = tl.arange(0, BR)
    b_j = o_r // S
    m_r = (b_j < _BLOCK) & (i_n * _BLOCK + b_j < T)
    b_e = tl.load(ids + i_n * _BLOCK * S + o_r, mask=m_r, other=-1)
    set_bits(words, i_n, b_e, b_j, m_r & (b_e >= 0) & (b_e < E), E)


@triton.jit(do_not_specialize=["N"])
def count_kernel(words, before, load, N, E: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr):
    """How often each expert was chosen, in all and before every block of tokens."""
    o_e = tl.program_id(0) * BE + tl.arange(0, BE)
    b_sum = tl.zeros([BE], tl.int32)
    for i_n in range(0, N, BN):
        o_n = i_n + tl.arange(0, BN)
        o_w = o_n.to(tl.int64)[:, None] * E + o_e[None, :]
        m_w = (o_n < N)[:, None] & (o_e < E)[None, :]
        b_c = _ones(tl.load(words + o_w, mask=m_w, other=0).to(tl.uint32, bitcast=True))
        tl.store(before + o_w, b_sum[None, :] + tl.cumsum(b_c, axis=0) - b_c, mask=m_w)
        b_sum += tl.sum(b_c, axis=0)
    tl.store(load + o_e, b_sum.to(tl.int64), mask=o_e < E)


@triton.jit(do_not_specialize=["T"])
def place_kernel(
    ids,
    words,
    before,
    load,
    offset,
    slot_of_row,
    row_of_slot,
    dropped,
    T,
    FACTOR: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    BE: tl.constexpr,
    BR: tl.constexpr,
):
    """The rows of a block of tokens."""
    i_n = tl.program_id(0).to(tl.int64)
    # Every program adds up the loads itself: 4 KB from cache, instead of a launch.
    o_e = tl.arange(0, BE)
    b_load = tl.load(load + o_e, mask=o_e < E, other=0).to(tl.int32)
    total = tl.sum(b_load)
    limit = total
    if FACTOR is not None:
        # In float64, as Python's own numbers are: a rounding decides over a token.
        limit = tl.minimum(tl.ceil(total.to(tl.float64) * FACTOR / E), total.to(tl.float64)).to(tl.int32)
    b_kept = tl.minimum(b_load, limit)
    b_end = tl.cumsum(b_kept, axis=0)
    rows = tl.sum(b_kept)
    if i_n == 0:
        tl.store(offset, 0)
        tl.store(offset + 1 + o_e, b_end, mask=o_e < E)
        tl.store(dropped, (total - rows).to(tl.int64))

    b_j = tl.arange(0, BR) // S
    o_r = i_n * _BLOCK * S + tl.arange(0, BR)
    m_r = (b_j < _BLOCK) & (i_n * _BLOCK + b_j < T)
    b_e = tl.load(ids + o_r, mask=m_r, other=-1)
    m_e = (b_e >= 0) & (b_e < E)
    b_e = tl.where(m_e, b_e, 0).to(tl.int32)
    b_word = tl.load(words + i_n * E + b_e, mask=m_e, other=0).to(tl.uint32, bitcast=True)
    b_below = (tl.full([BR], 1, tl.uint32) << b_j.to(tl.uint32)) - 1
    b_rank = tl.load(before + i_n * E + b_e, mask=m_e, other=0) + _ones(b_word & b_below)
    m_k = m_e & (b_rank < limit)
    b_row = tl.gather(b_end - b_kept, b_e, 0) + b_rank
    tl.store(slot_of_row + b_row, o_r.to(tl.int32), mask=m_k)
    # An expert that a token chose twice has one row for it: the slot that lost it gets one that does not exist, and
    # with it NaN, instead of a share in the other's.
    tl.debug_barrier()
    b_lost = tl.load(slot_of_row + b_row, mask=m_k, other=0) != o_r
    b_row = tl.where(b_lost, T * S, b_row)
    tl.store(row_of_slot + o_r, tl.where(m_k, b_row, -1), mask=m_r)
    tl.store(slot_of_row + o_r, -1, mask=m_r & (o_r >= rows))


def blocks(tokens: int) -> int:
    """Blocks of tokens; one where there are no tokens, so that the kernels write what they must."""
    return max(1, triton.cdiv(tokens, BLOCK))


def new_words(ids_TS: torch.Tensor, experts: int) -> torch.Tensor:
    """Uninitialised words int32 [N, E]."""
    return torch.empty(blocks(len(ids_TS)), experts, dtype=torch.int32, device=ids_TS.device)


def rows_of_words(
    ids_TS: torch.Tensor, words_NE: torch.Tensor, capacity_factor: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of `Rows`, from the words of the ids."""
    (T, S), (N, E) = ids_TS.shape, words_NE.shape
    before_NE = torch.empty_like(words_NE)
    load_E, dropped = ids_TS.new_empty(E, dtype=torch.int64), ids_TS.new_empty((), dtype=torch.int64)
    offset = words_NE.new_empty(E + 1)
    slot_R, row_TS = words_NE.new_empty(T * S), words_NE.new_empty(T, S)
    with torch.cuda.device_of(ids_TS):
        count_kernel[(triton.cdiv(E, COUNTED_EXPERTS),)](
            words_NE, before_NE, load_E, N, E=E, BN=COUNTED_BLOCKS, BE=COUNTED_EXPERTS, num_warps=4
        )
        place_kernel[(N,)](
            ids_TS,
            words_NE,
            before_NE,
            load_E,
            offset,
            slot_R,
            row_TS,
            dropped,
            T,
            FACTOR=capacity_factor,
            E=E,
            S=S,
            BE=triton.next_power_of_2(E),
            BR=triton.next_power_of_2(BLOCK * S),
            num_warps=4,
        )
    return load_E, offset, slot_R, row_TS, dropped


def empty_rows(ids_TS: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    """Fields of `Rows`, by shape and dtype only."""
    T, S = ids_TS.shape
    int32 = {"dtype": torch.int32}
    return (
        ids_TS.new_empty(experts, dtype=torch.int64),
        ids_TS.new_empty(experts + 1, **int32),
        ids_TS.new_empty(T * S, **int32),
        ids_TS.new_empty(T, S, **int32),
        ids_TS.new_empty((), dtype=torch.int64),
    )


@torch.library.custom_op(op("sort_slots"), mutates_args=())
def _sort_slots(
    ids_TS: torch.Tensor, experts: int, capacity_factor: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids_TS = ids_TS.contiguous()
    (T, S), words_NE = ids_TS.shape, new_words(ids_TS, experts)
    with torch.cuda.device_of(ids_TS):
        mark_kernel[(len(words_NE),)](
            ids_TS,
            words_NE,
            T,
            E=experts,
            S=S,
            BE=triton.next_power_of_2(experts),
            BR=triton.next_power_of_2(BLOCK * S),
            num_warps=4,
        )
    return rows_of_words(ids_TS, words_NE, capacity_factor)


@_sort_slots.register_fake
def _(ids_TS, experts, capacity_factor):
    return empty_rows(ids_TS, experts)


def check_capacity(capacity_factor: float | None) -> None:
    if capacity_factor is not None and not capacity_factor > 0:
        raise ValueError(f"capacity_factor: {capacity_factor} should be above 0")


def sort_slots(ids_TS: torch.Tensor, experts: int, capacity_factor: float | None = None) -> Rows:
    """Sort slots by expert, see `Rows`; stable, and without waiting for the device.

    ids_TS: int32 or int64, the experts of a token distinct: of one that is there twice a slot gets a row that does not
    exist, and `expert_mlp` makes such a token NaN. Ids outside of 0 to experts - 1 have no row. experts: 1 to 1024.
    With a capacity factor, an expert has at most ceil(factor * slots with an expert / experts) rows, of the first
    tokens that chose it, and the others are counted. Raises ValueError naming the argument.
    """
    if ids_TS.dim() != 2 or ids_TS.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids_TS: expected int32 or int64 [tokens, slots], got {ids_TS.dtype} {list(ids_TS.shape)}")
    if not 1 <= ids_TS.shape[1] <= 32:
        raise ValueError(f"ids_TS: {ids_TS.shape[1]} slots, expected 1 to 32")
    if ids_TS.numel() >= 2**31:
        raise ValueError(f"ids_TS: {ids_TS.numel()} slots in all, expected less than 2 ** 31")
    if not 1 <= experts <= 1024:
        raise ValueError(f"experts: {experts}, expected 1 to 1024")
    check_capacity(capacity_factor)
    return Rows(*_sort_slots(ids_TS, experts, capacity_factor))
