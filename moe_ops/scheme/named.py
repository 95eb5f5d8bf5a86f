"""The registered schemes, and the names that `get_scheme` understands."""

from __future__ import annotations

import re
from functools import lru_cache

from moe_ops import checks
from moe_ops.scheme.values import ELEMENTS, WHOLE, Group, Quant, Scheme


def _w8a8(name: str, element: str, activation: Group, weight: Group, **more) -> Scheme:
    e = ELEMENTS[element]
    return Scheme(
        name, Quant(e, activation, **more), Quant(e, weight, more.get("scale", "float32"))
    )


def _weight_only(name: str, element: str, group: Group, scale: str, **more) -> Scheme:
    return Scheme(name, None, Quant(ELEMENTS[element], group, scale, **more))


def _int4_under_fp8(name: str, cols: int) -> Scheme:
    weight = Quant(ELEMENTS["int4"], Group(1, cols), "e4m3", global_scale=True)
    return Scheme(name, Quant(ELEMENTS["fp8"], ROW), weight)


TENSOR, ROW = Group(WHOLE, WHOLE), Group(1, WHOLE)
MXFP8 = Quant(ELEMENTS["fp8"], Group(1, 32), "e8m0")
MXFP4 = Quant(ELEMENTS["fp4"], Group(1, 32), "e8m0")
NVFP4 = Quant(ELEMENTS["fp4"], Group(1, 16), "e4m3", global_scale=True)
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
        Scheme("mxfp8", MXFP8, MXFP8),
        Scheme("mxfp4", MXFP4, MXFP4),
        Scheme("mxfp4_mxfp8", MXFP8, MXFP4),
        Scheme("mxfp4_w4a8", Quant(ELEMENTS["fp8"], TENSOR, static=True), MXFP4),
        Scheme("nvfp4", NVFP4, NVFP4),
        _int4_under_fp8("int4_w4a8_g128", 128),
    )
}
"""Every registered scheme by its name."""

_BLOCKS = re.compile(r"(fp8|int8)(_w8a16)?_block(\d+)(?:x(\d+))?(_ue8m0)?", re.ASCII)
_GROUPS = re.compile(r"(int4_w4a16|int8_w8a16)_g(\d+)(_zp)?", re.ASCII)
_GROUPS_UNDER_FP8 = re.compile(r"int4_w4a8_g(\d+)", re.ASCII)


@lru_cache(maxsize=256)
def get_scheme(name: str) -> Scheme:
    """The scheme called ``name``: a registered one, or one with other group sizes.

    For example, ``fp8_block64x128`` has weight blocks of 64 rows x 128 columns and activation
    groups of 128, and ``int4_w4a16_g64_zp`` has groups of 64 along K.

    Raises:
        ValueError: an unknown name (the error suggests the nearest known name), or a group size
            that is not a power of two of at least 16.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    if match := _GROUPS.fullmatch(name):
        element = {"int4_w4a16": "int4", "int8_w8a16": "uint8"}[match[1]]
        (cols,) = _group_sizes(name, match[2])
        return _weight_only(name, element, Group(1, cols), "input", zero_point=bool(match[3]))
    if match := _GROUPS_UNDER_FP8.fullmatch(name):
        return _int4_under_fp8(name, *_group_sizes(name, match[1]))
    if match := _BLOCKS.fullmatch(name):
        rows, cols = _group_sizes(name, match[3], match[4] or match[3])
        scale = "pow2" if match[5] else "float32"
        if match[2]:
            return _weight_only(name, match[1], Group(rows, cols), scale)
        return _w8a8(name, match[1], Group(1, cols), Group(rows, cols), scale=scale)
    hint = checks.did_you_mean(name, SCHEMES)
    raise ValueError(f"scheme must be one of {sorted(SCHEMES)}, got {name!r}{hint}")


def _group_sizes(name: str, *sizes: str) -> tuple[int, ...]:
    for size in map(int, sizes):
        if size < 16 or size & (size - 1):
            raise ValueError(f"scheme groups must be powers of two >= 16, got {size} in {name!r}")
    return tuple(map(int, sizes))
