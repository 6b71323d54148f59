"""Expert parallelism on several gloo processes, against one process that holds everything."""

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from processes import spawn
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.moe import LatentMoE, LocalExchange
from modeling_latentmoe.training import lora
from modeling_latentmoe.training.data import Sample, pack
from modeling_latentmoe.training.expert_adapters import (
    gather_adapter,
    initialise_adapters,
    slice_factor,
)
from modeling_latentmoe.training.expert_parallel import AllToAll, Travel, count_drops, drop_excess, expert_parallel
from modeling_latentmoe.training.gradients import clip_grad_norm, exclude_experts_from_ddp, reduce_expert_gradients
from modeling_latentmoe.training.links import Direct
from modeling_latentmoe.training.loading import checkpoint_activations
from modeling_latentmoe.training.loss import IGNORE, count_loss_tokens
from modeling_latentmoe.training.mesh import build_mesh, is_expert, owned_experts
from modeling_latentmoe.training.streaming import restrict_experts

pytestmark = pytest.mark.dist

# --- dispatch and combine ---


def rounds(rank: int, world: int) -> int:
    """100 rounds in which every expert returns weight * (its id + 1) * x; returns how many rows came in all."""
    share, slots, width = 5, 4, 8
    experts, exchange = share * world, AllToAll(Direct(dist.group.WORLD), share * world)
    received = 0
    for step in range(100):
        dice = random.Random(step * 1000 + rank)
        torch.manual_seed(step * 1000 + rank)
        tokens = dice.choice([0, 0, 1, 2, 5, 17])
        # the first rounds: every token to one rank, to no rank but the last, ...
        allowed = torch.randperm(experts)[: dice.choice([slots, slots, experts])]
        ids = torch.stack(
            [allowed[torch.randperm(len(allowed))[:slots]] for _ in range(tokens)] or [ids_of_none(slots)]
        )
        ids = ids[:tokens]
        x = torch.randint(-8, 9, (tokens, width)).double().requires_grad_(step % 2 == rank % 2)
        weights = torch.randint(1, 5, (tokens, slots)).double().requires_grad_(rank == 0)
        sent = exchange.dispatch(x, ids, weights)
        mine = owned_experts(rank, world, experts)
        held = (sent.ids_RS >= mine.start) & (sent.ids_RS < mine.stop)
        assert held.any(1).all(), "a row without an expert of this rank"
        received += len(sent.x_RL)
        factor = (sent.weights_RS * (sent.ids_RS + 1) * held).sum(1, keepdim=True)
        y = exchange.combine(factor * sent.x_RL, sent)
        # small integers: every order of summation gives the same bits
        assert torch.equal(y, (weights * (ids + 1)).sum(1, keepdim=True) * x)
        cotangent = torch.randint(-3, 4, y.shape).double()
        (y * cotangent).sum().backward()
        if x.requires_grad:
            assert torch.equal(x.grad, (weights * (ids + 1)).sum(1, keepdim=True) * cotangent)
        if weights.requires_grad:
            assert torch.equal(weights.grad, (ids + 1) * (x * cotangent).sum(1, keepdim=True))
    return received


def ids_of_none(slots: int) -> Tensor:
    return torch.zeros(slots, dtype=torch.int64)


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 6))])
def test_dispatch_then_combine_is_exact(tmp_path: Path, world: int) -> None:
    """Public report 48: random splits, empty ones too, worlds that are no powers of two, ranks whose inputs have no
    gradient beside others that have one; values and both gradients equal to the bit."""
    assert all(count > 100 for count in spawn(tmp_path / "world", world, rounds))


# --- the model: logits, loss and gradients of one process ---

EXPERTS = 16
# dtype, recomputed activations, who averages the gradients of what is replicated
CASES = [(torch.float64, False, "DDP"), (torch.float64, True, "FSDP2"), (torch.float32, True, "test")]
# (prompt tokens, trained tokens) of the documents of four ranks: uneven, one rank trains on nothing
DOCUMENTS = [[(3, 17), (2, 12)], [(4, 1)], [(1, 9), (5, 4), (2, 3)], [(11, 0)]]


