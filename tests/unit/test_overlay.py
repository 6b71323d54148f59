"""The overlay loads a released snapshot by remote code alone; the preflight says all that is wrong, in few lines."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.conversion import Fault
from modeling_latentmoe.image_processing_latentmoe import LatentMoEImageProcessor
from modeling_latentmoe.processing_latentmoe import LatentMoEProcessor
from modeling_latentmoe.tokenization_latentmoe import LatentMoETokenizer
from modeling_latentmoe.training import overlay as overlay_module
from modeling_latentmoe.training.loading import SHIPPED_MODEL
from modeling_latentmoe.training.overlay import make_overlay
from modeling_latentmoe.training.preflight import check_folder, read_config, summarize
from modeling_latentmoe.training.sources import code_files

from .snapshots import INDEX, SHARDS, edit_header, released_config, shard, write_small_snapshot

ROOT = Path(__file__).parents[2]
MOE = "language_model.model.layers.2.block_sparse_moe."


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Not to be changed by a test."""
    return write_small_snapshot(tmp_path_factory.mktemp("source") / "snapshot")


@pytest.fixture
def snapshot(source, tmp_path) -> Path:
    return shutil.copytree(source, tmp_path / "snapshot")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("overlay_script", ROOT / "scripts" / "overlay.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def out(source, script, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("overlays") / "deep" / "k3"
    assert script.main([str(source), str(folder)]) == 0
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def state(folder: Path) -> dict[str, tuple]:
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}


# --- the overlay ---

LOAD = """
import json, os
import torch
from PIL import Image
from transformers import (
    AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText,
    AutoProcessor, AutoTokenizer,
)
torch.set_num_threads(1)
where = os.environ["OUT"]
load = lambda auto, **kwargs: auto.from_pretrained(where, trust_remote_code=True, **kwargs)
processor = load(AutoProcessor)
image = Image.new("RGB", (40, 28), (200, 30, 30))
content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
batch = processor.apply_chat_template(
    [{"role": "user", "content": content}], tokenize=True, return_dict=True, add_generation_prompt=True
)
logits = []
for auto in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel):
    model, info = load(auto, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    with torch.no_grad():
        logits.append(model.eval()(**batch).logits)
assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
generated = model.generate(**batch, max_new_tokens=3, do_sample=False)
print(json.dumps({
    "classes": [type(load(auto)).__name__ for auto in (AutoConfig, AutoTokenizer, AutoImageProcessor, AutoProcessor)],
    "model": type(model).__name__,
    "ids": batch["input_ids"][0].tolist(),
    "logits": logits[0][0, -1].tolist(),
    "generated": generated.shape[1] - batch["input_ids"].shape[1],
}))
"""


@pytest.mark.slow
def test_loads_by_remote_code_alone(source, out, fresh_process: Callable[..., str]):
    """In a process without the package, by every Auto class; the logits are those of the package on the snapshot."""
    seen = json.loads(fresh_process(LOAD, env={"OUT": str(out)}).splitlines()[-1])
    assert seen["classes"] == ["LatentMoEConfig", "LatentMoETokenizer", "LatentMoEImageProcessor", "LatentMoEProcessor"]
    assert seen["model"] == "LatentMoEForConditionalGeneration"
    assert 1 <= seen["generated"] <= 3
    image = {"type": "image", "image": Image.new("RGB", (40, 28), (200, 30, 30))}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    tokenizer = LatentMoETokenizer.from_pretrained(source)
    processor = LatentMoEProcessor(LatentMoEImageProcessor.from_pretrained(source), tokenizer)
    batch = processor.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    assert batch["input_ids"][0].tolist() == seen["ids"]
    model = LatentMoEForConditionalGeneration.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(**batch).logits[0, -1]
    torch.testing.assert_close(torch.tensor(seen["logits"]), logits)


