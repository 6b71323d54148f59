"""Which parts of the model LoRA adapts, at which rank, with which learning rate; and how an adapter is read back.

Everything is stock PEFT (creation, names, files), so any PEFT reader restores an adapter. The routed experts
are adapted through `target_parameters`; the model itself multiplies their factors, see moe.py. The image
projector gets plain LoRA on its two linear layers and not `modules_to_save`: the file then holds nothing but
LoRA factors, which is what servers accept, and stays small (its two matrices have 46 million weights in the
released model).

PEFT internals are touched here, in dense_lora.py, expert_lora.py and factors.py only.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from modeling_latentmoe.configuration_latentmoe import LINEAR
from modeling_latentmoe.conversion import FLOAT_DTYPES
from modeling_latentmoe.training.dense_lora import fuse_dense
from modeling_latentmoe.training.expert_adapters import held_experts, slice_adapter
from modeling_latentmoe.training.indexer import INDEXER_FILE, read_indexers, set_indexers
from modeling_latentmoe.training.mesh import is_expert
from modeling_latentmoe.training.router_bias import BIAS_FILE, read_biases, set_biases

DENSE_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "g_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("gate_proj", "up_proj", "down_proj"),
    *("routed_expert_down_proj", "routed_expert_up_proj"),
)
EXPERT_TARGETS = ("experts.gate_up_proj", "experts.down_proj")
PROJECTOR_TARGETS = ("mm_projector.proj.0", "mm_projector.proj.2")
# never adapted: indexers learn from a loss of their own, which sees no factors (indexer.py)
NEVER_ADAPTED = {"vision_tower", "indexer"}
# adapted only by a target that names them: "down_proj" never reaches an expert stack
PROTECTED = {"mm_projector", "lm_head", "experts"}
# PEFT widens those of 8 bits
ADAPTER_DTYPES = FLOAT_DTYPES | {"F8_E4M3", "F8_E5M2"}
BASE_FILE = "base_model.json"
# of values that were learned beside the factors, where there are any (values.py)
SIDE_FILES = (BIAS_FILE, INDEXER_FILE)
# these weights, by their first rows, differ between two models of the same config, merged and fine-tuned ones included;
# where indexers alone were trained no others do
FINGERPRINT = re.compile(r"language_model\.model\.(norm|layers\.\d+\.self_attn\.(o_proj|indexer\.wq_b))\.weight$")
# config fields that do not change which model it is
VOLATILE = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",
    "transformers_version",
}
# config fields that earlier versions did not write, and what they mean where they are absent
ADDED = {"index_relu": True, "index_kpool": 1, "index_kpool_always_select_tail": True, "learnable_sink": False}


def add_adapter(
    model: nn.Module,
    *,
    r: int,
    lora_alpha: float,
    expert_rank: int,
    target_modules: list[str] | None = None,
    train_projector: bool = False,
) -> PeftModel:
    """Freeze `model` and put fp32 LoRA factors beside its weights (fp64 in a model of that dtype), in place.

    `target_modules` are the last parts of module names, and "experts.gate_up_proj" / "experts.down_proj" for
    the routed experts; None takes all default targets that the model has. Dense layers get rank `r`, every
    routed expert rank `expert_rank`; all are scaled by lora_alpha / r.
    `train_projector` adapts the projector too, if there is one. Raises ValueError that names the switch.
    """
    if min(r, expert_rank) < 1:
        raise ValueError(f"--r {r} and --expert_rank {expert_rank} must be at least 1")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    layers = [name for name in linear if not is_part(name, NEVER_ADAPTED)]
    stacks = [name for name, _ in model.named_parameters() if ends_in_any(name, EXPERT_TARGETS)]
    if target_modules is None:
        targets = [target for target in DENSE_TARGETS + EXPERT_TARGETS if reached(target, layers + stacks)]
    else:
        targets = list(dict.fromkeys(target_modules))
    if train_projector:
        targets += [target for target in PROJECTOR_TARGETS if reached(target, layers)]
    for target in targets:
        if not reached(target, layers + stacks):
            raise ValueError(f"--target_modules {target}: {why_not(target, model, layers + stacks)}")
    if not targets:
        raise ValueError("--target_modules names nothing to adapt")
    dense = {target: reached(target, layers) for target in targets if reached(target, layers)}
    experts = {target: reached(target, stacks) for target in targets if reached(target, stacks)}
    chosen = {name for names in dense.values() for name in names}
    excluded = [name for name in linear if ends_in_any(name, dense) and name not in chosen]
    config = LoraConfig(
        r=r,
        lora_alpha=lora_alpha,
        # PEFT has no dropout on stacked parameters
        lora_dropout=0.0,
        target_modules=list(dense),
        exclude_modules=excluded or None,
        target_parameters=list(experts) or None,
        rank_pattern={re.escape(target): expert_rank for target in experts},
        # alpha / rank is then the same number everywhere
        alpha_pattern={re.escape(target): lora_alpha * expert_rank / r for target in experts},
    )
    with warnings.catch_warnings():
        # PEFT says that patterns for stacked parameters are ignored; they are not, as is checked below
        warnings.filterwarnings("ignore", message=".*(rank_pattern|alpha_pattern|is_gradient_checkpointing).*")
        peft_model = get_peft_model(model, config)
    if model.dtype == torch.float64:
        # beside packed experts PEFT makes them fp32
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.double()
    check_adapter(peft_model, chosen, experts, r, expert_rank, lora_alpha / r)
    fuse_dense(peft_model)
    return peft_model


def is_part(name: str, parts: set[str]) -> bool:
    """Whether the module of this full name is, or lies in, one of `parts`."""
    return not parts.isdisjoint(name.split("."))


def ends_in_any(name: str, targets: Iterable[str]) -> bool:
    """Whether `name` ends in one of the targets, at a module boundary: PEFT's rule."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def reached(target: str, names: list[str]) -> list[str]:
    """The full names that `target` stands for: those that end in it, protected parts only if it names them."""
    closed = PROTECTED - set(target.split("."))
    return [name for name in names if ends_in_any(name, [target]) and not is_part(name, closed)]


