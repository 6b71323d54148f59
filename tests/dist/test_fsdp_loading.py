"""FSDP2 with and without Accelerate's rank-0 loading: the same first loss, finite gradients, the same bytes.

Two gloo processes; Accelerate refuses FSDP2 on CPU, so the children tell its state classes otherwise.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

STEP = """
import hashlib, json, os
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from peft import LoraConfig, get_peft_model
from modeling_latentmoe.training.loading import load_model

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
accelerator = Accelerator(cpu=True)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
    cpu_ram_efficient_loading=os.environ["RANK0_LOADS"] == "1",
)
AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
PartialState._shared_state["distributed_type"] = DistributedType.FSDP

model = load_model(os.environ["MODEL"], "bf16")
torch.manual_seed(0)
targets = {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
model = get_peft_model(model, LoraConfig(r=2, **targets)).train()
with torch.no_grad():
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.normal_(std=0.05)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
ids = torch.arange(20, 60)[None] + torch.distributed.get_rank()
loss = model(input_ids=ids, labels=ids).loss
accelerator.backward(loss)
norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
finite = all(p.grad.full_tensor().isfinite().all() for p in model.parameters() if p.grad is not None)
optimizer.step()
packed = [p for n, p in model.named_parameters() if p.dtype == torch.uint8]
kept = [p for n, p in model.named_parameters() if n.endswith(("A_log", "dt_bias", "o_norm.weight"))]
digest = hashlib.sha256(b"".join(p.full_tensor().numpy().tobytes() for p in packed)).hexdigest()
record = {"loss": loss.item(), "norm": float(norm), "finite": bool(finite), "packed": digest, "count": len(packed)}
record["fp32"] = all(p.dtype == torch.float32 for p in kept) and len(kept) > 0
if accelerator.is_main_process:
    print(json.dumps(record))
torch.distributed.destroy_process_group()
"""


def run(rank0_loads: str, model: Path, cache: Path) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MODEL": str(model), "RANK0_LOADS": rank0_loads, "HF_MODULES_CACHE": str(cache)}
    common |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STEP],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [rank.communicate(timeout=240) for rank in ranks]
    for rank, (out, err) in zip(ranks, results, strict=True):
        assert rank.returncode == 0, f"{out}\n{err}"
    return json.loads(results[0][0].strip().splitlines()[-1])


def test_first_step_does_not_depend_on_who_reads_the_weights(tiny: Path, tmp_path: Path) -> None:
    every_rank, rank_0 = (run(flag, tiny, tmp_path / "modules") for flag in "01")
    for result in (every_rank, rank_0):
        assert result["finite"] and result["fp32"] and result["count"] > 0
    assert abs(every_rank["loss"] - rank_0["loss"]) < 1e-5
    assert abs(every_rank["norm"] - rank_0["norm"]) < 1e-5 * every_rank["norm"]
    assert every_rank["packed"] == rank_0["packed"]
