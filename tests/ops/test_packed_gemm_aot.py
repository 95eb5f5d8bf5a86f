"""Hopper's kernels of packed weights, compiled as their launchers choose them, without a GPU."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import H200, given_plan, launch_packed_layer, packed  # noqa: E402
from packed_weights import PACKABLE, UNDER_FP8, UNDER_GROUPS  # noqa: E402
from pairwise import half_exhaustive  # noqa: E402
from plans import row_tile  # noqa: E402
from products import scaled_product, stored_product, stored_sum, weight_of  # noqa: E402
from token_layers import promised  # noqa: E402

from moe_ops.dispatch.hopper_decode import FEW_CTAS, JOB_REGISTERS  # noqa: E402
from moe_ops.kernels import expert_product
from moe_ops.kernels._hopper.dequantized_jobs_gemm import JobConstants  # noqa: E402
from moe_ops.kernels._runtime import launch as launching  # noqa: E402
from moe_ops.scheme import get_scheme  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
EXPERTS = 128


def launch_quantized_rows(
    scheme, tile, activation, sizes, dtype=torch.bfloat16, gemms=(1, 2), stored=True
):
    """GEMMs of a layer, with biases; rows are quantized before (``stored``) or there."""
    quant, (hidden, width) = get_scheme(scheme).activation, sizes

    def launch(empty):
        slots = tile * EXPERTS // 2
        ids = empty(slots, 1, dtype=torch.int32)
        w1, w2 = (packed(empty, scheme, *s, dtype) for s in ((2 * width, hidden), (hidden, width)))
        with row_tile(tile, H200, portable_only=False):
            tiles = given_plan(ids, EXPERTS, scheme, dtype)
            both = {1: (w1, hidden, activation), 2: (w2, width, "")}
            for w, k, key in [both[gemm] for gemm in gemms]:
                scale = empty(*quant.row_scale_shape(slots, k), dtype=quant.scale_dtype)
                rows = (empty(slots, quant.data_width(k), dtype=quant.dtype), scale)
                rows = rows if stored else (empty(slots, k, dtype=dtype), None)
                bias = empty(EXPERTS, w.data.shape[1], dtype=dtype)
                more = (w.data, w.scale, w.global_scale, bias, tiles, 1, scheme, dtype, key)
                scaled_product(expert_product, *rows, *more)

    return launch


def check(scheme, tile, activation="silu", sizes=(2048, 768), gemms=(1, 2), **more):
    alone = get_scheme(scheme).activation is None
    make = launch_packed_layer if alone else launch_quantized_rows
    launch = make(scheme, tile, activation, sizes, gemms=gemms, **more)
    facts = H200._replace(row_tile=tile)
    kernels = [k for k in aot.compile_launch(facts, launch) if "decode" in k.metadata.name]
    few = tile in FEW_CTAS
    name = "hopper_decode_few_kernel" if few else "hopper_decode_many_kernel"
    assert [k.metadata.name for k in kernels] == [name] * len(gemms)
    for kernel in kernels:
        used = aot.resources(kernel, 90)
        assert used["spilled"] == used["serialized"] == 0, used
        ctas = 65536 // (used["registers"] * 32 * kernel.metadata.num_warps)
        assert ctas in FEW_CTAS[tile] if few else ctas == 1
        assert used["shared"] + 1024 <= (H200.shared_memory + 1024) // ctas, used
        assert ("wgmma.mma_async" if tile > 16 else "mma.sync") in kernel.asm["ptx"]
        assert not aot.overwrites_operands(kernel) and not aot.releases_unread(kernel)
        assert not aot.releases_one_stage(kernel)
    return kernels


BOTH, FIRST, SECOND = (1, 2), (1,), (2,)
"""GEMMs of a layer: the first one with its activation."""
FEWEST = [
    ("mxfp4_w4a16", 128, SECOND), ("int8_w8a16_g32_zp", 128, FIRST), ("mxfp6_e3m2", 64, FIRST),
    ("fp8_w8a16", 64, SECOND),
]  # fmt: skip
"""What `make test` compiles here: both kernels, and every element but int4, which is below. The two
GEMMs of a layer share the loop that reads the elements."""
EVERY = [
    (scheme, tile, BOTH)
    for scheme in [*PACKABLE, "int4_w4a16_g32_zp", "int8_w8a16_g32_zp"]
    for tile in (16, 32, 64, 128)
]


@pytest.mark.parametrize(
    ("scheme", "tile", "gemms"),
    FEWEST + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in EVERY],
)
def test_every_scheme(scheme, tile, gemms):
    check(scheme, tile, gemms=gemms)


@pytest.mark.parametrize(
    ("scheme", "tile", "activation", "sizes"),
    [
        ("mxfp4_w4a16", 16, "swigluoai", (2880, 2880)),
        ("mxfp4_w4a16", 64, "swigluoai", (2880, 2880)),
        ("int8_w8a16", 32, "relu2_no_mul", (2048, 704)),
        ("int4_w4a16_g128", 16, "silu", (2048, 1408)),
        pytest.param(
            *("int4_w4a16_g128", 128, "relu2_no_mul", (2048, 704)), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_sizes_and_activations(scheme, tile, activation, sizes, one_of_two):
    """Both GEMMs of the scheme whose kernels other tests compile too, else one of them."""
    turn = None if scheme.startswith("mxfp4") else one_of_two(1 + tile // 32)
    gemms = BOTH if turn is None else (1 + turn,)
    check(scheme, tile, activation, sizes, gemms=gemms)


def test_what_a_stage_takes():
    """One copy of words, one of scales and one of rows; scales are read from a word's lanes."""
    for kernel in check("mxfp4_w4a16", 16, "swigluoai", (2880, 2880)):
        copies = re.findall(r"(async_\w*copy_global_to_local)", kernel.asm["ttgir"])
        assert sorted(copies) == [
            "async_copy_global_to_local",
            *["async_tma_copy_global_to_local"] * 2,
        ]
        code = aot.disassembled(kernel)
        assert ".H0_H0" in code and ".H1_H1" in code and code.count("PRMT") < code.count("HMMA")


