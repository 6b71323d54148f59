"""Training the indexers of sparse attention (modeling_latentmoe/indexer.py), in two stages.

    warmup   attention is dense and everything but the indexers frozen: they learn from all visible keys
    sparse   attention sees the chosen keys; indexers learn from these, and adapters, as always, from the tokens' loss

They are trained as weights, in fp32 whatever the dtype of the model, and not by LoRA. `indexer.safetensors` beside the
adapter (values.py) has all of them under their names in a checkpoint:

    language_model.model.layers.3.self_attn.indexer.wq_b.weight
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from modeling_latentmoe.training.values import read_values

INDEXER_FILE = "indexer.safetensors"
PART = "indexer"


def indexer_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of all indexers by their names in a checkpoint. model: as for `router_bias.routers`."""
    return {name: parameter for name, parameter in model.named_parameters() if PART in name.split(".")}


def train_indexers(model: nn.Module, alone: bool) -> None:
    """Make the indexers of a base model trainable, in fp32 or wider; `alone`: and nothing else, with dense attention.

    Before the model is sharded. Raises ValueError for a model without indexers.
    """
    found = indexer_parameters(model)
    if not found:
        raise ValueError("--train_indexer: the model has no indexer, scripts/add_indexer.py gives it one")
    config = model.config.get_text_config()
    config.indexer_loss, config.dense_attention = True, alone
    if alone:
        model.requires_grad_(False)
    for parameter in found.values():
        widen(parameter)
        parameter.requires_grad_(True)


def widen(parameter: nn.Parameter) -> None:
    """What a step changes, or what was learned in fp32, would be rounded away in a model of bf16."""
    parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def read_indexers(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The indexers in an adapter's folder, by the names of `indexer_parameters(model)`; none where it has no
    INDEXER_FILE. The model may be on the meta device. ValueError as in `values.read_values`."""
    shapes = {name: parameter.shape for name, parameter in indexer_parameters(model).items()}
    return read_values(folder / INDEXER_FILE, shapes, "indexer with")


@torch.no_grad()
def set_indexers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace the indexers of a model that is not sharded by those that `read_indexers` returned for it, in fp32."""
    found = indexer_parameters(model)
    for name, value in values.items():
        widen(found[name])
        found[name].copy_(value)
