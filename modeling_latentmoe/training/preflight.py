"""Is a folder a whole checkpoint? Answered by its config, its index and the headers of its shards, without weights."""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modeling_latentmoe.configuration_latentmoe import RELEASED_MODEL_TYPE, LatentMoEConfig
from modeling_latentmoe.conversion import Fault, FileSurvey, survey_checkpoint
from modeling_latentmoe.headers import index_path, read_index
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.tokenization_latentmoe import VOCAB_FILE
from modeling_latentmoe.training.sources import CONFIG, INDEX, OPTIONAL_FILES, PROCESSOR_CONFIGS, code_files

# What a released snapshot has beside config and weights, as far as it is read here.
PROCESSOR_FILES = ("preprocessor_config.json", "tokenizer_config.json", VOCAB_FILE)


class Report(NamedTuple):
    """All that is wrong with a folder, the names of its weight files, and how much they hold."""

    faults: list[Fault]
    shards: list[str]
    tensors: int
    nbytes: int


def check_folder(folder: Path) -> Report:
    """Compare every tensor in the headers of a checkpoint with what its config implies, and with its index.

    Raises ValueError where nothing can be compared: no folder, no config, no weights, a damaged index.
    """
    config = read_config(folder)
    files = weight_files(folder)
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(config)
    faults, found, nbytes, index = survey_checkpoint(model, files, config.packed_experts, on_all_cores)
    if not faults and index.total_size not in (None, nbytes):
        faults.append(
            Fault(f"{index_path(files[0]).name}: total_size is {index.total_size}, the tensors have {nbytes}")
        )
    if len(files) > 1 and not index.shards:
        faults.append(Fault(f"{index_path(files[0]).name} is missing"))
    faults += map(Fault, faults_beside(folder))
    return Report(faults, [file.name for file in files], len(found), nbytes)


def faults_beside(folder: Path) -> Iterator[str]:
    """What is missing or damaged beside weights and config: settings, tokenizer and, in our form, code.

    A model may be saved without a processor, and without a tokenizer: there is then no file of theirs.
    """
    released = is_released(folder)
    present = {name for name in OPTIONAL_FILES if name != INDEX and (folder / name).is_file()}
    tokenizer = ("tokenizer_config.json", VOCAB_FILE if VOCAB_FILE in present else "tokenizer.json")
    if released:
        needed = PROCESSOR_FILES
    elif present & {*PROCESSOR_CONFIGS}:
        needed = (*PROCESSOR_CONFIGS, *tokenizer)
    else:
        needed = tokenizer if present & {*tokenizer} else ()
    yield from (f"{name} is missing" for name in needed if name not in present)
    configs = {}
    for name in (CONFIG, *sorted(present)):
        if name.endswith(".json"):
            try:
                configs[name] = _read_json(folder / name)
            except ValueError as error:
                yield str(error)
    if not released:
        yield from faults_of_code(folder, configs)


def faults_of_code(folder: Path, configs: dict[str, Any]) -> Iterator[str]:
    """Modules that the configs, by name of their file, or other modules need, and that are missing or damaged."""
    contents = {name: json.dumps(values).encode() for name, values in configs.items()}
    while modules := code_files(contents):
        for name in modules:
            contents[name] = b""
            try:
                code = (folder / name).read_bytes()
                compile(code, name, "exec")
                contents[name] = code
            except FileNotFoundError:
                yield f"{name} is missing"
            except (SyntaxError, ValueError) as error:
                yield f"{name} is damaged: {error}"


def on_all_cores(function: Callable[[Path], FileSurvey], files: list[Path]) -> Iterator[FileSurvey]:
    """`map(function, files)` by several processes, where they can share the memory of this one."""
    if len(files) == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(function, files)
        return
    # An argument of the initializer is inherited; with every file it would be copied.
    with multiprocessing.get_context("fork").Pool(min(8, os.cpu_count() or 1), _inherit, (function,)) as pool:
        yield from pool.imap(_run_inherited, files)