def why_not(target: str, model: nn.Module, names: list[str]) -> str:
    """What to say about a target that stands for nothing."""
    found = {name: module for name, module in model.named_modules() if ends_in_any(name, [target])}
    for name, module in found.items():
        if is_part(name, {"indexer"}):
            return "LoRA adapts no indexer, --train_indexer trains them; leave them out of --target_modules"
        if not isinstance(module, nn.Linear):
            kind = "the router" if name.endswith("block_sparse_moe.gate") else f"a {type(module).__name__}"
            return f"{name} is {kind}, not a linear layer, and LoRA cannot adapt it"
        if is_part(name, {"vision_tower"}):
            return "it lies in the vision tower, which stays frozen"
        parts = name.split(".")
        start = min(parts.index(part) for part in PROTECTED if part in parts)
        return f"it lies in a part that must be named: {'.'.join(parts[start:])}"
    known = {name.rpartition(".")[2] for name in names if not is_part(name, PROTECTED)}
    known |= {target for target in EXPERT_TARGETS if reached(target, names)}
    return f"the model has no such module; it has {' '.join(sorted(known))}"


def check_adapter(
    peft_model: PeftModel,
    chosen: set[str],
    experts: dict[str, list[str]],
    r: int,
    expert_rank: int,
    scale: float,
) -> None:
    """Assert that PEFT adapted exactly the chosen layers and stacks, at the ranks and the scale asked for."""
    seen: dict[str, int] = {}
    for name, module in peft_model.base_model.model.named_modules():
        if "default" in getattr(module, "lora_A", {}):
            parameter = getattr(module, "parameter_name", None)
            full = name.replace(".base_layer", "")
            seen[f"{full}.{parameter}" if parameter else full] = module.r["default"]
            assert abs(module.scaling["default"] - scale) < 1e-9, f"{name}: scale {module.scaling}"
    stacks = {name for names in experts.values() for name in names}
    expected = dict.fromkeys(chosen, r) | dict.fromkeys(stacks, expert_rank)
    assert seen == expected, f"PEFT adapted other layers: {sorted(seen.items() ^ expected.items())[:5]}"
    for name, parameter in peft_model.named_parameters():
        assert not parameter.requires_grad or parameter.dtype in (torch.float32, torch.float64), f"{name} is not fp32"


def parameter_groups(model: nn.Module, rates: dict[str, float]) -> list[dict]:
    """Optimizer groups of the trainable parameters: "kda", "attention", "indexer", "experts", "projector"
    and "dense" (the rest).

    `rates` gives each group's peak learning rate; a group without parameters is left out. Works on the
    wrapped model.
    """
    layer_types = model.config.get_text_config().layer_types
    members: dict[str, list[nn.Parameter]] = {name: [] for name in rates}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[group_of(name, layer_types)].append(parameter)
    return [{"name": n, "params": p, "lr": rates[n], "peak_lr": rates[n]} for n, p in members.items() if p]


