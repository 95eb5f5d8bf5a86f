"""Top-k's quick ways where they go wrong if anything is overlooked: bit by bit as references."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from routing_oracle import Call

from moe_ops import ops
from moe_ops.reference import routing as reference

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from moe_ops.kernels import routing
from moe_ops.kernels._routing import choice as routing_choice  # noqa: E402
from moe_ops.kernels._routing.lanes import in_rounds  # noqa: E402
from moe_ops.kernels._routing.near import (  # noqa: E402
    near_exp,
    near_sigmoid,
    near_sqrtsoftplus,
    nearness,
)

pytestmark = pytest.mark.kernel


def in_one_lane(experts, lane):
    """The experts that lane has, of 32."""
    return [e for e in range(experts) if e % 128 // 4 == lane]


def rows_of(experts):
    """Rows of logits: what is best lies in one lane, in part or all of it, ties, or is broken."""
    g = torch.Generator().manual_seed(experts)
    lane = in_one_lane(experts, 5)
    base = torch.randn(22, experts, generator=g)
    for row, many in enumerate((3, 4, 5, len(lane))):  # falling, then rising by position
        places = torch.tensor(lane[:many])
        base[row, places] = 5.0 - torch.arange(many) / 8
        base[row + 4, places] = 5.0 + torch.arange(many) / 8
    base[8] = (base[8] * 4).round() / 4  # ties everywhere
    base[9, lane[:6]] = 7.0  # ties in a lane
    base[10, [lane[0], 0, experts - 1]] = 7.0  # and across lanes
    base[11] = 0.5
    base[12, lane[:9]] = torch.nan
    base[13, [1, lane[1]]] = torch.tensor([torch.inf, -torch.inf])
    base[14] = torch.nan
    base[15] = -torch.inf
    base[15, 7] = 0.0
    base[16] = -base[16].abs() - 1
    base[17] = torch.where(base[17] > 0, 0.0, -0.0)
    base[18] = base[18] * 100 + 300
    base[19] = base[19] * 100 - 700
    base[20] = -torch.nan
    base[20, lane] = 1.0 - torch.arange(len(lane)) * 2.0**-20
    base[21] = 0.3 + (base[21] * 64).round() * 2.0**-23
    return base


F32, BF16 = torch.float32, torch.bfloat16
PLACES = [(257, 10, BF16, True), (512, 16, F32, True)]
"""Experts, those of a token, logits, and whether tokens are many."""
if not INTERPRETED:
    SIZES = (160, 6), (257, 10), (384, 8), (512, 8), (512, 10), (512, 16), (2048, 12)
    PLACES = [(*s, t, many) for s in SIZES for t in (F32, BF16) for many in (False, True)]


@pytest.mark.parametrize(("experts", "k", "dtype", "many"), PLACES, ids=str)
def test_wherever_the_best_lie(experts, k, dtype, many, device, monkeypatch):
    """Also where a program has as few registers as where there are many tokens."""
    monkeypatch.setattr(routing, "MANY_TOKENS", 1 if many else 2**30)
    logits = rows_of(experts).to(dtype)
    bias = torch.linspace(-0.5, 0.5, experts)
    for call in (
        Call(k, True, "softmax", None, 1.0),
        Call(k, False, "sigmoid", bias, 2.5),
        Call(k, True, "sigmoid", torch.zeros(experts), 1.0),
        Call(k, True, "sqrtsoftplus", bias, 1.5),
    ):
        weights, ids = ops.fused_topk(logits.to(device), *call.arguments(device))
        expected_weights, expected_ids = reference.fused_topk(logits, *call.arguments("cpu"))
        assert torch.equal(ids.cpu(), expected_ids)
        assert torch.equal(weights.cpu(), expected_weights)


@pytest.mark.parametrize("experts", [5, 12, 160])
def test_no_expert_is_chosen_that_does_not_exist(experts, device):
    """Also where most logits are NaN with a sign, which are less than -inf to integers."""
    logits = torch.full((2, experts), -torch.nan)
    logits[:, experts // 2] = 1.0
    bias = torch.zeros(experts)
    for how in (
        ("softmax", None), ("softmax", bias), ("sigmoid", None), ("sigmoid", bias),
        ("sqrtsoftplus", bias),
    ):  # fmt: skip
        call = Call(4, True, *how, 1.0)
        weights, ids = ops.fused_topk(logits.to(device), *call.arguments(device))
        expected_weights, expected_ids = reference.fused_topk(logits, *call.arguments("cpu"))
        assert torch.equal(ids.cpu(), expected_ids)
        assert torch.equal(weights.cpu(), expected_weights)


@pytest.mark.skipif(not INTERPRETED, reason="replaces a part of a kernel")
@pytest.mark.parametrize("are_many", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_who_takes_the_slow_way(scoring, are_many, monkeypatch):
    """Four of the best in one lane may hide a fifth, where tokens are many; three never do."""
    experts, k, slow = 512, 10, []
    assert in_rounds(experts, k)
    monkeypatch.setattr(routing, "MANY_TOKENS", 1 if are_many else 2**30)
    best_of = routing_choice._best_of

    def counted(*arguments):
        slow.append(True)
        return best_of(*arguments)

    monkeypatch.setattr(routing_choice, "_best_of", counted)
    bias = None if scoring == "softmax" else torch.zeros(experts)
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    logits = torch.linspace(-1.0, 0.5, experts)[order]
    for many, ways in ((0, 0), (3, 0), (4, 1), (9, 1)):
        slow.clear()
        row = logits.clone()
        others = [4 * lane for lane in range(11) if lane != 5]
        best = [*in_one_lane(experts, 5)[:many], *others][:k]
        row[best] = 3.0 - torch.arange(k) / 8
        _, ids = ops.fused_topk(row[None], bias, k, True, scoring, 1.0)
        assert ids[0].tolist() == best
        assert len(slow) == (ways if are_many else 0)


def doubtful(experts, k, error):
    """Rows with a chosen score that errors of the sum of exponentials round in two ways."""
    logits = torch.randn(60000, experts, generator=torch.Generator().manual_seed(1))
    terms = logits.double().exp()
    scores = terms.topk(k).values / terms.sum(1, keepdim=True)
    near = ((scores * (1 + error)).float() != (scores * (1 - error)).float()).any(1)
    return logits[near]


@pytest.mark.skipif(not INTERPRETED, reason="replaces a part of a kernel")
@pytest.mark.parametrize("renormalize", [False, True])
def test_no_sum_of_floats_decides_a_score(renormalize, monkeypatch):
    """Whoever adds up first: other sums within the error that is allowed for, the same weights."""
    experts, k, error = 32, 8, 0.9 * 2.0**-39
    logits = doubtful(experts, k, error)
    assert 4 <= len(logits) <= 400
    logits, slow, best_of = logits[:8], [], routing_choice._best_of
    call = Call(k, renormalize, "softmax", None, 1.0)
    expected = reference.fused_topk(logits, *call.arguments("cpu"))
    add_up = routing_choice.sum_by_lanes
    monkeypatch.setattr(
        routing_choice, "_best_of", lambda *given: slow.append(True) or best_of(*given)
    )
    for factor in (1 - error, 1.0, 1 + error):
        monkeypatch.setattr(
            routing_choice, "sum_by_lanes", lambda x, factor=factor: add_up(x) * factor
        )
        for rows in (slice(None), *(slice(t, t + 1) for t in range(len(logits)))):
            found = ops.fused_topk(logits[rows], *call.arguments("cpu"))
            for actual, wanted in zip(found, expected, strict=True):
                assert torch.equal(actual, wanted[rows])
    assert len(slow) >= 3 * len(logits)  # by themselves each is in doubt


@triton.jit
def _near_kernel(x, exponentials, sigmoids, roots, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    value = tl.load(x + at)
    tl.store(exponentials + at, near_exp(value))
    tl.store(sigmoids + at, near_sigmoid(value.to(tl.float32)))
    tl.store(roots + at, near_sqrtsoftplus(value.to(tl.float32)))


@pytest.mark.skipif(not (INTERPRETED or HAS_CUDA), reason="runs a kernel")
def test_near_functions_are_as_near_as_they_say(device):
    spans = ((-600, 256), (-20, 20))  # scores are neither 0 nor 1 in the second
    x = torch.cat([torch.linspace(*span, 8192, dtype=torch.float64) for span in spans]).to(device)
    exponentials, sigmoids, roots = torch.empty_like(x), *torch.empty(2, 16384, device=device)
    _near_kernel[(1,)](x, exponentials, sigmoids, roots, COUNT=16384)
    assert ((exponentials / x.exp() - 1).abs() < 2.0**-39).all()
    logits = x.float()
    for found, name in ((sigmoids, "sigmoid"), (roots, "sqrtsoftplus")):
        far = (found.double() - reference.scores(logits, name).double()).abs()
        assert (far[logits <= 64] < nearness(name)).all()
    assert (roots[logits > 64] == 2.0**100).all()
    assert (reference.scores(torch.tensor([3.4e38]), "sqrtsoftplus") < 2.0**100).all()


@pytest.mark.parametrize("large", [65.0, 1e4, 3e38])
def test_scores_that_are_not_near(large, device):
    """Large ones that a bias takes back, in part; more of them than are chosen."""
    logits = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    bias, many = torch.zeros(128), [3, 40, 41, 77]
    logits[:2, many] = large
    logits[1, 90:] = large
    bias[many[:2]] = -(large**0.5) + 0.5
    call = Call(6, True, "sqrtsoftplus", bias, 1.0)
    weights, ids = ops.fused_topk(logits.to(device), *call.arguments(device))
    expected_weights, expected_ids = reference.fused_topk(logits, *call.arguments("cpu"))
    assert torch.equal(ids.cpu(), expected_ids) and torch.equal(weights.cpu(), expected_weights)


def test_chosen_scores_that_tie_come_by_their_ids(device):
    """Also where the later one is nearly larger: exactly, both sigmoids are 1 - 2**-24."""
    logits = torch.full((1, 64), -3.0)
    logits[0, 3], logits[0, 7] = 16.625, 16.75
    score = reference.scores(logits, "sigmoid")[0]
    assert score[3] == score[7]
    call = Call(2, True, "sigmoid", torch.zeros(64), 1.0)
    _, ids = ops.fused_topk(logits.to(device), *call.arguments(device))
    assert ids.tolist() == [[3, 7]]
