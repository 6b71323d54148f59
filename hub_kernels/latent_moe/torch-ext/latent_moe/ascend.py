"""Ascend, where kernels are compiled by Triton-Ascend: whether this is one, and how many programs it runs at once."""

from functools import cache

import torch
import triton

# What torch-npu calls torch's other device when it is imported; `kernels` chooses the variant by it, too.
ASCEND = torch._C._get_privateuse1_backend_name() == "npu"


@cache
def vector_cores(device: torch.device) -> int:
    """Programs that run at once: each has a core, and more of them wait for their turn."""
    # Triton's interpreter runs on CPU tensors: two programs show what sharing the blocks does.
    if device.type != "npu":
        return 2
    index = torch.npu.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["num_vectorcore"]


def device_of(x: torch.Tensor):
    """A context in which kernels are launched on the device of x."""
    return torch.npu.device_of(x) if x.device.type == "npu" else torch.cuda.device_of(x)
