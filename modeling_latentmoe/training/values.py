"""Values of base weights that a run learned beside an adapter: kept in a file of their own, and put into a model.

A PEFT file holds nothing but LoRA factors. What else was learned, router biases (router_bias.py) and indexers
(indexer.py), lies beside it: fp32 tensors under their names in a checkpoint. `lora.load_adapter` applies them and
`merge_adapter.py` writes them into the merged checkpoint; base_model.json lists the files, and both refuse a folder
that lacks one. Readers that do not know the files, stock PEFT and servers among them, ignore them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from modeling_latentmoe.training.files import TEMPORARY


def full_value(parameter: Tensor) -> Tensor:
    """A copy of a whole parameter, in fp32. Where it is sharded a collective: every process calls it."""
    value = parameter.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.to(torch.float32, copy=True)


@torch.no_grad()
def set_value(parameter: Tensor, value: Tensor) -> None:
    """Replace a parameter by values that every process has; each writes what it holds of it.

    Between steps only: FSDP2 throws away what is written to a parameter that is gathered for a forward or backward.
    """
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        # without a source no process waits for another one: each cuts its part out of its own values
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def write_values(file: Path, values: Mapping[str, Tensor]) -> None:
    """Write fp32 tensors by name, in one step."""
    partial = file.with_name(file.name + TEMPORARY)
    save_file({name: value.cpu() for name, value in values.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, file)


def read_values(file: Path, shapes: Mapping[str, torch.Size], owner: str) -> dict[str, Tensor]:
    """The tensors of a file; none where nothing has its name. `owner`: what has them, for messages.

    Raises ValueError that names file and tensor unless they are finite fp32 values for exactly these names and shapes;
    and for a folder, or a link to nothing, of this name.
    """
    if not os.path.lexists(file):
        return {}
    if not file.is_file():
        raise ValueError(f"{file} is not a regular file, or a link to one")
    try:
        values = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error})") from error
    if odd := sorted(values.keys() - shapes):
        raise ValueError(f"{file}: the model has no {owner} {odd[0]}")
    if missing := sorted(shapes.keys() - values):
        raise ValueError(f"{file}: {missing[0]} is missing")
    for name, value in values.items():
        if value.shape != shapes[name] or value.dtype != torch.float32:
            found = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            raise ValueError(f"{file}: {name} is {found}, the model needs float32 {list(shapes[name])}")
        if not value.isfinite().all():
            raise ValueError(f"{file}: {name} holds NaN or infinite numbers")
    return values
