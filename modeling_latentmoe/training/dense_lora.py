"""The only file that knows how PEFT computes the adapter of a dense layer.

PEFT casts the layer's input to the dtype of the factors, which is fp32, keeps that copy for backward, and makes,
scales and adds an fp32 output. `ops.add_low_rank` computes the same function without them, on kernels where there are
some. Creation, names, saving and loading stay PEFT's. Written against peft 0.21, whose `Linear.forward` hands over to
`lora_variant[adapter]` where there is one.

Legend: I and O input and output width of a layer, r adapter rank.
"""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear, LoraVariant
from torch import Tensor, nn
from transformers import PreTrainedConfig

from modeling_latentmoe.ops import add_low_rank


class FusedVariant(LoraVariant):
    """Plain LoRA on a dense layer, its products by `add_low_rank`. `config.kernels` chooses where they are computed."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    def forward(self, module: Linear, *, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        a_rI, b_Or = (factors[active_adapter].weight for factors in (module.lora_A, module.lora_B))
        return add_low_rank(result, x, a_rI, b_Or, module.scaling[active_adapter], self.config.kernels)

    # As PEFT merges an adapter that has no variant.

    @staticmethod
    def merge_safe(module: Linear, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: Linear, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data += module.get_delta_weight(active_adapter)

    @staticmethod
    def unmerge(module: Linear, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight.data - module.get_delta_weight(active_adapter).to(orig_weight.dtype)


class FusedLinear(Linear):
    """PEFT's dense layer, whose input keeps its dtype as long as all adapters in use are fused."""

    def _cast_input_dtype(self, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        used = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        if all(isinstance(self.lora_variant.get(adapter), FusedVariant) for adapter in used):
            return x
        return super()._cast_input_dtype(x, dtype)


def fuse_dense(model: PeftModel) -> None:
    """Let every dense layer of `model` compute its adapters by `add_low_rank`, as far as they are plain LoRA.

    Adapters with dropout, a bias or a variant of PEFT's, and those that PEFT adds later, keep PEFT's forward.
    """
    variant = FusedVariant(model.get_base_model().config.get_text_config())
    for module in model.modules():
        if type(module) in (Linear, FusedLinear):
            module.lora_variant.update({adapter: variant for adapter in module.lora_A if _is_plain(module, adapter)})
            module.__class__ = FusedLinear


def _is_plain(module: Linear, adapter: str) -> bool:
    return (
        isinstance(module.lora_variant.get(adapter), FusedVariant | None)
        and isinstance(module.lora_dropout[adapter], nn.Identity)
        and not module.lora_bias[adapter]
    )
