"""The second GEMM of one token with packed weights and the weighted sum, against float64.

In the interpreter's leg the Gluon kernel runs on the CPU (see `gluon_interpreter`).
"""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from gemm_rows import exact_rows
from graphs import capture
from hypothesis import given
from hypothesis import strategies as st
from legs import ON_HOPPER
from packed_weights import HALF, SERVED, random_weight
from pairwise import half_exhaustive
from planning import problem_of_call
from products import stored_product, stored_sum, weight_of
from sum_calls import SIZES, one_token

from moe_ops import dequantize_weight, ops, pack_weight, quantize_weight
from moe_ops.dispatch.device import NO_GPU
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper_decode import DECODE_SUM
from moe_ops.reference import expert_product as reference
from moe_ops.reference.align import plan_slots
from moe_ops.reference.slots import local_experts
from moe_ops.testing import assert_matches_reference

pytestmark = pytest.mark.kernel

if INTERPRETED:
    from gluon_interpreter import interpreted

    from moe_ops.kernels._gemm.operands import GemmOperands
    from moe_ops.kernels._hopper.dequantized_jobs_gemm import DecodeJobs
    from moe_ops.tensors import Tiles


def summed(h, q, bias, weights, tiles, scheme):
    """The operator's result; in the interpreter, that of Hopper's kernel."""
    if not INTERPRETED:
        return stored_sum(ops, *on_device((h, *q, bias, weights, tiles, scheme))).cpu()
    problem = problem_of_call(
        "expert_product_sum", a=h, w=q.data, w_scale=q.scale, topk_weights=weights, tiles=tiles,
        scheme=scheme, boxes=True,
    )  # fmt: skip
    plan = plan_gemm(problem, NO_GPU)
    assert plan.kernel == DECODE_SUM
    out = torch.full((1, q.data.shape[1]), torch.nan, dtype=h.dtype)
    operands = GemmOperands(h, None, weight_of(q, bias), weights, Tiles(*tiles))
    with interpreted():
        DecodeJobs(problem, plan)(out, operands)
    return out


def tiles_of(ids, expert_map, num_experts, scheme):
    return [plan_slots(ids, expert_map, num_experts, scheme, torch.bfloat16), ids, expert_map]


def on_device(call):
    device = "cuda" if HAS_CUDA else "cpu"
    move = [[t if t is None else t.to(device) for t in x] if type(x) is list else x for x in call]
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in move]


def check(scheme, k=4, n=128, kk=192, *, experts=5, bias=True, scaled=True, holes=False, local=None,
          dtype=torch.bfloat16, seed=0):  # fmt: skip
    """The result is within the budget of the sum of the slots' rounded rows."""
    g = torch.Generator().manual_seed(seed)
    h, w = torch.randn(k, kk, generator=g).to(dtype), torch.randn(experts, n, kk, generator=g)
    w = (w / kk**0.5).to(dtype)
    added = torch.randn(experts, n, generator=g).to(dtype) if bias else None
    weights = torch.rand(1, k, generator=g) + 0.1 if scaled else None
    ids, expert_map = one_token(g, k, experts, holes=holes, local=local)
    w, added = w[:local], None if added is None else added[:local]
    q = quantize_weight(w, scheme)
    tiles = tiles_of(ids, expert_map, len(w), scheme)
    actual = summed(h, pack_weight(q, scheme), added, weights, tiles, scheme)
    rows = exact_rows(h, dequantize_weight(q, scheme), added, None, ids, 1, expert_map, dtype)
    used = (local_experts(ids, expert_map, len(w)) >= 0).view(1, k).double()
    factors = used if weights is None else used * weights.double()
    exact = rows.rounded(dtype).unflatten(1, k).weighted_sum(factors).rounded(dtype)
    expected = stored_sum(reference, h, *q, added, weights, tiles, scheme)
    assert_matches_reference(actual, exact, expected)


@given(scheme=st.sampled_from(SERVED), **SIZES)
def test_sum(scheme, k, n, kk, bias, scaled, holes, local):
    check(scheme, k, n, kk, bias=bias, scaled=scaled, holes=holes, local=local)


@pytest.mark.parametrize(
    ("scheme", "k"), half_exhaustive(SERVED, [1, 2, 3, 8, 10], where=INTERPRETED)
)
def test_every_scheme(scheme, k):
    check(scheme, k, 64, 320)


@pytest.mark.parametrize("scheme", HALF)
def test_half_precision(scheme):
    check(scheme, dtype=torch.float16)


def test_sizes_of_models():
    """H 2880 and I 2880, 1408 and 704: K is not a multiple of a round of chunks."""
    for kk in (2880, 1408, 704):
        check("mxfp4_w4a16", 4, 64, kk, experts=2)


def test_no_slot_has_an_expert():
    check("int4_w4a16_g128", 1, 64, 128, holes=True)


def test_nothing_else_is_read():
    """NaN in the rows of skipped slots and in other experts' scales shows nowhere."""
    scheme, k, n, kk = "int8_w8a16", 4, 64, 128
    g = torch.Generator().manual_seed(0)
    h = torch.randn(k, kk, generator=g).bfloat16()
    q = pack_weight(quantize_weight(torch.randn(3, n, kk, generator=g).bfloat16(), scheme), scheme)
    ids = torch.tensor([[0, -1, 0, 3]], dtype=torch.int32)
    weights = torch.rand(1, k, generator=g)
    tiles = tiles_of(ids, None, 3, scheme)
    clean = summed(h, q, None, weights, tiles, scheme)
    h[1] = h[3] = weights[0, 1] = weights[0, 3] = torch.nan
    q.scale[1:] = torch.nan
    assert clean.isfinite().all()
    assert torch.equal(summed(h, q, None, weights, tiles, scheme), clean)


@pytest.mark.skipif(not ON_HOPPER, reason="a race of Hopper's kernels")
def test_early_loads_do_not_disturb_the_first_gemm():
    """While GEMM 2's words come from memory, loads from shared memory are slow in GEMM 1."""
    scheme, experts, hidden, width, k = "int4_w4a16_g128", 8, 7168, 2048, 8
    w1, w2 = (
        pack_weight(random_weight(scheme, *size, experts, device="cuda"), scheme)
        for size in ((2 * width, hidden), (hidden, width))
    )
    for w in (w1, w2):
        w.scale.fill_(0.01)
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(1, hidden, generator=g).bfloat16(), torch.rand(1, k, generator=g)
    ids = torch.arange(k, dtype=torch.int32)[None]
    x, weights, ids = x.cuda(), weights.cuda(), ids.cuda()
    tiles = tiles_of(ids, None, experts, scheme)

    def layer():
        h = stored_product(ops, x, *w1, None, None, tiles, k, scheme, "silu")
        return h, stored_sum(ops, h, *w2, None, weights, tiles, scheme)

    layer()
    graph, results = capture(layer)
    evicting = torch.ones(2**27, device="cuda")
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    expected = None
    for _ in range(1000):
        evicting.sum()
        graph.replay()
        expected = expected or [result.clone() for result in results]
        wrong += sum((a != b).any() for a, b in zip(results, expected, strict=True))
    assert expected[1].isfinite().all() and wrong.item() == 0