def test_holds_links_code_and_files_of_ours(source, out):
    for name in [INDEX, *(shard(n) for n in range(1, SHARDS + 1))]:
        assert (out / name).is_symlink() and (out / name).samefile(source / name)
    assert not any(file.is_symlink() for file in out.iterdir() if file.suffix in (".py", ".model"))
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "latentmoe" and config["architectures"] == ["LatentMoEForConditionalGeneration"]
    autos = {"AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"}
    assert autos <= config["auto_map"].keys()
    references = dict(config["auto_map"])
    for name in ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        references |= json.loads((out / name).read_text())["auto_map"]
    assert {"AutoTokenizer", "AutoProcessor", "AutoImageProcessor"} <= references.keys()
    for reference in references.values():
        module, _, _ = (reference[0] if isinstance(reference, list) else reference).partition(".")
        assert (out / f"{module}.py").read_bytes() == (ROOT / "modeling_latentmoe" / f"{module}.py").read_bytes()
    assert {file.name for file in (ROOT / "modeling_latentmoe").glob("*.py")} - {"__init__.py"} == {
        file.name for file in out.glob("*.py")
    }
    media = json.loads((source / "preprocessor_config.json").read_text())["media_proc_cfg"]
    assert json.loads((out / "preprocessor_config.json").read_text())["media_proc_cfg"] == media
    assert (out / "tiktoken.model").read_bytes() == (source / "tiktoken.model").read_bytes()
    assert (out.stat().st_mode & 0o777) == (out.parent.stat().st_mode & 0o777)


def test_is_whole_itself(out):
    assert not check_folder(out).faults


@pytest.mark.parametrize("file", ["kda.py", "tokenizer_config.json", "tiktoken.model", "processor_config.json"])
@pytest.mark.parametrize("damaged", [False, True])
def test_what_lies_beside_the_weights_is_checked(out, script, tmp_path, capsys, file, damaged):
    folder = shutil.copytree(out, tmp_path / "out", symlinks=True)
    if damaged and file != "tiktoken.model":
        (folder / file).write_text("(")
        fault = f"{file} is damaged: "
    else:
        (folder / file).unlink()
        fault = f"{'tokenizer.json' if file == 'tiktoken.model' else file} is missing"
    assert script.main(["--check", str(folder)]) == 2
    assert fault in capsys.readouterr().out


def test_an_auto_map_of_another_kind(out, script, tmp_path, capsys):
    folder = shutil.copytree(out, tmp_path / "out", symlinks=True)
    (folder / "tokenizer_config.json").write_text('{"auto_map": "x.Y"}')
    assert script.main(["--check", str(folder)]) == 2
    said = capsys.readouterr()
    assert "tokenizer_config.json is damaged: auto_map must be an object" in said.out + said.err


def test_a_model_without_processor_is_whole(tmp_path):
    """Also with a tokenizer, which names the processor that it came from."""
    LatentMoEForConditionalGeneration(read_config(released_config(tmp_path / "k3"))).save_pretrained(tmp_path / "m")
    assert not check_folder(tmp_path / "m").faults
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(SHIPPED_MODEL) / file, tmp_path / "m" / file)
    assert "AutoProcessor" in (tmp_path / "m" / "tokenizer_config.json").read_text()
    assert not check_folder(tmp_path / "m").faults


@pytest.mark.parametrize("classes", [None, {"AutoTokenizer": [None, 5]}])
def test_classes_of_another_kind_name_no_code(classes):
    contents = {"tokenizer_config.json": json.dumps({"auto_map": classes}).encode()}
    assert code_files(contents) == []


def test_hub_cache_and_relative_paths(source, script, tmp_path, monkeypatch):
    """A snapshot in the Hub's cache is itself a folder of links; ours are absolute."""
    (tmp_path / "snapshot").mkdir()
    for n, file in enumerate(sorted(source.iterdir())):
        (tmp_path / f"blob{n}").write_bytes(file.read_bytes())
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blob{n}")
    monkeypatch.chdir(tmp_path)
    assert script.main(["snapshot", "out"]) == 0
    monkeypatch.chdir("/")
    assert not check_folder(tmp_path / "out").faults
    assert (tmp_path / "out" / INDEX).readlink() == tmp_path / "snapshot" / INDEX


