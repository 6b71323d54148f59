"""Generation cache: what each kind of layer has to remember of a row.

KDA keeps the last convolution inputs and one fp32 state matrix per head, whatever the length; attention layers keep
one latent per token (kv_lora_rank normed + qk_rope_head_dim raw); indexed layers with an indexer add one index key,
and where keys are pooled as many numbers again.

Legend: B batch, T new tokens, S remembered tokens.
"""

import inspect

import torch
from transformers import Cache, GenerationMixin

# transformers 5.24 renamed the argument through which `generate` hands a cache to the model.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


class LayerCache:
    """Named tensors of one layer; the first axis is always the batch row."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False
    is_initialized = True

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str) -> torch.Tensor | None:
        return self.tensors.get(name)

    def set(self, name: str, value: torch.Tensor) -> None:
        self.tensors[name] = value

    def append(self, name: str, new_BT: torch.Tensor) -> torch.Tensor:
        """Add tokens along axis 1 and return all that are remembered."""
        old = self.tensors.get(name)
        self.tensors[name] = new_BT if old is None else torch.cat([old, new_BT], dim=1)
        return self.tensors[name]

    def select_rows(self, rows: torch.Tensor) -> None:
        self.tensors = {name: x.index_select(0, rows.to(x.device)) for name, x in self.tensors.items()}


class LatentMoECache(Cache):
    """Cache of a whole decoder: one `LayerCache` a layer, the document number of every remembered token, and image
    features whose placeholders have not been read yet (a prefill chunk may end inside an image)."""

    def __init__(self, num_layers: int):
        super().__init__(layers=[LayerCache() for _ in range(num_layers)])
        self.ids_BS: torch.Tensor | None = None
        self.images: list[torch.Tensor] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.ids_BS is None else self.ids_BS.shape[1]

    def remember(self, ids_BT: torch.Tensor) -> None:
        self.ids_BS = ids_BT if self.ids_BS is None else torch.cat([self.ids_BS, ids_BT], dim=1)

    def _select_rows(self, rows: torch.Tensor) -> None:
        if self.ids_BS is None:
            return
        self.ids_BS = self.ids_BS.index_select(0, rows.to(self.ids_BS.device))
        if self.images is not None:
            self.images = [self.images[row] for row in rows.tolist()]
        for layer in self.layers:
            layer.select_rows(rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.ids_BS is not None:
            rows = torch.arange(self.ids_BS.shape[0], device=self.ids_BS.device)
            self._select_rows(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self.ids_BS, self.images = None, None
        for layer in self.layers:
            layer.tensors.clear()

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a KDA state cannot be rolled back: assisted generation is not supported by latentmoe models")


def check_cache(cache: object) -> LatentMoECache | None:
    """`cache`, or ValueError if it is of another kind (told by an attribute: this file may be imported twice)."""
    if cache is not None and not hasattr(cache, "ids_BS"):
        raise ValueError(f"cache: {type(cache).__name__} is not supported, leave it out (a LatentMoECache is made)")
    return cache
