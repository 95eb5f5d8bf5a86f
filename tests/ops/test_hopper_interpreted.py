"""Hopper's Gluon kernels, but those of packed weights, on the CPU in the tests' own interpreter.

On a GPU `test_hopper` compares them with the portable kernels.
"""

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("runs kernels in the interpreter", allow_module_level=True)

from gemm_rows import exact_rows, exact_scaled_rows, numbers  # noqa: E402
from gluon_interpreter import interpreted  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from planning import problem_of_call
from plans import planned, row_tile, whole_numbers  # noqa: E402
from products import plain_product, scaled_product, weight_of

from moe_ops import get_scheme, quantize_weight
from moe_ops.activation import formula
from moe_ops.dispatch.device import NO_GPU
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import KERNELS as HOPPERS
from moe_ops.dispatch.hopper import PACKED, HopperTiles, most_stages, tile_widths
from moe_ops.dispatch.operands import operands_of
from moe_ops.dispatch.problem import problem_of
from moe_ops.dispatch.tiles import is_direct
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._hopper.gemm import HopperGemm
from moe_ops.reference import expert_product as reference
from moe_ops.reference.quantize import moe_quantize
from moe_ops.reference.slots import local_experts
from moe_ops.tensors import ExpertWeight
from moe_ops.testing import Problem, assert_matches_reference, make_inputs

pytestmark = pytest.mark.kernel
SCHEMES = (
    "unquantized", "fp8_channel", "fp8_block128", "int8_channel", "int8_tensor", "int8_block128",
)  # fmt: skip
TILES = [
    (kernel, block_m, block_n, itemsize)
    for kernel in HOPPERS
    for itemsize in (1, 2)
    for block_m in (16, 32, 64, 128, 192)
    for block_n in tile_widths(kernel, block_m, itemsize)
]


def run(gemm, config, operands, like):
    """A GEMM by Hopper's kernel with these tiles; rows that it does not write are NaN."""
    found = plan_gemm(gemm._replace(boxes=True), NO_GPU, config=config)
    assert found.kernel == config.kernel
    out = torch.full_like(like, torch.nan)
    with interpreted(3):
        HopperGemm(gemm, found)(out, operands)
    return out


def check(problem, scheme, activation, tiles):
    """Hopper's kernel with these tiles is within the budget of the reference."""
    kernel, block_m, block_n, on_demand = tiles
    x, w, _, _, ids, expert_map, bias, _ = make_inputs(problem)
    k, quant = problem.top_k, get_scheme(scheme).activation
    config = HopperTiles(kernel, block_m, block_n, 4, 2, on_demand)
    assert most_stages(config, NO_GPU) >= 2
    with row_tile(block_m, NO_GPU, portable_only=False):
        plan = planned(ids, expert_map, len(w), scheme)
        if quant is None:
            rows = exact_rows(x, w, bias, None, ids, k, expert_map)
            how = {"top_k": k, "activation": activation}
            gemm = problem_of_call("expert_product", a=x, w=w, tiles=plan, **how)
            expected = plain_product(reference, x, w, bias, None, [*plan], k, activation)
            operands = GemmOperands(x, None, ExpertWeight(w, bias), None, plan)
        else:
            q = quantize_weight(w, scheme)
            data, scale = moe_quantize(x, None, None, ids, expert_map, len(w), quant.key)
            of_slots = local_experts(ids, expert_map, len(w))
            stored = numbers(data, scale, scheme, k)
            rows = exact_scaled_rows(stored, q.data, q.scale, bias, of_slots, scheme)
            call = (data, scale, q.data, q.scale)
            how = {"top_k": k, "scheme": scheme, "activation": activation}
            rows_and_scale = {"a": data, "a_scale": scale, "w": q.data, "w_scale": q.scale}
            gemm = problem_of_call("expert_product", **rows_and_scale, tiles=plan, **how)
            rest = (None, bias, [*plan], k, scheme, x.dtype, activation)
            expected = scaled_product(reference, *call, *rest)
            operands = GemmOperands(data, scale, weight_of(q, bias), None, plan)
        out = run(gemm, config, operands, expected)
    mine = local_experts(ids, expert_map, len(w)) >= 0
    rows = (rows.activated(formula(activation)) if activation else rows).rounded(x.dtype)
    assert_matches_reference(out[mine], rows[mine], expected[mine])


@pytest.mark.parametrize("tiles", TILES, ids=lambda t: "-".join(map(str, t)))
@pytest.mark.parametrize("activation", ["silu", "swigluoai", ""])
def test_every_tile(tiles, activation):
    """Tiles that the last rows, columns and numbers along K do not fill.

    Every two of tiles, activation and scheme of 8-bit operands meet in half of their product.
    """
    place = TILES.index(tiles) + (activation == "swigluoai")
    *tiles, itemsize = tiles
    kind = activation or "silu_no_mul"
    for i, scheme in enumerate(SCHEMES):
        if (scheme == "unquantized") if itemsize == 2 else i and (place + i) % 2:
            problem = Problem(50, 3, 2, 320, 192, torch.bfloat16, kind, has_bias=True)
            check(problem, scheme, activation, (*tiles, False))


