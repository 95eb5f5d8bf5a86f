"""Which row tile a plan has, and that the GEMMs of a layer have the same."""

import math

import pytest
import torch
from table_items import every_row

import moe_ops
from moe_ops import ops, testing
from moe_ops.dispatch.device import Device, assumed
from moe_ops.dispatch.hopper import stream_tiles
from moe_ops.dispatch.portable import ScaleGroups, gemm_tiles, scaled_gemm_tiles
from moe_ops.dispatch.row_tiles import (
    EIGHT_BIT,
    HOPPER,
    HOPPER_DEQUANTIZED,
    INVARIANT,
    PORTABLE,
    expert_rule,
    gemm_rule,
    routed_among,
    row_tile_rule,
    tile_rule,
)
from moe_ops.dispatch.tiles import Gemm, last_class, load_class, one_row_tile, row_tile
from moe_ops.inspect.devices import TARGETS

H200 = TARGETS["sm_90"].facts
CPU, CUDA = torch.device("cpu"), torch.device("meta")
SIXTEEN_BITS, EIGHT_BITS, STORED = "unquantized", "fp8_channel", "mxfp4_w4a16"

BY_CLASS = (
    (PORTABLE, (16, 32, 64, 128)),
    (EIGHT_BIT, (16, 32, 64, 64, 64, 64, 128)),
    (HOPPER[2], (16, 32, 64, 128, 192, 128, 192, 128)),
)
"""Row tiles by class of load: class i ends at a load of ``16 * 2**i``, the last one has no end."""


@every_row(("rule", "tiles"), BY_CLASS)
def test_row_tiles_by_class_of_load(rule, tiles):
    for experts in (1, 8, 128):
        for slots in (*range(3000), *range(3000, 300000, 997)):
            expected = tiles[min(load_class(slots, experts), len(tiles) - 1)]
            assert row_tile(rule, slots, experts) == expected, (slots, experts)
    assert (rule.smallest, rule.largest) == (min(tiles), max(tiles))
    assert last_class(rule) == len(tiles) - 1
    assert not rule.batch_invariant


BY_SLOTS = (
    (HOPPER[1], {85: 16, 208: 32, 480: 64}),
    (HOPPER_DEQUANTIZED[4], {85: 16, 218: 32, 426: 64}),
    (HOPPER_DEQUANTIZED[8], {85: 16, 170: 32, 426: 64}),
)
"""Rules that change within a class of load: the most slots of 8 experts for each row tile."""


@every_row(("rule", "last"), BY_SLOTS)
def test_row_tiles_within_a_class_of_load(rule, last):
    for slots in range(1000):
        expected = next((tile for most, tile in last.items() if slots <= most), 128)
        assert row_tile(rule, slots, 8) == expected, slots
    assert (rule.smallest, rule.largest, last_class(rule)) == (16, 128, 4)


def test_one_row_tile_at_every_load():
    for slots in (0, 1, 500, 10**6):
        assert row_tile(INVARIANT, slots, 8) == 64 and row_tile(one_row_tile(192), slots, 8) == 192
    assert one_row_tile(192) is one_row_tile(192)  # rules are compared by identity
    assert INVARIANT.batch_invariant and not one_row_tile(64).batch_invariant
    assert last_class(INVARIANT) == 0


def test_every_load_has_a_row_tile():
    """Limits ascend to infinity, so that the first that holds a load is its own."""
    hopper = (*HOPPER.values(), *HOPPER_DEQUANTIZED.values())
    for rule in (PORTABLE, EIGHT_BIT, *hopper, INVARIANT, one_row_tile(32)):
        limits = [limit for limit, _ in rule.steps]
        assert limits == sorted(set(limits)) and limits[-1] == math.inf


@every_row(
    ("scheme", "itemsize", "least", "rule"),
    [
        (SIXTEEN_BITS, 2, 16, HOPPER[2]),
        ("int8_channel", 2, 16, HOPPER[1]),
        (EIGHT_BITS, 2, 64, HOPPER[1]),
        ("fp8_block128", 4, 64, HOPPER[1]),
        ("int8_block128", 2, 64, HOPPER[1]),
        (STORED, 2, 64, HOPPER_DEQUANTIZED[4]),
        ("nvfp4", 4, 64, HOPPER_DEQUANTIZED[4]),
        ("fp8_w8a16_block128", 2, 64, HOPPER_DEQUANTIZED[8]),
    ],
)
def test_batch_invariant_rules_on_hopper(scheme, itemsize, least, rule):
    """The tiles of other modes, but for those that add in another way."""
    invariant = row_tile_rule(scheme, itemsize, 90, None, True)
    assert invariant.batch_invariant and invariant.smallest == least
    for slots in range(0, 3000, 7):
        assert row_tile(invariant, slots, 8) == max(least, row_tile(rule, slots, 8)), slots
    assert row_tile_rule(scheme, itemsize, 90, 32, True) is invariant
    assert row_tile_rule(scheme, itemsize, 100, None, True) is INVARIANT


