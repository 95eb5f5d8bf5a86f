"""Hopper's Gluon kernels over the cases of `kernel_cases`, in the tests' own interpreter.

Sizes follow from what TMA copies: rows of 128 bytes along K, boxes of 64 rows. Numbers are integers
and scales powers of two: without an activation sums are exact, and every bit is known.
"""

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("runs kernels in the interpreter", allow_module_level=True)

from expert_order import places  # noqa: E402
from gluon_interpreter import interpreted  # noqa: E402
from kernel_cases import (  # noqa: E402
    ACTIVATIONS,
    EXPERTS,
    Routed,
    assert_unwritten,
    cases,
    check_all,
    compare,
    laid_out,
    poisoned,
    whole,
    whole_rows,
    whole_weight,
)
from pairwise import cover  # noqa: E402
from planning import problem_of_call  # noqa: E402
from products import plain_product, scaled_product, stored_product, weight_of  # noqa: E402

from moe_ops import dequantize_weight, get_scheme, pack_weight  # noqa: E402
from moe_ops.activation import formula  # noqa: E402
from moe_ops.dispatch.device import NO_GPU  # noqa: E402
from moe_ops.dispatch.families import BY_NAME  # noqa: E402
from moe_ops.dispatch.gemm_plan import plan_gemm  # noqa: E402
from moe_ops.dispatch.hopper import FETCH, PACKED, STREAM, TOKEN, TOKEN_SUM, HopperTiles  # noqa: E402
from moe_ops.dispatch.hopper_decode import DECODE_SUM  # noqa: E402
from moe_ops.kernels._gemm.operands import GemmOperands  # noqa: E402
from moe_ops.kernels._gemm.run import launcher  # noqa: E402
from moe_ops.reference import expert_product as reference  # noqa: E402
from moe_ops.reference.quantize import moe_quantize  # noqa: E402
from moe_ops.reference.slots import local_experts  # noqa: E402
from moe_ops.scheme import dequantize_rows  # noqa: E402
from moe_ops.tensors import ExpertWeight, Tiles  # noqa: E402
from moe_ops.testing import Bounded, assert_matches_reference  # noqa: E402

pytestmark = pytest.mark.kernel
BF16 = torch.bfloat16
TILES = (
    (PACKED, 64, 128), (PACKED, 128, 256), (PACKED, 192, 256), (FETCH, 128, 256), (STREAM, 16, 64),
    (STREAM, 32, 128),
)  # fmt: skip
LAYOUTS = ("plain", "apart", "boxed")
"""Layouts that TMA can address."""


def counts_of(tile):
    """Slots of experts: a tile and a few more, none, and twice one more than a tile or part holds.

    Five tiles are two bands of two, and one of one.
    """
    return tile + 6, 0, tile + 1, 65 if tile == 192 else tile // 2 + 1


def run(problem, config, operands, like, programs, facts=NO_GPU):
    """A GEMM by the kernel of a config, or of the plan; rows that it does not write are NaN."""
    turned = operands.weight.data.stride(1) == 1
    problem = problem._replace(boxes=not turned, transposed=turned)
    plan = plan_gemm(problem, facts, config=config)
    assert config is None or plan.kernel == config.kernel
    out = torch.full_like(like, torch.nan)
    with interpreted(programs):
        launcher(BY_NAME[plan.kernel])(problem, plan)(out, operands)
    return out, plan.kernel


def operands_of(scheme, tokens, n, k):
    """Rows, their scales and numbers; a weight, its scales and numbers."""
    if scheme.weight is None:
        x, w = whole(tokens, k).bfloat16(), whole(EXPERTS, n, k, seed=1).bfloat16()
        return (x, None, x.double()), (w, None, w)
    q = whole_weight(scheme, n, k)
    return whole_rows(scheme, tokens, k), (q.data, q.scale, dequantize_weight(q, scheme))


