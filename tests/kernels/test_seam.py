"""ops.py and kernel_loading.py: which operations reach a kernel, with which arguments, and where it comes from.

Kernels are played by the torch definitions behind the kernels' signatures, so everything runs on CPU.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from small_model import batches, results, small_model
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_latentmoe import kernel_loading, ops
from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.modeling_latentmoe import LatentMoEForCausalLM, LatentMoEForConditionalGeneration

CPU = torch.device("cpu")


def documents_of(M: int, cu_seqlens: torch.Tensor | None) -> Documents:
    return Documents.of_batch((1, M), CPU, cu_seqlens=cu_seqlens)


class Played:
    """The repositories with their documented signatures; `calls` are the names called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.kda = SimpleNamespace(chunk_kda=self.chunk_kda, step_kda=self.step_kda, short_conv=self.short_conv)
        self.residual = SimpleNamespace(attn_residual=self.attn_residual, gated_rms_norm=self.gated_rms_norm)
        self.linear_cross_entropy = SimpleNamespace(linear_cross_entropy=self.cross_entropy)
        self.latent_moe = SimpleNamespace(
            sort_slots=self.sort_slots, expert_mlp=self.expert_mlp, situ_glu=self.situ_glu, swiglu=self.swiglu
        )
        self.low_rank = SimpleNamespace(add_low_rank=self.add_low_rank)
        self.sparse_attention = SimpleNamespace(
            index_topk=self.index_topk,
            sparse_attention=self.attend,
            head_probabilities=self.head_probabilities,
            indexer_loss=self.indexer_loss,
        )

    def chunk_kda(
        self,
        q,
        k,
        v,
        f,
        beta,
        A_log,
        dt_bias,
        *,
        lower_bound,
        cu_seqlens=None,
        initial_state=None,
        output_final_state=False,
    ):
        self.calls.append("chunk_kda with state" if output_final_state else "chunk_kda")
        assert [x.ndim for x in (q, k, v, f, beta, A_log, dt_bias)] == [4, 4, 4, 4, 3, 1, 2]
        assert len(q) == 1 and A_log.shape == q.shape[2:3] and dt_bias.shape == f.shape[2:]
        if initial_state is not None:
            assert initial_state.dtype == torch.float32 and initial_state.ndim == 4
        documents = documents_of(q.shape[1], cu_seqlens)
        inputs = (x[0] for x in (q, k, v, f, beta))
        o, state = ops.kda_chunk(*inputs, A_log, dt_bias, lower_bound, documents, initial_state, output_final_state)
        return o[None], state

    def step_kda(self, q, k, v, f, beta, A_log, dt_bias, state, lower_bound):
        self.calls.append("step_kda")
        assert state.dtype == torch.float32
        return ops.kda_step(q, k, v, f, beta, A_log, dt_bias, lower_bound, state)

    def short_conv(self, xs, weights, cu_seqlens=None, tails=None):
        self.calls.append("short_conv")
        assert isinstance(xs, tuple) and isinstance(weights, tuple) and len(xs) == len(weights) == 3
        assert tails is None or isinstance(tails, tuple)
        if cu_seqlens is not None:
            assert cu_seqlens.dtype == torch.int32 and (tails is None or len(tails[0]) == len(cu_seqlens) - 1)
        return ops.short_conv(xs, weights, documents_of(len(xs[0]), cu_seqlens), tails)

    def attn_residual(self, sources, score, eps):
        self.calls.append("attn_residual")
        return ops.attn_residual(sources, score, eps)

    def gated_rms_norm(self, x, gate, weight, eps):
        self.calls.append("gated_rms_norm")
        return ops.gated_rms_norm(x, gate, weight, eps)

    def cross_entropy(self, hidden, weight, target, ignore_index=-100):
        self.calls.append("linear_cross_entropy")
        assert hidden.ndim == 2 and target.shape == hidden.shape[:1]
        return ops.linear_cross_entropy(hidden, weight, target, ignore_index)

    def situ_glu(self, gate, up, beta=None, linear_beta=None):
        self.calls.append("situ_glu")
        return ops.situ_glu(gate, up, beta, linear_beta)

    def swiglu(self, gate, up):
        self.calls.append("swiglu")
        return torch.nn.functional.silu(gate) * up

    def add_low_rank(self, y, x, a, b, scaling):
        self.calls.append("add_low_rank")
        assert a.shape == (b.shape[1], x.shape[-1]) and b.shape[0] == y.shape[-1]
        return ops.add_low_rank(y, x, a, b, scaling)

    def index_topk(self, q, k, weight, first, end, count):
        self.calls.append("index_topk")
        assert (q.ndim, k.ndim, weight.ndim) == (3, 2, 2) and weight.dtype == torch.float32
        assert first.dtype == end.dtype == torch.int32 and len(first) == len(end) == len(q)
        return ops.index_topk(q, k, weight, first, end, count)

    def attend(self, q, kv, index, scale, value_width=512, sink_N=None):
        self.calls.append("sparse_attention with sinks" if sink_N is not None else "sparse_attention")
        assert index.dtype == torch.int32 and q.shape[-1] == kv.shape[-1]
        return ops.sparse_attention(q, kv, index, scale, value_width, sink_N)

    def head_probabilities(self, q, kv, index, lse, scale):
        self.calls.append("head_probabilities")
        assert lse.dtype == torch.float32 and not (q.requires_grad or kv.requires_grad)
        return ops.head_probabilities(q, kv, index, lse, scale, 0)

    def indexer_loss(self, q, k, weight, index, target):
        self.calls.append("indexer_loss")
        assert index.shape == target.shape and target.dtype == torch.float32
        return ops.indexer_loss(q, k, weight, index, target)

    def sort_slots(self, ids, experts, capacity_factor=None):
        self.calls.append("sort_slots")
        assert ids.dtype == torch.int64 and ids.ndim == 2
        held = (ids >= 0) & (ids < experts)
        return SimpleNamespace(ids=ids, offset=torch.tensor([0, int(held.sum())]))

    def expert_mlp(
        self, x, rows, weights, gate_up, down, *, activation="situ", beta=None, linear_beta=None, max_rows=None
    ):
        self.calls.append("expert_mlp" if max_rows is None else f"expert_mlp of {max_rows} rows")
        config = SimpleNamespace(
            kernels="torch",
            hidden_act=activation,
            activation_situ_beta=beta,
            activation_situ_linear_beta=linear_beta,
        )
        return ops.expert_mlp(x, rows.ids, weights, gate_up, down, config)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Kernels on CPU, for "auto" and "hub"."""
    repositories = Played()
    monkeypatch.setattr(kernel_loading, "DEVICES", ("cpu",))
    for name in kernel_loading.REPOSITORIES:
        for choice in ("auto", "hub"):
            monkeypatch.setitem(kernel_loading._LOADED, (name, choice), getattr(repositories, name))
    return repositories


@pytest.mark.parametrize("choice", ["auto", "hub"])
@pytest.mark.parametrize("layout", batches())
def test_a_training_step_runs_on_kernels(layout: str, choice: str, played: Played) -> None:
    model = small_model()
    want = results(model, batches()[layout], "torch")
    assert not played.calls
    got = results(model, batches()[layout], choice)
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    expected = {"chunk_kda", "short_conv", "attn_residual", "gated_rms_norm", "linear_cross_entropy", "situ_glu"}
    assert expected <= set(played.calls)
    assert "step_kda" not in played.calls


@pytest.mark.parametrize("left_padded", [False, True])
def test_generation_runs_on_kernels(left_padded: bool, played: Played) -> None:
    model, ids = small_model().eval(), batches()["padded"]["input_ids"][:, :12]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0 if left_padded else 1
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    model.config.kernels = "torch"
    want = model.generate(ids, **options)
    model.config.kernels = "hub"
    assert torch.equal(model.generate(ids, **options), want)
    # a decoded token of rows without padding is one step of the recurrence
    assert {"chunk_kda with state", "short_conv", "step_kda"} <= set(played.calls)


def test_a_cached_token_has_gradients_on_kernels(played: Played) -> None:
    """The kernel of a single step has none."""
    model, ids = small_model().eval(), batches()["one row"]["input_ids"]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    played.calls.clear()
    token = {"input_ids": ids[:, :1], "past_key_values": cache, "use_cache": True}
    model(**token).logits.sum().backward()
    assert all(param.grad is not None for name, param in model.named_parameters() if "A_log" in name)
    assert "step_kda" not in played.calls and "gated_rms_norm" in played.calls
    model.config.kernels = model.config.get_text_config().kernels = "hub"
    with pytest.raises(ValueError, match='kernels="hub": kda: a single token after a cache has no gradients'):
        model(**token)


def test_a_forward_without_cache_keeps_no_states(played: Played) -> None:
    model = small_model().eval()
    ids = batches()["one row"]["input_ids"]
    model(input_ids=ids, use_cache=False)
    assert "chunk_kda with state" not in played.calls


def test_recomputation_takes_the_same_path(played: Played) -> None:
    """The choice is the model's, not the caller's: a layer that backward runs again finds it."""
    model = small_model().train()
    want = results(model, batches()["one row"], "torch")
    model.gradient_checkpointing_enable()
    assert not played.calls
    got = results(model, batches()["one row"], "hub")
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert played.calls.count("chunk_kda") == 2 * 2 + 2


REFUSED = {
    "dtype": ({}, torch.float64, "there are no kernels for torch.float64"),
    "width": ({"head_dim": 32}, torch.float32, "heads are 32 and 32 wide"),
    "convolution": ({"conv_width": 9}, torch.float32, "the convolution is 9 wide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_kernels_cannot_do_is_torch_or_an_error(case: str, played: Played) -> None:
    options, dtype, reason = REFUSED[case]
    model, batch = small_model(**options).to(dtype), batches()["one row"]
    want = results(model, batch, "torch")
    got = results(model, batch, "auto")
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert ("short_conv" if case == "convolution" else "chunk_kda") not in played.calls
    with pytest.raises(ValueError, match=f'kernels="hub": .*{reason}'):
        results(model, batch, "hub")


def test_tensors_of_different_dtypes_are_torch(played: Played) -> None:
    """Autocast: what a layer returns in bf16 joins a stream in fp32. Whatever is alike still runs on kernels."""
    model, batch = small_model(), batches()["one row"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = (results(model, batch, choice) for choice in ("torch", "auto"))
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert "short_conv" in played.calls and "attn_residual" not in played.calls
        with pytest.raises(ValueError, match="the tensors differ in dtype"):
            results(model, batch, "hub")


def test_rows_that_no_kernel_holds_are_torch(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "MIXTURE_KERNEL_WIDTH", 95)
    results(small_model(), batches()["one row"], "auto")
    assert "attn_residual" not in played.calls and "gated_rms_norm" in played.calls
    played.calls.clear()
    x = torch.ones(1, 8193)
    assert torch.equal(ops.gated_rms_norm(x, x, x[0], 0.0, "auto"), ops.gated_rms_norm(x, x, x[0], 0.0))
    assert not played.calls
    with pytest.raises(ValueError, match="residual: rows are 8193 wide, over 8192"):
        ops.gated_rms_norm(x, x, x[0], 0.0, "hub")


def test_the_gpus_of_amd_are_torch(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch calls them cuda, and the capability of some begins with 9 like that of Hopper."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    results(small_model(), batches()["one row"], "auto")
    assert not played.calls
    with pytest.raises(ValueError, match=r'kernels="hub": .* written for the GPUs of NVIDIA'):
        results(small_model(), batches()["one row"], "hub")


def test_a_trained_head_has_no_kernel(played: Played) -> None:
    model, batch = small_model(), batches()["one row"]
    model.lm_head.requires_grad_(True)
    results(model, batch, "auto")
    assert model.lm_head.weight.grad.any()
    assert "linear_cross_entropy" not in played.calls
    with pytest.raises(ValueError, match="linear_cross_entropy: the language-model head is trained"):
        results(model, batch, "hub")
    with torch.no_grad():
        model(**batch, return_logits=False)
    assert "linear_cross_entropy" in played.calls


@pytest.mark.parametrize("act", ["situ", "silu"])
def test_experts_run_on_kernels(act: str, played: Played) -> None:
    arguments = experts(act)
    want = ops.expert_mlp(*arguments, options(act, "torch"))
    for choice in ("auto", "hub"):
        assert torch.equal(ops.expert_mlp(*arguments, options(act, choice)), want)
    assert played.calls == ["sort_slots", "expert_mlp"] * 2
    # Of more experts than are held here, the others' slots have no row.
    ops.expert_mlp(*arguments, options(act, "hub", num_experts=5))
    assert played.calls[-1] == "expert_mlp of 7 rows"


def experts(act: str) -> tuple:
    """x, ids of which one is not held here, weights and float matrices of four experts with an adapter each."""
    torch.manual_seed(0)
    ids_TS = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 4]])
    stacks = []
    for shape in ((4, 16, 12), (4, 12, 8)):
        adapter = ops.LowRank(torch.randn(4, 2, shape[2]), torch.randn(4, shape[1], 2), 0.5)
        stacks.append(ops.ExpertMatrices(torch.randn(shape), None, (adapter,)))
    return torch.randn(4, 12), ids_TS, torch.rand(4, 2), *stacks


def options(act: str, kernels: str, num_experts: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        kernels=kernels,
        num_experts=num_experts,
        hidden_act=act,
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
    )


def test_what_the_kernels_of_experts_cannot_do(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids, weights, gate_up, down = experts("situ")
    trained = gate_up._replace(weight=gate_up.weight.clone().requires_grad_())
    limits = {"EXPERTS": "there are 4 experts", "SLOTS": "tokens choose 2 experts", "RANK": "have rank 2 in all"}
    with pytest.raises(ValueError, match=r'kernels="hub": latent_moe: the expert weights are trained'):
        ops.expert_mlp(x, ids, weights, trained, down, options("situ", "hub"))
    ops.expert_mlp(x, ids, weights, trained, down, options("situ", "auto")).sum().backward()
    assert trained.weight.grad is not None and played.calls == ["situ_glu"]
    for name, reason in limits.items():
        with monkeypatch.context() as patch:
            patch.setattr(ops, f"EXPERT_KERNEL_{name}", 1)
            with pytest.raises(ValueError, match=reason):
                ops.expert_mlp(x, ids, weights, gate_up, down, options("situ", "hub"))


@pytest.mark.parametrize("act", ["situ", "silu"])
def test_activations_run_on_kernels(act: str, played: Played) -> None:
    gate, up = torch.randn(2, 3, 8).chunk(2, dim=-1)
    want = ops.glu(gate, up, options(act, "torch"))
    for choice in ("auto", "hub"):
        assert torch.equal(ops.glu(gate, up, options(act, choice)), want)
    assert played.calls == ["situ_glu" if act == "situ" else "swiglu"] * 2


def test_adapters_run_on_kernels(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    y, x, a, b = torch.randn(2, 3, 12), torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(12, 4)
    want = ops.add_low_rank(y, x, a, b, 0.5)
    for choice in ("auto", "hub"):
        assert torch.equal(ops.add_low_rank(y, x, a, b, 0.5, choice), want)
    assert played.calls == ["add_low_rank"] * 2
    with pytest.raises(ValueError, match=r"low_rank: there are no kernels for factors in torch.float64"):
        ops.add_low_rank(y, x, a, b.double(), 0.5, "hub")
    monkeypatch.setattr(ops, "LOW_RANK_KERNEL_RANK", 3)
    with pytest.raises(ValueError, match=r'kernels="hub": low_rank: the rank is 4, over 3'):
        ops.add_low_rank(y, x, a, b, 0.5, "hub")
    assert torch.equal(ops.add_low_rank(y, x, a, b, 0.5, "auto"), want)
    assert played.calls == ["add_low_rank"] * 2


SPARSE = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 64, "kv_lora_rank": 24, "qk_rope_head_dim": 8}


@pytest.fixture
def latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for the latents of a small model."""
    monkeypatch.setattr(ops, "SPARSE_KERNEL_WIDTHS", (32, 24))


