"""Every portable expert GEMM over the cases of `kernel_cases`, in the interpreter.

Tiles are 16 x 16, so that small sizes have several of them, and several steps along K. Numbers are
integers and scales powers of two: without an activation sums are exact, and every bit is known.
"""

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("runs kernels in the interpreter", allow_module_level=True)

from expert_order import places, poisoned  # noqa: E402
from kernel_cases import (  # noqa: E402
    EXPERTS,
    LAYOUTS,
    ROUTINGS,
    Routed,
    cases,
    check_all,
    compare,
    laid_out,
    whole,
    whole_rows,
    whole_weight,
)
from pairwise import cover  # noqa: E402
from products import plain_product, scaled_product, stored_product  # noqa: E402

from moe_ops import dequantize_weight, get_scheme, ops  # noqa: E402
from moe_ops.activation import formula  # noqa: E402
from moe_ops.dispatch import tuned  # noqa: E402
from moe_ops.dispatch.tiles import TileConfig  # noqa: E402
from moe_ops.inspect.devices import TARGETS  # noqa: E402
from moe_ops.kernels import expert_product  # noqa: E402
from moe_ops.kernels._gemm import scaled_slot  # noqa: E402
from moe_ops.reference import expert_dgrad as dgrad_reference  # noqa: E402
from moe_ops.reference import expert_product as dense_reference  # noqa: E402
from moe_ops.reference import expert_product as scaled_reference  # noqa: E402
from moe_ops.reference import expert_product as stored_reference  # noqa: E402
from moe_ops.reference.quantize import moe_quantize  # noqa: E402
from moe_ops.scheme.weights import dequantize_rows  # noqa: E402

pytestmark = pytest.mark.kernel
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLACKWELL = TARGETS["sm_100"].facts


def tiles_of(block_k):
    """Small tiles, in bands of two row tiles."""
    return TileConfig(16, 16, block_k, 2, 4, 1)


def weight_rows(n, activation):
    """Weight rows for ``n`` output columns."""
    return 2 * n if activation and formula(activation).gated else n


def bias_of(has_bias, n, activation):
    """Quarters, which no 16-bit dtype holds."""
    return whole(EXPERTS, weight_rows(n, activation), most=300, seed=2) / 4 if has_bias else None


def dense(activation, layout, routing, top_k, gap, has_bias, n, k, dtype, weighted):
    routed, tail = Routed(routing, top_k), (top_k, activation)
    x = whole(routed.tokens, k).to(dtype)
    w = whole(EXPERTS, weight_rows(n, activation), k, seed=1).to(dtype)
    bias, weights = bias_of(has_bias, n, activation), routed.weights() if weighted else None
    with routed.row_tile():
        out = plain_product(
            expert_product, routed.rows(x, gap), laid_out(routed.of_experts(w), layout),
            routed.of_experts(bias),
            weights, [*routed.tiles], *tail, config=tiles_of(16),
        )  # fmt: skip
        expected = plain_product(dense_reference, x, w, bias, weights, [*routed.sound], *tail)
    compare(out, routed.exact(x, w, bias, weights, activation), expected, routed, activation)


def test_dense():
    sizes = {"n": (16, 20, 36), "k": (16, 36, 40)}
    check_all(cases(**sizes, dtype=DTYPES, weighted=(False, True)), dense)


def dense_in_expert_order(activation, routing, n, k, dtype, weighted):
    """Rows that a GEMM with an activation writes, and that one without it reads: by expert."""
    routed, (ordered, tail) = Routed(routing, 1), (True, (1, activation))
    x, w = whole(routed.tokens, k), whole(EXPERTS, weight_rows(n, activation), k, seed=1)
    x, w, weights = x.to(dtype), w.to(dtype), routed.weights() if weighted else None
    slots, rows = places(routed.ids, routed.expert_map, EXPERTS, routing.startswith("few"))
    given = x if activation else poisoned(x[slots], rows, len(x))
    with routed.row_tile():
        out = plain_product(
            expert_product,
            given,
            w,
            None,
            weights,
            [*routed.tiles],
            *tail,
            ordered,
            config=tiles_of(16),
        )
        expected = plain_product(dense_reference, x, w, None, weights, [*routed.sound], *tail)
    if activation:
        out = torch.full_like(out, torch.nan).index_copy(0, slots, out[rows])
    compare(out, routed.exact(x, w, None, weights, activation), expected, routed, activation)


def test_dense_in_expert_order():
    factors = {"activation": ("", "silu"), "routing": ("plain", "mapped", "few"), "n": (20, 36)}
    factors |= {"k": (16, 36), "dtype": DTYPES, "weighted": (False, True)}
    check_all(cover(factors, ()), dense_in_expert_order)


