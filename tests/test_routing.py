"""Top-k routing against float64 scores, with ties, infinities and biases."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moe_ops
from moe_ops.reference import routing
from moe_ops.testing import assert_matches_reference

pytestmark = pytest.mark.kernel


def logits_on_a_grid(tokens: int, experts: int, seed: int) -> torch.Tensor:
    """Multiples of 1/16: equal logits are exact ties, others are far apart in float32."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 64, (tokens, experts), generator=g) / 16.0


def exact_scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    logits = logits.double()
    return logits.softmax(-1) if scoring_func == "softmax" else logits.sigmoid()


def by_sorting(score: torch.Tensor, bias: torch.Tensor | None, k: int) -> list[list[int]]:
    """Python's sort is stable: ties go to the lowest index."""
    choice = (score if bias is None else score + bias).tolist()
    return [sorted(range(len(row)), key=lambda e: -row[e])[:k] for row in choice]


@given(
    tokens=st.integers(0, 20),
    experts=st.sampled_from((1, 2, 8, 60, 257)),
    scoring_func=st.sampled_from(("softmax", "sigmoid")),
    renormalize=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    data=st.data(),
)
def test_any_logits(tokens, experts, scoring_func, renormalize, dtype, data, device):
    k = data.draw(st.integers(1, min(experts, 8)))
    logits = logits_on_a_grid(tokens, experts, data.draw(st.integers(0, 999))).to(dtype)
    weights, ids = moe_ops.fused_topk(
        torch.empty(tokens, 1, device=device), logits.to(device), k, renormalize,
        scoring_func=scoring_func,
    )  # fmt: skip
    assert ids.dtype == torch.int32 and ids.shape == (tokens, k) and ids.is_contiguous()
    assert ids.tolist() == by_sorting(logits.float(), None, k)
    exact = exact_scores(logits, scoring_func).gather(-1, ids.cpu().long())
    if renormalize:
        exact = exact / exact.sum(-1, keepdim=True)
    reference, _ = routing.fused_topk(logits, None, k, renormalize, scoring_func, 1.0)
    assert_matches_reference(weights.cpu(), exact, reference)


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_bias_chooses_and_does_not_weigh(scoring_func, device):
    logits = logits_on_a_grid(16, 12, 0)
    bias = torch.linspace(-0.3, 0.3, 12)
    weights, ids = moe_ops.fused_topk(
        torch.empty(16, 1, device=device), logits.to(device), 3, True, scoring_func=scoring_func,
        e_score_correction_bias=bias.to(device), routed_scaling_factor=2.5,
    )  # fmt: skip
    score = exact_scores(logits, scoring_func)
    assert ids.tolist() == by_sorting(score, bias.double(), 3)
    exact = score.gather(-1, ids.cpu().long())
    exact = 2.5 * exact / exact.sum(-1, keepdim=True)
    reference, _ = routing.fused_topk(logits, bias, 3, True, scoring_func, 2.5)
    assert_matches_reference(weights.cpu(), exact, reference)


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
        torch.empty(4, 1, device=device), logits, 3, True, scoring_func=scoring_func
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


def test_indices_type_and_strided_logits(device):
    logits = logits_on_a_grid(5, 16, 0).to(device)
    wide = torch.full((5, 40), torch.nan, device=device)
    wide[:, :16] = logits
    _, ids = moe_ops.fused_topk(logits, wide[:, :16], 2, True, indices_type=torch.int64)
    assert ids.dtype == torch.int64
    assert ids.tolist() == by_sorting(logits, None, 2)
    _, ids = moe_ops.fused_topk(logits, logits.t().contiguous().t(), 2, True)
    assert ids.tolist() == by_sorting(logits, None, 2)


@pytest.mark.parametrize("experts", [4096, 513])
def test_many_experts(experts, device):
    logits = torch.arange(experts).flip(0).float()[None].to(device) / 64
    _, ids = moe_ops.fused_topk(logits, logits, 22, True)
    assert ids.tolist() == [list(range(22))]


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
    arguments = {"gating_output": torch.zeros(4, 8), "topk": 2, "renormalize": True, **changes}
    with pytest.raises(error, match=message):
        moe_ops.fused_topk(torch.zeros(4, 1), **arguments)
