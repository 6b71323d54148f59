"""Experts outside of the device: the same bits as on it, in the right order, in two slots that nobody reads too late.

On CPU the slots are CPU memory and layers are sent by another thread. What is not in a slot, and a slot from the moment
it is given to another layer, holds bytes that make NaNs; copies arrive late.
"""

import gc
import mmap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from modeling_latentmoe import LatentMoEConfig
from modeling_latentmoe.mxfp4 import LatentMoEMxfp4Config
from modeling_latentmoe.ops import ExpertMatrices, grouped_linear
from modeling_latentmoe.training import expert_homes, placement, streaming
from modeling_latentmoe.training.expert_homes import HostHome, Layout, keep_off_device, pinned_bytes
from modeling_latentmoe.training.loading import checkpoint_activations, load_model
from modeling_latentmoe.training.lora import add_adapter
from modeling_latentmoe.training.mesh import expert_layers
from modeling_latentmoe.training.placement import check_placement, choose_layers, decide, parse_placement
from modeling_latentmoe.training.sources import LocalFiles
from modeling_latentmoe.training.tiers import Tiers, hidden

from .adapters import randomize
from .conftest import save_small_model
from .models import mixed_config, random_model

CPU = torch.device("cpu")
IDS = torch.randint(0, 250, (2, 18), generator=torch.Generator().manual_seed(0))


class Watched(Tiers):
    """Poison, late copies, and the layers in the order in which they were sent."""

    delay = 0.002

    def __init__(self, homes: list, device: torch.device = CPU) -> None:
        self.sent: list[int] = []
        super().__init__(homes, device)
        for shown in self.resting:
            for name, tensor in shown.items():
                shown[name] = poison(tensor)
        for place in range(2, len(homes)):
            self._show(place, self.resting[place])

    def _send(self, place, slot):
        # here, and not on the sender's thread: nothing waits for the last one
        self.sent.append(place)
        return super()._send(place, slot)

    def _copy(self, home, slot, released):
        slot.bytes.fill_(255)
        time.sleep(self.delay)
        return super()._copy(home, slot, released)


def poison(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 255)


def model_of(packed: bool = True, recompute: str = "none", adapter: bool = True) -> nn.Module:
    """A random model with experts in its layers 1 to 5."""
    config = mixed_config("kmdskm")
    if packed:
        config = LatentMoEConfig(**config.to_dict() | {"quantization_config": LatentMoEMxfp4Config().to_dict()})
    model = random_model(config)
    if recompute != "none":
        checkpoint_activations(model, selective=recompute == "selective")
    return with_adapter(model) if adapter else model


def with_adapter(model: nn.Module, target_modules: list[str] | None = None) -> PeftModel:
    torch.manual_seed(1)
    adapted = add_adapter(model, r=4, lora_alpha=8, expert_rank=2, target_modules=target_modules)
    randomize(adapted, 0.1)
    return adapted.train()


def tiers_of(model: nn.Module, text: str, cls: type[Tiers] = Watched) -> Tiers:
    return cls(keep_off_device(model, parse_placement(text), CPU), CPU)


def step(model: nn.Module) -> dict[str, Tensor]:
    """Loss and gradients; the adapters move."""
    model.zero_grad()
    ids = IDS.to(model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {"loss": loss.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    with torch.no_grad():
        for name in found.keys() - {"loss"}:
            model.get_parameter(name).sub_(found[name], alpha=0.1)
    return found


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=IDS).logits


# --- the same bits


@pytest.mark.parametrize(
    "recompute", ["full", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("none", "selective"))]
)
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["mxfp4", "float"])
def test_training_is_the_same_to_the_bit(packed: bool, recompute: str) -> None:
    """Two steps with an evaluation between them; some layers stay on the device."""
    resident, tiered = (model_of(packed, recompute) for _ in range(2))
    tiers_of(tiered, "host:0-2,4-5" if packed else "host:0-5")
    for _ in range(2):
        expected = step(resident)
        assert len(expected) > 50 and same(step(tiered), expected)
        assert torch.equal(logits(tiered), logits(resident))
        resident.train(), tiered.train()


@pytest.mark.filterwarnings("error")
def test_adapters_on_experts_alone() -> None:
    """The inputs of the first experts have no gradient then."""
    runs = []
    for text in ("device", "host:0-5"):
        model = model_of(adapter=False)
        model = with_adapter(model, target_modules=["experts.gate_up_proj", "experts.down_proj"])
        tiers_of(model, text)
        runs.append([step(model), step(model)])
    assert len(runs[0][0]) == 1 + 5 * 4 and all(map(same, *runs))


