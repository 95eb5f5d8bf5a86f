"""How many experts of each layer are resident: an int, a share, or a number of gigabytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

GIGABYTE = 10**9
RULE = (
    "must be an int from top_k to the number of experts, a float in (0, 1] (the share of the "
    'experts, at least top_k) or a size such as "20GB"'
)


class Amount(NamedTuple):
    """The sizes of one layer on which its number of resident experts depends."""

    num_experts: int
    """E of the rank."""
    top_k: int
    expert_bytes: int
    """Bytes of one expert, both weights with scales, zero points and biases."""


def parse_amount(name: str, value: Any, layers: Sequence[Amount]) -> list[int]:
    """Return the number of resident experts of each layer.

    A number of gigabytes (1e9 bytes) is what the slots of all layers may take together. Each layer
    gets the same share of its experts, rounded down, and at least ``top_k``.

    Args:
        name: the argument's name in errors.
        value: an int, a float in (0, 1], or a text such as ``"20GB"``.
        layers: the layers.

    Raises:
        TypeError: another type.
        ValueError: a number outside its range; a size in which ``top_k`` experts of each layer do
            not fit.
    """
    if isinstance(value, bool) or not isinstance(value, (Integral, Real, str)):
        raise TypeError(f"{name} {RULE}, got {type(value).__name__}")
    if isinstance(value, str):
        return _counts_in(name, value, layers)
    if isinstance(value, Integral):
        value = int(value)
        for layer in layers:
            least = min(layer.top_k, layer.num_experts)
            if not least <= value <= layer.num_experts:
                rule = f"must be an int from top_k = {layer.top_k} to {layer.num_experts} experts"
                raise ValueError(f"{name} {rule}, got {value}")
        return [value] * len(layers)
    if not 0 < float(value) <= 1:
        raise ValueError(f"{name} {RULE}, got {value}")
    return [_share_of(layer, float(value)) for layer in layers]


def _share_of(layer: Amount, share: float) -> int:
    """A share of a layer's experts, at least ``top_k``."""
    least = min(layer.top_k, layer.num_experts)
    return min(layer.num_experts, max(least, int(share * layer.num_experts + 1e-9)))


def _counts_in(name: str, text: str, layers: Sequence[Amount]) -> list[int]:
    """The largest share of each layer's experts that fits in a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*GB\s*", text)
    if match is None:
        raise ValueError(f"{name} {RULE}, got {text!r}")
    room = int(float(match[1]) * GIGABYTE)

    def size(share: float) -> int:
        return sum(_share_of(layer, share) * layer.expert_bytes for layer in layers)

    if size(0.0) > room:
        needed = size(0.0) / GIGABYTE
        raise ValueError(
            f"{name} must have room for top_k experts of each layer, {needed:.2f}GB, got {text!r}"
        )
    if not layers:
        return []
    counts = {i / layer.num_experts for layer in layers for i in range(layer.num_experts + 1)}
    shares = sorted(share for share in counts if size(share) <= room)
    return [_share_of(layer, shares[-1]) for layer in layers]