def dense_added(layout, routing, top_k, gap, n, k, dtype, weighted, place):
    """Rows that cancel most of the product: what is rounded before the sum shows.

    ``place``: the first column, and the step from one to the next, of wider rows.
    """
    routed = Routed(routing, top_k)
    x, w = (whole(*s, most=12, seed=i) for i, s in enumerate(((routed.tokens, k), (EXPERTS, n, k))))
    x, w, weights = x.to(dtype), w.to(dtype), routed.weights() if weighted else None
    product = routed.exact(x, w, None, weights).value
    before = (1 - product).to(dtype)
    first, step = place
    whole_rows = torch.full((len(before), first + step * n), 7.0, dtype=dtype)
    columns = slice(first, None, step)
    whole_rows[:, columns] = before
    out = whole_rows.clone()
    with routed.row_tile():
        given = ([laid_out(routed.of_experts(w), layout)], weights, [*routed.tiles], top_k)
        expert_product.expert_product_out(routed.rows(x, gap), *given, False, *place, out=out)
    exact = torch.where(routed.mine[:, None], before.double() + product, before.double())
    whole_rows[:, columns] = exact.float().to(dtype)
    assert torch.equal(out, whole_rows), "every bit, of other columns too"


def test_dense_added():
    """Two steps along K: of 16 in float32, of 64 or 128 in 16 bits."""
    factors = {"layout": LAYOUTS, "routing": ROUTINGS, "top_k": (1, 2), "n": (16, 20, 68)}
    factors |= {"gap": (0, 3), "k": (16, 36, 132), "dtype": DTYPES, "weighted": (False, True)}
    factors |= {"place": ((0, 1), (16, 1), (1, 2))}
    check_all(cover(factors, ()), dense_added)


def scaled(activation, layout, routing, top_k, gap, has_bias, n, k, dtype, name):
    scheme, tail = get_scheme(name), (top_k, name, dtype, activation)
    routed = Routed(routing, top_k, name)
    q = whole_weight(scheme, weight_rows(n, activation), k)
    rows, scale, numbers = whole_rows(scheme, routed.tokens, k)
    bias = bias_of(has_bias, n, activation)
    data, w_scale = routed.of_experts(q.data), routed.of_experts(q.scale)
    head = (routed.rows(rows, gap), scale, laid_out(data, layout), w_scale)
    rest = (q.global_scale, bias)
    with routed.row_tile():
        out = scaled_product(
            expert_product,
            *head,
            *rest,
            [*routed.tiles],
            *tail,
            config=tiles_of(32 if scheme.dequantizes_both else 16),
        )
        head = (rows, scale, q.data, q.scale)
        expected = scaled_product(scaled_reference, *head, *rest, [*routed.sound], *tail)
    exact = routed.exact(numbers, dequantize_weight(q, scheme), bias, None, activation)
    compare(out, exact, expected, routed, activation)


def test_scaled():
    names = ("fp8_tensor", "int8_channel", "fp8_block16x32", "fp8_block32x16", "int8_block16")
    check_all(cases(n=(32, 20, 36), k=(16, 36, 72), dtype=DTYPES[::2], name=names), scaled)


def test_both_dequantized():
    names = ("mxfp8", "mxfp4", "nvfp4", "mxfp4_w4a8", "mxfp4_w4a8_token", "int4_w4a8_g32")
    check_all(cases(n=(16, 20, 36), k=(32, 68, 96), dtype=DTYPES[:1], name=names), scaled)


def block_scaled(activation, layout, routing, top_k, gap, has_bias, n, k, dtype, name):
    scheme, tail = get_scheme(name), (top_k, name, dtype, activation)
    routed = Routed(routing, top_k, name, facts=BLACKWELL)
    q = whole_weight(scheme, weight_rows(n, activation), k)
    rows, scale, numbers = whole_rows(scheme, routed.tokens, k)
    bias = bias_of(has_bias, n, activation)
    rest = (q.scale, q.global_scale, bias)
    with routed.row_tile():
        out = scaled_product(
            expert_product, routed.rows(rows, gap), scale, laid_out(routed.of_experts(q.data),
            layout), *rest,
            [*routed.tiles], *tail, config=tiles_of(64),
        )  # fmt: skip
        expected = scaled_product(
            scaled_reference, rows, scale, q.data, *rest, [*routed.sound], *tail
        )
    exact = routed.exact(numbers, dequantize_weight(q, scheme), bias, None, activation)
    compare(out, exact, expected, routed, activation)


def test_block_scaled():
    names = ("mxfp8", "mxfp4", "nvfp4", "mxfp4_mxfp8", "mxfp4_w4a8", "mxfp4_w4a8_token")
    check_all(cases(n=(16, 20, 36), k=(64, 100, 160), dtype=DTYPES[:1], name=names), block_scaled)


