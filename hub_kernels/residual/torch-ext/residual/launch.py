"""Where kernels run, and in how many programs: CUDA devices, and Ascend by Triton-Ascend."""

from functools import cache
from typing import Any

import torch
import triton

# What torch-npu calls torch's other device when it is imported; `kernels` chooses the variant by it, too.
ASCEND = torch._C._get_privateuse1_backend_name() == "npu"


def persistent_programs(device: torch.device, per_processor: int, rows: int) -> int:
    """Enough programs to fill the device, at most one per row; the count fixes the order of every sum over rows."""
    # Triton's interpreter runs on CPU tensors: two programs show what sharing the rows does.
    programs = 2 * per_processor
    if device.type == "cuda":
        programs = per_processor * torch.cuda.get_device_properties(device).multi_processor_count
    elif ASCEND:
        programs = vector_cores(device)
    return min(rows, programs)


@cache
def vector_cores(device: torch.device) -> int:
    """Programs that Ascend runs at once: each has a core, and more of them wait for their turn."""
    if device.type != "npu":
        return 2
    index = torch.npu.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["num_vectorcore"]


def launch(kernel: Any, programs: int, x: torch.Tensor, *arguments: Any, **constants: int) -> None:
    """Run this many programs on the device of x. On Ascend there are no warps, and a launch of nothing is refused."""
    if ASCEND:
        constants.pop("num_warps", None)
    if programs:
        with torch.npu.device_of(x) if x.device.type == "npu" else torch.cuda.device_of(x):
            kernel[(programs,)](*arguments, **constants)
