"""Which kernels are launched, and names of their constants."""

from dataclasses import asdict

import pytest
import torch
from legs import HAS_CUDA


def blocks(tiles):
    """The tiles of a GEMM, by the names of its kernel's constants."""
    return {
        name.upper() if name.startswith(("block", "group", "on_")) else name: value
        for name, value in asdict(tiles).items()
    }


def launched_kernels(monkeypatch):
    """The names of the kernels that are launched from now on."""
    pytest.importorskip("triton")
    from moe_ops.kernels._runtime.launch import Launch

    names, launch = [], Launch.__call__

    def record(self, *arguments):
        names.append(self.kernel.__name__)
        launch(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", record)
    return names


def launched_hopper_kernels(monkeypatch):
    """The names of the kernels of Hopper's that are launched from now on."""
    if not HAS_CUDA or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from moe_ops.kernels._hopper import gemm as hopper_gemm

    names, run = [], hopper_gemm.HopperGemm.__call__

    def counted(self, *arguments):
        fetches = self.constants.FETCHES
        names.append("fetched" if fetches else "packed" if self.alone else "stream")
        return run(self, *arguments)

    monkeypatch.setattr(hopper_gemm.HopperGemm, "__call__", counted)
    return names
