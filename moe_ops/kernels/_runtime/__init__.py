"""Kernel launches: cached binaries, programmatic dependent launch, cache keys, slot helpers."""
