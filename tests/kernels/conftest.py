"""Kernels of this checkout inside the model: on a GPU where there is one, else in Triton's interpreter."""

import os

import torch

# Triton reads it when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
