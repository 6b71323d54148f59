"""Time and memory of a LoRA step through the released model's first layers on one GPU, and what takes the time.

    python scripts/bench_step.py                             # 112 experts (one rank of EP8), 8192 and 32768 tokens
    python scripts/bench_step.py --experts 896 --tokens 8192 # all experts, and what 93 layers would take
    python scripts/bench_step.py --tokens 8192 --no_peer --experts_in host:1-3    # experts in host memory
    python scripts/bench_step.py --block                     # one block of 56 experts beside torch with bf16 weights
    torchrun --nproc_per_node 2 scripts/bench_step.py --ep 2 # 896 experts over two GPUs beside all of them on each
    python scripts/bench_step.py --draw                      # results/step.png, of steps recorded before, without a GPU

Layers 0-3 are KDA with a dense feed-forward, two of KDA with experts and one of MLA with experts, at full width, with
random weights: routed experts in MXFP4, everything else in bf16, adapters of rank 16 and of rank 2 on every routed
expert. A step goes from layer inputs to the last norm and back to the inputs and adapters: no embedding, head or
optimizer, and no communication but that of --ep. First the kernels' results and torch's are compared with float32.
Where NeMo AutoModel is installed, its layers run in the same process, bf16, without adapters, with the fastest of its
options.

Results, with the device time by what it is spent on, go to results/h200.json.
"""

import argparse
import gc
import importlib
import itertools
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import sdpa_kernel

from modeling_latentmoe import kernel_loading
from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.ops import SDPA_ORDER
from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.expert_homes import keep_off_device
from modeling_latentmoe.training.expert_parallel import PLAIN, Travel, expert_parallel
from modeling_latentmoe.training.flops import forward_flops_per_token
from modeling_latentmoe.training.loading import checkpoint_activations
from modeling_latentmoe.training.lora import add_adapter
from modeling_latentmoe.training.mesh import build_mesh
from modeling_latentmoe.training.placement import parse_placement
from modeling_latentmoe.training.streaming import restrict_experts
from modeling_latentmoe.training.tiers import Tiers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "hub_kernels"))
measure = importlib.import_module("measure")

GIB, PEAK_FLOPS, REPEATS = 2**30, 989e12, 4
LAYERS, ALL_EXPERTS = 4, 896
STEP = "K3 slice, LoRA step"
# Layers of the released model like layer 0, like layers 1 and 2, like layer 3.
RELEASED = {"KDA, dense": 1, "KDA, experts": 68, "MLA, experts": 24}
GEMMS = ("gemm", "nvjet", "cutlass", "xmma", "cublas")
# Kernels by a part of their name, the first match counts; those of hub_kernels/ are found by their sources.
LIBRARIES = {"all-to-all": ("nccl",), "attention": ("fmha", "flash", "sdpa"), "dense products": GEMMS}


