"""Triton kernels of the expert GEMMs of which only the weights are quantized: to be written."""

from __future__ import annotations

from typing import Any


def weight_only_gemm(*args: Any) -> Any:
    raise NotImplementedError("weight_only_gemm has no kernel yet")


def weight_only_gemm_act(*args: Any) -> Any:
    raise NotImplementedError("weight_only_gemm_act has no kernel yet")
