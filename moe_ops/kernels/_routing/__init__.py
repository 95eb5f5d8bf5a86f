"""Scores, choice and grouping of the routing kernels."""
