"""Schemes as small frozen values.

Whatever follows from one (scale shapes, bytes per weight, the constants of a kernel) is derived
here and nowhere else. A new scheme is a line in `SCHEMES`; a kernel never hears its name, only what
is derived from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

WHOLE = -1
"""A group that spans the whole axis."""
FLOAT8_E4M3_MAX = 448.0
FLOAT4_E2M1_MAX = 6.0


class Group(NamedTuple):
    """The elements that share one scale: ``rows`` x ``cols`` of the 2-D operand, K along columns.

    ``(WHOLE, WHOLE)``: one scale a tensor (of a weight: an expert); ``(1, WHOLE)``: one a row
    (token, or output channel); ``(1, 128)``: one for 128 elements along K.
    """

    rows: int
    cols: int


class Element(NamedTuple):
    """How one number is stored."""

    name: str
    bits: int
    largest: float
    """The largest magnitude that a quantized value takes."""
    storage: torch.dtype


ELEMENTS = {
    e.name: e
    for e in (
        Element("fp8", 8, FLOAT8_E4M3_MAX, torch.float8_e4m3fn),
        Element("int8", 8, 127.0, torch.int8),
    )
}


@dataclass(frozen=True)
class Quant:
    """One operand's element, the group that shares a scale, and the form of the scale.

    Args:
        element: how a number is stored.
        group: the elements that share a scale.
        scale: ``float32``, or ``pow2`` (float32 too, but a power of two, rounded up: ue8m0).
        static: whether the scale is given (calibrated) instead of computed from the data.
    """

    element: Element
    group: Group
    scale: str = "float32"
    static: bool = False

    @cached_property
    def key(self) -> str:
        """The one string that stands for this value in an operator's schema."""
        rows, cols = ("*" if n == WHOLE else n for n in self.group)
        rest = (self.scale, "static") if self.static else (self.scale,)
        return ":".join((self.element.name, f"{rows}x{cols}", *rest))

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored values."""
        return self.element.storage

    @property
    def per_tensor(self) -> bool:
        """Whether all of the operand shares one scale."""
        return self.group == (WHOLE, WHOLE)

    @property
    def local(self) -> bool:
        """Whether a scale belongs to a piece of one row, which a GEMM meets tile by tile."""
        return self.group.rows == 1 and self.group.cols != WHOLE

    def weight_scale_shape(self, num_experts: int, n: int, k: int) -> tuple[int, ...]:
        """Of a weight ``(E, N, K)``: ``(E,)`` a tensor, else ``(E, ceil(N/rows), ceil(K/cols))``.

        Groups count from row 0 of the weight (in ``w1`` a group may hold the last gate rows and the
        first up rows); the last group of an axis may be partial.
        """
        if self.per_tensor:
            return (num_experts,)
        rows, cols = self.group
        return (num_experts, _groups(n, rows), _groups(k, cols))

    def row_scale_shape(self, rows, k: int) -> tuple:
        """Of activations ``(rows, K)``: ``(1,)`` a tensor, else ``(rows, ceil(K/cols))``."""
        return (1,) if self.per_tensor else (rows, _groups(k, self.group.cols))

    def batched_scale_shape(self, num_experts: int, rows: int, k: int) -> tuple[int, int, int]:
        """Of batched activations ``(E, rows, K)``: ``(E, 1, 1)``, else ``(E, rows, groups)``."""
        if self.per_tensor:
            return (num_experts, 1, 1)
        return (num_experts, rows, _groups(k, self.group.cols))


def _groups(length: int, group: int) -> int:
    return 1 if group == WHOLE else -(-length // group)


@lru_cache(maxsize=256)
def parse_quant(key: str) -> Quant:
    """The inverse of :attr:`Quant.key`."""
    name, group, scale, *static = key.split(":")
    rows, cols = (WHOLE if n == "*" else int(n) for n in group.split("x"))
    return Quant(ELEMENTS[name], Group(rows, cols), scale, bool(static))


@dataclass(frozen=True)
class Scheme:
    """A named quantization scheme; ``None`` means the operand is not quantized."""

    name: str
    activation: Quant | None
    weight: Quant | None

    @property
    def block_shape(self) -> list[int] | None:
        """``[rows, cols]`` of a weight's block, as vLLM has it; None where scales are coarser."""
        if self.weight is None or WHOLE in self.weight.group or self.weight.group.rows == 1:
            return None
        return list(self.weight.group)

    def weight_bits(self, n: int, k: int) -> float:
        """Bits of memory a weight of an ``(N, K)`` expert takes, its share of scales included."""
        if self.weight is None:
            return 16.0
        scales = 1
        for length in self.weight.weight_scale_shape(1, n, k):
            scales *= length
        return self.weight.element.bits + 32.0 * scales / (n * k)


def _w8a8(name: str, element: str, activation: Group, weight: Group, **more) -> Scheme:
    e = ELEMENTS[element]
    return Scheme(
        name, Quant(e, activation, **more), Quant(e, weight, more.get("scale", "float32"))
    )


TENSOR, ROW = Group(WHOLE, WHOLE), Group(1, WHOLE)
UNQUANTIZED = Scheme("unquantized", None, None)
SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        UNQUANTIZED,
        _w8a8("fp8_tensor", "fp8", TENSOR, TENSOR),
        _w8a8("fp8_tensor_static", "fp8", TENSOR, TENSOR, static=True),
        _w8a8("fp8_channel", "fp8", ROW, ROW),
        _w8a8("fp8_block128", "fp8", Group(1, 128), Group(128, 128)),
        _w8a8("fp8_block128_ue8m0", "fp8", Group(1, 128), Group(128, 128), scale="pow2"),
        _w8a8("int8_tensor", "int8", TENSOR, TENSOR),
        _w8a8("int8_channel", "int8", ROW, ROW),
        _w8a8("int8_block128", "int8", Group(1, 128), Group(128, 128)),
    )
}
"""Every scheme that has a name of its own."""

_BLOCKS = re.compile(r"(fp8|int8)_block(\d+)(?:x(\d+))?(_ue8m0)?")


@lru_cache(maxsize=256)
def get_scheme(name: str) -> Scheme:
    """The scheme called ``name``, also one that differs only in its group sizes.

    ``fp8_block64x128`` has weight blocks of 64 rows x 128 columns and activation groups of 128.

    Raises:
        ValueError: an unknown name, or a group that is not a power of two of at least 16.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    match = _BLOCKS.fullmatch(name)
    if match is None:
        raise ValueError(f"scheme must be one of {sorted(SCHEMES)}, got {name!r}")
    element, rows, cols = match[1], int(match[2]), int(match[3] or match[2])
    for size in (rows, cols):
        if size < 16 or size & (size - 1):
            raise ValueError(f"scheme groups must be powers of two >= 16, got {size} in {name!r}")
    scale = "pow2" if match[4] else "float32"
    return _w8a8(name, element, Group(1, cols), Group(rows, cols), scale=scale)