def scaled_or_dense(
    tiles, name, activation, layout, routing, top_k, gap, has_bias, n, k, weighted, on_demand,
    programs,
):  # fmt: skip
    kernel, tile, block_n = tiles
    scheme = get_scheme(name)
    routed = Routed(routing, top_k, name, tile, counts_of(tile))
    count = 2 * n if activation and formula(activation).gated else n
    rows, (w, w_scale, weight) = operands_of(scheme, routed.tokens, count, k)
    bias = whole(EXPERTS, count, most=300, seed=2) / 4 if has_bias else None
    weights = routed.weights() if weighted and w_scale is None else None
    there, a = laid_out(routed.of_experts(w), layout), routed.rows(rows[0], gap)
    with routed.row_tile():
        how = {"tiles": routed.tiles, "top_k": top_k, "activation": activation}
        if w_scale is None:
            problem = problem_of_call("expert_product", a=a, w=there, topk_weights=weights, **how)
            expected = plain_product(
                reference, rows[0], w, bias, weights, [*routed.sound], top_k, activation
            )
        else:
            how |= {"a_scale": rows[1], "w_scale": w_scale, "scheme": name, "out_dtype": BF16}
            problem = problem_of_call("expert_product", a=a, w=there, **how)
            expected = scaled_product(
                reference,
                *rows[:2],
                w,
                w_scale,
                None,
                bias,
                [*routed.sound],
                top_k,
                name,
                BF16,
                activation,
            )
        given = ExpertWeight(there, bias, w_scale)
        operands = GemmOperands(a, rows[1], given, weights, routed.tiles)
        config = HopperTiles(kernel, tile, block_n, 2, 2, on_demand)
        out, _ = run(problem, config, operands, expected, programs)
    exact = routed.exact(rows[2], weight, bias, weights, activation)
    compare(out, exact, expected, routed, activation)


def served(tiles, name):
    """The swap-AB kernel takes 8-bit operands alone, and 192 rows only 16-bit ones."""
    dense = name == "unquantized"
    return not (tiles[0] == STREAM and dense) and not (tiles[1] == 192 and not dense)


def halves_in_groups(name, activation, n):
    """Gate and up rows apart share scales by 64 rows at least."""
    return "block" not in name or activation != "silu" or n % 64 == 0


RULES = (
    (("tiles", "name"), served),
    (("tiles", "routing"), lambda tiles, routing: routing[:3] != "few" or tiles[0] == STREAM),
    (("tiles", "on_demand"), lambda tiles, on: not on or tiles[0] != STREAM),
    (("name", "weighted"), lambda name, weighted: not weighted or name == "unquantized"),
    (
        ("name", "activation", "n"),
        lambda name, a, n: "block" not in name or a != "silu" or n == 192,
    ),
)


def test_packed_and_stream():
    blocks = ("fp8_block128", "int8_block128")
    names = ("unquantized", "fp8_channel", "int8_channel", "int8_tensor", *blocks)
    sizes = {"n": (192, 136, 72), "k": (128, 144, 272), "gap": (0, 16), "layout": LAYOUTS}
    flags = {"weighted": (False, True), "on_demand": (False, True), "programs": (2, 5)}
    check_all(cases(RULES, tiles=TILES, name=names, **sizes, **flags), scaled_or_dense)


def test_where_columns_are():
    """Tile, activation and scales in every combination: each has places of columns of its own."""
    few = {"layout": ("boxed",), "routing": ("plain",), "top_k": (2,), "gap": (0,), "n": (192,)}
    few |= {"k": (144,), "weighted": (False,), "on_demand": (False,), "programs": (2,)}
    few |= {"name": ("unquantized", "fp8_channel", "fp8_block128"), "has_bias": (True,)}
    few |= {"tiles": TILES, "activation": ACTIVATIONS}
    check_all(cover(few, RULES, 3), scaled_or_dense)


def test_transposed_weights():
    """The rows of a weight lie along its columns, as a data gradient reads it."""
    factors = {"layout": ("turned",), "routing": ("plain", "mapped", "spoilt"), "top_k": (1, 2)}
    factors |= {"gap": (0, 16), "n": (192, 136, 72, 264), "k": (128, 144, 272)}
    factors |= {"weighted": (False, True), "on_demand": (False, True), "programs": (2, 5)}
    factors |= {"name": ("unquantized",), "has_bias": (False, True), "activation": ("",)}
    check_all(cover({**factors, "tiles": ((FETCH, 128, 256),)}, RULES), scaled_or_dense)


