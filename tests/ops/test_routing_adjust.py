"""Scales, shared experts, padding and identity experts: what follows the choice of experts."""

import pytest
import torch
from conftest import INTERPRETED
from graphs import capture
from hypothesis import given
from hypothesis import strategies as st

import moe_ops
from moe_ops.reference import routing_adjust as reference
from moe_ops.routing import adjust_routing, zero_experts
from moe_ops.testing import Bounded, assert_matches_reference

E = 8
HIDDEN = (1, 130, 300) if INTERPRETED else (1, 2, 130, 255, 256, 257, 1030, 2688)


@st.composite
def routings(draw):
    """Weights and ids, some of them no expert."""
    tokens, k = draw(st.integers(0, 12)), draw(st.integers(1, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    ids = torch.randint(-1, E + 4, (tokens, k), generator=g)
    weights = torch.randn(tokens, k, generator=g)
    return (
        weights.to(draw(st.sampled_from((torch.float32, torch.bfloat16)))),
        ids.to(draw(st.sampled_from((torch.int32, torch.int64)))),
    )


def adjusted(weights, ids, scale, shared, shared_weight, padding):
    """Slot by slot, in float32."""
    rows_w, rows_i = [], []
    for t in range(ids.shape[0]):
        row_w, row_i = list(weights[t].float()), ids[t].tolist()
        if scale is not None:
            row_w = [w * scale[e] if 0 <= e < E else w for w, e in zip(row_w, row_i, strict=True)]
        row_w = [float(w) for w in row_w] + [shared_weight] * shared
        row_i += range(E, E + shared)
        if padding is not None and padding[t]:
            row_w, row_i = [0.0] * len(row_w), [-1] * len(row_i)
        rows_w.append(row_w), rows_i.append(row_i)
    shape = (ids.shape[0], ids.shape[1] + shared)
    return (
        torch.tensor(rows_w, dtype=torch.float32).reshape(shape),
        torch.tensor(rows_i, dtype=ids.dtype).reshape(shape),
    )


@pytest.mark.kernel
@given(
    routing=routings(),
    has_scale=st.booleans(),
    shared=st.integers(0, 2),
    has_padding=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_adjustment_is_bitwise_that_of_python(
    routing, has_scale, shared, has_padding, seed, device
):
    weights, ids = routing
    g = torch.Generator().manual_seed(seed)
    scale = torch.rand(E, generator=g) if has_scale else None
    padding = torch.rand(ids.shape[0], generator=g) < 0.4 if has_padding else None
    before = weights.clone(), ids.clone()
    actual = adjust_routing(
        weights.to(device), ids.to(device), E, num_shared_experts=shared,
        shared_expert_weight=0.5, per_expert_scale=None if scale is None else scale.to(device),
        is_padding=None if padding is None else padding.to(device),
    )  # fmt: skip
    expected = adjusted(weights, ids, scale, shared, 0.5, padding)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and a.is_contiguous()
        assert torch.equal(a.cpu(), b)
    assert torch.equal(weights, before[0]) and torch.equal(ids, before[1])


@pytest.mark.kernel
def test_data_of_padding_tokens_may_be_anything(device):
    weights = torch.full((2, 2), torch.nan, device=device)
    ids = torch.full((2, 2), 2**31 - 1, dtype=torch.int32, device=device)
    padding = torch.tensor([True, True], device=device)
    weights, ids = adjust_routing(weights, ids, E, is_padding=padding)
    assert (weights == 0).all() and (ids == -1).all()


@pytest.mark.gpu
def test_the_mask_is_read_at_replay():
    weights, ids = torch.rand(4, 2, device="cuda"), torch.ones(4, 2, dtype=torch.int32).cuda()
    padding = torch.tensor([False, False, False, True], device="cuda")
    adjust_routing(weights, ids, E, is_padding=padding)  # compiled before the capture
    graph, out = capture(lambda: adjust_routing(weights, ids, E, is_padding=padding))
    for now in ([True, False, True, False], [False] * 4):
        padding.copy_(torch.tensor(now))
        graph.replay()
        assert (out[1][:, 0] == -1).tolist() == now
        assert torch.equal(out[0], weights * ~padding[:, None])


def identity_of(hidden, weights, ids, num_experts):
    """Tokens times the weights of their identity experts; others may be NaN."""
    identity = ids >= num_experts
    hidden = torch.where(identity.any(1, keepdim=True), hidden, 0)
    slots = Bounded.exactly(hidden[:, None].expand(-1, ids.shape[1], -1))
    return slots.weighted_sum(weights * identity).rounded(hidden.dtype)


@pytest.mark.kernel
@given(
    routing=routings(),
    hidden_size=st.sampled_from(HIDDEN),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    skipped_id=st.sampled_from((0, -1)),
)
def test_identity_experts_return_their_input(routing, hidden_size, dtype, skipped_id, device):
    """All of it, also where no power of two divides H; tokens without them are not read."""
    weights, ids = routing
    weights = weights.abs().clamp(min=0.1)
    hidden = torch.randn(ids.shape[0], hidden_size).to(dtype)
    hidden[~(ids >= E).any(-1)] = torch.nan
    before = [x.clone() for x in (hidden, weights, ids)]
    new_weights, new_ids, out = zero_experts(
        hidden.to(device), weights.to(device), ids.to(device), E, skipped_id=skipped_id
    )
    identity = ids >= E
    assert torch.equal(new_ids.cpu(), torch.where(identity, skipped_id, ids))
    assert torch.equal(new_weights.cpu(), torch.where(identity, 0.0, weights.float()))
    plain = reference.zero_experts(hidden, weights, ids, E, skipped_id)[2]
    assert_matches_reference(out.cpu(), identity_of(hidden, weights, ids, E), plain)
    for a, b in zip((hidden, weights, ids), before, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.kernel
def test_strided_tokens_of_identity_experts(device):
    hidden = torch.randn(8, 5, device=device).t()
    ids = torch.tensor([[0, E]] * 5, dtype=torch.int32, device=device)
    weights = torch.full((5, 2), 0.5, device=device)
    assert torch.equal(zero_experts(hidden, weights, ids, E)[2], hidden * 0.5)


def test_identity_experts_in_a_layer(device):
    """Experts and identity experts together are the sum over all slots."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 16, generator=g).to(device)
    w1 = (torch.randn(4, 24, 16, generator=g) / 4).to(device)
    w2 = (torch.randn(4, 16, 12, generator=g) / 4).to(device)
    logits = torch.randn(9, 6, generator=g).to(device)
    weights, ids = moe_ops.fused_topk(x, logits, 3, False)
    for skipped_id in (0, -1):
        new_weights, new_ids, out = zero_experts(x, weights, ids, 4, skipped_id=skipped_id)
        out = out + moe_ops.fused_experts(x, w1, w2, new_weights, new_ids)
        expected = moe_ops.fused_experts(x, w1, w2, weights, ids)  # skips ids above 3
        expected = expected + torch.where(ids >= 4, weights, 0.0).sum(-1, keepdim=True) * x
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_shared_experts": -1}, ValueError, "num_shared_experts must be in 0..4096, got -1"),
        ({"per_expert_scale": torch.ones(3)}, ValueError, r"shape\[0\] must be num_experts"),
        ({"per_expert_scale": torch.ones(E).int()}, TypeError, "per_expert_scale must have a dty"),
        ({"per_expert_scale": torch.ones(E, 1)}, ValueError, "per_expert_scale must have 1 axes"),
        ({"per_expert_scale": torch.ones(E, device="meta")}, ValueError, "must be on the device"),
        ({"is_padding": torch.ones(4)}, TypeError, "is_padding must have a dtype"),
        ({"is_padding": torch.ones(3, dtype=torch.bool)}, ValueError, "must have the 4 tokens"),
        ({"topk_ids": torch.zeros(4, 3, dtype=torch.int32)}, ValueError, "topk_weights.shape"),
    ],
)
def test_errors(changes, error, message):
    ids = torch.zeros(4, 2, dtype=torch.int32)
    arguments = {"topk_weights": torch.ones(4, 2), "topk_ids": ids, "num_experts": E, **changes}
    with pytest.raises(error, match=message):
        adjust_routing(**arguments)


@pytest.mark.parametrize(
    ("hidden", "error", "message"),
    [
        (torch.zeros(3, 8), ValueError, "must have the 3 tokens"),
        (torch.zeros(4, 8, dtype=torch.int32), TypeError, "hidden_states must have a dtype"),
        (torch.zeros(4), ValueError, "hidden_states must have 2 axes"),
    ],
)
def test_errors_of_identity_experts(hidden, error, message):
    with pytest.raises(error, match=message):
        zero_experts(hidden, torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int32), E)
