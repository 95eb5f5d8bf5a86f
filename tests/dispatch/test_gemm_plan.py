"""`plan_gemm`: a pure function of values, whose answer is what a GEMM runs."""

import ast
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning import problem_of_call, problem_of_layer
from project.house_numbers import ROOT, asks_a_scheme, conditions
from table_items import every_row

import moe_ops
from moe_ops.dispatch import GemmProblem, plan_gemm, tuned
from moe_ops.dispatch.families import BY_NAME, FAMILIES, blackwell, portable
from moe_ops.dispatch.families.base import BOXES
from moe_ops.dispatch.gemm_plan import passed_over
from moe_ops.dispatch.hopper import FETCH, PACKED, STREAM, TOKEN, TOKEN_SUM, HopperTiles
from moe_ops.dispatch.hopper_decode import (
    DECODE_FEW,
    DECODE_MANY,
    DECODE_SLOT,
    DECODE_SUM,
    decodes_to_fp8,
    most_decode_stages,
)
from moe_ops.dispatch.problem import EACH, STORED, without_sum
from moe_ops.dispatch.row_tiles import routed_among, row_tile_rule
from moe_ops.dispatch.tiles import TileConfig, one_row_tile, plan_sizes
from moe_ops.inspect.devices import TARGETS
from moe_ops.scheme import packs

E, H, I, K = 32, 2048, 1024, 4  # noqa: E741
FACTS = {name: target.facts for name, target in TARGETS.items() if target.facts is not None}
HOPPER = FACTS["sm_90"]
DENSE, SCALED, DEQUANTIZE, SLOT, BLOCK_SCALED = (
    family.kernel
    for family in (
        portable.DENSE, portable.SCALED, portable.DEQUANTIZE, portable.SLOT, blackwell.BLOCK_SCALED,
    )
)  # fmt: skip


def problems(scheme, tokens, facts=HOPPER, batch_invariant=False, packed=False):
    """Both GEMMs of a layer."""
    known = moe_ops.get_scheme(scheme)
    rule = row_tile_rule(scheme, 2, facts.arch, facts.row_tile, batch_invariant)
    layer = (((E, 2 * I, H), K, "silu"), ((E, H, I), 1, ""))
    return [
        problem_of_layer(
            weight, known, rule, tokens * K,
            num_tokens=tokens, top_k=top_k, activation=activation, fragments=packed,
        )
        for weight, top_k, activation in layer
    ]  # fmt: skip


def kernels(*arguments, **options):
    return [plan_gemm(p, HOPPER).kernel for p in problems(*arguments, **options)]


def test_kernels_by_load():
    assert kernels("unquantized", 1) == kernels("fp8_block128", 1) == [TOKEN, TOKEN_SUM]
    assert kernels("unquantized", 64) == [DENSE, DENSE]
    assert kernels("unquantized", 4096) == [PACKED, PACKED]
    assert kernels("fp8_channel", 64) == [STREAM, STREAM]
    assert kernels("fp8_channel", 4096) == [PACKED, PACKED]
    assert kernels("int8_channel", 1) == kernels("int8_block128", 1) == [TOKEN, TOKEN_SUM]
    for scheme in ("int8_channel", "int8_tensor", "int8_block128"):
        assert kernels(scheme, 64) == [STREAM, STREAM] and kernels(scheme, 4096) == [PACKED, PACKED]
    for tokens in (1, 64, 4096):
        assert kernels("mxfp4_w4a16", tokens) == kernels("nvfp4", tokens) == [DEQUANTIZE] * 2
    blackwell = [plan_gemm(p, FACTS["sm_100"]).kernel for p in problems("nvfp4", 64)]
    assert blackwell == [BLOCK_SCALED] * 2


