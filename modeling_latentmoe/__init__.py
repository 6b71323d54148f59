"""latentmoe: trillion-scale hybrid-attention sparse-MoE vision-language models in the Hugging Face ecosystem.

The files of this folder are also the remote code that sits beside a checkpoint; start with `modeling_latentmoe.py`.
"""

from .configuration_latentmoe import LatentMoEConfig, LatentMoETextConfig, LatentMoEVisionConfig
from .modeling_latentmoe import LatentMoEForCausalLM, LatentMoEForConditionalGeneration, LatentMoEModel

__all__ = [
    "LatentMoEConfig",
    "LatentMoEForCausalLM",
    "LatentMoEForConditionalGeneration",
    "LatentMoEModel",
    "LatentMoETextConfig",
    "LatentMoEVisionConfig",
]
