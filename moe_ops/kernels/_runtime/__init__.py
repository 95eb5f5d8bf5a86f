"""Launching: binaries, programmatic dependent launch, cache keys, slot helpers."""
