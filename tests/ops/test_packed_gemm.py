"""Expert GEMMs with packed weights, against float64 on dequantized weights.

In the interpreter's leg Hopper's Gluon kernels run on the CPU (see `gluon_interpreter`).
"""

from functools import partial

import plans
import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from gemm_rows import SIZES_OF_MODELS, exact_rows, gemm_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_weights import HALF, OWN_ROWS, SERVED
from pairwise import half_exhaustive
from planning import problem_of_call
from plans import ids_of, partly_full, planned, row_tile
from products import stored_product, weight_of
from strategies import ACTIVATIONS

from moe_ops import dequantize_weight, ops, pack_weight, quantize_weight
from moe_ops.activation import formula
from moe_ops.dispatch.device import NO_GPU, assumed, device_facts
from moe_ops.dispatch.families import BY_NAME
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper_decode import DECODE_SLOT
from moe_ops.dispatch.tiles import ROW_TILES
from moe_ops.reference import expert_product as reference
from moe_ops.reference.slots import local_experts
from moe_ops.tensors import Tiles
from moe_ops.testing import Problem, assert_matches_reference, make_inputs

pytestmark = pytest.mark.kernel

if INTERPRETED:
    from gluon_interpreter import interpreted

    from moe_ops.kernels._gemm.operands import GemmOperands
    from moe_ops.kernels._gemm.run import launcher


def matmul(x, q, bias, weights, tiles, k, scheme, activation="", programs=3):
    """The operator's result; in the interpreter, that of Hopper's kernel."""
    call = (x, *q, bias, weights, [*tiles], k, scheme, activation)
    if not INTERPRETED:
        device = "cuda" if HAS_CUDA else "cpu"
        call = (None if t is None else t.to(device) for t in (x, *q, bias, weights))
        return stored_product(ops, *call, [*plans.on(tiles, device)], k, scheme, activation).cpu()
    out = stored_product(reference, *call)
    out = torch.full_like(out, torch.nan)
    if len(out) == 0:
        return out  # nothing is launched
    problem = problem_of_call("expert_product", a=x, w=q.data, w_scale=q.scale, tiles=tiles,
        top_k=k, scheme=scheme, activation=activation, boxes=True,
    )  # fmt: skip
    plan = plan_gemm(problem, device_facts(x.device))
    assert BY_NAME[plan.kernel].fragments
    operands = GemmOperands(x, None, weight_of(q, bias), weights, tiles)
    with interpreted(None if plan.kernel == DECODE_SLOT else programs):
        launcher(BY_NAME[plan.kernel])(problem, plan)(out, operands)
    return out


def check(problem, scheme, activation="", *, scaled=False, tile=None, direct=False):
    """The kernel is within the budget of the reference on the plain weight."""
    x, w, _, weights, ids, expert_map, bias, _ = make_inputs(problem)
    k, weights = problem.top_k, weights if scaled else None
    q = quantize_weight(w, scheme)
    rows = exact_rows(x, dequantize_weight(q, scheme), bias, weights, ids, k, expert_map, x.dtype)
    if activation:
        rows = rows.activated(formula(activation))
    with row_tile(tile, NO_GPU if INTERPRETED and not direct else None, portable_only=False):
        tiles = Tiles(None, ids, expert_map)
        if not direct:
            tiles = planned(ids, expert_map, len(w), scheme)
        call = (bias, weights, tiles, k, scheme, activation)
        actual = matmul(x, pack_weight(q, scheme), *call)
        expected = stored_product(reference, x, *q, *call[:2], [*tiles], *call[3:])
    mine = local_experts(ids, expert_map, len(w)) >= 0
    assert_matches_reference(actual[mine], rows.rounded(x.dtype)[mine], expected[mine])


@given(
    scheme=st.sampled_from(SERVED),
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    n=st.sampled_from((64, 128, 192)),
    kk=st.sampled_from((64, 128, 320)),
    tile=st.sampled_from(ROW_TILES),
    has_bias=st.booleans(),
    scaled=st.booleans(),
    local=st.sampled_from((None, 3)),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
)
def test_gemm(scheme, tokens, k, n, kk, tile, has_bias, scaled, local, routing):
    how = {"has_bias": has_bias, "routing": routing, "num_local_experts": local}
    check(gemm_problem(tokens, k, kk, n, torch.bfloat16, **how), scheme, scaled=scaled, tile=tile)


