"""FSDP2 through Accelerate wraps exactly our decoder layers and vision blocks, with and without PEFT.

Accelerate refuses FSDP2 on CPU, so the child process tells its state classes otherwise after a CPU start.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

WRAP = """
import os
from collections import Counter
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForImageTextToText

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
accelerator = Accelerator(cpu=True)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
    cpu_ram_efficient_loading=False,
)
AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
PartialState._shared_state["distributed_type"] = DistributedType.FSDP

model = AutoModelForImageTextToText.from_pretrained(
    os.environ["MODEL"], trust_remote_code=True, dtype=torch.float32
)
ids_BT = torch.arange(20, 52)[None]
with torch.no_grad():
    expected_BTV = model.eval()(input_ids=ids_BT).logits
if os.environ["LORA"] == "1":
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj", "down_proj"], r=4))
else:
    model.requires_grad_(False)
    model.language_model.lm_head.weight.requires_grad_(True)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
config = model.config
model, optimizer = accelerator.prepare(model, optimizer)

units = [module for module in model.modules() if isinstance(module, FSDPModule)]
wrapped = Counter(type(unit).__name__.removeprefix("FSDP") for unit in units)
counts = sorted(wrapped[name] for name in model._no_split_modules)
expected = sorted([config.text_config.num_hidden_layers, config.vision_config.vt_num_hidden_layers])
assert counts == expected, (wrapped, model._no_split_modules)

found_BTV = model.eval()(input_ids=ids_BT).logits
torch.testing.assert_close(found_BTV, expected_BTV, rtol=1e-5, atol=1e-5)
loss = model.train()(input_ids=ids_BT, labels=ids_BT).loss
accelerator.backward(loss)
assert torch.isfinite(accelerator.clip_grad_norm_(model.parameters(), 1.0))
optimizer.step()
assert not torch.allclose(model.eval()(input_ids=ids_BT).logits, expected_BTV, atol=1e-5)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("lora", ["0", "1"], ids=["plain", "peft"])
def test_wraps_layers_and_blocks(lora: str, tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        **{"MODEL": str(tiny), "LORA": lora, "HF_MODULES_CACHE": str(tmp_path / "hf_modules")},
        **{
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        },
    }
    done = subprocess.run([sys.executable, "-c", WRAP], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