def test_generation_is_the_same() -> None:
    resident, tiered = (model_of(adapter=False) for _ in range(2))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = resident.generate(IDS, **options)
    tiers_of(tiered, "host:0-5")
    assert torch.equal(tiered.generate(IDS, **options), expected)


@pytest.mark.parametrize(("ep_rank", "ep_degree", "recompute"), [(0, 1, "full"), (1, 4, "none")])
def test_experts_in_their_files(
    small: Path, ep_rank: int, ep_degree: int, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a rank's share of them, whose other experts add zero here; loading reads nothing of what stays in files."""
    monkeypatch.setattr(streaming, "_fits_in_memory", lambda files: False)
    resident = load_model(str(small), "fp32", ep_rank, ep_degree)
    whole = sum(tensor.nbytes for tensor in resident.state_dict().values())
    read = []
    read_once = LocalFiles.read_once

    def counted(self, file: str, start: int, stop: int, views: list) -> None:
        read.append(stop - start)
        read_once(self, file, start, stop, views)

    monkeypatch.setattr(LocalFiles, "read_once", counted)
    tiered = load_model(str(small), "fp32", ep_rank, ep_degree, on_disk={1, 2, 3, 6})
    left = [p for layer in (1, 2, 3, 6) for p in expert_layers(tiered)[layer].parameters()]
    assert sum(read) == whole - sum(p.nbytes for p in left)
    assert {p.untyped_storage().nbytes() for p in left} == {1}
    for model in (resident, tiered):
        if recompute != "none":
            checkpoint_activations(model)
        with_adapter(model)
    tiers_of(tiered, "file:1-3,6")
    for _ in range(2):
        assert same(step(tiered), step(resident))


def test_files_of_another_dtype(tmp_path: Path) -> None:
    """Float experts that are stored in fp32 and computed in bf16."""
    folder = str(save_small_model(tmp_path, seed=0, packed=False, vision=False))
    expected = logits(load_model(folder, "bf16"))
    tiered = load_model(folder, "bf16", on_disk=range(8)).requires_grad_(False)
    tiers_of(tiered, "file:0-7")
    assert torch.equal(logits(tiered), expected)


def test_files_that_are_gone(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path, seed=0, vision=False)
    model = load_model(str(folder), "fp32", on_disk=range(8))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    tiers_of(model, "file:0-7")
    with pytest.raises(OSError, match=r"model-0.*\.safetensors, bytes .*: there is no such file"):
        logits(model)


def test_only_frozen_parameters_are_needed_again() -> None:
    """What the kernels must keep: autograd holds the parameter, not the memory that it showed in forward."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4, 5), requires_grad=False)
    x = torch.randn(6, 5, requires_grad=True)
    y = grouped_linear(x, ExpertMatrices(weight), [2, 0, 4])
    home = weight.data
    weight.data = poison(home)
    # another write to the memory that is shown is none of autograd's business
    weight.data.zero_()
    weight.data = home.clone()
    y.sum().backward()
    expected = torch.cat([home[0].sum(0).expand(2, 5), home[2].sum(0).expand(4, 5)])
    assert torch.allclose(x.grad, expected)


# --- order and memory


def test_one_layer_ahead_in_both_directions() -> None:
    model = model_of()
    tiers = tiers_of(model, "host:1-5")
    first = [0, 1, 2, 3, 4]
    back = [2, 1, 0]
    step(model)
    assert tiers.sent == first + back
    # layers 0 and 1 are still there, and at the turn 3 and 4
    step(model)
    assert tiers.sent == first + back + [2, 3, 4] + back
    logits(model)
    # without a backward pass the first ones come next
    assert tiers.sent == first + back + [2, 3, 4] + back + [2, 3, 4, 0]
    logits(model)
    assert tiers.sent[-5:] == [1, 2, 3, 4, 0]


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_goes_backward(recompute: str) -> None:
    model = model_of(recompute=recompute)
    tiers = tiers_of(model, "host:1-5")
    step(model)
    assert tiers.sent == [0, 1, 2, 3, 4, 2, 1, 0]


@pytest.mark.parametrize(("layers", "moved"), [("3", [0]), ("2-3", [0, 1])])
def test_few_layers_stay_in_their_slots(layers: str, moved: list[int]) -> None:
    resident, tiered = model_of(), model_of()
    tiers = tiers_of(tiered, f"host:{layers}")
    for _ in range(2):
        assert same(step(tiered), step(resident))
    logits(tiered)
    assert tiers.sent == moved and len(tiers.slots) == len(moved)


def test_a_layer_that_nobody_foresaw_is_waited_for() -> None:
    """A loss without its backward pass, and layers called out of order."""
    resident, tiered = model_of(), model_of()
    tiers_of(tiered, "host:0-5")
    for model in (resident, tiered):
        model(input_ids=IDS, labels=IDS)
    assert same(step(tiered), step(resident))
    x, ids, weights = torch.randn(5, 32), torch.arange(15).view(5, 3) % 8, torch.rand(5, 3)
    for layer in (5, 1, 4, 5, 2, 3, 3, 1):
        ours, theirs = (expert_layers(model)[layer](x, ids, weights, {}) for model in (tiered, resident))
        assert torch.equal(ours, theirs)


def test_two_layers_of_memory() -> None:
    """The slots are all that the device gets: no parameter is anywhere else than in a slot or at its home."""
    model = model_of()
    tiers = tiers_of(model, "host:0-5", Tiers)
    step(model)
    layer = tiers.homes[0].layout.nbytes
    assert sum(slot.bytes.nbytes for slot in tiers.slots) == 2 * layer
    memory = {slot.bytes.untyped_storage().data_ptr() for slot in tiers.slots}
    homes = {home.buffer.untyped_storage().data_ptr() for home in tiers.homes}
    shown = [p.untyped_storage().data_ptr() for home in tiers.homes for p in home.experts.parameters()]
    assert set(shown) <= memory | homes and sum(place in memory for place in shown) <= 2 * 4


def test_one_buffer_for_a_layer() -> None:
    experts = expert_layers(model_of(adapter=False))[1]
    before = {name: p.clone() for name, p in experts.named_parameters()}
    held = sum(p.nbytes for p in before.values())
    home = HostHome(experts, CPU)
    assert held <= home.buffer.nbytes <= held + 4 * expert_homes.ALIGNMENT
    assert all(torch.equal(p, before[name]) for name, p in experts.named_parameters())
    assert {p.untyped_storage().data_ptr() for p in experts.parameters()} == {home.buffer.data_ptr()}
    assert experts.gate_up_proj.ds_shape == experts.logical_shapes["gate_up"]


def test_buffers_are_pinned_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a byte more than asked for; the driver is told before the memory goes."""
    calls: list[tuple] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(args) or 0, cudaHostUnregister=lambda *args: calls.append(args)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    buffer = pinned_bytes(12345, torch.device("cuda"))
    place = buffer.data_ptr()
    assert buffer.nbytes == 12345 and calls == [(place, 12345, 0)] and place % mmap.PAGESIZE == 0
    view = buffer[5:].view(-1)
    del buffer
    assert len(calls) == 1
    del view
    assert calls[1:] == [(place,)]
    cudart.cudaHostRegister = lambda *args: 2
    with pytest.raises(OSError, match=r"CUDA error 2 for 0\.0 GB"):
        pinned_bytes(12345, torch.device("cuda"))


def test_layouts_are_aligned() -> None:
    layout = Layout(expert_layers(model_of(adapter=False))[1])
    assert all(place.start % expert_homes.ALIGNMENT == 0 for place in layout.places.values())
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    for value, view in enumerate(views.values()):
        view.fill_(value + 1)
    assert [int(view.max()) for view in views.values()] == [1, 2, 3, 4]
    assert [int(view.min()) for view in views.values()] == [1, 2, 3, 4]


def test_moving_the_model_leaves_them() -> None:
    """As Accelerate moves it to the device, before the slots exist and after."""
    model = model_of()
    homes = keep_off_device(model, parse_placement("host:1-3"), CPU)

    def moved() -> set[int]:
        seen: list[int] = []
        model._apply(lambda tensor: (seen.append(tensor.data_ptr()), tensor)[1])
        return {layer for layer, experts in expert_layers(model).items() if experts.down_proj.data_ptr() in seen}

    assert moved() == {4, 5}
    tiers = Tiers(homes, CPU)
    assert moved() == {4, 5} and len(tiers.slots) == 2


# --- what the tests above would notice


class Early(Watched):
    """Sends the next layer into the slot that is in use."""

    def use(self, place: int, backward: bool) -> None:
        super().use(place, backward)
        following = self._following(place, backward)
        if following is not None:
            self.sender.submit(self.used.bytes.copy_, self.homes[following].read()).result()


class Hasty(Watched):
    """Shows a slot as it is before anything has arrived; without the wait, how much has would depend on the machine."""

    def _await(self, slot) -> None:
        super()._await(slot)
        slot.bytes.fill_(255)


class ForwardOnly(Watched):
    """Does nothing before backward."""

    def use(self, place: int, backward: bool) -> None:
        if not backward:
            super().use(place, backward)


@pytest.mark.parametrize("cls", [Early, Hasty, ForwardOnly])
def test_a_slot_that_is_overwritten_too_early_is_noticed(cls: type[Tiers]) -> None:
    resident, tiered = model_of(), model_of()
    tiers_of(tiered, "host:1-5", cls)
    ours, theirs = step(tiered), step(resident)
    assert ours.keys() == theirs.keys()
    assert not same(ours, theirs)


# --- saving


@pytest.mark.parametrize("kind", ["host", "file"])
def test_what_is_saved_comes_from_the_homes(small: Path, kind: str, tmp_path: Path) -> None:
    original = load_model(str(small), "fp32")
    model = load_model(str(small), "fp32", on_disk=range(8) if kind == "file" else ())
    tiers_of(model, f"{kind}:0-7")
    state = model.state_dict()
    logits(model)
    for saved in (state, model.state_dict()):
        assert same(saved, original.state_dict())
    model.save_pretrained(tmp_path / "saved")
    assert same(load_model(str(tmp_path / "saved"), "fp32").state_dict(), original.state_dict())


def test_adapters_do_not_touch_them(tmp_path: Path) -> None:
    resident, tiered = model_of(), model_of()
    tiers_of(tiered, "host:0-5")
    for name, model in (("ours", tiered), ("theirs", resident)):
        step(model)
        model.save_pretrained(tmp_path / name)
    ours, theirs = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("ours", "theirs"))
    assert ours == theirs