def weight_only(
    activation, layout, routing, top_k, gap, has_bias, n, k, block_k, dtype, weighted, name
):
    scheme, tail = get_scheme(name), (top_k, name, activation)
    routed = Routed(routing, top_k, name)
    q = whole_weight(scheme, weight_rows(n, activation), k)
    x = whole(routed.tokens, k).to(dtype)
    bias, weights = bias_of(has_bias, n, activation), routed.weights() if weighted else None
    rest = (*q[1:], bias, weights)
    with routed.row_tile():
        out = stored_product(
            expert_product, routed.rows(x, gap), laid_out(routed.of_experts(q.data), layout), *rest,
            [*routed.tiles], *tail, config=tiles_of(block_k),
        )  # fmt: skip
        expected = stored_product(stored_reference, x, q.data, *rest, [*routed.sound], *tail)
    weight = dequantize_weight(q, scheme)
    exact = routed.exact(x, weight, bias, weights, activation, stored=dtype)
    compare(out, exact, expected, routed, activation)


def test_weight_only():
    names = (
        "int8_w8a16", "int4_w4a16_g32_zp", "int8_w8a16_g32_zp", "fp8_w8a16_block16x32",
        "mxfp4_w4a16", "nvfp4_w4a16",
    )  # fmt: skip
    sizes = {"n": (16, 20, 36), "k": (32, 68, 96), "block_k": (32, 64)}
    rows = cases(**sizes, dtype=DTYPES[::2], weighted=(False, True), name=names)
    check_all(rows, weight_only)


def slot(activation, layout, routing, top_k, gap, has_bias, n, k, dtype, name):
    """Rows whose largest magnitude is the element's: their scale is one."""
    scheme, tail = get_scheme(name), (top_k, name, dtype, activation)
    routed = Routed(routing, top_k, name)
    q = whole_weight(scheme, weight_rows(n, activation), k)
    x = whole(routed.tokens, k, most=6).to(dtype)
    x[:, k - 3] = scheme.activation.element.largest
    bias, rest = bias_of(has_bias, n, activation), (q.scale, None)
    with routed.row_tile():
        out = scaled_product(
            expert_product, routed.rows(x, gap), None, laid_out(routed.of_experts(q.data),
            layout), *rest, bias,
            [*routed.tiles], *tail,
        )  # fmt: skip
        given = moe_quantize(x, None, None, None, None, 1, scheme.activation.key)
        expected = scaled_product(
            scaled_reference, *given, q.data, *rest, bias, [*routed.sound], *tail
        )
    numbers = dequantize_rows(*given, scheme.activation).double()
    exact = routed.exact(numbers, dequantize_weight(q, scheme), bias, None, activation)
    compare(out, exact, expected, routed, activation)


def test_slot(monkeypatch):
    """Rows are read in pieces of 64 or of 32 numbers to find their largest magnitude."""
    monkeypatch.setattr(scaled_slot, "BYTES_AT_ONCE", 2)
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([]))  # with launches of their own
    names = ("int8_channel", "fp8_channel")
    sizes = {"n": (32, 20, 36), "k": (128, 132, 260), "dtype": DTYPES[::2]}
    check_all(cases(routing=("few", "few_mapped"), **sizes, name=names), slot)


def dgrad(layout, routing, top_k, n, k, dtype, name):
    scheme = get_scheme(name)
    routed, q = Routed(routing, top_k, name), whole_weight(scheme, n, k)
    dy = whole(routed.tokens, n).to(dtype)
    rest = (q.scale, q.zero_point, q.global_scale)
    with routed.row_tile():
        w = laid_out(routed.of_experts(q.data), layout)
        out = ops.expert_dgrad(routed.rows(dy), w, *rest, [*routed.tiles], top_k, name)
        expected = dgrad_reference.expert_dgrad(dy, q.data, *rest, [*routed.sound], top_k, name)
    weight = dequantize_weight(q, scheme).mT
    exact = routed.exact(dy, weight, None, None, stored=dtype)
    compare(out, exact, expected, routed, "")


def test_dgrad():
    """Two steps along N, of 64 rows or of 16, and two tiles of columns, of 128 or of 64."""
    names = (
        "int8_w8a16", "int4_w4a16_g32_zp", "int8_w8a16_g32_zp", "fp8_block16x32", "nvfp4_w4a16",
        "int4_w4a8_g32",
    )  # fmt: skip
    factors = {"layout": LAYOUTS, "routing": ROUTINGS, "top_k": (1, 2)}
    factors |= {"n": (16, 36, 68), "k": (64, 84, 132), "dtype": DTYPES[::2], "name": names}
    check_all(cover(factors, ()), dgrad)
