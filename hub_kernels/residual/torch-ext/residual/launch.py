"""How many programs a persistent kernel gets."""

import torch


def persistent_programs(device: torch.device, per_processor: int, rows: int) -> int:
    """Enough programs to fill the GPU, at most one per row; the count fixes the order of every sum over rows."""
    # Triton's interpreter runs on CPU tensors: two programs show what sharing the rows does.
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return min(rows, per_processor * processors)
