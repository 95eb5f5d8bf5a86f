"""The search for tiles of packed weights, plans that are given them, and files that hold them."""

import json
from dataclasses import replace

import pytest
from tune_trials import H200, PACKED_SCHEMES, Clock, kernel_of, subject
from tuned_entries import entry, own, record

from moe_ops import get_scheme
from moe_ops.dispatch import tuned
from moe_ops.dispatch.families.dequantized import FEW_GROUPS
from moe_ops.dispatch.families.many_rows import GATHERED_GROUPS
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import HopperTiles
from moe_ops.dispatch.hopper_decode import DECODE_FEW, DECODE_MANY, DECODE_SUM, most_decode_stages
from moe_ops.dispatch.plan import DEFAULT
from moe_ops.dispatch.tiles import TileConfig
from moe_ops.dispatch.tuned_file import file_name, parse_tuned_layer
from moe_ops.tuning import files
from moe_ops.tuning.search import DIMENSIONS, Trial, tune_tokens

MXFP4 = "mxfp4_w4a16"
SIZES = (128, 768, 2048)
NAME = file_name(SIZES, "NVIDIA H200", MXFP4)


@pytest.fixture
def installed(monkeypatch):
    def install(content, name=NAME):
        layer = parse_tuned_layer(name, json.dumps(content))
        monkeypatch.setattr(tuned, "TABLES", tuned.tables([layer]))

    return install


def few(num_stages=4, ctas=4, **more):
    return own(DECODE_FEW, 128, 1, num_stages, CTAS=ctas, **more)


def many(num_stages=3, group_m=8, **more):
    return own(DECODE_MANY, 256, group_m, num_stages, **more)


# The search


@pytest.mark.parametrize("scheme", [*PACKED_SCHEMES, "nvfp4"])
@pytest.mark.parametrize("tokens", [2, 8, 64, 200, 512, 2048, 8192])
def test_every_trial_has_a_plan(scheme, tokens):
    """The default comes first, and all trials fit."""
    layer = subject(scheme)
    found = layer.candidates(tokens)
    assert layer.in_fragments(1) and layer.in_fragments(2)
    for trial in found:
        problem = layer.problem(tokens, trial.gemm)._replace(summed=False)
        plan = plan_gemm(problem, H200, config=trial.tiles)
        assert (plan.kernel, plan.config, plan.source) == (trial.tiles.kernel, trial.tiles, "given")
        assert trial.tiles.num_stages <= min(
            6, most_decode_stages(trial.tiles, get_scheme(scheme), H200)
        )
    for which in (1, 2):
        problem = layer.problem(tokens, which)._replace(summed=False)
        start = layer.beginnings(tokens, which)[0]
        assert start.tiles == plan_gemm(problem, H200).config


def test_kernels_that_decode():
    """Both kernels where both have the row tile; packed rows need a plan."""

    def tried(tokens, rows=None):
        return [kernel_of(t) for t in subject(MXFP4, row_tile=rows).beginnings(tokens, 1)]

    assert tried(64) == tried(256) == [DECODE_FEW]
    assert tried(512) == [DECODE_FEW, DECODE_MANY] and tried(4096) == [DECODE_MANY]
    assert tried(1, 64) == [DECODE_FEW] and tried(1, 128) == [DECODE_FEW]
    # No whole chunks of gate rows, nor along K of GEMM 2.
    narrow = subject(MXFP4, (128, 704 + 32, 2048))
    assert [narrow.in_fragments(which) for which in (1, 2)] == [False, False]
    assert [kernel_of(t) for t in narrow.beginnings(512, 2)] == [None]


@pytest.mark.parametrize(("rows", "ctas"), [(16, {2, 3, 4, 5}), (32, {2, 3, 4}), (64, {1, 2})])
def test_steps_of_the_kernel_for_few_rows(rows, ctas):
    """CTAs for which registers suffice, each with as many stages as fit."""
    layer = subject(MXFP4, row_tile=rows)
    start, *_ = layer.beginnings(256, 1)
    near = {size: [t.tiles for t in layer.neighbours(start, size)] for size in DIMENSIONS}
    assert {t.ctas for t in near["ctas"]} == ctas - {start.tiles.ctas}
    for tiles in (start.tiles, *near["ctas"]):
        most = most_decode_stages(tiles, get_scheme(MXFP4), H200)
        assert tiles.num_stages == min(6, most)
        more = layer.neighbours(Trial(256, 1, tiles), "num_stages")
        assert all(trial.tiles.num_stages <= min(6, most) for trial in more)
    several = layer.load(256) > 0
    assert several and {t.group_m for t in near["group_m"]} == set(FEW_GROUPS[1:])
    assert not layer.neighbours(Trial(8, 1, start.tiles), "group_m")  # one row tile per expert
    for size in ("block_n", "num_warps", "block_k", "on_demand"):
        assert not near[size]


