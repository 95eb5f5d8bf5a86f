"""Triton kernels and their launchers: one file a stage, one launcher an operator.

Imported when a CUDA operator first runs. A launcher allocates through `moe_ops.fake_impls`, sizes
its grid from upper bounds (counts stay on the device), and never specialises on a token count.
"""
