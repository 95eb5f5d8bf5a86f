"""Every kernel compiled for every architecture that the support table names, without a GPU."""

from pathlib import Path

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import (
    ARCHITECTURES,
    check_resources,
    launch_gemms,
    launch_residency,
    slot_plan,
)  # noqa: E402
from pairwise import cover  # noqa: E402
from plans import row_tile  # noqa: E402

from moe_ops.dispatch.tiles import ROW_TILES  # noqa: E402
from moe_ops.kernels import (  # noqa: E402
    activation,
    align,
    batched,
    eplb,
    expert_product,
    permute,
    quantize,
    residency,
    routing,
    weight_and_reduce,
)
from moe_ops.ops import STAGES  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MODULES = (
    activation, align, batched, eplb, expert_product, permute, quantize, routing,
    weight_and_reduce,
)  # fmt: skip
"""Stages whose kernels are compiled here."""
ELSEWHERE = {
    "expert_dgrad": "test_gradients_aot.py",
    "expert_wgrad": "test_gradients_aot.py",
    "routing_adjust": "test_routing_aot.py",
    "symmetric": "test_symmetric_aot.py",
    "symmetric_batched": "test_symmetric_aot.py",
}
"""The other stages, and the files that compile theirs."""


@pytest.fixture(autouse=True)
def no_other_driver(monkeypatch):
    aot.forget_kernels(*MODULES, residency)