def in_expert_order(tiles, activation, routing, n, k, on_demand, programs):
    """Rows that a GEMM with an activation writes, and that one without it reads: by expert."""
    kernel, tile, block_n = tiles
    routed = Routed(routing, 1, "unquantized", tile, counts_of(tile))
    count = 2 * n if activation and formula(activation).gated else n
    x, w = whole(routed.tokens, k).bfloat16(), whole(EXPERTS, count, k, seed=1).bfloat16()
    slots, rows = places(routed.ids, routed.expert_map, EXPERTS, False)
    given = x
    if not activation:
        given = torch.full_like(x, torch.nan).index_copy(0, rows, x[slots])
    with routed.row_tile():
        how = {"tiles": routed.tiles, "activation": activation, "expert_order": True}
        problem = problem_of_call("expert_product", a=given, w=w, **how)
        expected = plain_product(reference, x, w, None, None, [*routed.sound], 1, activation)
        config = HopperTiles(kernel, tile, block_n, 2, 2, on_demand)
        operands = GemmOperands(given, None, ExpertWeight(w), None, routed.tiles)
        out, _ = run(problem, config, operands, expected, programs)
    if activation:
        out = torch.full_like(out, torch.nan).index_copy(0, slots, out[rows])
    compare(out, routed.exact(x, w, None, None, activation), expected, routed, activation)


def test_packed_in_expert_order():
    factors = {"tiles": TILES[:3], "activation": ("", "silu", "swigluoai"), "n": (64, 136)}
    factors |= {"routing": ("plain", "mapped"), "k": (144, 272), "on_demand": (False, True)}
    check_all(cover({**factors, "programs": (2, 5)}, ()), in_expert_order)


def dequantized(
    tile, name, activation, layout, routing, top_k, gap, has_bias, n, k, weighted, dtype, programs
):
    scheme, few = get_scheme(name), routing.startswith("few")
    # On a GPU of one processor a tile has one of few slots: their programs do not fit at once.
    facts = NO_GPU._replace(processors=1) if few and gap else NO_GPU
    routed = Routed(routing, top_k, name, tile, counts_of(tile), facts)
    count = 2 * n if activation and formula(activation).gated else n
    q = whole_weight(scheme, count, k)
    q = q._replace(scale=q.scale.to(dtype) if scheme.weight.scale == "input" else q.scale)
    x = whole(routed.tokens, k).to(dtype)
    bias = whole(EXPERTS, count, most=300, seed=2) / 4 if has_bias else None
    weights = routed.weights() if weighted else None
    packed = pack_weight(q, name)
    with routed.row_tile():
        a = routed.rows(x, gap)
        problem = problem_of_call(
            "expert_product", a=a, w=packed.data, w_scale=packed.scale, tiles=routed.tiles,
            top_k=top_k, scheme=name, activation=activation, topk_weights=weights,
        )  # fmt: skip
        rest = (bias, weights, [*routed.sound], top_k, name, activation)
        expected = stored_product(reference, x, *q, *rest)
        operands = GemmOperands(a, None, weight_of(packed, bias), weights, routed.tiles)
        programs = None if few and not gap else programs
        out, kernel = run(problem, None, operands, expected, programs, facts)
        assert BY_NAME[kernel].fragments
    weight = dequantize_weight(q, scheme)
    exact = routed.exact(x, weight, bias, weights, activation, stored=dtype)
    compare(out, exact, expected, routed, activation)


def test_dequantized_in_registers():
    names = (
        "int8_w8a16", "int4_w4a16_g128", "int4_w4a16_g32_zp", "mxfp4_w4a16", "nvfp4_w4a16",
        "fp8_w8a16", "int8_w8a16_g32_zp",
    )  # fmt: skip
    sizes = {"n": (64, 192), "k": (64, 192), "gap": (0, 8), "layout": ("plain",)}
    flags = {"weighted": (False, True), "dtype": (BF16,), "programs": (2, 5)}
    tiles = (16, 32, 64, 128)
    check_all(cases(tile=tiles, name=names, **sizes, **flags), dequantized)
    few = {"layout": ("plain",), "routing": ("plain",), "top_k": (1,), "gap": (0,), "k": (64,)}
    few |= {"has_bias": (True,), "weighted": (True,), "dtype": (BF16,), "programs": (3,)}
    few |= {"name": ("int8_w8a16",), "tile": tiles, "n": (192,), "activation": ACTIVATIONS[1:]}
    check_all(cover(few, ()), dequantized)
    few |= {"routing": ("few", "few_mapped"), "gap": (0, 8), "tile": (16,), "top_k": (1, 2)}
    check_all(cover({**few, "activation": ACTIVATIONS}, ()), dequantized)


