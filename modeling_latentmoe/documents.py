"""Which token belongs to which document: the one description of packing and padding that all layers share.

A batch row may hold padding and several packed documents. Layers that mix tokens need to know the borders: KDA
restarts its convolution and its recurrent state, attention must not look across, the router must not see padding.

Legend: B batch, T tokens of this call, S cached + new tokens, M real (unpadded) tokens of the whole batch in order,
        P cached tokens, D documents, R documents with cached keys, W convolution width, C tokens per chunk, N chunks,
        G pools of keys.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from .sparse import Pools

PADDING = -1


@dataclass(frozen=True)
class Chunks:
    """Documents cut into chunks of C tokens, step-major: all first chunks, then all second ones, ...

    index_NC: position in the M real tokens, or M (one past the end) where the chunk is padded.
    active: number of documents that have a chunk at each step; documents are ranked by falling length.
    rank_D: the document at each rank.
    """

    index_NC: torch.Tensor
    active: list[int]
    rank_D: torch.Tensor


@dataclass(frozen=True)
class Documents:
    """Document number of every token of a batch; padding is -1.

    ids_BT: int64, counting from 0 in each row. past_ids_BP: the same for tokens already in the cache (or None).
    """

    ids_BT: torch.Tensor
    past_ids_BP: torch.Tensor | None = None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "Documents":
        """The same on another device; accelerate calls this where a device map cuts between layers."""
        if torch.empty(0, device=device).device == self.ids_BT.device:
            return self
        past = None if self.past_ids_BP is None else self.past_ids_BP.to(device, non_blocking=non_blocking)
        return Documents(self.ids_BT.to(device, non_blocking=non_blocking), past)

    @cached_property
    def valid_BT(self) -> torch.Tensor | None:
        """False at padding; None when nothing is padded."""
        valid = self.ids_BT != PADDING
        return None if bool(valid.all()) else valid

    @cached_property
    def packed(self) -> bool:
        """Whether a row holds more than one document."""
        return bool((self.ids_BT > 0).any())

    @cached_property
    def key_ids_BS(self) -> torch.Tensor:
        return self.ids_BT if self.past_ids_BP is None else torch.cat([self.past_ids_BP, self.ids_BT], dim=1)

    @cached_property
    def attention_mask_BTS(self) -> torch.Tensor:
        """bool: True where a query may look. Padding sees earlier padding, so that no row is empty."""
        T, S = self.ids_BT.shape[1], self.key_ids_BS.shape[1]
        device = self.ids_BT.device
        causal_TS = torch.arange(S, device=device) <= torch.arange(S - T, S, device=device)[:, None]
        return causal_TS & (self.ids_BT[:, :, None] == self.key_ids_BS[:, None, :])

    @cached_property
    def longest(self) -> int:
        """Keys of the longest document, cached ones included (kv_len)."""
        keys = self.key_ids_BS
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None].expand_as(keys)
        pairs = torch.stack([rows, keys], dim=-1)[keys != PADDING]
        if not len(pairs):
            return 0
        return int(torch.unique(pairs, dim=0, return_counts=True)[1].max())

    @cached_property
    def key_token_S(self) -> torch.Tensor:
        """Flat position of every real key, cached ones included, row by row: the keys of the packed tokens."""
        return (self.key_ids_BS.flatten() != PADDING).nonzero().squeeze(-1)

    def pack_keys(self, x_BS: torch.Tensor) -> torch.Tensor:
        """[B, cached + T, ...] -> [real keys, ...], in order."""
        flat = x_BS.flatten(0, 1)
        return flat if len(self.key_token_S) == len(flat) else flat[self.key_token_S]

    @cached_property
    def _key_runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For every real key: the first key of its document, and how many keys the document has."""
        keys = self.key_token_S
        pair_S2 = torch.stack([keys // self.key_ids_BS.shape[1], self.key_ids_BS.flatten()[keys]], dim=-1)
        _, run_S, length_R = torch.unique_consecutive(pair_S2, dim=0, return_inverse=True, return_counts=True)
        return (length_R.cumsum(0) - length_R)[run_S], length_R[run_S]

    @cached_property
    def key_ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys that each real token of this call sees: first_M <= key < end_M, int32 positions in the real keys."""
        T = self.ids_BT.shape[1]
        count_BS = (self.key_ids_BS.flatten() != PADDING).cumsum(0).unflatten(0, self.key_ids_BS.shape)
        end_M = count_BS[:, -T:].flatten()[self.token_M]
        return self._key_runs[0][end_M - 1].int(), end_M.int()

    @cached_property
    def _pools(self) -> dict[int, Pools]:
        return {}

    def pools(self, size: int) -> Pools:
        """The real keys in pools of `size`, from the first key of each document; what is left behind is in none. A
        token sees the pools whose last key it sees."""
        # Every layer of a forward asks for the same.
        if size not in self._pools:
            first_S, length_S = self._key_runs
            place_S = torch.arange(len(first_S), device=first_S.device) - first_S
            start_G = ((place_S % size == 0) & (place_S + size <= length_S)).nonzero().squeeze(-1)
            first_M, end_M = self.key_ranges
            pool_M = torch.searchsorted(start_G.int(), first_M, out_int32=True)
            self._pools[size] = Pools(size, start_G, pool_M, pool_M + (end_M - first_M) // size)
        return self._pools[size]

    @cached_property
    def token_M(self) -> torch.Tensor:
        """Flat [B * T] position of every real token, row by row."""
        return (self.ids_BT.flatten() != PADDING).nonzero().squeeze(-1)

    @cached_property
    def _runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        row_M = self.token_M // self.ids_BT.shape[1]
        pair_M2 = torch.stack([row_M, self.ids_BT.flatten()[self.token_M]], dim=-1)
        pair_D2, length_D = torch.unique_consecutive(pair_M2, dim=0, return_counts=True)
        return pair_D2[:, 0], length_D

    @property
    def row_D(self) -> torch.Tensor:
        """Batch row of every document."""
        return self._runs[0]

    @property
    def length_D(self) -> torch.Tensor:
        return self._runs[1]

    @cached_property
    def lengths(self) -> list[int]:
        """`length_D` for the host, which waits for it once."""
        return self.length_D.tolist()

    @cached_property
    def cu_seqlens(self) -> torch.Tensor | None:
        """Borders of the documents in the M real tokens, int32 [D + 1], from 0 to M; None for a single document."""
        if len(self.length_D) == 1:
            return None
        ends = self.length_D.cumsum(0, dtype=torch.int32)
        return torch.cat([ends.new_zeros(1), ends])

    @cached_property
    def start_D(self) -> torch.Tensor:
        return self.length_D.cumsum(0) - self.length_D

    def pack(self, x_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] -> [M, ...]: the real tokens, in order. A view of x where all are real."""
        flat = x_BT.flatten(0, 1)
        return flat if self.valid_BT is None else flat[self.token_M]

    def unpack(self, x_M: torch.Tensor) -> torch.Tensor:
        """[M, ...] -> [B, T, ...], zeros at padding. A view of x where there is none."""
        B, T = self.ids_BT.shape
        if self.valid_BT is None:
            return x_M.unflatten(0, (B, T))
        flat = x_M.new_zeros(B * T, *x_M.shape[1:])
        return flat.index_copy(0, self.token_M, x_M).unflatten(0, (B, T))

    @cached_property
    def _windows(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def window(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a causal window of `width` tokens reads, and what it must remember.

        Positions index the M real tokens followed by D * (width - 1) remembered ones (zeros for a fresh document).
        Returns index_MW (the window of every token, oldest first) and tail_DW (the last width - 1 of each document).
        """
        # Every layer of a forward asks for the same.
        if width not in self._windows:
            self._windows[width] = self._window(width)
        return self._windows[width]

    def _window(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        M, device = len(self.token_M), self.token_M.device
        document_M = torch.repeat_interleave(torch.arange(len(self.length_D), device=device), self.length_D)
        place_M = torch.arange(M, device=device) - self.start_D[document_M]

        def position(document: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            remembered = M + document * (width - 1) + place + (width - 1)
            return torch.where(place < 0, remembered, self.start_D[document] + place)

        back_W = torch.arange(1 - width, 1, device=device)
        index_MW = position(document_M[:, None], place_M[:, None] + back_W)
        document_D = torch.arange(len(self.length_D), device=device)
        tail_DW = position(document_D[:, None], self.length_D[:, None] + back_W[:-1])
        return index_MW, tail_DW

    def chunks(self, size: int) -> Chunks:
        """Cut every document into chunks of `size` tokens (the last one padded)."""
        M, device = len(self.token_M), self.token_M.device
        length_D, rank_D = self.length_D.sort(descending=True, stable=True)
        count_D = (length_D + size - 1) // size
        steps = torch.arange(int(count_D.max()) if len(count_D) else 0, device=device)
        active = (count_D[None] > steps[:, None]).sum(1)
        step_N = torch.repeat_interleave(steps, active)
        rank_N = torch.arange(len(step_N), device=device) - (active.cumsum(0) - active)[step_N]
        place_NC = step_N[:, None] * size + torch.arange(size, device=device)
        inside_NC = place_NC < length_D[rank_N][:, None]
        index_NC = torch.where(inside_NC, self.start_D[rank_D][rank_N][:, None] + place_NC, M)
        return Chunks(index_NC=index_NC, active=active.tolist(), rank_D=rank_D)

    @classmethod
    def of_batch(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        past_ids: torch.Tensor | None = None,
    ) -> "Documents":
        """Read the documents of a [B, T] batch from what Hugging Face code passes to a model.

        attention_mask: [B, T] or [B, cached + T], 0 at padding. cu_seqlens: int [D + 1], borders inside a single row.
        position_ids: [B, T]; without cu_seqlens a position 0 starts a document, all others follow their predecessor.
        past_ids: document numbers of the cached tokens, whose last document the row continues.

        Raises ValueError for boundaries that do not fit the batch.
        """
        B, T = shape
        if T == 0:
            raise ValueError("input_ids: no tokens (a row of length 0)")
        valid = torch.ones(B, T, dtype=torch.bool, device=device)
        if attention_mask is not None:
            cached = 0 if past_ids is None else past_ids.shape[1]
            if (
                attention_mask.dim() != 2
                or attention_mask.shape[0] != B
                or attention_mask.shape[1] not in (T, cached + T)
            ):
                raise ValueError(
                    f"attention_mask: shape {tuple(attention_mask.shape)}, expected [{B}, {T}] or [{B}, {cached + T}] "
                    f"with 0 at padding (documents are separated by cu_seqlens, not by a 4-D mask)"
                )
            if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
                raise ValueError("attention_mask: expected 1 for tokens and 0 for padding, not additive values")
            valid = attention_mask[:, -T:].to(device) != 0
        if cu_seqlens is not None:
            starts = _starts_from_boundaries(cu_seqlens, B, T, device)
        elif position_ids is not None:
            starts = _starts_from_positions(position_ids.to(device), valid)
        else:
            starts = torch.zeros_like(valid)
        ids = starts.long().cumsum(1)
        # The first document of a row that has real tokens is number 0.
        ids = ids - ids.masked_fill(~valid, T).min(dim=1, keepdim=True).values
        ids = torch.where(valid, ids, PADDING)
        return cls(ids, past_ids)


def _starts_from_boundaries(cu_seqlens: torch.Tensor, B: int, T: int, device: torch.device) -> torch.Tensor:
    if B != 1:
        raise ValueError(f"cu_seqlens: expects all documents packed into one row, got {B} rows")
    borders = cu_seqlens.to(device=device, dtype=torch.long)
    if (
        borders.dim() != 1
        or len(borders) < 2
        or borders[0] != 0
        or borders[-1] != T
        or bool((borders.diff() < 0).any())
    ):
        raise ValueError(
            f"cu_seqlens: must rise from 0 to the row length {T} (a padded tail is a document that attention_mask "
            f"hides), got {borders.tolist()[:8]}"
        )
    starts = torch.zeros(1, T, dtype=torch.bool, device=device)
    inner = borders[1:-1]
    starts[0, inner[inner < T]] = True
    starts[0, 0] = False
    return starts


def _starts_from_positions(position_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    if position_ids.dim() > 2:
        raise ValueError(f"position_ids: shape {tuple(position_ids.shape)}, expected [B, T]")
    position_ids = position_ids.expand_as(valid)
    starts = torch.zeros_like(valid)
    starts[:, 1:] = valid[:, 1:] & (position_ids[:, 1:] == 0)
    follows = position_ids[:, 1:] == position_ids[:, :-1] + 1
    # After padding there is no predecessor to compare with.
    if bool((valid[:, 1:] & valid[:, :-1] & ~follows & ~starts[:, 1:]).any()):
        raise ValueError("position_ids: must count up by one within a document and restart at 0 with the next")
    return starts