@pytest.mark.parametrize("layout", batches())
@pytest.mark.parametrize("options", [{}, {"learnable_sink": True, "index_kpool": 4}], ids=["plain", "sinks and pools"])
def test_sparse_attention_runs_on_kernels(options: dict, layout: str, played: Played, latents: None) -> None:
    model = small_model(**SPARSE | options).train()
    model.config.indexer_loss = True
    want = results(model, batches()[layout], "torch")
    assert not played.calls
    got = results(model, batches()[layout], "hub")
    assert want.keys() == got.keys() and any(".indexer." in name for name in got)
    assert all(torch.equal(got[name], want[name]) for name in want)
    attention = "sparse_attention with sinks" if options else "sparse_attention"
    assert {"index_topk", attention, "head_probabilities", "indexer_loss"} <= set(played.calls)


def test_what_the_kernels_of_sparse_attention_cannot_do(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batches()["one row"]
    for options, widths, reason in (
        ({}, (576, 512), "2 heads attend to 32 numbers, 24 of them values"),
        ({"index_head_dim": 32}, (32, 24), "the indexer has 2 heads of 32"),
        ({"index_n_heads": 65}, (32, 24), "the indexer has 65 heads of 64"),
        ({"index_relu": False}, (32, 24), "the indexer has no ReLU"),
        ({"index_topk": 9}, (32, 24), "the indexer chooses 9 keys, over 8"),
    ):
        model = small_model(**SPARSE | options)
        monkeypatch.setattr(ops, "SPARSE_KERNEL_WIDTHS", widths)
        monkeypatch.setattr(ops, "INDEX_KERNEL_KEYS", 8)
        with pytest.raises(ValueError, match=f'kernels="hub": sparse_attention: {reason}'):
            results(model, batch, "hub")
        want, got = results(model, batch, "torch"), results(model, batch, "auto")
        assert all(torch.allclose(got[name], want[name]) for name in want)


def test_the_loss_of_an_indexer_is_not_computed_in_fp16_on_kernels(played: Played) -> None:
    q, k, weight = torch.randn(3, 2, 64).half(), torch.randn(5, 64).half(), torch.randn(3, 2)
    index, target = torch.tensor([[0, -1], [0, 1], [1, 4]], dtype=torch.int32), torch.rand(3, 2)
    want = ops.indexer_loss(q, k, weight, index, target)
    assert torch.equal(ops.indexer_loss(q, k, weight, index, target, kernels="auto"), want) and not played.calls
    with pytest.raises(ValueError, match=r"leave the range of torch.float16"):
        ops.indexer_loss(q, k, weight, index, target, kernels="hub")


def test_nothing_is_computed_on_kernels_for_padding_alone(played: Played) -> None:
    model, ids = small_model(), batches()["one row"]["input_ids"]
    model.config.kernels = "hub"
    model(input_ids=ids, attention_mask=torch.zeros_like(ids))
    assert "chunk_kda" not in played.calls and "short_conv" not in played.calls


# Without kernels.


def test_cpu_is_torch_and_hub_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args) -> None:
        raise AssertionError("nothing may be looked for")

    monkeypatch.setattr(kernel_loading, "load", load)
    model, batch = small_model(), batches()["one row"]
    want, got = results(model, batch, "torch"), results(model, batch, "auto")
    assert all(torch.equal(got[name], want[name]) for name in want)
    with pytest.raises(ValueError, match=r'kernels="hub": .* run on cuda devices, .* are on cpu; "auto" uses'):
        results(model, batch, "hub")


