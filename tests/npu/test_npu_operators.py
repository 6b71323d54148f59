"""Every operation that torch-npu computes on Ascend against its torch definition, values and gradients, on a fake card.

The operators round once to the dtype of their outputs, so an output differs from the definition in float32 by the
rounding of that dtype: relative error, of norms, below 2 epsilon (bf16: 0.016) unless said otherwise.
"""

import re
import sys
from types import SimpleNamespace

import fake_npu
import pytest
import torch
from torch import Tensor

from modeling_latentmoe import npu, npu_experts, npu_sparse, ops, sparse
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.mxfp4 import encode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALE = 192**-0.5


def leaf(*shape: int, dtype: torch.dtype = BF16, std: float = 1.0) -> Tensor:
    return (torch.randn(shape) * std).to(dtype).requires_grad_()


def differs(got: Tensor, want: Tensor) -> float:
    want = want.double()
    return ((got.double() - want).norm() / want.norm()).item()


def close(got: Tensor, want: Tensor, dtype: torch.dtype = BF16, times: float = 2) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    assert differs(got, want) <= times * torch.finfo(dtype).eps, differs(got, want)


def ranges(*lengths: int) -> tuple[Tensor, Tensor]:
    """Documents without remembered keys."""
    total = torch.tensor(lengths).sum()
    border = torch.tensor([0, *lengths]).cumsum(0).int()
    return Documents.of_batch((1, int(total)), torch.device("cpu"), cu_seqlens=border).key_ranges


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_norm(dtype: torch.dtype, card: list[str]) -> None:
    x = leaf(3, 5, 64, dtype=dtype)
    grad = torch.randn(3, 5, 64).to(dtype)
    (got,) = torch.autograd.grad(y := ops.rms_norm(x, 1e-5), x, grad)
    want = torch.nn.functional.rms_norm(x, (64,), eps=1e-5)
    close(y, want, dtype)
    close(got, torch.autograd.grad(want, x, grad)[0], dtype)
    assert card == ["npu_rms_norm"]


def test_what_is_ignored_in_a_loss(card: list[str]) -> None:
    hidden, weight = leaf(40, 16), leaf(50, 16).detach()
    target = torch.randint(0, 50, (40,))
    target[::3] = -100
    got, want = (ops.linear_cross_entropy(hidden, weight, target, kernels=kernels) for kernels in ("auto", "torch"))
    assert "npu_cross_entropy_loss" in card and not got[::3].any()
    close(got, want, FP32, 8)
    close(*(torch.autograd.grad(x.sum(), hidden)[0] for x in (got, want)), BF16)