@pytest.mark.parametrize(
    ("scheme", "tile", "gemms"),
    [
        ("int4_w4a16_g128_zp", 64, FIRST),
        ("int8_w8a16", 16, SECOND),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("int4_w4a16_g128_zp", 64, SECOND), ("int8_w8a16", 16, FIRST),
                ("int4_w4a16_g128_zp", 128, BOTH),
            )
        ),
    ],
)  # fmt: skip
def test_half_precision(scheme, tile, gemms):
    check(scheme, tile, gemms=gemms, dtype=torch.float16)


UNDER = [
    *half_exhaustive(UNDER_FP8, [16, 32, 64], [FIRST, SECOND]),
    pytest.param("mxfp4_w4a8_token", 128, BOTH, marks=pytest.mark.exhaustive),
]
"""Scheme, row tile and GEMMs; `test_products_in_fp8` has `int4_w4a8_g128` with 128 rows."""


@pytest.mark.parametrize(("scheme", "tile", "gemms"), UNDER)
def test_under_fp8(scheme, tile, gemms):
    check(scheme, tile, gemms=gemms, stored=tile % 64 != 0)


@pytest.mark.parametrize(
    ("scheme", "tile", "gemms"),
    [
        ("mxfp8", 64, SECOND),
        ("nvfp4", 128, FIRST),
        *(
            pytest.param(scheme, tile, BOTH, marks=pytest.mark.exhaustive)
            for scheme in UNDER_GROUPS
            for tile in (16, 32, 64, 128)
        ),
    ],
)
def test_under_scales_along_k(scheme, tile, gemms):
    check(scheme, tile, gemms=gemms)


@pytest.mark.exhaustive
def test_under_fp8_of_other_sizes():
    check("int4_w4a8_g128", 16, "swigluoai", (2880, 2880), stored=False)


@pytest.mark.parametrize(
    ("activation", "sizes", "gemms"),
    [
        ("silu", (2048, 768), FIRST),
        pytest.param("silu", (2048, 768), SECOND, marks=pytest.mark.exhaustive),
        pytest.param("swigluoai", (2880, 2880), BOTH, marks=pytest.mark.exhaustive),
    ],
)
def test_products_in_fp8(activation, sizes, gemms):
    """Bytes of a decoded word are multiplied as they lie, and no bits are moved among them."""
    for kernel in check("int4_w4a8_g128", 128, activation, sizes, gemms=gemms, stored=False):
        products = re.findall(r"wgmma\.mma_async\S*", kernel.asm["ptx"])
        assert products and all(name.endswith("k32.f32.e4m3.e4m3") for name in products)
        fenced = re.findall(r"commit_group(?:(?!wgmma).)*fence\.proxy(?:(?!wgmma).)*wgmma\.wait",
                            kernel.asm["ptx"], re.DOTALL)  # fmt: skip
        assert len(fenced) == 2 * 4  # once in the loop of each warp group and number of rows
        code = aot.disassembled(kernel)
        assert code.count("QGMMA") == len(products) > code.count("PRMT") / 2