def test_steps_of_the_kernel_for_many_rows():
    layer = subject(MXFP4)
    start, *_ = layer.beginnings(4096, 1)
    near = {size: [t.tiles for t in layer.neighbours(start, size)] for size in DIMENSIONS}
    assert {t.group_m for t in near["group_m"]} == set(GATHERED_GROUPS) - {start.tiles.group_m}
    assert near["on_demand"] == [replace(start.tiles, on_demand=False)]
    assert {t.num_stages for t in near["num_stages"]} == {2, 3}
    for size in ("block_n", "num_warps", "block_k", "ctas"):
        assert not near[size]


@pytest.mark.parametrize(
    ("tokens", "best"),
    [
        (64, {"kernel": DECODE_FEW, "ctas": 3, "num_stages": 3}),
        (512, {"kernel": DECODE_MANY, "on_demand": False, "group_m": 4}),
    ],
)
def test_the_search_finds_the_fastest(tokens, best, tmp_path, monkeypatch):
    """Also the other kernel; a file holds the tiles, and a plan of a packed weight takes them."""
    layer = subject(MXFP4)
    found = tune_tokens(layer, tokens, Clock(**best))
    for name in ("gemm1", "gemm2"):
        assert found[name]["kernel"] == best["kernel"]
        assert ("CTAS" in found[name]) == (best["kernel"] == DECODE_FEW)
    files.tune(layer, [tokens], tmp_path, Clock(**best))
    known = parse_tuned_layer(layer.file, (tmp_path / layer.file).read_text())
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([known]))
    for which, tiles in enumerate(known.entries[0][1:], start=1):
        assert all(getattr(tiles, size) == value for size, value in best.items())
        plan = plan_gemm(layer.problem(tokens, which), H200)
        assert (plan.config, plan.source) == (tiles, f"tuned ({layer.file})")


# Plans


def test_given_tiles():
    problem = subject(MXFP4).problem(512, 1)
    given = HopperTiles(DECODE_MANY, 64, 256, 4, 3)
    plan = plan_gemm(problem, H200, config=given)
    assert (plan.kernel, plan.config, plan.source) == (DECODE_MANY, given, "given")
    assert "next tile" not in [buffer.name for buffer in plan.scratch]
    plan = plan_gemm(problem, H200, config=replace(given, on_demand=True))
    assert "next tile" in [buffer.name for buffer in plan.scratch]
    one = HopperTiles(DECODE_FEW, 64, 128, 2, 3)
    assert plan_gemm(problem, H200, config=one).config == one


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kernel": DECODE_SUM}, "which has no kernel whose tiles can be set"),
        (
            {"kernel": "hopper_packed"},
            "which is for hopper_packed, but operands must be 16-bit",
        ),
        ({"block_m": 16}, "tiles that cut up the plan's row tile of 64, got"),
        ({"block_n": 256}, "has 256 weight rows, hopper_decode_few has (128,)"),
        ({"ctas": 3}, "has 3 CTAs per SM, registers allow (1, 2)"),
        ({"ctas": 0}, "has 0 CTAs per SM, registers allow (1, 2)"),
        ({"num_stages": 5}, "has 5 stages, must have 2 to 4"),
        ({"num_stages": 1}, "has 1 stages, must have 2 to 4"),
        ({"on_demand": True}, "has a dynamic schedule, hopper_decode_few has none"),
        ({"kernel": DECODE_MANY, "block_n": 256}, "has 2 CTAs per SM, registers allow (1,)"),
    ],
)
def test_given_tiles_that_do_not_fit(changes, why):
    config = replace(HopperTiles(DECODE_FEW, 64, 128, 1, 4, ctas=2), **changes)
    with pytest.raises(ValueError) as raised:
        plan_gemm(subject(MXFP4).problem(512, 1), H200, config=config)
    assert str(raised.value).startswith("config must be") or "config must have" in str(raised.value)
    assert why in str(raised.value) and repr(config) in str(raised.value)


def test_given_tiles_of_other_problems():
    few_rows = subject(MXFP4, row_tile=64)
    packs = HopperTiles(DECODE_MANY, 64, 256, 8, 3)
    with pytest.raises(ValueError, match="hopper_decode_many, but rows are packed by a plan"):
        plan_gemm(few_rows.problem(1, 1), few_rows.device, config=packs)
    with pytest.raises(ValueError, match="is for dequantize, but w must be in the plain form"):
        plan_gemm(subject(MXFP4).problem(512, 1), H200, config=TileConfig(64, 64, 64, 1, 4, 3))
    plain = subject(MXFP4).problem(512, 1)._replace(fragments=False)
    with pytest.raises(ValueError, match="is for hopper_decode_many, but w must be in"):
        plan_gemm(plain, H200, config=packs)


# Files


