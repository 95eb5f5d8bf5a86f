"""Rules of the kernels for packed weights: CTAs of an SM, and the jobs of one token."""

import pytest

from moe_ops import get_scheme
from moe_ops.dispatch.device import NO_GPU
from moe_ops.dispatch.hopper_decode import (
    DECODE_SUM,
    FEW_CTAS,
    decode_sum_tiles,
    decode_tiles,
    few_ctas,
    sum_jobs,
)
from moe_ops.dispatch.problem import sizes_of
from moe_ops.dispatch.row_tiles import PORTABLE


@pytest.mark.parametrize(
    ("tiles", "ctas"),
    [(96, 2), (180, 3), (256, 3), (448, 5), (612, 5), (1215, 5), (1524, 4), (1856, 5), (6976, 5)],
)
def test_the_ctas_that_were_fastest(tiles, ctas):
    """GEMM 1 of qwen3-30b, gpt-oss and deepseek-v3 with 1, 8 and 64 tokens, on an H200."""
    assert few_ctas(16, tiles, NO_GPU) == ctas


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "int8_w8a16", "int4_w4a16_g32"])
def test_stages_fit_the_ctas(scheme):
    """Fewer CTAs have room for more stages, up to what brings anything."""
    quant, seen = get_scheme(scheme).weight, {}
    for tokens in (1, 4, 8, 16, 64, 200, 512):
        sizes = sizes_of(8 * tokens, (128, 1536, 2048), 2, PORTABLE, "silu")
        tiles = decode_tiles(sizes, quant, NO_GPU)
        if tiles.block_m == 16:
            seen[tiles.ctas] = tiles.num_stages
    assert len(seen) > 1 and set(seen) <= set(FEW_CTAS[16])
    assert sorted(seen.values(), reverse=True) == [seen[ctas] for ctas in sorted(seen)]
    assert min(seen.values()) >= 2


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16", "int8_w8a16", "int8_w8a16_g32"])
@pytest.mark.parametrize("slots", range(1, 17))
def test_jobs_are_all_of_a_token(slots, scheme):
    sizes = sizes_of(slots, (128, 2048, 2880), 2, PORTABLE, "")
    jobs = sum_jobs(sizes, get_scheme(scheme).weight)
    assert jobs.chunks == 45 and jobs.parts * jobs.steps >= 45 > (jobs.parts - 1) * jobs.steps
    assert jobs.rounds * jobs.ahead >= jobs.steps and 8 * jobs.passes >= slots * jobs.parts
    assert 8 * (jobs.passes - 1) < slots * jobs.parts


def test_what_the_kernel_with_the_sum_takes():
    quant = get_scheme("mxfp4_w4a16").weight

    def tiles(slots, k):
        sizes = sizes_of(slots, (256, 2048, k), 2, PORTABLE, "")
        return decode_sum_tiles(sizes, quant, NO_GPU)

    assert tiles(8, 768).kernel == DECODE_SUM and tiles(2, 14336).kernel == DECODE_SUM
    assert tiles(17, 768) is None  # more slots than it keeps
    assert tiles(8, 14336) is None  # rows that do not fit beside another program's
