"""Eager PyTorch: what every operator computes, and its implementation on devices without a kernel.

One file a stage. Plain enough to check by reading; loops run over experts that have rows, never
over tokens.
"""
