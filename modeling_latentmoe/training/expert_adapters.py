"""Adapters when experts are shared out over ranks: the same values, and the same file, at every degree.

Each process holds PEFT's two factors of its own experts. PEFT's layout of a stack of E matrices [out, in] at rank r:
lora_A [E * r, in], expert by expert, and lora_B [out, r * E], in which the expert is the faster index.
"""

import hashlib
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from modeling_latentmoe.training.mesh import is_expert


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """Draw the first factors of all adapters again, each from `seed`, its name and, of a stack, its expert alone.

    PEFT draws one after the other: which numbers a factor gets would depend on how many experts the process holds. The
    distribution is PEFT's, uniform in +- 1 / sqrt(in); the second factors stay zero.
    """
    owned = held_experts(model)
    for name, param in model.named_parameters():
        if "lora_A" not in name:
            continue
        bound = 1 / math.sqrt(param.shape[1])
        matrices = zip(owned, param.chunk(len(owned)), strict=True) if is_expert(name) else [("", param)]
        for expert, rows in matrices:
            key = hashlib.sha256(f"{seed} {name} {expert}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:7]))
            # in fp32: an fp64 model then starts from the same numbers
            rows.copy_(torch.empty(rows.shape).uniform_(-bound, bound, generator=generator))


def held_experts(model: nn.Module) -> range:
    """The experts that this process holds, the same ones of every layer; none in a model without experts."""
    # by an attribute: the class may come from the installed package or from remote code
    held = {module.owned for module in model.modules() if "logical_shapes" in module.__dict__}
    assert len(held) <= 1, held
    return held.pop() if held else range(0)


def merge_factor(name: str, parts: list[Tensor], share: int) -> Tensor:
    """The factor of all experts, from those of the ranks of an expert-parallel group, `share` experts each."""
    if "lora_A" in name:
        return torch.cat(parts)
    return torch.cat([part.unflatten(1, (-1, share)) for part in parts], dim=2).flatten(1)


def slice_factor(name: str, factor: Tensor, owned: range, experts: int) -> Tensor:
    """The part of a factor of all `experts` that belongs to the experts `owned`."""
    here = slice(owned.start, owned.stop)
    if "lora_A" in name:
        return factor.unflatten(0, (experts, -1))[here].flatten(0, 1)
    return factor.unflatten(1, (-1, experts))[:, :, here].flatten(1)


def slice_adapter(model: nn.Module, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this process holds of an adapter file's tensors, for `set_peft_model_state_dict`."""
    owned, experts = held_experts(model), model.config.get_text_config().num_experts
    return {
        name: slice_factor(name, factor, owned, experts) if is_expert(name) else factor
        for name, factor in factors.items()
    }


@torch.no_grad()
def gather_adapter(model: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    """The LoRA factors of all layers and experts, on the CPU of the first process; {} elsewhere. All processes call it.

    One factor at a time, so that devices need room for one only. The names are those of the model's parameters, which
    `PeftModel.save_pretrained(state_dict=...)` turns into those of the file.
    """
    share, whole = len(held_experts(model)), {}
    efsdp, ep = mesh.get_coordinate()
    for name, param in model.named_parameters():
        if "lora_" not in name:
            continue
        value = param.full_tensor() if isinstance(param, DTensor) else param
        if is_expert(name) and efsdp == 0:
            # all groups hold the same: the first one gives its share
            parts = [torch.empty_like(value) for _ in range(mesh["ep"].size())] if ep == 0 else None
            dist.gather(value.contiguous(), parts, group=mesh.get_group("ep"), group_dst=0)
            value = merge_factor(name, parts, share) if parts else value
        if efsdp == ep == 0:
            whole[name] = value.cpu().clone()
    return whole
