"""Indexers learn from attention alone, in two stages, and what they learned is kept beside the adapter.

Legend: B batch, T tokens.
"""

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_latentmoe.training import checkpoint, lora
from modeling_latentmoe.training.attention_mass import Mass, attention_of
from modeling_latentmoe.training.export import export
from modeling_latentmoe.training.indexer import INDEXER_FILE, indexer_parameters, train_indexers
from modeling_latentmoe.training.loading import checkpoint_activations, load_model
from modeling_latentmoe.training.merge import merge
from modeling_latentmoe.training.router_bias import BIAS_FILE
from scripts import add_indexer, generate, make_tiny
from scripts import lora as script

from .adapters import change_json, make_adapter
from .models import mixed_config, random_model
from .test_lora_script import argv, metrics, same_state, without_times

OPTIONS = {"r": 4, "lora_alpha": 8, "expert_rank": 2}
STAGES = pytest.mark.parametrize("stage", ["warmup", "sparse"])


def model_of(kinds: str = "kdks", stage: str | None = None, **text):
    model = random_model(mixed_config(kinds, **text)).train()
    if stage:
        train_indexers(model, alone=stage == "warmup")
    return model


def batch(rows: int = 2, length: int = 30) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def grads(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


# The loss.


@STAGES
def test_weights_learn_from_their_own_loss(stage: str) -> None:
    """Indexers from the divergence, all else from the tokens; each gradient is the same with and without the other."""
    model = model_of()
    config = model.config.text_config
    config.indexer_loss, config.dense_attention = True, stage == "warmup"
    out = model(**batch())
    out.loss.backward(retain_graph=True)
    from_tokens = grads(model)
    model.zero_grad()
    out.indexer_loss.backward()
    from_attention = grads(model)
    assert out.indexer_loss > 0
    assert set(from_attention) == set(indexer_parameters(model))
    assert not set(from_tokens) & set(from_attention) and len(from_tokens) > 30


def test_warm_up_is_the_loss_that_made_the_shipped_model() -> None:
    """There a mean over tokens against the mean attention of the sharing layers: the same gradient."""
    model = model_of("kdksds").double()
    model.config.text_config.indexer_loss = model.config.text_config.dense_attention = True
    theirs, x = make_tiny.IndexerLoss(model), batch()
    out = model(**x)
    (out.indexer_loss / x["input_ids"].numel()).backward()
    ours = grads(model)
    model.zero_grad()
    theirs.take().backward()
    want = grads(model)
    assert ours.keys() == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-6, atol=1e-10)


@STAGES
def test_nothing_but_documents_counts(stage: str) -> None:
    """Padded rows and a packed row have the summed loss and the gradients of the documents alone."""
    model, lengths = model_of(stage=stage).double(), (17, 4, 9)
    documents = [batch(1, length)["input_ids"] for length in lengths]
    total = sum(model(input_ids=ids).indexer_loss for ids in documents)
    total.backward()
    want = grads(model)
    padded = torch.nn.utils.rnn.pad_sequence([ids[0].flip(0) for ids in documents], batch_first=True).flip(1)
    mask = torch.stack([torch.arange(17) >= 17 - length for length in lengths]).long()
    packed = torch.cat(documents, dim=1), torch.tensor([0, 17, 21, 30])
    for inputs in (
        {"input_ids": padded, "attention_mask": mask},
        {"input_ids": packed[0], "cu_seqlens": packed[1]},
    ):
        model.zero_grad()
        loss = model(**inputs).indexer_loss
        loss.backward()
        torch.testing.assert_close(loss, total, rtol=1e-9, atol=1e-12)
        for name, grad in grads(model).items():
            if ".indexer." in name:
                torch.testing.assert_close(grad, want[name], rtol=1e-7, atol=1e-10)


@STAGES
@pytest.mark.parametrize("selective", [False, True])
def test_recomputation_changes_nothing(stage: str, selective: bool) -> None:
    found = []
    for recomputes in (False, True):
        model = model_of(stage=stage, index_kpool=3)
        if recomputes:
            checkpoint_activations(model, selective)
        out = model(**batch())
        (out.loss + out.indexer_loss).backward()
        found.append((out.indexer_loss, grads(model)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(grad, found[1][1][name]) for name, grad in found[0][1].items())


@STAGES
def test_bf16_models_have_fp32_indexers_that_learn(stage: str) -> None:
    model = random_model(mixed_config("kdks")).bfloat16().train()
    train_indexers(model, alone=stage == "warmup")
    found = indexer_parameters(model)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in found.values())
    optimizer, losses = torch.optim.AdamW(found.values(), lr=1e-2), []
    for _ in range(15):
        loss = model(**batch()).indexer_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert model.eval()(**batch()).logits.isfinite().all()