@pytest.mark.parametrize("tile", [16, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_under_fp8_in_half_precision(tile):
    check("int4_w4a8_g128", tile, "silu", (2048, 1408), dtype=torch.float16)


def test_loads_that_nothing_waits_for_are_seen():
    """The first operand of mma.sync has four registers, the second two."""
    load, scale = "LDSM.16.M88.4 R12, [R51+UR16+0x8800]", "LDS.U16 R30, [R3]"
    product = "HMMA.16816.F32.BF16 R24, R40, R12, R24"
    arrival, back = "ARRIVES.LDGSTSBAR.64.ARVCNT [UR20+0xc2c0]", "@P0 BRA 0x2520"
    assert not aot.unread([load, product, arrival]) and aot.unread([load, arrival])
    assert not aot.unread([load, product, back]) and aot.unread([product, scale, back])
    assert not aot.unread([scale, back, product]) and aot.unread([load, scale, product, arrival])
    assert not aot.unread(["LDS.128 R40, [R2]", product, arrival])
    assert aot.unread(["LDS.64 R44, [R2]", product, arrival])
    assert not aot.unread([load, "FENCE.VIEW.ASYNC.S", arrival])


def test_a_stage_that_is_released_again_and_again_is_seen():
    """A loop's arrival is at a barrier that was chosen before it."""
    lines = [
        "  %i = ttg.memdesc_index %b[%first] : barriers",
        "  %s:2 = scf.for %k = %c0 to %c9 step %c1 iter_args(%stage = %first) -> (i32) {",
        "    %e = ttg.memdesc_index %b[%STAGE] : barriers",
        "    ttng.async_copy_mbarrier_arrive %e {noIncrement} : barrier",
        "  }",
        "  ttng.async_copy_mbarrier_arrive %i {noIncrement} : barrier",
    ]
    for stage, expected in (("first", True), ("stage", False), ("k", False)):
        text = "\n".join(lines).replace("STAGE", stage)
        kernel = SimpleNamespace(asm={"ttgir": text})
        assert aot.releases_one_stage(kernel) == expected


def test_overwritten_operands_are_seen():
    """A register is written while a product that reads it is under way."""
    line = "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR12], R24, gsb0"
    safe = [line, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "LOP3.LUT R41, R3, R4, R5, 0xc0, !PT"]
    assert not aot.overwritten(safe) and aot.overwritten([line, safe[2]])
    other = line.replace("R40", "R48")
    late = [line, other, "WARPGROUP.DEPBAR.LE gsb0, 0x1", safe[2]]
    assert not aot.overwritten(late)
    assert aot.overwritten([*late, "LDS.128 R48, [R2]"])
    assert aot.overwritten([line.replace("HGMMA", "QGMMA"), safe[2]])
    assert aot.overwritten([line, "LDS.128 R40, [R2]"]) and not aot.overwritten(
        [line, "STS [R2], R41"]
    )


SIZES = {"qwen3-30b": (2048, 768, 8), "gpt-oss": (2880, 2880, 4), "deepseek-v3": (7168, 2048, 8),
         "qwen3-next": (2048, 512, 10), "llama4-scout": (5120, 8192, 1)}  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "model"), half_exhaustive(["mxfp4_w4a16", "int4_w4a16_g32", "int8_w8a16"], SIZES)
)
def test_one_token_with_the_sum(scheme, model):
    n, k, slots = SIZES[model]

    def launch(empty):
        h, ids = empty(slots, k), empty(1, slots, dtype=torch.int32)
        q = packed(empty, scheme, n, k, torch.bfloat16)
        weights, tiles = empty(1, slots, dtype=torch.float32), [None, ids, None]
        stored_sum(expert_product, h, *q, empty(EXPERTS, n), weights, tiles, scheme)

    (kernel,) = aot.compile_launch(H200, launch)
    check_jobs(kernel, "hopper_decode_sum_kernel")