def build(experts: int, packed: bool = True, mesh: DeviceMesh | None = None, travel: Travel = PLAIN) -> nn.Module:
    """Text model of LAYERS layers on the GPU with random weights, PEFT adapters around it; with a mesh, experts are
    shared over its axis "ep" and tokens travel to them as `travel` says."""
    released = LatentMoEConfig.kimi_k3().to_dict()
    text, kinds = released["text_config"], released["text_config"]["linear_attn_config"]
    for kind in ("kda_layers", "full_attn_layers"):
        kinds[kind] = [n for n in kinds[kind] if n <= LAYERS]
    text |= {"num_hidden_layers": LAYERS, "num_experts": experts, "vocab_size": 1024, "layer_types": None}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    text |= {"indexer_types": None, **ids}
    released |= {"vision_config": None, "media_placeholder_token_id": 3, **ids}
    if not packed:
        released["quantization_config"] = None
    config = LatentMoEConfig.from_dict(released)
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(config).to(torch.bfloat16)
    if mesh:
        restrict_experts(model, mesh.get_local_rank("ep"), mesh["ep"].size())
    model.to_empty(device="cuda")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.uint8:
            parameter.random_(0x78, 0x7B) if name.endswith("_scale") else parameter.random_(0, 256)
        else:
            nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.02)
    model = add_adapter(model, r=16, lora_alpha=32, expert_rank=2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    if mesh:
        expert_parallel(model, mesh, travel=travel)
    return model.train()


def text_model(model: nn.Module) -> nn.Module:
    return model.get_base_model().language_model.model


def step_of(
    model: nn.Module, tokens: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Forward and backward: (last hidden states, gradient of the inputs, gradients of the adapters)."""
    generator = torch.Generator("cuda").manual_seed(1)
    shape = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    x = torch.randn(1, tokens, text_model(model).config.hidden_size, **shape).to(dtype).requires_grad_()
    gradient = torch.randn(x.shape, **shape).to(dtype)
    leaves = [x, *(p for name, p in text_model(model).named_parameters() if p.requires_grad)]

    def step() -> tuple[torch.Tensor, ...]:
        y = text_model(model)(inputs_embeds=x, use_cache=False).last_hidden_state
        return y, *torch.autograd.grad(y, leaves, gradient)

    return step


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers in float32; the experts stay packed."""
    kept = [(x, x.data) for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    try:
        for x, data in kept:
            x.data = data.float()
        yield
    finally:
        for x, data in kept:
            x.data = data


def verify(model: nn.Module, tokens: int = 512) -> None:
    """FloatingPointError if kernels err more than twice as much as torch, both in bf16 and against float32.

    Both choose other experts where scores are nearly equal; their errors are mostly that.
    """

    def results(choice: str, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        text_model(model).config.kernels = choice
        y, dx, *adapters = step_of(model, tokens, dtype)()
        silent = sum(not g.any() for g in adapters)
        if silent:
            raise FloatingPointError(f"kernels={choice!r}: {silent} of {len(adapters)} adapter gradients are zero")
        return y, dx, torch.cat([g.float().flatten() for g in adapters])

    with in_float32(model):
        truth = results("torch", torch.float32)
    plain, ours = results("torch"), results("auto")
    for name, *values in zip(("output", "dx", "adapters"), truth, plain, ours, strict=True):
        others, error = (measure.relative_error(x, values[0]) for x in values[1:])
        print(
            f"against float32, T={tokens}: {name} of torch errs by {others:.1e}, of kernels by {error:.1e}", flush=True
        )
        if not error <= 2 * others:
            raise FloatingPointError(f"{name}: kernels err by {error:.2g}, torch by {others:.2g}")


@contextmanager
def first(model: nn.Module, layers: int) -> Iterator[None]:
    """Only the first `layers` layers run."""
    inner, whole = text_model(model), text_model(model).layers
    inner.layers = whole[:layers]
    yield
    inner.layers = whole


def free_memory() -> None:
    """Give back what nothing refers to, cycles too: what is built next has the GPU to itself."""
    gc.collect()
    torch.cuda.empty_cache()


def measured(name: str, step: Callable[[], Any], tokens: int) -> tuple[list[float], float]:
    """Samples in ms of steps that follow each other, and all memory at the peak in GiB: weights count."""
    free_memory()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    samples = [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    ms, peak = statistics.median(samples), torch.cuda.max_memory_allocated() / GIB
    print(f"{name}: {ms:.1f} ms, {tokens / ms * 1e3:,.0f} tokens/s, {peak:.1f} GiB", flush=True)
    return samples, peak


def block(experts: int, tokens: int) -> None:
    """A block of experts, forward and backward: packed weights and kernels, beside bf16 weights and torch."""
    times, peaks = {}, {}
    for name, packed, kernels in (("ours", True, "auto"), ("torch, bf16 weights", False, "torch")):
        model = build(experts, packed)
        config = text_model(model).config
        config.kernels = kernels
        step = block_step(text_model(model).layers[1].block_sparse_moe, config.hidden_size, tokens)
        del model
        times[name], peaks[name] = measured(f"block, {name}", step, tokens)
        del step
        free_memory()
    D, L, F = config.hidden_size, config.routed_expert_hidden_size, config.moe_intermediate_size
    routed, shared = config.num_experts_per_token * 3 * L * F, config.num_shared_experts * 3 * D * F
    flops = 4 * tokens * (D * experts + 2 * D * L + routed + shared)
    floor = flops / measure.FLOPS_PER_SECOND * 1e3
    row = measure.row("LatentMoE block, LoRA step", f"T={tokens}, {experts} experts", times, floor, peaks["ours"], None)
    measure.record("python scripts/bench_step.py --block", [row | {"peaks_gib": peaks}])


def block_step(moe: nn.Module, width: int, tokens: int) -> Callable[[], Any]:
    x = torch.randn(1, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *(parameter for parameter in moe.parameters() if parameter.requires_grad)]

    def step() -> tuple[torch.Tensor, ...]:
        y, _, _ = moe(x)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    return step


def nemo_step(experts: int, tokens: int, recompute: bool) -> Callable[[], Any]:
    """The same layers of NeMo AutoModel 0.7, frozen, with the fastest of its options. ImportError without it."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
    from nemo_automodel.components.models.kimi_k3.model import KimiK3TextModel

    linear = {"head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3]}
    linear |= {"full_attn_layers": [4], "use_full_rank_gate": True, "gate_lower_bound": -5.0}
    config = KimiK3TextConfig(
        **{"vocab_size": 1024, "num_hidden_layers": LAYERS, "linear_attn_config": linear, "num_experts": experts},
        **{"pad_token_id": 0, "kda_chunk_impl": "fused", "situ_backend": "triton", "attn_res_triton": True},
    )
    backend = BackendConfig(
        **{"attn": "sdpa", "linear": "torch", "rms_norm": "torch_fp32", "experts": "torch_mm", "dispatcher": "torch"},
        **{"rope_fusion": False, "compile_situ": True, "compile_norm": True, "compile_router_weight": True},
    )
    with torch.device("cuda"):
        model = KimiK3TextModel(config, backend)
        model.init_weights()
    model.train().requires_grad_(False)
    x = torch.randn(1, tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run(layer: nn.Module, h: torch.Tensor, bank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(h, attention_mask=None, padding_mask=None, block_residual=bank, packed_context=None)

    def step() -> tuple[torch.Tensor, ...]:
        h, bank = x, x.new_zeros(tokens, 0, config.hidden_size)
        # in torch's own order its attention, 192 wide, takes a kernel that is ten times slower than cuDNN's
        with sdpa_kernel(SDPA_ORDER, set_priority=True):
            for layer in model.layers.values():
                if recompute:
                    h, bank = torch.utils.checkpoint.checkpoint(run, layer, h, bank, use_reentrant=False)
                else:
                    h, bank = run(layer, h, bank)
            y = model.norm(model._apply_output_attn_res(h, bank))
            return torch.autograd.grad(y, x, torch.ones_like(y))

    return step


def parts(step: Callable[[], Any]) -> dict[str, float]:
    """Device time of a step by what it is spent on, ms."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    owners = {}
    for (repository, _), module in kernel_loading._LOADED.items():
        if module is not None:
            for file in Path(module.__file__).parent.glob("*.py"):
                source = file.read_text()
                owners |= {line.split("(")[0][4:]: repository for line in source.splitlines() if line[:4] == "def "}
    found: dict[str, float] = {}
    for event in profile.key_averages():
        name = event.key
        part = owners.get(name)
        if part is None:
            part = next((p for p, words in LIBRARIES.items() if any(w in name.lower() for w in words)), "other")
        found[part] = found.get(part, 0.0) + event.self_device_time_total / 1e3
    return {part: round(ms, 2) for part, ms in sorted(found.items(), key=lambda item: -item[1])}


def draw() -> None:
    """results/step.png: a bar for every recorded step, made of its parts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = json.loads(measure.RESULTS.read_text())
    rows = {row["shape"]: row["parts_ms"] for entry in records for row in entry["rows"] if row["op"] == STEP}
    if not rows:
        raise ValueError(f"{measure.RESULTS} has no row of {STEP!r}, run scripts/bench_step.py on a GPU first")
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.6 * len(rows)), layout="constrained")
    left = dict.fromkeys(rows, 0.0)
    for part in dict.fromkeys(part for row in rows.values() for part in row):
        widths = [row.get(part, 0.0) for row in rows.values()]
        axes.barh(list(rows), widths, left=list(left.values()), label=part)
        left = {shape: left[shape] + width for shape, width in zip(rows, widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("ms of device time, one LoRA step")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(measure.RESULTS.with_name("step.png"), dpi=150)
    pyplot.close(figure)


def bench(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--experts", type=int, default=112, help="experts of a layer held here (default 112)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="default 8192 32768")
    parser.add_argument("--no_peer", action="store_true", help="leave NeMo AutoModel out")
    parser.add_argument(
        "--experts_in", default="device", help="as for lora.py: host:1-3 keeps layers 1 to 3 in host memory"
    )
    parser.add_argument("--block", action="store_true", help="only one block of 56 experts, 8192 tokens")
    parser.add_argument("--ep", type=int, default=1, help="GPUs that share 896 experts, as many as torchrun starts")
    parser.add_argument("--draw", action="store_true", help="only draw results/step.png from what was recorded")
    args = parser.parse_args(argv)
    if args.draw:
        draw()
        return
    placement = parse_placement(args.experts_in)
    if placement.kind not in ("device", "host") or not placement.layers <= {*range(1, LAYERS)}:
        raise ValueError(f"--experts_in {args.experts_in}: name some of layers 1 to {LAYERS - 1}, as in host:1-3")
    if placement.layers and (args.block or args.ep > 1):
        raise ValueError(f"--experts_in {args.experts_in} goes with neither --block nor --ep")
    if not torch.cuda.is_available():
        raise ValueError("bench_step.py needs a GPU, torch sees none")
    if args.block:
        block(56, 8192)
        return
    if args.ep > 1:
        parallel(args, argv)
        return
    measure.record(shlex.join(["python", "scripts/bench_step.py", *argv]), step_rows(args))


def step_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    verify(build(args.experts))
    device = torch.device("cuda", torch.cuda.current_device())
    for recompute, tokens in itertools.product((False, True), args.tokens):
        model = build(args.experts)
        config = text_model(model).config
        tiers = Tiers(keep_off_device(model, parse_placement(args.experts_in), device), device)
        if recompute:
            checkpoint_activations(model.get_base_model())
        step = step_of(model, tokens)
        samples, peak = measured("ours", step, tokens)
        spent = parts(step)
        for line in tiers.summary():
            print(f"  {line}", flush=True)
        if args.experts == ALL_EXPERTS and not recompute and tokens == args.tokens[0]:
            project(model, step, tokens)
        # NeMo's experts have 16 bits: it may have the whole GPU.
        del model, step, tiers
        free_memory()
        times = {"ours": samples} | ({} if args.no_peer else nemo(args.experts, tokens, recompute))
        flops = 2 * tokens * forward_flops_per_token(config, tokens, head=False)
        shape = f"T={tokens}{', full recompute' if recompute else ''}, {args.experts} experts"
        if args.experts_in != "device":
            shape += f" in {args.experts_in}"
        row = measure.row(STEP, shape, times, flops / measure.FLOPS_PER_SECOND * 1e3, peak, None)
        print(f"  {flops / row['ours_ms'] * 1e3 / PEAK_FLOPS:.1%} of 989 TFLOP/s; ms by part: {spent}", flush=True)
        yield row | {"parts_ms": spent}


def parallel(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """All experts over `--ep` GPUs, beside all of them on every GPU, which then have nothing to exchange."""
    if os.environ.get("WORLD_SIZE") != str(args.ep):
        raise ValueError(f"--ep {args.ep}: start it with torchrun --nproc_per_node {args.ep} scripts/bench_step.py")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device("cuda"))
    launch = ["torchrun", "--nproc_per_node", str(args.ep), "scripts/bench_step.py", *argv]
    rows = parallel_rows(args.tokens, build_mesh(args.ep, args.ep, "cuda"))
    if dist.get_rank() == 0:
        measure.record(shlex.join(launch), rows)
    else:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            list(rows)
    dist.destroy_process_group()


def parallel_rows(lengths: Sequence[int], mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    alone = "all experts on every GPU"
    forms = {"ours": PLAIN, "ours, exchange in 2 parts": Travel(chunks=2), alone: None}
    for tokens in lengths:
        times, peaks, spent = {}, {}, {}
        for name, travel in forms.items():
            try:
                model = build(ALL_EXPERTS, mesh=mesh, travel=travel) if travel else build(ALL_EXPERTS)
                config, step = text_model(model).config, step_of(model, tokens)
                times[name], peaks[name] = measured(f"{name}, T={tokens}", step, tokens)
                spent[name] = parts(step)
                share = spent[name].get("all-to-all", 0.0) / statistics.median(times[name])
                print(f"  all-to-all {share:.1%} of it; ms by part: {spent[name]}", flush=True)
            except torch.cuda.OutOfMemoryError:
                # the others would wait for this process in an exchange
                if travel:
                    raise
                print(f"{name}, T={tokens}: out of memory", flush=True)
            model = step = None
            free_memory()
        flops = 2 * tokens * forward_flops_per_token(config, tokens, head=False)
        shape = f"T={tokens} per GPU, {ALL_EXPERTS} experts over {mesh['ep'].size()}"
        row = measure.row(STEP, shape, times, flops / measure.FLOPS_PER_SECOND * 1e3, peaks["ours"], None)
        print(f"  {flops / row['ours_ms'] * 1e3 / PEAK_FLOPS:.1%} of 989 TFLOP/s", flush=True)
        yield row | {"parts_ms": spent["ours"], "peaks_gib": peaks}


def project(model: nn.Module, whole: Callable[[], Any], tokens: int) -> None:
    """Print what all 93 layers would take: layers of a kind cost what the slice grows by with one of them."""
    grown = {}
    for layers in (1, 3):
        with first(model, layers):
            grown[layers] = statistics.median(measured(f"{layers} layers", step_of(model, tokens), tokens)[0])
    grown[LAYERS] = statistics.median(measured(f"{LAYERS} layers", whole, tokens)[0])
    cost = {"KDA, dense": grown[1], "KDA, experts": (grown[3] - grown[1]) / 2, "MLA, experts": grown[4] - grown[3]}
    total = sum(RELEASED[kind] * ms for kind, ms in cost.items())
    sums = " + ".join(f"{RELEASED[kind]} x {ms:.1f} ms ({kind})" for kind, ms in cost.items())
    print(f"93 layers: {sums} = {total / 1e3:.2f} s for {tokens} tokens, {tokens / total * 1e3:,.0f} tokens/s")


def nemo(experts: int, tokens: int, recompute: bool) -> dict[str, list[float]]:
    """Times of NeMo AutoModel, if it is installed and fits."""
    name = "NeMo AutoModel, no adapters"
    try:
        step = nemo_step(experts, tokens, recompute)
        samples, _ = measured(name, step, tokens)
        print(f"  {name}: ms by part: {parts(step)}", flush=True)
        return {name: samples}
    except (ImportError, torch.cuda.OutOfMemoryError) as error:
        print(f"{name}, T={tokens}: {type(error).__name__} {' '.join(str(error).split())[:100]}", flush=True)
        return {}


def main(argv: Sequence[str]) -> int:
    return run_command(bench, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