# The choice.


def test_the_choice_belongs_to_the_process_not_to_the_checkpoint(tiny: Path, tmp_path: Path) -> None:
    model = LatentMoEForConditionalGeneration.from_pretrained(tiny, kernels="torch")
    assert model.config.kernels == model.language_model.config.kernels == "torch"
    assert model.language_model.model.layers[0].self_attn.config.kernels == "torch"
    model.config.save_pretrained(tmp_path)
    assert "kernels" not in (tmp_path / "config.json").read_text()
    assert LatentMoEConfig.from_pretrained(tmp_path).kernels == "auto"
    model.config.kernels = "hub"
    with pytest.raises(ValueError, match="run on cuda devices"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match="kernels: 'fast', expected one of 'auto', 'torch', 'hub'"):
        model.config.kernels = "fast"
    with pytest.raises(ValueError, match="kernels: 'fast'"):
        LatentMoEForConditionalGeneration.from_pretrained(tiny, kernels="fast")


def test_the_choice_of_a_text_model_and_of_the_constructor(tiny: Path) -> None:
    text = LatentMoEConfig.from_pretrained(tiny).text_config
    assert text.kernels == "auto"
    text.kernels = "torch"
    assert LatentMoEForCausalLM(text).model.layers[0].config.kernels == "torch"
    assert "_kernels" not in text.to_dict() and "_kernels" not in text.to_diff_dict()
    assert LatentMoEConfig(kernels="hub").text_config.kernels == "hub"


