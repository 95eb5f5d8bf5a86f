"""Expert GEMMs of few slots read no plan: bit by bit what they compute with one."""

from functools import cache

import launches
import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from pairwise import half_exhaustive
from plans import planned, the_plain_kernel

import moe_ops
from moe_ops import ops
from moe_ops.dispatch.tiles import is_direct
from moe_ops.pipeline.gemms import expert_weights, gemm
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import FusedMoEQuantConfig, get_scheme, quantize_weight
from moe_ops.tensors import ExpertWeight, Rows, Tiles
from moe_ops.testing import Problem, call, make_inputs

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not (INTERPRETED or HAS_CUDA), reason="references read the plan"),
]
E, H, I = 128, 64, 48  # noqa: E741
SCHEMES = (
    "unquantized", "fp8_tensor", "fp8_channel", "int8_block32", "int8_w8a16", "int4_w4a16_g16_zp",
    "mxfp4", "mxfp8",
)  # fmt: skip
ROUTINGS = {
    "distinct": ([[0, 1, 2, 3]], None),
    "repeated": ([[4, 4], [0, 127], [127, 0]], None),
    "holes": ([[2**40, -1, 3, 128, 0, 2, 2, 1]] * 2, None),
    "mapped": ([[0, 1, 2, 3, 4, 5, 6, 7]], [2, -1, 0, 199, 1, -5, 3, 4]),
    "one": ([[6]], [0] * 7),
}


def spaces(routing, scheme, batch_invariant, device):
    """The slots of a routing: with an empty plan and what kernels read instead, and with a plan."""
    ids, expert_map = ROUTINGS[routing]
    ids = torch.tensor(ids, device=device)
    if expert_map is not None:
        expert_map = torch.tensor(expert_map, dtype=torch.int32, device=device)
    plan = planned(ids, expert_map, E, scheme.name, batch_invariant)
    empty = Tiles(torch.zeros_like(plan.plan), ids, expert_map)
    mine = local_experts(ids, expert_map, E) >= 0
    direct, plain = (SlotRows(tiles, E, batch_invariant) for tiles in (empty, plan))
    return direct, plain, ids, mine


@cache
def weight_of(scheme, rows, k, device):
    g = torch.Generator().manual_seed(0)
    w = torch.randn(E, rows, k, generator=g).bfloat16().to(device)
    bias = torch.randn(E, rows, generator=g).to(device)
    if scheme.weight is None:
        return ExpertWeight(w, bias)
    q = quantize_weight(w, scheme)
    return ExpertWeight(q.data, bias, q.scale, q.zero_point, q.global_scale)


def rows_of(scheme, count, k, device):
    x = torch.randn(count, k, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    if scheme.activation is None:
        return Rows(x)
    return Rows(*ops.moe_quantize(x, None, None, None, None, E, scheme.activation.key))


@pytest.mark.parametrize(
    ("name", "routing", "batch_invariant"),
    half_exhaustive(SCHEMES, ROUTINGS, [False, True], where=INTERPRETED),
)
def test_every_operator(name, routing, batch_invariant, device):
    scheme = get_scheme(name)
    if batch_invariant and name == "fp8_tensor":
        pytest.skip("tokens share a scale")
    direct, plain, ids, mine = spaces(routing, scheme, batch_invariant, device)
    (tokens, k), how = ids.shape, (scheme, torch.bfloat16)
    first, second = weight_of(scheme, 2 * I, H, device), weight_of(scheme, H, I, device)
    x, h = rows_of(scheme, tokens, H, device), rows_of(scheme, tokens * k, I, device)
    for rows, weight, top_k in ((x, first, k), (h, second, 1)):
        one, two = (gemm(rows, weight, space, top_k, *how) for space in (direct, plain))
        assert one[mine].isfinite().all() and torch.equal(one[mine], two[mine])
    weights = None if scheme.activation else torch.rand(tokens, k, device=device)
    with the_plain_kernel():
        one, two = (gemm(x, first, space, k, *how, "silu", weights) for space in (direct, plain))
    assert one[mine].isfinite().all() and torch.equal(one[mine], two[mine])


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4_w4a8"])
def test_global_scales(scheme, device):
    """A factor of each expert, and given scales of rows."""
    scheme = get_scheme(scheme)
    direct, plain, ids, mine = spaces("mapped", scheme, False, device)
    w1, w2 = (weight_of(scheme, *sizes, device) for sizes in ((2 * I, H), (H, I)))
    name = "a{}_gscale" if scheme.activation.global_scale else "a{}_scale"
    scales = {name.format(i): torch.full((1,), 0.02, device=device) for i in (1, 2)}
    q1, q2 = (moe_ops.QTensor(w.data, w.scale, w.zero_point, w.global_scale) for w in (w1, w2))
    config = FusedMoEQuantConfig.from_weights(scheme, q1, q2, **scales)
    weights = expert_weights(w1.data, w2.data, config)
    x = torch.randn(1, H, device=device).bfloat16()
    rows = Rows(*ops.moe_quantize(x, weights.a1_scale, None, None, None, E, scheme.activation.key))
    how = (scheme, torch.bfloat16, "silu")
    one, two = (gemm(rows, weights.w1, s, ids.shape[1], *how) for s in (direct, plain))
    assert one[mine].isfinite().all() and torch.equal(one[mine], two[mine])


@pytest.fixture
def launched(monkeypatch):
    return launches.launched_kernels(monkeypatch)


GEMMS = ["_expert_gemm_kernel"] * 2


@pytest.mark.parametrize(("tokens", "aligns"), [(1, False), (4, False), (5, True)])
def test_launches_of_a_layer(tokens, aligns, launched, device):
    """Both products and the sum; more than 16 slots are aligned first."""
    problem = Problem(tokens, E, 4, H, I, torch.bfloat16)
    assert aligns != is_direct(tokens * problem.top_k, E)
    inputs = make_inputs(problem, device)
    with the_plain_kernel():
        call(moe_ops.fused_experts, problem, inputs)
    assert launched[:-1] == ["_align_kernel"] * aligns + GEMMS and len(launched) == 3 + aligns


def test_launches_of_a_routed_layer(launched, device):
    """Few slots are routed and not aligned."""
    w1, w2 = torch.zeros(E, 2 * I, H, device=device), torch.zeros(E, H, I, device=device)
    for tokens, aligns in ((1, []), (4, ["_align_kernel"])):
        del launched[:]
        x, logits = torch.zeros(tokens, H, device=device), torch.zeros(tokens, E, device=device)
        with the_plain_kernel():
            moe_ops.fused_moe(x, w1, w2, logits, 6)
        first = ["_fused_topk_kernel", *aligns]
        assert launched[:-1] == [*first, *GEMMS] and len(launched) == 3 + len(first)


@pytest.mark.parametrize(
    ("slots", "num_experts", "direct"),
    [(2, 8, True), (3, 8, False), (16, 128, True), (17, 512, False), (8, 16, False), (0, 1, True)],
)
def test_few_slots_of_many_experts(slots, num_experts, direct):
    """No more than seldom meet: weights would be read again for each."""
    assert is_direct(slots, num_experts) == direct
