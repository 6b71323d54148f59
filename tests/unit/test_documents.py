"""Documents: what masks, positions and borders mean together; windows and chunks by brute force.

Legend: B batch, T tokens, S keys, P cached tokens, M real tokens in order, D documents, W window, C chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from modeling_latentmoe.documents import Documents

CPU = torch.device("cpu")


def of_batch(T: int, B: int = 1, past=None, **inputs) -> Documents:
    """`inputs` and `past` as nested lists; `past` are the document numbers of cached tokens."""
    tensors = {name: torch.tensor(value) for name, value in inputs.items()}
    past_ids = None if past is None else torch.tensor(past, dtype=torch.long).reshape(B, -1)
    return Documents.of_batch((B, T), CPU, past_ids=past_ids, **tensors)


def grouped(ids_BT: torch.Tensor) -> list[list[list[int]]]:
    """Positions of every document, row by row, in order: only who is together matters, not the numbers."""
    found = []
    for row in ids_BT.tolist():
        numbers = list(dict.fromkeys(number for number in row if number >= 0))
        found.append([[t for t, number in enumerate(row) if number == mine] for mine in numbers])
    return found


@dataclass(frozen=True)
class Batch:
    """documents: for each row the positions of each of its documents."""

    id: str
    T: int
    documents: tuple[tuple[Sequence[int], ...], ...]
    attention_mask: tuple[tuple[int, ...], ...] | None = None
    position_ids: tuple[tuple[int, ...], ...] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    past: tuple[tuple[int, ...], ...] | None = None

    @property
    def inputs(self) -> dict:
        names = ("attention_mask", "position_ids", "cu_seqlens")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def build(self) -> Documents:
        return of_batch(self.T, len(self.documents), self.past, **self.inputs)


BATCHES = (
    Batch("plain", 4, ((range(4),), (range(4),))),
    Batch("one-token", 1, ((range(1),),)),
    Batch("left-padded", 5, ((range(2, 5),), (range(5),)), attention_mask=((0, 0, 1, 1, 1), (1, 1, 1, 1, 1))),
    Batch("right-padded", 5, ((range(3),), (range(5),)), attention_mask=((1, 1, 1, 0, 0), (1, 1, 1, 1, 1))),
    Batch("all-padding-row", 3, ((), (range(3),)), attention_mask=((0, 0, 0), (1, 1, 1))),
    Batch("borders", 8, ((range(5), range(5, 8)),), cu_seqlens=(0, 5, 8)),
    Batch("one-document-borders", 8, ((range(8),),), cu_seqlens=(0, 8)),
    Batch("one-token-documents", 3, ((range(1), range(1, 2), range(2, 3)),), cu_seqlens=(0, 1, 2, 3)),
    Batch("empty-documents", 8, ((range(5), range(5, 8)),), cu_seqlens=(0, 5, 5, 8, 8)),
    Batch("empty-first-document", 8, ((range(5), range(5, 8)),), cu_seqlens=(0, 0, 0, 5, 8)),
    Batch(
        "hidden-tail",
        8,
        ((range(2), range(2, 5)),),
        attention_mask=((1, 1, 1, 1, 1, 0, 0, 0),),
        cu_seqlens=(0, 2, 5, 8),
    ),
    Batch(
        "hidden-first-document",
        6,
        ((range(3, 6),),),
        attention_mask=((0, 0, 0, 1, 1, 1),),
        cu_seqlens=(0, 3, 6),
    ),
    Batch("positions", 4, ((range(4),),), position_ids=((0, 1, 2, 3),)),
    Batch("positions-of-a-later-part", 4, ((range(4),),), position_ids=((7, 8, 9, 10),)),
    Batch(
        "restarts",
        6,
        ((range(3), range(3, 6)), (range(6),)),
        position_ids=((0, 1, 2, 0, 1, 2), (0, 1, 2, 3, 4, 5)),
    ),
    Batch("restarts-of-one-token", 4, ((range(1), range(1, 2), range(2, 4)),), position_ids=((0, 0, 0, 1),)),
    Batch("one-row-of-positions-for-all", 4, ((range(2), range(2, 4)),) * 2, position_ids=((0, 1, 0, 1),)),
    Batch(
        "generate-left-padding",
        5,
        ((range(2, 5),),),
        attention_mask=((0, 0, 1, 1, 1),),
        position_ids=((1, 1, 0, 1, 2),),
    ),
    Batch(
        "generate-left-padding-first-call",
        5,
        ((range(2, 5),), (range(5),)),
        attention_mask=((0, 0, 1, 1, 1), (1, 1, 1, 1, 1)),
        position_ids=((0, 0, 0, 1, 2), (0, 1, 2, 3, 4)),
        past=((), ()),
    ),
    Batch(
        "left-padding-plain-positions",
        5,
        ((range(2, 5),),),
        attention_mask=((0, 0, 1, 1, 1),),
        position_ids=((0, 1, 2, 3, 4),),
    ),
    Batch(
        "padded-between-documents",
        7,
        ((range(2), range(4, 7)),),
        attention_mask=((1, 1, 0, 0, 1, 1, 1),),
        position_ids=((0, 1, 0, 0, 0, 1, 2),),
    ),
    Batch(
        "padded-inside-a-document",
        6,
        (((0, 1, 4, 5),),),
        attention_mask=((1, 1, 0, 0, 1, 1),),
        position_ids=((0, 1, 0, 0, 2, 3),),
    ),
    Batch(
        "restarts-then-padding",
        7,
        ((range(2), range(2, 5)),),
        attention_mask=((1, 1, 1, 1, 1, 0, 0),),
        position_ids=((0, 1, 0, 1, 2, 0, 0),),
    ),
    Batch("borders-win-over-positions", 4, ((range(4),),), position_ids=((0, 1, 0, 1),), cu_seqlens=(0, 4)),
    Batch("next-tokens", 2, ((range(2),), (range(2),)), past=((0, 0, 0), (-1, 0, 0))),
    Batch("next-tokens-with-positions", 2, ((range(2),),), position_ids=((3, 4),), past=((0, 0, 0),)),
    Batch(
        "next-tokens-whole-mask",
        2,
        ((range(2),), (range(1, 2),)),
        attention_mask=((1, 1, 1, 1, 1), (0, 0, 0, 0, 1)),
        past=((0, 0, 0), (-1, -1, -1)),
    ),
    Batch("next-tokens-own-mask", 2, ((range(1, 2),),), attention_mask=((0, 1),), past=((-1, -1),)),
)
with_batches = pytest.mark.parametrize("case", BATCHES, ids=lambda case: case.id)


@with_batches
def test_documents_of_a_batch(case: Batch) -> None:
    want = [[list(document) for document in row] for row in case.documents]
    assert grouped(case.build().ids_BT) == want


@with_batches
def test_packed_says_whether_a_row_holds_several_documents(case: Batch) -> None:
    assert case.build().packed == any(len(row) > 1 for row in case.documents)


@with_batches
def test_attention_mask_and_longest_equal_brute_force(case: Batch) -> None:
    documents = case.build()
    B, T = len(case.documents), case.T
    past = [list(row) for row in case.past] if case.past else [[]] * B
    P = len(past[0])
    got, longest = documents.attention_mask_BTS, 0
    assert got.shape == (B, T, P + T)
    for b, row in enumerate(case.documents):
        for document in row:
            cached = [p for p in range(P) if past[b][p] == 0]
            longest = max(longest, len(cached) + len(document))
            for t in document:
                want = cached + [P + s for s in document if s <= t]
                assert got[b, t].nonzero().squeeze(-1).tolist() == want
    assert documents.longest == longest
    # A softmax over no key at all would be NaN, in padding too.
    assert got.any(-1).all()
    padded = {t for row in case.documents for t in range(T)} - {t for d in case.documents[0] for t in d}
    for t in padded:
        assert not got[0, t, [P + s for document in case.documents[0] for s in document]].any()


@with_batches
def test_valid_pack_and_unpack(case: Batch) -> None:
    documents, B, T = case.build(), len(case.documents), case.T
    order = [(b, t) for b, row in enumerate(case.documents) for document in row for t in document]
    x_BT3 = torch.arange(1.0, B * T * 3 + 1).view(B, T, 3)
    packed = documents.pack(x_BT3)
    assert packed.tolist() == [x_BT3[b, t].tolist() for b, t in order]
    valid = torch.zeros(B, T, dtype=torch.bool)
    for b, t in order:
        valid[b, t] = True
    assert torch.equal(documents.unpack(packed), torch.where(valid[..., None], x_BT3, 0))
    if valid.all():
        assert documents.valid_BT is None
    else:
        assert torch.equal(documents.valid_BT, valid)
    lengths = [len(document) for row in case.documents for document in row]
    assert documents.length_D.tolist() == lengths
    assert documents.start_D.tolist() == [sum(lengths[:d]) for d in range(len(lengths))]
    assert documents.row_D.tolist() == [b for b, row in enumerate(case.documents) for _ in row]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
@with_batches
def test_window_equals_brute_force(case: Batch, width: int) -> None:
    """A document's line is its remembered tokens, which are numbered behind all real ones, and its own."""
    documents = case.build()
    lengths, kept = documents.length_D.tolist(), width - 1
    M = sum(lengths)
    index_MW, tail_DW = documents.window(width)
    assert index_MW.shape == (M, width)
    assert tail_DW.shape == (len(lengths), kept)
    start = 0
    for d, length in enumerate(lengths):
        line = [M + d * kept + i for i in range(kept)] + list(range(start, start + length))
        for t in range(length):
            assert index_MW[start + t].tolist() == line[t : t + width]
        assert tail_DW[d].tolist() == line[len(line) - kept :]
        start += length


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@with_batches
def test_chunks_equal_brute_force(case: Batch, size: int) -> None:
    documents = case.build()
    lengths, starts = documents.length_D.tolist(), documents.start_D.tolist()
    M = sum(lengths)
    ranked = sorted(range(len(lengths)), key=lambda d: -lengths[d])
    want, active = [], []
    for step in range(-(-max(lengths, default=0) // size)):
        begun = [d for d in ranked if lengths[d] > step * size]
        active.append(len(begun))
        for d in begun:
            places = range(step * size, (step + 1) * size)
            want.append([starts[d] + p if p < lengths[d] else M for p in places])
    chunks = documents.chunks(size)
    assert chunks.active == active
    assert chunks.rank_D.tolist() == ranked
    assert chunks.index_NC.tolist() == want
    assert sorted(i for i in chunks.index_NC.flatten().tolist() if i < M) == list(range(M))


def test_chunks_of_many_documents() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(1, 70, (40,)).tolist()
    borders = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    documents = of_batch(sum(lengths), cu_seqlens=borders)
    assert documents.length_D.tolist() == lengths
    chunks = documents.chunks(16)
    assert sum(chunks.active) == sum(-(-n // 16) for n in lengths)
    first = 0
    for step, active in enumerate(chunks.active):
        rows = chunks.index_NC[first : first + active]
        assert rows[:, 0].tolist() == [borders[d] + 16 * step for d in chunks.rank_D[:active].tolist()]
        first += active


@dataclass(frozen=True)
class Mistake:
    id: str
    inputs: tuple[tuple[str, list], ...]
    message: str
    T: int = 4
    B: int = 1
    past: tuple[tuple[int, ...], ...] | None = None


MISTAKES = (
    Mistake("does-not-start-at-zero", (("cu_seqlens", [1, 4]),), "cu_seqlens"),
    Mistake("ends-too-early", (("cu_seqlens", [0, 3]),), "cu_seqlens"),
    Mistake("ends-too-late", (("cu_seqlens", [0, 3, 5]),), "cu_seqlens"),
    Mistake("falls", (("cu_seqlens", [0, 3, 2, 4]),), "cu_seqlens"),
    Mistake("single-border", (("cu_seqlens", [0]),), "cu_seqlens"),
    Mistake("two-dimensional", (("cu_seqlens", [[0, 4]]),), "cu_seqlens"),
    Mistake("borders-for-two-rows", (("cu_seqlens", [0, 4]),), "cu_seqlens", B=2),
    Mistake("mask-of-other-length", (("attention_mask", [[1, 1, 1]]),), "attention_mask"),
    Mistake("mask-of-other-rows", (("attention_mask", [[1, 1, 1, 1]]),), "attention_mask", B=2),
    Mistake("mask-with-4-dimensions", (("attention_mask", [[[[1, 1, 1, 1]]]]),), "attention_mask"),
    Mistake("mask-without-cache", (("attention_mask", [[1] * 6]),), "attention_mask"),
    Mistake("mask-longer-than-cache", (("attention_mask", [[1] * 7]),), "attention_mask", past=((0, 0),)),
)


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.id)
def test_contradictions_raise_one_line(case: Mistake) -> None:
    with pytest.raises(ValueError, match=case.message) as caught:
        of_batch(case.T, case.B, case.past, **dict(case.inputs))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_borders_of_any_integer_type(dtype: torch.dtype) -> None:
    documents = Documents.of_batch((1, 5), CPU, cu_seqlens=torch.tensor([0, 2, 5], dtype=dtype))
    assert documents.length_D.tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_masks_of_any_type(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 0, 1, 1]]).to(dtype)
    assert grouped(Documents.of_batch((1, 4), CPU, attention_mask=mask).ids_BT) == [[[2, 3]]]


def test_a_batch_of_padding_holds_no_document() -> None:
    documents = of_batch(3, B=2, attention_mask=[[0, 0, 0], [0, 0, 0]])
    assert documents.longest == 0
    assert documents.pack(torch.ones(2, 3, 5)).shape == (0, 5)
    assert not documents.unpack(torch.ones(0, 5)).any()
    assert documents.chunks(16).active == []
    index_MW, tail_DW = documents.window(4)
    assert (index_MW.shape, tail_DW.shape) == ((0, 4), (0, 3))


def test_padding_inside_a_document_is_taken_out() -> None:
    """attention_mask alone says nothing about borders: what it hides is skipped, the rest stays together."""
    documents = of_batch(6, attention_mask=[[1, 1, 0, 0, 1, 1]])
    assert documents.length_D.tolist() == [4]
    assert documents.attention_mask_BTS[0, 5].tolist() == [True, True, False, False, True, True]
    index_MW, _ = documents.window(2)
    assert index_MW.tolist() == [[4, 0], [0, 1], [1, 2], [2, 3]]


def test_borders_for_kernels_skip_padding() -> None:
    """Borders of all documents in the real tokens, row after row; a single document needs none."""
    documents = of_batch(6, B=2, attention_mask=[[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    assert documents.cu_seqlens.tolist() == [0, 4, 7]
    assert documents.cu_seqlens.dtype == torch.int32
    assert of_batch(6, cu_seqlens=[0, 1, 1, 6]).cu_seqlens.tolist() == [0, 1, 6]
    assert of_batch(6).cu_seqlens is None
    assert of_batch(2, attention_mask=[[0, 0]]).cu_seqlens.tolist() == [0]


def test_a_window_is_computed_once() -> None:
    documents = of_batch(5)
    assert documents.window(3) is documents.window(3)
    assert documents.window(3)[0].shape != documents.window(4)[0].shape


@pytest.mark.parametrize("past", [None, [[-1, -1, 0], [0, 0, 0]]], ids=["fresh", "cached"])
def test_key_ranges_say_what_the_mask_says(past: list | None) -> None:
    """Left, right and inner padding, with and without cached keys."""
    mask = [[0, 1, 1, 0, 1], [1, 1, 1, 1, 0]]
    if past is not None:
        mask = [[0, 0, 1, *mask[0]], [1, 1, 1, *mask[1]]]
    past_ids = None if past is None else torch.tensor(past)
    documents = Documents.of_batch((2, 5), CPU, attention_mask=torch.tensor(mask), past_ids=past_ids)
    compare_ranges(documents)


def test_key_ranges_of_packed_documents() -> None:
    compare_ranges(of_batch(9, cu_seqlens=[0, 1, 4, 4, 9], attention_mask=[[1, 1, 1, 1, 0, 1, 1, 1, 0]]))
    compare_ranges(of_batch(4, B=2, position_ids=[[0, 0, 1, 0], [0, 1, 2, 3]], attention_mask=[[0, 1, 1, 1], [1] * 4]))
    compare_ranges(of_batch(3, B=2, attention_mask=[[0, 0, 0], [0, 0, 0]]))


def compare_ranges(documents: Documents) -> None:
    keys, mask = documents.key_token_S, documents.attention_mask_BTS.flatten(0, 1)[documents.token_M]
    assert torch.equal(
        documents.pack_keys(torch.arange(documents.key_ids_BS.numel()).view_as(documents.key_ids_BS)), keys
    )
    first_M, end_M = documents.key_ranges
    assert first_M.dtype == end_M.dtype == torch.int32
    row_M, S = documents.token_M // documents.ids_BT.shape[1], documents.key_ids_BS.shape[1]
    for m, (first, end) in enumerate(zip(first_M.tolist(), end_M.tolist(), strict=True)):
        assert (row_M[m] * S + mask[m].nonzero().squeeze(-1)).tolist() == keys[first:end].tolist()
    for size in (1, 2, 3):
        pools = documents.pools(size)
        assert pools.size == size
        for m in range(len(first_M)):
            seen = pools.members(torch.arange(int(pools.first_T[m]), int(pools.end_T[m]))).flatten()
            whole = (end_M[m] - first_M[m]) // size * size
            assert seen.tolist() == list(range(int(first_M[m]), int(first_M[m] + whole)))
