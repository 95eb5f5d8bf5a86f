"""Top-k routing against Python in float64, with ties, infinities, biases and groups."""

import math

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from hypothesis import given
from pairwise import half_exhaustive
from routing_oracle import (
    KINDS,
    SCORING,
    Call,
    assert_routed,
    exact_scores,
    grouped_calls,
    make_logits,
    topk_calls,
)

import moe_ops
from moe_ops import ops
from moe_ops.reference import routing as reference

pytestmark = pytest.mark.kernel


def no_hidden(tokens, device="cpu"):
    """Routers read nothing of the tokens but their number."""
    return torch.empty(tokens, 1, device=device)


@given(sample=topk_calls())
def test_any_logits(sample, device):
    logits, call = sample
    result = moe_ops.fused_topk(
        no_hidden(len(logits), device), logits.to(device), call.k, call.renormalize,
        scoring_func=call.scoring, routed_scaling_factor=call.scale,
        e_score_correction_bias=None if call.bias is None else call.bias.to(device),
    )  # fmt: skip
    assert_routed(logits, call, *result)


@given(sample=grouped_calls())
def test_any_groups(sample, device):
    logits, call = sample
    result = moe_ops.grouped_topk(
        no_hidden(len(logits), device), logits.to(device), call.k, call.renormalize, call.groups,
        call.topk_group, scoring_func=call.scoring, routed_scaling_factor=call.scale,
        e_score_correction_bias=None if call.bias is None else call.bias.to(device),
    )  # fmt: skip
    assert_routed(logits, call, *result)


@pytest.mark.parametrize(
    ("scoring", "kind", "sizes"),
    half_exhaustive(SCORING, KINDS, [(256, 8), (257, 10)], where=INTERPRETED),
    ids=str,
)
def test_kernels_choose_as_references(scoring, kind, sizes, device):
    """Also where scores plus bias nearly tie: thousands of tokens on a GPU."""
    experts, k = sizes
    logits = make_logits(kind, 4096 if HAS_CUDA else 4, experts, 1)
    bias = torch.linspace(-0.1, 0.1, experts)
    for call in (Call(k, True, scoring, bias, 2.5), Call(k, False, scoring, None, 1.0)):
        weights, ids = ops.fused_topk(logits.to(device), *call.arguments(device))
        expected_weights, expected_ids = reference.fused_topk(logits, *call.arguments("cpu"))
        assert torch.equal(ids.cpu(), expected_ids)
        assert torch.equal(weights.cpu(), expected_weights)
        if experts % 8 == 0:
            weights, ids = ops.grouped_topk(logits.to(device), *call.arguments(device), 8, 4)
            expected = reference.grouped_topk(logits, *call.arguments("cpu"), 8, 4)
            assert torch.equal(ids.cpu(), expected[1])
            assert torch.equal(weights.cpu(), expected[0])


@pytest.mark.parametrize("scoring", SCORING)
def test_scores_are_rounded_once(scoring, device):
    """Every score of all experts is the float32 number that is nearest to it."""
    logits = make_logits("random", 4, 60, 3)
    weights, ids = ops.fused_topk(logits.to(device), None, 60, False, scoring, 1.0)
    exact = exact_scores(logits, scoring).float()
    assert torch.equal(weights.cpu(), exact.gather(1, ids.cpu().long()))


def test_sums_of_weights_are_rounded_once(device):
    """1 and two numbers that float32 loses one by one, but not together."""
    logits = torch.tensor([[40.0] + [math.log(1.5 * 2.0**-25)] * 2], device=device)
    weights, _ = ops.fused_topk(logits, None, 3, True, "sigmoid", 1.0)
    assert weights[0, 0].item() == torch.tensor(1 / (1 + 2.0**-23)).item()


def test_groups_without_a_score_tie(device):
    """Two biases that are not finite are no worse than one: ties go to the lowest group."""
    bias = torch.tensor([torch.nan, torch.nan, torch.nan, 0.25, -torch.inf, torch.nan])
    call = Call(2, False, "sigmoid", bias, 1.0, groups=3, topk_group=1)
    logits = torch.zeros(2, 6)
    result = ops.grouped_topk(logits.to(device), *call.arguments(device), 3, 1)
    assert result[1].tolist() == [[0, 1], [0, 1]]
    assert_routed(logits, call, *result)


