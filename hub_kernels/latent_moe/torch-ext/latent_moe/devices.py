"""One check that every function of this package makes."""

import torch


def check_devices(**tensors: torch.Tensor | None) -> None:
    """ValueError that names the first of the tensors that is on another device than the first of all."""
    found = {name: x.device for name, x in tensors.items() if x is not None}
    name, device = next(iter(found.items()))
    for other, place in found.items():
        if place != device:
            raise ValueError(f"{other}: on {place}, but {name} is on {device}")
