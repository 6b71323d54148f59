"""`from_pretrained` in one process: peak memory, and where a device map may put the weights.

Public report 11: loading grew to a second copy of the model, because tensors were read ahead of their conversion.
"""

import json
from pathlib import Path

import pytest
import torch

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.mxfp4 import assert_packed
from modeling_latentmoe.training.rehearsal import write_snapshot

IDS = torch.arange(24)[None] + 300

# Prints megabytes: the model's, a shard's, and how far memory grew; the peak is that of the process, pages of files
# included.
MEASURE = """
import json, os, torch
from pathlib import Path
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.mxfp4 import LatentMoEMxfp4Config

LatentMoEForConditionalGeneration.from_pretrained(os.environ["TINY"])

def memory(field):
    # not getrusage: its peak begins with that of the process that started this one
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

before = memory("VmRSS")
options = {"dtype": getattr(torch, os.environ["DTYPE"])}
if os.environ["MODE"] == "dequantize":
    options["quantization_config"] = LatentMoEMxfp4Config(dequantize=True)
if os.environ["MODE"] == "auto":
    options["device_map"] = "auto"
folder = Path(os.environ["MODEL"])
model = LatentMoEForConditionalGeneration.from_pretrained(folder, **options)
peak = memory("VmHWM")
size = sum(p.nbytes for p in model.parameters())
shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
print(json.dumps({"grown": peak - before, "model": size, "shard": shard}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A packed checkpoint of some 220 MB in 11 shards."""
    config = LatentMoEConfig.tiny().to_dict()
    config["text_config"] |= {"hidden_size": 512, "num_experts": 64, "vocab_size": 4000}
    config["text_config"] |= {"moe_intermediate_size": 512, "routed_expert_hidden_size": 512}
    config["vision_config"]["text_hidden_size"] = 512
    folder = tmp_path_factory.mktemp("large") / "model"
    write_snapshot(folder, LatentMoEConfig.from_dict(config), lambda name: True)
    return folder


@pytest.fixture(scope="module")
def logits(large: Path) -> torch.Tensor:
    return run(LatentMoEForConditionalGeneration.from_pretrained(large, dtype=torch.float32))


@torch.no_grad()
def run(model: LatentMoEForConditionalGeneration) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        pytest.param("plain", "bfloat16", marks=pytest.mark.slow),
        pytest.param("plain", "float32", marks=pytest.mark.slow),
        pytest.param("auto", "bfloat16", marks=pytest.mark.slow),
        ("dequantize", "bfloat16"),
    ],
)
def test_peak_memory_is_the_model_and_two_shards(fresh_process, tiny: Path, large: Path, mode: str, dtype: str) -> None:
    environment = {"TINY": str(tiny), "MODEL": str(large), "MODE": mode, "DTYPE": dtype}
    report = json.loads(fresh_process(MEASURE, environment, package=True).splitlines()[-1])
    assert report["model"] > 6 * report["shard"], report
    assert report["grown"] <= report["model"] + 2 * report["shard"], report


def test_auto_is_the_same_model(large: Path, logits: torch.Tensor) -> None:
    model = LatentMoEForConditionalGeneration.from_pretrained(large, dtype=torch.float32, device_map="auto")
    assert_packed(model)
    assert torch.equal(run(model), logits)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["40MB", "120MB"])
def test_what_does_not_fit_runs_from_disk(large: Path, logits: torch.Tensor, tmp_path: Path, room: str) -> None:
    """Every weight comes back from disk for the forward, also those that are used outside of their own layer."""
    model = LatentMoEForConditionalGeneration.from_pretrained(
        large, dtype=torch.float32, device_map="auto", max_memory={"cpu": room}, offload_folder=tmp_path
    )
    here = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    assert here < int(room.removesuffix("MB")) * 1e6 and any(p.is_meta for p in model.parameters())
    assert torch.equal(run(model), logits)


def test_dequantised_weights_are_the_decoded_ones(large: Path, logits: torch.Tensor) -> None:
    from modeling_latentmoe.mxfp4 import LatentMoEMxfp4Config

    model = LatentMoEForConditionalGeneration.from_pretrained(
        large, dtype=torch.float32, quantization_config=LatentMoEMxfp4Config(dequantize=True)
    )
    torch.testing.assert_close(run(model), logits, rtol=1e-5, atol=1e-5)
    stacks = [p for name, p in model.named_parameters() if name.endswith("experts.gate_up_proj")]
    assert len(stacks) == 7 and all(p.dtype == torch.float32 for p in stacks)


@pytest.mark.gpu
def test_auto_on_a_gpu_that_holds_a_part(large: Path, logits: torch.Tensor, tmp_path: Path) -> None:
    """GPU, CPU and disk: weights that do not fit travel for their forward."""
    model = LatentMoEForConditionalGeneration.from_pretrained(
        large,
        dtype=torch.float32,
        device_map="auto",
        max_memory={0: "80MB", "cpu": "80MB"},
        offload_folder=tmp_path,
    )
    devices = {p.device.type for p in model.parameters()}
    assert "cuda" in devices and "meta" in devices
    torch.testing.assert_close(run(model).cpu(), logits, rtol=1e-3, atol=1e-3)
