"""The GEMMs whose operands are decoded, by both kernels, compiled without a GPU."""

import re

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import given_plan, may_spill, stored  # noqa: E402
from pairwise import half_exhaustive  # noqa: E402
from plans import row_tile  # noqa: E402
from products import scaled_product  # noqa: E402

from moe_ops import fake_impls  # noqa: E402
from moe_ops.activation import formula  # noqa: E402
from moe_ops.dispatch.blackwell import BLOCK_SCALED, is_block_scaled  # noqa: E402
from moe_ops.dispatch.tiles import ROW_TILES  # noqa: E402
from moe_ops.kernels import expert_product
from moe_ops.kernels._gemm import block_scaled as block_scaled_gemm
from moe_ops.kernels._gemm import weight_only as weight_only_tile
from moe_ops.scheme import get_scheme  # noqa: E402
from moe_ops.support import ARCHITECTURES, min_capability  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
NAMED = (
    "mxfp8",
    "mxfp4",
    "mxfp4_mxfp8",
    "mxfp4_w4a8",
    "mxfp4_w4a8_token",
    "nvfp4",
    "int4_w4a8_g128",
)
SOME = ("mxfp8", "nvfp4")
SPILLED = {
    (arch, *where): most
    for where, most in {
        ("mxfp4_w4a8", 128): 272,
        ("mxfp4_w4a8_token", 128): 272,
        ("nvfp4", 16): 8,
        ("nvfp4", 32): 24,
        ("mxfp8", 16): 16,
    }.items()
    for arch in (100, 103)
}
"""Bytes that may be set aside, by architecture, scheme and row tile; elsewhere none. All of it lies
outside of loops: pointers of the epilogue, and the sums of 128 rows that meet a scale each."""


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(block_scaled_gemm, weight_only_tile)


def launch_layer(scheme, tile, hidden=2048, width=768, activation="silu", portable_only=False):
    quant, weight = get_scheme(scheme).activation, get_scheme(scheme).weight

    def launch(empty):
        experts = 256 if tile <= 32 else 4
        slots = tile * experts // 2
        ids = empty(slots, 1, dtype=torch.int32)

        def operands(n, k):
            x = empty(slots, k, dtype=torch.bfloat16)
            one = empty(1) if quant.static or quant.global_scale else None
            rows = fake_impls.quantize.moe_quantize(x, one, None, ids, None, experts, quant.key)
            w = stored(empty, scheme, experts, n, k, torch.bfloat16)
            factor = empty(experts, n) if weight.channel_scale else w.global_scale
            return *rows, w.data, w.scale, factor, None

        rows = 2 * width if formula(activation).gated else width
        with row_tile(tile, portable_only=portable_only):
            how = (given_plan(ids, experts, scheme), 1, scheme, torch.bfloat16)
            scaled_product(expert_product, *operands(rows, hidden), *how, activation)
            scaled_product(expert_product, *operands(hidden, width), *how)

    return launch


def compiled(arch, scheme, tile, nth=None, **more):
    """Both GEMMs of a layer or one, whose rows are quantized already. None sets registers aside."""
    gemms = aot.compile_launch(arch, launch_layer(scheme, tile, **more), nth=nth)
    assert len(gemms) == (2 if nth is None else 1)
    for kernel in gemms:
        used = aot.resources(kernel, arch)
        assert used["shared"] <= aot.SHARED_MEMORY[arch], used
        few = SPILLED.get((arch, scheme, tile), 0)
        assert used["spilled"] <= may_spill(few, scheme, tile, arch), used
        assert used["serialized"] == 0, used
        assert not aot.rewrites_operands(kernel)
    return gemms


def check(arch, scheme, tile, **more):
    """Of the kernel that decodes operands, also where there is another one."""

    gemms = compiled(arch, scheme, tile, portable_only=True, **more)
    assert all(k.metadata.name == "weight_only_gemm_kernel" for k in gemms)
    return gemms


