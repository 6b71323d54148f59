"""Released-layout MXFP4 checkpoints through from_pretrained and save_pretrained, whole and damaged."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_latentmoe import (
    LatentMoEConfig,
    LatentMoEForCausalLM,
    LatentMoEForConditionalGeneration,
    LatentMoEModel,
)
from modeling_latentmoe.conversion import DiskTensor, check_checkpoint, expected_tensors
from modeling_latentmoe.mxfp4 import LatentMoEMxfp4Config, decode, storage_report

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden" / "checkpoint"
IDS_BT = torch.arange(1, 25).view(2, 12)
LAYER = "language_model.model.layers.2.block_sparse_moe."
INDEX = "model.safetensors.index.json"

Tensors = dict[str, torch.Tensor]


def shards(folder: Path) -> dict[str, Tensors]:
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def tensors(folder: Path) -> Tensors:
    return {name: value for shard in shards(folder).values() for name, value in shard.items()}


def write(folder: Path, files: dict[str, Tensors]) -> None:
    for name, content in files.items():
        save_file(content, folder / name, metadata={"format": "pt"})
    weight_map = {name: file for file, content in files.items() for name in content}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS_BT).logits


def load(folder: Path, **kwargs) -> LatentMoEForConditionalGeneration:
    return LatentMoEForConditionalGeneration.from_pretrained(folder, **kwargs)


def experts(model: torch.nn.Module, layer: int = 2) -> torch.nn.Module:
    return model.language_model.model.layers[layer].block_sparse_moe.experts


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The golden checkpoint with its tensors dealt out over three shards: neighbours never share one."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(GOLDEN / "config.json", folder)
    files: dict[str, Tensors] = {f"model-{n + 1:05d}-of-000003.safetensors": {} for n in range(3)}
    for n, (name, value) in enumerate(sorted(tensors(GOLDEN).items())):
        files[f"model-{n % 3 + 1:05d}-of-000003.safetensors"][name] = value
    write(folder, files)
    return folder


def check_bytes(model: torch.nn.Module, disk: Tensors) -> None:
    for layer in range(1, 6):
        stack, prefix = experts(model, layer), LAYER.replace(".2.", f".{layer}.")
        for leaf, suffix in (("weight_packed", "proj"), ("weight_scale", "scale")):
            gate_up, down = getattr(stack, f"gate_up_{suffix}"), getattr(stack, f"down_{suffix}")
            assert gate_up.dtype == down.dtype == torch.uint8
            assert not gate_up.requires_grad and not down.requires_grad
            for e in range(16):
                w1, w2, w3 = (disk[f"{prefix}experts.{e}.{w}.{leaf}"] for w in ("w1", "w2", "w3"))
                assert torch.equal(gate_up[e], torch.cat([w1, w3])) and torch.equal(down[e], w2)


# --- whole ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "auto"])
def test_bytes_arrive_exactly_whatever_the_dtype(checkpoint, dtype):
    disk, model = tensors(checkpoint), load(checkpoint, dtype=dtype)
    check_bytes(model, disk)
    name = LAYER + "routed_expert_up_proj.weight"
    dense = dict(model.named_parameters())[name]
    assert dense.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    assert torch.equal(dense, disk[name].to(dense.dtype))
    bias = dict(model.named_parameters())[LAYER + "gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32 and torch.equal(bias, disk[LAYER + "gate.e_score_correction_bias"])
    check_bytes(model.to("cpu", torch.float32), disk)
    assert "4.25 bits each (uint8)" in storage_report(model)


def test_one_file_checkpoint(checkpoint, tmp_path):
    disk = tensors(checkpoint)
    for file in checkpoint.glob("model*"):
        file.unlink()
    save_file(disk, checkpoint / "model.safetensors", metadata={"format": "pt"})
    check_bytes(load(checkpoint, dtype=torch.float32), disk)


def test_save_gives_back_the_released_names_and_bytes(checkpoint, tmp_path):
    model = load(checkpoint)
    model.save_pretrained(tmp_path / "saved", max_shard_size="250KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) >= 3
    assert same(tensors(tmp_path / "saved"), tensors(checkpoint))
    index = json.loads((tmp_path / "saved" / INDEX).read_text())["weight_map"]
    assert index == {name: file for file, content in shards(tmp_path / "saved").items() for name in content}
    again = load(tmp_path / "saved")
    check_bytes(again, tensors(checkpoint))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.slow
def test_loads_trains_and_saves_without_any_optional_package(checkpoint, tmp_path, fresh_process):
    code = f"""
