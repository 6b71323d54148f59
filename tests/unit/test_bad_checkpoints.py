"""Damaged snapshots of the released form: one error each, which names the file and the tensor."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.headers import parse_header
from modeling_latentmoe.mxfp4 import LatentMoEMxfp4Config
from modeling_latentmoe.training.preflight import check_folder

from .snapshots import INDEX, edit_bytes, edit_header, replace_header, shard, write_small_snapshot

LAYER = "language_model.model.layers.2."
NORM = LAYER + "input_layernorm.weight"
PACKED = LAYER + "block_sparse_moe.experts.3.w1.weight_packed"
SCALE = LAYER + "block_sparse_moe.experts.3.w1.weight_scale"
A_LOG = LAYER + "self_attn.A_log"
FILE, OTHER = shard(3), shard(5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_small_snapshot(tmp_path_factory.mktemp("whole") / "snapshot")


@pytest.fixture
def snapshot(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "snapshot")


def load(folder: Path, **kwargs) -> LatentMoEForConditionalGeneration:
    return LatentMoEForConditionalGeneration.from_pretrained(folder, **kwargs)


def missing(folder):
    (folder / FILE).unlink()


def truncated(folder):
    os.truncate(folder / FILE, (folder / FILE).stat().st_size - 40)


def overlapping(folder):
    def change(header):
        header[NORM]["data_offsets"] = [at - 2 for at in header[NORM]["data_offsets"]]

    edit_header(folder / FILE, change)


def beyond_the_file(folder):
    def change(header):
        header[NORM]["data_offsets"][1] += 1 << 40

    edit_header(folder / FILE, change)


def garbled_entry(folder):
    def change(header):
        header[NORM]["data_offsets"] = "0-128"

    edit_header(folder / FILE, change)


def unknown_dtype(folder):
    def change(header):
        header[NORM]["dtype"] = "BF17"

    edit_header(folder / FILE, change)


def wrong_dtype(folder):
    def change(header):
        header[PACKED]["dtype"] = "I8"

    edit_header(folder / FILE, change)


def wrong_shape(folder):
    def change(header):
        header[PACKED]["shape"] = header[PACKED]["shape"][::-1]

    edit_header(folder / FILE, change)


def renamed(folder):
    edit_header(folder / FILE, lambda header: header.update({NORM + "s": header.pop(NORM)}))


def twice_in_one_header(folder):
    raw = (folder / FILE).read_bytes()
    header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    replace_header(folder / FILE, header.replace(SCALE.encode(), PACKED.encode()))


def twice_in_two_files(folder):
    def change(header):
        header[NORM] = header.pop(NORM.replace(".2.", ".4."))

    edit_header(folder / OTHER, change)


def half_a_pair(folder):
    """The index does not list it either: the file is that of the other half."""
    edit_header(folder / FILE, lambda header: header.update({"spare": header.pop(SCALE)}))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["spare"] = index["weight_map"].pop(SCALE)
    (folder / INDEX).write_text(json.dumps(index))


def index_disagrees(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = OTHER
    (folder / INDEX).write_text(json.dumps(index))


def index_leaves_the_folder(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = f"../{FILE}"
    (folder / INDEX).write_text(json.dumps(index))


def link_loop(folder):
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(FILE)


def dangling_link(folder):
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("/nowhere/blob")


def pickled(folder):
    torch.save({NORM: torch.ones(64)}, folder / FILE)


def scale_255(folder):
    edit_bytes(folder / FILE, SCALE, 5, b"\xff")


def tail(folder):
    edit_bytes(folder / FILE, A_LOG, 4 * 4, struct.pack("<f", 0.5))


FAULTS: dict[Callable[[Path], None], str] = {
    missing: rf"1 fault\(s\): {FILE} is missing",
    truncated: rf"1 fault\(s\): {FILE} is truncated or damaged: \d+ bytes instead of \d+, cut in {LAYER}block",
    overlapping: rf"1 fault\(s\): {FILE} is damaged: its header puts {NORM} at byte \d+, but the bytes before end at",
    beyond_the_file: rf"1 fault\(s\): {FILE} is damaged: its header gives {NORM} \d+ bytes, but BF16 \[64\] needs 128",
    garbled_entry: rf"1 fault\(s\): {FILE} is damaged: its header describes {NORM} as .*0-128",
    unknown_dtype: rf"1 fault\(s\): {FILE} is damaged: its header describes {NORM} as .*BF17",
    wrong_dtype: rf"1 fault\(s\): {FILE}: {PACKED} is I8 instead of U8",
    wrong_shape: rf"1 fault\(s\): {FILE}: {PACKED} has shape \[16, 32\] instead of \[32, 16\]",
    renamed: rf"{FILE}: {NORM} is missing; {FILE}: {NORM}s is unexpected; {NORM}s is in {FILE} but not in {INDEX}",
    twice_in_one_header: rf"1 fault\(s\): {FILE}: {PACKED} is stored twice in this file",
    twice_in_two_files: rf"{NORM} is stored twice, in {FILE} and {OTHER}",
    half_a_pair: rf"2 fault\(s\): {FILE}: {SCALE} is missing; {FILE}: spare is unexpected",
    index_disagrees: rf"1 fault\(s\): {NORM} is in {FILE} but {INDEX} says {OTHER}",
    index_leaves_the_folder: r"must be in one folder, its index names|is not the name of a file in its folder",
    link_loop: rf"1 fault\(s\): {FILE} cannot be read: Too many levels of symbolic links",
    dangling_link: rf"1 fault\(s\): {FILE}, a link to /nowhere/blob, is missing",
    pickled: rf"1 fault\(s\): {FILE} is .*not a safetensors file but a pickle, which is refused",
}
VALUES: dict[Callable[[Path], None], str] = {
    scale_255: rf"1 fault\(s\): {FILE}: {SCALE} has the byte 255 \(NaN\)",
    tail: rf"1 fault\(s\): {FILE}: {A_LOG} is not zero beyond its 4 heads",
}


@pytest.mark.parametrize("damage", [*FAULTS, *VALUES], ids=lambda damage: damage.__name__)
def test_loading_raises_one_error_that_names_file_and_tensor(snapshot, damage):
    damage(snapshot)
    with pytest.raises(ValueError, match=(FAULTS | VALUES)[damage]) as error:
        load(snapshot)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", [*FAULTS], ids=lambda damage: damage.__name__)
def test_preflight_finds_the_same_without_loading(snapshot, damage):
    damage(snapshot)
    pattern = FAULTS[damage].removeprefix(r"1 fault\(s\): ").removeprefix(r"2 fault\(s\): ")
    try:
        found = "; ".join(map(str, check_folder(snapshot).faults))
    except ValueError as error:
        found = str(error)
    assert re.search(pattern, found), found


def test_an_undamaged_one_loads(snapshot):
    load(snapshot)
    assert not check_folder(snapshot).faults


def test_all_damages_are_found_at_once(snapshot):
    """Also when a file cannot be read: what the index says about the others is still compared."""
    os.truncate(snapshot / OTHER, 1000)
    for damage in (wrong_dtype, half_a_pair, index_disagrees):
        damage(snapshot)
    faults = [str(fault) for fault in check_folder(snapshot).faults]
    assert len(faults) == 5, faults
    for part in (f"{OTHER} is truncated", f"{PACKED} is I8", f"{SCALE} is missing", "spare is unexpected", NORM):
        assert sum(part in fault for fault in faults) == 1, (part, faults)


def test_scale_255_is_found_when_experts_are_decoded(snapshot):
    """Decoded experts hold NaN where the scale was 255; the scale is named nevertheless."""
    scale_255(snapshot)
    with pytest.raises(ValueError, match=VALUES[scale_255]):
        load(snapshot, quantization_config=LatentMoEMxfp4Config(dequantize=True))


def test_the_last_scale_of_the_last_expert_counts(snapshot):
    name = LAYER.replace(".2.", ".5.") + "block_sparse_moe.experts.15.w2.weight_scale"
    edit_bytes(snapshot / shard(6), name, 31, b"\xff")
    with pytest.raises(ValueError, match=rf"{shard(6)}: {name} has the byte 255"):
        load(snapshot)


def test_a_folder_of_pickles_is_refused(snapshot):
    """transformers would unpickle pytorch_model.bin where there is no safetensors file."""
    for file in snapshot.glob("model*"):
        file.unlink()
    torch.save({NORM: torch.ones(64)}, snapshot / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is .* a pickle, which is refused"):
        load(snapshot)
    with pytest.raises(ValueError, match=r"pytorch_model.bin: pickles can run code"):
        check_folder(snapshot)


def test_damage_does_not_reach_the_disk(snapshot):
    """Loading a damaged folder leaves every byte of it as it was."""
    wrong_shape(snapshot)
    before = {file.name: file.read_bytes() for file in snapshot.iterdir()}
    with pytest.raises(ValueError):
        load(snapshot)
    assert {file.name: file.read_bytes() for file in snapshot.iterdir()} == before


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "raw, size, message",
    [
        (b"\x03", 1, "x is truncated"),
        (header("[]"), 10, "x is not a safetensors file"),
        (header("{"), 9, "x is not a safetensors file"),
        ((1 << 62).to_bytes(8, "little"), 1 << 63, "x is truncated or not a safetensors file"),
        (header('{"a": 3}'), 16, "x is damaged: its header describes a as 3"),
        (header('{"a": {"dtype": "U8", "shape": ["b"], "data_offsets": [0, 1]}}'), 71, "describes a as"),
        (header('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0.0, 1.0]}}'), 73, "describes a as"),
        (header("[" * 200_000), 200_008, "its header is damaged"),
        (header('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}'), 70, "puts a at byte 69"),
        (header('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'), 70, "70 bytes instead of 69"),
    ],
)
def test_headers_that_are_none(raw, size, message):
    with pytest.raises(ValueError, match=message):
        parse_header(raw, size, "x")


def test_tensors_come_in_the_order_of_their_bytes():
    entries = {"b": [4, 8], "empty": [4, 4], "a": [0, 4]}
    entries = {name: {"dtype": "U8", "shape": [at[1] - at[0]], "data_offsets": at} for name, at in entries.items()}
    raw = header(json.dumps({"__metadata__": {"format": "pt"}, **entries}))
    assert [(name, t.start - len(raw)) for name, t in parse_header(raw, len(raw) + 8, "x").items()] == [
        ("a", 0),
        ("empty", 4),
        ("b", 4),
    ]
