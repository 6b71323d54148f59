"""From selected pools to keys."""

import pytest
import torch
from sparse_attention.pool import _expand_pools, expand_pools


def inputs_of(device: str):
    """Two documents of 10 and 7 keys in pools of 4: pools begin at 0, 4 and 10, and keys 8, 9, 14, 15, 16 are left."""
    end = torch.arange(1, 18, dtype=torch.int32, device=device)
    first = torch.where(end > 10, 10, 0).int()
    token = torch.tensor([0, 4, 10], dtype=torch.int32, device=device)
    pool = torch.full((17, 2), -1, dtype=torch.int32, device=device)
    pool[3:10, 0] = 0
    pool[7:10, 1] = 1
    # The second pool alone, of a query that has seen two.
    pool[9, 0], pool[9, 1] = 1, -1
    pool[13:, 0] = 2
    return pool, token, first, end


def test_keys_of_pools(device):
    pool, token, first, end = inputs_of(device)
    index = expand_pools(pool, token, first, end, 4)
    assert index.dtype == torch.int32 and index.shape == (17, 11)
    for t, row in enumerate(index.tolist()):
        start, selected = (0, [p for p in pool[t].tolist() if p >= 0]) if t < 10 else (10, pool[t, :1].tolist())
        keys = [token[p].item() + i for p in selected if p >= 0 for i in range(4)]
        keys += list(range(t + 1 - (t + 1 - start) % 4, t + 1))
        assert row == keys + [-1] * (11 - len(keys))


def test_pools_of_one_key(device):
    pool, _, first, end = inputs_of(device)
    token = torch.tensor([5, 6, 7], dtype=torch.int32, device=device)
    index = expand_pools(pool, token, first, end, 1)
    assert torch.equal(index, torch.where(pool >= 0, pool + 5, -1))


def test_no_queries(device):
    pool, token, first, end = inputs_of(device)
    assert expand_pools(pool[:0], token, first[:0], end[:0], 4).shape == (0, 11)


def test_refusals_name_the_argument(device):
    pool, token, first, end = inputs_of(device)
    for changed, message in [
        ({"pool_Tk": pool[0]}, "pool_Tk: expected"),
        ({"pool_Tk": pool.long()}, "pool_Tk: expected"),
        ({"token_S": token.long()}, "token_S: expected"),
        ({"first_T": first[1:]}, "first_T: expected"),
        ({"end_T": end.long()}, "end_T: expected"),
        ({"size": 0}, "size: 0"),
    ]:
        arguments = {"pool_Tk": pool, "token_S": token, "first_T": first, "end_T": end, "size": 4, **changed}
        with pytest.raises(ValueError, match=f"^{message}"):
            expand_pools(**arguments)


def test_operator_is_well_formed(device):
    torch.library.opcheck(_expand_pools, (*inputs_of(device), 4))
