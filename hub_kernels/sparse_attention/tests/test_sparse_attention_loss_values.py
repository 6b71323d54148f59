"""The indexer's loss and its gradients against the definition, and what it refuses."""

import pytest
import torch
from sparse_attention import index_topk, indexer_loss, loss
from sparse_attention.loss_reference import indexer_loss_reference

# Triton's interpreter cuts bf16 results off instead of rounding them: what is rounded to it is for the GPU.
DTYPES = [torch.bfloat16, torch.float32] if torch.cuda.is_available() else [torch.float32]
NAMES = "loss", "dq", "dk", "dweight"


def inputs_of(T: int, S: int, heads: int, K: int, top: int, dtype: torch.dtype, device: str):
    """Differentiable inputs, selected keys of a causal window, a target, and the gradient of the losses."""
    generator = torch.Generator(device).manual_seed(7 * T + S + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    q, k, weight = normal(T, heads, K).to(dtype), normal(S, K).to(dtype), normal(T, heads) * heads**-0.5
    end = torch.arange(S - T + 1, S + 1, dtype=torch.int32, device=device)
    # The first query sees nothing.
    first = (end - S // 2).clamp(min=0)
    first[0] = end[0]
    index = index_topk(q, k, weight, first, end, top)
    target = normal(T, top).exp() * (index >= 0)
    return (q, k, weight), index, target, normal(T)


def results(function, leaves, index, target, dloss):
    leaves = [x.clone().requires_grad_() for x in leaves]
    losses = function(*leaves, index, target)
    return losses.detach(), *torch.autograd.grad(losses, leaves, dloss.to(losses.dtype))


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative to the truth, or absolute where the truth is zero."""
    size = truth.norm()
    return ((x.double() - truth).norm() / (size if size > 0 else 1)).item()


@pytest.fixture(autouse=True)
def poisoned():
    """New memory holds NaN and the largest integers until something is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(leaves, index, target, dloss) -> None:
    """Errors against float64 are at most twice those of the definition in the same dtype."""
    ours = results(indexer_loss, leaves, index, target, dloss)
    plain = results(indexer_loss_reference, leaves, index, target, dloss)
    truth = results(indexer_loss_reference, [x.double() for x in leaves], index, target.double(), dloss)
    for name, x, p, t in zip(NAMES, ours, plain, truth, strict=True):
        assert x.dtype == p.dtype and x.shape == p.shape, name
        assert error(x, t) <= 2 * error(p, t) + 8 * torch.finfo(torch.float32).eps, (name, error(x, t), error(p, t))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 1, 64, 1), (3, 30, 64, 128, 8), (5, 140, 12, 64, 70), (4, 9, 32, 128, 40)])
def test_values(shape, dtype, device):
    check(*inputs_of(*shape, dtype, device))


def test_blocks_and_parts(monkeypatch, device):
    arguments = inputs_of(9, 70, 4, 64, 20, torch.float32, device)
    # Four queries at a time, in parts of two; the last block has one.
    monkeypatch.setattr(loss, "DENSE_BYTES", 4 * 4 * 70)
    monkeypatch.setattr(loss, "PART", 2)
    check(*arguments)


def test_nothing_selected(device):
    leaves, index, target, dloss = inputs_of(3, 30, 4, 64, 8, torch.bfloat16, device)
    for i, t in ((torch.full_like(index, -1), target), (index, torch.zeros_like(target))):
        for x in results(indexer_loss, leaves, i, t, dloss):
            assert (x == 0).all()


def test_no_queries(device):
    (q, k, weight), index, target, dloss = inputs_of(3, 30, 4, 64, 8, torch.bfloat16, device)
    losses, dq, dk, dweight = results(indexer_loss, (q[:0], k, weight[:0]), index[:0], target[:0], dloss[:0])
    assert losses.shape == (0,) and dq.shape == (0, 4, 64) and dweight.shape == (0, 4) and (dk == 0).all()


def test_minimum_at_the_target(device):
    leaves, index, _, dloss = inputs_of(4, 30, 4, 64, 8, torch.float32, device)
    q, k, weight = leaves
    score = torch.einsum("tis,ti->ts", (torch.einsum("tik,sk->tis", q, k) / 8).relu(), weight)
    own = 96 * score.gather(1, index.clamp(min=0).long()).masked_fill(index < 0, -torch.inf).softmax(1)
    for x in results(indexer_loss, leaves, index, own.nan_to_num(0), dloss):
        assert x.abs().max() < 1e-5


def test_refusals_name_the_argument(device):
    (q, k, weight), index, target, _ = inputs_of(3, 30, 4, 64, 8, torch.bfloat16, device)
    for changed, message in [
        ({"q_TIK": q[0]}, "q_TIK: expected"),
        ({"q_TIK": q.half(), "k_SK": k.half()}, "q_TIK: expected bfloat16 or float32"),
        ({"k_SK": k.float()}, "k_SK: expected"),
        ({"weight_TI": weight[1:]}, "weight_TI: expected"),
        ({"index_Tk": index[1:]}, "index_Tk: expected"),
        ({"index_Tk": index.long()}, "index_Tk: expected"),
        ({"target_Tk": target[:, 1:]}, "target_Tk: expected"),
        ({"target_Tk": target.bfloat16()}, "target_Tk: expected"),
        ({"index_Tk": index.to("meta")}, "index_Tk: on meta"),
    ]:
        arguments = {"q_TIK": q, "k_SK": k, "weight_TI": weight, "index_Tk": index, "target_Tk": target, **changed}
        with pytest.raises(ValueError, match=f"^{message}"):
            indexer_loss(**arguments)


def test_operators_are_well_formed(device):
    leaves, index, target, dloss = inputs_of(3, 30, 2, 64, 4, torch.bfloat16, device)
    _, lse, total = loss._indexer_loss(*leaves, index, target)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        loss._indexer_loss, (*(x.clone().requires_grad_() for x in leaves), index, target), test_utils=checks
    )
    torch.library.opcheck(loss._indexer_loss_bwd, (dloss, *leaves, index, target, lse, total), test_utils=checks)
    q, k, weight = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in leaves)
    arguments = (dloss, q, k, weight, index, target, lse, total)
    torch.library.opcheck(loss._indexer_loss_bwd, arguments, test_utils="test_faketensor")