class OneToken:
    """The routing of one token, to so many experts that no plan is read, and a weight of them.

    Args:
        name: name of the scheme.
        k: columns of a row.
        n: weight rows.
        top_k: slots.
        mapped: whether there is an expert map, and with it slots of experts elsewhere.
        stored: whether rows are quantized before.
        rows: rows of the first operand.
    """

    def __init__(self, name, k, n, top_k, mapped, stored, rows):
        scheme, experts = get_scheme(name), max(16, 8 * top_k)
        self.ids = (torch.arange(top_k) * 7 % experts).int()[None]
        self.expert_map = None
        if mapped:
            self.expert_map = (torch.arange(experts + 2).int() * 3 - 2) % (experts + 5)
            self.ids[0, -1] = experts + 1
        elif top_k > 1:
            self.ids[0, 1] = -5
        self.expert = local_experts(self.ids, self.expert_map, experts)
        self.tiles, self.mine = Tiles(None, self.ids, self.expert_map), self.expert >= 0
        x, self.scale = whole(rows, k, most=6).bfloat16(), None
        if scheme.weight is None:
            self.w, self.w_scale = whole(experts, n, k, seed=1).bfloat16(), None
            self.rows, self.numbers, self.weight = x, x.double(), self.w.double()
            return
        q, quant = whole_weight(scheme, n, k, experts=experts), scheme.activation
        self.w, self.w_scale = q.data, q.scale
        self.weight, self.stored = dequantize_weight(q, scheme).double(), q
        if quant is None:
            self.rows, self.numbers = x, x.double()
            return
        x[:, ::100] = 448  # the scale of each row and group is one
        self.rows = x
        data, scale = moe_quantize(x, None, None, None, None, 1, quant.key)
        self.numbers = dequantize_rows(data, scale, quant).double()
        self.given = data, scale
        if stored:
            self.rows, self.scale = data, scale

    def poison(self):
        """NaN in what belongs to no slot that has an expert."""
        if len(self.rows) == len(self.mine):
            self.rows, self.scale = poisoned(self.rows, self.mine), poisoned(self.scale, self.mine)
        self.w = poisoned(self.w, torch.isin(torch.arange(len(self.w)), self.expert))

    def problem(self, operator, name, weights, **how):
        return problem_of_call(
            operator, a=self.rows, a_scale=self.scale, w=self.there, w_scale=self.w_scale,
            tiles=self.tiles, topk_weights=weights, scheme=name, out_dtype=BF16, **how,
        )  # fmt: skip

    def products(self, bias):
        """The slots' products with the bias, in float64."""
        count = len(self.expert) // len(self.numbers)
        rows = Bounded.exactly(self.numbers.repeat_interleave(count, 0))
        found = rows.products(self.weight, self.expert)
        return found if bias is None else found.plus(bias[self.expert])

    def bias(self, has_bias):
        sizes = self.w.shape[:2]
        return whole(*sizes, most=300, seed=2) / 4 if has_bias else None


def one_token(name, activation, layout, top_k, mapped, stored, has_bias, n, k, weighted, programs):
    count = 2 * n if formula(activation).gated else n
    token = OneToken(name, k, count, top_k, mapped, stored, 1)
    token.there = laid_out(token.w, layout)
    bias, dense = token.bias(has_bias), token.w_scale is None
    weights = 2.0 ** (torch.arange(top_k)[None] % 3 - 1) if weighted and dense else None
    problem = token.problem("expert_product", name, weights, top_k=top_k, activation=activation)
    weight = ExpertWeight(token.there, bias, token.w_scale)
    operands = GemmOperands(token.rows, token.scale, weight, weights, token.tiles)
    rest = ([*token.tiles], top_k)
    if dense:
        expected = plain_product(reference, token.rows, token.w, bias, weights, *rest, activation)
    else:
        given = (*token.given, token.w, token.w_scale, None, bias)
        expected = scaled_product(reference, *given, *rest, name, BF16, activation)
    out, kernel = run(problem, None, operands, expected, programs)
    assert kernel == TOKEN
    assert_unwritten(out, token.mine)
    exact = token.products(None)
    exact = exact if weights is None else exact.times(weights.view(-1, 1))
    exact = exact if bias is None else exact.plus(bias[token.expert])
    exact = exact.activated(formula(activation)).rounded(BF16)
    assert_matches_reference(out[token.mine], exact[token.mine], expected[token.mine])


