"""Schemes of a caller's own: operators know them by what they mean, not by their names."""

import itertools
import re

import pytest
import torch
from hypothesis import given
from modular import layer_config
from own_schemes import OWN, ROW, TENSOR, E, H, I, K, quant
from strategies import schemes
from table_items import every_row

import moe_ops
from moe_ops import (
    SCHEMES,
    FusedMoEQuantConfig,
    Quant,
    Scheme,
    dequantize_weight,
    get_scheme,
    quantize_weight,
)
from moe_ops.scheme import WHOLE, Element, Group, refusal
from moe_ops.scheme.values import ELEMENTS, SCALE_BITS
from moe_ops.testing import Problem

# Keys


@every_row("name", SCHEMES)
def test_registered_schemes_are_known_by_their_names(name):
    """Whatever they are called; what has a registered name and means something else is not."""
    scheme = SCHEMES[name]
    assert scheme.key == name and scheme.refusal is None and get_scheme(name) is scheme
    mine = Scheme("mine", scheme.activation, scheme.weight)
    assert mine == scheme and hash(mine) == hash(scheme) and mine.key == name


@every_row(
    "name",
    [
        *("fp8_block64", "fp8_block64x32_ue8m0", "int8_w8a16_block32", "int4_w4a16_g64"),
        *("int8_w8a16_g32_zp", "int4_w4a8_g32"),
    ],
)
def test_names_with_group_sizes_are_keys(name):
    scheme = get_scheme(name)
    assert scheme.key == name == Scheme("mine", scheme.activation, scheme.weight).key
    assert get_scheme("fp8_block128x128").key == "fp8_block128"


def test_keys_of_ones_own():
    for scheme in OWN.values():
        assert get_scheme(scheme.key) == scheme and scheme.key not in SCHEMES
        assert as_parts(scheme) == as_parts(get_scheme(scheme.key))
    assert OWN["int4 in floats"].key == "|int4:1x64:float32"
    assert OWN["rows x tensor"].key == "fp8:1x*:pow2|fp8:*x*:float32"
    assert OWN["fp8_channel"] != get_scheme("fp8_channel")
    assert len({s.key for s in (*OWN.values(), *SCHEMES.values())}) == len(OWN) + len(SCHEMES)


def as_parts(scheme):
    return scheme.activation, scheme.weight


@given(schemes(), schemes())
def test_a_key_says_everything(first, second):
    assert as_parts(get_scheme(first.key)) == as_parts(first)
    assert (first.key == second.key) == (as_parts(first) == as_parts(second)) == (first == second)
    assert (hash(first) == hash(second)) or first != second


@every_row(
    "key",
    ["int8:1x64:float32", "|int8:1x64", "|int8:01x64:float32", "|int8:1x64:float32:twice",
     "|int5:1x64:float32", "|int8:1xy:float32", "|int8:1x64:float64", "a|b|c",
     "|int4:1x64:input:zero_point:zero_point"],
)  # fmt: skip
def test_what_is_no_key(key):
    with pytest.raises(ValueError, match=f"must be .*got '{re.escape(key.strip('|'))}'"):
        get_scheme(key)


# What cannot be computed


