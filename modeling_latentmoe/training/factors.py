"""The LoRA factors of an adapter folder, under the names that weight matrices have in a released checkpoint.

PEFT's file holds two matrices for a dense layer, and two for all experts of a layer together. Here each matrix of
each expert has its own. A file may be larger than memory (rank 8 on the released experts takes 46 GB): factors are
read when they are asked for.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftType
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import Tensor

from modeling_latentmoe.conversion import EXPERTS, FLOAT_DTYPES, MATRICES, SHOWN_FAULTS
from modeling_latentmoe.headers import StoredTensor, read_header
from modeling_latentmoe.training.lora import check_files, ends_in_any, read_json
from modeling_latentmoe.training.shards import read_tensor
from modeling_latentmoe.training.streaming import STORED_DTYPES

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
STACK = re.compile(rf"(.*{re.escape(EXPERTS)})((?:\.base_layer)*)")
EXPERT = re.compile(rf"(.*{re.escape(EXPERTS)})\.\d+\.(\w+)")
STEMS = {matrix: stem for stem, matrices in MATRICES.items() for matrix in matrices}

# Fields of an adapter config that are followed here, and those that do not matter once it is trained. Any other
# one must have its default: it changes what the factors mean, or which tensors there are.
FOLLOWED = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
SELECTING = {"target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"}
WITHOUT_EFFECT = {"lora_dropout", "init_lora_weights", "task_type", "inference_mode", "auto_mapping"}
WITHOUT_EFFECT |= {"base_model_name_or_path", "revision", "peft_version", "runtime_config"}
# other ways to start change the base model too
HARMLESS_STARTS = (True, False, "gaussian", "orthogonal", "eva")


class Factors(NamedTuple):
    """The term scale * B A of one weight matrix: a [r, in], b [out, r]."""

    a: Tensor
    b: Tensor
    scale: float

    def product(self) -> Tensor:
        """[out, in]"""
        return (self.b @ self.a) * self.scale


class Pair(NamedTuple):
    """Both tensors of a dense layer or of a stack of `experts` experts, as they are in the file."""

    name: str
    a: StoredTensor
    b: StoredTensor
    rank: int
    scale: float
    experts: int | None


class Part(NamedTuple):
    """What of a pair belongs to one matrix: all of it (no expert), or rows `half` of `halves` of an expert's B."""

    pair: Pair
    expert: int | None = None
    half: int = 0
    halves: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight matrix: [out, in]."""
        return self.pair.b.shape[0] // self.halves, self.pair.a.shape[1]


class Adapter:
    """An adapter folder. `parts`: the name of a weight matrix, without its leaf -> where its factors lie.

    Names are `language_model.model.layers.3.self_attn.o_proj`, `...block_sparse_moe.experts.7.w1`. Raises
    ValueError that names the file and the tensor or field for an adapter that is damaged, that uses parts of PEFT
    which are not known here, or one of whose tensors has no partner or no place.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / file).is_file():
                raise ValueError(f"adapter {folder}: {file} is missing")
        check_fields(folder / CONFIG_FILE)
        check_files(folder)
        self.config = read_config(folder / CONFIG_FILE)
        self.parts = self._parts()
        self._stack = lru_cache(maxsize=len(MATRICES))(self._read_stack)

    def dtype(self, matrix: str) -> torch.dtype:
        """Of the factors of a matrix: fp32 or wider."""
        pair = self.parts[matrix].pair
        return torch.promote_types(STORED_DTYPES[pair.a.dtype], torch.float32)

    def factors(self, matrix: str) -> Factors:
        """The factors of a matrix in `parts`, in fp32 or wider."""
        part = self.parts[matrix]
        if part.expert is None:
            return Factors(self._read(part.pair.a), self._read(part.pair.b), part.pair.scale)
        a, b = self._stack(part.pair)
        rows = part.shape[0]
        return Factors(a[part.expert], b[part.expert, part.half * rows : (part.half + 1) * rows], part.pair.scale)

    def faults(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """What is wrong where the factors go to matrices of these names and shapes, by the rules of PEFT.

        Factors without a matrix, of another shape, or of a matrix that the config does not select; and matrices
        that it selects without factors.
        """
        found = []
        for name, part in self.parts.items():
            if name not in shapes:
                found.append(f"{name} does not exist")
            elif tuple(shapes[name]) != part.shape:
                found.append(f"{name} has shape {list(shapes[name])}, its factors {list(part.shape)}")
            elif not self._selects(name):
                found.append(f"{name} has factors, but {CONFIG_FILE} does not name it")
        absent = [name for name in shapes if name not in self.parts and self._selects(name)]
        return found + [f"{name} has no factors, but {CONFIG_FILE} names it" for name in absent]

    def check_trained(self, all_zero: bool = False) -> bool:
        """ValueError naming factors that are not finite, or a layer or stack of experts whose factors are zero, as
        before the first step. all_zero: allowed if no layer's are other than zero; returns whether any are."""
        trained: dict[str, bool] = {}
        for pair in dict.fromkeys(part.pair for part in self.parts.values()):
            a, b = self._read(pair.a), self._read(pair.b)
            if not (a.isfinite().all() and b.isfinite().all()):
                raise ValueError(f"adapter {self.folder}: the factors of {pair.name} hold NaN or infinite numbers")
            # An expert that no token reached has zero factors in an adapter of one pair per expert, too.
            trained[group_of(pair.name)] = trained.get(group_of(pair.name), False) or bool(a.any() and b.any())
        some = any(trained.values())
        for name, learned in trained.items():
            if not learned and (some or not all_zero):
                raise ValueError(f"adapter {self.folder}: the factors of {name} are zero, it is untrained")
        return some

    def _selects(self, name: str) -> bool:
        expert = EXPERT.fullmatch(name)
        if expert and ends_in_any(f"{expert[1]}.{STEMS[expert[2]]}_proj", self.config.target_parameters or ()):
            return True
        return bool(check_target_module_exists(self.config, name))

    def _read_stack(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """A [E, r, in] and B [E, out, r]: rows of A are expert by expert, columns of B are rank by rank."""
        a, b = self._read(pair.a), self._read(pair.b)
        return a.unflatten(0, (pair.experts, -1)), b.unflatten(1, (-1, pair.experts)).permute(2, 0, 1).contiguous()

    def _read(self, stored: StoredTensor) -> Tensor:
        value = read_tensor(self.folder / WEIGHTS_FILE, stored)
        return value.to(torch.promote_types(value.dtype, torch.float32))

    def _parts(self) -> dict[str, Part]:
        file = self.folder / WEIGHTS_FILE
        halves: dict[str, dict[str, StoredTensor]] = {}
        for name, stored in read_header(file).items():
            match = KEY.fullmatch(name)
            if match is None:
                raise ValueError(f"{file}: {name} is not a LoRA factor of this model's layers")
            if len(stored.shape) != 2 or stored.dtype not in FLOAT_DTYPES:
                raise ValueError(f"{file}: {name} is {stored.dtype} {list(stored.shape)}, not a float matrix")
            halves.setdefault(match[1], {})[match[2]] = stored
        if not halves:
            raise ValueError(f"{file} holds no tensor")
        parts: dict[str, Part] = {}
        for name, pair in halves.items():
            if len(pair) < 2:
                raise ValueError(f"{file}: {name} has lora_{min(pair)} without its partner")
            if pair["A"].dtype != pair["B"].dtype:
                raise ValueError(f"{file}: lora_A and lora_B of {name} have different dtypes")
            parts |= self._parts_of(name, pair["A"], pair["B"])
        return parts

    def _parts_of(self, name: str, a: StoredTensor, b: StoredTensor) -> dict[str, Part]:
        stack = STACK.fullmatch(name)
        target = self._parameter(*stack.groups()) if stack else name
        rank, scale = rank_and_scale(self.config, target)
        # A stack's tensors hold the ranks of all experts.
        if a.shape[0] != b.shape[1] or a.shape[0] % rank or not (stack or a.shape[0] == rank):
            raise ValueError(
                f"{self.folder / WEIGHTS_FILE}: factors {list(a.shape)} and {list(b.shape)} of {name} do not have the "
                f"rank {rank} of {CONFIG_FILE}"
            )
        if stack is None:
            return {name: Part(Pair(name, a, b, rank, scale, None))}
        pair = Pair(target, a, b, rank, scale, experts=a.shape[0] // rank)
        matrices = MATRICES[target.rpartition(".")[2].removesuffix("_proj")]
        if b.shape[0] % len(matrices):
            raise ValueError(f"{self.folder / WEIGHTS_FILE}: lora_B of {name} has {b.shape[0]} rows, not two halves")
        return {
            f"{stack[1]}.{expert}.{matrix}": Part(pair, expert, half, len(matrices))
            for expert in range(pair.experts)
            for half, matrix in enumerate(matrices)
        }

    def _parameter(self, experts: str, depth: str) -> str:
        """Which stacked parameter a file's key stands for: PEFT wraps them one after the other, the first innermost."""
        wrapped = [f"{experts}.{stem}_proj" for stem in MATRICES]
        wrapped = [name for name in wrapped if ends_in_any(name, self.config.target_parameters or ())]
        outer = depth.count(".base_layer")
        if outer >= len(wrapped):
            raise ValueError(
                f"{self.folder / WEIGHTS_FILE}: {experts}{depth} has factors, but target_parameters of {CONFIG_FILE} "
                f"does not name its parameter"
            )
        return wrapped[len(wrapped) - 1 - outer]


def group_of(name: str) -> str:
    """What learns as one: a layer, or a stack of experts, also where the factors of its matrices are stored apart."""
    expert = EXPERT.fullmatch(name)
    return f"{expert[1]}.{STEMS[expert[2]]}_proj" if expert else name


def list_faults(faults: list[str]) -> str:
    """The first faults, and how many more there are."""
    more = f"; and {len(faults) - SHOWN_FAULTS:,} more" if len(faults) > SHOWN_FAULTS else ""
    return f"{len(faults):,} fault(s): {'; '.join(faults[:SHOWN_FAULTS])}{more}"


def check_fields(file: Path) -> None:
    """ValueError where an adapter's config is of another kind or has a field that this version of PEFT ignores."""
    values = read_json(file, "peft_type")
    if values["peft_type"] != PeftType.LORA:
        raise ValueError(f"{file}: peft_type {values['peft_type']} is not supported, only LORA")
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    for name in sorted(values.keys() - known):
        if values[name]:
            raise ValueError(f"{file}: {name} = {values[name]!r} is not supported")


def read_config(file: Path) -> LoraConfig:
    """An adapter's config; ValueError naming a field that is not supported."""
    try:
        config, default = LoraConfig.from_pretrained(str(file.parent)), LoraConfig()
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not an adapter's config: {error}") from error
    for field in ("r", "lora_alpha", "rank_pattern", "alpha_pattern"):
        value = getattr(config, field)
        whole = field in ("r", "rank_pattern")
        values = value.values() if field.endswith("_pattern") and isinstance(value, dict) else [value]
        for number in values:
            kinds = int if whole else (int, float)
            if isinstance(number, bool) or not isinstance(number, kinds) or not 0 < number < math.inf:
                raise ValueError(f"{file}: {field} = {value!r} must be {'whole ' if whole else ''}numbers above 0")
    for field, pattern in regexes_of(config, file):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{file}: {field}: {pattern!r} is not a pattern: {error}") from error
    fields = {field.name for field in dataclasses.fields(LoraConfig)} - FOLLOWED - SELECTING - WITHOUT_EFFECT
    odd = sorted(name for name in fields if getattr(config, name) != getattr(default, name))
    odd += [] if config.init_lora_weights in HARMLESS_STARTS else ["init_lora_weights"]
    if odd:
        raise ValueError(f"{file}: {odd[0]} = {getattr(config, odd[0])!r} is not supported")
    return config


def regexes_of(config: LoraConfig, file: Path) -> Iterator[tuple[str, str]]:
    """Fields of an adapter's config and the regular expressions in them; ValueError where a field that selects layers
    holds no names."""
    for field in ("rank_pattern", "alpha_pattern"):
        yield from ((field, pattern) for pattern in getattr(config, field))
    for field in ("target_modules", "exclude_modules", "layers_pattern", "target_parameters"):
        value = getattr(config, field)
        names = [value] if isinstance(value, str) else value or ()
        if not isinstance(names, list | set | tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{file}: {field} = {value!r} must be a name or a list of names")
        # elsewhere a list holds names, not patterns
        if isinstance(value, str) or field == "layers_pattern":
            yield from ((field, pattern) for pattern in names)


def rank_and_scale(config: LoraConfig, target: str) -> tuple[int, float]:
    """Rank and factor alpha / r of a layer or stacked parameter, by its full name: PEFT's rules."""
    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, target), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, target), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)