def test_entries_of_packed_weights_are_for_them_alone(installed):
    """And entries of plain weights are for plain weights; one GEMM may have either."""
    installed(record(8, _512=entry(64, many(), few(3, 2))))
    packed = subject(MXFP4).problem(512, 1)
    plan = plan_gemm(packed, H200)
    assert (plan.config, plan.source) == (
        HopperTiles(DECODE_MANY, 64, 256, 8, 3), f"tuned ({NAME})",
    )  # fmt: skip
    second = plan_gemm(subject(MXFP4).problem(512, 2), H200)
    assert second.config == HopperTiles(DECODE_FEW, 64, 128, 1, 3, ctas=2)
    plain = plan_gemm(packed._replace(fragments=False), H200)
    assert plain.kernel == "dequantize" and plain.source.endswith("has nothing for this load)")
    installed(record(8, _512=entry(64)))
    assert plan_gemm(packed._replace(fragments=False), H200).source == f"tuned ({NAME})"
    untuned = plan_gemm(packed, H200)
    assert untuned.source == f"{DEFAULT} ({NAME} has nothing for packed weights at this load)"
    assert untuned.config.kernel == DECODE_FEW


def test_entries_that_do_not_fit(installed):
    problem = subject(MXFP4).problem(512, 1)
    default = plan_gemm(problem, H200).config
    installed(record(8, _512=entry(64, few(6, 2), many())))
    plan = plan_gemm(problem, H200)
    assert plan.source == f"{DEFAULT} ({NAME} has 6 stages, must have 2 to 4)"
    assert plan.config == default
    installed(record(8, _512=entry(32, few(), few())))  # another row tile
    plan = plan_gemm(problem, H200)
    assert plan.source == f"{DEFAULT} ({NAME} has nothing for packed weights at this load)"
    small = subject(MXFP4, row_tile=64)
    installed(record(8, _2=entry(64, many(), many())))
    plan = plan_gemm(small.problem(2, 1), small.device)
    assert plan.source.startswith(
        f"{DEFAULT} ({NAME} is for hopper_decode_many, but rows are packed"
    )


def test_batch_invariant_plans_are_left_alone(installed):
    installed(record(8, _512=entry(64, many(), many())))
    problem = subject(MXFP4).problem(512, 1)
    rule = problem.sizes.rule
    assert not rule.batch_invariant and plan_gemm(problem, H200).source.startswith("tuned")
    from moe_ops.dispatch.row_tiles import INVARIANT

    invariant = problem._replace(sizes=problem.sizes._replace(rule=INVARIANT))
    for other in (invariant, invariant._replace(fragments=False)):
        assert plan_gemm(other, H200).source == DEFAULT


def test_a_file_of_another_gpu(installed):
    """Files name the GPU: what was tuned on an H100 serves H100s."""
    name = "NVIDIA H100 80GB HBM3"
    installed(record(8, _512=entry(64, many(), many())), file_name(SIZES, name, MXFP4))
    problem = subject(MXFP4).problem(512, 1)
    assert plan_gemm(problem, H200).source == DEFAULT
    assert plan_gemm(problem, H200._replace(name=name)).source.startswith("tuned")


@pytest.mark.parametrize(
    ("tiles", "rows", "why"),
    [
        (few(ctas=None), 16, "CTAS must be among (2, 3, 4, 5), got None"),
        (few(ctas=6), 16, "CTAS must be among (2, 3, 4, 5), got 6"),
        (few(ctas=True), 64, "CTAS must be among (1, 2), got True"),
        (few(ON_DEMAND=True), 16, "ON_DEMAND must be false for hopper_decode_few, got True"),
        (few(), 128, "kernel must be one that has mxfp4_w4a16 in tiles of 128 rows"),
        (many(), 32, "kernel must be one that has mxfp4_w4a16 in tiles of 32 rows"),
        (many(CTAS=2), 64, "CTAS must be among (1,), got 2"),
        (own(DECODE_MANY, 128), 64, "BLOCK_N must be among (256,), got 128"),
        (own(DECODE_SUM), 16, "kernel must be among ('hopper_fetch', 'hopper_packed', 'hopper_st"),
    ],
)
def test_refused_content(tiles, rows, why):
    with pytest.raises(ValueError) as raised:
        parse_tuned_layer(NAME, json.dumps(record(8, _64=entry(rows, tiles))))
    assert str(raised.value).startswith(f"{NAME}: 64.gemm1.{why}")


def test_schemes_without_a_packed_form():
    for scheme in ("fp8_channel", "fp8_w8a16_block128", "unquantized"):
        name = file_name(SIZES, "NVIDIA H200", scheme)
        with pytest.raises(ValueError, match=f"kernel must be one that has {scheme} in tiles of"):
            parse_tuned_layer(name, json.dumps(record(8, _64=entry(16, few()))))
