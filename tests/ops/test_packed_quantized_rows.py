"""Expert GEMMs with packed weights and quantized rows, against float64 on what they stand for.

In the interpreter's leg Hopper's Gluon kernels run on the CPU (see `gluon_interpreter`).
"""

from functools import partial

import plans
import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from decoded_gemms import quantized_rows, spoil
from e4m3_numbers import assert_same_nans
from gemm_rows import SIZES_OF_MODELS, exact_rows, gemm_problem
from hypothesis import given
from hypothesis import strategies as st
from packed_weights import ROWS_SERVED, UNDER_FP8, WIDENED_ROWS
from pairwise import half_exhaustive
from planning import problem_of_call
from plans import ids_of, partly_full, planned, row_tile
from products import scaled_product, weight_of
from strategies import ACTIVATIONS

from moe_ops import dequantize_weight, get_scheme, ops, pack_weight, quantize_weight
from moe_ops.activation import formula
from moe_ops.dispatch.device import NO_GPU
from moe_ops.dispatch.families import BY_NAME
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import HopperTiles
from moe_ops.dispatch.hopper_decode import DECODE_MANY, DECODE_SLOT, decodes_to_fp8
from moe_ops.dispatch.tiles import ROW_TILES
from moe_ops.reference import expert_product as reference
from moe_ops.reference.slots import local_experts
from moe_ops.tensors import Tiles
from moe_ops.testing import Problem, assert_matches_reference, make_inputs

pytestmark = pytest.mark.kernel
BF16 = torch.bfloat16

if INTERPRETED:
    from gluon_interpreter import interpreted

    from moe_ops.kernels._gemm.operands import GemmOperands
    from moe_ops.kernels._gemm.run import launcher


def matmul(rows, q, bias, tiles, k, scheme, activation="", *, dtype=BF16, programs=3, config=None):
    """The operator's result; in the interpreter, that of Hopper's kernel.

    ``rows``: numbers and scales, or rows that the operator quantizes and None.
    """
    head, tail = (*rows, q.data, q.scale, q.global_scale, bias), (k, scheme, dtype, activation)
    if not INTERPRETED:
        device = "cuda" if HAS_CUDA else "cpu"
        head = (None if t is None else t.to(device) for t in head)
        return scaled_product(ops, *head, [*plans.on(tiles, device)], *tail).cpu()
    out = torch.full_like(scaled_product(reference, *head, [*tiles], *tail), torch.nan)
    if len(out) == 0:
        return out  # nothing is launched
    problem = problem_of_call(
        "expert_product", a=rows[0], a_scale=rows[1], w=q.data, w_scale=q.scale, tiles=tiles,
        top_k=k, scheme=scheme, activation=activation, out_dtype=dtype, boxes=True,
    )  # fmt: skip
    plan = plan_gemm(problem, NO_GPU, config=config)
    assert BY_NAME[plan.kernel].fragments
    assert plan.quantizes_rows == (rows[1] is None)
    operands = GemmOperands(*rows, weight_of(q, bias), None, tiles)
    with interpreted(None if plan.kernel == DECODE_SLOT else programs):
        launcher(BY_NAME[plan.kernel])(problem, plan)(out, operands)
    return out


def check(problem, scheme, activation="", *, stored=True, tile=None, direct=False):
    """The kernel is within the budget of the reference on the plain weight.

    Skipped slots' rows are NaN (unless all rows share a scale of their own), and so are scales of
    experts that no slot has.
    """
    x, w, _, _, ids, expert_map, bias, _ = make_inputs(problem)
    k, q, dtype = problem.top_k, quantize_weight(w, scheme), x.dtype
    stored |= scheme not in WIDENED_ROWS
    local = local_experts(ids, expert_map, len(w))
    used = (local >= 0).view(len(x), k).any(1)
    quant = get_scheme(scheme).activation
    spoil(x, ~used, quant)
    data, scale, numbers = quantized_rows(x, quant)
    weight = dequantize_weight(q, scheme).double()
    exact = exact_rows(numbers.nan_to_num(), weight, bias, None, ids, k, expert_map)
    if activation:
        exact = exact.activated(formula(activation))
    with row_tile(tile, NO_GPU if INTERPRETED else None, portable_only=False):
        tiles = Tiles(None, ids, expert_map)
        if not direct:
            tiles = planned(ids, expert_map, len(w), scheme)
        call, rows = (tiles, k, scheme, activation), (data, scale) if stored else (x, None)
        packed = pack_weight(q, scheme)
        for e in set(range(len(w))) - set(local.tolist()):
            packed.global_scale is None or packed.global_scale[e].fill_(torch.nan)
        actual = matmul(rows, packed, bias, *call, dtype=dtype)
        head = (data, scale, q.data, q.scale, q.global_scale, bias, [*tiles])
        expected = scaled_product(reference, *head, k, scheme, dtype, activation)
    mine = local >= 0
    assert_matches_reference(actual[mine], exact.rounded(dtype)[mine], expected[mine])