def test_remote_code_takes_the_choice(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, trust_remote_code=True, kernels="hub")
    assert type(model).__module__.startswith("transformers_modules")
    with pytest.raises(ValueError, match="run on cuda devices"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert AutoConfig.from_pretrained(tiny, trust_remote_code=True).kernels == "auto"


# Where kernels come from.


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Nowhere: no variable, no checkout, an empty cache. Records what is said and what is asked of the Hub."""
    said, asked = [], []
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.setattr(kernel_loading.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kernel_loading, "_checkout", lambda name: None)
    monkeypatch.setattr(kernel_loading, "_packed", lambda folder: ModuleType(str(folder)))
    for level in ("info", "warning"):
        monkeypatch.setattr(kernel_loading.logger, level, said.append)

    def download(repository, **options):
        asked.append(options["local_files_only"])
        if options["local_files_only"]:
            raise LocalEntryNotFoundError("not there")
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(kernel_loading, "snapshot_download", download)
    # What other tests have loaded must not be found here, nor what is loaded here by them.
    others = sys.modules.pop("latentmoe_kda_source", None)
    yield SimpleNamespace(said=said, asked=asked)
    sys.modules.pop("latentmoe_kda_source", None)
    if others is not None:
        sys.modules["latentmoe_kda_source"] = others


def test_the_order_of_places(places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kernel_loading.load("kda", "auto") is None
    assert places.said == ["kda: torch definitions, latentmoe/kda, revision v1, is not in the Hub cache"]
    assert places.asked == [True]
    assert kernel_loading.load("kda", "hub").__name__.endswith("downloaded")
    assert places.asked == [True, False]

    monkeypatch.setattr(kernel_loading, "snapshot_download", lambda *args, **kwargs: str(tmp_path / "cached"))
    assert kernel_loading.load("kda", "auto").__name__.endswith("cached")
    assert places.said[-1] == "kda: kernels of latentmoe/kda, revision v1"

    source = tmp_path / "source" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr(kernel_loading, "_checkout", lambda name: source)
    module = kernel_loading.load("kda", "auto")
    assert module.__file__ == str(source)
    assert kernel_loading.load("kda", "hub").__name__.endswith("cached")
    del sys.modules["latentmoe_kda_source"]

    monkeypatch.setenv("LOCAL_KERNELS", "other/name=/x:latentmoe/kda=/some/folder")
    for choice in ("auto", "hub"):
        assert kernel_loading.load("kda", choice).__name__ == "/some/folder"
    assert places.said[-1] == "kda: kernels of /some/folder"
    monkeypatch.setenv("LOCAL_KERNELS", "other/name=/x")
    assert kernel_loading.load("kda", "auto").__file__ == str(source)


def test_it_is_looked_for_and_said_once(places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_loading, "DEVICES", ("cpu",))
    monkeypatch.setattr(kernel_loading, "_LOADED", {})
    for _ in range(3):
        results(small_model(), batches()["one row"], "auto")
    looked_for = ["kda", "latent_moe", "linear_cross_entropy", "residual"]
    assert sorted(line.split(":")[0] for line in places.said) == looked_for


@pytest.mark.parametrize("missing", ["triton", "kernels"])
def test_a_missing_library_is_the_reason(
    missing: str, places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_loading.importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert kernel_loading.load("residual", "auto") is None
    assert missing in places.said[-1]
    with pytest.raises(ValueError, match=f'kernels="hub": residual: .*{missing}'):
        kernel_loading.load("residual", "hub")


def test_sources_that_fail_to_import_are_an_error(
    places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "__init__.py").write_text("raise RuntimeError('half a kernel')")
    monkeypatch.setattr(kernel_loading, "_checkout", lambda name: tmp_path / "__init__.py")
    with pytest.raises(RuntimeError, match="half a kernel"):
        kernel_loading.load("kda", "auto")
    assert "latentmoe_kda_source" not in sys.modules


def test_both_copies_of_the_code_share_the_kernels(
    places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The installed package and remote code: the second one must not define the same operators again."""
    spec = importlib.util.spec_from_file_location("copy_of_kernel_loading", kernel_loading.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    (tmp_path / "__init__.py").write_text("made = object()")
    modules = []
    for loading in (kernel_loading, copy):
        monkeypatch.setattr(loading, "_checkout", lambda name: tmp_path / "__init__.py")
        modules.append(loading.load("kda", "auto"))
    assert modules[0] is modules[1]


def test_the_checkout_is_found_from_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the file's own place: transformers copies remote code elsewhere."""
    package = tmp_path / "modeling_latentmoe" / "__init__.py"
    spec = SimpleNamespace(origin=str(package))
    monkeypatch.setattr(kernel_loading.importlib.util, "find_spec", lambda name: spec)
    assert kernel_loading._checkout("kda") is None
    source = tmp_path / "hub_kernels" / "kda" / "torch-ext" / "kda" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    assert kernel_loading._checkout("kda") == source
    monkeypatch.setattr(kernel_loading.importlib.util, "find_spec", lambda name: None)
    assert kernel_loading._checkout("kda") is None
