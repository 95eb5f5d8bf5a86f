"""What rows of expert GEMMs are in float64, with bounds."""

from legs import HAS_CUDA

from moe_ops.activation import formula
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import get_scheme
from moe_ops.scheme.weights import spread_scale
from moe_ops.testing import Bounded, Problem, assert_matches_reference


def exact_rows(x, w, bias, scale, ids, k, expert_map=None, stored=None):
    """``scale * x @ w[e].T + bias`` in float64 for each slot; zeros where it is skipped.

    ``stored``: the dtype that weights are dequantized to.
    """
    expert = local_experts(ids, expert_map, w.shape[0])
    rows = Bounded.exactly(x.repeat_interleave(k, 0)).products(w, expert, stored)
    rows = rows if scale is None else rows.times(scale.view(-1, 1))
    return rows if bias is None else rows.plus(bias[expert])


def compare(actual, exact, expected, ids, num_experts):
    """Rows of skipped slots are unspecified: left out."""
    mine = local_experts(ids, None, num_experts) >= 0
    exact = exact.rounded(actual.dtype)
    assert_matches_reference(actual.cpu()[mine], exact[mine], expected[mine])


def numbers(q, scale, scheme, top_k):
    """What quantized rows stand for, in float64, one for each slot."""
    quant, scale = get_scheme(scheme).activation, scale.double()
    if not quant.per_tensor:
        width = q.shape[1] if quant.group.cols < 0 else quant.group.cols
        scale = scale.repeat_interleave(width, 1)[:, : q.shape[1]]
    return (q.double() * scale).repeat_interleave(top_k, 0)


def exact_scaled_rows(rows, w, w_scale, bias, expert, scheme):
    """``rows @ w[e].T + bias`` in float64; zeros where a slot is skipped."""
    weight = w.double() * spread_scale(w_scale.double(), get_scheme(scheme).weight, *w.shape[1:])
    out = Bounded.exactly(rows).products(weight, expert)
    return out if bias is None else out.plus(bias[expert])


def activated(rows, activation):
    return rows.activated(formula(activation))


SIZES_OF_MODELS = (
    [(2880, 192), (704, 2880), (1408, 64)] if HAS_CUDA else [(832, 192), (704, 192), (896, 64)]
)
"""K and N. Without a GPU there are fewer steps and tiles, of which the last are as full."""


def gemm_problem(tokens, k, kk, n, dtype, **more):
    return Problem(tokens, 5, k, kk, n, dtype, "silu_no_mul", **more)