def test_half_empty_tiles_leave_padding_out():
    """16-bit rows: on demand from 43 rows an expert on, in step where few tiles have padding."""
    for rows, kernel, on_demand in (
        (42, DENSE, False), (43, PACKED, True), (85, PACKED, True), (250, PACKED, False),
        (1024, PACKED, False),
    ):  # fmt: skip
        for problem in problems("unquantized", rows * E // K):
            plan = plan_gemm(problem._replace(sizes=problem.sizes._replace(n=4096)), HOPPER)
            assert plan.kernel == kernel and getattr(plan.config, "on_demand", False) == on_demand
    assert kernels("unquantized", 64 * E // K) == [FETCH, PACKED]  # of narrow experts


def test_rows_of_8_bits_are_gathered_for_tiles_of_128():
    """With 43 to 60 rows an expert tiles have 64, which the portable kernel fetches as quickly."""
    for scheme in ("fp8_block128", "fp8_channel", "int8_channel"):
        for rows, row_tile, kernel in (
            (26, 32, STREAM), (27, 64, SCALED), (43, 64, SCALED), (60, 64, SCALED),
            (61, 128, PACKED), (90, 128, PACKED),
        ):  # fmt: skip
            for problem in problems(scheme, rows * E // K):
                assert (problem.sizes.row_tile, plan_gemm(problem, HOPPER).kernel) == (
                    row_tile, kernel,
                )  # fmt: skip
    alone = HOPPER._replace(row_tile=64)
    assert {plan_gemm(p, alone).kernel for p in problems("fp8_channel", 4096, alone)} == {PACKED}


def test_few_tiles_are_half_as_wide():
    """Where even then all run at once: 2 of 8 wide experts, but not all of them."""
    known = moe_ops.get_scheme("unquantized")

    def config(experts, tokens, columns=4096):
        rule = routed_among(row_tile_rule("unquantized", 2, 90, None, False), 8)
        weight = (experts, columns, 14336)
        return plan_gemm(problem_of_layer(weight, known, rule, 2 * tokens), HOPPER).config

    for experts, tokens, rows, width in (
        (2, 512, 192, 128), (4, 512, 192, 128), (8, 512, 192, 256), (2, 1024, 128, 128),
        (2, 4096, 128, 256), (8, 16384, 128, 256),
    ):  # fmt: skip
        tiles = config(experts, tokens)
        assert (tiles.kernel, tiles.block_m, tiles.block_n) == (PACKED, rows, width)
    # 132 tiles of 128 columns run at once, 133 do not.
    assert config(1, 512, 132 * 128).block_n == 128 and config(1, 512, 133 * 128).block_n == 256


def test_few_columns_are_not_packed():
    """The rank of an adapter."""
    _, second = problems("unquantized", 4096)
    for rank, kernel in ((16, DENSE), (64, DENSE), (72, PACKED)):
        plan = plan_gemm(second._replace(sizes=second.sizes._replace(n=rank)), HOPPER)
        assert plan.kernel == kernel
        if kernel == DENSE:
            assert plan.config.block_n == rank


def test_what_keeps_hoppers_kernels_out():
    """Tensors that boxes cannot be made of, and scales of each expert."""
    problem, _ = problems("fp8_tensor_static", 4096)
    assert plan_gemm(problem, HOPPER).kernel == PACKED
    for changes in ({"boxes": False}, {"expert_scales": True}):
        assert plan_gemm(problem._replace(**changes), HOPPER).kernel == SCALED
    assert plan_gemm(problem, HOPPER._replace(portable_only=True)).kernel == SCALED
    # One row tile at every load by itself keeps nothing out.
    one = problem._replace(sizes=problem.sizes._replace(rule=one_row_tile(64)))
    assert plan_gemm(one, HOPPER).kernel == PACKED


@every_row(
    ("scheme", "tokens", "expected"),
    [
        ("unquantized", 1, DENSE),
        ("fp8_channel", 1, SCALED),
        ("int8_channel", 1, STREAM),
        ("nvfp4", 1, DECODE_FEW),
        ("int4_w4a16_g128", 1, DECODE_FEW),
        ("nvfp4", 4096, DECODE_MANY),
    ],
)
def test_batch_invariant_kernels(scheme, tokens, expected):
    """Kernels of one token or slot divide sums along K; all others add in the same order."""
    packed = moe_ops.packs(scheme, 64, 64) if scheme != "unquantized" else False
    assert kernels(scheme, tokens, batch_invariant=True, packed=packed) == [expected] * 2
    if not packed:
        assert kernels(scheme, 4096, batch_invariant=True) == kernels(scheme, 4096)


def test_products_in_fp8_are_not_batch_invariant():
    """Few rows of this scheme are multiplied in bf16."""
    with pytest.raises(NotImplementedError, match="plain form .* for this batch-invariant GEMM"):
        kernels("int4_w4a8_g128", 4096, batch_invariant=True, packed=True)
    assert kernels("int4_w4a8_g128", 4096, batch_invariant=True) == [DEQUANTIZE] * 2


@pytest.mark.parametrize(
    ("scheme", "k", "kernel"),
    [
        ("int8_channel", 2**17 - 16, PACKED),
        ("int8_channel", 2**17, SCALED),  # that often, -128 * -128 is 2**31
        ("fp8_channel", 2**17, PACKED),
    ],
)
def test_sums_of_integers_stay_in_int32(scheme, k, kernel):
    problem, _ = problems(scheme, 4096)
    long = problem._replace(sizes=problem.sizes._replace(k=k))
    assert plan_gemm(long, HOPPER).kernel == kernel


def test_who_quantizes():
    """The kernel of one token, that of few slots, and the pass that packs rows."""
    first, second = problems("fp8_block128", 4096)
    plan = plan_gemm(second, HOPPER)
    assert second.rows == EACH and plan.quantizes_rows and plan.gathered_rows
    assert [buffer.name for buffer in plan.scratch][-2:] == [
        "gathered rows",
        "scales of gathered rows",
    ]
    stored = plan_gemm(second._replace(rows=STORED), HOPPER)
    assert not stored.quantizes_rows and stored.gathered_rows == plan.gathered_rows
    portable = plan_gemm(first._replace(boxes=False), HOPPER)
    assert not portable.quantizes_rows
    assert [buffer.name for buffer in portable.scratch] == [
        "quantized rows",
        "scales of quantized rows",
    ]
    assert portable.scratch[0].nbytes == 4096 * H  # a row for each token, a byte for each number


@every_row("scheme", list(moe_ops.SCHEMES))
def test_no_tokens(scheme):
    """Whoever asks which operator quantizes rows also asks for a call without tokens."""
    known = moe_ops.get_scheme(scheme)
    for packed in (False, True) if packs(known, I, H) else (False,):
        for problem in problems(scheme, 0, packed=packed):
            one = problem._replace(sizes=problem.sizes._replace(num_slots=K))
            assert (
                plan_gemm(problem, HOPPER).quantizes_rows == plan_gemm(one, HOPPER).quantizes_rows
            )


def test_who_fetches_rows():
    """A narrow product, aligned rows in the order of tokens; shared rows are quantized before."""
    dense, second = problems("unquantized", 2048)
    assert plan_gemm(dense, HOPPER).kernel == FETCH and not plan_gemm(dense, HOPPER).gathered_rows
    wide = dense._replace(sizes=dense.sizes._replace(n=1544))
    for other in (dense._replace(within_reach=False), dense._replace(permuted="a"), wide):
        assert plan_gemm(other, HOPPER).kernel == PACKED
    for tokens, reached in ((2**20, True), (2**20 + 1, False)):  # of H numbers
        far, _ = problems("unquantized", tokens)
        assert far.within_reach is reached
        assert (plan_gemm(far, HOPPER).kernel == FETCH) is reached
    turned = second._replace(boxes=False, transposed=True, permuted=None)
    assert plan_gemm(turned, HOPPER).kernel == FETCH
    for other in (
        turned._replace(activation="silu"),
        turned._replace(transposed=False),
        turned._replace(sizes=turned.sizes._replace(n=2052)),
        turned._replace(sizes=turned.sizes._replace(k=1028)),
        turned._replace(num_tokens=None, sizes=turned.sizes._replace(rule=one_row_tile(192))),
    ):
        assert plan_gemm(other, HOPPER).kernel == DENSE
    tall = plan_gemm(turned._replace(sizes=turned.sizes._replace(rule=one_row_tile(192))), HOPPER)
    assert (tall.kernel, tall.config.block_m) == (FETCH, 128)
    entries = plan_sizes(turned.sizes.num_slots, E, one_row_tile(128)).entries
    assert tall.scratch == (("plan", 4 * entries), ("next tile", 4))
    scaled, slots = problems("fp8_channel", 2048)
    narrow, wide = (scaled._replace(sizes=scaled.sizes._replace(n=n)) for n in (768, 776))
    for problem, kernel in ((narrow, FETCH), (wide, PACKED)):
        plan = plan_gemm(problem, HOPPER)
        assert (plan.kernel, problem.rows, plan.quantizes_rows) == (kernel, EACH, False)
        assert plan.scratch[0] == ("quantized rows", 2048 * H)
    slots = slots._replace(sizes=slots.sizes._replace(n=768))
    plan = plan_gemm(slots, HOPPER)
    assert plan.kernel == PACKED and plan.quantizes_rows
    assert [buffer.name for buffer in plan.scratch][-2:] == [
        "gathered rows",
        "scales of gathered rows",
    ]


@pytest.mark.parametrize("scheme", ["int4_w4a8_g128", "mxfp4_w4a8_token"])
def test_packed_weights_under_fp8_rows(scheme):
    """The operator makes rows in bf16, from stored rows or by quantizing them."""
    for tokens, names in (
        (1, [DECODE_SLOT, DECODE_SUM]), (2, [DECODE_FEW] * 2), (64, [DECODE_FEW] * 2),
        (4096, [DECODE_MANY] * 2),
    ):  # fmt: skip
        for problem, name, k in zip(
            problems(scheme, tokens, packed=True), names, (H, I), strict=True
        ):
            plan = plan_gemm(problem, HOPPER)
            assert (plan.kernel, problem.rows, plan.quantizes_rows) == (name, EACH, True)
            later = plan_gemm(problem._replace(rows=STORED), HOPPER)
            assert (later.kernel, later.config, later.quantizes_rows) == (name, plan.config, False)
            rows = plan.gathered_rows or tokens * K // problem.top_k
            sizes = [buffer.nbytes for buffer in plan.scratch]
            if plan.gathered_rows:
                assert sizes == [4, 2 * rows * k, 4 * rows] and later.scratch == plan.scratch
            else:
                assert sizes == [2 * rows * k, 4 * rows] and later.scratch == plan.scratch[:1]
    for facts in (FACTS["sm_80"], FACTS["sm_100"], HOPPER._replace(portable_only=True)):
        with pytest.raises(NotImplementedError, match="w must be in the plain form"):
            plan_gemm(problems(scheme, 64, packed=True)[0], facts)
    assert [problem.rows for problem in problems(scheme, 64)] == [STORED] * 2


def test_rows_that_a_layer_leaves_to_its_gemms():
    """All but those whose scale depends on all tokens, or that are dequantized."""
    for scheme, rows in (
        ("fp8_tensor", STORED), ("fp8_tensor_static", EACH), ("int8_channel", EACH),
        ("nvfp4", STORED), ("mxfp4_w4a16", STORED),
    ):  # fmt: skip
        assert [problem.rows for problem in problems(scheme, 64)] == [rows] * 2


def test_a_sum_of_its_own():
    """Where the kernel that sums does not serve, the product of the GEMM is scratch memory."""
    _, second = problems("unquantized", 1)
    assert second.summed and plan_gemm(second, HOPPER).scratch == ()
    apart = plan_gemm(second._replace(boxes=False), HOPPER)
    assert apart.kernel == DENSE and apart.scratch == (("product", K * H * 2),)


def test_stages_of_computed_operands_on_blackwell():
    """Triton cannot pipeline tiles of 64 rows and more whose first operand is computed."""
    stages = {}
    for tokens in (8, 4096):
        plan = plan_gemm(problems("int4_w4a8_g128", tokens)[0], FACTS["sm_100"])
        stages[plan.config.block_m >= 64] = plan.config.num_stages
    assert stages[True] == 1 < stages[False]


def test_numbers_of_packed_rows():
    """K counts numbers; rows of 4 bits have two in an entry."""
    rows, w = torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(2, 8, 32, dtype=torch.uint8)
    given = {"w": w, "w_scale": torch.ones(2, 8, 4), "tiles": [None] * 3}
    problem = problem_of_call("expert_product", a=rows, scheme="nvfp4", **given)
    assert problem.weight == (2, 8, 64)
    given["w"] = w[:, :, :16]
    problem = problem_of_call("expert_product", a=rows.half(), scheme="mxfp4_w4a16", **given)
    assert problem.weight == (2, 8, 32)


@given(
    scheme=st.sampled_from(sorted(moe_ops.SCHEMES)),
    tokens=st.sampled_from((0, 1, 2, 7, 64, 500, 5000, 2**17)),
    gpu=st.sampled_from(sorted(FACTS)),
    batch_invariant=st.booleans(),
)
def test_a_pure_function(scheme, tokens, gpu, batch_invariant):
    """The same value for equal arguments, remembered; of tables that are installed, too."""
    for problem in problems(scheme, tokens, FACTS[gpu], batch_invariant):
        plan = plan_gemm(problem, FACTS[gpu])
        assert plan_gemm(GemmProblem(*problem), FACTS[gpu]) is plan
        assert all(buffer.nbytes >= 0 for buffer in plan.scratch) and plan.source


def test_given_tiles():
    """A given config selects its kernel; refused if that kernel does not take the GEMM."""
    problem, _ = problems("unquantized", 4096)
    portable = TileConfig(64, 64, 64, 8, 4, 2)
    plan = plan_gemm(problem, HOPPER, config=portable)
    assert (plan.kernel, plan.config, plan.source) == (DENSE, portable, "given")
    own = HopperTiles(PACKED, 192, 256, 8, 3)
    assert plan_gemm(problem, HOPPER, config=own).kernel == PACKED
    for other in (replace(own, block_m=64), replace(portable, block_m=128)):
        with pytest.raises(ValueError, match="config must have tiles that cut up .* tile of 192"):
            plan_gemm(problem, HOPPER, config=other)
    with pytest.raises(ValueError, match="config must be tiles of a kernel that takes this GEMM"):
        plan_gemm(problem._replace(boxes=False), HOPPER, config=own)
    with pytest.raises(ValueError, match="config must be None for a GEMM with the weighted sum"):
        plan_gemm(problem._replace(summed=True), HOPPER, config=portable)


def test_tables_are_part_of_the_question(monkeypatch):
    """Other tables, other plans; nothing has to be forgotten."""
    problem, _ = problems("unquantized", 64)
    before = plan_gemm(problem, HOPPER)
    tiles = replace(before.config, num_warps=2)
    entry = tuned.TunedEntry(64, tiles, tiles)
    layer = tuned.TunedLayer("made-up", (E, I, H), "NVIDIA_H200", "unquantized", K, (entry,))
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([layer]))
    plan = plan_gemm(problem, HOPPER)
    assert (plan.config, plan.source) == (tiles, "tuned (made-up)")
    monkeypatch.undo()
    assert plan_gemm(problem, HOPPER) is before


def test_families():
    """Names and launchers are there; the plan's family takes the GEMM, those before it do not."""
    assert len({family.kernel for family in FAMILIES}) == len(FAMILIES) == len(BY_NAME)
    wrong, seen = [], set()
    for name, facts, tokens in product(sorted(moe_ops.SCHEMES), FACTS.values(), (1, 2, 64, 2048)):
        for packed in (False, packs(moe_ops.get_scheme(name), 2 * I, H)):
            for problem in problems(name, tokens, facts, packed=packed):
                try:
                    plan = plan_gemm(problem, facts)
                except NotImplementedError as error:
                    whys = [family.why_not(problem, facts) for family in FAMILIES]
                    wrong += [] if str(error) in whys and None not in whys else [problem]
                    continue
                seen.add(plan.kernel)
                asked = problem if BY_NAME[plan.kernel].sums else without_sum(problem)
                before = FAMILIES[: FAMILIES.index(BY_NAME[plan.kernel])]
                whys = [family.why_another(asked, facts) for family in before]
                takes = BY_NAME[plan.kernel].why_another(asked, facts) is None
                wrong += [] if takes and None not in whys else [problem]
                named = dict(zip((family.kernel for family in before), whys, strict=True))
                for kernel, why in passed_over(problem, facts):
                    asks_twice = BY_NAME[kernel].sums != BY_NAME[plan.kernel].sums
                    wrong += [] if asks_twice or why == named[kernel] else [(kernel, why)]
    assert not wrong, wrong[:3]
    assert seen == {*BY_NAME}


def test_what_was_passed_over():
    """Kernels for this kind of GEMM alone are named, each with its first reason."""
    first, second = problems("fp8_channel", 64)
    assert dict(passed_over(first, HOPPER)) == {
        TOKEN: "the routing must be of one token, got 64",
        SLOT: "slots must be so few that each is a tile, got 256",
        FETCH: "tiles must have 128 rows; slots are sorted again for a transposed weight",
        PACKED: "row tiles must be of a size that hopper_packed has, got 16",
    }
    assert dict(passed_over(second, HOPPER)).keys() == {SLOT, FETCH, PACKED}
    apart = problems("unquantized", 1)[1]._replace(boxes=False)
    assert dict(passed_over(apart, HOPPER)) == dict.fromkeys(
        (TOKEN_SUM, FETCH, PACKED, STREAM), BOXES.must
    )
    (packed, _), refused = problems("mxfp4_w4a16", 64, packed=True), FACTS["sm_80"]
    assert dict(passed_over(packed, HOPPER)) == {
        DECODE_SLOT: "slots must be so few that each is a tile, got 256",
        DECODE_MANY: "the row tile must be more than 64",
    }
    with pytest.raises(NotImplementedError, match="GEMM on sm_80, got mxfp4_w4a16 in the packed"):
        passed_over(packed, refused)


def test_products_in_fp8():
    """Integers in e4m3 under rows in it, whose groups are stages or more; rows half as large."""
    names = (
        "int4_w4a8_g128", "int4_w4a8_g256", "int4_w4a8_g32", "mxfp4_w4a8_token", "int4_w4a16_g128",
    )  # fmt: skip
    schemes = [moe_ops.get_scheme(name) for name in names]
    assert [s.name for s in schemes if decodes_to_fp8(DECODE_MANY, s)] == [*names[:2]]
    assert not any(decodes_to_fp8(DECODE_FEW, s) for s in schemes)
    tiles = HopperTiles(DECODE_MANY, 128, 256, 8, 2)
    assert [most_decode_stages(tiles, s, HOPPER) for s in schemes] == [6, 6, 4, 4, 4]


def test_every_launcher_is_there():
    run = pytest.importorskip("moe_ops.kernels._gemm.run")
    assert all(callable(run.launcher(family)) for family in FAMILIES)


def test_only_families_ask_for_formats():
    """What walks them, and what reads tuned files, has no condition on a scheme."""
    for file in ("gemm_plan", "tuned"):
        path = ROOT / f"moe_ops/dispatch/{file}.py"
        asked = [
            ast.unparse(c) for c in conditions(ast.parse(path.read_text())) if asks_a_scheme(c)
        ]
        assert not asked, (file, asked)
