"""Every kernel compiled for every architecture that the support table names, without a GPU."""

from pathlib import Path

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import ARCHITECTURES, check_resources, launch_gemms, slot_plan  # noqa: E402
from plans import row_tile  # noqa: E402
from stage_launches import QUANTS, WAYS, launch_quantization, launch_stages, ways_of  # noqa: E402

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
    kernels = aot.compile_launch(
        arch, launch_gemms(tile, dtype, "silu", experts=experts, of_expert=9)
    )
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


@pytest.mark.parametrize("arch", [*ARCHITECTURES, 103])
def test_alignment(arch):
    """Few slots and many: other tests of GEMMs are given their plans."""

    def launch(empty):
        for tile, experts in ((16, 256), (64, 4), *[(32, 256)] * (arch == 90)):
            with row_tile(tile):
                slot_plan(empty(tile * experts // 2, 1, dtype=torch.int32), experts, "unquantized")
        if arch == 90:
            slot_plan(empty(4096, 4, dtype=torch.int32), 64, "unquantized")

    kernels = aot.compile_launch(arch, launch)
    found = {kernel.metadata.name for kernel in kernels}
    assert found == {"_align_kernel", "_count_blocks_kernel", "_align_blocks_kernel"}
    check_resources(kernels, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tokens", [1, 4096])
def test_other_stages(arch, tokens):
    """Copies from host memory take 16 bytes a thread at once."""
    kernels = aot.compile_launch(arch, launch_stages(tokens))
    check_resources(kernels, arch)
    copies = [k for k in kernels if k.metadata.name == "_make_resident_kernel"]
    assert copies and all(k.asm["ptx"].count(".v4.b32") >= 4 for k in copies)


def test_every_stage_is_compiled():
    here = {module.__name__.rpartition(".")[2] for module in MODULES}
    assert here | set(ELSEWHERE) == set(STAGES.values())
    assert all((Path(__file__).parent / file).exists() for file in ELSEWHERE.values())


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
    """A row of up to 16384 columns stays in registers. e4m3 begins with sm_89.

    Rows are made in the ways of `PAIRS`, or in every way if everything is compiled.
    """
    if ("fp8" in quant or "e4m3" in quant) and arch < 89:
        pytest.skip("e4m3 does not exist on this architecture")
    tokens, width = shape
    ways = WAYS if request.config.getoption("exhaustive") else ways_of(quant)
    check_resources(aot.compile_launch(arch, launch_quantization(tokens, quant, width, ways)), arch)