@pytest.mark.parametrize(("scheme", "tile"), half_exhaustive(SERVED, ROW_TILES, where=INTERPRETED))
def test_every_scheme_with_gates(scheme, tile):
    """Each scheme, and each tile, with gates in two forms."""
    kind = ("silu", "swigluoai")[(SERVED.index(scheme) // 2 + ROW_TILES.index(tile) // 2) % 2]
    problem = Problem(9, 4, 2, 192, 128, torch.bfloat16, kind, has_bias=True)
    check(problem, scheme, kind, scaled=True, tile=tile)


@pytest.mark.parametrize("tokens", [1, 9])
def test_gate_and_up_rows_that_share_a_chunk(tokens):
    """Kernels read them where they alternate, and refuse them where up rows follow gate rows."""
    for width in (32, 96):
        problem = Problem(tokens, 16, 2, 64, width, torch.bfloat16, "swigluoai")
        for direct in (False, True)[: 1 + (tokens == 1)]:
            check(problem, "mxfp4_w4a16", "swigluoai", direct=direct)
            if INTERPRETED or HAS_CUDA:
                with pytest.raises(NotImplementedError, match=f"of 128 .*, got {2 * width} "):
                    check(problem, "mxfp4_w4a16", "silu", direct=direct)


@pytest.mark.parametrize("scheme", ["int4_w4a16_g128", "int4_w4a16_g32_zp", "int8_w8a16"])
def test_full_tiles_with_gates(scheme):
    """Gate and up rows meet for every row of a tile of 64."""
    check(Problem(120, 2, 1, 128, 128, torch.bfloat16, "silu"), scheme, "silu", tile=64)


@pytest.mark.parametrize("tile", ROW_TILES)
@pytest.mark.parametrize("scheme", ["int4_w4a16_g128", "int8_w8a16"])
def test_tiles_that_are_partly_full(scheme, tile):
    """Halves or quarters of a tile are left out where all of their rows are padding."""
    counts, g = partly_full(tile), torch.Generator().manual_seed(0)
    ids, n, k = ids_of(counts, 1), 128, 128
    x = torch.randn(len(ids), k, generator=g).bfloat16()
    w = (torch.randn(len(counts), n, k, generator=g) / k**0.5).bfloat16()
    q = quantize_weight(w, scheme)
    exact = exact_rows(x, dequantize_weight(q, scheme), None, None, ids, 1, None, x.dtype)
    with row_tile(tile, NO_GPU if INTERPRETED else None, portable_only=False):
        tiles = planned(ids, None, len(w), scheme)
        actual = matmul(x, pack_weight(q, scheme), None, None, tiles, 1, scheme, programs=5)
        expected = stored_product(reference, x, *q, None, None, [*tiles], 1, scheme)
    assert_matches_reference(actual, exact.rounded(x.dtype), expected)


@pytest.mark.parametrize(
    ("activation", "tile"), half_exhaustive(ACTIVATIONS, [16, 128], where=INTERPRETED)
)
def test_activations(activation, tile):
    problem = Problem(20, 4, 2, 128, 128, torch.bfloat16, activation)
    check(problem, "mxfp4_w4a16", activation, tile=tile)


@pytest.mark.parametrize("scheme", ["int4_w4a16_g128", "mxfp4_w4a16"])
def test_tiles_with_many_rows(scheme):
    problem = gemm_problem(300, 1, 128, 320, torch.bfloat16, routing="skewed")
    check(problem, scheme, tile=128)


@pytest.mark.parametrize("scheme", HALF)
def test_half_precision(scheme):
    for tile in (16, 64):
        check(gemm_problem(9, 2, 192, 128, torch.float16, has_bias=True), scheme, tile=tile)


# The reference has no way of its own for few slots.
@settings(max_examples=settings().max_examples if HAS_CUDA or INTERPRETED else 6)
@given(
    scheme=st.sampled_from(SERVED),
    tokens=st.integers(1, 3),
    k=st.integers(1, 3),
    n=st.sampled_from((64, 192)),
    kk=st.sampled_from((64, 128, 704, 1408)),
    activation=st.sampled_from(("", *ACTIVATIONS)),
    has_bias=st.booleans(),
    scaled=st.booleans(),
    elsewhere=st.booleans(),
)
def test_few_slots(scheme, tokens, k, n, kk, activation, has_bias, scaled, elsewhere):
    """A slot's programs find its expert themselves. No more experts than so many slots need."""
    local = 8 * max(tokens * k, 2)
    experts = local + 8 * elsewhere
    how = {"has_bias": has_bias, "num_local_experts": local if elsewhere else None}
    how |= {"routing": "holes", "activation": activation or "silu_no_mul"}
    problem = Problem(tokens, experts, k, kk, n, torch.bfloat16, **how)
    check(problem, scheme, activation, scaled=scaled, direct=True)


@pytest.mark.parametrize("scheme", SERVED)
def test_few_slots_of_every_scheme(scheme):
    """In the interpreter, where schemes share the epilogue, with one activation each."""
    every, turn = ("silu", "swigluoai", "relu2_no_mul"), SERVED.index(scheme) % 3
    for activation in (every[turn],) if INTERPRETED else every:
        problem = Problem(1, 32, 4, 320, 64, torch.bfloat16, activation, has_bias=True)
        check(problem, scheme, activation, scaled=True, direct=True)


@pytest.mark.parametrize("scheme", ["int4_w4a16_g128", "mxfp4_w4a16", "int8_w8a16"])
def test_few_slots_on_a_small_gpu(scheme):
    """Programs of a slot do not fit at once: tiles of one slot, without a plan."""
    with assumed(NO_GPU._replace(processors=1)):
        for tokens, k, local in ((1, 2, None), (2, 1, 3)):
            how = {"activation": "silu", "num_local_experts": local}
            problem = Problem(tokens, 16, k, 192, 64, torch.bfloat16, **how)
            check(problem, scheme, "silu", direct=True)


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    half_exhaustive(
        ["int4_w4a16_g128_zp", "mxfp4_w4a16"],
        SIZES_OF_MODELS,
        where=not HAS_CUDA,
    ),
    ids=str,
)
def test_sizes_of_models(scheme, sizes):
    """K and N that are no multiples of a stage or of a tile, groups that end past K."""
    for tile in (32, 128):
        check(gemm_problem(6, 1, *sizes, torch.bfloat16, has_bias=True), scheme, tile=tile)


@pytest.mark.parametrize("magnitude", [1e-12, 1e-4, 300.0, 1e12])
@pytest.mark.parametrize(
    "scheme",
    ["mxfp4_w4a16", "mxfp6_e3m2", "nvfp4_w4a16", "fp8_w8a16", "int4_w4a16_g32", "int8_w8a16_g128"],
)
def test_small_and_large_weights(scheme, magnitude):
    problem = gemm_problem(5, 2, 64, 64, torch.bfloat16)
    x, w, _, _, ids, *_ = make_inputs(problem)
    q = quantize_weight((w.float() * magnitude).bfloat16(), scheme)
    rows = exact_rows(x, dequantize_weight(q, scheme), None, None, ids, 2, None, x.dtype)
    tiles = planned(ids, None, len(w), scheme)
    actual = matmul(x, pack_weight(q, scheme), None, None, tiles, 2, scheme)
    expected = stored_product(reference, x, *q, None, None, [*tiles], 2, scheme)
    assert_matches_reference(actual, rows.rounded(x.dtype), expected)


def test_scales_of_all_rows_of_an_expert():
    problem = gemm_problem(9, 1, 64, 128, torch.bfloat16)
    x, w, _, _, ids, *_ = make_inputs(problem)
    tiles = planned(ids, None, len(w), OWN_ROWS)
    for scheme, shape in (("int8_w8a16", (5,)), ("fp8_w8a16", (5, 2))):
        q = quantize_weight(w, scheme)._replace(scale=torch.rand(shape) / 99 + 0.01)
        expected = stored_product(reference, x, *q, None, None, [*tiles], 1, scheme)
        actual = matmul(x, pack_weight(q, scheme), None, None, tiles, 1, scheme)
        rows = exact_rows(x, dequantize_weight(q, scheme), None, None, ids, 1, None, x.dtype)
        assert_matches_reference(actual, rows.rounded(x.dtype), expected)


@pytest.mark.parametrize("tile", [None, 16, 128])
def test_scales_far_from_one(tile):
    """e8m0 scales are exact from 2**-55 to 2**63, and above that exact or infinite, never wrong."""
    tokens, known = 3 if tile else 1, NO_GPU if INTERPRETED and tile else None
    x, w, _, _, ids, *_ = make_inputs(gemm_problem(tokens, 1, 128, 128, torch.bfloat16))
    x, q = x.sign(), quantize_weight(w, "mxfp4_w4a16")

    def result(exponent):
        scale = torch.full_like(q.scale.view(torch.uint8), 127 + exponent).view(q.scale.dtype)
        packed = pack_weight(q._replace(scale=scale), "mxfp4_w4a16")
        rows = torch.ldexp(x.double(), torch.tensor(-exponent)).to(x.dtype)
        with row_tile(tile, known, portable_only=False):
            tiles = planned(ids, None, len(w), "mxfp4_w4a16") if tile else Tiles(None, ids, None)
            return matmul(rows, packed, None, None, tiles, 1, "mxfp4_w4a16")

    one = result(0)
    assert one.isfinite().all() and one.count_nonzero() > one.numel() // 2
    for exponent in (-55, -20, 40, 63):
        assert torch.equal(result(exponent), one), exponent
    for exponent in (65, 66, 67, 100, 127):
        found = result(exponent)
        assert torch.equal(torch.where(found.isfinite(), found, one), one), exponent


@pytest.mark.skipif(not INTERPRETED, reason="counts the programs of the interpreter")
@pytest.mark.parametrize("tile", [16, 128])
def test_any_number_of_programs(tile):
    """However tiles are shared out, every one is computed once, with the same bits."""
    problem = gemm_problem(40, 1, 192, 320, torch.bfloat16)
    x, w, _, _, ids, *_ = make_inputs(problem)
    q = pack_weight(quantize_weight(w, "mxfp4_w4a16"), "mxfp4_w4a16")
    with row_tile(tile, NO_GPU, portable_only=False):
        tiles = planned(ids, None, len(w), "mxfp4_w4a16")
        run = partial(matmul, x, q, None, None, tiles, 1, "mxfp4_w4a16")
        one, many = run(programs=1), run(programs=7)
    assert torch.equal(one, many) and not one.isnan().any()