@every_row("scheme", [SIXTEEN_BITS, STORED])
def test_one_batch_invariant_tile_elsewhere(scheme):
    """In float32 scales multiply in other places."""
    assert row_tile_rule(scheme, 4, 90, None, True) is INVARIANT


@every_row(
    ("scheme", "itemsize", "arch", "expected"),
    [
        (SIXTEEN_BITS, 2, 90, HOPPER[2]),
        (SIXTEEN_BITS, 4, 90, PORTABLE),  # Hopper's kernels take no float32
        (SIXTEEN_BITS, 2, 80, PORTABLE),
        (SIXTEEN_BITS, 2, 100, PORTABLE),
        (SIXTEEN_BITS, 2, 0, PORTABLE),
        (EIGHT_BITS, 2, 90, HOPPER[1]),
        (EIGHT_BITS, 4, 90, HOPPER[1]),
        (EIGHT_BITS, 2, 100, EIGHT_BIT),
        (EIGHT_BITS, 2, 0, EIGHT_BIT),
        ("int8_channel", 2, 90, HOPPER[1]),
        ("int8_block128", 2, 90, HOPPER[1]),
        (STORED, 2, 90, HOPPER_DEQUANTIZED[4]),
        (STORED, 2, 80, PORTABLE),
        ("int4_w4a16_g128", 2, 90, HOPPER_DEQUANTIZED[4]),
        ("fp8_w8a16", 2, 90, HOPPER_DEQUANTIZED[8]),
        ("int8_w8a16", 2, 90, HOPPER_DEQUANTIZED[8]),
        ("mxfp4_w4a8", 2, 90, HOPPER_DEQUANTIZED[4]),  # products of numbers that were dequantized
        ("mxfp8", 2, 90, HOPPER_DEQUANTIZED[8]),
        ("mxfp8", 2, 80, PORTABLE),
    ],
)
def test_rules_by_scheme_and_gpu(scheme, itemsize, arch, expected):
    assert row_tile_rule(scheme, itemsize, arch, None, False) is expected
    assert row_tile_rule(scheme, itemsize, arch, 32, False) is one_row_tile(32)
    if arch != 90:
        for tile in (None, 32):
            assert row_tile_rule(scheme, itemsize, arch, tile, True) is INVARIANT


@every_row("scheme", moe_ops.SCHEMES)
@every_row("facts", [H200, H200._replace(row_tile=16), TARGETS["sm_80"].facts, None])
def test_plans_and_gemms_agree(facts, scheme):
    """A GEMM assumes the rule of the plan that it is given, on every device."""
    of_rank = torch.tensor([0, -1, -1, 1])
    for device in (CPU, CUDA):
        a, ids = torch.empty(4, 8, dtype=torch.bfloat16, device=device), torch.empty(2, 2)
        for mode in (False, True):
            with assumed(facts):
                of_slots = tile_rule(scheme, a.dtype, device, mode)
                of_experts = expert_rule(scheme, device, mode)
                assert gemm_rule(scheme, a, (None, ids, None), mode) is of_slots
                mapped = tile_rule(scheme, a.dtype, device, mode, of_rank)
                assert gemm_rule(scheme, a, (None, ids, of_rank), mode) is mapped
                assert mapped is routed_among(of_slots, 4) is not of_slots
                assert gemm_rule(scheme, a, (None, None, None), mode) is of_experts
            assert of_experts is row_tile_rule(scheme, 2, 0, facts and facts.row_tile, mode)
            arch = facts.arch if facts is not None and device == CUDA else 0
            assert of_slots is row_tile_rule(scheme, 2, arch, facts and facts.row_tile, mode)


@every_row("rule", [PORTABLE, EIGHT_BIT, *HOPPER.values(), INVARIANT])
def test_a_rank_has_the_row_tile_of_the_whole_layer(rule):
    """A quarter of the experts gets a quarter of the slots."""
    of_rank = routed_among(rule, 128)
    for slots in range(3, 300000, 987):
        assert row_tile(of_rank, slots, 32) == row_tile(rule, slots, 128)
        here, whole = Gemm(slots, 32, 64, 64, 2, 1, of_rank), Gemm(slots, 128, 64, 64, 2, 1, rule)
        assert here.load_class == whole.load_class
        assert here.routed_experts == whole.routed_experts == 128
    assert row_tile(routed_among(rule, 8), 1024, 1) == row_tile(rule, 1024, 8)
    assert (of_rank.smallest, of_rank.largest) == (rule.smallest, rule.largest)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_plan_of_a_rank(compiled):
    """Tiles of 32 rows hold the 12 of each expert; by all slots they would have 128 rows."""
    ids = torch.arange(96).view(48, 2).int() % 8
    expert_map = torch.tensor([-1, 0, -1, -1, 1, -1, -1, -1], dtype=torch.int32)

    def plan(ids, expert_map):
        return ops.plan_slots(ids, expert_map, 2, SIXTEEN_BITS, torch.bfloat16)

    def as_asked(call):
        if not compiled:
            return call
        return torch.compile(call, backend="eager", dynamic=True, fullgraph=True)

    plan_of_rank = as_asked(plan)(ids, expert_map)
    assert plan_of_rank[0] == 2 * 32
    assert len(plan_of_rank) == len(ops.plan_slots(ids, None, 2, SIXTEEN_BITS, torch.bfloat16))
    problem = testing.Problem(48, 8, 2, 64, 48, torch.float32)
    x, w1, w2, weights, ids, *_ = testing.make_inputs(problem)
    held = expert_map.argsort(stable=True)[-2:]
    elsewhere = torch.where(torch.isin(ids, held.to(ids.dtype)), weights, 0.0)
    expected = moe_ops.fused_experts(x, w1, w2, elsewhere, ids)
    layer = as_asked(moe_ops.fused_experts)
    actual = layer(x, w1[held], w2[held], weights, ids, expert_map=expert_map)
    torch.testing.assert_close(actual, expected)


