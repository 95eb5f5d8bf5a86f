"""The GEMMs that dequantize both operands, and the quantization of rows, compiled without a GPU."""

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from test_aot_weight_only import stored  # noqa: E402

from moe_ops.kernels import align, decoded_gemm, quantize, weight_only_tile  # noqa: E402
from moe_ops.scheme import get_scheme  # noqa: E402
from moe_ops.support import ARCHITECTURES, min_capability  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
NAMED = ("mxfp8", "mxfp4", "mxfp4_mxfp8", "mxfp4_w4a8", "nvfp4", "int4_w4a8_g128")
SOME = ("mxfp8", "nvfp4")


@pytest.fixture(autouse=True)
def no_other_driver():
    """Kernels cached for one architecture must not serve the next."""
    for module in (align, quantize, weight_only_tile):
        for value in vars(module).values():
            if hasattr(value, "device_caches"):
                value.device_caches.clear()


def launch_layer(scheme, tile, hidden=2048, width=768, activation="silu"):
    quant, weight = get_scheme(scheme).activation, get_scheme(scheme).weight

    def launch(empty):
        experts = 256 if tile <= 32 else 4
        slots = tile * experts // 2
        ids = empty(slots, 1, dtype=torch.int32)
        plan = align.moe_align_block_size(ids, None, [tile], experts, False, True)

        def operands(n, k):
            x = empty(slots, k, dtype=torch.bfloat16)
            one = empty(1) if quant.static or quant.global_scale else None
            rows = quantize.moe_quantize(x, one, None, ids, None, experts, quant.key)
            w = stored(empty, scheme, experts, n, k, torch.bfloat16)
            factor = empty(experts, n) if weight.channel_scale else w.global_scale
            return *rows, w.data, w.scale, factor, None, *plan, [tile], 1, scheme, torch.bfloat16

        decoded_gemm.decoded_gemm_act(*operands(2 * width, hidden), activation)
        decoded_gemm.decoded_gemm(*operands(hidden, width))

    return launch


def check(arch, scheme, tile, **more):
    kernels = aot.compile_launch(arch, launch_layer(scheme, tile, **more))
    gemms = [k for k in kernels if k.metadata.name == "weight_only_gemm_kernel"]
    assert len(gemms) == 2 and len(kernels) >= 4
    for kernel in gemms:
        used = aot.resources(kernel, arch)
        assert used["shared"] <= aot.SHARED_MEMORY[arch], used
        assert used["spilled"] <= 64, used
        assert used["serialized"] == 0, used
    return gemms


@pytest.mark.parametrize("scheme", NAMED)
@pytest.mark.parametrize("tile", [16, 128])
def test_every_scheme(scheme, tile):
    for kernel in check(90, scheme, tile):
        assert ("wgmma.mma_async" if tile == 128 else "mma.sync") in kernel.asm["ptx"]


@pytest.mark.parametrize("scheme", NAMED)
@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != 90])
def test_other_architectures(scheme, arch):
    if arch < min_capability(get_scheme(scheme).activation):
        pytest.skip("has no e4m3 conversions")
    for tile in (32, 64) if scheme in SOME else (32,):
        check(arch, scheme, tile)


@pytest.mark.parametrize("scheme", SOME)
def test_tails(scheme):
    """H and I that no tile divides, gate and up interleaved."""
    check(90, scheme, 16, hidden=2880, width=2880, activation="swigluoai")