@given(
    scheme=st.sampled_from(ROWS_SERVED),
    stored=st.booleans(),
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    n=st.sampled_from((64, 128, 192)),
    kk=st.sampled_from((64, 128, 320)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
    tile=st.sampled_from(ROW_TILES),
    has_bias=st.booleans(),
    local=st.sampled_from((None, 3)),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
)
def test_gemm(scheme, stored, tokens, k, n, kk, dtype, tile, has_bias, local, routing):
    how = {"has_bias": has_bias, "routing": routing, "num_local_experts": local}
    check(gemm_problem(tokens, k, kk, n, dtype, **how), scheme, stored=stored, tile=tile)


@pytest.mark.parametrize("scheme", ROWS_SERVED)
def test_every_scheme_with_gates(scheme):
    """Each scheme, and each tile, with gates in two forms; in the interpreter in turns."""
    mine = ROW_TILES[ROWS_SERVED.index(scheme) % 2 :: 2] if INTERPRETED else ROW_TILES
    for tile in mine:
        stored = (ROWS_SERVED.index(scheme) // 2 + mine.index(tile)) % 2 == 0
        kind = "silu" if stored else "swigluoai"
        problem = Problem(9, 4, 2, 192, 128, BF16, kind, has_bias=True)
        check(problem, scheme, kind, stored=stored, tile=tile)


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("scheme", ["nvfp4", "int4_w4a8_g128", "mxfp4_w4a8"])
def test_rows_grouped_by_expert(scheme, tile):
    """Only rows below an expert's count are read; static scales are one an expert."""
    counts, most, n, k = (tile + 1, 0, 3), tile + 5, 128, 192
    g = torch.Generator().manual_seed(0)
    x = torch.randn(len(counts) * most, k, generator=g).bfloat16()
    q = quantize_weight((torch.randn(len(counts), n, k, generator=g) / k**0.5).bfloat16(), scheme)
    data, scale, numbers = quantized_rows(x, get_scheme(scheme).activation)
    if get_scheme(scheme).activation.static:
        factors = torch.tensor([[1.0], [3.0], [0.25]])
        scale, numbers = scale * factors, numbers * factors.repeat_interleave(most, 0)
    used = (torch.arange(most) < torch.tensor(counts)[:, None]).flatten()
    ids = torch.arange(len(counts)).repeat_interleave(most)[:, None]
    exact = exact_rows(numbers, dequantize_weight(q, scheme).double(), None, None, ids, 1)
    with row_tile(tile, NO_GPU if INTERPRETED else None, portable_only=False):
        counted = torch.tensor(counts, dtype=torch.int32)
        tiles = Tiles(ops.plan_batched(counted.to("cuda" if HAS_CUDA else "cpu"), most, scheme))
        tiles = Tiles(*plans.on(tiles, "cpu"))
        actual = matmul((data, scale), pack_weight(q, scheme), None, tiles, 1, scheme)
        head = (data, scale, q.data, q.scale, q.global_scale, None, [*tiles])
        expected = scaled_product(reference, *head, 1, scheme, BF16)
    assert_matches_reference(actual[used], exact.rounded(BF16)[used], expected[used])


@pytest.mark.parametrize("tile", ROW_TILES)
def test_tiles_that_are_partly_full(tile):
    """Halves or quarters of a tile are left out where all of their rows are padding."""
    scheme, counts = "int4_w4a8_g128", partly_full(tile)
    g = torch.Generator().manual_seed(0)
    ids, n, k = ids_of(counts, 1), 128, 128
    x = torch.randn(len(ids), k, generator=g).bfloat16()
    x *= torch.logspace(-3, 3, len(x))[:, None].bfloat16()  # rows differ in their scales
    q = quantize_weight(torch.randn(len(counts), n, k, generator=g).bfloat16() / k**0.5, scheme)
    data, scale, numbers = quantized_rows(x, get_scheme(scheme).activation)
    exact = exact_rows(numbers, dequantize_weight(q, scheme).double(), None, None, ids, 1)
    with row_tile(tile, NO_GPU if INTERPRETED else None, portable_only=False):
        tiles = planned(ids, None, len(q.data), scheme)
        packed = pack_weight(q, scheme)
        actual = matmul((data, scale), packed, None, tiles, 1, scheme, programs=5)
        later = matmul((x, None), packed, None, tiles, 1, scheme, programs=5)
        head = (data, scale, q.data, q.scale, q.global_scale, None, [*tiles])
        expected = scaled_product(reference, *head, 1, scheme, BF16)
    assert_matches_reference(actual, exact.rounded(BF16), expected)
    assert torch.equal(actual, later)


ON_DEMAND, STATIC = (
    HopperTiles(DECODE_MANY, 64, 256, 4, 3, on_demand=True),
    HopperTiles(DECODE_MANY, 128, 256, 3, 2),
)


TOLD = pytest.mark.skipif(not INTERPRETED, reason="tiles are given to the interpreter")


@TOLD
@pytest.mark.parametrize(
    ("scheme", "activation", "config"),
    [
        ("int4_w4a8_g128", "", ON_DEMAND),
        ("int4_w4a8_g128", "silu", STATIC),
        ("int4_w4a8_g256", "silu", ON_DEMAND),
        ("int4_w4a8_g256", "", STATIC),
    ],
)
def test_products_in_fp8(scheme, activation, config):
    """The kernel for many rows: groups of one stage and of two, a last stage that is half empty."""
    assert decodes_to_fp8(config.kernel, get_scheme(scheme))
    tile, g = config.block_m, torch.Generator().manual_seed(0)
    ids, n, k = ids_of((1, tile // 2, 2 * tile + 1, 0, tile), 1), 384, 320
    x = torch.randn(len(ids), k, generator=g).bfloat16()
    x *= torch.logspace(-3, 3, len(x))[:, None].bfloat16()
    q = quantize_weight((torch.randn(5, n, k, generator=g) / k**0.5).bfloat16(), scheme)
    data, scale, numbers = quantized_rows(x, get_scheme(scheme).activation)
    exact = exact_rows(numbers, dequantize_weight(q, scheme).double(), None, None, ids, 1)
    if activation:
        exact = exact.activated(formula(activation))
    call = (1, scheme)
    with row_tile(tile, NO_GPU, portable_only=False):
        tiles = planned(ids, None, 5, scheme)
        head, more = (pack_weight(q, scheme), None, tiles, *call), {"activation": activation}
        actual = matmul((data, scale), *head, **more, programs=5, config=config)
        later = matmul((x, None), *head, **more, programs=5, config=config)
        head = (data, scale, q.data, q.scale, q.global_scale, None, [*tiles])
        expected = scaled_product(reference, *head, *call, BF16, activation)
    assert_matches_reference(actual, exact.rounded(BF16), expected)
    assert torch.equal(actual, later)


@pytest.mark.parametrize(
    ("scheme", "config"),
    [
        ("nvfp4", None),
        ("mxfp8", None),
        ("int4_w4a8_g128", None),
        pytest.param("int4_w4a8_g128", ON_DEMAND, marks=TOLD),
        ("mxfp4_w4a8", None),
    ],
)
def test_rows_with_nan(scheme, config):
    tile, g = config.block_m if config else 16, torch.Generator().manual_seed(0)
    ids, n, k = ids_of((3, tile // 2, 0, 5), 1), 256, 320
    x = torch.randn(len(ids), k, generator=g).bfloat16()
    x[1, 37], x[4, 90] = torch.nan, -torch.nan
    q = quantize_weight((torch.randn(4, n, k, generator=g) / k**0.5).bfloat16(), scheme)
    data, scale, numbers = quantized_rows(x, get_scheme(scheme).activation)
    weight = dequantize_weight(q, scheme).double()
    exact = exact_rows(numbers.nan_to_num(), weight, None, None, ids, 1).rounded(BF16)
    with row_tile(tile, NO_GPU if INTERPRETED else None, portable_only=False):
        tiles = planned(ids, None, len(q.data), scheme)
        packed = pack_weight(q, scheme)
        actual = matmul((data, scale), packed, None, tiles, 1, scheme, config=config)
        head = (data, scale, q.data, q.scale, q.global_scale, None, [*tiles])
        expected = scaled_product(reference, *head, 1, scheme, BF16)
    assert expected[[1, 4]].isnan().all()
    assert_same_nans(actual, exact, expected)


@pytest.mark.parametrize(
    ("activation", "tile"), half_exhaustive(ACTIVATIONS, [16, 128], where=INTERPRETED)
)
def test_activations(activation, tile):
    problem = Problem(20, 4, 2, 128, 128, BF16, activation)
    check(problem, "int4_w4a8_g128", activation, tile=tile)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("scheme", UNDER_FP8)
def test_few_slots_without_a_plan(scheme, stored):
    for tokens, k, local in ((1, 2, None), (2, 1, None), (2, 1, 3)):
        problem = Problem(tokens, 16, k, 192, 64, BF16, "silu", num_local_experts=local)
        check(problem, scheme, "silu", stored=stored, direct=True)


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    half_exhaustive(UNDER_FP8, SIZES_OF_MODELS, where=not HAS_CUDA),
    ids=str,
)
def test_sizes_of_models(scheme, sizes):
    """K and N that are no multiples of a stage or of a tile, groups that end past K."""
    for tile, stored in ((16, True), (32, False), (128, True), (128, False)):
        check(gemm_problem(6, 1, *sizes, BF16, has_bias=True), scheme, stored=stored, tile=tile)


MAGNITUDES = [1e-12, 1e-4, 300.0, 1e12]


@pytest.mark.parametrize("scheme", ROWS_SERVED)
def test_small_and_large_numbers(scheme):
    for magnitude in MAGNITUDES:
        check_magnitude(scheme, magnitude)


def check_magnitude(scheme, magnitude):
    """In the interpreter in turns in one tile each."""
    x, w, _, _, ids, *_ = make_inputs(gemm_problem(5, 2, 128, 64, BF16))
    q = quantize_weight(w.float() * magnitude, scheme)
    data, scale, numbers = quantized_rows(x / magnitude, get_scheme(scheme).activation)
    exact = exact_rows(numbers, dequantize_weight(q, scheme).double(), None, None, ids, 2)
    turn = ROWS_SERVED.index(scheme) + MAGNITUDES.index(magnitude)
    for tile in ((16, 32, 128)[turn % 3],) if INTERPRETED else (16, 32, 128):
        with row_tile(tile, NO_GPU if INTERPRETED else None, portable_only=False):
            tiles = planned(ids, None, len(w), scheme)
            actual = matmul((data, scale), pack_weight(q, scheme), None, tiles, 2, scheme)
            head = (data, scale, q.data, q.scale, q.global_scale, None, [*tiles])
            expected = scaled_product(reference, *head, 2, scheme, BF16)
        assert_matches_reference(actual, exact.rounded(BF16), expected)


@pytest.mark.skipif(not INTERPRETED, reason="counts the programs of the interpreter")
@pytest.mark.parametrize("tile", [16, 128])
def test_any_number_of_programs(tile):
    """However tiles are shared out, every one is computed once, with the same bits."""
    scheme = "int4_w4a8_g128"
    x, w, _, _, ids, *_ = make_inputs(gemm_problem(40, 1, 192, 320, BF16))
    q = pack_weight(quantize_weight(w, scheme), scheme)
    with row_tile(tile, NO_GPU, portable_only=False):
        tiles = planned(ids, None, len(w), scheme)
        run = partial(matmul, (x, None), q, None, tiles, 1, scheme)
        one, many = run(programs=1), run(programs=7)
    assert torch.equal(one, many) and not one.isnan().any()


@pytest.mark.parametrize("tile", ROW_TILES)
def test_results_in_half_precision(tile):
    """Rows are bf16 in the kernel nevertheless."""
    problem = gemm_problem(9, 2, 192, 128, torch.float16, has_bias=True)
    for stored in (False, True):
        check(problem, "int4_w4a8_g128", stored=stored, tile=tile)
