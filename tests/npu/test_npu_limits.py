"""The fake card refuses what the documentation says a card does: a wrong call cannot pass the other tests."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

INT32, BF16 = torch.int32, torch.bfloat16


def half(*shape: int) -> Tensor:
    return torch.randn(shape).to(BF16)


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=INT32)


def choose(**changes) -> None:
    arguments = {"q": half(6, 8, 128), "k": half(6, 1, 128), "w": torch.randn(6, 8), "layout": "TND", "count": 4}
    arguments |= {"query_ends": ends(6), "key_ends": ends(6)} | changes
    torch.ops.npu.npu_lightning_indexer(
        *(arguments[name] for name in "qkw"),
        actual_seq_lengths_query=arguments["query_ends"],
        actual_seq_lengths_key=arguments["key_ends"],
        layout_query=arguments["layout"],
        layout_key=arguments["layout"],
        sparse_count=arguments["count"],
    )


LISTS = torch.tensor([[[0, -1]], [[0, 1]], [[2, 0]]], dtype=INT32)


def attend(**changes) -> None:
    arguments = {"q": half(3, 4, 512), "k": half(3, 1, 512), "q_rope": half(3, 4, 64), "k_rope": half(3, 1, 64)}
    arguments |= {"index": LISTS, "mode": 2, "ends": ends(3)} | changes
    torch.ops.npu.npu_sparse_flash_attention(
        arguments["q"],
        arguments["k"],
        arguments["k"],
        arguments["index"],
        0.1,
        query_rope=arguments["q_rope"],
        key_rope=arguments["k_rope"],
        actual_seq_lengths_query=arguments["ends"],
        actual_seq_lengths_kv=arguments["ends"],
        layout_query="TND",
        layout_kv="TND",
        attention_mode=arguments["mode"],
    )


def lose(**changes) -> None:
    N, T = changes.get("heads", 32), changes.get("tokens", 3)
    index = torch.arange(1024, dtype=INT32).expand(T, 1, -1)
    index = torch.where(index <= torch.arange(T)[:, None, None], index, -1).int().contiguous()
    documents = changes.get("documents", [T])
    torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss(
        half(T, N, 512),
        half(T, 1, 512),
        half(T, changes.get("index_heads", 8), 128),
        half(T, 1, 128),
        torch.randn(T, changes.get("index_heads", 8)),
        index[..., : changes.get("listed", 1024)].contiguous(),
        torch.zeros(1, T, N),
        torch.ones(1, T, N),
        0.1,
        query_rope=half(T, N, 64),
        key_rope=half(T, 1, 64),
        actual_seq_qlen=documents,
        actual_seq_klen=documents,
        layout="TND",
        sparse_mode=changes.get("mode", 3),
    )


def multiply(**changes) -> None:
    arguments = {"x": half(4, 8), "w": half(2, 8, 5), "groups": torch.tensor([1, 4]), "kind": 0} | changes
    torch.ops.npu.npu_grouped_matmul(
        [arguments["x"]],
        [arguments["w"]],
        group_list=arguments["groups"],
        split_item=3,
        group_type=0,
        group_list_type=arguments["kind"],
    )


def gate(**changes) -> None:
    arguments = {"x": torch.randn(3, 32), "bias": torch.zeros(32), "k": 4, "groups": 1} | changes
    torch.ops.npu.npu_moe_gating_top_k(
        arguments["x"], arguments["k"], bias=arguments["bias"], group_count=arguments["groups"], norm_type=1
    )


def step(**changes) -> None:
    arguments = {"state": half(2, 3, 16, 8), "gk": -torch.rand(2, 3, 8), "lengths": ends(1, 1)} | changes
    torch.ops.npu.npu_recurrent_gated_delta_rule_functional(
        half(2, 3, 8),
        half(2, 3, 8),
        half(2, 3, 16),
        arguments["state"],
        beta=half(2, 3),
        scale=1.0,
        actual_seq_lengths=arguments["lengths"],
        ssm_state_indices=ends(0, 1),
        gk=arguments["gk"],
    )


REFUSED: list[tuple[Callable, dict, str]] = [
    (choose, {"q": half(6, 65, 128), "w": torch.randn(6, 65)}, "indexer"),
    (choose, {"q": half(6, 8, 64), "k": half(6, 1, 64)}, "indexer"),
    (choose, {"q": half(6, 8, 128).float(), "k": half(6, 1, 128).float()}, "dtypes"),
    (choose, {"k": half(6, 2, 128)}, "shapes are"),
    (choose, {"q": half(8, 6, 128).transpose(0, 1)}, "query is not contiguous"),
    (choose, {"count": 2049}, "sparse_count 2049"),
    (choose, {"layout": "SBH"}, "layouts"),
    (choose, {"query_ends": None}, "needs the ends"),
    (choose, {"query_ends": ends(6).long()}, "int32"),
    (choose, {"query_ends": ends(3, 6)}, "2 ends of queries, 1 of keys"),
    (choose, {"key_ends": ends(5)}, "documents end at"),
    (choose, {"q": half(6, 8, 128).requires_grad_()}, "has no gradient"),
    (attend, {"q": half(3, 96, 512), "q_rope": half(3, 96, 64)}, "96 heads"),
    (attend, {"mode": 0}, "attention_mode 0"),
    (attend, {"q_rope": None}, "rotary"),
    (attend, {"q": half(3, 4, 576)}, "latents 576"),
    (attend, {"k_rope": half(3, 1, 32)}, "rotary shapes"),
    (attend, {"index": LISTS.long()}, "sparse_indices"),
    (attend, {"index": LISTS.flip(0).contiguous()}, "lists a key that it does not see"),
    (attend, {"index": LISTS.masked_fill(LISTS == 1, -1)}, "lists 1"),
    (attend, {"index": LISTS.masked_fill(LISTS == 1, 0)}, "twice"),
    (attend, {"index": torch.tensor([[[0, 0]], [[0, 1]], [[2, 0]]], dtype=INT32)}, "more keys than it sees"),
    (lose, {"heads": 96}, "96 heads"),
    (lose, {"heads": 16}, "16 heads"),
    (lose, {"index_heads": 24}, "indexer"),
    (lose, {"listed": 512}, "sparse_indices"),
    (lose, {"mode": 0}, "modes other than 3"),
    (lose, {"documents": [1, 2]}, "documents end at"),
    (multiply, {"groups": torch.tensor([4]), "kind": 1, "w": half(1, 8, 5)}, "one number of rows"),
    (multiply, {"groups": torch.tensor([1, 3])}, "npu_grouped_matmul: "),
    (multiply, {"groups": torch.tensor([3, 1])}, "group_list"),
    (multiply, {"groups": ends(1, 4)}, "group_list"),
    (multiply, {"w": half(2, 8, 5).float()}, "dtypes"),
    (multiply, {"w": half(8, 2, 5).transpose(0, 1)}, "whole or transposed"),
    (gate, {"bias": torch.zeros(32).to(BF16)}, "bias"),
    (gate, {"k": 33}, "k 33"),
    (gate, {"groups": 16}, "groups"),
    (gate, {"x": torch.randn(3, 2049), "bias": None}, "x"),
    (step, {"state": torch.randn(2, 3, 16, 8)}, "bf16"),
    (step, {"gk": -torch.rand(2, 3)}, "gk"),
    (step, {"lengths": ends(1, 9)}, "lengths"),
]


@pytest.mark.parametrize("call", [choose, attend, lose, multiply, gate, step])
def test_a_right_call_passes(call: Callable, card: list[str]) -> None:
    call()


@pytest.mark.parametrize(
    ("call", "changes", "reason"), REFUSED, ids=[f"{call.__name__} {reason}" for call, _, reason in REFUSED]
)
def test_wrong_calls_are_refused(call: Callable, changes: dict, reason: str, card: list[str]) -> None:
    with pytest.raises(RuntimeError, match=reason):
        call(**changes)


@pytest.mark.parametrize("card", ["Ascend950PR"], indirect=True)
def test_limits_of_950(card: list[str]) -> None:
    with pytest.raises(RuntimeError, match="weights on 950"):
        choose()
    attend(q=half(3, 96, 512), q_rope=half(3, 96, 64))
    with pytest.raises(RuntimeError, match="not on Ascend 950"):
        torch.ops.npu.npu_dense_lightning_indexer_softmax_lse(half(2, 8, 128), half(2, 1, 128), torch.randn(2, 8))
