"""Expert GEMMs of few slots, compiled for every architecture: ids of both widths, with a map."""

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import slot_plan  # noqa: E402
from products import plain_product, scaled_product, stored_product  # noqa: E402

from moe_ops.kernels import expert_product
from moe_ops.kernels._hopper import stream as hopper_stream
from moe_ops.scheme import get_scheme, min_capability, quantize_weight  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
E, GLOBAL, K, N, TOP_K = 64, 128, 2048, 768, 8
SCHEMES = {
    "unquantized": ["_expert_gemm_kernel"] * 2,
    "fp8_channel": ["scaled_gemm_kernel"] * 2,
    "fp8_block128": ["scaled_gemm_kernel"] * 2,
    "int4_w4a16_g32": ["weight_only_gemm_kernel"] * 2,
    "mxfp4": ["weight_only_gemm_kernel"] * 2,
}


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(expert_product, hopper_stream)


def launch_gemm(empty, scheme, rows, top_k, n, k, tiles, *activation):
    """One GEMM of a layer, by its launcher."""
    meta = torch.empty(E, n, k, device="meta", dtype=torch.bfloat16)
    if scheme.weight is None:
        call = (empty(rows, k), empty(E, n, k), None, None, tiles, top_k)
        return plain_product(expert_product, *call, *activation)
    stored = quantize_weight(meta, scheme)
    w = [None if x is None else empty(*x.shape, dtype=x.dtype) for x in stored]
    rest = (tiles, top_k, scheme.name)
    if scheme.activation is None:
        x = empty(rows, k)
        return stored_product(expert_product, x, *w, None, None, *rest, *activation)
    quant = scheme.activation
    width = k // quant.element.values_per_byte
    scale = empty(*quant.row_scale_shape(rows, k), dtype=quant.scale_dtype)
    q, weight = empty(rows, width, dtype=quant.dtype), (*w[:2], w[3], None)
    return scaled_product(expert_product, q, scale, *weight, *rest, torch.bfloat16, *activation)


@pytest.mark.parametrize("arch", sorted(aot.SHARED_MEMORY))
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_of_one_token(name, ids, arch, one_of_two):
    """Nothing is launched to align, and both GEMMs keep to their memory and registers.

    In turns of schemes one of them is compiled, unless everything is.
    """
    scheme = get_scheme(name)
    if arch < min_capability(scheme.activation):
        pytest.skip("no kernels of this scheme")

    def launch(empty):
        topk_ids, expert_map = empty(1, TOP_K, dtype=ids), empty(GLOBAL, dtype=torch.int32)
        tiles = slot_plan(topk_ids, E, name, expert_map=expert_map)
        launch_gemm(empty, scheme, 1, TOP_K, 2 * N, K, tiles, "silu")
        launch_gemm(empty, scheme, TOP_K, 1, K, N, tiles)

    hoppers = ("hopper_stream_kernel", "hopper_token_kernel")
    own = hoppers if arch == 90 else ("block_scaled_gemm_kernel",)
    launched = aot.launched_names(arch, launch)
    for found, expected in zip(launched, SCHEMES[name], strict=True):
        assert found in (expected, *own)
    turn = one_of_two([*SCHEMES].index(name) * (len({*launched}) == 1))
    kernels = aot.compile_launch(arch, launch, nth=turn)
    assert kernels
    for kernel in kernels:
        used = aot.resources(kernel, arch)
        assert used["shared"] <= aot.SHARED_MEMORY[arch], used
        assert used["spilled"] == 0 and used["serialized"] == 0, used
