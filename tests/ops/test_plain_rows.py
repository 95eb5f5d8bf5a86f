"""Rows with scales along K in bf16, as Hopper's kernels of packed weights multiply them."""

import plans
import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from decoded_gemms import quantized_rows
from packed_weights import UNDER_GROUPS
from plans import ids_of, planned, row_tile

from moe_ops import get_scheme
from moe_ops.dispatch.device import NO_GPU
from moe_ops.dispatch.tiles import PLAN_HEADER

if not (INTERPRETED or HAS_CUDA):
    pytest.skip("runs a kernel", allow_module_level=True)
from moe_ops.kernels._hopper.plain_rows import gathered_plain_rows, plain_rows  # noqa: E402

pytestmark = pytest.mark.kernel
SCHEMES = [*UNDER_GROUPS, "fp6_e3m2:1x16:pow2|fp4:1x32:e8m0", "int8:1x64:pow2|fp4:1x32:e8m0"]
DEVICE = "cuda" if HAS_CUDA else "cpu"


def rows_of(scheme, count, k):
    """Stored rows and scales, their quantization, and the bf16 numbers they stand for."""
    quant = get_scheme(scheme).activation
    x = torch.randn(count, k, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-6, 6, count)[:, None]
    data, scale, numbers = quantized_rows(x.bfloat16().to(DEVICE), quant)
    assert torch.equal(numbers, numbers.bfloat16().double())
    return data, scale, quant, numbers.bfloat16()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_row(scheme):
    for count, k in ((1, 64), (37, 320), (5, 2880)):
        data, scale, quant, expected = rows_of(scheme, count, k)
        assert torch.equal(plain_rows(data, scale, quant, None, count, 1).cpu(), expected)
    apart = torch.zeros(5, 2 * data.shape[1], dtype=data.dtype, device=DEVICE)[:, : data.shape[1]]
    apart.copy_(data)
    assert torch.equal(plain_rows(apart, scale, quant, None, 5, 1).cpu(), expected)


@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4"])
def test_rows_of_a_plan(scheme):
    """Gathered or in their places; neither padding nor rows that the plan leaves out."""
    data, scale, quant, expected = rows_of(scheme, 40, 192)
    ids = ids_of((30, 0, 47, 3), 2)
    with row_tile(64, NO_GPU if INTERPRETED else None, portable_only=False):
        plan = plans.on(planned(ids.to(DEVICE), None, 3, scheme), DEVICE)[0]
    slots, count = plan[PLAN_HEADER:].cpu(), plan.shape[0] - PLAN_HEADER
    used = torch.arange(count) < int(plan[0])
    real = used & (slots >= 0) & (slots < 80)
    gathered = gathered_plain_rows(data, scale, quant, plan, 80, count, 2).cpu()
    assert torch.equal(gathered[:count][real], expected[slots[real] // 2])
    stay = plain_rows(data, scale, quant, plan, 80, 2).cpu()
    named = torch.unique(slots[real] // 2)
    assert 30 < len(named) <= 40 and stay.shape == (40, 192)
    assert torch.equal(stay[named], expected[named])
