"""Expert GEMMs with packed weights and given tiles, as the tuner runs them."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from gemm_rows import exact_rows
from planning import problem_of_call
from plans import ids_of, on, planned, row_tile
from products import stored_product, weight_of

from moe_ops import dequantize_weight, pack_weight, quantize_weight
from moe_ops.dispatch.device import NO_GPU
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import HopperTiles
from moe_ops.dispatch.hopper_decode import DECODE_FEW, DECODE_MANY
from moe_ops.reference import expert_product as reference
from moe_ops.testing import assert_matches_reference

pytestmark = pytest.mark.kernel

if INTERPRETED:
    from gluon_interpreter import interpreted

    from moe_ops.kernels._gemm.operands import GemmOperands
    from moe_ops.kernels._hopper.dequantized_gemm import DecodeGemm
elif HAS_CUDA:
    from moe_ops.kernels import expert_product


def matmul(x, q, tiles, scheme, config):
    """The result of the kernel of ``config``."""
    if not INTERPRETED:
        call = [None if t is None else t.cuda() for t in (x, *q, None, None)]
        call += [[*on(tiles, "cuda")], 1, scheme]
        return stored_product(expert_product, *call, config=config).cpu()
    out = torch.full((len(x), q.data.shape[1]), torch.nan, dtype=x.dtype)
    call = {"a": x, "w": q.data, "w_scale": q.scale, "tiles": tiles, "scheme": scheme}
    problem = problem_of_call("expert_product", **call, boxes=True)
    plan = plan_gemm(problem, NO_GPU, config=config)
    with interpreted(5):
        DecodeGemm(problem, plan)(out, GemmOperands(x, None, weight_of(q), None, tiles))
    return out


@pytest.mark.skipif(not (INTERPRETED or HAS_CUDA), reason="no kernel runs")
@pytest.mark.parametrize(
    "config",
    [
        HopperTiles(DECODE_FEW, 16, 128, 4, 2, ctas=2),
        HopperTiles(DECODE_FEW, 64, 128, 2, 3, ctas=1),
        HopperTiles(DECODE_MANY, 64, 256, 3, 2),
        HopperTiles(DECODE_MANY, 64, 256, 4, 3, on_demand=True),
        HopperTiles(DECODE_MANY, 128, 256, 3, 2),
    ],
)
@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "int8_w8a16"])
def test_given_tiles(scheme, config):
    """Several row tiles per expert in bands, with a static and a dynamic schedule."""
    if HAS_CUDA and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    tile = config.block_m
    g = torch.Generator().manual_seed(0)
    ids, n, k = ids_of((1, tile // 2, 2 * tile + 1, 0, tile), 1), 320, 192
    x = torch.randn(len(ids), k, generator=g).bfloat16()
    q = quantize_weight((torch.randn(5, n, k, generator=g) / k**0.5).bfloat16(), scheme)
    exact = exact_rows(x, dequantize_weight(q, scheme), None, None, ids, 1, None, x.dtype)
    with row_tile(tile, NO_GPU if INTERPRETED else None, portable_only=False):
        tiles = planned(ids, None, 5, scheme)
        actual = matmul(x, pack_weight(q, scheme), tiles, scheme, config)
        expected = stored_product(reference, x, *q, None, None, [*tiles], 1, scheme)
    assert_matches_reference(actual, exact.rounded(x.dtype), expected)