def _inherit(function: Callable[[Path], FileSurvey]) -> None:
    global _inherited
    _inherited = function


def _run_inherited(file: Path) -> FileSurvey:
    return _inherited(file)


def is_released(folder: Path) -> bool:
    """Whether the config of a checkpoint has the released form, not the one that this package writes."""
    return _read_json(folder / "config.json").get("model_type") == RELEASED_MODEL_TYPE


def read_config(folder: Path) -> LatentMoEConfig:
    """The config of a checkpoint folder, or of a config.json; ValueError unless there is one, of this architecture."""
    if not folder.exists():
        raise ValueError(f"{folder} does not exist")
    path = folder / "config.json" if folder.is_dir() else folder
    model_type = _read_json(path).get("model_type")
    if model_type not in (RELEASED_MODEL_TYPE, LatentMoEConfig.model_type):
        raise ValueError(
            f"{path}: model_type is {model_type!r}, expected {RELEASED_MODEL_TYPE!r} or {LatentMoEConfig.model_type!r}"
        )
    try:
        return LatentMoEConfig.from_pretrained(folder)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: a field has a value of the wrong kind ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it must be a JSON object")
    return values


def weight_files(folder: Path) -> list[Path]:
    """The weight files that are in a checkpoint's folder; ValueError if there are none."""
    indices = folder.glob("*.safetensors.index.json")
    listed = {folder / name for index in indices for name in read_index(index).shards.values()}
    files = sorted({*folder.glob("model*.safetensors"), *(file for file in listed if file.exists())})
    if not files:
        pickles = sorted(file.name for kind in ("bin", "pt", "pth") for file in folder.glob(f"*.{kind}"))
        why = f" ({', '.join(pickles)}: pickles can run code and are not read)" if pickles else ""
        raise ValueError(f"{folder} holds no safetensors files{why}")
    return files


def summarize(faults: list[Fault]) -> list[str]:
    """The faults in few lines: names that differ in one part and have the same fault are written as one.

    `layers.7.experts.0-895.w1|w2|w3.weight_scale is missing (2688 tensors)` stands for all those names and no other.
    """
    lines = [str(fault) for fault in faults if fault.tensor is None]
    kinds: dict[tuple[str, int], dict[tuple[str, ...], list[Fault]]] = {}
    for fault in faults:
        if fault.tensor is not None:
            parts = tuple(fault.tensor.split("."))
            kinds.setdefault((fault.what, len(parts)), {}).setdefault(parts, []).append(fault)
    for (what, depth), groups in kinds.items():
        for axis in reversed(range(depth)):
            groups = _merged(groups, axis)
        for parts, members in groups.items():
            files = {fault.file for fault in members}
            line = str(Fault(what, ".".join(parts), members[0].file if len(files) == 1 else None))
            count = f" ({len(members)} tensors{f' in {len(files)} files' if len(files) > 1 else ''})"
            lines.append(line + (count if len(members) > 1 else ""))
    return lines


def _merged(groups: dict[tuple[str, ...], list[Fault]], axis: int) -> dict[tuple[str, ...], list[Fault]]:
    """Faults by the parts of their name; names that are the same but for the part `axis` become one."""
    alike: dict[tuple, tuple[list[str], list[Fault]]] = {}
    for parts, members in groups.items():
        values, faults = alike.setdefault((parts[:axis], parts[axis + 1 :]), ([], []))
        values.append(parts[axis])
        faults.extend(members)
    return {(*before, _span(values), *after): faults for (before, after), (values, faults) in alike.items()}


def _span(values: list[str]) -> str:
    """["0", "1", "2", "7"] -> "0-2,7"; words are put side by side."""
    if not all(value.isdecimal() for value in values):
        return "|".join(sorted(values))
    spans: list[list[int]] = []
    for number in sorted(map(int, values)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
