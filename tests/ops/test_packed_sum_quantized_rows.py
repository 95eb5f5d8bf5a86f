"""The second GEMM of one token with packed weights, quantized rows and the sum, against float64.

In the interpreter's leg the Gluon kernel runs on the CPU (see `gluon_interpreter`).
"""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from decoded_gemms import quantized_rows, spoil
from gemm_rows import exact_rows
from hypothesis import given
from hypothesis import strategies as st
from packed_weights import ROWS_SERVED, WIDENED_ROWS
from planning import problem_of_call
from products import weight_of
from sum_calls import SIZES, one_token
from torch.utils._pytree import tree_map_only

from moe_ops import dequantize_weight, get_scheme, ops, pack_weight, quantize_weight
from moe_ops.dispatch.device import NO_GPU
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper_decode import DECODE_SUM
from moe_ops.reference import expert_product as reference
from moe_ops.reference.align import plan_slots
from moe_ops.reference.slots import local_experts
from moe_ops.testing import assert_matches_reference

pytestmark = pytest.mark.kernel
BF16 = torch.bfloat16

if INTERPRETED:
    from gluon_interpreter import interpreted

    from moe_ops.kernels._gemm.operands import GemmOperands
    from moe_ops.kernels._hopper.dequantized_jobs_gemm import DecodeJobs
    from moe_ops.tensors import Tiles


def summed(rows, q, bias, weights, tiles, scheme, dtype=BF16):
    """The operator's result; in the interpreter, that of Hopper's kernel."""
    if not INTERPRETED:
        device = "cuda" if HAS_CUDA else "cpu"
        head = tree_map_only(torch.Tensor, lambda t: t.to(device), (*rows, weight_of(q, bias)))
        weights, *tiles = (None if t is None else t.to(device) for t in (weights, *tiles))
        return ops.expert_product_sum(*head, weights, tiles, scheme, dtype).cpu()
    problem = problem_of_call(
        "expert_product_sum", a=rows[0], a_scale=rows[1], w=q.data, w_scale=q.scale,
        topk_weights=weights, tiles=tiles, scheme=scheme, out_dtype=dtype, boxes=True,
    )  # fmt: skip
    plan = plan_gemm(problem, NO_GPU)
    assert plan.kernel == DECODE_SUM and plan.quantizes_rows == (rows[1] is None)
    out = torch.full((1, q.data.shape[1]), torch.nan, dtype=dtype)
    operands = GemmOperands(*rows, weight_of(q, bias), weights, Tiles(*tiles))
    with interpreted():
        DecodeJobs(problem, plan)(out, operands)
    return out


def check(scheme, k=4, n=128, kk=192, *, bias=True, scaled=True, holes=False, local=None,
          stored=True, dtype=BF16):  # fmt: skip
    """The result is within the budget of the sum of the slots' rounded rows.

    Rows and weights of skipped slots are NaN.
    """
    g, experts = torch.Generator().manual_seed(0), 5
    h, w = torch.randn(k, kk, generator=g).to(dtype), torch.randn(experts, n, kk, generator=g)
    h *= torch.logspace(-1, 1, k)[:, None].to(dtype)  # rows differ in their scales
    added = torch.randn(experts, n, generator=g).to(dtype) if bias else None
    weights = torch.rand(1, k, generator=g) + 0.1 if scaled else None
    ids, expert_map = one_token(g, k, experts, holes=holes, local=local)
    w, added = w[:local], None if added is None else added[:local]
    q = quantize_weight((w / kk**0.5).to(dtype), scheme)
    tiles = [plan_slots(ids, expert_map, len(w), scheme, BF16), ids, expert_map]
    used = local_experts(ids, expert_map, len(w)) >= 0
    spoil(h, ~used, get_scheme(scheme).activation)
    if weights is not None:
        weights[~used.view(1, k)] = torch.nan
    data, scale, numbers = quantized_rows(h, get_scheme(scheme).activation)
    rows = (data, scale) if stored or scheme not in WIDENED_ROWS else (h, None)
    actual = summed(rows, pack_weight(q, scheme), added, weights, tiles, scheme, dtype)
    weight = dequantize_weight(q, scheme).double()
    exact = exact_rows(numbers.nan_to_num(), weight, added, None, ids, 1, expert_map)
    factors = used.view(1, k).double()
    factors = factors if weights is None else factors * weights.double().nan_to_num()
    exact = exact.rounded(dtype).unflatten(1, k).weighted_sum(factors).rounded(dtype)
    head = (data, scale, weight_of(q, added), weights, tiles, scheme, dtype)
    assert_matches_reference(actual, exact, reference.expert_product_sum(*head))


@given(
    scheme=st.sampled_from(ROWS_SERVED),
    **SIZES,
    stored=st.booleans(),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
)
def test_sum(scheme, k, n, kk, bias, scaled, holes, local, stored, dtype):
    how = {"holes": holes, "local": local, "stored": stored, "dtype": dtype}
    check(scheme, k, n, kk, bias=bias, scaled=scaled, **how)


@pytest.mark.parametrize("scheme", ROWS_SERVED)
def test_every_scheme(scheme):
    for k in (1, 2, 3, 8, 10):
        check(scheme, k, 64, 320, stored=k % 2 == 0)


def test_sizes_of_models():
    """I 2880, 1408 and 704: K is not a multiple of a round of chunks."""
    for kk in (2880, 1408, 704):
        check("int4_w4a8_g128", 4, 64, kk)


def test_no_slot_has_an_expert():
    check("int4_w4a8_g128", 1, 64, 128, holes=True)