@pytest.mark.parametrize("scoring", SCORING)
def test_the_best_behind_others_nearly_as_good(scoring, device):
    """Scores that fall in their lowest bits, until a last one that is larger."""
    logits = 0.25 - torch.arange(256) * 2.0**-21
    logits[20:] = 0.0
    logits[-1] = 0.25 + 2.0**-21
    call = Call(8, False, scoring, None, 1.0)
    weights, ids = ops.fused_topk(logits[None].to(device), *call.arguments(device))
    assert ids.tolist() == [[255, 0, 1, 2, 3, 4, 5, 6]]
    assert_routed(logits[None], call, weights, ids)


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1.0, 100.0, 2.0**25, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_of_any_size(dtype, factor, device):
    """Logits that differ and whose scores do not; many that tie for the last slot; both zeros."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(64 if HAS_CUDA else 4, 256, generator=g)
    logits[1] = (8 * logits[1]).round() / 8
    logits[2] = -logits[2].abs()
    logits[2, ::3] = 0.0
    logits[2, 1::3] = -0.0
    logits = (logits * factor).to(dtype)
    for k in (3, 8):
        how = (None, k, False, "softmax", 1.0)
        weights, ids = ops.fused_topk(logits.to(device), *how)
        expected_weights, expected_ids = reference.fused_topk(logits, *how)
        assert torch.equal(ids.cpu(), expected_ids)
        assert torch.equal(weights.cpu(), expected_weights)


@pytest.mark.parametrize("experts", [1, 60, 128, 300])
@pytest.mark.parametrize("scoring", SCORING)
def test_programs_of_several_tokens(scoring, experts, device, monkeypatch):
    """What they choose does not depend on how many a program routes; the last one has fewer.

    It writes no others: what lies behind the results stays as it is.
    """
    kernels, rooms = pytest.importorskip("moe_ops.kernels.routing"), []

    def with_room(gating_output, bias, topk, *how):
        weights = torch.full((200, topk), 7.0, device=device)
        rooms.extend((weights, weights.int()))
        return weights[:6], rooms[-1][:6]

    monkeypatch.setattr(kernels, "empty_topk", with_room)
    logits = make_logits("broken", 6, experts, 0)
    bias = torch.linspace(-0.1, 0.1, experts)
    for call in (Call(1, True, scoring, bias, 2.5), Call(min(experts, 8), True, scoring, None, 1)):
        results = []
        for many in (2**30, 1):
            monkeypatch.setattr(kernels, "MANY_TOKENS", many)
            results.append(ops.fused_topk(logits.to(device), *call.arguments(device)))
            assert_routed(logits, call, *results[-1])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all((room[6:] == 7).all() for room in rooms)


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_logits_that_are_not_finite_score_zero(scoring_func, device):
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [
            [nan, 1.0, 2.0, inf],
            [nan, nan, nan, nan],
            [-inf, 0.0, -inf, -inf],
            [inf, inf, -1.0, nan],
        ],
        device=device,
    )
    weights, ids = moe_ops.fused_topk(
        no_hidden(4, device), logits, 3, True, scoring_func=scoring_func
    )
    assert ids.tolist() == [[2, 1, 0], [0, 1, 2], [1, 0, 2], [2, 0, 1]]
    assert weights.isfinite().all()
    assert weights[1].tolist() == [0.0, 0.0, 0.0]
    assert weights[2].tolist() == [1.0, 0.0, 0.0]


def test_a_bias_that_is_not_finite_is_chosen_last(device):
    logits = torch.zeros(1, 4, device=device)
    bias = torch.tensor([torch.nan, 0.0, -torch.inf, 0.1], device=device)
    _, ids = moe_ops.fused_topk(
        logits, logits, 4, False, scoring_func="sigmoid", e_score_correction_bias=bias
    )
    assert ids.tolist() == [[3, 1, 0, 2]]


def test_the_two_best_of_a_group_count_with_a_bias(device):
    """Group 0 has the best expert, group 1 the best pair."""
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]], device=device)
    zero = torch.zeros(4, device=device)
    for bias, expected in ((None, [[0]]), (zero, [[2]])):
        _, ids = moe_ops.grouped_topk(
            logits, logits, 1, True, 2, 1, scoring_func="sigmoid", e_score_correction_bias=bias
        )
        assert ids.tolist() == expected


def test_one_group_is_no_group(device):
    logits = make_logits("grid", 5, 12, 0).to(device)
    plain = moe_ops.fused_topk(logits, logits, 3, True)
    for groups in ((1, 1), (0, 0), (1, 0)):
        grouped = moe_ops.grouped_topk(logits, logits, 3, True, *groups)
        assert all(torch.equal(a, b) for a, b in zip(grouped, plain, strict=True))


@pytest.mark.parametrize("scoring", SCORING)
def test_far_tails_keep_their_scores(scoring, device):
    """No score is lost to cancellation: sqrt(softplus(-60)) is 9.4e-14, not 0."""
    logits = torch.tensor([[-60.0, -40.0, 19.999, 20.001]], device=device)
    call = Call(4, False, scoring, None, 1.0)
    assert_routed(logits.cpu(), call, *ops.fused_topk(logits, *call.arguments(device)))
    if scoring != "softmax":
        for e in range(4):
            one = logits[:, e : e + 1]
            call = Call(1, False, scoring, None, 1.0)
            assert_routed(one.cpu(), call, *ops.fused_topk(one, *call.arguments(device)))


def test_indices_type_and_strided_logits(device):
    logits = make_logits("grid", 5, 16, 0)
    wide = torch.full((5, 40), torch.nan, device=device)
    wide[:, :16] = logits
    call = Call(2, True, "softmax", None, 1.0)
    weights, ids = moe_ops.fused_topk(logits, wide[:, :16], 2, True, indices_type=torch.int64)
    assert ids.dtype == torch.int64
    assert_routed(logits, call, weights, ids.int())
    turned = logits.to(device).t().contiguous().t()
    assert_routed(logits, call, *moe_ops.fused_topk(logits, turned, 2, True))


@pytest.mark.parametrize(("experts", "k"), [(4096, 22), (513, 22), (40, 40)])
def test_many_experts(experts, k, device):
    logits = torch.arange(experts).flip(0).float()[None].to(device) / 64
    _, ids = moe_ops.fused_topk(logits, logits, k, True)
    assert ids.tolist() == [list(range(k))]


LOGITS = {"gating_output": torch.zeros(4, 8), "topk": 2, "renormalize": True}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"topk": 9}, ValueError, "topk must be between 1 and the 8 experts, got 9"),
        ({"topk": 0}, ValueError, "topk must be between"),
        ({"scoring_func": "tanh"}, ValueError, "scoring_func must be one of"),
        ({"indices_type": torch.uint8}, TypeError, "indices_type must be"),
        ({"gating_output": torch.zeros(4, 8, dtype=torch.int32)}, TypeError, "gating_output must"),
        ({"gating_output": torch.zeros(8)}, ValueError, "gating_output must have 2 axes"),
        ({"gating_output": torch.zeros(3, 8)}, ValueError, "must have the 4 tokens"),
        ({"gating_output": torch.zeros(4, 4097)}, NotImplementedError, "at most 4096"),
        ({"e_score_correction_bias": torch.zeros(7)}, ValueError, "e_score_correction_bias.shape"),
        (
            {"e_score_correction_bias": torch.zeros(8, dtype=torch.bfloat16)},
            TypeError,
            "e_score_correction_bias must have a dtype",
        ),
    ],
)
def test_errors(changes, error, message):
    with pytest.raises(error, match=message):
        moe_ops.fused_topk(no_hidden(4), **{**LOGITS, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_expert_group": None}, "and topk_group must be numbers, got None and 2"),
        ({"num_expert_group": 3}, "num_expert_group must divide the 8 experts, got 3"),
        ({"num_expert_group": 0}, "num_expert_group must divide"),
        ({"topk_group": None}, "and topk_group must be numbers, got 4 and None"),
        ({"topk_group": 5}, "topk_group must be between 1 and num_expert_group = 4, got 5"),
        ({"topk_group": 0}, "topk_group must be between"),
        ({"topk": 5}, "topk must be between 1 and the 4 experts, got 5"),
        ({"scoring_func": "tanh"}, "scoring_func must be one of"),
    ],
)
def test_errors_of_groups(changes, message):
    arguments = {**LOGITS, "num_expert_group": 4, "topk_group": 2, **changes}
    with pytest.raises(ValueError, match=message):
        moe_ops.grouped_topk(no_hidden(4), **arguments)