def check_jobs(kernel, name):
    """Programs fit on an SM, words are copied 16 bytes at a time, and nothing is spilled."""
    used = aot.resources(kernel, 90)
    (constants,) = (c for c in kernel.src.constants.values() if isinstance(c, JobConstants))
    assert kernel.metadata.name == name and used["spilled"] == 0
    assert used["registers"] <= JOB_REGISTERS[constants.STRIPS]
    assert used["shared"] > 48 * 1024
    programs = 2 if constants.STRIPS == 4 else 3  # at least
    assert programs * (used["shared"] + 1024) <= H200.shared_memory + 1024
    code = aot.disassembled(kernel)
    assert "LDGSTS.E.BYPASS.128" in code
    if constants.FIRST == constants.PASSES * constants.ROUNDS:  # what is copied ahead is unrolled
        assert code.count("BAR.SYNC") <= constants.FIRST + 5  # a barrier a round


@pytest.mark.parametrize(
    ("scheme", "model"),
    half_exhaustive(
        ["mxfp4_w4a16", "int4_w4a16_g128_zp", "int4_w4a8_g128", "int8_w8a16"],
        ["qwen3-30b", "qwen3-next", "llama4-scout"],
    ),
)
def test_one_token_of_the_first_gemm(scheme, model):
    check_first_gemm(scheme, model, "silu")


@pytest.mark.parametrize("activation", ["relu2_no_mul", "swigluoai"])
def test_one_token_whose_gate_does_not_lie_apart(activation):
    """No gate, and a gate whose rows alternate with those of up."""
    check_first_gemm("mxfp4_w4a16", "qwen3-30b", activation)


def check_first_gemm(scheme, model, activation):
    hidden, width, slots = SIZES[model]
    rows = width if activation.endswith("no_mul") else 2 * width

    def launch(empty):
        x, ids = empty(1, hidden), empty(1, slots, dtype=torch.int32)
        q = packed(empty, scheme, rows, hidden, torch.bfloat16)
        bias, tiles = empty(EXPERTS, rows), [None, ids, None]
        if get_scheme(scheme).activation is None:
            head, tail = (x, *q, bias, None, tiles), (slots, scheme, activation)
            stored_product(expert_product, *head, *tail)
        else:
            head, tail = (x, None, q.data, q.scale, q.global_scale, bias), (slots, scheme)
            scaled_product(expert_product, *head, tiles, *tail, torch.bfloat16, activation)

    *_, kernel = aot.compile_launch(H200, launch)
    check_jobs(kernel, "hopper_decode_slot_kernel")


@pytest.mark.parametrize(("scheme", "model"), half_exhaustive(UNDER_FP8, SIZES))
def test_one_token_with_the_sum_under_fp8(scheme, model):
    n, k, slots = SIZES[model]

    def launch(empty):
        h, ids = empty(slots, k), empty(1, slots, dtype=torch.int32)
        weight = weight_of(packed(empty, scheme, n, k, torch.bfloat16), empty(EXPERTS, n))
        weights, tiles = empty(1, slots, dtype=torch.float32), [None, ids, None]
        expert_product.expert_product_sum(h, None, weight, weights, tiles, scheme, torch.bfloat16)

    quantize, kernel = aot.compile_launch(H200, launch)
    assert quantize.metadata.name == "quantize_kernel"
    check_jobs(kernel, "hopper_decode_sum_kernel")


def test_one_token_begins_early_only_where_it_is_told_to():
    """It asks for weights before it waits for rows, and writes nothing."""
    scheme, (n, k, slots) = "mxfp4_w4a16", SIZES["qwen3-30b"]

    def launch(empty):
        ids, weights = empty(1, slots, dtype=torch.int32), empty(1, slots, dtype=torch.float32)
        w1, w2 = (packed(empty, scheme, *s, torch.bfloat16) for s in ((2 * k, n), (n, k)))
        bias, tiles = empty(EXPERTS, n), [None, ids, None]
        rows = (empty(1, n), *w1, None, None, tiles, slots, scheme, "silu")
        with mock.patch.object(launching, "_current_stream", lambda device: 1):
            h = stored_product(expert_product, *rows)
            for early in (True, False):
                with promised(early):
                    stored_sum(expert_product, h, *w2, bias, weights, tiles, scheme)

    _, *sums = aot.compile_launch(H200, launch, until="ttgir")
    assert [c.EARLY for kernel in sums for c in kernel.src.constants.values()
            if isinstance(c, JobConstants)] == [True, False]  # fmt: skip
    for kernel, early in zip(sums, (True, False), strict=True):
        before, after = aot.WAIT.split(kernel.asm["ttgir"])
        body = before[before.index("tt.func") :].split("\n", 1)[1]
        assert ("tt.load" in body) == early and "tt.store" not in body
        assert not re.search(r"%(h|bias|topk_weights|out)\b", body) and "tt.store" in after
