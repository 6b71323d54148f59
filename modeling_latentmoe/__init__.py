"""latentmoe: trillion-scale hybrid-attention sparse-MoE vision-language models in the Hugging Face ecosystem.

The files of this folder are also the remote code that sits beside a checkpoint; start with `modeling_latentmoe.py`.
"""

import importlib.util
import os
import sys

try:
    import torch  # noqa: F401
except RuntimeError as error:
    # torch loads every backend that is installed, and says only that it may be told not to.
    if "torch_npu" not in str(error):
        raise
    raise ImportError(
        "torch-npu is installed but does not load: set the environment of CANN (source set_env.sh), install the "
        "torch-npu of this torch, or run without it: TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    ) from error

if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" and importlib.util.find_spec("torch_npu"):
    # transformers and accelerate import what is installed: one that does not load would stop them.
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        sys.modules["torch_npu"] = None

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
