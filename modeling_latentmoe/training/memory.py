"""The memory of a device: what a step needs of it at least, and activations that are kept on the host instead.

Legend: D model width, H K heads and their width in KDA, N heads of attention, L latent width of experts, F their hidden
        width, E experts, S chosen experts of a token.
"""

import os
from itertools import pairwise
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from modeling_latentmoe.configuration_latentmoe import LINEAR, LatentMoETextConfig
from modeling_latentmoe.ops import LOGIT_BYTES
from modeling_latentmoe.training.launch import Launch
from modeling_latentmoe.training.layout import shares
from modeling_latentmoe.training.mesh import expert_layers, is_expert
from modeling_latentmoe.training.placement import SLOTS, Placement

# tokens between two states that a KDA kernel keeps for its backward pass
KDA_CHUNK = 64
# saved tensors below this stay on the device: it takes longer to send for them than they are worth
SMALLEST_BYTES = 2**16
GIB = 2**30


class Estimate(NamedTuple):
    """Bytes of a process' device, at least: what it holds all the time, the layers that FSDP gathers for a moment, and
    the activations and logits of a micro-batch."""

    weights: int
    experts: int
    adapters: int
    gradients: int
    moments: int
    last_good: int
    gathered: int
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def table(self, title: str, memory: int) -> str:
        names = {"experts": "experts of its share", "adapters": "adapters (fp32)", "moments": "moments of AdamW"}
        names |= {"last_good": "adapters before the last step", "gathered": "layers that FSDP gathers"}
        lines = [(names.get(name, name), value) for name, value in self._asdict().items()]
        lines += [("in all", self.total), ("there is", memory)]
        return "\n".join([title, *(f"  {name:30}{value / GIB:9.3f} GiB" for name, value in lines)])


class Shape(NamedTuple):
    """What a token's activations depend on: bytes of a number, ranks that share the experts, which layers are computed
    again ("none", "full", "selective"), and whether what is kept for the backward pass is kept on the host."""

    itemsize: int
    ep: int
    recompute: str
    offload: bool