def group_of(name: str, layer_types: list[str]) -> str:
    """The learning-rate group of a parameter, by its full name."""
    layer = re.search(r"\.layers\.(\d+)\.(self_attn)?", name)
    if "mm_projector" in name:
        return "projector"
    if ".experts." in name:
        return "experts"
    if ".indexer." in name:
        return "indexer"
    if layer and layer[2]:
        return "kda" if layer_types[int(layer[1])] == LINEAR else "attention"
    return "dense"


def trainable_line(model: nn.Module, groups: list[dict]) -> str:
    """How many weights train, in all and by group; packed weights count as the numbers they stand for."""
    experts = model.config.get_text_config().num_experts or 0
    # of the experts a process may hold only a share
    copies = experts // len(held_experts(model)) if experts else 1
    total = sum(
        weights(parameter) * (copies if is_expert(name) else 1)
        for name, parameter in model.named_parameters()
        if not name.endswith("_scale")
    )
    counts = {group["name"]: sum(p.numel() for p in group["params"]) for group in groups}
    counts |= {name: count * copies for name, count in counts.items() if name == "experts"}
    train = sum(counts.values())
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"trainable parameters: {train:,} of {total:,} = {100 * train / total:.2f} % ({parts})"


def weights(parameter: nn.Parameter) -> int:
    """Number of weights that a parameter stands for: packed bytes carry their logical shape."""
    return getattr(parameter, "ds_shape", parameter.shape).numel()


def base_identity(model: nn.Module, name: str) -> dict[str, str]:
    """What tells one base model from another: its name, and the digest of its config and of some of its weights."""
    rows = {name: first_row(p) for name, p in model.named_parameters() if FINGERPRINT.search(name)}
    return {"base_model": name, "digest": base_digest(model.config, rows)}


def first_row(weight: Tensor) -> Tensor:
    return weight.detach().view(-1, weight.shape[-1])[0]


def base_digest(config: PreTrainedConfig, rows: dict[str, Tensor]) -> str:
    """Digest of a config and of the first rows of the weights that match FINGERPRINT, by name.

    Neither the dtype of the weights nor packed or unpacked experts change it. ValueError where no row is given.
    """
    if not rows:
        raise ValueError(f"the base model has no weight whose name matches {FINGERPRINT.pattern}")
    fields = config.to_dict()
    for part in (fields, fields.get("text_config", {}), fields.get("vision_config") or {}):
        for field in VOLATILE:
            part.pop(field, None)
        for field, value in ADDED.items():
            if part.get(field) == value:
                del part[field]
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    for _, row in sorted(rows.items()):
        digest.update(row.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def load_adapter(model: nn.Module, adapter: str, is_trainable: bool = False) -> PeftModel:
    """Put the adapter of folder or Hub id `adapter` on `model`, strictly.

    Router biases and indexers that were learned with it, if there are any, replace those of `model` (see values.py;
    stock PEFT does not know them). Raises ValueError where a file is damaged, where it belongs to another base model or
    where one tensor of a file is not used.
    """
    folder = adapter_folder(adapter)
    stored = check_files(folder)
    check_base(folder, adapter, base_identity(model, ""))
    biases, indexers = read_biases(folder, model), read_indexers(folder, model)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore",
                message=".*(rank_pattern|alpha_pattern|is_gradient_checkpointing|missing adapter keys).*",
            )
            peft_model = PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)
    except (RuntimeError, ValueError, TypeError, AttributeError, re.error) as error:
        # RuntimeError for tensors, the others for fields of the config
        raise ValueError(f"adapter {adapter} does not fit the model: {' '.join(str(error).split())[:300]}") from error
    factors = get_peft_model_state_dict(peft_model)
    check_used(adapter, stored, set(factors))
    check_finite(adapter, factors)
    for name, module in peft_model.named_modules():
        if "default" in getattr(module, "lora_A", {}) and not math.isfinite(module.scaling["default"]):
            raise ValueError(
                f"{folder / 'adapter_config.json'}: lora_alpha / r of {name} is {module.scaling['default']}"
            )
    set_biases(model, biases)
    fuse_dense(peft_model)
    set_indexers(model, indexers)
    return peft_model


