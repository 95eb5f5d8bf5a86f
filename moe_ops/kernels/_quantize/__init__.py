"""Rounding, row loading and kernels of quantization."""