def test_evaluation_has_no_loss_and_short_documents_one_over_all_keys() -> None:
    model = model_of(stage="sparse")
    short = model(**batch(length=6)).indexer_loss
    model.config.text_config.dense_attention = True
    assert torch.equal(model(**batch(length=6)).indexer_loss, short)
    assert model.eval()(**batch()).indexer_loss is None


def test_absorbed_weights_include_adapters() -> None:
    """Adapters on what keys and values are made with: the sparse function and its gradients, against a merged model."""
    model = model_of("d").double()
    peft = lora.add_adapter(model, **OPTIONS, target_modules=["kv_b_proj"])
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    merged = model_of("d").double()
    layer = next(module for name, module in peft.named_modules() if name.endswith("kv_b_proj"))
    target = merged.language_model.model.layers[0].self_attn.kv_b_proj.weight
    target.data += layer.get_delta_weight("default")
    got, want = peft(**batch()), merged(**batch())
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-9, atol=1e-10)
    assert (got.logits - model_of("d").double()(**batch()).logits).abs().max() > 1e-3
    got.loss.backward()
    want.loss.backward()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    scale = layer.scaling["default"]
    torch.testing.assert_close(a.grad, scale * b.detach().T @ target.grad, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(b.grad, scale * target.grad @ a.detach().T, rtol=1e-8, atol=1e-12)


def test_an_ordinary_adapter_leaves_indexers_alone() -> None:
    """Public report 82: trained indexers that a server does not read would choose other keys there."""
    model = model_of()
    before = {name: parameter.clone() for name, parameter in indexer_parameters(model).items()}
    peft = lora.add_adapter(model, **OPTIONS)
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=0.1)
    peft(**batch()).loss.backward()
    optimizer.step()
    after = indexer_parameters(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(p, before[name]) and not p.requires_grad for name, p in after.items())


def test_mass_of_chosen_keys() -> None:
    """Against the probabilities of every head, key by key; what is chosen is what the sparse model attends to."""
    model, x, k = model_of("dks").double().eval(), batch(2, 20)["input_ids"], 6
    seen = defaultdict(list)
    for layer in (model.language_model.model.layers[i].self_attn for i in (0, 2)):
        layer.register_forward_hook(lambda module, args, output, layer=layer: seen[layer].append((args, output)))
    with torch.no_grad():
        with attention_of(model, dense=True), Mass(model) as mass:
            model(input_ids=x)
        owner = model.language_model.model.layers[0].self_attn
        # The first layer reads the same in both modes.
        model(input_ids=x)
    index_Mk = seen[owner][1][1][1].index_Mk
    want, count = torch.zeros(4, dtype=torch.float64), 0
    for layer, calls in seen.items():
        (x_BTD, documents, *_), _ = calls[0]
        share = make_tiny.IndexerLoss.attention(layer, x_BTD, documents)
        for b in range(2):
            for t in range(k, 20):
                p, chosen = share[b, t, : t + 1], index_Mk[b * 20 + t] - b * 20
                best = p.sort(descending=True).values[:k].sum()
                want += torch.stack([p[chosen].sum(), best, p[-k:].sum(), torch.tensor(k / (t + 1)).double()])
                count += 1
    assert mass.sums[-1] == count == 2 * 2 * 14
    torch.testing.assert_close(mass.sums[:-1], want)


# Runs of scripts/lora.py.


def more(*switches: str) -> list[str]:
    return ["--max_steps", "4", "--save_every", "2", "--gradient_accumulation", "2", *switches]


