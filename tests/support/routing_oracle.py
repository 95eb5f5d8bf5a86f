"""Oracle routers, token by token in Python, and logits for testing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from legs import INTERPRETED
from torch import Tensor

from moe_ops.testing import assert_matches_reference

SCORING = ("softmax", "sigmoid", "sqrtsoftplus")
LOWEST = torch.finfo(torch.float32).min
TOKENS = 6 if INTERPRETED else 20
KINDS = ("grid", "random", "equal", "near", "far", "broken")
"""Kinds of logits: multiples of 1/16 with exact ties; random; all equal; with scores that differ in
their lowest bits at most; of magnitudes up to 200; with NaN and infinities."""


def make_logits(kind: str, tokens: int, experts: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if kind == "equal":
        return torch.full((tokens, experts), 0.3)
    logits = 2 * torch.randn(tokens, experts, generator=g)
    if kind == "grid":
        logits = (logits * 16).round() / 16
    elif kind == "near":
        logits = 0.25 + (logits * 64).round() * 2.0**-23
    elif kind == "far":
        logits = logits * 50
    elif kind == "broken":
        which = torch.randint(0, 12, (tokens, experts), generator=g)
        for value, place in ((torch.nan, 0), (torch.inf, 1), (-torch.inf, 2)):
            logits[which == place] = value
        logits[:1] = torch.nan  # and one token with NaN only
    return logits


class Call(NamedTuple):
    """Arguments of a top-k, all but the logits."""

    k: int
    renormalize: bool
    scoring: str
    bias: Tensor | None
    scale: float
    groups: int = 1
    topk_group: int = 1

    def arguments(self, device: str) -> tuple[Any, ...]:
        """The arguments of the operators from the bias on."""
        bias = None if self.bias is None else self.bias.to(device)
        return (bias, self.k, self.renormalize, self.scoring, self.scale)


@st.composite
def biases(draw, experts: int) -> Tensor | None:
    kind = draw(st.sampled_from(("none", "random", "broken")))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    bias = torch.randn(experts, generator=g) / 4
    if kind == "broken":
        bias[0], bias[-1] = torch.nan, -torch.inf
    return None if kind == "none" else bias


@st.composite
def topk_calls(draw, sizes=(1, 2, 8, 60, 257)) -> tuple[Tensor, Call]:
    """Logits ``(T, E)`` and a top-k over all experts."""
    experts = draw(st.sampled_from(sizes))
    call = Call(
        k=draw(st.integers(1, min(experts, 10))),
        renormalize=draw(st.booleans()),
        scoring=draw(st.sampled_from(SCORING)),
        bias=draw(biases(experts)),
        scale=draw(st.sampled_from((1.0, 2.5))),
    )
    return draw(logits_of(experts)), call


@st.composite
def grouped_calls(draw) -> tuple[Tensor, Call]:
    """Logits ``(T, E)`` and a top-k over the experts of the best groups."""
    groups, size = draw(st.sampled_from(((8, 32), (8, 20), (4, 1), (2, 5), (3, 2), (1, 7), (5, 3))))
    topk_group = draw(st.integers(1, groups))
    call = Call(
        k=draw(st.integers(1, min(topk_group * size, 8))),
        renormalize=draw(st.booleans()),
        scoring=draw(st.sampled_from(SCORING)),
        bias=draw(biases(groups * size)),
        scale=draw(st.sampled_from((1.0, 2.5))),
        groups=groups,
        topk_group=topk_group,
    )
    return draw(logits_of(groups * size)), call


@st.composite
def logits_of(draw, experts: int) -> Tensor:
    tokens = draw(st.integers(0, TOKENS))
    logits = make_logits(draw(st.sampled_from(KINDS)), tokens, experts, draw(st.integers(0, 999)))
    return logits.to(draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))))


def exact_scores(logits: Tensor, scoring: str) -> Tensor:
    """float64 scores."""
    x = logits.double()
    finite = x.isfinite()
    if scoring == "sigmoid":
        score = 1 / (1 + torch.exp(-x))
    elif scoring == "sqrtsoftplus":
        score = torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20)))).sqrt()
    else:
        weight = torch.where(finite, x, -torch.inf)
        weight = (weight - weight.amax(-1, keepdim=True)).exp()
        score = weight / weight.sum(-1, keepdim=True)
    return torch.where(finite, score, 0.0)


def best(values: list[float], count: int) -> list[int]:
    """Indices of the largest values; Python's sort is stable, so ties go to the lowest index."""
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def chosen(score: Tensor, call: Call) -> list[list[int]]:
    """The ids chosen by float32 score plus bias, within the best groups."""
    choice = score.float()
    if call.bias is not None:
        choice = choice + call.bias
        choice = torch.where(choice.isfinite(), choice, LOWEST)
    pairs = call.bias is not None
    rows = []
    for row in choice.tolist():
        size = len(row) // call.groups
        group_scores = []
        for g in range(call.groups):
            members = sorted(row[g * size : (g + 1) * size], reverse=True)[: 2 if pairs else 1]
            group_scores.append(max(float(torch.tensor(members).sum()), LOWEST))
        kept = best(group_scores, call.topk_group)
        row = [x if e // size in kept else -torch.inf for e, x in enumerate(row)]
        rows.append(best(row, call.k))
    return rows


def final(weights: Tensor, call: Call) -> Tensor:
    """Weights renormalized and scaled."""
    if call.renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * call.scale


def assert_routed(logits: Tensor, call: Call, weights: Tensor, ids: Tensor) -> None:
    """Assert that weights and ids are those of the call, with the right dtypes and layouts."""
    assert ids.dtype == torch.int32 and ids.is_contiguous()
    assert ids.shape == weights.shape == (logits.shape[0], call.k)
    score = exact_scores(logits.float(), call.scoring)
    assert ids.tolist() == chosen(score, call)
    exact = final(score.gather(-1, ids.cpu().long()), call)
    plain = final(score.float().gather(-1, ids.cpu().long()), call)
    assert_matches_reference(weights.cpu(), exact, plain)
