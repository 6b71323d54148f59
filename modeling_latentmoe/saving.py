"""Replace the checkpoint in a folder so that a kill at any moment leaves the old one or the new one.

Everything is first written into a folder inside the target (the same file system, so that moving a file is one
step), then moved:

    1. shards, under names that the old checkpoint does not use: readers still find the old one, whole
    2. config, code and generation settings
    3. the index, or the single weight file: from here on readers find the new checkpoint, whole
    4. what belonged to the old checkpoint alone is deleted

Shards of the old and the new checkpoint never share a name, or an old index would lead to new shards: where they
would, the new ones count their total in one more digit. A reader that has opened the old index and comes back for
its shards after step 4 finds them missing, never others in their place. Between steps 2 and 3 the new config stands
beside the old weights; where they do not fit, loading is refused.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from safetensors import SafetensorError

from .headers import read_index

STAGE = "saving.partial"


@contextmanager
def staged(folder: Path, stem: str, variant: str | None) -> Iterator[Path]:
    """A folder to write a whole checkpoint into, whose files replace those in `folder` at the end.

    stem, variant: of the weight files, `stem[.variant].safetensors` or shards with an index. After an error, and
    after a kill, `folder` holds what it held before; OSError naming it where the disk is full, ValueError naming
    an index there that cannot be read.
    """
    suffix = f".{variant}" if variant else ""
    whole, index = f"{stem}{suffix}.safetensors", f"{stem}.safetensors.index{suffix}.json"
    stage, taken = folder / STAGE, set(read_index(folder / index).shards.values())
    if stage.is_dir():
        shutil.rmtree(stage)
    stage.mkdir(parents=True)
    try:
        yield stage
        _publish(stage, folder, whole, index, taken)
    except SafetensorError as error:
        raise OSError(f"{folder}: the weights could not be written ({error}); nothing there has changed") from error
    finally:
        shutil.rmtree(stage)


def _publish(stage: Path, folder: Path, whole: str, index: str, taken: set[str]) -> None:
    shards = _name_shards(stage, index, taken)
    switch = index if shards else whole
    for name in shards:
        os.replace(stage / name, folder / name)
    for file in stage.iterdir():
        if file.name != switch:
            os.replace(file, folder / file.name)
    os.replace(stage / switch, folder / switch)
    # First the one that readers would prefer to the new index, or that would list deleted shards.
    (folder / (whole if shards else index)).unlink(missing_ok=True)
    stem = re.escape(whole.removesuffix(".safetensors"))
    for file in folder.iterdir():
        if re.fullmatch(rf"{stem}-\d+-of-\d+\.safetensors", file.name) and file.name not in shards:
            file.unlink()


def _name_shards(stage: Path, index: str, taken: set[str]) -> set[str]:
    """Give the staged shards names that are not `taken`, and return them."""
    shards = sorted(set(read_index(stage / index).shards.values()))
    if not taken.intersection(shards):
        return set(shards)
    candidates = ({shard: _with_total(shard, digits) for shard in shards} for digits in count(6))
    names = next(names for names in candidates if not taken.intersection(names.values()))
    for shard, name in names.items():
        os.replace(stage / shard, stage / name)
    content = json.loads((stage / index).read_text())
    content["weight_map"] = {tensor: names[shard] for tensor, shard in content["weight_map"].items()}
    (stage / index).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return set(names.values())


def _with_total(shard: str, digits: int) -> str:
    """`model-00001-of-00002.safetensors`, with the total in this many digits."""
    start, _, total = shard.removesuffix(".safetensors").rpartition("-")
    return f"{start}-{int(total):0{digits}}.safetensors"
