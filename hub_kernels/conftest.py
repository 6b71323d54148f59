"""Makes the packages importable, on a GPU where there is one, else in Triton's interpreter (../conftest.py)."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

for file in sorted(Path(__file__).parent.glob("*/torch-ext/*/__init__.py")):
    folder = file.parent
    sys.path.insert(0, str(folder.parent))
    # The model's loader finds this copy: torch destroys the operators of a first copy when a second one defines them.
    sys.modules[f"latentmoe_{folder.name}_source"] = importlib.import_module(folder.name)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