def documents_of(groups: list[list[tuple[int, int]]]) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for prompt, trained in (pair for group in groups for pair in group):
        ids = torch.randint(0, 250, (prompt + trained,), generator=generator)
        labels = torch.cat([torch.full((prompt,), IGNORE), ids[prompt:]])
        found.append(Sample(ids, labels))
    return found


def batches_of(world: int) -> list[dict[str, Tensor]]:
    """A packed row for every one of `world` processes; together always the same documents."""
    each = [DOCUMENTS[rank * 4 // world : (rank + 1) * 4 // world] for rank in range(world)]
    every, packed = iter(documents_of(DOCUMENTS)), []
    for groups in each:
        packed.append(pack([next(every) for group in groups for _ in group]))
    return packed


def build(dtype: torch.dtype, checkpointing: bool, ep_rank: int, ep_degree: int) -> torch.nn.Module:
    """Packed experts, adapters with second factors that are not zero, and a router that trains."""
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False)).train()
    restrict_experts(model, ep_rank, ep_degree)
    model = lora.add_adapter(model, r=4, lora_alpha=8, expert_rank=2).to(dtype)
    initialise_adapters(model, seed=0)
    owned = owned_experts(ep_rank, ep_degree, EXPERTS)
    for name, param in model.named_parameters():
        if name.endswith("block_sparse_moe.gate.weight"):
            param.requires_grad_(True)
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            columns = param.shape[1] * (ep_degree if is_expert(name) else 1)
            values = torch.randn(len(param), columns, generator=generator) * 0.1
            param.data.copy_(slice_factor(name, values, owned, EXPERTS) if is_expert(name) else values)
    if checkpointing:
        checkpoint_activations(model.base_model.model)
    return model


def step(model: torch.nn.Module, batch: dict[str, Tensor], world: int) -> dict:
    """Forward and backward by the loss rule; logits, sum of token losses and expert load of this process."""
    tokens = sum(count_loss_tokens(batch["labels"]) for batch in batches_of(1))
    output = model(**batch, num_items_in_batch=1)
    loss = output.loss
    (loss * world / tokens).backward()
    return {"logits": output.logits.detach()[0].clone(), "loss": loss.item() / tokens, "load": output.expert_load}


def single(dtype: torch.dtype) -> dict:
    """What one process computes on all documents."""
    model = build(dtype, False, 0, 1)
    (batch,) = batches_of(1)
    result = step(model, batch, 1)
    grads = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
    norm = torch.cat([grad.double().flatten() for grad in grads.values()]).norm().item()
    return {**result, "norm": norm, "grads": grads}


def share(rank: int, world: int, ep: int) -> list[dict]:
    """What this process computes in each dtype, with and without recomputation."""
    mesh = build_mesh(world, ep, "cpu")
    results = []
    for dtype, checkpointing, averaging in CASES:
        model = build(dtype, checkpointing, mesh.get_local_rank("ep"), ep)
        expert_parallel(model, mesh)
        wrapped = model
        if averaging == "DDP":
            exclude_experts_from_ddp(model)
            wrapped = DistributedDataParallel(model)
        elif averaging == "FSDP2":
            experts = {param for name, param in model.named_parameters() if is_expert(name)}
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=experts)
        result = step(wrapped, batches_of(world)[rank], world)
        reduce_expert_gradients(model, mesh)
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        for name, param in trained.items():
            if not is_expert(name) and averaging == "test":
                dist.all_reduce(param.grad)
                param.grad /= world
        result["norm"], result["norms"] = clip_grad_norm(model, mesh, 1e9)
        assert clip_grad_norm(model, mesh, 1e-3).total == pytest.approx(result["norm"])
        assert clip_grad_norm(model, mesh, 1e9).total == pytest.approx(1e-3, rel=1e-2)
        result["grads"] = {}
        for name, param in trained.items():
            # in the place of the values, for `gather_adapter`; not clipped any more
            param.detach().copy_(param.grad * ((result["norm"] + 1e-6) / 1e-3))
            if "lora_" not in name:
                result["grads"][name] = param.full_tensor().detach() if averaging == "FSDP2" else param.detach()
        result["grads"] |= gather_adapter(model, mesh)
        results.append(result)
    return results


