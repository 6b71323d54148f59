"""The selection biases of all routers: found in a model, changed there, and kept in a file beside an adapter.

They are part of what a run with Quantile Balancing learned (see balance.py). `router_bias.safetensors` (values.py) has
one fp32 tensor [E] for every router, under its name in a checkpoint:

    language_model.model.layers.3.block_sparse_moe.gate.e_score_correction_bias

Legend: E experts.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from modeling_latentmoe.training.values import full_value, read_values, set_value, write_values

BIAS_FILE = "router_bias.safetensors"
LEAF = "e_score_correction_bias"


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Name of the bias in a checkpoint -> its router, in the order of the layers.

    model: the base model itself, also where PEFT, FSDP2 or DDP work on it, and not what they return: that has other
    names.
    """
    # by an attribute: the class may come from the installed package or from remote code
    names = [name for name, _ in model.named_parameters() if name.endswith(f".{LEAF}")]
    return {name: model.get_submodule(name.removesuffix(f".{LEAF}")) for name in names}


def full_bias(router: nn.Module) -> Tensor:
    """A copy of a router's whole bias, fp32 [E]. Where it is sharded a collective: every process calls it."""
    return full_value(router.get_parameter(LEAF))


def set_bias(router: nn.Module, bias_E: Tensor) -> None:
    """Replace a router's bias by the fp32 values bias_E, which every process has; between steps only."""
    set_value(router.get_parameter(LEAF), bias_E)


def write_biases(folder: Path, biases: Mapping[str, Tensor]) -> None:
    """Write BIAS_FILE into a folder, in one step; names are those of `routers`, values fp32 [E]."""
    write_values(folder / BIAS_FILE, biases)


def read_biases(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The biases in an adapter's folder, by the names of `routers(model)`; none where it has no BIAS_FILE.

    The model may be on the meta device. Raises ValueError that names file and tensor unless they are finite fp32
    values for exactly the routers of the model.
    """
    shapes = {name: router.get_parameter(LEAF).shape for name, router in routers(model).items()}
    return read_values(folder / BIAS_FILE, shapes, "router with the bias")


def set_biases(model: nn.Module, biases: Mapping[str, Tensor]) -> None:
    """Replace the biases of a model by those that `read_biases` returned for it."""
    found = routers(model)
    for name, bias_E in biases.items():
        set_bias(found[name], bias_E)
