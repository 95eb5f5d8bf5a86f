"""Expert GEMMs that dequantize both operands, checked against float64."""

import plans
import torch
from gemm_rows import exact_rows
from plans import planned, row_tile
from products import scaled_product

from moe_ops import dequantize_weight, get_scheme, ops, quantize_weight
from moe_ops.activation import formula
from moe_ops.pipeline.row_spaces import depends_on_batch
from moe_ops.reference import expert_product as reference
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import dequantize_rows
from moe_ops.tensors import Tiles
from moe_ops.testing import Bounded, assert_matches_reference, make_inputs

GIVEN = torch.tensor([0.0123])


def spoil(x, unused, quant):
    """Make rows NaN that no kernel may read; not where the numbers of all rows set their scale."""
    if not depends_on_batch(quant):
        x[unused] = torch.nan


def quantized_rows(x, quant):
    """Rows as they are stored, their scales, and in float64 what they stand for."""
    given_scale = GIVEN.to(x.device) if quant.static or quant.global_scale else None
    q, scale = ops.moe_quantize(x, given_scale, None, None, None, 0, quant.key)
    number = dequantize_rows(q.cpu(), scale.cpu(), quant).double()
    return q, scale, number


def check_decoded(problem, scheme, device, activation=None, halves=False, tile=None):
    """The operator (with an activation, or without) is within the budget of its reference.

    ``tile``: the row tile; None: as the load asks for.
    """
    x, w, _, _, ids, expert_map, bias, _ = make_inputs(problem)
    local, k, quant = w.shape[0], problem.top_k, get_scheme(scheme)
    q = quantize_weight(w, scheme)
    if halves and quant.weight.global_scale and not quant.weight.channel_scale:
        q = q._replace(global_scale=torch.stack((q.global_scale, 2 * q.global_scale), 1))
    if quant.activation.global_scale:  # that of the rows, too, or float16 does not hold the results
        q = q._replace(global_scale=q.global_scale * GIVEN)
    rows, scale, numbers = quantized_rows(x.to(device), quant.activation)

    def on(t):
        return None if t is None else t.to(device)

    head, tail = (q.data, q.scale, q.global_scale, bias), (k, scheme, x.dtype)
    weight = dequantize_weight(q, scheme).double()
    exact = exact_rows(numbers, weight, bias, None, ids, k, expert_map)
    if activation is not None:
        tail = (*tail, activation)
        exact = exact.activated(formula(activation))
    with row_tile(tile, portable_only=False):
        plan = planned(on(ids), on(expert_map), local, scheme)
        actual = scaled_product(ops, rows, scale, *map(on, head), [*plan], *tail)
        there = (rows.cpu(), scale.cpu(), *head, plans.on(plan, "cpu"), *tail)
        expected = scaled_product(reference, *there)
    mine = local_experts(ids, expert_map, local) >= 0
    exact = exact.rounded(x.dtype)
    assert_matches_reference(actual.cpu()[mine], exact[mine], expected[mine])
    return actual


def check_one_scale_for_each_expert(device):
    """Static scales of the Batched format are one an expert: each multiplies its own rows."""
    quant, local, count = get_scheme("mxfp4_w4a8"), 3, 4
    x, w = torch.randn(local, count, 64), torch.randn(local, 24, 64)
    q = quantize_weight(w, "mxfp4_w4a8")
    counts = torch.tensor([4, 1, 3], dtype=torch.int32, device=device)
    a, scale = ops.batched_quantize(x.to(device), GIVEN.to(device), counts, quant.activation.key)
    scale = scale * torch.tensor([1.0, 2.0, 3.0], device=device)[:, None, None]
    plan = Tiles(ops.plan_batched(counts, count, "mxfp4_w4a8"))
    weight, tail = (q.data, q.scale, None, None), (1, "mxfp4_w4a8", x.dtype)
    call = (a.flatten(0, 1), scale.flatten(0, 1), *weight)
    y = scaled_product(ops, *(None if t is None else t.to(device) for t in call), [*plan], *tail)
    call = (None if t is None else t.cpu() for t in call)
    reference_y = scaled_product(reference, *call, plans.on(plan, "cpu"), *tail)
    rows = Bounded.exactly((a.cpu().double() * scale.cpu()).flatten(0, 1))
    expert = torch.arange(local).repeat_interleave(count)
    exact = rows.products(dequantize_weight(q, quant), expert).rounded(x.dtype)
    used = (torch.arange(count) < counts.cpu()[:, None]).flatten()
    assert_matches_reference(y.cpu()[used], exact[used], reference_y[used])
