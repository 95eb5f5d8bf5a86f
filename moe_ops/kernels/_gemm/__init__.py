"""Tiles of the portable expert GEMM kernels."""