def sum_of_rows(products, weights, mine):
    """The slots' rounded rows, weighted and summed in float32, as bf16 ``(n,)``."""
    each = products.value.float().to(BF16).float()
    each = each if weights is None else each * weights.view(-1, 1)
    total = torch.zeros(each.shape[1])
    for row in each[mine]:
        total += row
    return total.to(BF16)


def one_token_sum(name, layout, top_k, mapped, stored, has_bias, n, k, weighted, early, programs):
    """Every bit of the sum."""
    token = OneToken(name, k, n, top_k, mapped, stored, top_k)
    token.poison()
    token.there = laid_out(token.w, layout)
    bias = token.bias(has_bias)
    weights = 2.0 ** (torch.arange(top_k)[None] % 3 - 1) if weighted else None
    problem = token.problem("expert_product_sum", name, weights)
    weight = ExpertWeight(token.there, bias, token.w_scale)
    operands = GemmOperands(token.rows, token.scale, weight, weights, token.tiles, early)
    out, kernel = run(problem, None, operands, torch.empty(1, n, dtype=BF16), programs)
    assert kernel == TOKEN_SUM
    assert torch.equal(out[0], sum_of_rows(token.products(bias), weights, token.mine)), "every bit"


def dequantized_sum(name, top_k, mapped, has_bias, n, k, weighted, early):
    """Every bit of the sum, with a packed weight."""
    token = OneToken(name, k, n, top_k, mapped, False, top_k)
    token.rows = poisoned(token.rows, token.mine)
    packed, bias = pack_weight(token.stored, name), token.bias(has_bias)
    weights = 2.0 ** (torch.arange(top_k)[None] % 3 - 1) if weighted else None
    problem = problem_of_call(
        "expert_product_sum", a=token.rows, w=packed.data, w_scale=packed.scale, tiles=token.tiles,
        topk_weights=weights, scheme=name,
    )  # fmt: skip
    operands = GemmOperands(token.rows, None, weight_of(packed, bias), weights, token.tiles, early)
    out, kernel = run(problem, None, operands, torch.empty(1, n, dtype=BF16), None)
    assert kernel == DECODE_SUM
    assert torch.equal(out[0], sum_of_rows(token.products(bias), weights, token.mine)), "every bit"


def test_one_token():
    names = ("unquantized", "fp8_channel", "fp8_block128", "int8_channel", "int8_block128")
    factors = {"name": names, "layout": LAYOUTS, "stored": (False, True), "k": (128, 272, 528)}
    factors |= {"top_k": (1, 3), "mapped": (False, True), "n": (64, 72, 136)}
    factors |= {"has_bias": (False, True), "weighted": (False, True), "programs": (1, 3, 7)}
    activations = ("silu", "swigluoai", "relu2_no_mul")
    check_all(cover({**factors, "activation": activations}, ()), one_token)
    few = {"layout": ("plain",), "top_k": (1,), "mapped": (False,), "n": (72,), "k": (144,)}
    few |= {"weighted": (True,), "programs": (1,), "has_bias": (True,)}
    check_all(cover({**factors, **few, "activation": activations}, (), 3), one_token)
    sums = {"top_k": (1, 3, 10), "early": (False, True)}
    long = (("top_k", "k"), lambda top_k, k: top_k < 10 or k == 128)  # 80 experts
    check_all(cover({**factors, **sums}, [long]), one_token_sum)


def test_one_token_dequantized_in_registers():
    names = ("int8_w8a16", "int4_w4a16_g32_zp", "mxfp4_w4a16", "nvfp4_w4a16", "int8_w8a16_g32_zp")
    factors = {"name": names, "top_k": (1, 3, 10), "n": (64, 192), "k": (64, 192, 704)}
    factors |= {x: (False, True) for x in ("mapped", "has_bias", "weighted", "early")}
    check_all(cover(factors, ()), dequantized_sum)
