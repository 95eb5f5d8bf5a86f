"""The whole Standard pipeline: right, for every setting, whatever the padding holds."""

import pytest
import torch
from checked_experts import check_experts
from hypothesis import given
from strategies import ACTIVATIONS, DTYPES, problems

import moe_ops
from moe_ops.testing import (
    ROUTINGS,
    Problem,
    assert_matches_reference,
    bounded_oracle,
    call,
    make_inputs,
    reference_experts,
)

pytestmark = pytest.mark.kernel


@given(problem=problems())
def test_any_problem(problem, device):
    check_experts(problem, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_every_routing(dtype, routing, num_tokens, device):
    check_experts(Problem(num_tokens=num_tokens, dtype=dtype, routing=routing, top_k=3), device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("on_input", [False, True])
def test_every_activation(activation, on_input, device):
    problem = Problem(activation=activation, has_bias=True, on_input=on_input, top_k=3)
    check_experts(problem, device)


@pytest.mark.parametrize("top_k", [1, 8])
def test_one_expert_and_all_experts(top_k, device):
    check_experts(Problem(num_experts=top_k, top_k=top_k), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_weights_need_no_copy(dtype, device):
    """Weights that are contiguous along the other axis, as gpt-oss stores them."""
    problem = Problem(dtype=dtype, has_bias=True)
    inputs = make_inputs(problem, device)
    turned = inputs._replace(
        w1=inputs.w1.transpose(1, 2).contiguous().transpose(1, 2),
        w2=inputs.w2.transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert turned.w1.stride(-2) == 1
    actual = call(moe_ops.fused_experts, problem, turned)
    assert_matches_reference(
        actual, bounded_oracle(problem, inputs), reference_experts(problem, inputs)
    )


def test_strided_tokens(device):
    problem = Problem()
    inputs = make_inputs(problem, device)
    wide = torch.full((problem.num_tokens, 2 * problem.hidden_size), torch.nan, device=device)
    wide[:, : problem.hidden_size] = inputs.hidden_states
    strided = inputs._replace(hidden_states=wide[:, : problem.hidden_size])
    actual = call(moe_ops.fused_experts, problem, strided)
    torch.testing.assert_close(actual, call(moe_ops.fused_experts, problem, inputs), rtol=0, atol=0)


def test_skipped_tokens_and_experts_may_hold_nan(device):
    """Nothing of a skipped slot, of an expert without tokens or of padding is read."""
    problem = Problem(routing="holes", num_experts=9, num_local_experts=4, top_k=3, has_bias=True)
    inputs = make_inputs(problem, device)
    expected = call(moe_ops.fused_experts, problem, inputs)
    local = inputs.expert_map.tolist()
    ids = inputs.topk_ids.tolist()
    used = {local[e] for row in ids for e in row if 0 <= e < 9 and local[e] >= 0}
    idle = [t for t, row in enumerate(ids) if not any(0 <= e < 9 and local[e] >= 0 for e in row)]
    assert idle, "the problem must hold a token without experts"
    for e in set(range(4)) - used:
        inputs.w1[e] = inputs.w2[e] = torch.nan
    inputs.hidden_states[idle] = torch.nan
    poisoned = torch.where(inputs.topk_ids < 0, torch.nan, inputs.topk_weights)
    actual = call(moe_ops.fused_experts, problem, inputs._replace(topk_weights=poisoned))
    assert torch.equal(actual, expected)
    assert (actual[idle] == 0).all()


def test_permuting_tokens_permutes_outputs(device):
    problem = Problem(num_tokens=50, dtype=torch.float32)
    inputs = make_inputs(problem, device)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1)).to(device)
    moved = inputs._replace(
        hidden_states=inputs.hidden_states[order],
        topk_weights=inputs.topk_weights[order],
        topk_ids=inputs.topk_ids[order],
    )
    actual = call(moe_ops.fused_experts, problem, moved)
    expected = call(moe_ops.fused_experts, problem, inputs)[order]
    exact = bounded_oracle(problem, inputs)[order.cpu()]
    assert_matches_reference(actual.cpu(), exact, expected.cpu())


def test_relabelling_experts_changes_nothing(device):
    problem = Problem(num_tokens=50)
    inputs = make_inputs(problem, device)
    label = torch.randperm(8, generator=torch.Generator().manual_seed(1)).to(device)
    w1, w2 = torch.empty_like(inputs.w1), torch.empty_like(inputs.w2)
    w1[label], w2[label] = inputs.w1, inputs.w2
    moved = inputs._replace(w1=w1, w2=w2, topk_ids=label[inputs.topk_ids.long()].int())
    actual = call(moe_ops.fused_experts, problem, moved)
    expected = call(moe_ops.fused_experts, problem, inputs)
    assert_matches_reference(actual.cpu(), bounded_oracle(problem, inputs), expected.cpu())


def test_two_expert_maps_add_to_the_whole(device):
    problem = Problem(num_tokens=50, has_bias=True)
    inputs = make_inputs(problem, device)
    parts = []
    for chosen in ([0, 2, 3], [1, 4, 5, 6, 7]):
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[chosen] = torch.arange(len(chosen), dtype=torch.int32)
        part = inputs._replace(
            w1=inputs.w1[chosen],
            w2=inputs.w2[chosen],
            w1_bias=inputs.w1_bias[chosen],
            w2_bias=inputs.w2_bias[chosen],
            expert_map=expert_map.to(device),
        )
        parts.append(call(moe_ops.fused_experts, problem, part))
    whole = call(moe_ops.fused_experts, problem, inputs)
    assert_matches_reference(
        (parts[0] + parts[1]).cpu(), bounded_oracle(problem, inputs), whole.cpu()
    )


def test_repeated_calls_are_bitwise_equal(device):
    problem = Problem(num_tokens=100, dtype=torch.bfloat16, routing="skewed")
    inputs = make_inputs(problem, device)
    first = call(moe_ops.fused_experts, problem, inputs)
    assert all(torch.equal(first, call(moe_ops.fused_experts, problem, inputs)) for _ in range(3))


def test_fused_moe_is_routing_then_experts(device):
    problem = Problem(top_k=3)
    inputs = make_inputs(problem, device)
    logits = torch.randn(problem.num_tokens, 8, generator=torch.Generator().manual_seed(3))
    logits = logits.to(device)
    x, w1, w2 = inputs[:3]
    for renormalize, scoring in ((True, "sigmoid"), (False, "softmax")):
        weights, ids = moe_ops.fused_topk(x, logits, 3, renormalize, scoring_func=scoring)
        actual = moe_ops.fused_moe(x, w1, w2, logits, 3, renormalize, scoring_func=scoring)
        assert torch.equal(actual, moe_ops.fused_experts(x, w1, w2, weights, ids))
