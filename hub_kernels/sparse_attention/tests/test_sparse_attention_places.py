"""Shares of a key lie side by side, in the order of the queries; no place is left out or taken twice."""

import pytest
import torch
from sparse_attention import places
from sparse_attention.places import Places


def check(found: Places, index_Tk: torch.Tensor, keys: int) -> None:
    found.set(index_Tk)
    taken = []
    for s in range(keys):
        # Row by row, so that queries are in order.
        here = found.place[: len(index_Tk)][index_Tk == s].tolist()
        assert here == list(range(int(found.start[s]), int(found.end[s])))
        taken += here
    assert sorted(taken) == list(range(int((index_Tk >= 0).sum())))


def selection(T: int, S: int, k: int, device: str) -> torch.Tensor:
    """int32 [T, k]: random keys in no order, 0 to k of them in a row, then -1."""
    generator = torch.Generator(device).manual_seed(T)
    keys = torch.rand(T, max(S, k), generator=generator, device=device).argsort(1)[:, :k]
    some = torch.randint(0, k + 1, (T, 1), generator=generator, device=device)
    keys = torch.where((torch.arange(k, device=device) < some) & (keys < S), keys, S).sort(1).values
    turned = torch.where(keys < S, S - 1 - keys, -1)
    return turned.int().contiguous()


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (33, 300, 9), (70, 40, 20)], ids=str)
def test_places(shape, device):
    T, S, k = shape
    check(Places(T, k, S, torch.device(device)), selection(T, S, k, device), S)


def test_room_is_used_again(device, monkeypatch):
    """A later selection finds nothing of an earlier one, and more words than a tile holds are counted."""
    monkeypatch.setattr(places, "WORDS", 2)
    room = Places(150, 5, 17, torch.device(device))
    for T in (150, 40):
        check(room, selection(T, 17, 5, device), 17)
