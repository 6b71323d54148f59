"""Selection against its definition: values, ties, ranges, chunks, refusals."""

import pytest
import torch
from sparse_attention import index, index_topk
from sparse_attention.index_reference import index_scores_reference, index_topk_reference, select_reference


def inputs_of(T: int, S: int, heads: int, K: int, dtype: torch.dtype, device: str):
    generator = torch.Generator(device).manual_seed(7 * T + S + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    return normal(T, heads, K).to(dtype), normal(S, K).to(dtype), normal(T, heads)


def causal(T: int, S: int, device: str, document: int = 10**9):
    """Queries are the last of the keys; documents of so many keys."""
    s = torch.arange(S - T, S, device=device)
    return (s // document * document).int(), (s + 1).int()


def check(q, k, weight, first, end, top: int) -> None:
    """Equal to the selection by float64 scores, but for keys whose score is within rounding of the last selected."""
    ours = index_topk(q, k, weight, first, end, top)
    score = index_scores_reference(q.double(), k.double(), weight.double())
    wanted = select_reference(score, first, end, top)
    assert ours.dtype == torch.int32 and ours.shape == wanted.shape
    assert torch.equal((ours >= 0).sum(1), (wanted >= 0).sum(1))
    for row, want, values in zip(ours, wanted, score, strict=True):
        row, want = row[row >= 0].long(), want[want >= 0].long()
        assert (row.diff() > 0).all()
        different = set(row.tolist()) ^ set(want.tolist())
        for s in different:
            assert (values[s] - values[want].min()).abs() <= 1e-5 * values.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 64, 1), (9, 9, 64, 128, 4), (5, 70, 3, 64, 100), (33, 130, 32, 128, 16), (6, 300, 8, 64, 33)]
)
def test_values(shape, dtype, device):
    T, S, heads, K, top = shape
    check(*inputs_of(T, S, heads, K, dtype, device), *causal(T, S, device), top)


def test_chunks_and_blocks(monkeypatch, device):
    monkeypatch.setattr(index, "CHUNK", 64)
    monkeypatch.setattr(index, "ROWS", 4)
    q, k, weight = inputs_of(6, 150, 4, 64, torch.bfloat16, device)
    for document, top in ((10**9, 30), (10**9, 100), (146, 10), (64, 30)):
        check(q, k, weight, *causal(6, 150, device, document), top)


def test_earlier_of_equal_scores(monkeypatch, device):
    monkeypatch.setattr(index, "CHUNK", 64)
    # Few different scores, exact in bf16: many ties, zeros of both signs among them.
    generator = torch.Generator(device).manual_seed(0)
    q = torch.zeros(3, 2, 64, device=device, dtype=torch.bfloat16)
    q[:, 0, 0], q[:, 1, 1] = 8, 8
    k = torch.randint(-2, 3, (140, 64), generator=generator, device=device).bfloat16()
    weight = torch.tensor([[1.0, -1.0]], device=device).expand(3, 2)
    first, end = causal(3, 140, device)
    for top in (1, 40, 70, 139, 200):
        assert torch.equal(
            index_topk(q, k, weight, first, end, top), index_topk_reference(q, k, weight, first, end, top)
        )


def test_ranges(device):
    q, k, weight = inputs_of(6, 40, 4, 64, torch.bfloat16, device)
    first = torch.tensor([0, 0, 3, 7, 39, 40], dtype=torch.int32, device=device)
    end = torch.tensor([0, 1, 3, 20, 40, 40], dtype=torch.int32, device=device)
    check(q, k, weight, first, end, 8)
    assert (index_topk(q, k, weight, first, first, 8) == -1).all()
    assert index_topk(q[:0], k, weight[:0], first[:0], end[:0], 8).shape == (0, 8)
    none = torch.zeros_like(first)
    assert (index_topk(q, k[:0], weight, none, none, 8) == -1).all()


@pytest.mark.parametrize("precision, least", [("fp8", 0.93), ("int8", 0.97)])
def test_recall_in_8_bits(precision, least, device):
    q, k, weight = inputs_of(8, 512, 32, 128, torch.bfloat16, device)
    first, end = causal(8, 512, device)
    found = index_topk(q, k, weight, first, end, 128, precision)
    wanted = index_topk_reference(q, k, weight, first, end, 128)
    assert (found.diff(dim=1) > 0).all()
    hits = sum(len(set(a) & set(b)) for a, b in zip(found.tolist(), wanted.tolist(), strict=True))
    assert least <= hits / wanted.numel() < 1


def test_8_bits_of_zeros(device):
    q, k, weight = inputs_of(4, 20, 2, 64, torch.bfloat16, device)
    first, end = causal(4, 20, device)
    for precision in ("fp8", "int8"):
        found = index_topk(0 * q, k, weight, first, end, 8, precision)
        assert torch.equal(found, torch.arange(8, dtype=torch.int32, device=device).expand(4, 8))


def test_strided_inputs(device):
    q, k, weight = inputs_of(6, 40, 4, 128, torch.bfloat16, device)
    first, end = causal(6, 40, device)
    wanted = index_topk(q[..., :64].contiguous(), k[:, 64:].contiguous(), weight, first, end, 8)
    assert torch.equal(index_topk(q[..., :64], k[:, 64:], weight, first, end, 8), wanted)


def test_refusals_name_the_argument(device):
    q, k, weight = inputs_of(3, 5, 2, 64, torch.bfloat16, device)
    first, end = causal(3, 5, device)
    for changed, message in [
        ({"q_TIK": q[0]}, "q_TIK: expected"),
        ({"q_TIK": q[..., :32]}, "q_TIK: expected"),
        ({"q_TIK": q.double()}, "q_TIK: expected"),
        ({"k_SK": k[:, :32]}, "k_SK: expected"),
        ({"k_SK": k.float()}, "k_SK: expected"),
        ({"k_SK": k.to("meta")}, "k_SK: on meta"),
        ({"weight_TI": weight[1:]}, "weight_TI: expected"),
        ({"weight_TI": weight.int()}, "weight_TI: expected"),
        ({"first_T": first.long()}, "first_T: expected"),
        ({"end_T": end[1:]}, "end_T: expected"),
        ({"end_T": end.to("meta")}, "end_T: on meta"),
        ({"k": 0}, "k: 0"),
        ({"precision": "fp4"}, "precision: 'fp4'"),
    ]:
        arguments = {"q_TIK": q, "k_SK": k, "weight_TI": weight, "first_T": first, "end_T": end, "k": 2, **changed}
        with pytest.raises(ValueError, match=f"^{message}"):
            index_topk(**arguments)


def test_operator_is_well_formed(device):
    arguments = *inputs_of(3, 5, 2, 64, torch.bfloat16, device), *causal(3, 5, device), 2, "int8"
    torch.library.opcheck(index._index_topk, arguments)
