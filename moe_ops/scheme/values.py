"""Schemes as small frozen values.

Everything that follows from a scheme (scale shapes, bytes per weight, the constants of a kernel) is
derived here and nowhere else. A `Scheme` is a pair of these values; a new one is a line in
`named.py`. Kernels never see a scheme's name, only values derived from the scheme.
"""

from __future__ import annotations

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

    ``(WHOLE, WHOLE)``: one scale per tensor (of a weight: per expert); ``(1, WHOLE)``: one per row
    (token, or output channel); ``(1, 128)``: one per 128 elements along K.
    """

    rows: int
    cols: int


class Element(NamedTuple):
    """How one number is stored."""

    name: str
    bits: int
    largest: float
    """The largest magnitude of a quantized value."""
    storage: torch.dtype
    offset: int = 0
    """The offset added to an integer when it is stored."""
    exponent: int = 0
    """Exponent bits of a float narrower than a byte, stored as sign, exponent, mantissa."""

    @property
    def values_per_byte(self) -> int:
        """2 for 4-bit numbers, even k in the low nibble; else 1."""
        return 2 if self.bits == 4 else 1

    @property
    def stored_bits(self) -> int:
        """Bits of memory per number: a 6-bit number takes a byte."""
        return 8 // self.values_per_byte


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
"""Bits of memory per scale, by the form of the scale."""


@dataclass(frozen=True, repr=False)
class Quant:
    """One operand's element, the group that shares a scale, and the form of the scale.

    Args:
        element: how a number is stored.
        group: the elements that share a scale.
        scale: ``float32``; ``pow2`` (float32 too, but a power of two, rounded up: ue8m0);
            ``vector`` (float32, one per row, without an axis for groups); ``input`` (the dtype of
            the weight before it was quantized); ``e8m0`` (uint8 s for ``2**(s - 127)``); ``e4m3``.
        static: whether the scale is given (calibrated) instead of computed from the data.
        zero_point: whether groups have a zero point, an integer stored like the numbers.
        global_scale: whether there is a float32 factor on top of the scales. For activations this
            factor is always given.

    Raises:
        ValueError: an element that is not registered, as kernels know no others; an unknown form of
            the scale; no `Group`, or a size of it that is neither positive nor `WHOLE`. (A `Scheme`
            says whether operators compute what a valid value describes.)
    """

    element: Element
    group: Group
    scale: str = "float32"
    static: bool = False
    zero_point: bool = False
    global_scale: bool = False

    key: str = field(init=False, repr=False, compare=False)
    """The string that represents this value in operator calls; see `parse_quant`."""
    dtype: torch.dtype = field(init=False, repr=False, compare=False)
    """Dtype of the stored values."""
    scale_dtype: torch.dtype = field(init=False, repr=False, compare=False)
    """Dtype of scales. (``input`` scales of weights have the weight's dtype instead.)"""
    per_tensor: bool = field(init=False, repr=False, compare=False)
    """Whether the whole operand shares one scale."""
    of_all_rows: bool = field(init=False, repr=False, compare=False)
    """Whether the numbers of all rows decide the scale: one is shared, and none is given."""
    shared_cols: int | None = field(init=False, repr=False, compare=False)
    """Number of elements along K that share a scale; None: all."""

    def __post_init__(self) -> None:
        named = ELEMENTS.get(self.element.name) if isinstance(self.element, Element) else None
        if named is None or named != self.element:
            raise ValueError(f"element must be a value of ELEMENTS, got {self.element!r}")
        if self.scale not in SCALE_BITS:
            raise ValueError(f"scale must be in {list(SCALE_BITS)}, got {self.scale!r}")
        sizes = self.group if isinstance(self.group, Group) else (None,)
        if not all(type(n) is int and (n == WHOLE or n > 0) for n in sizes):
            rule = "be a Group of sizes that are positive or WHOLE"
            raise ValueError(f"group must {rule}, got {self.group!r}")
        # Not cached properties, which before Python 3.12 take a lock that Dynamo cannot trace.
        rows, cols = ("*" if n == WHOLE else n for n in self.group)
        more = [name for name in _SWITCHES if getattr(self, name)]
        scale_dtypes = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}
        derived = {
            "key": ":".join((self.element.name, f"{rows}x{cols}", self.scale, *more)),
            "dtype": self.element.storage,
            "scale_dtype": scale_dtypes.get(self.scale, torch.float32),
            "per_tensor": self.group == (WHOLE, WHOLE),
            "of_all_rows": self.group == (WHOLE, WHOLE) and not self.static,
            "shared_cols": None if self.group.cols == WHOLE else self.group.cols,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Quant({self.key!r})"

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def channel_scale(self) -> bool:
        """Whether the global scale of a weight is per row instead of per tensor.

        True for integers: dividing by a scale per row makes their group scales fit into e4m3.
        """
        return self.global_scale and not self.element.exponent

    @property
    def parts(self) -> tuple[str, ...]:
        """The kinds of tensors of a weight beside its numbers, in the order of `QTensor`."""
        factor = "channel_scale" if self.channel_scale else "global_scale"
        return ("scale", *["zero_point"] * self.zero_point, *[factor] * self.global_scale)

    @property
    def largest(self) -> float:
        """The largest magnitude of rows whose given scale is 1: see `Scheme.input_scale_names`."""
        return self.element.largest * (FLOAT8_E4M3_MAX if self.global_scale else 1.0)

    @property
    def granularity(self) -> str:
        """What shares a scale: ``tensor``, ``channel`` (a row), ``group`` or ``block``."""
        rows, cols = self.group
        if cols == WHOLE:
            return "channel" if rows == 1 else "tensor"
        return "group" if rows == 1 else "block"

    def dtype_of_scales(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the scales of a weight that had a ``dtype`` before it was quantized."""
        return dtype if self.scale == "input" else self.scale_dtype

    @property
    def per_row(self) -> bool:
        """Whether every row has one scale."""
        return self.group.rows == 1 and self.group.cols == WHOLE

    @property
    def local(self) -> bool:
        """Whether a row has several scales along K, which a GEMM applies step by step."""
        return self.group.rows == 1 and self.group.cols != WHOLE

    def weight_scale_shape(self, num_experts: int, n: int, k: int) -> tuple[int, ...]:
        """Scale shape of a weight ``(E, N, K)``: ``(E, ceil(N/rows), ceil(K/cols))``.

        ``(E,)`` if per tensor; ``(E, N)`` for the form ``vector``. Groups count from row 0 of the
        weight (in ``w1`` a group may hold the last gate rows and the first up rows); the last group
        of an axis may be partial.
        """
        if self.per_tensor:
            return (num_experts,)
        rows, cols = self.group
        if self.scale == "vector":
            return (num_experts, _groups(n, rows))
        return (num_experts, _groups(n, rows), _groups(k, cols))

    def zero_point_shape(self, num_experts: int, n: int, k: int) -> tuple[int, ...]:
        """Zero-point shape of a weight: ``(E, N, G)``, or ``(E, ceil(N / 2), G)`` for 4 bits."""
        rows = _groups(n, self.element.values_per_byte)
        return (num_experts, rows, _groups(k, self.group.cols))

    def numbers_per_entry(self, dtype: torch.dtype) -> int:
        """Numbers per entry of a weight with this dtype, in the plain form or in the packed one."""
        return 8 * dtype.itemsize // self.element.stored_bits

    def data_width(self, k: int) -> int:
        """Number of stored entries of K numbers."""
        return k // self.element.values_per_byte

    def row_scale_shape(self, rows, k: int) -> tuple:
        """Scale shape of ``(rows, K)``: ``(rows, ceil(K/cols))``; per tensor ``(1,)``."""
        return (1,) if self.per_tensor else (rows, _groups(k, self.group.cols))

    def batched_scale_shape(self, num_experts: int, rows: int, k: int) -> tuple[int, int, int]:
        """Scale shape of ``(E, rows, K)``: ``(E, rows, groups)``; per tensor ``(E, 1, 1)``."""
        if self.per_tensor:
            return (num_experts, 1, 1)
        return (num_experts, rows, _groups(k, self.group.cols))


_SWITCHES = ("static", "zero_point", "global_scale")


def _groups(length: int, group: int) -> int:
    return 1 if group == WHOLE else -(-length // group)


@lru_cache(maxsize=256)
def parse_quant(key: str) -> Quant:
    """The inverse of :attr:`Quant.key`.

    Returns:
        The `Quant` whose key this is.

    Raises:
        ValueError: not the key of a `Quant`.
    """
    try:
        name, group, scale, *more = key.split(":")
        rows, cols = (WHOLE if n == "*" else int(n) for n in group.split("x"))
        quant = Quant(ELEMENTS[name], Group(rows, cols), scale, *(n in more for n in _SWITCHES))
    except (KeyError, ValueError):
        quant = None
    if quant is None or quant.key != key:
        raise ValueError(f"quant must be a key such as 'fp8:1x128:float32', got {key!r}")
    return quant


def min_capability(activation: Quant | None) -> int:
    """The lowest compute capability (times ten) at which kernels with such activations compile.

    Triton's matrix products need 80, and e4m3 activations or activation scales need 89. The
    weights' format does not matter: integer operations dequantize them.

    Returns:
        80 or 89.
    """
    made = () if activation is None else (activation.dtype, activation.scale_dtype)
    return 89 if torch.float8_e4m3fn in made else 80
