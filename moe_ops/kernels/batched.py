"""Triton kernels of the stage (being written)."""

from typing import Any


def batched_dispatch(*args: Any) -> Any:
    """Not yet."""
    raise NotImplementedError("batched_dispatch must run on the CPU, got CUDA")


def batched_rows(*args: Any) -> Any:
    """Not yet."""
    raise NotImplementedError("batched_rows must run on the CPU, got CUDA")


def batched_activation(*args: Any) -> Any:
    """Not yet."""
    raise NotImplementedError("batched_activation must run on the CPU, got CUDA")


def batched_quantize(*args: Any) -> Any:
    """Not yet."""
    raise NotImplementedError("batched_quantize must run on the CPU, got CUDA")


def batched_activation_quantize(*args: Any) -> Any:
    """Not yet."""
    raise NotImplementedError("batched_activation_quantize must run on the CPU, got CUDA")