class Room:
    """What a step needs of every device at least, and whether that is there. `__init__` is a collective, and raises
    ValueError where weights and states alone do not fit.

    model: with its adapters and this process' experts, before FSDP shards it. Weights and states are counted, tensor by
    tensor. Activations are those that the leanest kernels keep, with experts that all get as many tokens; temporary
    tensors, images, and memory that the allocator cannot use come on top.
    """

    def __init__(
        self, model: nn.Module, accelerator: Accelerator, ep: int, placement: Placement, recompute: str, offload: bool
    ) -> None:
        self.config, self.device, self.ep = model.config.get_text_config(), accelerator.device, ep
        self.itemsize = next(param.itemsize for param in model.parameters() if param.is_floating_point())
        self.recompute, self.offload = recompute, offload
        world, plugin = accelerator.num_processes, accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
        copies = Launch(1, world, plugin, accelerator.parallelism_config).copies
        # of the first process: no other one has more
        share = next(shares(model, world, ep, copies))
        layers = expert_layers(model)
        out = len(placement.layers & layers.keys())
        # of the layers that live elsewhere there are two at a time
        held = share.expert_bytes * (len(layers) - out + min(SLOTS, out)) // max(1, len(layers))
        gathered = gathered_bytes(model) if copies < world else 0
        states = {"adapters": share.gradient_bytes, "gradients": share.gradient_bytes, "moments": share.moment_bytes}
        self.fixed = Estimate(share.dense_bytes, held, **states, last_good=share.gradient_bytes, gathered=gathered)
        self.memory = least_memory(accelerator.device)
        if self.fixed.total >= self.memory:
            raise ValueError(self._refusal(self.fixed, 0, ""))

    def needed(self, tokens: int) -> Estimate:
        """For a micro-batch of so many tokens, padding included."""
        shape = Shape(self.itemsize, self.ep, self.recompute, self.offload)
        logits = min(LOGIT_BYTES, 4 * self.config.vocab_size * tokens)
        return self.fixed._replace(activations=tokens * activation_bytes(self.config, shape), logits=logits)

    def check(self, tokens: int, switches: str) -> str:
        """A table of what is needed for the largest micro-batch of any process, this one's has `tokens`; a collective.
        ValueError with what to change, such as `switches`, where the smallest device has less memory than that."""
        most = torch.tensor(tokens, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        needed = self.needed(int(most))
        if needed.total > self.memory:
            raise ValueError(self._refusal(needed, int(most), switches))
        return needed.table(f"memory of a process, at least, for micro-batches of {int(most):,} tokens:", self.memory)

    def _refusal(self, needed: Estimate, tokens: int, switches: str) -> str:
        fault = f"a step needs at least {needed.total / GIB:.3f} GiB, but a device has {self.memory / GIB:.3f} GiB"
        if self.fixed.total >= self.memory:
            return f"{fault}, and most of it is weights: use more devices with FSDP, a larger --ep or --experts_in auto"
        fitting = int((self.memory - self.fixed.total) * tokens / (needed.total - self.fixed.total))
        ways = [f"lower {switches}, to at most {fitting:,} tokens in a micro-batch"]
        ways += ["--gradient_checkpointing full"] if self.recompute == "none" else []
        ways += [] if self.offload else ["--offload_activations"]
        return f"{fault}: {', or '.join(ways)}"

    def most_rows(self, length: int, limit: int) -> int:
        """How many samples of `length` tokens have room by the estimate, at least 1 and at most `limit`."""
        of_one = self.needed(length).total - self.fixed.total
        return max(1, min(limit, (self.memory - self.fixed.total) // of_one))


def gathered_bytes(model: nn.Module) -> int:
    """Of layers that FSDP holds whole at once: two neighbours, and the second one also as it came."""
    base = model.get_base_model()
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    sizes = [
        sum(param.nbytes for name, param in unit.named_parameters(prefix="unit") if not is_expert(name))
        for unit in (base.get_input_embeddings(), *layers, base.get_output_embeddings())
    ]
    return max(one + 2 * two for one, two in pairwise(sizes))


def activation_bytes(config: LatentMoETextConfig, shape: Shape) -> int:
    """What the text layers keep of a token for the backward pass, and one layer that is computed again."""
    whole = [layer_bytes(config, layer, shape) for layer in range(config.num_hidden_layers)]
    # what enters the layer, and the routing, which is never decided again
    chosen = 12 * (config.num_experts_per_token or 0)
    entering = config.hidden_size * shape.itemsize + chosen
    if shape.recompute == "selective":
        entering += _rows(config, shape) * config.expert_hidden_size * shape.itemsize
    if shape.recompute == "none":
        kept, again = sum(whole), 0
    else:
        kept, again = len(whole) * entering, max(whole)
    return max(whole) if shape.offload else kept + again


def _rows(config: LatentMoETextConfig, shape: Shape) -> int:
    """Rows that come to a rank for a token: one from each rank that has an expert which a token chose."""
    return min(shape.ep, config.num_experts_per_token or 0) if shape.ep > 1 else 0


def layer_bytes(config: LatentMoETextConfig, layer: int, shape: Shape) -> int:
    """Of one layer and token, without recomputation."""
    D, size = config.hidden_size, shape.itemsize
    # the stream after either half, mixed and normed inputs of both
    numbers = 6 * D
    if config.layer_types[layer] == LINEAR:
        H, K = (config.linear_attn_config[name] for name in ("num_heads", "head_dim"))
        # q, k, v before and after the convolution, decay, gate, output before and after its norm; fp32 states
        numbers += 10 * H * K
        extra = 4 * H * K * K // KDA_CHUNK
    else:
        N, shared = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        numbers += 2 * config.q_lora_rank + 2 * config.kv_lora_rank + 2 * N * shared + 4 * N * config.v_head_dim
        extra = 4 * N
    if not config.is_moe_layer(layer):
        return size * (numbers + 3 * config.intermediate_size) + extra
    L, F, S = config.expert_hidden_size, config.moe_intermediate_size, config.num_experts_per_token
    # gate, up and their product, of each chosen expert and the shared ones; latents before and after
    numbers += 3 * F * (S + (config.num_shared_experts or 0)) + (3 + _rows(config, shape)) * L
    return size * numbers + extra + 4 * config.num_experts + 12 * S


def least_memory(device: torch.device) -> int:
    """Bytes that the process with the least could have: of its device, or its share of the machine."""
    if device.type == "cpu":
        total = psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        total = torch.get_device_module(device).mem_get_info(device)[1]
    least = torch.tensor(total, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def offload_activations(model: nn.Module) -> None:
    """Keep what `model` computes for the backward pass in host memory, pinned where there is an accelerator.

    Copies are launched on the stream that computes: the host waits for none, and computation for each. Weights stay.
    """
    forward = model.forward

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(_to_host, _to_device):
            return forward(*args, **kwargs)

    model.forward = offloaded


class _Kept(NamedTuple):
    value: Tensor
    device: torch.device


def _to_host(tensor: Tensor) -> Tensor | _Kept:
    owner = tensor if tensor._base is None else tensor._base
    if isinstance(owner, nn.Parameter) or not tensor.is_floating_point() or tensor.nbytes < SMALLEST_BYTES:
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    return _Kept(host.copy_(tensor, non_blocking=True), tensor.device)


def _to_device(kept: Tensor | _Kept) -> Tensor:
    return kept.value.to(kept.device, non_blocking=True) if isinstance(kept, _Kept) else kept
