"""Triton decides at its import whether kernels are interpreted: before any test module is."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
