"""A small checkpoint in exactly the released form: config, names, shard rule, MXFP4 experts, tokenizer files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.training.rehearsal import SPECIAL_TOKENS, write_snapshot

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden" / "checkpoint"
INDEX = "model.safetensors.index.json"
VOCAB = 512
SHARDS = 9  # six layers, rest of the text model, projector, tower


def shard(number: int) -> str:
    return f"model-{number:05d}-of-{SHARDS:06d}.safetensors"


def released_config(folder: Path, **text: Any) -> Path:
    """The golden config.json with room for a tokenizer; `text` replaces fields of text_config."""
    values = json.loads((GOLDEN / "config.json").read_text())
    first = VOCAB - 256
    ids = {"bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": VOCAB - 1}
    values |= {**ids, "media_placeholder_token_id": first + SPECIAL_TOKENS["<|media_pad|>"]}
    values["text_config"] |= {**ids, "vocab_size": VOCAB, **text}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


def write_small_snapshot(folder: Path, fill: Callable[[str], bool] = lambda name: True) -> Path:
    """About 1 MB in nine shards, by default with random values everywhere."""
    config = released_config(folder.with_name(folder.name + "_config"))
    write_snapshot(folder, LatentMoEConfig.from_pretrained(config), fill)
    shutil.copy(config, folder)
    return folder


def edit_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite what a shard says about itself; its data stay where they are."""
    raw = file.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:length])
    change(header)
    replace_header(file, json.dumps(header).encode())


def replace_header(file: Path, header: bytes) -> None:
    raw = file.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[length:])


def edit_bytes(file: Path, tensor: str, position: int, value: bytes) -> None:
    """Overwrite bytes of a tensor."""
    raw = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(raw[:8], "little")
    at = length + json.loads(raw[8:length])[tensor]["data_offsets"][0] + position
    raw[at : at + len(value)] = value
    file.write_bytes(raw)
