"""Tables, sparsemixer and the routers of single models; names of methods; simulated routings."""

import functools
from itertools import product

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from routing_oracle import KINDS, SCORING, Call, assert_routed, exact_scores, final, make_logits

import moe_ops
from moe_ops import RoutingMethodType as Method
from moe_ops.reference import routing as reference
from moe_ops.routing import (
    SCORING_FUNCS,
    gemma4_routing,
    get_routing_method_type,
    hash_topk,
    llama4_routing,
    methods,
    simulate,
    sparsemixer,
    topk_softmax,
)
from moe_ops.testing import assert_matches_reference

TOKENS = 6 if INTERPRETED else 30


@pytest.mark.kernel
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.integers(0, TOKENS),
    experts=st.sampled_from((4, 60, 257)),
    scoring=st.sampled_from(SCORING),
    renormalize=st.booleans(),
    dtype=st.sampled_from((torch.int32, torch.int64)),
    seed=st.integers(0, 99),
)
def test_a_table_chooses(kind, tokens, experts, scoring, renormalize, dtype, seed, device):
    """Words outside of it, and entries that are no expert, are skipped."""
    k, vocabulary = 3, 11
    logits = make_logits(kind, tokens, experts, seed)
    if kind == "far":  # or all scores that the table chooses may be 0 in float32
        logits /= 16
    g = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(vocabulary)])
    table[0, 0], table[1, 1] = -1, experts
    words = torch.randint(-1, vocabulary + 1, (tokens,), generator=g)
    weights, ids = hash_topk(
        torch.empty(tokens, 1, device=device), logits.to(device), words.to(dtype).to(device),
        table.to(dtype).to(device), renormalize, scoring, 1.5,
    )  # fmt: skip
    rows = [table[w].tolist() if 0 <= w < vocabulary else [-1] * k for w in words.tolist()]
    rows = [[e if 0 <= e < experts else -1 for e in row] for row in rows]
    assert ids.dtype == torch.int32 and ids.tolist() == rows
    wanted = torch.tensor(rows).reshape(tokens, k)
    score = exact_scores(logits, scoring).gather(-1, wanted.clamp(min=0))
    score = torch.where(wanted < 0, 0.0, score)
    call = Call(k, renormalize, scoring, None, 1.5)
    assert_matches_reference(weights.cpu(), final(score, call), final(score.float(), call))


def test_sparsemixer_takes_a_hundredth():
    """Of its own: experts that are within 2 % of the best share with it."""
    logits = torch.tensor([[1.0, 0.99, 0.95, 0.5]])
    weights, ids = sparsemixer(logits, logits)
    assert torch.equal(weights, sparsemixer(logits, logits, jitter_eps=0.01)[0])
    assert not torch.equal(weights, sparsemixer(logits, logits, jitter_eps=0.1)[0])
    assert ids.tolist() == [[0, 1]]


@pytest.mark.kernel
def test_words_outside_of_a_table_are_not_looked_up(device):
    """The table is part of a longer one, whose other rows are good experts, too."""
    longer = torch.arange(12, device=device, dtype=torch.int32).view(6, 2) % 5
    words = torch.tensor([-2, -1, 0, 1, 2, 3], device=device)
    logits = torch.zeros(6, 5, device=device)
    weights, ids = hash_topk(logits, logits, words, longer[2:4], True)
    assert ids.tolist() == [[-1, -1]] * 2 + longer[2:4].tolist() + [[-1, -1]] * 2
    assert weights.tolist() == [[0, 0]] * 2 + [[0.5, 0.5]] * 2 + [[0, 0]] * 2


def mixed(row, eps):
    """sparsemixer of one row of float32 numbers, in Python: weights and ids."""
    alive = [e for e, s in enumerate(row) if abs(s) < float("inf")]
    weights, ids = [], []
    for _ in range(2):
        left = [e for e in range(len(row)) if e not in ids]
        winner = min(left, key=lambda e: (e not in alive, -row[e] if e in alive else 0.0, e))
        ids.append(winner)
        if winner not in alive:
            weights.append(0.0)
            continue
        peak = torch.tensor(row[winner])
        total = 0.0
        for e in (e for e in left if e in alive):
            s = torch.tensor(row[e])
            if not (peak - s) / torch.maximum(s.abs(), peak) > 2 * eps:
                total += float((s.double() - peak.double()).exp())
        weights.append(1 / total)
    return weights, ids


@pytest.mark.kernel
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.integers(0, TOKENS // 2),
    experts=st.sampled_from((2, 3, 16, 60)),
    eps=st.sampled_from((0.01, 0.3)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 99),
)
def test_sparsemixer(kind, tokens, experts, eps, dtype, seed, device):
    logits = make_logits(kind, tokens, experts, seed).to(dtype)
    x = torch.empty(tokens, 1, device=device)
    weights, ids = sparsemixer(x, logits.to(device), jitter_eps=eps)
    rows = [mixed(row, eps) for row in logits.float().tolist()]
    assert ids.dtype == torch.int32 and ids.tolist() == [i for _, i in rows]
    exact = torch.tensor([w for w, _ in rows], dtype=torch.float64).reshape(tokens, 2)
    assert_matches_reference(weights.cpu(), exact, exact.float())
    expected = reference.sparsemixer(logits, eps)
    assert torch.equal(ids.cpu(), expected[1])
    assert_matches_reference(expected[0], exact, exact.float())  # a GPU's exp has other bits


