"""Checkpoints read range by range into a share of the experts: values, bytes, memory, and the partial results."""

import copy
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.headers import read_header
from modeling_latentmoe.moe import Experts
from modeling_latentmoe.mxfp4 import LatentMoEMxfp4Config
from modeling_latentmoe.training import lora, streaming
from modeling_latentmoe.training.loading import DTYPES, load_model
from modeling_latentmoe.training.sources import LocalFiles
from modeling_latentmoe.training.streaming import streamed

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden" / "checkpoint"
SHARDS = 3
WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
IDS_BT = torch.arange(1, 25).view(2, 12)


def tensors_of(*files: Path) -> dict[str, torch.Tensor]:
    """Copies: the library maps files into memory, and these are about to be overwritten."""
    return {name: value.clone() for file in files for name, value in load_file(file).items()}


def write_in_order(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file with its tensors in the given order; the library's own writer chooses another."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        offsets = [end, end + tensor.nbytes]
        header[name] = {"dtype": WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def deal(folder: Path, seed: int = 0) -> Path:
    """Rewrite a saved checkpoint as released ones are: an expert's tensors adjacent, experts in no order.

    The experts of every layer are spread over all shards.
    """
    tensors = tensors_of(*files_of(folder))
    for file in [*files_of(folder), *folder.glob("*.index.json")]:
        file.unlink()
    units: dict[str, list[str]] = {}
    for name in tensors:
        units.setdefault(re.sub(r"(experts\.\d+)\..*", r"\1", name), []).append(name)
    order = sorted(units)
    random.Random(seed).shuffle(order)
    weight_map = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        content = {name: tensors[name] for unit in order[shard::SHARDS] for name in units[unit]}
        write_in_order(folder / file, content)
        weight_map |= dict.fromkeys(content, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def save_dealt(folder: Path, config: LatentMoEConfig, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(config).to(dtype)
    for name, param in model.named_parameters():
        if param.is_floating_point() and not name.endswith("A_log"):
            param.data.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)
    return deal(folder)


@pytest.fixture(scope="module", params=[True, False], ids=["mxfp4", "float"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 experts in each of several layers, spread over all shards, packed or float. Not to be changed by a test."""
    return save_dealt(tmp_path_factory.mktemp("streaming") / "model", LatentMoEConfig.tiny(packed=request.param))


@pytest.fixture
def always_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint fits in memory."""
    monkeypatch.setattr(streaming, "_fits_in_memory", lambda files: False)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(file, start, stop) of every range that is read."""
    found = []
    read_once = LocalFiles.read_once

    def counted(self, file: str, start: int, stop: int, views: Sequence[memoryview]) -> None:
        found.append((file, start, stop))
        read_once(self, file, start, stop, views)

    monkeypatch.setattr(LocalFiles, "read_once", counted)
    return found


def same(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    """Every parameter and buffer is the same to the bit and of the same dtype."""
    for kind in ("named_parameters", "named_buffers"):
        a, b = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def plain(folder: Path, dtype: str) -> PreTrainedModel:
    return LatentMoEForConditionalGeneration.from_pretrained(folder, dtype=DTYPES[dtype])


def stacks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "Experts"}


# --- one rank: from_pretrained in another way ---


@pytest.mark.parametrize("request_bytes", [2**24, 1000])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_whole_model_is_that_of_from_pretrained(
    checkpoint: Path, dtype: str, request_bytes: int, always_stream: None, reads: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in reads that end inside a row: weights, buffers, logits, configuration, class and mode."""
    monkeypatch.setattr(streaming, "REQUEST_BYTES", request_bytes)
    ours, theirs = load_model(str(checkpoint), dtype), plain(checkpoint, dtype)
    assert reads and all(stop - start <= request_bytes for _, start, stop in reads)
    same(ours, theirs)
    assert torch.equal(ours(input_ids=IDS_BT).logits, theirs(input_ids=IDS_BT).logits)
    assert type(ours).__name__ == type(theirs).__name__ and "streaming" not in type(ours).__module__
    assert type(ours).__mro__[1].__name__ == "LatentMoEPreTrainedModel"
    ours_config, theirs_config = ours.config.to_dict(), theirs.config.to_dict()
    ours_config.pop("auto_map", None), theirs_config.pop("auto_map", None)
    assert ours_config == theirs_config and ours.config.name_or_path == str(checkpoint)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert not ours.training
    # `from_pretrained` makes every float trainable; here the model's own word holds.
    frozen = {name.rpartition(".")[2] for name, param in ours.named_parameters() if not param.requires_grad}
    assert frozen - {f"{stem}_{leaf}" for stem in ("gate_up", "down") for leaf in ("proj", "scale")} == {
        "e_score_correction_bias"
    }
    assert getattr(ours, "is_quantized", False) == getattr(theirs, "is_quantized", False)


def test_a_checkpoint_that_fits_in_memory_is_left_to_transformers(checkpoint: Path, reads: list) -> None:
    same(load_model(str(checkpoint), "fp32"), plain(checkpoint, "fp32"))
    assert not reads


def test_it_saves_like_any_model(checkpoint: Path, tmp_path: Path, always_stream: None) -> None:
    load_model(str(checkpoint), "fp32").save_pretrained(tmp_path / "saved")
    before, after = (tensors_of(*files_of(folder)) for folder in (checkpoint, tmp_path / "saved"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stored_twice", [True, False])
def test_tied_embeddings_share_one_storage(tmp_path: Path, stored_twice: bool, always_stream: None) -> None:
    config = LatentMoEConfig.tiny(packed=False, vision=False)
    config.text_config.tie_word_embeddings = config.tie_word_embeddings = True
    model = LatentMoEForConditionalGeneration(config)
    model.save_pretrained(tmp_path, max_shard_size="10GB")
    if stored_twice:
        tensors = tensors_of(tmp_path / "model.safetensors")
        tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"]
        write_in_order(tmp_path / "model.safetensors", tensors)
    loaded = load_model(str(tmp_path), "fp32")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    same(loaded, model)


def test_a_text_checkpoint_gets_the_missing_prefix(tmp_path: Path, always_stream: None) -> None:
    """As in `from_pretrained`, tensors of the language model alone are found under the composite model's names."""
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False))
    model.save_pretrained(tmp_path, max_shard_size="10GB")
    tensors = tensors_of(tmp_path / "model.safetensors")
    write_in_order(
        tmp_path / "model.safetensors",
        {name.removeprefix("language_model."): value for name, value in tensors.items()},
    )
    same(load_model(str(tmp_path), "fp32"), model)


# --- several ranks ---


@pytest.mark.parametrize(("degree", "ranks"), [(2, (0, 1)), (16, (0, 6, 15))])
def test_a_rank_holds_its_experts_and_all_the_rest(checkpoint: Path, degree: int, ranks: tuple[int, ...]) -> None:
    whole = plain(checkpoint, "bf16")
    for rank in ranks:
        part = load_model(str(checkpoint), "bf16", rank, degree)
        share = range(rank * 16 // degree, (rank + 1) * 16 // degree)
        theirs = whole.state_dict()
        for name, module in stacks(part).items():
            assert module.owned == share and module.logical_shapes["down"][0] == len(share)
            for leaf, value in module.state_dict().items():
                assert torch.equal(value, theirs.pop(f"{name}.{leaf}")[share.start : share.stop])
        rest = {name: value for name, value in part.state_dict().items() if ".experts." not in name}
        assert rest.keys() == theirs.keys() and all(torch.equal(rest[name], theirs[name]) for name in rest)


def test_a_rank_reads_what_it_owns_and_no_more(checkpoint: Path, reads: list) -> None:
    """Report 12, and the loading side of report 36: together the ranks read every byte of every expert exactly once,
    and every byte of all else once per rank."""
    degree, times = 4, {file.name: torch.zeros(file.stat().st_size, dtype=torch.int) for file in files_of(checkpoint)}
    for rank in range(degree):
        reads.clear()
        model = load_model(str(checkpoint), "fp32", rank, degree)
        owned = sum(param.nbytes for param in model.parameters())
        assert owned <= sum(stop - start for _, start, stop in reads) <= 1.02 * owned
        for file, start, stop in reads:
            times[file][start:stop] += 1
    for file in files_of(checkpoint):
        for name, tensor in read_header(file).items():
            expected = 1 if ".experts." in name else degree
            assert (times[file.name][tensor.start : tensor.stop] == expected).all(), name


def test_six_tensors_of_an_expert_are_one_read(tmp_path: Path, reads: list) -> None:
    folder = save_dealt(tmp_path, LatentMoEConfig.tiny(packed=True, vision=False))
    model = load_model(str(folder), "fp32", 0, 16)
    ranges = Counter()
    for file in files_of(folder):
        for name, tensor in read_header(file).items():
            if ".experts.0." in name:
                inside = [r for r in reads if r[0] == file.name and r[1] <= tensor.start and tensor.stop <= r[2]]
                assert len(inside) == 1
                ranges[re.sub(r"experts\.0\..*", "", name), inside[0]] += 1
    assert len(ranges) == len(stacks(model)) and set(ranges.values()) == {6}


def test_ranks_add_up_to_the_whole_layer(checkpoint: Path) -> None:
    """Outputs, and gradients of the input and of the routing weights."""
    whole = plain(checkpoint, "fp32")
    name = next(iter(stacks(whole)))
    experts = whole.get_submodule(name)
    torch.manual_seed(0)
    x = torch.randn(40, experts.logical_shapes["down"][1])
    ids, weights = torch.rand(40, 16).topk(3).indices, torch.rand(40, 3)

    parts = [load_model(str(checkpoint), "fp32", rank, 4).get_submodule(name) for rank in range(4)]
    gradient = torch.randn_like(x)

    def run(module: Experts) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = module(inputs[0], ids, inputs[1], {})
        y.backward(gradient)
        return [y.detach(), *(leaf.grad for leaf in inputs)]

    results = [run(part) for part in parts]
    for index, value in enumerate(run(experts)):
        torch.testing.assert_close(sum(result[index] for result in results), value)
    assert all(result[0].abs().sum() > 0 for result in results)


def test_gradients_of_float_experts_are_the_shares_of_the_whole() -> None:
    config = LatentMoEConfig.tiny(packed=False).text_config
    torch.manual_seed(0)
    whole = Experts(config)
    whole.reset_parameters(0.3)
    parts = [copy.deepcopy(whole) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.restrict(range(8 * rank, 8 * rank + 8))
    x, weights = torch.randn(30, whole.logical_shapes["down"][1]), torch.rand(30, 3)
    # Nobody chooses the second half: its rank has no rows at all.
    for most in (16, 8):
        ids = torch.rand(30, most).topk(3).indices
        for module in (whole, *parts):
            module.zero_grad()
            module(x, ids, weights, {}).sum().backward()
        for stem in ("gate_up_proj", "down_proj"):
            grads = torch.cat([getattr(part, stem).grad for part in parts])
            torch.testing.assert_close(grads, getattr(whole, stem).grad)
    assert not parts[1].down_proj.grad.any()


def test_holding_all_experts_is_not_another_computation() -> None:
    config = LatentMoEConfig.tiny(packed=True).text_config
    config.quantization_config = {"quant_method": "latentmoe_mxfp4"}
    torch.manual_seed(0)
    experts = Experts(config)
    experts.reset_parameters(0.3)
    x, ids, weights = torch.randn(9, 32), torch.rand(9, 16).topk(3).indices, torch.rand(9, 3)
    before = experts(x, ids, weights, {})
    experts.restrict(range(16))
    assert torch.equal(experts(x, ids, weights, {}), before)


def test_the_router_still_counts_all_experts(checkpoint: Path) -> None:
    part = load_model(str(checkpoint), "fp32", 1, 4)
    out = part(input_ids=IDS_BT)
    assert out.expert_load.shape[-1] == 16 and out.expert_load[:, :4].sum() > 0
    chosen = part.config.text_config.num_experts_per_token
    assert (out.expert_load.sum(-1) == IDS_BT.numel() * chosen).all()


def test_adapters_are_as_large_as_the_share(checkpoint: Path) -> None:
    part = load_model(str(checkpoint), "fp32", 3, 4)
    model = lora.add_adapter(part, r=4, lora_alpha=8, expert_rank=2)
    factors = {name: tuple(p.shape) for name, p in model.named_parameters() if ".experts." in name and "lora_" in name}
    # rank times the number of experts that are here
    assert {shape[0] for name, shape in factors.items() if "lora_A" in name} == {2 * 4}
    model(input_ids=IDS_BT, labels=IDS_BT).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name in factors)


# --- what cannot be loaded ---


@pytest.mark.parametrize(("rank", "degree"), [(0, 3), (0, 32), (4, 4), (-1, 4)])
def test_shares_must_be_equal(checkpoint: Path, rank: int, degree: int) -> None:
    with pytest.raises(ValueError, match=f"--ep {degree}"):
        load_model(str(checkpoint), "fp32", rank, degree)


def test_a_model_without_experts_has_no_shares(tmp_path: Path) -> None:
    config = LatentMoEConfig.tiny(packed=False, vision=False, experts=0)
    LatentMoEForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--ep 2: the model has no routed experts"):
        load_model(str(tmp_path), "fp32", 0, 2)


def test_decoding_while_streaming_is_refused() -> None:
    cls = streamed(LatentMoEForConditionalGeneration, 0, 4)
    with pytest.raises(ValueError, match="dequantize: "):
        cls.from_pretrained(GOLDEN, quantization_config=LatentMoEMxfp4Config(dequantize=True))


def test_the_whole_checkpoint_is_checked_before_anything_is_read(tmp_path: Path, reads: list) -> None:
    """Rank 0 owns experts 0-3, but a broken expert 15 concerns it too: all ranks stop, none hangs."""
    folder = save_dealt(tmp_path, LatentMoEConfig.tiny(packed=True, vision=False))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "language_model.model.layers.2.block_sparse_moe.experts.15.w1.weight_scale"
    tensors = tensors_of(folder / index[name])
    del tensors[name]
    write_in_order(folder / index[name], tensors)
    with pytest.raises(ValueError, match=re.escape(f"{name} is missing")):
        load_model(str(folder), "fp32", 0, 4)
    assert not reads


# --- memory ---

MEASURE = """
import gc, json, os, sys, torch
from modeling_latentmoe.mxfp4 import storage_report
from modeling_latentmoe.training import loading, streaming

def kilobytes(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))

def read_bytes():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])

streaming._fits_in_memory = lambda files: False
rank, degree = int(os.environ["EP_RANK"]), int(os.environ["EP_DEGREE"])
loading.load_model(os.environ["WARM_UP"], "bf16", 0, 2)
before, read = kilobytes("VmRSS"), read_bytes()
model = loading.load_model(os.environ["MODEL"], "bf16", rank, degree)
peak, read = kilobytes("VmHWM"), read_bytes() - read
gc.collect()
storages = {}
for thing in gc.get_objects():
    if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
        storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
experts = [m for m in model.modules() if type(m).__name__ == "Experts"]
print(json.dumps({
    "growth": (peak - before) * 1024,
    "read": read,
    "owned": sum(p.nbytes for p in model.parameters()),
    "layer": sum(p.nbytes for p in experts[0].parameters()),
    "storages": sum(storages.values()),
    "report": storage_report(model),
}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory):
    """A packed checkpoint of 330 MB, almost all of it experts, every layer of them spread over three shards."""
    folder = tmp_path_factory.mktemp("large") / "model"
    config = LatentMoEConfig.tiny(packed=True, vision=False, experts=64)
    config.text_config.moe_intermediate_size = 896
    config.text_config.routed_expert_hidden_size = 512
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(config)
    model.to_empty(device="cpu").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        if param.dtype == torch.uint8:
            param.data.random_(0x78, 0x7B, generator=generator)
        elif name.endswith("A_log"):
            param.data.zero_()
        else:
            param.data.normal_(std=0.02, generator=generator)
    model.save_pretrained(folder)
    yield deal(folder)
    for file in files_of(folder):
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "degree"), [(0, 1), (2, 4)])
def test_memory_and_bytes_are_those_of_the_share(
    large: Path, small: Path, rank: int, degree: int, fresh_process: Callable[..., str]
) -> None:
    """Reports 11, 12, 13 and 17: loading holds what the rank owns and little more, reads nothing else from disk,
    leaves no second copy behind, and experts stay at 4.25 bits per weight."""
    env = {"MODEL": str(large), "WARM_UP": str(small), "EP_RANK": str(rank), "EP_DEGREE": str(degree)}
    measured = json.loads(fresh_process(MEASURE, env=env, package=True).splitlines()[-1])
    headers = sum(int.from_bytes(file.read_bytes()[:8], "little") for file in files_of(large))
    total = sum(file.stat().st_size for file in files_of(large))
    owned = measured["owned"]
    assert owned > 0.9 * total / degree and math.isclose(total, owned, rel_tol=0.05) == (degree == 1)
    # Headers are read for the check and again for the ranges; the rest is the index, the config and the code.
    assert measured["read"] <= 1.02 * owned + 2 * headers + 4 * 2**20
    assert measured["growth"] <= owned + measured["layer"] + 32 * 2**20
    assert measured["storages"] <= 1.05 * owned
    assert "4.25 bits each (uint8)" in measured["report"]


# --- progress ---


@pytest.mark.parametrize(
    ("ep_rank", "process", "shown"), [(0, None, True), (1, None, False), (0, "0", True), (0, "5", False)]
)
def test_only_the_first_process_shows_progress(
    checkpoint: Path, ep_rank: int, process: str | None, shown: bool, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    if process is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", process)
    load_model(str(checkpoint), "fp32", ep_rank, 2)
    assert ("weights: 100%" in capfd.readouterr().err) == shown
