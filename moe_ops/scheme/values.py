"""Schemes as small frozen values.

Whatever follows from one (scale shapes, bytes per weight, the constants of a kernel) is derived
here and nowhere else. A new scheme is a line in `SCHEMES`; a kernel never hears its name, only what
is derived from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
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
    offset: int = 0
    """What is added to an integer to store it."""
    exponent: int = 0
    """Bits of the exponent of a float narrower than a byte, stored as sign, exponent, mantissa."""

    @property
    def packed(self) -> bool:
        """Whether two numbers share a byte: even k in the low nibble."""
        return self.bits == 4

    @property
    def stored_bits(self) -> int:
        """Bits of memory: numbers of 6 bits take a byte each."""
        return 4 if self.packed else 8


ELEMENTS = {
    e.name: e
    for e in (
        Element("fp8", 8, FLOAT8_E4M3_MAX, torch.float8_e4m3fn),
        Element("int8", 8, 127.0, torch.int8),
        Element("uint8", 8, 127.0, torch.uint8, offset=128),
        Element("int4", 4, 7.0, torch.uint8, offset=8),
        Element("fp4", 4, FLOAT4_E2M1_MAX, torch.uint8, exponent=2),
        Element("fp6_e2m3", 6, 7.5, torch.uint8, exponent=2),
        Element("fp6_e3m2", 6, 28.0, torch.uint8, exponent=3),
    )
}
SCALE_BITS = {"float32": 32, "pow2": 32, "vector": 32, "input": 16, "e8m0": 8, "e4m3": 8}
"""The forms of a scale, and what one takes of memory."""


@dataclass(frozen=True)
class Quant:
    """One operand's element, the group that shares a scale, and the form of the scale.

    Args:
        element: how a number is stored.
        group: the elements that share a scale.
        scale: ``float32``; ``pow2`` (float32 too, but a power of two, rounded up: ue8m0);
            ``vector`` (float32, one a row, without an axis for groups); ``input`` (the dtype of the
            weight before it was quantized); ``e8m0`` (uint8 s for ``2**(s - 127)``); ``e4m3``.
        static: whether the scale is given (calibrated) instead of computed from the data.
        zero_point: whether groups have a zero point, an integer that is stored as the numbers are.
        global_scale: whether there is a float32 factor on top of the scales.
    """

    element: Element
    group: Group
    scale: str = "float32"
    static: bool = False
    zero_point: bool = False
    global_scale: bool = False

    key: str = field(init=False, repr=False, compare=False)
    """The one string that stands for this value in an operator's schema."""

    def __post_init__(self) -> None:
        # Not a cached property: before Python 3.12 that takes a lock, which Dynamo cannot trace.
        rows, cols = ("*" if n == WHOLE else n for n in self.group)
        more = [name for name in _SWITCHES if getattr(self, name)]
        key = ":".join((self.element.name, f"{rows}x{cols}", self.scale, *more))
        object.__setattr__(self, "key", key)

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored values."""
        return self.element.storage

    @property
    def per_tensor(self) -> bool:
        """Whether all of the operand shares one scale."""
        return self.group.rows == WHOLE and self.group.cols == WHOLE

    @property
    def per_row(self) -> bool:
        """Whether every row has one scale."""
        return self.group.rows == 1 and self.group.cols == WHOLE

    @property
    def local(self) -> bool:
        """Whether a scale belongs to a piece of one row, which a GEMM meets tile by tile."""
        return self.group.rows == 1 and self.group.cols != WHOLE

    def weight_scale_shape(self, num_experts: int, n: int, k: int) -> tuple[int, ...]:
        """Of a weight ``(E, N, K)``: ``(E,)`` a tensor, else ``(E, ceil(N/rows), ceil(K/cols))``.

        A ``vector`` is ``(E, N)``. Groups count from row 0 of the weight (in ``w1`` a group may
        hold the last gate rows and the first up rows); the last group of an axis may be partial.
        """
        if self.per_tensor:
            return (num_experts,)
        rows, cols = self.group
        if self.scale == "vector":
            return (num_experts, _groups(n, rows))
        return (num_experts, _groups(n, rows), _groups(k, cols))

    def row_scale_shape(self, rows, k: int) -> tuple:
        """Of activations ``(rows, K)``: ``(1,)`` a tensor, else ``(rows, ceil(K/cols))``."""
        return (1,) if self.per_tensor else (rows, _groups(k, self.group.cols))

    def batched_scale_shape(self, num_experts: int, rows: int, k: int) -> tuple[int, int, int]:
        """Of batched activations ``(E, rows, K)``: ``(E, 1, 1)``, else ``(E, rows, groups)``."""
        if self.per_tensor:
            return (num_experts, 1, 1)
        return (num_experts, rows, _groups(k, self.group.cols))


_SWITCHES = ("static", "zero_point", "global_scale")


def _groups(length: int, group: int) -> int:
    return 1 if group == WHOLE else -(-length // group)


@lru_cache(maxsize=256)
def parse_quant(key: str) -> Quant:
    """The inverse of :attr:`Quant.key`."""
    name, group, scale, *more = key.split(":")
    rows, cols = (WHOLE if n == "*" else int(n) for n in group.split("x"))
    return Quant(ELEMENTS[name], Group(rows, cols), scale, *(n in more for n in _SWITCHES))


def min_capability(activation: Quant | None) -> int:
    """The lowest compute capability times ten at which kernels with such activations compile.

    Triton's matrix products want 80, and those of e4m3 numbers 89. Stored weights do not matter:
    where only those are quantized, their bits become numbers by integer operations.
    """
    return 89 if activation is not None and activation.dtype == torch.float8_e4m3fn else 80


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
        quant, scales = self.weight, 1
        for length in quant.weight_scale_shape(1, n, k):
            scales *= length
        each = SCALE_BITS[quant.scale] + quant.element.stored_bits * quant.zero_point
        return quant.element.stored_bits + each * scales / (n * k)


def _w8a8(name: str, element: str, activation: Group, weight: Group, **more) -> Scheme:
    e = ELEMENTS[element]
    return Scheme(
        name, Quant(e, activation, **more), Quant(e, weight, more.get("scale", "float32"))
    )


def _weight_only(name: str, element: str, group: Group, scale: str, **more) -> Scheme:
    return Scheme(name, None, Quant(ELEMENTS[element], group, scale, **more))


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
        _weight_only("fp8_w8a16", "fp8", ROW, "float32"),
        _weight_only("fp8_w8a16_block128", "fp8", Group(128, 128), "float32"),
        _weight_only("int8_w8a16", "int8", ROW, "vector"),
        _weight_only("int8_w8a16_g128", "uint8", Group(1, 128), "input"),
        _weight_only("int4_w4a16_g32", "int4", Group(1, 32), "input"),
        _weight_only("int4_w4a16_g128", "int4", Group(1, 128), "input"),
        _weight_only("int4_w4a16_g128_zp", "int4", Group(1, 128), "input", zero_point=True),
        _weight_only("int4_w4a16_channel", "int4", ROW, "input"),
        _weight_only("nvfp4_w4a16", "fp4", Group(1, 16), "e4m3", global_scale=True),
        _weight_only("mxfp4_w4a16", "fp4", Group(1, 32), "e8m0"),
        _weight_only("mxfp6_e2m3", "fp6_e2m3", Group(1, 32), "e8m0"),
        _weight_only("mxfp6_e3m2", "fp6_e3m2", Group(1, 32), "e8m0"),
    )
}
"""Every scheme that has a name of its own."""

_BLOCKS = re.compile(r"(fp8|int8)(_w8a16)?_block(\d+)(?:x(\d+))?(_ue8m0)?")
_GROUPS = re.compile(r"(int4_w4a16|int8_w8a16)_g(\d+)(_zp)?")


@lru_cache(maxsize=256)
def get_scheme(name: str) -> Scheme:
    """The scheme called ``name``, also one that differs only in its group sizes.

    ``fp8_block64x128`` has weight blocks of 64 rows x 128 columns and activation groups of 128;
    ``int4_w4a16_g64_zp`` groups of 64 along K.

    Raises:
        ValueError: an unknown name, or a group that is not a power of two of at least 16.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    if match := _GROUPS.fullmatch(name):
        element = {"int4_w4a16": "int4", "int8_w8a16": "uint8"}[match[1]]
        (cols,) = _group_sizes(name, match[2])
        return _weight_only(name, element, Group(1, cols), "input", zero_point=bool(match[3]))
    if match := _BLOCKS.fullmatch(name):
        rows, cols = _group_sizes(name, match[3], match[4] or match[3])
        scale = "pow2" if match[5] else "float32"
        if match[2]:
            return _weight_only(name, match[1], Group(rows, cols), scale)
        return _w8a8(name, match[1], Group(1, cols), Group(rows, cols), scale=scale)
    raise ValueError(f"scheme must be one of {sorted(SCHEMES)}, got {name!r}")


def _group_sizes(name: str, *sizes: str) -> tuple[int, ...]:
    for size in map(int, sizes):
        if size < 16 or size & (size - 1):
            raise ValueError(f"scheme groups must be powers of two >= 16, got {size} in {name!r}")
    return tuple(map(int, sizes))
