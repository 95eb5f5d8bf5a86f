"""Rules of the kernels for packed weights: CTAs of an SM, and the jobs of one token."""

from table_items import every_row

from moe_ops import get_scheme
from moe_ops.dispatch.device import NO_GPU
from moe_ops.dispatch.hopper_decode import (
    DECODE_SLOT,
    DECODE_SUM,
    FEW_CTAS,
    JOB_CTAS,
    JOB_REGISTERS,
    JOB_WARPS,
    RESERVED_BYTES,
    SLOT_STRIPS,
    SUM_BYTES,
    count_sums,
    divide_jobs,
    few_ctas,
    few_tiles,
    round_bytes,
    round_depth,
    slot_tiles,
    sum_tiles,
)
from moe_ops.dispatch.problem import sizes_of
from moe_ops.dispatch.row_tiles import PORTABLE, routed_among


@every_row(
    ("tiles", "ctas"),
    [(96, 2), (180, 3), (256, 3), (448, 5), (612, 5), (1215, 5), (1524, 4), (1856, 5), (6976, 5)],
)
def test_the_ctas_that_were_fastest(tiles, ctas):
    """GEMM 1 of qwen3-30b, gpt-oss and deepseek-v3 with 1, 8 and 64 tokens, on an H200."""
    assert few_ctas(16, tiles, NO_GPU) == ctas


@every_row("scheme", ["mxfp4_w4a16", "int8_w8a16", "int4_w4a16_g32"])
def test_stages_fit_the_ctas(scheme):
    """Fewer CTAs have room for more stages, up to what brings anything."""
    seen = {}
    for tokens in (1, 4, 8, 16, 64, 200, 512):
        sizes = sizes_of(8 * tokens, (128, 1536, 2048), 2, PORTABLE, "silu")
        tiles = few_tiles(sizes, get_scheme(scheme), NO_GPU)
        if tiles.block_m == 16:
            seen[tiles.ctas] = tiles.num_stages
    assert len(seen) > 1 and set(seen) <= set(FEW_CTAS[16])
    assert sorted(seen.values(), reverse=True) == [seen[ctas] for ctas in sorted(seen)]
    assert min(seen.values()) >= 2


def test_experts_of_a_rank_are_few():
    """32 slots reach 20 of 32 experts, and 7 of a quarter of 128: fewer CTAs are as many waves."""
    scheme, of_rank = get_scheme("mxfp4_w4a16"), routed_among(PORTABLE, 128)
    for rule, experts, ctas in ((PORTABLE, 20.4, 4), (of_rank, 7.1, 2)):
        tiles = few_tiles(sizes_of(32, (32, 2048, 2880), 2, rule, ""), scheme, NO_GPU)
        assert tiles.ctas == few_ctas(16, experts * 2048 / 128, NO_GPU) == ctas


@every_row("scheme", ["mxfp4_w4a16", "nvfp4_w4a16", "int8_w8a16", "int8_w8a16_g32"])
@every_row("slots", range(1, 17))
def test_jobs_are_all_of_a_token(slots, scheme):
    sizes = sizes_of(slots, (128, 2048, 2880), 2, PORTABLE, "")
    jobs = divide_jobs(sizes, get_scheme(scheme).weight, 1, slots)
    assert jobs.chunks == 45 and jobs.parts * jobs.steps >= 45
    assert jobs.rounds * jobs.depth >= jobs.steps and 8 * jobs.passes >= slots * jobs.parts
    assert 8 * (jobs.passes - 1) < slots * jobs.parts
    # Warps are idle for at most a fifth of the chunks, but for what parts of K round up.
    assert jobs.passes * jobs.steps * 8 <= 1.2 * (slots * 45 + 8 * jobs.passes)


@every_row(
    ("steps", "most", "depth"),
    [(1, 4, 1), (2, 4, 2), (3, 4, 4), (4, 4, 4), (6, 4, 2), (23, 4, 4), (45, 2, 2), (8, 1, 1)],
)
def test_chunks_of_a_round(steps, most, depth):
    """Four where that computes no more chunks than two."""
    assert round_depth(steps, most) == depth