# --- figures


def test_figures_count_what_is_over_once() -> None:
    model = model_of()
    tiers = tiers_of(model, "host:0-5")
    step(model)
    figures = tiers.figures()
    assert figures["experts_moved_s"] > 0 and 0 <= figures["experts_hidden"] <= 1
    assert tiers.figures() == {"experts_moved_s": 0, "experts_exposed_s": 0, "experts_hidden": 1.0}
    (line,) = tiers.summary()
    assert line.startswith("experts of 5 layers (0.00 GB) are sent to the device for every use: 0.")
    assert Tiers([], CPU).figures() == {} and Tiers([], CPU).summary() == []


def test_the_hidden_share() -> None:
    assert (hidden(4, 1), hidden(4, 5), hidden(0, 0)) == (0.75, 0.0, 1.0)


# --- the switch


@pytest.mark.parametrize(
    ("text", "kind", "layers"),
    [
        ("device", "device", []),
        ("auto", "auto", []),
        ("host:0-3", "host", [0, 1, 2, 3]),
        ("file:7", "file", [7]),
        ("host:1,3-4,9", "host", [1, 3, 4, 9]),
    ],
)
def test_placements(text: str, kind: str, layers: list[int]) -> None:
    found = parse_placement(text)
    assert (found.kind, sorted(found.layers)) == (kind, layers)
    assert found.on_disk == (set(layers) if kind == "file" else set())


