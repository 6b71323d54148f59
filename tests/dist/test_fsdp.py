"""FSDP2 through Accelerate on our model, without the training script: units, the first step, who reads the weights."""

import hashlib
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from cpu_fsdp import start_with_fsdp
from peft import LoraConfig, get_peft_model
from processes import as_launched, spawn
from torch.distributed.fsdp import FSDPModule
from training_runs import FSDP2

from modeling_latentmoe.training.loading import load_model

pytestmark = pytest.mark.dist


def accelerated(rank: int, world: int, **settings: str) -> Accelerator:
    """As the launcher would start this process."""
    as_launched(rank, world)
    os.environ |= {**FSDP2, **settings}
    # else transformers, asked for FSDP, would leave the weights of all but the first process empty
    del os.environ["ACCELERATE_USE_FSDP"]
    Accelerator.__init__ = start_with_fsdp
    return Accelerator(cpu=True)


def wrapped(rank: int, world: int, folder: str, lora: bool) -> tuple[Counter, dict[str, int]]:
    """Units, and how many there must be of which class; asserts that the model still computes, and trains."""
    accelerator = accelerated(rank, world)
    model = load_model(folder, "fp32")
    ids_BT = torch.arange(20, 52)[None]
    with torch.no_grad():
        expected_BTV = model.eval()(input_ids=ids_BT).logits
    layers, blocks = model.language_model.model.layers, model.vision_tower.encoder.blocks
    expected = {type(part[0]).__name__: len(part) for part in (layers, blocks)}
    assert expected.keys() == set(model._no_split_modules)
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj", "down_proj"], r=4))
    else:
        model.requires_grad_(False)
        model.language_model.lm_head.weight.requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    units = Counter(
        type(module).__name__.removeprefix("FSDP") for module in model.modules() if isinstance(module, FSDPModule)
    )
    torch.testing.assert_close(model.eval()(input_ids=ids_BT).logits, expected_BTV, rtol=1e-5, atol=1e-5)
    accelerator.backward(model.train()(input_ids=ids_BT, labels=ids_BT).loss)
    assert torch.isfinite(accelerator.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    assert not torch.allclose(model.eval()(input_ids=ids_BT).logits, expected_BTV, atol=1e-5)
    return units, expected


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "peft"])
def test_wraps_layers_and_blocks(lora: bool, tiny: Path, tmp_path: Path) -> None:
    """Public report 21: every decoder layer and vision block of the remote class is a unit, inside PEFT too."""
    ((units, expected),) = spawn(tmp_path / "world", 1, wrapped, str(tiny), lora)
    assert len(expected) == 2 and min(expected.values()) > 1
    assert {name: units[name] for name in expected} == expected


def first_step(rank: int, world: int, folder: str, rank_0_loads: str) -> dict:
    """Loss, norm and digest of packed bytes that FSDP2, left to itself, shards as well."""
    accelerator = accelerated(rank, world, FSDP_CPU_RAM_EFFICIENT_LOADING=rank_0_loads)
    model = load_model(folder, "bf16")
    torch.manual_seed(0)
    targets = {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    model = get_peft_model(model, LoraConfig(r=2, **targets)).train()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.05)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(20, 60)[None] + rank
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad.full_tensor().isfinite().all() for p in model.parameters() if p.grad is not None)
    optimizer.step()
    packed = [p for p in model.parameters() if p.dtype == torch.uint8]
    digest = hashlib.sha256(b"".join(p.full_tensor().numpy().tobytes() for p in packed)).hexdigest()
    kept = [p for n, p in model.named_parameters() if n.endswith(("A_log", "dt_bias", "o_norm.weight"))]
    assert packed and kept and all(p.dtype == torch.float32 for p in kept)
    return {"loss": loss.item(), "norm": float(norm), "digest": digest}


@pytest.mark.slow
def test_first_step_does_not_depend_on_who_reads_the_weights(tiny: Path, tmp_path: Path) -> None:
    """Public report 20: with and without Accelerate's loading by the first process (which scripts/lora.py refuses)."""
    every, first = (spawn(tmp_path / flag, 2, first_step, str(tiny), flag)[0] for flag in ("false", "true"))
    assert first["loss"] == pytest.approx(every["loss"], abs=1e-5)
    assert first["norm"] == pytest.approx(every["norm"], rel=1e-5)
    assert first["digest"] == every["digest"]
