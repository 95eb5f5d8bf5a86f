"""Kernels of the backward pass, compiled without a GPU."""

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import ARCHITECTURES, check_resources, given_plan, stored  # noqa: E402
from pairwise import half_exhaustive  # noqa: E402
from plans import row_tile  # noqa: E402
from stage_launches import launch_backward, launch_weight_gradients, launch_wgrad  # noqa: E402
from table_items import every_row  # noqa: E402

from moe_ops.kernels import activation, expert_dgrad, expert_product, expert_wgrad, routing  # noqa: E402
from moe_ops.kernels._gemm import unpack  # noqa: E402
from moe_ops.scheme import get_scheme  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANKS = [4, 16, 64]
MODULES = (activation, expert_dgrad, expert_product, expert_wgrad, routing, unpack)
SCHEMES = (
    "int4_w4a16_g128_zp", "int8_w8a16", "fp8_w8a16_block128", "mxfp4_w4a16", "nvfp4_w4a16",
    "fp8_block128", "fp8_channel", "int8_channel",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(*MODULES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tile"), half_exhaustive(DTYPES, [16, 64, 128, 192]))
def test_weight_gradients(arch, dtype, tile):
    kernels = aot.compile_launch(arch, launch_weight_gradients(tile, dtype, 1536, 2880))
    check_resources(kernels, arch)
    if arch == 90 and dtype != torch.float32 and tile >= 64:
        products = [k for k in kernels if "wgrad" in k.metadata.name]
        assert len(products) == 3
        assert all("wgmma.mma_async" in k.asm["ptx"] for k in products)


@every_row(
    ("tile", "dtype", "n", "k", "out_dtype"),
    [
        (128, torch.bfloat16, 1536, 2048, torch.bfloat16),
        (192, torch.float16, 2880, 2888, torch.float32),
    ],
)
def test_weight_gradients_on_hopper(tile, dtype, n, k, out_dtype):
    """Both operands' rows are copied 16 bytes at a time, and multiplied as they lie, transposed."""
    kernels = aot.compile_launch(90, launch_wgrad(tile, dtype, n, k, out_dtype))
    check_resources(kernels, 90)
    names = [kernel.metadata.name for kernel in kernels]
    assert names == ["_expert_spans_kernel", "hopper_wgrad_kernel"] * 3
    for kernel in kernels[1::2]:
        code = aot.disassembled(kernel)
        assert aot.resources(kernel, 90)["spilled"] == 0
        assert "LDL" not in code and "STL" not in code
        copies = code.count("LDGSTS.E.BYPASS.128")
        assert copies == code.count("LDGSTS.E") == 24  # 48 KB a stage
        assert code.count("tnspA.tnspB") == code.count("HGMMA.64x256x16") == 2 * 4
        adds = kernel is kernels[5]
        wide = "STG.E.64" if adds else "STG.E.128"
        assert code.count(wide) == code.count("STG.")
        assert code.count("LDG.E.64") == (code.count(wide) if adds else 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "rank"), half_exhaustive(DTYPES, RANKS))
def test_products_of_adapters(arch, dtype, rank, request):
    """Any plan, also that of few slots; both factors' layouts, in turns of plans and ranks.

    Products are added to all columns, to a half, and to every other one.
    """
    everything, turn = request.config.getoption("exhaustive"), RANKS.index(rank)
    places = ((0, 1), (1536, 1), (0, 2), (1, 2))
    plans = ((16, 4), (16, 64), (64, 256), (128, 512))

    def launch(empty):
        for i, (place, (tile, slots)) in enumerate(zip(places, plans, strict=True)):
            ids = empty(slots // 2, 2, dtype=torch.int32)
            with row_tile(tile):
                tiles = given_plan(ids, 4, "unquantized", dtype)
                low, weights = empty(slots, rank, dtype=dtype), empty(slots // 2, 2)
                b, a = empty(4, 1536, rank, dtype=dtype), empty(4, rank, 2880, dtype=dtype)
                both = ((b, 3072, weights, place), (a.transpose(1, 2), 2880, None, (0, 1)))
                for w, n, given, at in both if everything else [both[(i + turn) % 2]]:
                    out = empty(slots, n, dtype=dtype)
                    expert_product.expert_product_out(
                        low, [w], given, tiles, 1, False, *at, out=out
                    )

    kernels = aot.compile_launch(arch, launch)
    assert {k.metadata.name for k in kernels} == {"_expert_gemm_kernel"}
    check_resources(kernels, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("scheme", "dtype", "tile"), half_exhaustive(SCHEMES, DTYPES, [16, 128]))
def test_gradients_of_rows(arch, scheme, dtype, tile):
    """Few rows and many. (e4m3 is decoded by integer operations, so that every GPU has it.)"""

    def launch(empty):
        ids = empty(tile * 2, 2, dtype=torch.int32)
        w = stored(empty, scheme, 4, 1536, 2048, dtype)
        with row_tile(tile):
            tiles = given_plan(ids, 4, scheme, dtype)
            dy = empty(tile * 4, 1536, dtype=dtype)
            expert_dgrad.expert_dgrad(dy, *w, tiles, 1, scheme)

    kernels = aot.compile_launch(arch, launch)
    check_resources(kernels, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("scheme", ["int4_w4a16_g128", "mxfp4_w4a16", "int8_w8a16"])
def test_packed_weights(arch, scheme):
    """4-bit integers, 4-bit floats whose bits are spread, and bytes."""

    def launch(empty):
        quant = get_scheme(scheme).weight
        words = empty(4, 2880, 2880 * quant.element.stored_bits // 32, dtype=torch.int32)
        unpack.plain_data(words, quant)

    kernels = aot.compile_launch(arch, launch)
    assert {k.metadata.name for k in kernels} == {"_unpack_kernel"}
    check_resources(kernels, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_activations_and_routers(arch):
    check_resources(aot.compile_launch(arch, launch_backward), arch)