@pytest.mark.parametrize(("scheme", "tile"), half_exhaustive(NAMED, [16, 128]))
def test_every_scheme(scheme, tile, one_of_two):
    """In turns of two schemes, which have both tiles, the first GEMM or the second."""
    for kernel in check(90, scheme, tile, nth=one_of_two(NAMED.index(scheme) // 2)):
        assert ("wgmma.mma_async" if tile == 128 else "mma.sync") in kernel.asm["ptx"]


OTHERS = [
    (arch, scheme)
    for arch in ARCHITECTURES
    for scheme in NAMED
    if arch != 90 and arch >= min_capability(get_scheme(scheme).activation)
]


@pytest.mark.parametrize(("arch", "scheme"), OTHERS)
def test_other_architectures(arch, scheme):
    for tile in (32, 64) if scheme in SOME else (32,):
        check(arch, scheme, tile)


@pytest.mark.parametrize("scheme", SOME)
def test_tails(scheme):
    """H and I that no tile divides, gate and up interleaved."""
    check(90, scheme, 16, hidden=2880, width=2880, activation="swigluoai")


@pytest.mark.parametrize(("arch", "scheme"), half_exhaustive([90, 100, 103, 120], NAMED))
def test_the_choice_of_the_kernel(arch, scheme, one_of_two):
    """By architecture and scheme, as `BLOCK_SCALED` says."""
    special = is_block_scaled(scheme, arch)
    name = "block_scaled_gemm_kernel" if special else "weight_only_gemm_kernel"
    kernels = compiled(arch, scheme, 64, one_of_two(NAMED.index(scheme)))
    assert kernels and all(k.metadata.name == name for k in kernels)


INSTRUCTIONS = {
    "mxfp4": ("mxf4.block_scale.scale_vec::2X", "mxf4nvf4.block_scale.scale_vec::2X"),
    "nvfp4": ("mxf4nvf4.block_scale.scale_vec::4X",) * 2,
}
FP8_INSTRUCTIONS = ("mxf8f6f4.block_scale.scale_vec::1X",) * 2
"""The kinds of instructions on sm_100 and on sm_120."""
OTHER_NAMES = {
    "mxf8f6f4.block_scale.block32": "mxf8f6f4.block_scale.scale_vec::1X",
    "mxf4.block_scale.block32": "mxf4.block_scale.scale_vec::2X",
    "mxf4nvf4.block_scale.block16": "mxf4nvf4.block_scale.scale_vec::4X",
}
"""Other names of the same instructions in PTX, which Triton writes from 3.8 on."""


def check_block_scaled(arch, scheme, tile, **more):
    """Every product is a block-scaled instruction, with scales as wide as they are stored."""
    for kernel in compiled(arch, scheme, tile, **more):
        assert kernel.metadata.name == "block_scaled_gemm_kernel"
        unit = "mma.sync" if arch == 120 else "tcgen05.mma"
        ptx = kernel.asm["ptx"]
        for name, same in OTHER_NAMES.items():
            ptx = ptx.replace(name, same)
        products = re.findall(rf"{re.escape(unit)}\.\S+", ptx)
        kind = INSTRUCTIONS.get(scheme, FP8_INSTRUCTIONS)[arch == 120]
        assert products and all(f"kind::{kind}" in product for product in products), products
        assert kernel.metadata.tmem_size <= 512


CASES = [(a, s) for a in (100, 120) for s in sorted(BLOCK_SCALED[a])]


@pytest.mark.parametrize(("arch", "scheme"), CASES)
@pytest.mark.parametrize("tile", ROW_TILES)
def test_block_scaled(arch, scheme, tile):
    check_block_scaled(arch, scheme, tile)


@pytest.mark.parametrize(("arch", "scheme"), [(103, s) for s in sorted(BLOCK_SCALED[103])])
def test_block_scaled_on_103(arch, scheme):
    for tile in (16, 128):
        check_block_scaled(arch, scheme, tile)


@pytest.mark.parametrize(("arch", "scheme"), CASES)
@pytest.mark.parametrize("activation", ["swigluoai", "silu_no_mul"])
def test_block_scaled_tails(arch, scheme, activation):
    """gpt-oss, and a layer without gates."""
    for tile in (16, 128):
        check_block_scaled(arch, scheme, tile, hidden=2880, width=2880, activation=activation)
