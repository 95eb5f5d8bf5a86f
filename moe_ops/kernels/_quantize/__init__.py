"""Rounding and row quantization shared by the quantizing kernels."""