@pytest.mark.parametrize("scheme", ["unquantized", "int8_channel"])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "gelu_no_mul"])
def test_the_product_before_the_activation(scheme, activation):
    """It is what a GEMM without an activation returns, and the other result keeps its bits."""
    problem = Problem(50, 3, 2, 320, 192, torch.bfloat16, activation, has_bias=True)
    x, w, _, _, ids, expert_map, bias, _ = make_inputs(problem)
    k, quant = problem.top_k, get_scheme(scheme).activation
    rows, weight = (x, None), ExpertWeight(w, bias)
    if quant is not None:
        rows = moe_quantize(x, None, None, ids, expert_map, len(w), quant.key)
        weight = weight_of(quantize_weight(w, scheme), bias)
    for block_m in (64, 128) if quant else (64, 128, 192):
        config = HopperTiles(PACKED, block_m, 256, 4, 2)
        results = []
        with row_tile(block_m, NO_GPU, portable_only=False):
            plan = planned(ids, expert_map, len(w), scheme)
            for key in ("", activation):
                call = {"top_k": k, "scheme": scheme, "activation": key, "out_dtype": x.dtype}
                call["expert_order"] = ordered = key != "" and quant is None
                operands = GemmOperands(*rows, weight, None, plan)
                gemm = problem_of(
                    operands_of("expert_product", operands._asdict() | call)
                )._replace(boxes=True)
                columns = w.shape[1] if not key else w.shape[1] // (1 + formula(key).gated)
                like = x.new_empty(len(x) * k, columns)
                results.append(run(gemm, config, operands, like))
            product = torch.full((len(x) * k, w.shape[1]), torch.nan, dtype=x.dtype)
            again = run(gemm, config, operands._replace(product=product), like)
        mine = local_experts(ids, expert_map, len(w)) >= 0
        used = slice(int(mine.sum())) if ordered else mine
        assert torch.equal(again[used], results[1][used])
        assert torch.equal(product[mine], results[0][mine])
        assert product[~mine].isnan().all()


@pytest.mark.parametrize("tiles", TILES, ids=lambda t: "-".join(map(str, t)))
def test_long_sums_of_integers_are_exact(tiles):
    """More than 2**24, and less than -2**24: no float32 on the way may hold them."""
    *tiles, itemsize = tiles
    if itemsize == 2:
        return
    config = HopperTiles(*tiles, 4, 2)
    ids = torch.arange(9, dtype=torch.int32)[:, None] % 3
    a, w = (
        (127 - whole_numbers(*shape, most=20).abs()).to(torch.int8)
        for shape in ((9, 2064), (3, 72, 2064))
    )
    w[1] *= -1
    scale, w_scale = torch.ones(9, 1), torch.ones(3, 72, 1)
    with row_tile(config.block_m, NO_GPU, portable_only=False):
        plan = planned(ids, None, 3, "int8_channel")
        gemm = problem_of_call(
            "expert_product", a=a, a_scale=scale, w=w, w_scale=w_scale, tiles=plan,
            scheme="int8_channel", out_dtype=torch.float32,
        )  # fmt: skip
        operands = GemmOperands(a, scale, ExpertWeight(w, None, w_scale), None, plan)
        out = run(gemm, config, operands, torch.empty(9, 72))
    exact = (w.long()[ids.flatten()] * a.long()[:, None]).sum(2)
    assert exact.abs().min() > 2**24 and torch.equal(out, exact.float())


@settings(max_examples=12)
@given(
    scheme=st.sampled_from(SCHEMES),
    tokens=st.sampled_from((1, 7, 150)),
    k=st.integers(1, 3),
    kk=st.sampled_from((64, 128, 336)),
    n=st.sampled_from((64, 200, 256)),
    local=st.sampled_from((None, 2)),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
    on_demand=st.booleans(),
    tiles=st.sampled_from(TILES),
)
def test_gemm(scheme, tokens, k, kk, n, local, routing, on_demand, tiles):
    kernel, block_m, block_n, itemsize = tiles
    if (scheme == "unquantized") != (itemsize == 2) or (n == 200 and "block" in scheme):
        return
    if kernel == "hopper_packed" and is_direct(tokens * k, 5 if local is None else local):
        return  # so few slots have no plan, by which rows are gathered
    problem = Problem(
        tokens, 5, k, kk, n, torch.bfloat16, "silu", num_local_experts=local, routing=routing
    )
    dynamic = on_demand and kernel == "hopper_packed"  # the other one has no such schedule
    check(problem, scheme, "silu", (kernel, block_m, block_n, dynamic))
