"""The GEMMs of two quantized operands compiled for every architecture, without a GPU."""

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
import aot_launches  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from pairwise import half_exhaustive  # noqa: E402
from plans import row_tile  # noqa: E402
from products import scaled_product  # noqa: E402

from moe_ops.dispatch.tiles import ROW_TILES  # noqa: E402
from moe_ops.kernels import align, expert_product, quantize
from moe_ops.kernels._gemm import scaled as scaled_tile  # noqa: E402
from moe_ops.kernels._runtime.launch import Launch  # noqa: E402
from moe_ops.scheme import get_scheme  # noqa: E402
from moe_ops.support import ARCHITECTURES, min_capability  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
SCHEMES = ("fp8_tensor", "fp8_channel", "fp8_block128", "int8_channel", "int8_block128")


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(align, expert_product, quantize, scaled_tile)


def launch_layer(
    scheme, tile, activation="silu", hidden=2048, width=768, has_bias=False, scales=torch.float32
):
    """Both GEMMs of a layer, whose weights' scales are ``scales``."""
    quant, weight, experts = get_scheme(scheme).activation, get_scheme(scheme).weight, 4

    def launch(empty):
        slots = tile * experts
        ids = empty(slots, 1, dtype=torch.int32)

        def operands(n, k):
            scale = empty(*quant.row_scale_shape(slots, k), dtype=torch.float32)
            a = empty(slots, k, dtype=quant.dtype)
            w_scale = empty(*weight.weight_scale_shape(experts, n, k), dtype=scales)
            w = empty(experts, n, k, dtype=weight.dtype)
            bias = empty(experts, n) if has_bias else None
            return a, scale, w, w_scale, None, bias

        with row_tile(tile):
            how = (aot_launches.given_plan(ids, experts, scheme), 1, scheme, torch.bfloat16)
            scaled_product(expert_product, *operands(2 * width, hidden), *how, activation)
            scaled_product(expert_product, *operands(hidden, width), *how)

    return launch


SPILLED = {(90, 128): 64, (120, 32): 8}
"""Bytes that may be set aside, by architecture and row tile; elsewhere none. Hopper's gated tile of
128 rows is 10 % slower without (half as wide); ptxas holds one of 32 rows to 48 registers."""


def check(arch, tile, nth, launch):
    """Both products, or one of them."""
    products = aot.compile_launch(arch, launch, nth=nth)
    assert len(products) == (2 if nth is None else 1)
    for kernel in products:
        assert kernel.metadata.name == "scaled_gemm_kernel"
        used = aot.resources(kernel, arch)
        assert used["shared"] <= aot.SHARED_MEMORY[arch] and used["serialized"] == 0, used
        few = SPILLED.get((arch, tile), 0)
        allowed = aot_launches.may_spill(few, kernel.metadata.name, tile, arch)
        assert used["spilled"] <= allowed, used
        assert not aot.rewrites_operands(kernel)
    return products


CASES = [
    pytest.param(arch, *case.values, marks=case.marks)
    for arch in ARCHITECTURES
    for case in half_exhaustive(SCHEMES, ROW_TILES)
    if arch >= min_capability(get_scheme(case.values[0]).activation)
]


@pytest.mark.parametrize(("arch", "scheme", "tile"), CASES)
def test_scaled_gemms(arch, scheme, tile, one_of_two):
    """In turns of schemes the first GEMM or the second, unless everything is compiled."""
    products = check(arch, tile, one_of_two(SCHEMES.index(scheme)), launch_layer(scheme, tile))
    if arch == 90 and tile >= 64:
        assert all("wgmma.mma_async" in k.asm["ptx"] for k in products)


@pytest.mark.parametrize(
    ("scheme", "tile"), half_exhaustive(["fp8_channel", "fp8_block128"], ROW_TILES)
)
def test_scales_of_a_byte(scheme, tile, one_of_two):
    """e8m0."""
    turn = one_of_two(ROW_TILES.index(tile) // 2)
    check(90, tile, turn, launch_layer(scheme, tile, scales=torch.uint8))


OTHER_BLOCKS = ["fp8_block64x16", "int8_block32", "fp8_block16x256_ue8m0"]


@pytest.mark.parametrize(
    ("scheme", "tile", "activation"),
    half_exhaustive(OTHER_BLOCKS, ROW_TILES, ["swigluoai", "gelu_no_mul"]),
)
def test_other_blocks_and_tails(scheme, tile, activation, one_of_two):
    """H 2880 and I 704: no tile divides them; blocks of gate and up rows overlap."""
    check(90, tile, one_of_two(0), launch_layer(scheme, tile, activation, 2880, 704))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", ROW_TILES)
def test_unquantized_operands_are_not_rewritten(tile, dtype):
    kernels = aot.compile_launch(90, aot_launches.launch_gemms(tile, dtype, "silu"))
    assert not any(aot.rewrites_operands(k) for k in kernels)


@triton.jit
def widening_kernel(a, b, out, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """A product whose first operand is computed in registers, with nothing to wait for."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + k[None, :] + start).to(tl.bfloat16)
        acc = tl.dot(x, tl.load(b + n[None, :] * K + k[:, None] + start), acc)
    tl.store(out + m[:, None] * N + n[None, :], acc)


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="how Triton 3.6 compiles")
def test_rewritten_operands_are_seen():
    kernel = Launch(widening_kernel, K=4096, M=64, N=128, BK=64, num_warps=4, num_stages=4)

    def launch(empty):
        a, out = empty(64, 4096, dtype=torch.int8), empty(64, 128, dtype=torch.float32)
        kernel((1,), a, empty(128, 4096), out)

    assert aot.rewrites_operands(aot.compile_launch(90, launch, until="ttgir")[0])
