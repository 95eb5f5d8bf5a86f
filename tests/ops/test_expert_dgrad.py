"""The expert GEMM with transposed stored weights. Every scheme: `pipeline/test_backward.py`."""

import pytest
import torch
from conftest import INTERPRETED
from packed_weights import ALL_PACKABLE, random_weight
from plans import ids_of, planned, row_tile
from strategies import DTYPES

from moe_ops import ops
from moe_ops.reference.expert_dgrad import expert_dgrad as reference
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import dequantize_weight, get_scheme, pack_weight, quantize_weight
from moe_ops.tensors import Tiles
from moe_ops.testing import assert_matches_reference

EXPERTS = 4


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(scheme, dtype, n, k, counts, device, turned=False):
    """Rows of a plan times a random weight."""
    ids = ids_of(counts, 1)
    q = quantize_weight(random(len(counts), n, k).to(dtype) / 4, scheme)
    if turned:
        q = q._replace(data=q.data.transpose(1, 2).contiguous().transpose(1, 2))
    dy = random(len(ids), n, seed=1).to(dtype)
    tiles = Tiles(planned(ids, None, len(counts), scheme).plan)
    moved = [None if t is None else t.to(device) for t in (dy, *q)]
    given = [None if t is None else t.to(device) for t in tiles]
    actual = ops.expert_dgrad(*moved, given, 1, scheme).cpu()
    near = reference(dy, *q, [*tiles], 1, scheme)
    expert = local_experts(ids, None, len(counts))
    weight = dequantize_weight(q, scheme).double()
    exact = torch.stack([d @ weight[e] for d, e in zip(dy.double(), expert, strict=True)])
    assert_matches_reference(actual, exact, near)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["int4_w4a16_g16_zp", "fp8_block16x32", "nvfp4_w4a16"])
def test_groups_and_tails(scheme, dtype, device):
    """Several groups in a tile, sizes that no block divides, an expert without rows."""
    check(scheme, dtype, 80, 176, [3, 0, 20, 1], device)


@pytest.mark.kernel
@pytest.mark.parametrize("tile", [16, 64, 192])
def test_row_tiles(tile, device):
    with row_tile(tile):
        check("int8_w8a16", torch.bfloat16, 48, 72, [70, 0, 1, 130], device)


@pytest.mark.kernel
def test_transposed_values(device):
    """Stored values with stride 1 along N, as transformers' transposed layouts have them."""
    check("fp8_w8a16", torch.bfloat16, 48, 40, [3, 5, 0, 9], device, turned=True)


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", ALL_PACKABLE)
def test_packed_weights(scheme, device):
    """As plain ones, bit for bit; chunks in two programs, of which the second has one."""
    n, k, ids, quant = 128, 320, ids_of([3, 0, 20, 1], 1), get_scheme(scheme).weight
    q = quantize_weight(random(4, n, k) / 4, scheme)
    if quant.dtype != torch.float8_e4m3fn:  # every bit pattern is a number
        q = q._replace(data=random_weight(scheme, n, k, experts=4).data)
    rows, plan = random(len(ids), n, seed=1).bfloat16(), planned(ids, None, 4, scheme).plan
    tiles = [plan.to(device), None, None]
    plain, packed = (
        ops.expert_dgrad(
            *[None if x is None else x.to(device) for x in (rows, *form)], tiles, 1, scheme
        )
        for form in (q, pack_weight(q, scheme))
    )
    assert plain.isfinite().all() and plain.abs().sum() > 0
    assert torch.equal(plain, packed)


@pytest.mark.kernel
@pytest.mark.skipif(INTERPRETED, reason="sizes for a processor")
def test_real_sizes(device):
    check("int4_w4a16_g128", torch.bfloat16, 1408, 2880, [40, 0, 7], device)


def test_what_is_refused():
    ids = torch.zeros(3, 1, dtype=torch.int32)
    q, dy = quantize_weight(random(EXPERTS, 128, 128).bfloat16(), "int4_w4a16_g64"), random(3, 128)
    how = ([None, ids, None], 1, "int4_w4a16_g64")
    packed = pack_weight(q, "int4_w4a16_g64")
    with pytest.raises(ValueError, match=r"w_scale.shape\[1\] must be 2, got 128"):
        ops.expert_dgrad(dy, packed.data, *q[1:], *how)
    with pytest.raises(ValueError, match="w must be contiguous in the packed form"):
        ops.expert_dgrad(dy, packed.data.mT.contiguous().mT, *packed[1:], *how)
    with pytest.raises(ValueError, match="w_zero_point must be None for scheme int4_w4a16_g64"):
        ops.expert_dgrad(dy, q.data, q.scale, q.scale, None, *how)
    with pytest.raises(ValueError, match="scheme must quantize weights, got 'unquantized'"):
        ops.expert_dgrad(dy, *q, *how[:2], "unquantized")
    with pytest.raises(ValueError, match=r"a.shape\[1\] must be 128, got 127"):
        ops.expert_dgrad(dy[:, 1:], *q, *how)