@pytest.mark.kernel
def test_routers_of_models(device):
    logits = make_logits("random", 12, 16, 3)
    x, given_logits = torch.empty(12, 1, device=device), logits.to(device)
    k4 = Call(4, True, "softmax", None, 1.0)
    for renormalize in (True, False):
        assert_routed(logits, k4, *topk_softmax(x, given_logits, 4, renormalize))
    k1 = Call(1, False, "sigmoid", None, 1.0)
    assert_routed(logits, k1, *llama4_routing(x, given_logits, 1, False))
    scale = torch.linspace(0.5, 2, 16)
    weights, ids = gemma4_routing(x, given_logits, 4, True, scale.to(device))
    plain_weights, plain_ids = moe_ops.fused_topk(x, given_logits, 4, True)
    assert torch.equal(ids, plain_ids)
    assert torch.equal(weights, plain_weights * scale.to(device)[ids])


def test_topk_of_logits_then_softmax_is_the_same():
    logits = make_logits("random", 40, 32, 5)
    weights, ids = topk_softmax(logits, logits, 4, True)
    values, chosen = logits.double().topk(4)
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights.double(), values.softmax(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("softmax", 2, True, None, False), Method.RenormalizeNaive),
        (("softmax", 2, False, None, False), Method.Default),
        (("softmax", 2, False, None, True), Method.Unspecified),
        (("sigmoid", 2, True, None, False), Method.SigmoidRenorm),
        (("sigmoid", 1, False, None, False), Method.Sigmoid),
        (("sigmoid", 8, True, 8, True), Method.DeepSeekV3),
        (("sigmoid", 8, True, 1, True), Method.DeepSeekV3),
        (("sigmoid", 8, True, None, True), Method.MiniMax2),
        (("sigmoid", 8, True, 0, True), Method.MiniMax2),
        (("sigmoid", 8, False, 8, True), Method.Unspecified),
        (("sqrtsoftplus", 6, True, None, True), Method.DeepseekV4),
        (("sqrtsoftplus", 6, False, None, True), Method.Unspecified),
    ],
)
def test_names_of_methods(arguments, expected):
    assert get_routing_method_type(*arguments) is expected


def test_another_scoring_function_has_no_method(monkeypatch):
    """It is not taken for softmax."""
    monkeypatch.setattr(methods, "SCORING_FUNCS", (*SCORING, "another"))
    for renormalize, bias in product((True, False), repeat=2):
        found = get_routing_method_type("another", 2, renormalize, None, bias)
        assert found is Method.Unspecified


def test_values_of_methods():
    assert {m.name: m.value for m in Method} == {
        "Default": 0, "Renormalize": 1, "DeepSeekV3": 2, "Llama4": 3, "RenormalizeNaive": 4,
        "TopK": 5, "SigmoidRenorm": 6, "MiniMax2": 7, "Sigmoid": 8, "Unspecified": 9,
        "DeepseekV4": 100, "Custom": 101, "Simulated": 102,
    }  # fmt: skip
    assert SCORING_FUNCS == SCORING


@pytest.mark.parametrize("name", simulate.STRATEGIES)
@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (1, 1), (500, 8), (7, 32)])
def test_simulated_routings(name, tokens, k, device):
    logits = torch.zeros(tokens, 32, device=device)
    g = torch.Generator(device).manual_seed(0)
    weights, ids = simulate.STRATEGIES[name](logits, logits, k, True, generator=g)
    assert ids.shape == weights.shape == (tokens, k)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ((ids >= 0) & (ids < 32)).all() and (weights == 1 / k).all()
    assert all(len(set(row)) == k for row in ids.tolist())
    again = torch.Generator(device).manual_seed(0)
    assert torch.equal(simulate.STRATEGIES[name](logits, logits, k, generator=again)[1], ids)


def test_odds_of_simulated_routings():
    """Shares of 20000 draws of one expert, against the odds of each strategy."""
    logits = torch.zeros(20000, 16)
    place = torch.arange(16.0)
    odds = {
        "uniform_random": torch.ones(16),
        "normal_routing": torch.exp(-0.5 * ((place - 7.5) / (16 / 6)) ** 2),
        "zipf": 1 / (place + 1),
    }
    for name, strategy in simulate.STRATEGIES.items():
        g = torch.Generator().manual_seed(1)
        share = strategy(logits, logits, 1, generator=g)[1].flatten().bincount(minlength=16) / 20000
        expected = odds[name] / odds[name].sum()
        deviation = (expected * (1 - expected) / 20000).sqrt()
        assert ((share - expected).abs() < 5 * deviation).all(), name


ERRORS = [
    (functools.partial(sparsemixer, topk=3), ValueError, "topk must be 2, got 3"),
    (functools.partial(sparsemixer, renormalize=True), ValueError, "renormalize must be False"),
    (functools.partial(simulate.zipf, topk=9), ValueError, "topk must be between 1 and the 8"),
]


@pytest.mark.parametrize(("function", "error", "message"), ERRORS)
def test_errors(function, error, message):
    with pytest.raises(error, match=message):
        function(torch.zeros(4, 1), torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, ValueError, "must have the 4 tokens"),
        ({"input_ids": torch.zeros(4)}, TypeError, "input_ids must have a dtype"),
        ({"hash_indices_table": torch.zeros(0, 2, dtype=torch.long)}, ValueError, "a row for each"),
        ({"hash_indices_table": torch.zeros(5, 9, dtype=torch.long)}, ValueError, "topk must be"),
        ({"scoring_func": "tanh"}, ValueError, "scoring_func must be one of"),
    ],
)
def test_errors_of_tables(changes, error, message):
    words, table = torch.zeros(4, dtype=torch.long), torch.zeros(5, 2, dtype=torch.long)
    arguments = {"input_ids": words, "hash_indices_table": table, "renormalize": True, **changes}
    with pytest.raises(error, match=message):
        hash_topk(torch.zeros(4, 1), torch.zeros(4, 8), **arguments)
