"""The shipped directory in a fresh process without the package: remote code only, on every supported version.

Older transformers are unpacked folders named by LATENTMOE_TRANSFORMERS_DIRS (separated like PATH):
`pip install --no-deps --target FOLDER transformers==5.22.0`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

SUPPORTED = ("5.22", "5.23", "5.24")

LOAD_AND_GENERATE = """
import importlib, json, os, sys, types
import torch, transformers

# The released tokenizer's module imports on every version, also where its optional dependency is missing.
sys.modules["tiktoken"] = None
parts = sys.modules["parts"] = types.ModuleType("parts")
parts.__path__ = [os.environ["MODEL_FILES"]]
importlib.import_module("parts.tokenization_latentmoe")

from PIL import Image
from transformers import (
    AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText,
    AutoProcessor, AutoTokenizer,
)
torch.set_num_threads(1)
where = os.environ["MODEL"]
load = lambda auto, **kwargs: auto.from_pretrained(where, trust_remote_code=True, **kwargs)

config, tokenizer = load(AutoConfig), load(AutoTokenizer)
image_processor, processor = load(AutoImageProcessor), load(AutoProcessor)
assert type(processor.image_processor).__name__ == type(image_processor).__name__

image = Image.new("RGB", (40, 28), (200, 30, 30))
content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
messages = [{"role": "user", "content": content}]
batch = processor.apply_chat_template(
    messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
)
logits, classes = [], []
for auto in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel):
    model, info = load(auto, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    classes.append(type(model).__name__)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    with torch.no_grad():
        logits.append(model.eval()(**batch).logits)
    if auto is AutoModelForImageTextToText:
        generated = model.generate(**batch, max_new_tokens=6, do_sample=False)
assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
print(json.dumps({
    "transformers": transformers.__version__,
    "classes": classes,
    "tokenizer": type(tokenizer).__name__,
    "prompt": batch["input_ids"][0].tolist(),
    "generated": generated[0].tolist(),
    "logits": logits[0][0, -1, :8].tolist(),
}))
"""


def folder_of(minor: str) -> str | None:
    """The folder that holds this minor version, None when it is the installed one; skips without either."""
    import transformers

    if transformers.__version__.startswith(f"{minor}."):
        return None
    for folder in os.environ.get("LATENTMOE_TRANSFORMERS_DIRS", "").split(os.pathsep):
        if folder and list(Path(folder).glob(f"transformers-{minor}.*.dist-info")):
            return folder
    pytest.skip(f"transformers {minor} is not in LATENTMOE_TRANSFORMERS_DIRS")


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict]:
    """What each version printed, so that versions are compared without running one twice."""
    return {}


@pytest.mark.parametrize("minor", sorted(SUPPORTED, reverse=True))
def test_loads_and_generates(
    minor: str, tiny: Path, recorded: dict[str, dict], fresh_process: Callable[..., str]
) -> None:
    """Every Auto class; the same tokens and logits (1e-5) on every version."""
    folder = folder_of(minor)
    env = {"MODEL": str(tiny), "MODEL_FILES": str(tiny.parent), **({"PYTHONPATH": folder} if folder else {})}
    seen = json.loads(fresh_process(LOAD_AND_GENERATE, env=env).splitlines()[-1])
    assert seen["transformers"].startswith(f"{minor}.")
    assert seen["classes"] == ["LatentMoEForConditionalGeneration"] * 3
    assert len(seen["generated"]) > len(seen["prompt"])
    assert seen["generated"][: len(seen["prompt"])] == seen["prompt"]
    for other in recorded.values():
        assert seen["tokenizer"] == other["tokenizer"]
        assert seen["generated"] == other["generated"]
        assert seen["logits"] == pytest.approx(other["logits"], abs=1e-5)
    recorded[minor] = seen


def test_other_versions_are_refused(tiny: Path, fresh_process: Callable[..., str]) -> None:
    """In one line that names what is installed and what is needed."""
    code = """
import os, transformers
for version in ("5.21.4", "5.25.0"):
    transformers.__version__ = version
    try:
        transformers.AutoConfig.from_pretrained(os.environ["MODEL"], trust_remote_code=True)
    except ImportError as refusal:
        print(refusal)
    else:
        raise AssertionError("loaded")
"""
    lines = fresh_process(code, env={"MODEL": str(tiny)}).splitlines()
    assert len(lines) == 2
    for version, line in zip(("5.21.4", "5.25.0"), lines, strict=True):
        assert version in line
        assert all(minor in line for minor in SUPPORTED)