def test_elements_of_ones_own_are_refused():
    fp8 = ELEMENTS["fp8"]
    for element, got in (
        (fp8._replace(largest=240.0), "Element"), ("fp8", "'fp8'"),
        (Element("fp12", 12, 1.0, torch.int16), "Element"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"element must be a value of ELEMENTS, got {got}"):
            Quant(element, ROW)
    with pytest.raises(ValueError, match="scale must be in .*got 'float64'"):
        Quant(fp8, ROW, "float64")
    for group in (Group(0, 16), Group(1, -2), Group(1, 16.0), (64, 64), None):
        said = f"group must be a Group of sizes that are positive or WHOLE, got {group!r}"
        with pytest.raises(ValueError, match=re.escape(said)):
            Quant(fp8, group)
    for operands, which in (((None, "fp8"), "weight"), ((fp8, None), "activation")):
        with pytest.raises(TypeError, match=f"{which} must be a Quant or None, got (str|Element)"):
            Scheme("mine", *operands)


FP8_ROW, INT8_ROW, MXFP4 = quant("fp8", ROW), quant("int8", ROW), quant("fp4", (1, 32), "e8m0")
REFUSED = {
    "quantized rows alone": (FP8_ROW, None, "weight must be quantized if"),
    "a group of 24": (None, quant("int4", (1, 24)), "weight.group must have sizes"),
    "a group of 8": (None, quant("int4", (1, 8)), "weight.group must have sizes"),
    "one column": (None, quant("int4", (16, 1)), "weight.group must have sizes"),
    "24 rows": (None, quant("int8", (24, 16)), "weight.group must have sizes"),
    "rows that share a scale": (None, quant("int8", (16, WHOLE)), "weight.group must have one row"),
    "columns of all rows": (None, quant("int8", (WHOLE, 16)), "weight.group must have one row"),
    "static weights": (None, quant("fp8", TENSOR, static=True), "weight.static must be False"),
    "a vector of blocks": (None, quant("int8", (1, 32), "vector"), "weight.group must be .1, W"),
    "e4m3 under int8": (None, quant("int8", (1, 32), "e4m3"), "weight.element must be in"),
    "pow2 of int4": (None, quant("int4", (1, 32), "pow2"), "weight.element must not be int4"),
    "two float scales": (
        None,
        quant("fp8", (1, 32), global_scale=True),
        "weight.scale must be e4m3",
    ),
    "zero points of floats": (
        None,
        quant("fp4", (1, 32), zero_point=True),
        "weight.element must be st",
    ),
    "zero points of int8": (
        None,
        quant("int8", (1, 32), zero_point=True),
        "weight.element must be st",
    ),
    "zero points of blocks": (
        None,
        quant("int4", (16, 32), zero_point=True),
        "weight.group must have one",
    ),
    "zero points of bytes": (
        None,
        quant("int4", (1, 32), "e8m0", zero_point=True),
        "weight.scale must be fl",
    ),
    "zero points under int8": (
        INT8_ROW,
        quant("int4", ROW, zero_point=True),
        "weight.zero_point must be False",
    ),
    "int4 rows": (quant("int4", ROW), quant("int4", ROW), "activation.element must be in"),
    "uint8 rows": (quant("uint8", ROW), quant("uint8", ROW), "activation.element must be in"),
    "blocks of tokens": (
        quant("fp8", (16, 16)),
        quant("fp8", (16, 16)),
        "activation.group must have one",
    ),
    "rows in their dtype": (quant("fp8", ROW, "input"), FP8_ROW, "activation.scale must be"),
    "rows in a vector": (quant("fp8", ROW, "vector"), FP8_ROW, "activation.scale must be"),
    "zero points of rows": (
        quant("int8", ROW, zero_point=True),
        INT8_ROW,
        "activation.zero_point must",
    ),
    "bytes of rows": (quant("fp8", ROW, "e8m0"), FP8_ROW, "activation.group must have columns"),
    "e4m3 of fp8 rows": (
        quant("fp8", (1, 16), "e4m3"),
        MXFP4,
        "activation.element must be a float",
    ),
    "static rows": (quant("fp8", ROW, static=True), FP8_ROW, "activation.group must be .WHOLE, W"),
    "static powers": (
        quant("fp8", TENSOR, "pow2", static=True),
        FP8_ROW,
        "activation.scale must be float32",
    ),
    "a factor of rows": (
        quant("fp8", ROW, global_scale=True),
        FP8_ROW,
        "activation.scale must be e4m3",
    ),
    "a lost factor": (
        quant("fp4", (1, 16), "e4m3", global_scale=True),
        MXFP4,
        "weight.global_scale must be True",
    ),
    "rounded rows": (quant("fp8", (1, 32)), MXFP4, "activation.scale must be in"),
    "rounded weights": (FP8_ROW, quant("int4", (1, 32)), "weight.scale must be in"),
    "groups apart": (
        quant("fp8", (1, 32)),
        quant("fp8", (32, 64)),
        "weight.group must have 32 col",
    ),
    "groups under rows": (FP8_ROW, quant("fp8", (32, 64)), "weight.group must have all col"),
}


@every_row("case", REFUSED)
def test_what_cannot_be_computed(case):
    """It raises before any operator: with the field, the rule and the value."""
    activation, weight, text = REFUSED[case]
    scheme = Scheme("fp8_channel", activation, weight)
    error, _ = scheme.refusal
    assert refusal(activation, weight) == scheme.refusal
    for function in (
        lambda: get_scheme(scheme.key),
        lambda: quantize_weight(torch.zeros(1, 32, 32), scheme),
        lambda: FusedMoEQuantConfig(scheme),
        lambda: moe_ops.FusedMoE(E, K, H, I, scheme=scheme),
        lambda: moe_ops.explain(layer_config(Problem()), scheme),
        lambda: moe_ops.workspace_nbytes(1, H, I, E, K, torch.bfloat16, scheme=scheme),
    ):
        with pytest.raises(error, match=f"scheme.{text}.*, got "):
            function()
    row = moe_ops.pipeline.TritonExperts.is_supported_config(
        moe_ops.pipeline.TritonExperts, layer_config(Problem()), weight, activation,
        moe_ops.pipeline.TritonExperts.activation_format(),
    )  # fmt: skip
    assert not row[0] and "quantization scheme" in row[1]


def test_every_combination_of_one_operand():
    """What is not refused quantizes weights and comes back; the rest has a reason."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(2, 48, 80, generator=g) / 9
    groups = (TENSOR, ROW, Group(1, 16), Group(1, 64), Group(32, 32))
    switches = [dict.fromkeys(names, True) for names in ((), ("zero_point",), ("global_scale",))]
    computed = 0
    for element, group, scale, more in itertools.product(ELEMENTS, groups, SCALE_BITS, switches):
        scheme = Scheme("own", None, Quant(ELEMENTS[element], group, scale, **more))
        if scheme.refusal is None:
            computed += 1
            error = dequantize_weight(quantize_weight(w, scheme), scheme) - w
            assert error.norm() < 0.3 * w.norm(), scheme.key
    assert computed > 150