@pytest.mark.parametrize("groups", [1, 4])
def test_gate(groups: int, card: list[str]) -> None:
    logits, bias = leaf(30, 64, dtype=FP32), torch.randn(64)
    options = {"scaling_factor": 2.5, "groups": groups, "top_groups": max(1, groups // 2)}
    got, want = (ops.route(logits, bias, 6, **options, kernels=kernels) for kernels in ("auto", "torch"))
    assert card == ["npu_moe_gating_top_k"] and got[0].dtype == torch.int64
    order = [ids.argsort(dim=1) for ids, _ in (got, want)]
    assert torch.equal(*(ids.gather(1, at) for (ids, _), at in zip((got, want), order, strict=True)))
    weights = [w.gather(1, at) for (_, w), at in zip((got, want), order, strict=True)]
    close(*weights, FP32, 8)
    grad = torch.randn(30, 6)
    close(*(torch.autograd.grad(w, logits, grad)[0] for w in weights), FP32, 8)


@pytest.mark.parametrize("chosen", [None, [True, False, True]])
def test_dense_attention(chosen: list[bool] | None, card: list[str]) -> None:
    """Keys 192 wide and values 128, padding, three documents, of which one may be left out."""
    border = torch.tensor([0, 20, 33, 70], dtype=torch.int32)
    documents = Documents.of_batch((1, 70), torch.device("cpu"), cu_seqlens=border)
    x = [leaf(1, 3, 70, width) for width in (192, 192, 128)]
    wide = [y.detach().float().requires_grad_() for y in x]
    got = ops.causal_attention(*x, documents, SCALE, True, None, chosen, "auto")
    want = ops.causal_attention(*wide, documents, SCALE, True, None, chosen, "torch")
    assert card == ["npu_fusion_attention"]
    close(got, want)
    grad = torch.randn(want.shape).to(BF16)
    for mine, theirs in zip(
        torch.autograd.grad(got, x, grad), torch.autograd.grad(want, wide, grad.float()), strict=True
    ):
        close(mine, theirs)


def indexer(T: int, S: int, heads: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [leaf(T, heads, 128, dtype=dtype), leaf(S, 128, dtype=dtype), leaf(T, heads, dtype=FP32, std=0.2)]


@pytest.mark.parametrize("card", ["Ascend910B3", "Ascend950PR"], indirect=True)
def test_choice_of_keys(card: list[str]) -> None:
    """Ascending, within the document, as many as there are; weights of either sign."""
    q, k, weight = (x.detach() for x in indexer(90, 90, 32))
    if npu.is_950():
        weight = weight.to(BF16).float()
    limits = ranges(40, 1, 49)
    got, want = (ops.index_topk(q, k, weight, *limits, 16, True, kernels) for kernels in ("auto", "torch"))
    assert card == ["npu_lightning_indexer"] and got.dtype == torch.int32
    # the scale, which 950 rounds with the weights, may change places near the border
    assert (got == want).float().mean() == 1 if not npu.is_950() else (got == want).float().mean() > 0.95
    assert torch.equal(got >= 0, want >= 0) and torch.equal(got.masked_fill(got < 0, 99).sort().values >= 0, got >= -1)


def test_choice_beside_remembered_keys(card: list[str]) -> None:
    """Rows of a cache: one continues with a token, one with none, whose keys lie between those of the others."""
    past = torch.tensor([[-1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    documents = Documents(torch.tensor([[0], [-1], [0]]), past)
    first, end = documents.key_ranges
    q, k, weight = (x.detach() for x in indexer(2, int(end[-1]), 8))
    got, want = (ops.index_topk(q, k, weight, first, end, 3, True, kernels) for kernels in ("auto", "torch"))
    assert card == ["npu_lightning_indexer"] and torch.equal(got, want)
    (piece,) = npu_sparse.pieces((first, end))
    assert (piece.query_ends, piece.key_ends) == ([1, 1, 2], [4, 8, 13])


def latents(T: int, heads: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    return leaf(T, heads, 576, dtype=dtype, std=0.3), leaf(T, 576, dtype=dtype)


@pytest.mark.parametrize("card", ["Ascend910B3", "Ascend950PR"], indirect=True)
@pytest.mark.parametrize("heads", [96, 2])
def test_sparse_attention(heads: int, card: list[str]) -> None:
    """Absorbed, 96 heads in one call or two; a document without choices keeps its zeros."""
    limits = ranges(30, 5, 25)
    q, kv = latents(60, heads)
    index = ops.index_topk(*(x.detach() for x in indexer(60, 60, 8)), *limits, 12, kernels="torch")
    index[30:35] = -1
    wide = [x.detach().double().requires_grad_() for x in (q, kv)]
    got, lse = ops.sparse_attention(q, kv, index, SCALE, 512, None, "auto", limits)
    want, lse_want = sparse.sparse_attention(*wide, index, SCALE, 512)
    parts = 1 if npu.is_950() or heads == 2 else 2
    assert card == ["npu_sparse_flash_attention"] * parts
    assert not got[30:35].any() and torch.equal(lse.isinf(), lse_want.isinf()) and not lse.requires_grad
    close(got, want)
    some = ~lse_want.isinf()
    close(lse[some], lse_want[some], FP32, 100)
    grad = torch.randn(want.shape).to(BF16)
    mine = torch.autograd.grad(got, (q, kv), grad)
    for x, y in zip(mine, torch.autograd.grad(want, wide, grad.double()), strict=True):
        close(x, y)
    assert not mine[0][30:35].any() and card[parts:] == ["npu_sparse_flash_attention_grad"] * parts


@pytest.mark.parametrize("heads", [96, 64, 160])
@pytest.mark.parametrize("queries", [8192, 40])
def test_sparse_loss(heads: int, queries: int, card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of parts of heads are averaged exactly, and so are those of pieces of queries that cut documents. The
    value is that of all heads: of the parts alone it would be too large."""
    monkeypatch.setattr(npu_sparse, "LOSS_QUERIES", queries)
    monkeypatch.setattr(npu_sparse, "LOSS_KEYS", (16,))
    monkeypatch.setattr(fake_npu, "LOSS_KEYS", (16,))
    limits = ranges(70, 20, 10)
    q, kv = (x.detach() for x in latents(100, heads))
    leaves = indexer(100, 100, 32)
    index = ops.index_topk(*(x.detach() for x in leaves), *limits, 16, kernels="torch")
    _, lse = sparse.sparse_attention(q, kv, index, SCALE, 512)
    teacher = sparse.Teacher(q, kv, SCALE)
    got = ops.fused_indexer_loss(teacher, sparse.Student(*leaves), index, lse, 512, True, limits, "auto")
    calls = len(npu_sparse.head_parts(heads, npu_sparse.LOSS_HEADS)) * (1 if queries > 100 else 3)
    assert card == ["npu_sparse_lightning_indexer_grad_kl_loss"] * calls
    wide = [x.detach().double().requires_grad_() for x in leaves]
    target = sparse.head_probabilities(q.double(), kv.double(), index, lse.double(), SCALE)
    want = sparse.indexer_loss(*wide, index, target).sum()
    close(got, want, FP32, 100)
    mine, theirs = (torch.autograd.grad(3 * x, y) for x, y in ((got, leaves), (want, wide)))
    for x, y in zip(mine, theirs, strict=True):
        close(x, y)


def test_96_heads_are_two_thirds_and_one_third() -> None:
    """In float64, to its rounding: the gradient is linear in the teacher, the loss is not."""
    k = torch.randn(40, 24).double()
    leaves = [torch.randn(20, 4, 24).double(), torch.randn(40, 24).double(), torch.randn(20, 4).double()]
    leaves = [x.requires_grad_() for x in leaves]
    index = torch.rand(20, 40).argsort(dim=1)[:, :16].sort(dim=1).values.int()
    q = 3 * torch.randn(20, 96, 24).double()
    losses, gradients = [], []
    for heads in (slice(0, 96), slice(0, 64), slice(64, 96)):
        _, lse = sparse.sparse_attention(q[:, heads], k, index, 0.2, 16)
        target = sparse.head_probabilities(q[:, heads], k, index, lse, 0.2)
        losses.append(sparse.indexer_loss(*leaves, index, target).sum())
        gradients.append(torch.autograd.grad(losses[-1], leaves))
    for whole, first, second in zip(*gradients, strict=True):
        assert differs(2 / 3 * first + 1 / 3 * second, whole) < 1e-14
    assert 2 / 3 * losses[1] + 1 / 3 * losses[2] > 1.0001 * losses[0]


def test_loss_of_listed_keys(card: list[str]) -> None:
    """Where the fused loss does not apply (here: 2 heads), the gradient of listed scores still is an operator."""
    limits = ranges(30, 10)
    leaves = indexer(40, 40, 64)
    index = ops.index_topk(*(x.detach() for x in leaves), *limits, 12, kernels="torch")
    target = torch.rand(40, 12).masked_fill(index < 0, 0)
    target[3] = 0
    got = ops.indexer_loss(*leaves, index, target, True, "auto", limits)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = sparse.indexer_loss(*wide, index, target.double())
    close(got, want, FP32, 100)
    grad = torch.rand(40)
    mine, theirs = torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, wide, grad.double())
    assert card == ["npu_lightning_indexer_grad"]
    # of a score's gradient in bf16, before it is multiplied
    for x, y in zip(mine, theirs, strict=True):
        close(x, y, times=4)


@pytest.mark.parametrize("queries", [8192, 25])
def test_dense_loss(queries: int, card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up: attention of 96 heads over all visible keys, not absorbed."""
    monkeypatch.setattr(npu_sparse, "LOSS_QUERIES", queries)
    limits = ranges(40, 20)
    heads = npu_sparse.Heads(*(x.detach() for x in (leaf(60, 96, 192), leaf(60, 96, 192), leaf(60, 96, 128))))
    leaves = indexer(60, 60, 32)
    # each head's latent is its keys: absorbed by hand, head by head
    q = torch.zeros(60, 96, 96 * 192).scatter_(
        2, (torch.arange(96)[:, None] * 192 + torch.arange(192)).expand(60, -1, -1), heads.q_TNH.float()
    )
    teacher = sparse.Teacher(q, heads.k_SNH.flatten(1).float(), SCALE)
    got = ops.fused_dense_indexer_loss(teacher, lambda: heads, sparse.Student(*leaves), limits, None, True, "auto")
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = sparse.dense_indexer_loss(teacher, sparse.Student(*wide), *limits).sum()
    assert card.count("npu_dense_lightning_indexer_grad_kl_loss") == (2 if queries > 60 else 6)
    close(got, want, FP32, 100)
    for x, y in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, wide), strict=True):
        close(x, y)


def experts(E: int, L: int, F: int, packed: bool) -> tuple[list, list[Tensor]]:
    """Stacks of gate and up, and of down, each with an adapter in fp32; and the adapters' factors."""
    stacks, factors = [], []
    for shape in ((E, 2 * F, L), (E, L, F)):
        weight = torch.randn(shape) * 0.2
        weight, scale = encode(weight) if packed else (weight.to(BF16), None)
        a, b = leaf(E, 3, shape[2], dtype=FP32), leaf(3, shape[1], E, dtype=FP32, std=0.1)
        factors += [a, b]
        # the strides that PEFT's matrix gives it
        stacks.append(ops.ExpertMatrices(weight, scale, (ops.LowRank(a, b.permute(2, 1, 0), 0.5),)))
    return stacks, factors


def expert_options(kernels: str, num_experts: int = 8) -> SimpleNamespace:
    betas = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    return SimpleNamespace(kernels=kernels, num_experts=num_experts, hidden_act="situ", **betas)


@pytest.mark.parametrize("held", ["all", "some", "one", "none"])
@pytest.mark.parametrize("packed", [True, False])
def test_experts(held: str, packed: bool, card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, input gradient and adapters. Experts without tokens, a single expert, and tokens of experts that are not
    held here; a workspace for three matrices."""
    L, F, T = 64, 32, 40
    monkeypatch.setattr(npu_experts, "WORKSPACE_BYTES", 3 * 2 * F * L * 2)
    E = {"all": 8, "one": 1}.get(held, 5)
    (gate_up, down), factors = experts(E, L, F, packed)
    # of eight, two are nobody's choice
    chosen = torch.tensor([0, 1, 3, 4, 5, 6])
    ids = torch.stack([chosen[torch.randperm(6)[:4]] for _ in range(T)])
    ids = ids + {"all": 0, "some": -2, "one": -3, "none": 100}[held]
    x, weights = leaf(T, L), leaf(T, 4, dtype=FP32)
    leaves = [x, weights, *factors]
    got = ops.expert_mlp(x, ids, weights, gate_up, down, expert_options("auto"))
    used = set(card)
    assert {"npu_grouped_matmul", "npu_moe_token_permute"} <= used and got.dtype == FP32
    assert ("npu_moe_token_unpermute" if held == "all" else "npu_moe_token_permute_grad_v2") in used
    want = ops.expert_mlp(x, ids, weights, gate_up, down, expert_options("torch"))
    grad = torch.randn(got.shape)
    mine = torch.autograd.grad(got, leaves, grad)
    theirs = torch.autograd.grad(want, leaves, grad)
    if held == "none":
        assert not got.any() and not any(y.any() for y in mine)
        return
    close(got, want)
    for y, z in zip(mine, theirs, strict=True):
        close(y, z, times=4)
    assert card.count("npu_grouped_matmul") > 8


def test_experts_in_fp32(card: list[str]) -> None:
    """Rows as the torch definition has them: differences are those of the order of sums."""
    (gate_up, down), factors = experts(8, 64, 32, True)
    ids = torch.stack([torch.randperm(8)[:4] for _ in range(30)])
    x, weights = leaf(30, 64, dtype=FP32), leaf(30, 4, dtype=FP32)
    got, want = (
        ops.expert_mlp(x, ids, weights, gate_up, down, expert_options(kernels)) for kernels in ("auto", "torch")
    )
    close(got, want, FP32, 10)
    grad = torch.randn(got.shape)
    leaves = [x, weights, *factors]
    for y, z in zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
        close(y, z, FP32, 50)
    assert card.count("npu_moe_token_unpermute") == 1


def test_kda_step(card: list[str]) -> None:
    """One token by the recurrent operator with a decay per channel; the state is rounded to bf16, and that is all."""
    q, k, v, z = (leaf(3, 4, 64).detach() for _ in range(4))
    beta, A_log, dt_bias = leaf(3, 4).detach(), torch.randn(4) * 0.1, torch.randn(4, 64)
    state = torch.randn(3, 4, 64, 64)
    arguments = q, k, v, z, beta, A_log, dt_bias, -5.0, state
    (o, new), (o_want, new_want) = (ops.kda_step(*arguments, kernels) for kernels in ("auto", "torch"))
    assert card == ["npu_recurrent_gated_delta_rule_functional"] and new.dtype == FP32
    close(o, o_want)
    close(new, new_want)


def played_chunk(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    safe_gate=False,
    cu_seqlens=None,
):
    """fla's chunk_kda, with those of its arguments that matter: decays and betas are given, not their logits."""
    assert use_qk_l2norm_in_kernel and scale is None and q.ndim == 4 and len(q) == 1
    assert g.dtype == torch.float32 and not g.gt(0).any() and (not safe_gate or g.ge(-5).all())
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    assert initial_state is None or initial_state.dtype == torch.float32
    documents = Documents.of_batch((1, q.shape[1]), torch.device("cpu"), cu_seqlens=cu_seqlens)
    o, state = ops.delta_chunk(*(x[0] for x in (q, k, v, g, beta)), documents, initial_state)
    return o[None], state if output_final_state else None


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_kda_chunks(lower_bound: float | None, card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By fla; its gate, which was wrong at extremes on Ascend once, is left to torch."""
    monkeypatch.setattr(npu, "chunk_kernel", lambda: (played_chunk, None))
    documents = Documents.of_batch((1, 30), torch.device("cpu"), cu_seqlens=torch.tensor([0, 12, 30]))
    x = [leaf(30, 2, 32) for _ in range(3)] + [leaf(30, 2, 32, std=30), leaf(30, 2)]
    gate = torch.tensor([-3.0, 3.0]), torch.randn(2, 32), lower_bound
    state = torch.randn(2, 2, 32, 32)
    got, want = (ops.kda_chunk(*x, *gate, documents, state, True, kernels) for kernels in ("auto", "torch"))
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert ops.kda_chunk(*x, *gate, documents, None, False, "auto")[1] is None
    grad = torch.randn(got[0].shape).to(BF16)
    gradients = [torch.autograd.grad(o, x, grad) for o, _ in (got, want)]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_fla_is_looked_for_once(card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any step, and not in the middle of one."""
    monkeypatch.setitem(sys.modules, "fla", None)
    npu.chunk_kernel.cache_clear()
    kernel, reason = npu.chunk_kernel()
    assert kernel is None and "fla-core with its Triton-Ascend backend does not load" in reason
    monkeypatch.setitem(sys.modules, "fla.ops.kda", SimpleNamespace(chunk_kda=played_chunk))
    assert npu.chunk_kernel() == (None, reason)
    npu.chunk_kernel.cache_clear()


FALLBACKS = {
    "fp32": (lambda x: x.float(), {}, "the tensors are torch.float32, torch.float32"),
    "pools": (lambda x: x, {"limits": None}, "keys are chosen in pools"),
    "sinks": (lambda x: x, {"sink": torch.zeros(4)}, "heads have sinks"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_what_no_operator_takes_is_torch_and_said_once(
    case: str, card: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert, options, reason = FALLBACKS[case]
    limits = options.get("limits", ranges(20, 10))
    q, kv = (convert(x.detach()) for x in latents(30, 4))
    index = ops.index_topk(*(x.detach() for x in indexer(30, 30, 8)), *ranges(20, 10), 4, kernels="torch")
    sink = options.get("sink")
    said: list[str] = []
    monkeypatch.setattr(npu.logger, "warning", said.append)
    for _ in range(2):
        got = ops.sparse_attention(q, kv, index, SCALE, 512, sink, "auto", limits)
    assert not card and torch.equal(got[0], ops.sparse_attention(q, kv, index, SCALE, 512, sink, "torch")[0])
    assert len(said) == 1 and re.match(f"sparse_attention: the torch definition, {re.escape(reason)}", said[0])


def test_torch_is_torch(card: list[str]) -> None:
    """The choice "torch" reaches no operator, and neither does the CPU."""
    q, k, weight = (x.detach() for x in indexer(20, 20, 8))
    ops.index_topk(q, k, weight, *ranges(20), 4, True, "torch")
    assert not card


def test_an_old_torch_npu_lacks_operators(card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu.torch.ops, "npu", SimpleNamespace(), raising=False)
    q, k, weight = (x.detach() for x in indexer(20, 20, 8))
    ops.index_topk(q, k, weight, *ranges(20), 4, True, "auto")
    assert not card


def test_every_schema_is_understood(operators: None) -> None:
    names = {schema.partition("(")[0].partition(".")[0] for schema in fake_npu.schemas()}
    assert len(fake_npu.schemas()) == 348
    assert all(hasattr(torch.ops.npu, name) for name in names) and fake_npu.IMPLEMENTATIONS.keys() <= names