@pytest.mark.parametrize(
    "text", ["", "disk:3", "host", "host:", "device:1", "auto:1", "host:a", "host:1-", "file:1,,2"]
)
def test_placements_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=f"^--experts_in {text} must be device, auto, host:LAYERS or file:LAYERS"):
        parse_placement(text)
    with pytest.raises(ValueError, match="--experts_in host:5,3-1: the range 3-1 must start with its lower layer"):
        parse_placement("host:5,3-1")


@pytest.mark.parametrize(
    ("text", "experts", "model", "message"),
    [
        ("host:0-8", 16, "m", "--experts_in host:0-8: the last layer of m is 7"),
        ("host:0", 16, "m", "no routed experts in these layers of m: its layers 1 to 7 have some"),
        ("host:0-7", 0, "m", "no routed experts in these layers of m: it has none, leave the switch out"),
        ("file:1", 16, "s3://m", "--experts_in file:1: --model s3://m is a URL, copy the checkpoint to a folder"),
    ],
)
def test_placements_that_do_not_fit_the_model(text: str, experts: int, model: str, message: str) -> None:
    config = LatentMoEConfig.tiny(experts=experts)
    with pytest.raises(ValueError) as error:
        check_placement(parse_placement(text), config, model)
    assert message in str(error.value)


