"""save_pretrained over an existing checkpoint: after a kill or with a full disk, the old or the new one is whole."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration, saving
from modeling_latentmoe.saving import STAGE

INDEX = "model.safetensors.index.json"
SHARDED, WHOLE = "600KB", "1GB"
KILLED = 77


def model(seed: int) -> LatentMoEForConditionalGeneration:
    torch.manual_seed(seed)
    return LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False, experts=8, packed=False))


@pytest.fixture(scope="module")
def models() -> list[LatentMoEForConditionalGeneration]:
    return [model(0), model(1)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What a reader finds, in the order in which transformers looks; FileNotFoundError where a shard is missing."""
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    shards = {file: load_file(folder / file) for file in set(weight_map.values())}
    return {name: shards[file][name] for name, file in weight_map.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def killed_at(step: int, action) -> bool:
    """Run `action` in a child that dies, without any cleaning up, at the `step`-th change of the file system."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, KILLED), code
        return code == KILLED
    try:
        left = step

        def dying(function):
            def call(*args, **kwargs):
                nonlocal left
                left -= 1
                if left < 0:
                    os._exit(KILLED)
                return function(*args, **kwargs)

            return call

        from transformers import modeling_utils

        modeling_utils.safe_save_file = dying(modeling_utils.safe_save_file)
        saving.os.replace = dying(os.replace)
        Path.unlink = dying(Path.unlink)
        action()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("new", [SHARDED, pytest.param(WHOLE, marks=pytest.mark.slow)], ids=["sharded", "whole"])
@pytest.mark.parametrize("old", [SHARDED, pytest.param(WHOLE, marks=pytest.mark.slow)], ids=["sharded", "whole"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(models, tmp_path, old, new):
    before, after = (weights_of(m, tmp_path / str(i)) for i, m in enumerate(models))
    seen = []
    folder = tmp_path / "model"
    models[0].save_pretrained(folder, max_shard_size=old)
    for step in range(200):
        died = killed_at(step, lambda: models[1].save_pretrained(folder, max_shard_size=new))
        found = weights(folder)
        assert same(found, before) or same(found, after), f"half a checkpoint after step {step}"
        seen.append(same(found, after))
        if not died:
            break
        if seen[-1]:
            models[0].save_pretrained(folder, max_shard_size=old)
    assert not died and seen[-1] and not seen[0]
    assert seen.index(True) > 2
    # What a killed save left behind is gone after the next one.
    assert not (folder / STAGE).exists()
    assert same(weights(folder), after)
    listed = set(json.loads((folder / INDEX).read_text())["weight_map"].values()) if new == SHARDED else set()
    assert {file.name for file in folder.glob("*.safetensors")} == (listed or {"model.safetensors"})


def weights_of(model: LatentMoEForConditionalGeneration, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return weights(folder)


def test_a_kill_before_the_first_checkpoint_is_whole_leaves_none(models, tmp_path):
    for step in (0, 1, 5):
        assert killed_at(step, lambda: models[0].save_pretrained(tmp_path, max_shard_size=SHARDED))
        with pytest.raises(OSError, match=r"model\.safetensors"):
            LatentMoEForConditionalGeneration.from_pretrained(tmp_path)
    models[0].save_pretrained(tmp_path, max_shard_size=SHARDED)
    LatentMoEForConditionalGeneration.from_pretrained(tmp_path)


def test_saving_again_and_again_keeps_shard_names_well_formed(models, tmp_path):
    names = []
    for turn in range(4):
        models[turn % 2].save_pretrained(tmp_path, max_shard_size=SHARDED)
        names.append({file.name for file in tmp_path.glob("*.safetensors")})
        loaded = LatentMoEForConditionalGeneration.from_pretrained(tmp_path)
        assert same(dict(loaded.state_dict()), dict(models[turn % 2].state_dict()))
    count = len(names[0])
    assert count > 2 and names[0] == {f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    assert names[1] == {f"model-{i:05d}-of-{count:06d}.safetensors" for i in range(1, count + 1)}
    assert names[2] == names[0] and names[3] == names[1]


def test_other_files_and_other_weights_in_the_folder_are_left_alone(models, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    models[0].save_pretrained(tmp_path, max_shard_size=SHARDED, variant="other")
    models[0].save_pretrained(tmp_path, max_shard_size=SHARDED)
    models[1].save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == b"adapter"
    variant = LatentMoEForConditionalGeneration.from_pretrained(tmp_path, variant="other")
    assert same(dict(variant.state_dict()), dict(models[0].state_dict()))
    main = LatentMoEForConditionalGeneration.from_pretrained(tmp_path)
    assert same(dict(main.state_dict()), dict(models[1].state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("size", [SHARDED, pytest.param(WHOLE, marks=pytest.mark.slow)])
def test_full_disk_is_one_error_and_changes_nothing(models, tmp_path, size, fresh_process):
    """The limit on the size of a file stands for the end of the disk: a write fails in its middle."""
    folder = tmp_path / "model"
    models[0].save_pretrained(folder, max_shard_size=size)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    said = fresh_process(
        f"""
import resource
from pathlib import Path
from modeling_latentmoe import LatentMoEForConditionalGeneration
model = LatentMoEForConditionalGeneration.from_pretrained({str(folder)!r})
model.language_model.model.norm.weight.data.add_(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    model.save_pretrained({str(folder)!r}, max_shard_size={size!r})
except OSError as error:
    print(error)
""",
        package=True,
    )
    assert said.startswith(f"{folder}: the weights could not be written") and "nothing there has changed" in said
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_error_while_moving_leaves_the_old_checkpoint(models, tmp_path, monkeypatch):
    models[0].save_pretrained(tmp_path, max_shard_size=SHARDED)
    before = weights(tmp_path)
    replace = os.replace

    def refuse(source, target):
        if Path(target).name == INDEX:
            raise PermissionError(13, "Permission denied", str(target))
        replace(source, target)

    monkeypatch.setattr(saving.os, "replace", refuse)
    with pytest.raises(PermissionError, match=INDEX):
        models[1].save_pretrained(tmp_path, max_shard_size=SHARDED)
    monkeypatch.undo()
    assert same(weights(tmp_path), before) and not (tmp_path / STAGE).exists()


def test_damaged_old_index_is_named_and_a_file_is_no_folder(models, tmp_path):
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ValueError, match=f"{INDEX} is damaged"):
        models[0].save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [INDEX]
    with pytest.raises(OSError, match=INDEX):
        models[0].save_pretrained(tmp_path / INDEX)


def test_only_the_main_process_writes(models, tmp_path):
    models[0].save_pretrained(tmp_path / "model", is_main_process=False)
    assert not list((tmp_path / "model").iterdir())