@pytest.fixture(scope="module")
def warm(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("warm") / "run"
    assert script.main(argv(small, output, *more("--train_indexer", "warmup", "--lr", "1e-2"))) == 0
    return output


@pytest.fixture(scope="module")
def sparse(small: Path, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("sparse") / "run"
    switches = ["--train_indexer", "sparse", "--adapter", str(warm), "--lr_indexer", "2e-3"]
    assert script.main(argv(small, output, *more(*switches))) == 0
    return output


def base_indexers(small: Path) -> dict[str, torch.Tensor]:
    return dict(indexer_parameters(load_model(str(small), "fp32")))


def test_a_warm_up_changes_indexers_alone(warm: Path, small: Path) -> None:
    learned, before = load_file(warm / INDEXER_FILE), base_indexers(small)
    assert learned.keys() == before.keys() and len(learned) == 5
    assert not any(torch.equal(value, before[name]) for name, value in learned.items())
    factors = load_file(warm / "adapter_model.safetensors")
    assert not any(value.any() for name, value in factors.items() if "lora_B" in name)
    records = metrics(warm)
    steps = [record for record in records if "loss" in record]
    assert steps[-1]["indexer_loss"] < steps[0]["indexer_loss"]
    assert set(steps[0]["grad_norms"]) == {f"indexer.{name.split('.indexer.')[1]}" for name in learned}
    first, last = (record for record in records if "eval_loss" in record)
    assert first["eval_loss_dense"] == last["eval_loss_dense"]
    shares = [first[f"eval_mass_{name}"] for name in Mass.NAMES]
    assert all(0 < share < 1 for share in shares) and shares[1] == max(shares)


def test_a_sparse_stage_trains_both(sparse: Path, warm: Path) -> None:
    learned, before = load_file(sparse / INDEXER_FILE), load_file(warm / INDEXER_FILE)
    assert not any(torch.equal(value, before[name]) for name, value in learned.items())
    factors = load_file(sparse / "adapter_model.safetensors")
    assert all(value.any() for name, value in factors.items() if "lora_B" in name and "self_attn" in name)
    rates = [record["indexer_loss"] for record in metrics(sparse) if "loss" in record]
    assert len(rates) == 4 and all(rate > 0 for rate in rates)


@pytest.mark.slow
@STAGES
def test_resume_is_exact(stage: str, warm: Path, sparse: Path, small: Path, tmp_path: Path) -> None:
    straight, output = {"warmup": warm, "sparse": sparse}[stage], tmp_path / "run"
    output.mkdir()
    shutil.copytree(straight / "checkpoint-000002", output / "checkpoint-000002")
    for file in ("run.yaml", "metrics.jsonl"):
        shutil.copy(straight / file, output)
    switches = {
        "warmup": ["--lr", "1e-2"],
        "sparse": ["--adapter", str(warm), "--lr_indexer", "2e-3"],
    }[stage]
    assert script.main(argv(small, output, *more("--train_indexer", stage, *switches), "--resume")) == 0
    same_state(straight / "checkpoint-000004", output / "checkpoint-000004")
    assert without_times(metrics(output)) == without_times(metrics(straight))
    ours, theirs = load_file(output / INDEXER_FILE), load_file(straight / INDEXER_FILE)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.slow
def test_a_later_run_keeps_the_indexers(sparse: Path, small: Path, tmp_path: Path) -> None:
    """One that trains none, and its continuation, for which the first adapter is no longer there."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(sparse, first)
    settings = argv(small, second, *more("--adapter", str(first)))
    assert script.main(settings) == 0
    shutil.rmtree(first)
    shutil.rmtree(second / "checkpoint-000004")
    (second / INDEXER_FILE).unlink()
    assert script.main([*settings, "--resume"]) == 0
    want = load_file(sparse / INDEXER_FILE)
    for folder in (second, second / "checkpoint-000004"):
        kept = load_file(folder / INDEXER_FILE)
        assert kept.keys() == want.keys() and all(torch.equal(kept[name], want[name]) for name in kept)


def test_readers_use_what_was_learned(sparse: Path, small: Path, tmp_path: Path) -> None:
    """An adapter that is loaded, in fp32 and in bf16, and one that is merged, have its indexers."""
    want, ids = load_file(sparse / INDEXER_FILE), torch.arange(5, 45)[None]
    for dtype in ("fp32", "bf16"):
        model = lora.load_adapter(load_model(str(small), dtype), str(sparse))
        for name, parameter in indexer_parameters(model.get_base_model()).items():
            assert parameter.dtype == torch.float32 and torch.equal(parameter, want[name])
            assert not parameter.requires_grad
    report = merge(small, sparse, tmp_path / "merged", experts="bf16")
    assert report.indexers.keys() == want.keys() and "indexers are those of the adapter" in " ".join(report.lines())
    merged = load_model(str(tmp_path / "merged"), "fp32")
    assert all(torch.equal(parameter, want[name]) for name, parameter in indexer_parameters(merged).items())
    adapted = lora.load_adapter(load_model(str(small), "fp32"), str(sparse)).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            merged.eval()(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=0.05, atol=0.05
        )
    with pytest.raises(ValueError, match=r"the adapter changes the indexers, .* use scripts/merge_adapter.py"):
        export(sparse, tmp_path / "exported")


def test_a_warm_up_can_be_merged(warm: Path, small: Path, tmp_path: Path) -> None:
    """Its factors are zero: all weights but those of the indexers stay what they are, to the bit."""
    lines = merge(small, warm, tmp_path / "merged").lines()
    assert any(line.endswith("have factors whose product is zero") for line in lines)
    want, learned = dict(load_model(str(small), "fp32").named_parameters()), load_file(warm / INDEXER_FILE)
    for name, parameter in load_model(str(tmp_path / "merged"), "fp32").named_parameters():
        assert torch.equal(parameter, learned.get(name, want[name])), name


@pytest.mark.parametrize(
    ("value", "message"), [(float("nan"), "hold NaN or infinite numbers"), (0.0, "are zero, it is untrained")]
)
def test_factors_beside_indexers_are_checked(
    value: float, message: str, sparse: Path, small: Path, tmp_path: Path
) -> None:
    shutil.copytree(sparse, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    factors = load_file(file)
    factors[next(name for name in factors if "q_b_proj.lora_B" in name)].fill_(value)
    save_file(factors, file)
    with pytest.raises(ValueError, match=message):
        merge(small, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


FAULTS = {
    "no indexer": (lambda v, n: v.update({"a.b": v[n].clone()}), r"the model has no indexer with a\.b"),
    "missing": (lambda v, n: v.pop(n), r"\S+indexer\S+ is missing"),
    "shape": (lambda v, n: v.update({n: v[n][:-1].clone()}), "the model needs float32"),
    "not finite": (lambda v, n: v[n].fill_(float("nan")), "holds NaN or infinite numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_do_not_fit_are_refused(fault: str, warm: Path, small: Path, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    shutil.copytree(warm, tmp_path / "adapter")
    values = load_file(tmp_path / "adapter" / INDEXER_FILE)
    change(values, next(iter(values)))
    save_file(values, tmp_path / "adapter" / INDEXER_FILE)
    with pytest.raises(ValueError, match=f"{re.escape(INDEXER_FILE)}: .*{message}"):
        lora.load_adapter(load_model(str(small), "fp32"), str(tmp_path / "adapter"))


def test_a_folder_without_its_indexers_is_refused(sparse: Path, small: Path, tmp_path: Path, capsys) -> None:
    """By every reader: the base's indexers would choose other keys for the same factors."""
    folder, out = tmp_path / "adapter", tmp_path / "out"
    shutil.copytree(sparse, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    assert json.loads((folder / lora.BASE_FILE).read_text())["files"] == [INDEXER_FILE]
    (folder / INDEXER_FILE).rename(folder / "renamed.safetensors")
    message = f"adapter {folder}: {INDEXER_FILE} is missing, which its base_model.json lists; copy the whole folder"
    for read in (
        lambda: lora.load_adapter(load_model(str(small), "fp32"), str(folder)),
        lambda: merge(small, folder, out),
        lambda: export(folder, out),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read()
    assert script.main(argv(small, out, "--adapter", str(folder))) == 2
    assert message in capsys.readouterr().err
    assert generate.main(["--model", str(small), "--question", "?", "--adapter", str(folder)]) == 2
    assert message in capsys.readouterr().err and not out.exists()
    # One of an earlier version lists no files: it has no indexers, as far as it says.
    fields = json.loads((folder / lora.BASE_FILE).read_text())
    del fields["files"]
    (folder / lora.BASE_FILE).write_text(json.dumps(fields))
    lora.load_adapter(load_model(str(small), "fp32"), str(folder))
    change_json(folder / lora.BASE_FILE, files=INDEXER_FILE)
    with pytest.raises(ValueError, match=r"base_model\.json: files must be a list of names"):
        lora.load_adapter(load_model(str(small), "fp32"), str(folder))


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_is_no_file_is_not_taken_for_none(kind: str, warm: Path, small: Path, tmp_path: Path) -> None:
    """In an adapter of an earlier version, too, which lists no files."""
    folder = tmp_path / "adapter"
    shutil.copytree(warm, folder)
    change_json(folder / lora.BASE_FILE, files=[])
    (folder / INDEXER_FILE).unlink()
    if kind == "link":
        (folder / INDEXER_FILE).symlink_to(tmp_path / "nowhere")
    else:
        (folder / INDEXER_FILE).mkdir()
    message = rf"{re.escape(INDEXER_FILE)} is not a regular file"
    with pytest.raises(ValueError, match=message):
        lora.load_adapter(load_model(str(small), "fp32"), str(folder))
    with pytest.raises(ValueError, match=message):
        merge(small, folder, tmp_path / "out")
    with pytest.raises(ValueError, match="the adapter changes the indexers"):
        export(folder, tmp_path / "out")


def test_a_checkpoint_without_its_indexers_is_not_resumed(
    sparse: Path, warm: Path, small: Path, tmp_path: Path, capsys
) -> None:
    output, name = tmp_path / "run", "checkpoint-000002"
    output.mkdir()
    shutil.copytree(sparse / name, output / name)
    shutil.copy(sparse / "run.yaml", output)
    (output / name / INDEXER_FILE).unlink()
    switches = ["--train_indexer", "sparse", "--adapter", str(warm), "--lr_indexer", "2e-3", "--resume"]
    assert script.main(argv(small, output, *more(*switches))) == 2
    said = capsys.readouterr().err
    assert f"--resume: adapter {output / name}: {INDEXER_FILE} is missing" in said
    assert f"or delete {output / name} to continue from an earlier checkpoint" in said


def test_files_of_an_earlier_adapter_do_not_stay(small: Path, tmp_path: Path) -> None:
    base = load_model(str(small), "fp32")
    indexers = {name: value.detach() for name, value in indexer_parameters(base).items()}
    identity = lora.base_identity(base, str(small))
    model = lora.add_adapter(base, **OPTIONS)
    (tmp_path / BIAS_FILE).write_text("of another run")
    checkpoint.save_adapter(model, tmp_path, identity, beside={INDEXER_FILE: indexers, BIAS_FILE: {}})
    assert {file.name for file in tmp_path.iterdir()} == {*checkpoint.ADAPTER_FILES, INDEXER_FILE}
    checkpoint.save_adapter(model, tmp_path, identity)
    assert {file.name for file in tmp_path.iterdir()} == set(checkpoint.ADAPTER_FILES)
    assert json.loads((tmp_path / lora.BASE_FILE).read_text()) == {**identity, "files": []}
    lora.load_adapter(load_model(str(small), "fp32"), str(tmp_path))


def test_merged_indexers_make_another_base(warm: Path, small: Path, tmp_path: Path) -> None:
    """Of a merged warm-up all other weights are those of the base."""
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    merge(small, warm, merged)
    make_adapter(merged, adapter)
    with pytest.raises(ValueError, match="was made for another base model"):
        lora.load_adapter(load_model(str(small), "fp32"), str(adapter))
    with pytest.raises(ValueError, match="was made for another base model"):
        merge(small, adapter, tmp_path / "out")
    lora.load_adapter(load_model(str(merged), "bf16"), str(adapter))
    merge(merged, adapter, tmp_path / "out", experts="bf16")


def test_a_digest_without_indexers_has_no_other_weights_than_before() -> None:
    names = [name for name, _ in model_of("km").named_parameters() if lora.FINGERPRINT.search(name)]
    layers = "language_model.model.layers"
    assert names == [*(f"{layers}.{i}.self_attn.o_proj.weight" for i in (0, 1)), "language_model.model.norm.weight"]


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (["--train_indexer", "warmup", "--adapter", "somewhere"], "leave out --adapter"),
        (["--train_indexer", "warmup", "--balance", "quantile"], "leave out --balance quantile"),
        (["--train_indexer", "sparse", "--target_modules", "indexer.wk"], "leave them out of --target_modules"),
        (["--lr_indexer", "1e-3"], "--lr_indexer 0.001 needs --train_indexer"),
        (["--train_indexer", "twice"], "train_indexer"),
    ],
)
def test_contradictions_end_a_run(switches: list[str], message: str, small: Path, tmp_path: Path, capsys) -> None:
    assert script.main(argv(small, tmp_path / "run", *switches)) == 2
    assert message in capsys.readouterr().err


def test_a_dense_model_has_nothing_to_train() -> None:
    with pytest.raises(ValueError, match=r"the model has no indexer, scripts/add_indexer\.py gives it one"):
        train_indexers(model_of("km"), alone=True)


# A dense checkpoint becomes a sparse one.


@pytest.mark.parametrize("shards", [1, 3])
def test_added_indexers(shards: int, tmp_path: Path, capsys) -> None:
    dense = random_model(mixed_config("kmkmm"))
    size = sum(p.numel() * 4 for p in dense.parameters())
    dense.save_pretrained(tmp_path / "dense", max_shard_size=size + 1 if shards == 1 else size // 2)
    command = [str(tmp_path / "dense"), str(tmp_path / "sparse"), "--index_topk", "6", "--index_n_heads", "3"]
    command += ["--index_head_dim", "8", "--every", "2", "--index_kpool", "2"]
    assert add_indexer.main(command) == 0
    assert "untrained indexers in layers 1, 4, top 6" in capsys.readouterr().out
    sparse = load_model(str(tmp_path / "sparse"), "fp32").eval()
    text = sparse.config.text_config
    assert text.indexer_types == ["none", "full", "none", "shared", "full"] and text.index_kpool == 2
    weights = sparse.state_dict()
    assert all(torch.equal(weights.pop(name), value) for name, value in dense.state_dict().items())
    assert len(weights) == 2 * 7 and all(".indexer." in name for name in weights)
    assert all(value.any() for name, value in weights.items() if name.endswith(("wq_b.weight", "weights_proj.weight")))
    with torch.no_grad():
        ids = batch(1, 6)["input_ids"]
        assert torch.equal(sparse(input_ids=ids).logits, dense(input_ids=ids).logits)
        ids = batch(1, 20)["input_ids"]
        assert not torch.equal(sparse(input_ids=ids).logits, dense(input_ids=ids).logits)
    links = [file for file in (tmp_path / "sparse").glob("*.safetensors") if file.is_symlink()]
    assert len(links) == len(list((tmp_path / "dense").glob("*.safetensors")))
    # The same again, and not a second time on top.
    assert add_indexer.main([*command[:1], str(tmp_path / "again"), *command[2:]]) == 0
    again = load_model(str(tmp_path / "again"), "fp32").state_dict()
    assert all(torch.equal(again[name], value) for name, value in sparse.state_dict().items())
    assert add_indexer.main([str(tmp_path / "sparse"), str(tmp_path / "twice")]) == 2
    assert "has indexers already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (["--index_topk", "7", "--index_kpool", "2"], "index_kpool: 2, must divide index_topk=7"),
        (["--index_n_heads", "0"], "index_n_heads: 0, must be a positive integer"),
        (["--every", "0"], "--every 0 must be at least 1"),
        (["--seed", "-1"], "--seed -1 must be at least 0 and below 2**32"),
        (["--seed", str(2**64)], f"--seed {2**64} must be at least 0 and below 2**32"),
    ],
)
def test_indexers_that_cannot_be_added(switches: list[str], message: str, tmp_path: Path, capsys) -> None:
    random_model(mixed_config("km")).save_pretrained(tmp_path / "dense")
    assert add_indexer.main([str(tmp_path / "dense"), str(tmp_path / "out"), *switches]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("base", "out", "message"),
    [
        ("dense", "dense/inner", "{out} lies inside {base}: write elsewhere"),
        ("dense", "dense", "{out} exists: choose another name"),
        ("dense", "dense/config.json/sparse", "{out} lies inside {base}"),
        ("dense", "file/inner/sparse", "{out} cannot be made: {file} is a file"),
        ("file", "sparse", "{base} is not a folder"),
        ("nowhere", "sparse", "{base} is not a folder"),
    ],
)
def test_folders_that_get_no_indexers(base: str, out: str, message: str, tmp_path: Path, capsys) -> None:
    random_model(mixed_config("km")).save_pretrained(tmp_path / "dense")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    names = {"base": tmp_path / base, "out": tmp_path / out, "file": tmp_path / "file"}
    assert add_indexer.main([str(names["base"]), str(names["out"])]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message.format(**names) in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_cut_checkpoint_gets_no_indexers(tmp_path: Path, capsys) -> None:
    random_model(mixed_config("km")).save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert add_indexer.main([str(tmp_path / "dense"), str(tmp_path / "out")]) == 2
    assert "is not a whole checkpoint" in capsys.readouterr().err


def test_earlier_adapters_still_belong_to_their_base(small: Path) -> None:
    """Fields that were added to the config since change no digest."""
    model = load_model(str(small), "fp32")
    digest = lora.base_identity(model, "")["digest"]
    config = json.loads((small / "config.json").read_text())["text_config"]
    assert lora.ADDED.items() <= config.items()
    for field in lora.ADDED:
        delattr(model.config.text_config, field)
    assert lora.base_identity(model, "")["digest"] == digest