def test_trained_experts_are_refused() -> None:
    model = model_of(packed=False, adapter=False)
    with pytest.raises(ValueError, match="--experts_in host:1-3: the experts are trained, freeze them or use device"):
        keep_off_device(model, parse_placement("host:1-3"), CPU)


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(expert_homes.mmap, "mmap", refuse)
    with pytest.raises(OSError, match=r"--experts_in host:1-3: host memory cannot be pinned.*name fewer layers"):
        keep_off_device(model_of(), parse_placement("host:1-3"), CPU)


def test_auto_looks_at_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside everything else, gradients and moments, and a share for activations: what is left is for experts."""
    model, said = model_of(), []
    layers = expert_layers(model)
    layer = sum(p.nbytes for p in layers[1].parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    # with their gradients, two moments and last good values
    others = sum(p.nbytes for p in model.parameters()) - 5 * layer + 4 * trained
    accelerator = SimpleNamespace(
        **{"device": torch.device("cuda"), "num_processes": 1, "is_fsdp2": False, "parallelism_config": None},
        print=said.append,
    )
    auto = parse_placement("auto")
    for room, expected in ((5 * layer, []), (4 * layer, [1, 3, 5]), (0, [1, 2, 3, 4, 5])):
        total = 10 * others
        memory = others + int(placement.ACTIVATIONS * total) + room, total
        monkeypatch.setattr(placement, "_least_memory", lambda device, memory=memory: memory)
        found = decide(auto, model, accelerator, 1)
        assert (found.kind, sorted(found.layers)) == ("host" if expected else "device", expected)
        assert said[-1].startswith(f"--experts_in auto: experts of {len(expected)} of 5 layers in host memory")
    accelerator.device = CPU
    assert decide(auto, model, accelerator, 1).kind == "device"
    given = parse_placement("host:1")
    assert decide(given, model, accelerator, 1) is given


def test_auto_moves_as_few_layers_as_it_must() -> None:
    """Of ten layers of 10 bytes: all fit in 100; below, two slots are taken off what stays."""
    layers = list(range(1, 11))
    assert choose_layers(layers, 10, 100) == []
    assert choose_layers(layers, 10, 99) == [2, 6, 9]
    assert choose_layers(layers, 10, 70) == [2, 4, 6, 8, 10]
    assert choose_layers(layers, 10, 29) == choose_layers(layers, 10, -5) == layers
    for room in range(100):
        chosen = choose_layers(layers, 10, room)
        assert len(set(chosen)) == len(chosen) and set(chosen) <= set(layers)
        assert len(chosen) == 10 or 10 * (10 - len(chosen) + placement.SLOTS) <= room


# --- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_on_a_gpu(kernels: str, recompute: str) -> None:
    """The same bits as on the device, and the memory of two layers; the host's buffers are pinned."""
    device, wide = torch.device("cuda"), {"moe_intermediate_size": 256, "routed_expert_hidden_size": 256}
    config = mixed_config("mmmmmmm", experts=64, num_experts_per_token=4, **wide).to_dict()
    config = LatentMoEConfig(**config | {"quantization_config": LatentMoEMxfp4Config().to_dict()})
    found, peaks = [], []
    for text in ("device", "device", "host:0-6"):
        model = random_model(config)
        # no float atomics, which would give other bits in every run
        model.set_attn_implementation("eager")
        model.config.kernels = kernels
        if recompute == "full":
            checkpoint_activations(model)
        model = with_adapter(model.bfloat16())
        homes = keep_off_device(model, parse_placement(text), device)
        model.to(device)
        tiers = Tiers(homes, device)
        assert all(home.buffer.is_pinned() for home in homes)
        step(model)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found.append([{name: value.cpu() for name, value in step(model).items()} for _ in range(3)])
        peaks.append(torch.cuda.max_memory_allocated())
        layer = sum(p.nbytes for p in expert_layers(model)[1].parameters())
        figures = tiers.figures()
        del model, homes, tiers
        gc.collect()
    first, again, tiered = found
    assert all(map(same, first, again)), "two runs on the device differ"
    assert all(map(same, tiered, first))
    assert peaks[2] <= peaks[1] - (6 - 2) * layer + 2**20
    assert figures["experts_moved_s"] > 0 and 0 <= figures["experts_hidden"] <= 1
