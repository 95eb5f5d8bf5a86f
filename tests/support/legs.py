"""Which leg of the operators runs, from `conftest.py`, which scripts find here too."""

import importlib
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
_conftest = importlib.import_module("conftest")
HAS_CUDA: bool = _conftest.HAS_CUDA
INTERPRETED: bool = _conftest.INTERPRETED
ON_HOPPER = HAS_CUDA and torch.cuda.get_device_capability()[0] == 9