import sys, torch
for name in ("compressed_tensors", "kernels", "triton", "peft"):
    sys.modules[name] = None
from modeling_latentmoe import LatentMoEForConditionalGeneration
model = LatentMoEForConditionalGeneration.from_pretrained({str(checkpoint)!r})
assert model.hf_quantizer.is_trainable and not model.hf_quantizer.is_qat_trainable
ids = torch.arange(12).view(1, 12)
model(input_ids=ids, labels=ids).loss.backward()
assert model.language_model.lm_head.weight.grad.abs().sum() > 0
model.save_pretrained({str(tmp_path / "saved")!r})
"""
    fresh_process(code, package=True)
    assert same(tensors(tmp_path / "saved"), tensors(checkpoint))


def dequantising(checkpoint: Path, how: str, **kwargs) -> LatentMoEForConditionalGeneration:
    if how == "argument":
        return load(checkpoint, quantization_config=LatentMoEMxfp4Config(dequantize=True), **kwargs)
    config = LatentMoEConfig.from_pretrained(checkpoint)
    config.quantization_config["dequantize"] = True
    return load(checkpoint, config=config, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["argument", "config"])
def test_dequantised_is_the_same_model_and_saves_float_experts(checkpoint, tmp_path, how, dtype):
    packed, dense = load(checkpoint, dtype=dtype), dequantising(checkpoint, how, dtype=dtype)
    assert experts(dense).gate_up_proj.dtype == dtype
    assert experts(dense).gate_up_proj.requires_grad
    assert torch.equal(logits(dense), logits(packed))
    assert "quantization_config" not in dense.config.to_dict()
    dense.save_pretrained(tmp_path / "saved", max_shard_size="250KB")
    disk, released = tensors(tmp_path / "saved"), tensors(checkpoint)
    matrices = {name.removesuffix("_packed") for name in released if name.endswith("weight_packed")}
    assert disk.keys() == matrices | {name for name in released if "_packed" not in name and "_scale" not in name}
    for name in matrices:
        assert torch.equal(disk[name], decode(released[name + "_packed"], released[name + "_scale"], dtype))
    again = load(tmp_path / "saved", dtype=dtype)
    assert torch.equal(logits(again), logits(packed))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("part", ["whole", "language_model", "language_model.model"])
def test_models_that_were_never_loaded_round_trip(tmp_path, packed, part):
    """Text-only ones have no `language_model.` prefix on disk."""
    config = LatentMoEConfig.tiny(vision=False, packed=packed)
    cls = {"whole": LatentMoEForConditionalGeneration, "language_model": LatentMoEForCausalLM}.get(part, LatentMoEModel)
    if part != "whole":
        config.text_config.quantization_config = getattr(config, "quantization_config", None)
        config = config.text_config
    model = cls(config)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    disk = tensors(tmp_path)
    prefix = {"whole": "language_model.model.", "language_model": "model."}.get(part, "")
    leaf = "weight_packed" if packed else "weight"
    assert f"{prefix}layers.2.block_sparse_moe.experts.15.w3.{leaf}" in disk
    assert not any("_proj" in name and ".experts." in name for name in disk)
    again = cls.from_pretrained(tmp_path)
    assert same(dict(again.state_dict()), dict(model.state_dict()))


def test_bare_model_reads_a_causal_lm_checkpoint(tmp_path):
    """transformers adds and removes the base-model prefix; the strict check follows it."""
    config = LatentMoEConfig.tiny(vision=False, packed=False).text_config
    model = LatentMoEForCausalLM(config)
    model.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"1 fault\(s\): lm_head.weight is missing"):
        LatentMoEForCausalLM.from_pretrained(tmp_path)
    del (headless := dict(model.state_dict()))["lm_head.weight"]
    names = {name.removeprefix("model.") for name in headless}
    assert same(dict(LatentMoEModel.from_pretrained(tmp_path).state_dict()), dict(model.model.state_dict()))
    assert names == model.model.state_dict().keys()


def test_meta_model_needs_no_memory():
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny())
    assert experts(model).gate_up_proj.is_meta and experts(model).gate_up_proj.dtype == torch.uint8
    assert experts(model).gate_up_proj.ds_shape == (16, 64, 32)


def test_released_k3_is_expected_to_the_tensor_and_byte():
    """The numbers of the released index: 497,220 tensors, 1,560,860,324,864 bytes."""
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(LatentMoEConfig.kimi_k3())
    expected = expected_tensors(model, packed=True)
    assert len(expected) == 497_220
    assert expected["language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale"].shape == (3584, 96)
    assert expected["language_model.model.layers.1.block_sparse_moe.experts.0.w3.weight_packed"].shape == (3072, 1792)

    def width(name: str, tensor: DiskTensor) -> int:
        if tensor.dtypes == {"U8"}:
            return 1
        return 4 if any(part in name for part in model._keep_in_fp32_modules_strict) else 2

    assert sum(math.prod(t.shape) * width(name, t) for name, t in expected.items()) == 1_560_860_324_864


def test_only_the_supported_format_is_accepted(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["quantization_config"]["format"] = "nvfp4-pack-quantized"
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="nvfp4-pack-quantized"):
        load(checkpoint)


# --- damaged ---


def pop(files: dict[str, Tensors], name: str) -> tuple[str, torch.Tensor]:
    for file, content in files.items():
        if name in content:
            return file, content.pop(name)
    raise KeyError(name)


def edit(files: dict[str, Tensors], name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file, value = pop(files, name)
    files[file][name] = change(value).contiguous()


def without_scale(files):
    pop(files, LAYER + "experts.3.w1.weight_scale")


def without_expert(files):
    for matrix in ("w1", "w2", "w3"):
        for leaf in ("weight_packed", "weight_scale"):
            pop(files, f"{LAYER}experts.3.{matrix}.{leaf}")


def without_two_halves(files):
    pop(files, LAYER + "experts.3.w1.weight_packed")
    pop(files, LAYER + "experts.5.w3.weight_packed")


def without_layer(files):
    for name in [name for content in files.values() for name in content if name.startswith(LAYER + "experts.")]:
        pop(files, name)


def renumbered_from_one(files):
    names = [name for content in files.values() for name in content if name.startswith(LAYER + "experts.")]
    moved = [(name, *pop(files, name)) for name in names]
    for name, file, value in moved:
        expert, leaf = name.removeprefix(LAYER + "experts.").split(".", 1)
        files[file][f"{LAYER}experts.{int(expert) + 1}.{leaf}"] = value


def one_misshaped(files):
    edit(files, LAYER + "experts.3.w1.weight_packed", lambda t: t[:, :-1])


def all_down_misshaped(files):
    for expert in range(16):
        edit(files, f"{LAYER}experts.{expert}.w2.weight_packed", lambda t: t[:, :8])


def signed_bytes(files):
    edit(files, LAYER + "experts.3.w1.weight_packed", lambda t: t.view(torch.int8))


def float_scales(files):
    edit(files, LAYER + "experts.3.w2.weight_scale", lambda t: t.float())


def integer_dense(files):
    edit(files, "language_model.model.norm.weight", lambda t: t.to(torch.int16))


def extra_tensor(files):
    next(iter(files.values()))[LAYER + "experts.3.w1.weight_shape"] = torch.zeros(2)


def without_dense(files):
    pop(files, "language_model.model.norm.weight")


def stored_twice(files):
    _, value = pop(files, "language_model.model.norm.weight")
    for content in list(files.values())[:2]:
        content["language_model.model.norm.weight"] = value.clone()


FAULTS = {
    without_scale: (1, ["experts.3.w1.weight_scale is missing"]),
    without_expert: (
        6,
        [f"experts.3.{w}.{leaf} is missing" for w in ("w1", "w2", "w3") for leaf in ("weight_packed", "weight_scale")],
    ),
    without_two_halves: (
        2,
        ["experts.3.w1.weight_packed is missing", "experts.5.w3.weight_packed is missing"],
    ),
    without_layer: (96, ["experts.0.w1.weight_packed is missing", "and 86 more"]),
    renumbered_from_one: (12, ["experts.0.w1.weight_packed is missing", "experts.16.w", "is unexpected"]),
    one_misshaped: (1, ["experts.3.w1.weight_packed has shape [32, 15] instead of [32, 16]"]),
    all_down_misshaped: (16, ["w2.weight_packed has shape [32, 8] instead of [32, 16]", "and 6 more"]),
    signed_bytes: (1, ["experts.3.w1.weight_packed is I8 instead of U8"]),
    float_scales: (1, ["experts.3.w2.weight_scale is F32 instead of U8"]),
    integer_dense: (1, ["language_model.model.norm.weight is I16 instead of BF16/F16/F32/F64"]),
    extra_tensor: (1, ["experts.3.w1.weight_shape is unexpected"]),
    without_dense: (1, ["language_model.model.norm.weight is missing"]),
    stored_twice: (1, ["norm.weight is stored twice, in model-00001-of-000003.safetensors and model-00002-"]),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_damaged_checkpoints_raise_one_error_that_lists_everything(checkpoint, fault):
    files = shards(checkpoint)
    fault(files)
    write(checkpoint, files)
    with pytest.raises(ValueError) as error:
        load(checkpoint)
    count, messages = FAULTS[fault]
    message = str(error.value)
    assert f"{count} fault(s)" in message and str(checkpoint) in message and "\n" not in message
    for part in messages:
        assert part in message, message


def test_transformers_alone_lets_several_faults_pass(checkpoint, monkeypatch):
    """What the check is for: when this fails, transformers has become strict and the check can shrink."""
    from modeling_latentmoe import modeling_latentmoe as module

    monkeypatch.setattr(module, "check_checkpoint", lambda *args, **kwargs: None)
    for fault in (without_layer, renumbered_from_one, signed_bytes, extra_tensor, without_dense):
        files = shards(checkpoint)
        fault(files)
        write(checkpoint, files)
        load(checkpoint)
        write(checkpoint, shards(GOLDEN))


def test_dequantising_checks_the_packed_checkpoint_too(checkpoint):
    files = shards(checkpoint)
    signed_bytes(files)
    write(checkpoint, files)
    with pytest.raises(ValueError, match=r"1 fault\(s\): .*experts.3.w1.weight_packed is I8 instead of U8"):
        dequantising(checkpoint, "argument")


def test_faults_of_different_kinds_are_listed_together(checkpoint):
    files = shards(checkpoint)
    for fault in (without_scale, one_misshaped, extra_tensor):
        if fault is one_misshaped:
            edit(files, LAYER + "experts.4.w3.weight_packed", lambda t: t[:-1])
        else:
            fault(files)
    write(checkpoint, files)
    with pytest.raises(
        ValueError, match=r"3 fault\(s\): .*is missing; .*(unexpected|has shape).*; .*(unexpected|has shape)"
    ):
        load(checkpoint)


def test_truncated_shard_is_named(checkpoint):
    file = checkpoint / "model-00002-of-000003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"1 fault\(s\): model-00002-of-000003.safetensors is truncated or damaged"):
        load(checkpoint)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"1 fault\(s\): model-00002-of-000003.safetensors is truncated"):
        load(checkpoint)
    file.write_bytes(b"<html>not found</html>")
    with pytest.raises(
        ValueError, match=r"1 fault\(s\): model-00002-of-000003.safetensors is .*not a safetensors file"
    ):
        load(checkpoint)


def test_missing_shard_is_named(checkpoint):
    (checkpoint / "model-00003-of-000003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"1 fault\(s\): model-00003-of-000003.safetensors is missing"):
        load(checkpoint)


def test_index_that_contradicts_the_shards(checkpoint):
    index = json.loads((checkpoint / INDEX).read_text())
    name, moved = "language_model.model.norm.weight", "language_model.lm_head.weight"
    right = index["weight_map"][moved]
    wrong = next(file for file in index["weight_map"].values() if file != right)
    del index["weight_map"][name]
    index["weight_map"][moved] = wrong
    index["weight_map"]["language_model.model.ghost"] = wrong
    (checkpoint / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError) as error:
        load(checkpoint)
    message = str(error.value)
    assert "3 fault(s)" in message
    assert f"{moved} is in {right} but {INDEX} says {wrong}" in message
    assert f"language_model.model.ghost is in {INDEX} but in no shard" in message
    assert f"but not in {INDEX}" in message


def test_wrong_config_is_refused(checkpoint):
    """A float config for packed experts, and the reverse, never load in silence."""
    config = json.loads((checkpoint / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"experts\.0\.w1\.weight is missing.*and \d+ more"):
        load(checkpoint)


def test_ignored_names_are_honoured(checkpoint, monkeypatch):
    files = shards(checkpoint)
    extra_tensor(files)
    without_dense(files)
    write(checkpoint, files)
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(LatentMoEConfig.from_pretrained(checkpoint))
    paths = sorted(checkpoint.glob("*.safetensors"))
    with pytest.raises(ValueError, match=r"2 fault\(s\)"):
        check_checkpoint(model, paths, packed=True)
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"weight_shape$"])
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_missing", [r"model\.norm\.weight"])
    check_checkpoint(model, paths, packed=True)


def test_every_installed_copy_of_the_code_loads(checkpoint):
    """The package and a remote-code copy register the same names; the last import serves both."""
    import importlib.util
    import sys

    import modeling_latentmoe

    folder = Path(modeling_latentmoe.__file__).parent
    spec = importlib.util.spec_from_file_location(
        "latentmoe_copy", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    copy = importlib.util.module_from_spec(spec)
    sys.modules["latentmoe_copy"] = copy
    spec.loader.exec_module(copy)
    assert copy.LatentMoEForConditionalGeneration is not LatentMoEForConditionalGeneration
    ours, theirs = load(checkpoint), copy.LatentMoEForConditionalGeneration.from_pretrained(checkpoint)
    check_bytes(theirs, tensors(checkpoint))
    assert torch.equal(logits(ours), logits(theirs))


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    """With and without the base-model prefix it is the same weight, and loaders would pick either."""
    config = LatentMoEConfig.tiny(vision=False).text_config
    model = LatentMoEForCausalLM(config)
    model.save_pretrained(tmp_path)
    content = load_file(tmp_path / "model.safetensors")
    save_file(content | {"norm.weight": content["model.norm.weight"] * 7}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight is stored twice, also as model\.norm\.weight"):
        LatentMoEForCausalLM.from_pretrained(tmp_path)


TRAINS = """
import importlib.util, os, torch
from transformers.trainer_utils import validate_quantization_for_training

