"""The kernel of quantized weights compiled for every architecture, without a GPU."""

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
from products import stored_product  # noqa: E402

from moe_ops.kernels import expert_product
from moe_ops.kernels._gemm import weight_only as weight_only_tile  # noqa: E402
from moe_ops.scheme import SCHEMES  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
NAMED = [n for n, s in SCHEMES.items() if s.weight is not None and s.activation is None]
SOME = ("int4_w4a16_g128_zp", "mxfp4_w4a16", "fp8_w8a16_block128", "int8_w8a16")


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(weight_only_tile)


def launch_gemms(scheme, tile, dtype, hidden=2048, width=768, activation="silu"):
    def launch(empty):
        experts = 256 if tile <= 32 else 4
        slots = tile * experts // 2
        ids = empty(slots, 1, dtype=torch.int32)
        x, bias = empty(slots, hidden, dtype=dtype), empty(experts, 2 * width, dtype=dtype)
        w1 = stored(empty, scheme, experts, 2 * width, hidden, dtype)
        w2 = stored(empty, scheme, experts, hidden, width, dtype)
        with row_tile(tile):
            rest = (None, given_plan(ids, experts, scheme, dtype), 1, scheme)
            h = stored_product(expert_product, x, *w1, bias, *rest, activation)
            stored_product(expert_product, h, *w2, None, *rest)

    return launch


def check(arch, scheme, tile, dtype, nth=None, **more):
    kernels = aot.compile_launch(arch, launch_gemms(scheme, tile, dtype, **more), nth=nth)
    count = 2 if nth is None else 1
    assert [k.metadata.name for k in kernels] == ["weight_only_gemm_kernel"] * count
    for kernel in kernels:
        used = aot.resources(kernel, arch)
        assert used["shared"] <= aot.SHARED_MEMORY[arch], used
        # A few words that live across the loop. Without, tiles of 128 rows are slower on Hopper.
        few = 24 if arch == 90 and tile == 128 else 16 * (dtype == torch.float16)
        assert used["spilled"] <= may_spill(few, scheme, tile, dtype), used
        assert used["serialized"] == 0, used
        assert not aot.rewrites_operands(kernel)
    return kernels


@pytest.mark.parametrize(("scheme", "tile"), half_exhaustive(NAMED, [16, 128]))
def test_every_scheme(scheme, tile, one_of_two):
    """In turns of two schemes, which have both tiles, the first GEMM or the second."""
    for kernel in check(90, scheme, tile, torch.bfloat16, one_of_two(NAMED.index(scheme) // 2)):
        assert ("wgmma.mma_async" if tile == 128 else "mma.sync") in kernel.asm["ptx"]


@pytest.mark.parametrize("scheme", SOME)
@pytest.mark.parametrize("arch", [80, 100, 120])
@pytest.mark.parametrize("tile", [32, 64])
def test_other_architectures(scheme, arch, tile):
    check(arch, scheme, tile, torch.bfloat16)


OTHER_DTYPES = [
    pytest.param(case.values, marks=case.marks)
    for case in half_exhaustive(SOME, [torch.float16, torch.float32], [16, 128])
]
"""Each scheme with each dtype, as every element is another function in each."""


@pytest.mark.parametrize("case", OTHER_DTYPES, ids=str)
def test_other_dtypes(case, one_of_two):
    scheme, dtype, tile = case
    check(90, scheme, tile, dtype, one_of_two(SOME.index(scheme) // 2))


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16"])
def test_tails(scheme):
    """gpt-oss: H and I that no tile divides, gate and up interleaved."""
    check(90, scheme, 16, torch.bfloat16, hidden=2880, width=2880, activation="swigluoai")