def norms_by_target(grads: dict[str, Tensor]) -> dict[str, float]:
    """Public report 39: norms of the gradients of each target, both matrices of the experts apart."""
    squares: dict[str, float] = {}
    for name, grad in grads.items():
        owner = name.partition(".lora_")[0]
        target = owner.rpartition(".")[2] if ".lora_" in name else name
        if is_expert(name):
            # PEFT's inner wrapper is that of the first stack
            target = "experts.gate_up_proj" if target == "base_layer" else "experts.down_proj"
        squares[target] = squares.get(target, 0.0) + grad.double().square().sum().item()
    return {target: square**0.5 for target, square in squares.items()}


@pytest.fixture(scope="module")
def reference() -> dict[torch.dtype, dict]:
    return {dtype: single(dtype) for dtype in (torch.float64, torch.float32)}


def close(ours: Tensor, theirs: Tensor, limit: float) -> bool:
    return bool((ours - theirs).norm() <= limit * theirs.norm())


@pytest.mark.parametrize(
    ("world", "ep"),
    [(2, 2), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in ((4, 2), (4, 4), (4, 1), (2, 1)))],
)
def test_shares_compute_what_one_process_does(tmp_path: Path, reference: dict, world: int, ep: int) -> None:
    """Public reports 33, 41, 44, 45, 56, 60: logits, loss, gradients of adapters and router, global norm and expert
    load, with uneven data, experts without tokens and a process that trains on nothing."""
    found = spawn(tmp_path / "world", world, share, ep)
    for case, (dtype, checkpointing, averaging) in enumerate(CASES):
        theirs, limit = reference[dtype], 1e-9 if dtype == torch.float64 else 1e-5
        ours = [ranks[case] for ranks in found]
        assert close(torch.cat([result["logits"] for result in ours]), theirs["logits"], limit)
        assert sum(result["loss"] for result in ours) == pytest.approx(theirs["loss"], rel=limit)
        assert torch.equal(sum(result["load"] for result in ours), theirs["load"])
        assert [result["norm"] for result in ours] == [pytest.approx(theirs["norm"], rel=limit)] * world
        assert [result["norms"] for result in ours] == [
            pytest.approx(norms_by_target(theirs["grads"]), rel=limit)
        ] * world
        assert ours[0]["grads"].keys() == theirs["grads"].keys()
        for name, grad in theirs["grads"].items():
            assert close(ours[0]["grads"][name], grad, limit), (
                f"{name}, {dtype}, checkpointing {checkpointing}, {averaging}"
            )


# --- one process: the exchange by itself ---


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def moe(experts: int = EXPERTS) -> LatentMoE:
    torch.manual_seed(0)
    layer = LatentMoE(LatentMoEConfig.tiny(vision=False, experts=experts).text_config)
    for param in layer.parameters():
        if param.is_floating_point():
            torch.nn.init.normal_(param, std=0.3)
    layer.experts.reset_parameters(0.3)
    return layer.to(torch.bfloat16)


def test_a_group_of_one_is_the_local_exchange(alone: dist.ProcessGroup) -> None:
    """In bf16, values and gradients to the bit: rows, weights and sums make the journey unharmed."""
    results = []
    for exchange in (LocalExchange(), AllToAll(Direct(alone), EXPERTS)):
        layer = moe()
        layer.exchange = exchange
        torch.manual_seed(1)
        x = torch.randn(2, 9, 64, dtype=torch.bfloat16, requires_grad=True)
        y, _, load = layer(x, torch.arange(18).view(2, 9) % 5 > 0)
        y.square().sum().backward()
        results.append((y, load, x.grad, layer.gate.weight.grad, layer.routed_expert_down_proj.weight.grad))
    for local, travelled in zip(*results, strict=True):
        assert torch.equal(local, travelled)


def test_sums_are_rounded_once() -> None:
    """The local exchange gives what the experts' fp32 sum is in the model's dtype; the experts do not round."""
    layer = moe()
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    ids, weights = torch.arange(20).view(5, 4) % EXPERTS, torch.rand(5, 4)
    total = layer.experts(x, ids, weights, {})
    assert total.dtype == torch.float32
    assert torch.equal(layer.exchange.combine(total, layer.exchange.dispatch(x, ids, weights)), total.bfloat16())