assert (importlib.util.find_spec("kernels") is not None) == (os.environ["KERNELS"] == "installed")
from modeling_latentmoe.mxfp4 import storage_report
from modeling_latentmoe.training import lora
from modeling_latentmoe.training.loading import load_model

model = load_model(os.environ["TINY"], "fp32")
assert "4.25 bits each (uint8)" in storage_report(model)
model = lora.add_adapter(model, r=2, lora_alpha=4, expert_rank=1)
validate_quantization_for_training(model)
ids = torch.arange(24)[None]
model(input_ids=ids, labels=ids).loss.backward()
gradients = [p.grad for name, p in model.named_parameters() if ".experts." in name and "lora_B" in name]
assert len(gradients) == 8 and all(g.any() for g in gradients)
print("trains")
"""
WITHOUT_KERNELS = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "kernels" else find(name, package)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["installed", "absent"])
def test_trains_with_and_without_the_kernels_package(fresh_process, tiny: Path, kernels: str) -> None:
    """Public report 16: with `kernels` installed, an MXFP4 model was said not to support training."""
    code = TRAINS if kernels == "installed" else WITHOUT_KERNELS + TRAINS
    out = fresh_process(code, {"KERNELS": kernels, "TINY": str(tiny)}, package=True)
    assert out.splitlines()[-1] == "trains"
