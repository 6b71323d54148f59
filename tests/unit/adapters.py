"""Adapters with random factors on small models, as scripts/lora.py saves them, and what is on disk in a folder."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training.checkpoint import save_adapter
from modeling_latentmoe.training.lora import add_adapter, base_identity

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden" / "checkpoint"
IDS_BT = torch.arange(1, 25).view(2, 12)
INDEX = "model.safetensors.index.json"

Tensors = dict[str, torch.Tensor]


def load(folder: Path, **options) -> LatentMoEForConditionalGeneration:
    return LatentMoEForConditionalGeneration.from_pretrained(folder, **{"dtype": torch.float32} | options)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS_BT).logits


def randomize(model: torch.nn.Module, std: float, seed: int = 0) -> None:
    """Give every lora_B values, as training would."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)


def make_adapter(base: Path, folder: Path, std: float = 0.1, **options) -> torch.Tensor:
    """Save an adapter of scripts/lora.py's kind for `base`; returns the logits of base + adapter."""
    model = load(base)
    identity = base_identity(model, str(base))
    options = {"r": 4, "lora_alpha": 8, "expert_rank": 2} | options
    torch.manual_seed(1)
    adapted = add_adapter(model, **options)
    randomize(adapted, std)
    folder.mkdir(parents=True)
    save_adapter(adapted, folder, identity)
    return logits(adapted)


def tensors(folder: Path) -> Tensors:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def change_weights(adapter: Path, change) -> None:
    """Rewrite an adapter's tensors with `change(tensors)`, which edits the dict."""
    values = load_file(adapter / "adapter_model.safetensors")
    change(values)
    save_file(values, adapter / "adapter_model.safetensors")


def change_json(file: Path, **fields) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def write_shards(folder: Path, shards: list[Tensors]) -> None:
    """Replace the weights of a checkpoint folder by these shards."""
    for file in (*folder.glob("*.safetensors"), *folder.glob(INDEX)):
        file.unlink()
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
