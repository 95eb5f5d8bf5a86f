"""Quantization of whole models in place."""

from moe_ops.quantization.quantize import quantize_

__all__ = ["quantize_"]