def test_a_slot_has_a_part_for_each_warp():
    for k in (64, 128, 2880):
        sizes = sizes_of(4, (128, 1536, k), 2, PORTABLE, "silu")
        jobs = divide_jobs(sizes, get_scheme("mxfp4_w4a16").weight, 2, 1)
        assert (jobs.parts, jobs.passes, jobs.strips) == (8, 1, 2)


SCHEMES = ["mxfp4_w4a16", "int4_w4a16_g128_zp", "int8_w8a16", "int8_w8a16_g32_zp"]


def tiles_for(scheme, slots, n, k, activation="silu", gpu=NO_GPU):
    rows = 2 * n if activation == "silu" else n
    sizes = sizes_of(slots, (256, rows, k), 2, PORTABLE, activation)
    return slot_tiles(sizes, get_scheme(scheme).weight, gpu)


@every_row("scheme", SCHEMES)
def test_what_the_kernel_of_a_slot_takes(scheme):
    """It takes a GEMM whose programs all fit on the GPU at once."""
    assert tiles_for(scheme, 8, 768, 2048).kernel == DECODE_SLOT
    assert tiles_for(scheme, 8, 1056, 2048).block_n == 64  # 264 programs of four strips, all fit
    assert tiles_for(scheme, 8, 1088, 2048) is None
    assert tiles_for(scheme, 8, 768, 2048, gpu=NO_GPU._replace(processors=64)) is None
    one, two = (tiles_for(scheme, 8, n, 512, "") for n in (1024, 2048))
    assert (one.block_n, two.block_n) == (16, 32) and tiles_for(scheme, 8, 4096, 512, "") is None


def test_registers_suffice_for_programs_of_a_slot():
    """An SM has registers for the most programs, and beside fewer than four for one of GEMM 2."""
    for strips, most in {pair for pairs in SLOT_STRIPS.values() for pair in pairs}:
        taken = most * JOB_REGISTERS[strips] + (most < JOB_CTAS) * JOB_REGISTERS[1]
        assert taken * 32 * JOB_WARPS <= 65536


@every_row("scheme", SCHEMES)
@every_row(("slots", "n", "k"), [(8, 768, 2048), (10, 512, 2048), (1, 8192, 5120)])
def test_programs_of_both_kernels_fit_on_a_processor(slots, n, k, scheme):
    """GEMM 2 comes early where every processor has room for one of its programs."""
    quant, first = get_scheme(scheme).weight, tiles_for(scheme, slots, n, k)
    sizes = sizes_of(slots, (256, k, n), 2, PORTABLE, "")
    then = sum_tiles(sizes, quant, NO_GPU)

    def taken(tiles, slots, k):
        jobs = divide_jobs(sizes._replace(k=k), quant, tiles.block_n // 16, slots)
        rounds = tiles.num_stages * round_bytes(jobs, quant)
        used = rounds + SUM_BYTES * count_sums(jobs, tiles.num_stages, quant)
        assert used > 48 * 1024
        return RESERVED_BYTES + used

    there = NO_GPU.shared_memory + RESERVED_BYTES
    assert first.ctas * taken(first, 1, k) + (first.ctas < 4) * taken(then, slots, n) <= there
    assert then.num_stages >= 2 and then.ctas <= 4


def test_what_the_kernel_with_the_sum_takes():
    quant = get_scheme("mxfp4_w4a16").weight

    def tiles(slots, k):
        sizes = sizes_of(slots, (256, 2048, k), 2, PORTABLE, "")
        return sum_tiles(sizes, quant, NO_GPU)

    assert tiles(8, 768).kernel == DECODE_SUM and tiles(2, 14336).kernel == DECODE_SUM
    assert tiles(17, 768) is None  # more slots than it keeps
    assert tiles(16, 14336).num_stages < 16 * 224 // 8  # a ring of rounds