def test_generation_config_comes_along(snapshot, script, tmp_path):
    (snapshot / "generation_config.json").write_text('{"eos_token_id": 258, "max_length": 77}')
    assert script.main([str(snapshot), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["max_length"] == 77


def test_never_touches_the_source(snapshot, script, tmp_path, capsys):
    """Also not when it is told to write there, and not by saving the loaded model over the links."""
    before = state(snapshot)
    out = tmp_path / "out"
    assert script.main([str(snapshot), str(out)]) == 0
    for inside in (snapshot, snapshot / "new", out / ".." / "snapshot" / "new"):
        assert script.main([str(snapshot), str(inside)]) == 2
        assert "is inside of" in capsys.readouterr().err
    LatentMoEForConditionalGeneration.from_pretrained(out).save_pretrained(out)
    assert state(snapshot) == before


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_refuses_an_out_in_use(source, script, tmp_path, capsys, kind):
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "mine.txt").write_text("keep")
    elif kind == "file":
        out.write_text("keep")
    else:
        out.symlink_to(tmp_path)
    assert script.main([str(source), str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out} is in use: choose another folder\n"
    assert kind == "link" or (out / "mine.txt" if kind == "folder" else out).read_text() == "keep"


def test_an_empty_folder_is_not_in_use(source, script, tmp_path):
    (tmp_path / "out").mkdir()
    assert script.main([str(source), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / INDEX).is_file()


def test_appears_whole_or_not_at_all(source, tmp_path, monkeypatch):
    shards = check_folder(source).shards

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(overlay_module, "link_weights", full)
    with pytest.raises(OSError, match="No space left"):
        make_overlay(source, shards, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_one_leaves_no_overlay_and_is_repeated(source, tmp_path, script):
    if (pid := os.fork()) == 0:
        overlay_module.copy_code = lambda folder: os._exit(9)
        try:
            make_overlay(source, [], tmp_path / "out")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir())
    assert script.main([str(source), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_broken_snapshot_gets_no_overlay(snapshot, script, tmp_path, capsys):
    (snapshot / shard(2)).unlink()
    assert script.main([str(snapshot), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    streams = capsys.readouterr()
    assert streams.out == f"{shard(2)} is missing\n"
    assert streams.err == f"error: {snapshot} is not a whole checkpoint: 1 fault(s), listed above\n"


def test_what_loads_already_needs_no_overlay(tiny, script, tmp_path, capsys):
    assert script.main([str(tiny), str(tmp_path / "out")]) == 2
    assert "load it as it is" in capsys.readouterr().err


# --- reports about other loaders of this checkpoint ---


def test_only_experts_are_packed_whatever_the_regexes_say(source, out):
    """Pitfall 21: target "Linear" minus the ignore list would also cover the latent projections and AttnRes scores."""
    model = LatentMoEForConditionalGeneration.from_pretrained(out)
    packed = {name for name, param in model.named_parameters() if param.dtype == torch.uint8}
    assert packed and all(re.search(r"\.experts\.(gate_up|down)_(proj|scale)$", name) for name in packed)
    disk, params = load_file(source / shard(3)), dict(model.named_parameters())
    for leaf in ("routed_expert_down_proj", "routed_expert_up_proj", "gate"):
        assert torch.equal(params[f"{MOE}{leaf}.weight"], disk[f"{MOE}{leaf}.weight"])
    assert torch.equal(
        params["language_model.model.layers.2.mlp_res_proj.weight"],
        disk["language_model.model.layers.2.mlp_res_proj.weight"],
    )


def test_scales_arrive(source, out):
    """Pitfall 22: `weight_scale` was skipped; here a scale doubled on disk doubles the decoded weights."""
    model = LatentMoEForConditionalGeneration.from_pretrained(out)
    disk, experts = load_file(source / shard(3)), model.language_model.model.layers[2].block_sparse_moe.experts
    for e in range(16):
        scales = {w: disk[f"{MOE}experts.{e}.{w}.weight_scale"] for w in ("w1", "w2", "w3")}
        assert torch.equal(experts.gate_up_scale[e], torch.cat([scales["w1"], scales["w3"]]))
        assert torch.equal(experts.down_scale[e], scales["w2"])


def test_the_top_level_model_type_decides(snapshot, script, capsys):
    """Pitfall 23: text_config calls itself kimi_linear, an older architecture; such a root is not ours."""
    config = json.loads((snapshot / "config.json").read_text())
    assert config["text_config"]["model_type"] == "kimi_linear"
    assert read_config(snapshot).text_config.model_type == "latentmoe_text"
    (snapshot / "config.json").write_text(json.dumps(config["text_config"]))
    assert script.main(["--check", str(snapshot)]) == 2
    assert "config.json: model_type is 'kimi_linear', expected 'kimi_k3'" in capsys.readouterr().err


def test_both_names_of_experts_per_token(out):
    """Pitfall 24: the key is num_experts_per_token; tools that read num_experts_per_tok get the same number."""
    text = read_config(out).text_config
    assert text.num_experts_per_tok == text.num_experts_per_token == 4


def test_the_requested_attention_stays(out):
    """Pitfall 25: the original replaces any attention by flash_attention_2."""
    for attention in ("eager", "sdpa"):
        model = LatentMoEForConditionalGeneration.from_pretrained(out, attn_implementation=attention)
        assert model.config._attn_implementation == attention


def test_fp32_parameters_survive_casts(source, out):
    """Pitfall 26: biases and decays are fp32 on disk and stay so, to the bit, in a model cast to bf16."""
    model = LatentMoEForConditionalGeneration.from_pretrained(out).to(torch.bfloat16)
    params, disk = dict(model.named_parameters()), load_file(source / shard(3))
    wide = [name for name, value in disk.items() if value.dtype == torch.float32]
    assert len(wide) == 7
    for name in wide:
        assert params[name].dtype == torch.float32 and torch.equal(params[name], disk[name])


def test_weights_live_under_language_model(source):
    """Report 106: names begin with `language_model.model.`, and another nesting is refused, not dropped."""
    report, names = check_folder(source), json.loads((source / INDEX).read_text())["weight_map"]
    assert not report.faults and report.tensors == len(names)
    text = {name for name in names if not name.startswith(("vision_tower.", "mm_projector."))}
    assert all(name.startswith(("language_model.model.", "language_model.lm_head.")) for name in text)


def test_another_nesting_is_refused(snapshot):
    """Report 106: `model.language_model.` is what merge tools expected."""

    def change(header):
        for name in [name for name in header if name.startswith("language_model.model.")]:
            header["model.language_model." + name.removeprefix("language_model.model.")] = header.pop(name)

    edit_header(snapshot / shard(3), change)
    with pytest.raises(ValueError, match=r"is missing; .* and \d+ more"):
        LatentMoEForConditionalGeneration.from_pretrained(snapshot)
    lines = summarize(check_folder(snapshot).faults)
    assert any(f"{shard(3)}: language_model.model.layers.2." in line and "is missing" in line for line in lines)
    assert any("model.language_model.layers.2." in line and "is unexpected" in line for line in lines)


# --- the preflight ---


def test_check_says_what_it_saw(source, script, capsys):
    assert script.main(["--check", str(source)]) == 0
    values = tensors(source).values()
    held = rf"{len(values)} tensors, {sum(value.nbytes for value in values):,} bytes in {SHARDS} shard\(s\)"
    assert re.fullmatch(rf"{source} is whole: {held}, checked in [\d.]+ s\n", capsys.readouterr().out)


def test_check_lists_everything_in_few_lines(snapshot, script, capsys):
    """Thousands of faults of one kind are one line, and none hides another."""

    def without_experts(header):
        for name in [name for name in header if ".experts." in name]:
            header[name.replace(".experts.", ".lost.")] = header.pop(name)

    def narrow(header):
        name = f"{MOE}experts.3.w2.weight_scale"
        header[name]["shape"] = [1, 32]

    edit_header(snapshot / shard(5), without_experts)
    edit_header(snapshot / shard(3), narrow)
    (snapshot / shard(9)).unlink()
    (snapshot / "preprocessor_config.json").unlink()
    assert script.main(["--check", str(snapshot)]) == 2
    streams = capsys.readouterr()
    experts = "language_model.model.layers.4.block_sparse_moe.{}.0-15.w1|w2|w3.weight_packed|weight_scale"
    assert sorted(streams.out.splitlines()) == sorted(
        [
            f"{shard(9)} is missing",
            "preprocessor_config.json is missing",
            f"{shard(5)}: {experts.format('experts')} is missing (96 tensors)",
            f"{shard(5)}: {experts.format('lost')} is unexpected (96 tensors)",
            f"{experts.format('lost')} is in {shard(5)} but not in {INDEX} (96 tensors)",
            f"{shard(3)}: {MOE}experts.3.w2.weight_scale has shape [1, 32] instead of [32, 1]",
        ]
    )
    assert streams.err == f"error: {snapshot} is not a whole checkpoint: 291 fault(s), listed above\n"


def test_total_size_is_compared(snapshot):
    index = json.loads((snapshot / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (snapshot / INDEX).write_text(json.dumps(index))
    assert len(check_folder(snapshot).faults) == 1
    assert "total_size" in str(check_folder(snapshot).faults[0])
    LatentMoEForConditionalGeneration.from_pretrained(snapshot)


def test_a_missing_index_is_a_fault(snapshot):
    (snapshot / INDEX).unlink()
    assert list(map(str, check_folder(snapshot).faults)) == [f"{INDEX} is missing"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: (folder / INDEX).write_text("[]"), f"{INDEX} is damaged"),
        (lambda folder: [file.unlink() for file in folder.glob("model*")], "holds no safetensors files"),
        (lambda folder: released_config(folder, num_experts=15, num_experts_per_token=16), "num_experts_per_token: 16"),
    ],
)
def test_what_cannot_be_compared_is_one_line(snapshot, script, capsys, change, message):
    change(snapshot)
    assert script.main(["--check", str(snapshot)]) == 2
    streams = capsys.readouterr()
    assert message in streams.err and streams.err.startswith("error: ") and streams.err.count("\n") == 1
    assert not streams.out


@pytest.mark.parametrize("argv", [[], ["a"], ["--check", "a", "b"], ["--chek", "a"]])
def test_wrong_command_lines(script, capsys, argv):
    assert script.main(argv) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("error: ") and streams.err.count("\n") == 1 and not streams.out


def test_help_teaches(script, capsys):
    with pytest.raises(SystemExit) as done:
        script.main(["--help"])
    assert done.value.code == 0 and "AutoModelForImageTextToText" in capsys.readouterr().out


def test_summaries_stand_for_exactly_their_names():
    names = [f"a.{i}.b.{j}.w{k}" for i in (0, 1, 2, 7) for j in range(3) for k in (1, 2)]
    faults = [Fault("is missing", name, "f") for name in names]
    faults += [Fault("is missing", "a.8.b.1.w1", "g"), Fault("is unexpected", "a.0.b.0.w1", "f"), Fault("h is missing")]
    assert summarize(faults) == [
        "h is missing",
        "f: a.0-2,7.b.0-2.w1|w2 is missing (24 tensors)",
        "g: a.8.b.1.w1 is missing",
        "f: a.0.b.0.w1 is unexpected",
    ]
    assert summarize([]) == []
    two = [Fault("is missing", "x.1.y", "f"), Fault("is missing", "x.2.y", "g")]
    assert summarize(two) == ["x.1-2.y is missing (2 tensors in 2 files)"]


# --- the real size ---


@pytest.mark.slow
def test_released_size_in_seconds_and_a_gigabyte(tmp_path):
    """All 497,220 tensors of Kimi-K3 in 1 GiB of memory and what two cores do in 15 s, start of Python included."""
    subprocess.run(
        [sys.executable, "scripts/rehearse.py", "tests/fixtures/k3/config.json", str(tmp_path / "k3")],
        cwd=ROOT,
        check=True,
    )
    command = [sys.executable, "scripts/overlay.py", "--check", str(tmp_path / "k3")]
    pid = os.posix_spawn(sys.executable, command, os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert usage.ru_maxrss * 1024 <= 1 << 30
    assert usage.ru_utime + usage.ru_stime <= 2 * 15
