"""Quantization schemes: small frozen values with names.

A scheme says how the activations and the weights of a layer are stored. Everything that follows
from it (scale shapes, bytes per weight) is derived here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

WHOLE = -1
"""A group that spans the whole axis."""


class Group(NamedTuple):
    """The elements that share one scale: ``rows`` x ``cols`` of the 2-D operand."""

    rows: int
    cols: int


@dataclass(frozen=True)
class Quant:
    """One operand's stored dtype and the group of elements that shares a scale."""

    dtype: torch.dtype
    group: Group


@dataclass(frozen=True)
class Scheme:
    """A named quantization scheme; ``None`` means the operand is not quantized."""

    name: str
    activation: Quant | None
    weight: Quant | None


UNQUANTIZED = Scheme("unquantized", None, None)
SCHEMES: dict[str, Scheme] = {s.name: s for s in (UNQUANTIZED,)}


def get_scheme(name: str) -> Scheme:
    """The scheme called ``name``; ValueError with the known names for any other."""
    if name not in SCHEMES:
        raise ValueError(f"scheme must be one of {sorted(SCHEMES)}, got {name!r}")
    return SCHEMES[name]
