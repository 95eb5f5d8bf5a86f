"""Grouped top-k where its quick way goes wrong: bitwise as references."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from routing_oracle import Call

from moe_ops import ops
from moe_ops.reference import routing as reference

pytest.importorskip("triton")

from moe_ops.kernels import routing
from moe_ops.kernels._routing import grouped_topk  # noqa: E402

pytestmark = pytest.mark.kernel


def assert_grouped(logits, call, device):
    """The experts and weights of the reference."""
    groups = (call.groups, call.topk_group)
    weights, ids = ops.grouped_topk(logits.to(device), *call.arguments(device), *groups)
    expected = reference.grouped_topk(logits, *call.arguments("cpu"), *groups)
    assert torch.equal(ids.cpu(), expected[1])
    assert torch.equal(weights.cpu(), expected[0])


def rows_of(groups, size):
    """Rows of logits: groups tie, lie beside each other, or are broken in part or altogether."""
    g = torch.Generator().manual_seed(groups * size)
    base = torch.randn(14, groups, size, generator=g)
    base[0] = base[0, :1]  # the same in all groups
    base[1] = 0.5
    base[2] = (base[2] * 2).round() / 2
    base[3, :, : size // 2] += 4.0
    base[4, :, size // 2 :] += 4.0
    base[5, groups // 2] += 8.0  # nearly all of the best in one group
    base[6, groups // 2, : min(size, 4)] = torch.nan
    base[7, groups - 1] = torch.nan
    base[8] = torch.nan
    base[9, 0, 0], base[9, -1, -1] = torch.inf, -torch.inf
    base[10] = -torch.inf
    base[10, groups - 1, size - 1] = 0.0
    base[11] = base[11] * 60
    base[12] = 0.3 + (base[12] * 64).round() * 2.0**-23
    base[13] = -base[13].abs() - 20
    return base.flatten(1)


SIZES = [(8, 32, 4, 8), (8, 20, 3, 6), (3, 7, 2, 9), (6, 1, 4, 3), (5, 3, 5, 4)]
if not INTERPRETED:
    SIZES += [(8, 16, 4, 8), (8, 64, 4, 10), (8, 64, 5, 10), (2, 64, 1, 40), (64, 2, 9, 12)]
    SIZES += [(16, 128, 3, 8), (128, 8, 8, 8)]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("groups", "size", "topk_group", "k"), SIZES)
def test_whatever_the_groups(groups, size, topk_group, k, many, device, monkeypatch):
    monkeypatch.setattr(routing, "MANY_TOKENS", 1 if many else 2**30)
    logits = rows_of(groups, size)
    bias = torch.randn(groups * size, generator=torch.Generator().manual_seed(0)) / 4
    broken = bias.clone()
    broken[1 - size :], broken[0] = torch.nan, torch.inf
    how = {"groups": groups, "topk_group": topk_group}
    for call in (
        Call(k, True, "sigmoid", bias, 2.5, **how),
        Call(k, False, "sigmoid", None, 1.0, **how),
        Call(k, True, "sqrtsoftplus", broken, 1.5, **how),
    ):
        assert_grouped(logits, call, device)
    if HAS_CUDA:
        assert_grouped(logits.bfloat16(), Call(k, True, "sigmoid", bias, 2.5, **how), device)
        assert_grouped(logits, Call(k, True, "softmax", None, 1.0, **how), device)


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("pairs", [False, True], ids=["best", "pair"])
def test_groups_nearly_as_good(pairs, scoring, device):
    """Six groups with the same two best but for their lowest bits, of which two are chosen."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(1024 if HAS_CUDA else 20, 8, 16, generator=g)
    two = torch.rand(len(logits), 1, 2, generator=g) + 3.0
    apart = torch.randint(-3, 4, (len(logits), 6, 2), generator=g) * 2.0**-21
    logits[:, 2:, :2] = two + apart
    logits[:, :2, 0] += 9.0
    call = Call(8, True, scoring, torch.zeros(128) if pairs else None, 1.0, 8, 4)
    assert_grouped(logits.flatten(1), call, device)


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
def test_the_last_expert_nearly_as_good_as_the_next(scoring, device):
    logits = torch.full((1, 8, 32), -3.0)
    logits[0, 3:7, 4:6] = 4.0 - torch.arange(8).view(4, 2) / 4
    logits[0, 3, 20], logits[0, 6, 31] = 1.0, 1.0 + 2.0**-20
    for bias in (None, torch.zeros(256)):
        assert_grouped(logits.flatten(1), Call(9, True, scoring, bias, 1.0, 8, 4), device)


def test_groups_whose_sums_cancel(device):
    """Large numbers of unlike signs: how each is rounded decides, and is not what a sum tells."""
    large, apart = 2.0**13, 2.0**-10  # float32 numbers that large lie so far apart
    halfway = (torch.linspace(200, 800, 300 if HAS_CUDA else 30).long().double() + 0.5) * apart
    for score in halfway:
        bias, logits = torch.full((2, 8), -4 * large), torch.zeros(1, 2, 8)
        logits[0, 0, 0] = torch.logit(score)
        bias[0, :2] = torch.tensor([large, -large])  # sums to the one below or above, plus a half
        bias[1, :2] = (score - 0.5) / 2 + torch.tensor([0.25, -0.25])  # and to what lies between
        call = Call(1, True, "sigmoid", bias.flatten(), 1.0, 2, 1)
        assert_grouped(logits.flatten(1), call, device)


def test_groups_of_scores_that_are_not_near(device):
    """What stands for a large score makes a group look better than it is."""
    taken_back, alone = torch.full((2, 4, 8), -3.0), torch.full((4, 8), -9.0)
    taken_back[:, 0, :3] = 5.0
    taken_back[:, 1, :2] = torch.tensor([70.0, 4.5])
    taken_back[:, 2, :2] = 0.5
    bias = torch.zeros(4, 8)
    bias[1, 0] = -(2.0**100)
    for k in (1, 4):
        call = Call(k, True, "sqrtsoftplus", bias.flatten(), 1.0, 4, 2)
        assert_grouped(taken_back.flatten(1), call, device)
    alone[2, 0], alone[1, :2] = 100.0, 36.0
    call = Call(1, True, "sqrtsoftplus", torch.zeros(32), 1.0, 4, 1)
    assert_grouped(alone.flatten()[None], call, device)


@pytest.mark.skipif(not INTERPRETED, reason="replaces a part of a kernel")
@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("groups", "size", "topk_group"), [(8, 32, 4), (3, 40, 1), (8, 6, 7)])
def test_who_takes_the_slow_way(groups, size, topk_group, scoring, monkeypatch):
    """Groups that tie for the last place do, ordinary logits do not."""
    slow = []
    monkeypatch.setattr(grouped_topk, "_route_exactly", lambda *given: slow.append(True))
    order = torch.randperm(groups * size, generator=torch.Generator().manual_seed(0))
    logits = torch.linspace(-2.0, 2.0, groups * size)[order].view(1, groups, size)
    for bias in (torch.linspace(0.0, 0.1, groups * size), None):
        call = Call(5, True, scoring, bias, 1.0, groups, topk_group)
        assert_grouped(logits.flatten(1), call, "cpu")
    assert not slow
    call = Call(5, True, scoring, torch.zeros(groups * size), 1.0, groups, topk_group)
    best = logits[0].topk(2).values.sum(1).argsort(descending=True)
    tied = logits.clone()
    tied[:, best[topk_group]] = tied[:, best[topk_group - 1]]
    ops.grouped_topk(tied.flatten(1), *call.arguments("cpu"), groups, topk_group)
    assert len(slow) == 1