def fill_adapter(model: PeftModel, adapter: str, identity: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    """Give the factors of `model`, which `add_adapter` made, the values of folder or Hub id `adapter`, strictly.

    `model` may hold a share of the experts; `identity` is that of its base (`base_identity`). Router biases and
    indexers as in `load_adapter`; they are returned, by the name of their file. Raises ValueError too where ranks or
    scales are others.
    """
    folder = adapter_folder(adapter)
    stored = check_files(folder)
    check_base(folder, adapter, identity)
    ours, theirs = model.peft_config["default"], PeftConfig.from_pretrained(str(folder))
    scales = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
    for field in (*scales, "use_dora", "fan_in_fan_out", "bias"):
        mine, other = getattr(ours, field), getattr(theirs, field, None)
        if mine != other:
            raise ValueError(f"--adapter {adapter} has {field} {other}, this run asks for {mine}")
    check_used(adapter, stored, set(get_peft_model_state_dict(model)))
    base = model.get_base_model()
    biases, indexers = read_biases(folder, base), read_indexers(folder, base)
    factors = load_file(folder / "adapter_model.safetensors")
    check_finite(adapter, factors)
    try:
        set_peft_model_state_dict(model, slice_adapter(model, factors))
    except RuntimeError as error:
        raise ValueError(f"--adapter {adapter} does not fit the model: {' '.join(str(error).split())[:300]}") from error
    set_biases(base, biases)
    set_indexers(base, indexers)
    return {BIAS_FILE: biases, INDEXER_FILE: indexers}


def adapter_folder(adapter: str) -> Path:
    """The local folder of an adapter, from the Hub if `adapter` is no folder; ValueError where a file is missing."""
    folder = Path(adapter)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(adapter, allow_patterns=["adapter_*", BASE_FILE, *SIDE_FILES]))
        except (ValueError, OSError) as error:
            raise ValueError(f"adapter {adapter}: there is no such folder, and no such Hub id ({error})") from error
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise ValueError(f"adapter {adapter}: {file} is missing")
    return folder


def check_base(folder: Path, adapter: str, identity: dict[str, str]) -> None:
    """ValueError unless the adapter in `folder` was made for the base model of this identity, as far as it says so."""
    if (folder / BASE_FILE).is_file():
        made_for = read_json(folder / BASE_FILE, "digest", "base_model")
        if made_for["digest"] != identity["digest"]:
            raise ValueError(f"adapter {adapter} was made for another base model ({made_for['base_model']})")


def check_used(adapter: str, stored: set[str], held: set[str]) -> None:
    """ValueError unless the model holds exactly the tensors of the file."""
    odd = sorted(stored ^ held)
    if odd:
        raise ValueError(f"adapter {adapter}: {len(odd)} tensors do not fit the model, for example {odd[0]}")


def check_finite(adapter: str, factors: dict[str, Tensor]) -> None:
    """ValueError that names the first of an adapter's tensors that would spread NaN."""
    for name, factor in factors.items():
        # 8-bit floats cannot be asked
        if not factor.float().isfinite().all():
            raise ValueError(f"adapter {adapter}: {name} holds NaN or infinite numbers")


def check_files(folder: Path) -> set[str]:
    """The names of an adapter's tensors; ValueError where its weights or its config cannot be read, or as in
    `check_beside`."""
    check_beside(folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    read_json(config, "peft_type")
    try:
        PeftConfig.from_pretrained(str(folder))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} is not an adapter's config: {error}") from error
    try:
        with safe_open(weights, "pt") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{weights} is damaged or cut short ({error})") from error
    for name, dtype in dtypes.items():
        if dtype not in ADAPTER_DTYPES:
            raise ValueError(f"{weights}: {name} holds {dtype}, expected one of {', '.join(sorted(ADAPTER_DTYPES))}")
    return set(dtypes)


def check_beside(folder: Path) -> None:
    """ValueError where a file that the adapter in `folder` lists is not beside it: without it the model would be
    another one. Adapters of earlier versions list none."""
    if not (folder / BASE_FILE).is_file():
        return
    listed = read_json(folder / BASE_FILE).get("files", [])
    if not isinstance(listed, list) or not all(isinstance(file, str) for file in listed):
        raise ValueError(f"{folder / BASE_FILE}: files must be a list of names")
    for file in listed:
        if not (folder / file).is_file():
            raise ValueError(f"adapter {folder}: {file} is missing, which its {BASE_FILE} lists; copy the whole folder")


def read_json(file: Path, *fields: str) -> dict[str, Any]:
    """A JSON object that has these fields; ValueError that names the file."""
    try:
        values = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict) or not values.keys() >= set(fields):
        raise ValueError(f"{file} must be a JSON object{' with ' if fields else ''}{', '.join(fields)}")
    return values


def snapshot(parameters: list[nn.Parameter]) -> list[Tensor]:
    """A copy of the parameters' values."""
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def restore(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    """Put a snapshot back."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
