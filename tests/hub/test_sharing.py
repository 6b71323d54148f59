"""A model and an adapter shared through the Hub: pushed, then used by a process that never saw our package.

Everything goes over HTTP to the loopback server. The model directory is the shipped one, code included.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub

PUSH_MODEL = """
import os
from huggingface_hub import HfApi
api = HfApi()
api.create_repo("user/tiny", exist_ok=True)
api.upload_folder(repo_id="user/tiny", folder_path=os.environ["MODEL"])
"""

# All factors are random, so that an adapter that is not applied cannot pass for one that is.
PUSH_ADAPTER = """
import json, os
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

torch.set_num_threads(1)
model = AutoModelForImageTextToText.from_pretrained("user/tiny", trust_remote_code=True, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(
    r=4, lora_alpha=8, lora_dropout=0.0,
    target_modules=["q_proj", "o_proj", "kv_b_proj", "routed_expert_down_proj", "up_proj"],
    exclude_modules=".*(vision_tower|indexer).*",
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
))
torch.manual_seed(0)
for name, parameter in model.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(parameter, std=0.1)
model.push_to_hub("user/adapter")
"""

PRELUDE = """
import json, os
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText
torch.set_num_threads(1)
ids_BT = torch.arange(20, 60)[None]
def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=ids_BT).logits[0, -4:, :16].double()
def base(where, **kwargs):
    return AutoModelForImageTextToText.from_pretrained(
        where, trust_remote_code=True, dtype=torch.float32, **kwargs
    )
"""

LOCAL = """
plain = logits(base(os.environ["MODEL"]))
adapted = logits(PeftModel.from_pretrained(base(os.environ["MODEL"]), os.environ["ADAPTER"]))
assert (plain - adapted).abs().max() > 1e-2, "the adapter changes nothing"
print(json.dumps({"plain": plain.tolist(), "adapted": adapted.tolist()}))
"""

USE = """
from transformers import (
    AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoProcessor, AutoTokenizer,
)
expected = json.loads(os.environ["EXPECTED"])
plain, adapted = (torch.tensor(expected[key], dtype=torch.float64) for key in ("plain", "adapted"))
close = lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

for auto in (AutoConfig, AutoTokenizer, AutoImageProcessor, AutoProcessor):
    loaded = auto.from_pretrained("user/tiny", trust_remote_code=True)
    print(type(loaded).__name__)
for auto in (AutoModel, AutoModelForCausalLM):
    close(logits(auto.from_pretrained("user/tiny", trust_remote_code=True, dtype=torch.float32)), plain)

packed = base("user/tiny")
assert any(parameter.dtype == torch.uint8 for parameter in packed.parameters())
close(logits(packed), plain)
close(logits(PeftModel.from_pretrained(packed, "user/adapter")), adapted)

native = base("user/tiny")
native.load_adapter("user/adapter")
close(logits(native), adapted)

quantization = {**AutoConfig.from_pretrained("user/tiny", trust_remote_code=True).quantization_config}
config = AutoConfig.from_pretrained(
    "user/tiny", trust_remote_code=True, quantization_config={**quantization, "dequantize": True}
)
dense = base("user/tiny", config=config)
assert not any(parameter.dtype == torch.uint8 for parameter in dense.parameters())
close(logits(dense), plain)
close(logits(PeftModel.from_pretrained(dense, "user/adapter")), adapted)
"""


@pytest.fixture
def shared_model(tiny: Path, hub_env: dict[str, str], fresh_process: Callable[..., str]) -> dict[str, str]:
    """The environment, after the shipped directory was pushed as `user/tiny`."""
    fresh_process(PUSH_MODEL, env={**hub_env, "MODEL": str(tiny)})
    return hub_env


@pytest.mark.slow
def test_model_and_adapter(
    hub: LoopbackHub,
    shared_model: dict[str, str],
    tiny: Path,
    tmp_path: Path,
    fresh_process: Callable[..., str],
) -> None:
    """Logits (fp32, 1e-5) equal the local ones: packed and dequantised base, PEFT and `load_adapter`."""
    fresh_process(PUSH_ADAPTER, env=shared_model)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(hub.files("user/adapter"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, blob in hub.files("user/adapter").items():
        if "/" not in name:
            (adapter / name).write_bytes(blob.data)
    local = {"MODEL": str(tiny), "ADAPTER": str(adapter)}
    expected = fresh_process(PRELUDE + LOCAL, env=local).splitlines()[-1]
    printed = fresh_process(PRELUDE + USE, env={**shared_model, "EXPECTED": expected})
    assert "LatentMoEConfig" in printed and "LatentMoEProcessor" in printed


def test_code_travels_with_the_model(hub: LoopbackHub, shared_model: dict[str, str], root: Path) -> None:
    """Every file that `auto_map` leads to is in the repository, with the bytes of the package's own."""
    files = hub.files("user/tiny")
    code = {name for name in files if name.endswith(".py")}
    assert {"modeling_latentmoe.py", "configuration_latentmoe.py", "processing_latentmoe.py"} <= code
    for name in code:
        assert files[name].data == (root / "modeling_latentmoe" / name).read_bytes(), name
    assert json.loads(files["config.json"].data)["auto_map"]["AutoConfig"].startswith("configuration_latentmoe.")


@pytest.mark.slow
def test_lora_script_pushes_a_loadable_adapter(
    hub: LoopbackHub,
    shared_model: dict[str, str],
    root: Path,
    tmp_path: Path,
    fresh_process: Callable[..., str],
) -> None:
    """A few steps of the training script with `--push_to_hub`, then stock PEFT from the Hub."""
    command = [sys.executable, str(root / "scripts" / "lora.py"), "--model", "user/tiny", "--max_steps", "2"]
    command += ["--batch_size", "4", "--eval_samples", "4", "--max_new_tokens", "4"]
    command += ["--output_dir", str(tmp_path / "run"), "--push_to_hub", "user/digits"]
    env = {**os.environ, **shared_model, "HF_MODULES_CACHE": str(tmp_path / "hf_modules")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    pushed = hub.files("user/digits")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(pushed)
    fresh_process(
        PRELUDE
        + "model = base('user/tiny'); before = logits(model)\n"
        + "assert not torch.equal(logits(PeftModel.from_pretrained(model, 'user/digits')), before)",
        env=shared_model,
    )
