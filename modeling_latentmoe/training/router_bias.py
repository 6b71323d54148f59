"""The selection biases of all routers: found in a model, changed there, and kept in a file beside an adapter.

They are part of what a run with Quantile Balancing learned (see balance.py), but no LoRA factors, and a PEFT file
holds nothing else. `router_bias.safetensors` has one fp32 tensor [E] for every router, under its name in a checkpoint:

    language_model.model.layers.3.block_sparse_moe.gate.e_score_correction_bias

`lora.load_adapter` applies it and `merge_adapter.py` writes it into the merged checkpoint. Readers that do not know
the file, stock PEFT and servers among them, ignore it: they route by the biases of the base model.

Legend: E experts.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from modeling_latentmoe.training.files import TEMPORARY

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
    bias_E = router.get_parameter(LEAF).detach()
    if isinstance(bias_E, DTensor):
        bias_E = bias_E.full_tensor()
    return bias_E.to(torch.float32, copy=True)


@torch.no_grad()
def set_bias(router: nn.Module, bias_E: Tensor) -> None:
    """Replace a router's bias by the fp32 values bias_E, which every process has; each writes what it holds of it.

    Between steps only: FSDP2 throws away what is written to a parameter that is gathered for a forward or backward.
    """
    target = router.get_parameter(LEAF)
    bias_E = bias_E.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        # without a source no process waits for another one: each cuts its part out of its own values
        bias_E = distribute_tensor(bias_E, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(bias_E)


def write_biases(folder: Path, biases: Mapping[str, Tensor]) -> None:
    """Write BIAS_FILE into a folder, in one step; names are those of `routers`, values fp32 [E]."""
    partial = folder / (BIAS_FILE + TEMPORARY)
    save_file({name: bias_E.cpu() for name, bias_E in biases.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, folder / BIAS_FILE)


def read_biases(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The biases in an adapter's folder, by the names of `routers(model)`; none where it has no BIAS_FILE.

    The model may be on the meta device. Raises ValueError that names file and tensor unless they are finite fp32
    values for exactly the routers of the model.
    """
    file = folder / BIAS_FILE
    if not file.is_file():
        return {}
    try:
        biases = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error})") from error
    shapes = {name: router.get_parameter(LEAF).shape for name, router in routers(model).items()}
    if odd := sorted(biases.keys() - shapes):
        raise ValueError(f"{file}: the model has no router with the bias {odd[0]}")
    if missing := sorted(shapes.keys() - biases):
        raise ValueError(f"{file}: {missing[0]} is missing")
    for name, bias_E in biases.items():
        if bias_E.shape != shapes[name] or bias_E.dtype != torch.float32:
            found = f"{str(bias_E.dtype).removeprefix('torch.')} {list(bias_E.shape)}"
            raise ValueError(f"{file}: {name} is {found}, the model needs float32 {list(shapes[name])}")
        if not bias_E.isfinite().all():
            raise ValueError(f"{file}: {name} holds NaN or infinite numbers")
    return biases


def set_biases(model: nn.Module, biases: Mapping[str, Tensor]) -> None:
    """Replace the biases of a model by those that `read_biases` returned for it."""
    found = routers(model)
    for name, bias_E in biases.items():
        set_bias(found[name], bias_E)