def test_sums_can_travel_in_bf16(alone: dist.ProcessGroup) -> None:
    """A switch: half the bytes on the way back, and an error of a bf16 rounding."""
    x, ids, weights = torch.randn(40, 32), torch.arange(160).view(40, 4) % EXPERTS, torch.rand(40, 4)
    exchange = AllToAll(Direct(alone), EXPERTS, travel=Travel(sums="bf16"))
    total = torch.randn(40, 32)
    y = exchange.combine(total, exchange.dispatch(x, ids, weights))
    assert y.dtype == torch.float32 and torch.equal(y, total.bfloat16().float())


def test_capacity_drops_the_latest_and_counts_them(alone: dist.ProcessGroup) -> None:
    """8 tokens for 2 of 4 experts each: 16 places; at factor 1 an expert takes 4."""
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 3], [0, 1], [0, 2], [0, 1], [0, 1]])
    kept = drop_excess(ids, 4, 1.0)
    assert kept.tolist() == [[0, 1], [0, 1], [0, 2], [0, 3], [-1, 1], [-1, 2], [-1, 1], [-1, -1]]
    load = torch.bincount(ids.flatten(), minlength=4).unsqueeze(0)
    assert count_drops(load, 1.0) == int((kept < 0).sum()) == 5
    assert count_drops(load.repeat(3, 1), 1.0) == 15
    assert count_drops(load, 2.0) == 0 and torch.equal(drop_excess(ids, 4, 2.0), ids)
    x, weights = torch.randn(8, 5, requires_grad=True), torch.rand(8, 2, requires_grad=True)
    exchange = AllToAll(Direct(alone), 4, capacity_factor=1.0)
    sent = exchange.dispatch(x, ids, weights)
    assert len(sent.x_RL) == 7, "a token that lost all its experts does not travel"
    held = sent.ids_RS >= 0
    y = exchange.combine((sent.weights_RS * held).sum(1, keepdim=True) * sent.x_RL, sent)
    expected = (weights * (kept >= 0)).sum(1, keepdim=True) * x
    assert torch.allclose(y, expected) and (y[7] == 0).all()
    y.sum().backward()
    assert torch.allclose(weights.grad, (kept >= 0) * x.detach().sum(1, keepdim=True))
    assert (x.grad[7] == 0).all()


def test_nothing_is_dropped_in_evaluation(alone: dist.ProcessGroup) -> None:
    """A token's output must not depend on the others of its batch, and nobody would count the drops."""
    ids, x, weights = torch.zeros(8, 1, dtype=torch.int64), torch.randn(8, 5), torch.rand(8, 1)
    exchange = AllToAll(Direct(alone), 4, capacity_factor=0.5)
    assert len(exchange.dispatch(x, ids, weights).x_RL) == 1
    with torch.no_grad():
        assert len(exchange.dispatch(x, ids, weights).x_RL) == 8


def test_the_timeout_reaches_the_groups_of_the_mesh(alone: dist.ProcessGroup) -> None:
    mesh = build_mesh(1, 1, "cpu", timedelta(seconds=7))
    for axis in ("efsdp", "ep"):
        options = mesh.get_group(axis)._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(seconds=7)


def test_no_tokens_and_no_gradient(alone: dist.ProcessGroup) -> None:
    exchange = AllToAll(Direct(alone), EXPERTS)
    with torch.no_grad():
        empty = exchange.dispatch(torch.empty(0, 32), torch.empty(0, 4, dtype=torch.int64), torch.empty(0, 4))
        assert exchange.combine(empty.x_RL, empty).shape == (0, 32)
        assert not empty.x_RL.requires_grad


def test_what_the_loss_does_not_use_has_a_gradient_of_zeros(alone: dist.ProcessGroup) -> None:
    """The collectives of the backward pass are taken for it too: other ranks may wait there."""
    exchange, ids = AllToAll(Direct(alone), EXPERTS), torch.arange(12).view(3, 4)
    for used in ("x_RL", "weights_RS"):
        x, weights = torch.randn(3, 32, requires_grad=True), torch.rand(3, 4, requires_grad=True)
        getattr(exchange.dispatch(x, ids, weights), used).sum().backward()
        assert torch.equal(x.grad, torch.full((3, 32), float(used == "x_RL")))
        assert torch.equal(weights.grad, torch.full((3, 4), float(used == "weights_RS")))


