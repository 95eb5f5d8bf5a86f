"""Schemes of a caller's own, of every kind that operators compute."""

import pytest

from moe_ops import Quant, Scheme, get_scheme
from moe_ops.scheme import WHOLE, Group
from moe_ops.scheme.values import ELEMENTS

TENSOR, ROW = Group(WHOLE, WHOLE), Group(1, WHOLE)
MXFP8 = get_scheme("mxfp8").activation


def quant(element, group, *more, **switches):
    return Quant(ELEMENTS[element], Group(*group), *more, **switches)


OWN = {
    scheme.name: scheme
    for scheme in (
        Scheme("int4 in floats", None, quant("int4", (1, 64))),
        Scheme("int8 in groups", quant("int8", (1, 32)), quant("int8", (1, 32))),
        Scheme("small blocks", quant("fp8", (1, 16)), quant("fp8", (64, 16))),
        Scheme("byte scales", quant("fp8", (1, 32)), quant("fp8", (32, 32), "e8m0")),
        Scheme("rows x tensor", quant("fp8", ROW, "pow2"), quant("fp8", TENSOR)),
        Scheme("static", quant("int8", TENSOR, static=True), quant("int8", ROW, "vector")),
        Scheme("zero points of rows", None, quant("int4", ROW, "input", zero_point=True)),
        Scheme("mx w4a8", MXFP8, quant("int4", (1, 64), "e4m3", global_scale=True)),
        Scheme("int8 x fp4", quant("int8", ROW), quant("fp4", (1, 32), "e8m0")),
        Scheme("mxfp6", quant("fp6_e3m2", (1, 64), "e8m0"), quant("fp6_e2m3", (16, 32), "e8m0")),
        Scheme("fp4 rows", quant("fp4", ROW), quant("fp4", ROW)),
        # A registered name with other contents:
        Scheme("fp8_channel", None, quant("fp8", (1, 32), "pow2")),
        Scheme("mxfp4", quant("fp4", (1, 64), "e8m0"), quant("fp4", (1, 64), "e8m0")),
    )
}
E, K, H, I = 4, 2, 64, 128  # noqa: E741
"""Sizes of a layer."""


def name_of(scheme):
    return scheme.name.replace(" ", "_")


each = pytest.mark.parametrize("scheme", OWN.values(), ids=name_of)
