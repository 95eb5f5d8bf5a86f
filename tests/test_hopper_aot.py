"""Hopper's own kernels of the expert GEMMs, compiled as their launchers choose them."""

from dataclasses import replace

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402

from moe_ops import tuned  # noqa: E402
from moe_ops.hopper_tiles import most_stages, takes  # noqa: E402
from moe_ops.kernels import align, expert_gemm, hopper_stream, hopper_tile, scaled_gemm  # noqa: E402
from moe_ops.scheme import get_scheme  # noqa: E402
from moe_ops.tensors import Tiles  # noqa: E402
from moe_ops.tiles import EIGHT_BIT_ROW_TILES, ROW_TILES, Device, Gemm  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
EXPERTS, TOP_K = 64, 4
PACKED_AT_ONCE = ["fp8_channel", "fp8_block128", "fp8_tensor_static"]
H200 = Device(90, 232448, 132)
HALF = (232448 - 1024) // 2
"""Shared memory of a program of which two fit a processor, in bytes."""


@pytest.fixture(autouse=True)
def no_other_driver():
    """Kernels cached for one architecture must not serve the next."""
    for module in (hopper_stream, hopper_tile):
        for value in vars(module).values():
            if hasattr(value, "device_caches"):
                value.device_caches.clear()


def launch_layer(scheme, tokens, activation, hidden, width, has_bias):
    """Both GEMMs of a layer."""
    quant, weight = get_scheme(scheme).activation, get_scheme(scheme).weight
    tiles = ROW_TILES if weight is None else EIGHT_BIT_ROW_TILES

    def launch(empty):
        ids = empty(tokens, TOP_K, dtype=torch.int32)
        plan = Tiles(align.plan_slots(ids, None, tiles, EXPERTS), ids)

        def operands(rows, n, k):
            bias = empty(EXPERTS, n) if has_bias else None
            if weight is None:
                return empty(rows, k), empty(EXPERTS, n, k), bias
            scale = empty(*quant.row_scale_shape(rows, k), dtype=torch.float32)
            w_scale = empty(*weight.weight_scale_shape(EXPERTS, n, k), dtype=torch.float32)
            w = empty(EXPERTS, n, k, dtype=weight.dtype)
            return empty(rows, k, dtype=quant.dtype), scale, w, w_scale, bias

        first = operands(tokens, 2 * width, hidden)
        second = operands(tokens * TOP_K, hidden, width)
        if weight is None:
            expert_gemm.expert_gemm_act(*first, None, *plan, tiles, TOP_K, activation, True)
            expert_gemm.expert_gemm(*second, None, None, *plan, tiles, 1, True)
        else:
            sizes = (*plan, tiles)
            settings = (scheme, torch.bfloat16)
            scaled_gemm.scaled_gemm_act(*first, *sizes, TOP_K, *settings, activation)
            scaled_gemm.scaled_gemm(*second, *sizes, 1, *settings)

    return launch


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel", "fp8_tensor", "fp8_block128"])
@pytest.mark.parametrize(
    ("tokens", "activation", "hidden", "width"),
    [
        (1, "silu", 2048, 768),
        (100, "swigluoai", 2880, 2880),
        (400, "silu", 7168, 2048),
        (1024, "gelu", 2880, 1408),
        (65536, "silu", 4096, 1536),
    ],
)
def test_a_layer(scheme, tokens, activation, hidden, width):
    launch = launch_layer(scheme, tokens, activation, hidden, width, tokens == 1024)
    launched = aot.compile_launch(90, launch)
    kernels = [k for k in launched if "hopper" in k.metadata.name]
    rows, wide = tokens * TOP_K / EXPERTS, scheme == "unquantized"
    stream, packed = not wide and rows < 21, rows > (170 if wide else 42)
    assert len(kernels) == 2 * (stream or packed)
    # The first GEMM of an unquantized layer writes rows as the second reads them.
    packs = [k for k in launched if k.metadata.name == "_pack_kernel"]
    assert len(packs) == packed * (1 if wide else 2)
    for kernel in kernels:
        assert kernel.metadata.name == ("hopper_stream_kernel" if stream else "hopper_gemm_kernel")
        used = aot.resources(kernel, 90)
        assert used["shared"] <= (HALF if stream else aot.SHARED_MEMORY[90]), used
        assert used["spilled"] == 0 and used["serialized"] == 0, used
        assert "wgmma.mma_async" in kernel.asm["ptx"]


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel", "fp8_tensor", "fp8_block128"])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("block_n", [128, 256])
def test_every_packed_tile(scheme, block_m, block_n, monkeypatch):
    choice = tuned.hopper_tiles

    def chosen(gemm, device):
        tiles = replace(choice(gemm, device), block_m=block_m, block_n=block_n)
        return replace(tiles, num_stages=most_stages(tiles, device))

    monkeypatch.setattr(tuned, "hopper_tiles", chosen)
    launch = launch_layer(scheme, 65536, "swigluoai", 2880, 1408, True)
    kernels = [k for k in aot.compile_launch(90, launch) if "hopper" in k.metadata.name]
    assert len(kernels) == 2
    for kernel in kernels:
        used = aot.resources(kernel, 90)
        assert used["shared"] <= aot.SHARED_MEMORY[90], used
        assert used["spilled"] == 0 and used["serialized"] == 0, used
        parts = 1 + (scheme != "unquantized" and block_m == 128 and block_n == 256)
        assert kernel.asm["ptx"].count("wgmma.mma_async") == 2 * 4 * parts


def launch_unquantized(scheme):
    """A GEMM of many rows that are not quantized yet."""

    def launch(empty):
        plan = Tiles(align.plan_slots(ids := empty(4096, 4, dtype=torch.int32), None, (64, 64), 64))
        weight = get_scheme(scheme).weight
        w = empty(64, 512, 2048, dtype=weight.dtype)
        w_scale = empty(*weight.weight_scale_shape(64, 512, 2048), dtype=torch.float32)
        given = empty(1, dtype=torch.float32) if "static" in scheme else None
        rest = (ids, None, (64, 64), 4, scheme, torch.bfloat16)
        scaled_gemm.scaled_gemm(empty(4096, 2048), given, w, w_scale, None, plan[0], *rest)

    return launch


@pytest.mark.parametrize("scheme", [*PACKED_AT_ONCE, "fp8_tensor"])
def test_rows_are_quantized_as_they_are_packed(scheme):
    """Unless all of them share a scale of their own."""
    _, *kernels = (k.metadata.name for k in aot.compile_launch(90, launch_unquantized(scheme)))
    apart = ["amax_kernel", "scaled_kernel", "_pack_kernel", "hopper_gemm_kernel"]
    once = ["_quantize_pack_kernel", "hopper_gemm_kernel"]
    assert kernels[-2:] == once if scheme in PACKED_AT_ONCE else kernels[-4:] == apart


@pytest.mark.parametrize("arch", [80, 100, 120])
def test_only_on_hopper(arch):
    launch = launch_layer("fp8_channel" if arch > 80 else "unquantized", 4096, "silu", 512, 256, 0)
    assert not any("hopper" in k.metadata.name for k in aot.compile_launch(arch, launch))


def test_one_row_tile_is_the_other_kernels():
    """It stands for the same sums at every load."""
    gemm, scheme = Gemm(32768, 64, 768, 2048, 1, 2, (64,)), get_scheme("fp8_channel")
    assert not takes(gemm, scheme, None, H200)
    assert takes(gemm._replace(row_tiles=(64, 64)), scheme, None, H200)
