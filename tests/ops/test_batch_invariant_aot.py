"""What batch-invariant mode rests on, seen in the compiled kernels of every architecture."""

import re

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from products import plain_product, scaled_product, stored_product  # noqa: E402
from table_items import every_row  # noqa: E402

from moe_ops import fake_impls  # noqa: E402
from moe_ops.dispatch.tiles import MANY_TOKENS  # noqa: E402
from moe_ops.kernels import expert_product, routing  # noqa: E402
from moe_ops.routing import SCORING_FUNCS  # noqa: E402
from moe_ops.scheme import get_scheme, min_capability, quantize_weight  # noqa: E402
from moe_ops.support import ARCHITECTURES  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
E, N, K = 4, 256, 512
ONE_TILE = [arch for arch in ARCHITECTURES if arch != 90]
"""Architectures with one row tile at every load: see `moe_ops.dispatch.row_tiles.INVARIANT`."""
MODULES = (expert_product, routing)


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(*MODULES)


def weight(empty, scheme):
    """Stored data, scale, zero point and global scale."""
    stored = quantize_weight(torch.empty(E, 2 * N, K, device="meta", dtype=torch.bfloat16), scheme)
    return [None if x is None else empty(*x.shape, dtype=x.dtype) for x in stored]


def rows(empty, slots, quant):
    """Quantized rows and their scales."""
    width = K // quant.element.values_per_byte
    groups = 1 if quant.group.cols < 0 or quant.group.cols > K else K // quant.group.cols
    q = empty(slots, width, dtype=quant.dtype)
    return q, empty(slots, groups, dtype=quant.scale_dtype)


def launch_product(empty, name, slots, direct=False):
    """The first product of a layer, with its activation, for some slots."""
    scheme, ids = get_scheme(name), empty(slots, 1, dtype=torch.int32)
    plan = fake_impls.align.plan_slots(ids, None, E, name, torch.bfloat16, True)
    tiles = [plan, ids if direct else None, None]
    x = empty(slots, K)
    if scheme.weight is None:
        return plain_product(
            expert_product, x, empty(E, 2 * N, K), None, None, tiles, 1, "silu", False, True
        )
    data, scale, zero_point, factor = weight(empty, scheme)
    if scheme.activation is None:
        w = (data, scale, zero_point, factor)
        return stored_product(expert_product, x, *w, None, None, tiles, 1, name, "silu", True)
    how = (*rows(empty, slots, scheme.activation), data, scale, factor)
    return scaled_product(expert_product, *how, None, tiles, 1, name, torch.bfloat16, "silu", True)


@pytest.mark.parametrize("arch", ONE_TILE)
@pytest.mark.parametrize(
    "scheme",
    ["unquantized", "fp8_channel", "fp8_block128", "int8_channel", "int4_w4a16_g32", "mxfp4"],
)
def test_one_binary_at_every_load(scheme, arch):
    if arch < min_capability(get_scheme(scheme).activation):
        pytest.skip("no kernels of this scheme")

    def launch(empty):
        for slots in (1, 7, 64, 4096):
            launch_product(empty, scheme, slots)

    products = aot.compile_launch(arch, launch, until="ttgir")
    assert len(products) == 4
    assert len({kernel.hash for kernel in products}) == 1


def arithmetic(kernel):
    """What it computes with floats, in order, with types and layouts but without names."""
    code = kernel.asm["ttgir"]
    operations = re.findall(r"(?:arith\.\w+f|math\.\w+|\w+\.\w*(?:dot|mma)\w*) .*", code)
    layouts = re.findall(r"^#mma\d* = .*", code, re.M)
    return layouts, [re.sub(r"%[\w#:]+|loc\(.*\)", "", line) for line in operations]


@pytest.mark.parametrize("arch", ONE_TILE)
@pytest.mark.parametrize("scheme", ["unquantized", "fp8_block128", "int8_channel", "mxfp4"])
def test_without_a_plan_the_arithmetic_is_the_same(scheme, arch):
    """Few slots have a binary of their own: it finds a tile otherwise, and then does the same."""
    if arch < min_capability(get_scheme(scheme).activation):
        pytest.skip("no kernels of this scheme")

    def launch(empty):
        launch_product(empty, scheme, 2, direct=True)
        launch_product(empty, scheme, 64)

    kernels = aot.compile_launch(arch, launch, until="ttgir")
    direct, planned = map(arithmetic, kernels)
    assert direct == planned and any("mma" in line or "dot" in line for line in direct[1])
    assert kernels[0].hash != kernels[1].hash


def float_sums(code):
    """Reductions that add floats: their result depends on who adds what first."""
    bodies = re.findall(r'"tt\.reduce".*?\n(.*?)tt\.reduce\.return', code, re.S)
    assert bodies
    return [body for body in bodies if "arith.addf" in body]


def slow_way(code):
    """Branches: tokens whose scores the quick way is not sure of take the one that adds up."""
    branches = re.findall(r"^( *)[^\n]*scf\.if [^\n]*\n(.*?)^\1}", code, re.M | re.S)
    return "".join(body for _, body in branches)


@every_row(("scoring",), [(scoring,) for scoring in SCORING_FUNCS])
def test_routing_adds_no_floats_that_decide(scoring):
    """None but a softmax's, in float64, of which certainly all sums give the same scores.

    The quick way takes a sum for good if all that are within its error are rounded alike:
    test_routing_lanes changes it. Else integers are added up.
    """

    def launch(empty):
        how = (None, 6, True, scoring, 1.0)
        for tokens in (1, 2 * MANY_TOKENS):
            routing.fused_topk(empty(tokens, 100), *how)

    kernels = aot.compile_launch(90, launch, until="ttir")
    names = [kernel.metadata.name for kernel in kernels]
    assert names == ["_fused_topk_kernel"] * 2
    for kernel in kernels:
        code = kernel.asm["ttir"]
        sums, slow = float_sums(code), slow_way(code)
        assert len(sums) == (3 if scoring == "softmax" else 0)  # over a lane's, and over lanes
        assert all(": f64" in body for body in sums)
        assert not float_sums(slow)
        if scoring == "softmax":
            assert re.search(r"= arith\.addi [^\n]* : i64[^\n]*\n[^\n]*tt\.reduce\.return", slow)
