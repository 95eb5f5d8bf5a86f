"""Eager PyTorch references: the definition of every operator, and its CPU implementation.

One file per stage. The code is plain enough to check by reading. Loops run over experts that have
rows, never over tokens.
"""