TILES = [*((t, 4) for t in ROW_TILES), (16, 256), (32, 256)]
GEMMS = [
    pytest.param(
        dtype, *tile,
        marks=[pytest.mark.exhaustive] * (dtype is torch.float16 and i % 2),
    )
    for dtype in DTYPES
    for i, tile in enumerate(TILES)
]  # fmt: skip
"""Dtypes, row tiles and experts. fp16 differs from bf16 in one constant."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tile", "experts"), GEMMS)
def test_expert_gemms(arch, dtype, tile, experts):
    """Every row tile; the two of decoding also for many experts, where their tiles are wider."""
    kernels = aot.compile_launch(arch, launch_gemms(tile, dtype, "silu", experts=experts))
    check_resources(kernels, arch)
    if arch == 90 and dtype != torch.float32 and tile >= 64:
        products = [k for k in kernels if "gemm" in k.metadata.name]
        assert len(products) == 2
        assert all("wgmma.mma_async" in k.asm["ptx"] for k in products)


@pytest.mark.parametrize("activation_key", ["swigluoai", "situ(beta=1.0)", "gelu_no_mul"])
def test_epilogues_and_tails(activation_key):
    """H 2880 and I 1408 / 2: no tile divides them."""
    launch = launch_gemms(64, torch.bfloat16, activation_key, 2880, 704, has_bias=True)
    check_resources(aot.compile_launch(90, launch), 90)


def launch_rest(tokens, experts=257, k=8):
    def launch(empty):
        ids = empty(tokens, k, dtype=torch.int32)
        weights, expert_map = (
            empty(tokens, k, dtype=torch.float32),
            empty(experts, dtype=torch.int32),
        )
        for scoring in ("softmax", "sigmoid"):
            logits, bias = (
                empty(tokens, experts, dtype=torch.float32),
                empty(experts, dtype=torch.float32),
            )
            how = (bias, k, True, scoring, 1.0)
            routing.fused_topk(logits, *how)
        align.plan_slots(ids, expert_map, experts, "unquantized", torch.bfloat16)
        counts = align.count_expert_num_tokens(ids, None, experts)
        align.plan_batched(counts, tokens, "unquantized")
        order = permute.moe_permutation(ids, None, experts)
        align.plan_permuted(order[0], tokens * k, "unquantized")
        rows = permute.gather_rows(empty(tokens, 2880), order[2], order[0], k)
        permute.order_columns(
            empty(tokens, 2880), empty(experts, 2880, dtype=torch.int32), ids, expert_map
        )
        permute.moe_unpermute(rows, weights, order[1], order[0])
        activation.activation(empty(tokens * k, 1408), "silu")
        weight_and_reduce.moe_fused_mul_sum(
            empty(tokens, k, 2880), weights, ids, expert_map, None, experts
        )
        replicas, enabled = empty(experts, 33, dtype=torch.int64), empty(1, dtype=torch.bool)
        unpadded = empty(1, dtype=torch.int32)
        eplb.eplb_map_to_physical_and_record(
            ids, expert_map, replicas, expert_map, enabled, unpadded, torch.int64, 0, unpadded
        )
        for slots, tile in ((32, 16), (200, 192)):
            launch_residency(empty, experts, slots, tile)

    return launch


@pytest.mark.parametrize("arch", [*ARCHITECTURES, 103])
def test_alignment(arch):
    """Few slots and many: other tests of GEMMs are given their plans."""

    def launch(empty):
        for tile, experts in ((16, 256), (64, 4), *[(32, 256)] * (arch == 90)):
            with row_tile(tile):
                slot_plan(empty(tile * experts // 2, 1, dtype=torch.int32), experts, "unquantized")

    kernels = aot.compile_launch(arch, launch)
    found = {kernel.metadata.name for kernel in kernels}
    assert found == {"_align_kernel", "_count_blocks_kernel", "_align_blocks_kernel"}
    check_resources(kernels, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tokens", [1, 4096])
def test_other_stages(arch, tokens):
    """Copies from host memory take 16 bytes a thread at once."""
    kernels = aot.compile_launch(arch, launch_rest(tokens))
    check_resources(kernels, arch)
    copies = [k for k in kernels if k.metadata.name == "_make_resident_kernel"]
    assert copies and all(k.asm["ptx"].count(".v4.b32") >= 4 for k in copies)


def test_every_stage_is_compiled():
    here = {module.__name__.rpartition(".")[2] for module in MODULES}
    assert here | set(ELSEWHERE) == set(STAGES.values())
    assert all((Path(__file__).parent / file).exists() for file in ELSEWHERE.values())


QUANTS = (
    *(
        f"{element}:{group}"
        for element in ("int8", "fp8")
        for group in ("*x*:float32", "1x*:float32", "1x128:float32", "1x16:pow2")
    ),
    *(f"{element}:1x32:e8m0" for element in ("fp8", "fp6_e2m3", "fp6_e3m2", "fp4")),
    "fp4:1x16:e4m3:global_scale",
)


WAYS = ("rows", "slots", "activation", "dispatch", "batched", "batched activation")
"""Every way to a quantized row: of x, of slots, of an activation, in both formats."""


def parts(quant):
    """The element of a quantization, and what shares a scale of which type."""
    element, group = quant.split(":", 1)
    return {"element": element, "group": group}


PAIRS = cover(
    {"way": WAYS, **{n: [*dict.fromkeys(parts(q)[n] for q in QUANTS)] for n in ("element", "group")}},
    [(("element", "group"), lambda element, group: f"{element}:{group}" in QUANTS)],
)
"""Ways with elements and groups, which are different functions: every two of them meet."""


def launch_quantization(tokens, quant, width, ways, experts=257, k=8):
    """Quantized rows, made in some ways."""

    def launch(empty):
        x, ids = empty(tokens, width), empty(tokens, k, dtype=torch.int32)
        weights = empty(tokens, k, dtype=torch.float32)
        h, one = empty(tokens * k, 2 * width), empty(1, dtype=torch.float32)
        wide, counts = empty(experts, tokens, 2 * width), empty(experts, dtype=torch.int32)
        scale = one if quant.endswith("global_scale") else None
        dispatch = (x, scale, weights, ids, 0, experts, tokens)
        rows = empty(experts, tokens, width)
        calls = {
            "rows": (quantize.moe_quantize, x, scale, None, None, None, experts),
            "slots": (quantize.moe_quantize, x, scale, weights, ids, None, experts),
            "activation": (quantize.activation_quantize, h, scale, ids, None, experts, "silu"),
            "dispatch": (batched.batched_dispatch, *dispatch),
            "batched": (batched.batched_quantize, rows, scale, counts),
            "batched activation": (
                batched.batched_activation_quantize, wide, scale, counts, "swigluoai"
            ),
        }  # fmt: skip
        for way in ways:
            function, *arguments = calls[way]
            function(*arguments, quant)
        if quant.startswith("int8:*x*"):
            quantize.moe_quantize(x, one, None, None, None, experts, f"{quant}:static")
            batched.batched_dispatch(*dispatch, "")
            batched.batched_activation(wide, counts, "silu")
            batched.batched_rows(ids, 0, experts, tokens)

    return launch


ONE_OF_EACH = {quant.split(":")[0]: quant for quant in QUANTS}
"""The last one of each element."""


LONG, SHORT = (4096, 16384), (1, 2880)
"""Tokens and columns."""


def quantizations():
    """Every quantization of long rows; on sm_90 of short ones too.

    Rows of int8 and fp8 differ in their rounding only: of each kind of scale one has long rows, and
    the other short ones, unless everything is compiled.
    """
    for arch in ARCHITECTURES:
        if arch == 90:
            for i, quant in enumerate(QUANTS):
                turn = (i + (i // 4 == 1)) % 2
                for shape in (LONG, SHORT):
                    later = (shape == SHORT) != turn
                    yield pytest.param(arch, quant, shape, marks=[pytest.mark.exhaustive] * later)
        else:
            for quant in QUANTS if arch < 90 else ONE_OF_EACH.values():
                yield pytest.param(arch, quant, LONG)


@pytest.mark.parametrize(("arch", "quant", "shape"), [*quantizations()], ids=str)
def test_quantization(arch, quant, shape, request):
    """A row of up to 16384 columns stays in registers. e4m3 begins with sm_89."""
    if ("fp8" in quant or "e4m3" in quant) and arch < 89:
        pytest.skip("e4m3 does not exist on this architecture")
    tokens, width = shape
    ways = [row["way"] for row in PAIRS if {**row, **parts(quant)} == row]
    ways = WAYS if request.config.getoption("exhaustive") else ways
    check_resources(aot.compile_launch(arch, launch_quantization(tokens, quant, width, ways)), arch)
