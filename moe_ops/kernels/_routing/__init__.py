"""Scoring and top-k selection inside the routing kernels."""