def test_the_row_tile_of_a_device():
    """All plans have it, of a CPU too, and one operator's plan is the other's."""
    ids = torch.arange(48).view(12, 4).int() % 8
    lengths = set()
    for tile in (None, 16, 64):
        with assumed(Device(90, 232448, 132, row_tile=tile)):
            plan = ops.plan_slots(ids, None, 8, SIXTEEN_BITS, torch.bfloat16)
            used = plan[0].item()
        lengths.add(plan.numel())
        assert used == 8 * (16 if tile is None else tile)
    assert len(lengths) == 3


@every_row("tile", [None, 16, 64, 192])
def test_a_layer_follows_it(tile):
    """Whatever the row tile, the result is that of the references, to rounding."""
    problem = testing.Problem(24, 4, 2, 64, 48, torch.float32)
    x, w1, w2, weights, ids, *_ = testing.make_inputs(problem)
    expected = moe_ops.fused_experts(x, w1, w2, weights, ids)
    with assumed(H200._replace(row_tile=tile)):
        actual = moe_ops.fused_experts(x, w1, w2, weights, ids)
    torch.testing.assert_close(actual, expected)


def test_portable_tiles():
    """Few tokens of few experts have narrow tiles, and a factor of an adapter has a short K."""
    for gemm, expected in (
        (Gemm(1, 1, 8192, 4096, 2, 1, PORTABLE), 64),
        (Gemm(1, 1, 16384, 4096, 2, 1, PORTABLE), 128),
        (Gemm(4, 64, 4096, 16, 2, 1, PORTABLE), 128),
        (Gemm(512, 2, 4096, 14336, 2, 1, routed_among(PORTABLE, 8)), 64),
        (Gemm(512, 2, 8448, 14336, 2, 1, routed_among(PORTABLE, 8)), 128),
        (Gemm(512, 8, 4096, 14336, 2, 1, PORTABLE), 256),
        (Gemm(128, 2, 4096, 14336, 2, 1, INVARIANT), 128),
    ):
        tiles = gemm_tiles(gemm, H200)
        long = 128 if tiles.block_m <= 32 else 64
        assert (tiles.block_n, tiles.block_k) == (expected, min(long, gemm.k))
    for gemm, expected in (  # gated: CTAs of 64 columns in two rounds, and in more
        (Gemm(2, 16, 8448, 5120, 2, 2, PORTABLE), (64, 128, 1, 4)),
        (Gemm(2, 16, 8449, 5120, 2, 2, PORTABLE), (32, 128, 1, 2)),
        (Gemm(4096, 160, 640, 6144, 2, 2, PORTABLE), (64, 64, 8, 4)),
        (Gemm(4096, 160, 6144, 640, 2, 1, PORTABLE), (128, 64, 8, 4)),
        (Gemm(4096, 8, 640, 6144, 2, 2, one_row_tile(192)), (128, 64, 16, 8)),
    ):
        tiles = gemm_tiles(gemm, H200)
        assert (tiles.block_n, tiles.block_k, tiles.group_m, tiles.num_warps) == expected
    gemm = Gemm(32768, 8, 2048, 2048, 1, 2, PORTABLE)
    gated = scaled_gemm_tiles(gemm, ScaleGroups(128, 128), H200)
    assert (gated.block_m, gated.num_stages) == (128, 3)


def test_tiles_of_boxes():
    """Boxes of a gated weight are short if many have long rows; few boxes are short everywhere."""
    for gemm, rows, expected in (
        (Gemm(64, 64, 3072, 2560, 1, 2, PORTABLE), 16, (64, 8)),
        (Gemm(64, 64, 3072, 2559, 1, 2, PORTABLE), 16, (128, 5)),
        (Gemm(64, 64, 3072, 2560, 1, 1, PORTABLE), 16, (128, 5)),
        (Gemm(64, 64, 3072, 2560, 1, 2, PORTABLE), 32, (128, 5)),
        (Gemm(9, 64, 1408, 2560, 1, 2, PORTABLE), 16, (128, 5)),
        (Gemm(1, 64, 3072, 2560, 1, 2, PORTABLE), 16, (64, 10)),
    ):
        tiles = stream_tiles(gemm, rows, H200)
        assert (tiles.block_n, tiles.num_stages) == expected