def test_a_model_with_other_experts_is_refused(alone: dist.ProcessGroup) -> None:
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False))
    restrict_experts(model, 1, 2)
    with pytest.raises(ValueError, match=r"experts 8 to 15, but rank 0 of --ep 1 holds 0 to 15"):
        expert_parallel(model, build_mesh(1, 1, "cpu"))
    with pytest.raises(ValueError, match="--capacity_factor 0"):
        expert_parallel(model, build_mesh(1, 1, "cpu"), capacity_factor=0)


def test_degree_one_moves_nothing(alone: dist.ProcessGroup) -> None:
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False))
    expert_parallel(model, build_mesh(1, 1, "cpu"))
    assert {type(module.exchange) for module in model.modules() if "exchange" in module.__dict__} == {LocalExchange}


# --- images on some processes only, generation, files ---


def one_image(rank: int, world: int) -> dict:
    """Experts, projector and nothing in between train; process 0 has an image, the others have text."""
    mesh = build_mesh(world, world, "cpu")
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny()).train().double()
    restrict_experts(model, rank, world)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = lora.add_adapter(
        model, r=4, lora_alpha=8, expert_rank=2, target_modules=targets, train_projector=True
    ).double()
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(param, 0.05)
    expert_parallel(model, mesh)
    media = model.config.media_placeholder_token_id
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(model.base_model.model)
        batch = {"input_ids": torch.tensor([[5, 6, 7, 8][: rank + 2]])}
        if rank == 0:
            batch["input_ids"] = torch.tensor([[5, media, 6]])
            batch |= {"pixel_values": torch.randn(4, 3, 14, 14).double(), "grid_thws": torch.tensor([[1, 2, 2]])}
        model(**batch).logits.square().sum().backward()
    grads = {name: param.grad for name, param in model.named_parameters() if "lora_" in name}
    return {
        "experts": all(grads[name].any() for name in grads if is_expert(name)),
        "finite": [name for name, grad in grads.items() if grad is not None and not grad.isfinite().all()],
    }


def test_text_beside_images(tmp_path: Path) -> None:
    """Public reports 87, 88: the first experts' inputs have a gradient on the process with the image alone."""
    for result in spawn(tmp_path / "world", 2, one_image):
        assert result == {"experts": True, "finite": []}


PROMPTS = [list(range(3, 12)), [20, 21]]
NEW_TOKENS = [3, 9]


def answer(model: torch.nn.Module, which: int) -> list[int]:
    ids = torch.tensor([PROMPTS[which]])
    return model.generate(ids, max_new_tokens=NEW_TOKENS[which], do_sample=False, eos_token_id=None, synced_gpus=True)[
        0
    ].tolist()


def answers(rank: int, world: int) -> list[int]:
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False)).double().eval()
    restrict_experts(model, rank, world)
    expert_parallel(model, build_mesh(world, world, "cpu"))
    return answer(model, rank)


def test_answers_of_different_lengths(tmp_path: Path, alone: dist.ProcessGroup) -> None:
    """A process that is done keeps stepping for the experts it holds: nobody waits forever, answers are the same."""
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False)).double().eval()
    expected = [answer(model, which) for which in range(2)]
    assert [len(ids) for ids in expected] == [12, 11]
    assert spawn(tmp_path / "world", 2, answers) == expected


def saved(rank: int, world: int, ep: int, folder: str) -> None:
    mesh = build_mesh(world, ep, "cpu")
    model = build(torch.float32, False, mesh.get_local_rank("ep"), ep)
    whole = gather_adapter(model, mesh)
    assert bool(whole) == (rank == 0)
    model.save_pretrained(folder, state_dict=whole, is_main_process=rank == 0)


@pytest.mark.parametrize(("world", "ep"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_the_file_is_whole(tmp_path: Path, world: int, ep: int) -> None:
    """Public report 36: every layer and every expert once, as one process writes it; stock PEFT reads it."""
    spawn(tmp_path / "world", world, saved, ep, str(tmp_path / "shared"))
    model = build(torch.float32, False, 0, 1)
    model.save_pretrained(tmp_path / "single")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("shared", "single"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.manual_seed(0)
    base = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False))
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "shared"))
    ids = torch.arange(1, 13).view(1, 12)
    assert torch.equal(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
