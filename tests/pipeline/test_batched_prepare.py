"""`BatchedPrepareAndFinalize`: rows, scales and counts of this rank's experts, and the way back."""

import pytest
import torch
from modular import setup

import moe_ops
from moe_ops import FusedMoEQuantConfig, ops
from moe_ops.pipeline import BatchedPrepareAndFinalize
from moe_ops.pipeline.batched_prepare import mapped_ids
from moe_ops.pipeline.checking import check_none_dropped
from moe_ops.testing import Problem, make_inputs

pytestmark = pytest.mark.kernel
QUANTIZED = tuple(n for n, s in moe_ops.SCHEMES.items() if s.activation is not None)
T, E, K, H = 9, 6, 2, 160
DELEGATE = moe_ops.pipeline.TopKWeightAndReduceDelegate()


def inputs_of(device, **changes):
    return make_inputs(Problem(T, E, K, H, 24, torch.bfloat16).with_(**changes), device)


def prepared(part, inputs, scheme="unquantized", on_input=False, defer=False, **tensors):
    x, _, _, weights, ids, expert_map, _, _ = inputs
    config = FusedMoEQuantConfig(scheme, **tensors)
    return part.prepare(x, weights, ids, E, expert_map, on_input, config, defer)


def slots_of(ids, experts):
    """For each expert its slots, in slot order."""
    flat = ids.flatten().tolist()
    return [[s for s, e in enumerate(flat) if e == expert] for expert in experts]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("routing", ["uniform", "duplicates", "holes", "one_expert"])
def test_rows_of_a_rank(rank, routing, device):
    """One row a slot, in slot order; the rest is zeros."""
    inputs = inputs_of(device, routing=routing)
    part = BatchedPrepareAndFinalize(T * K, 2, 3, rank)
    result = prepared(part, inputs)
    expected = torch.zeros(2, T * K, H, dtype=torch.bfloat16, device=device)
    lists = slots_of(inputs.topk_ids, (2 * rank, 2 * rank + 1))
    for e, slots in enumerate(lists):
        for row, slot in enumerate(slots):
            expected[e, row] = inputs.hidden_states[slot // K]
    assert torch.equal(result.a1q, expected) and result.a1q_scale is None
    meta = result.expert_tokens_meta
    assert meta.expert_num_tokens.dtype == torch.int32
    assert meta.expert_num_tokens.tolist() == [len(slots) for slots in lists]
    assert meta.num_dropped.tolist() == [0] and meta.expert_num_tokens_cpu is None
    assert result.topk_ids is None and result.topk_weights is None


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantized_rows(scheme, on_input, device):
    """Bit by bit the quantization of each expert's rows, zeros in padding."""
    inputs = inputs_of(device, routing="holes")
    quant = moe_ops.get_scheme(scheme).activation
    given = quant.static or quant.global_scale
    static = torch.tensor([0.01], device=device) if given else None
    name = "gscale" if quant.global_scale else "scale"
    scales = {f"a{i}_{name}": static for i in (1, 2)} if given else {}
    result = prepared(BatchedPrepareAndFinalize(T * K, E, 1, 0), inputs, scheme, on_input, **scales)
    assert result.a1q_scale.shape == quant.batched_scale_shape(E, T * K, H)
    for e, slots in enumerate(slots_of(inputs.topk_ids, range(E))):
        n = len(slots)
        rows = inputs.hidden_states[[s // K for s in slots]].float()
        if on_input:
            rows = rows * inputs.topk_weights.flatten()[slots, None]
        q, scale = ops.moe_quantize(rows, static, None, None, None, 0, quant.key)
        assert torch.equal(result.a1q[e, :n].view(torch.uint8), q.view(torch.uint8))
        assert (result.a1q[e, n:].float() == 0).all()
        if quant.per_tensor:
            assert n == 0 or torch.equal(result.a1q_scale[e].flatten(), scale.flatten())
        else:
            assert torch.equal(result.a1q_scale[e, :n].float(), scale.float())
            assert (result.a1q_scale[e, n:].float() == 0).all()
    assert result.a1q_scale.float().isfinite().all()


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_block128"])
def test_router_weights_on_the_input_change_nothing_of_the_callers(scheme, device):
    inputs = inputs_of(device)
    kept = inputs.hidden_states.clone(), inputs.topk_weights.clone()
    part = BatchedPrepareAndFinalize(T * K, E, 1, 0)
    rows = prepared(part, inputs, scheme, on_input=True).a1q
    assert torch.equal(inputs.hidden_states, kept[0]) and torch.equal(inputs.topk_weights, kept[1])
    if scheme == "unquantized":
        slots = slots_of(inputs.topk_ids, [0])[0]
        x = inputs.hidden_states[[s // K for s in slots]].float()
        wanted = (x * inputs.topk_weights.flatten()[slots, None]).bfloat16()
        assert torch.equal(rows[0, : len(slots)], wanted)


def test_deferred_quantization_leaves_rows(device):
    inputs = inputs_of(device)
    part = BatchedPrepareAndFinalize(T * K, E, 1, 0)
    deferred = prepared(part, inputs, "fp8_channel", defer=True)
    assert torch.equal(deferred.a1q, prepared(part, inputs).a1q) and deferred.a1q_scale is None


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_rows_that_do_not_fit(capacity, device):
    """Those of the first slots stay; the others are counted and add nothing."""
    inputs = inputs_of(device, routing="one_expert")
    part = BatchedPrepareAndFinalize(capacity, E, 1, 0)
    result = prepared(part, inputs)
    meta = result.expert_tokens_meta
    assert meta.expert_num_tokens.tolist() == [capacity] * K + [0] * (E - K)
    assert meta.num_dropped.tolist() == [K * (T - capacity)]
    assert torch.equal(result.a1q[0], inputs.hidden_states[:capacity])
    rows = torch.ones_like(result.a1q)
    out = part.finalize(rows, inputs.topk_weights, inputs.topk_ids, True, DELEGATE)
    assert (out[:capacity] == K).all() and (out[capacity:] == 0).all()
    with moe_ops.checking(), pytest.raises(ValueError, match=f"got {capacity}: .* did not fit"):
        prepared(part, inputs)
    with moe_ops.checking(), pytest.raises(ValueError, match="got 7: 1 rows did not fit"):
        check_none_dropped(torch.tensor([0, 1], dtype=torch.int32), 7)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("scheme", ["unquantized", "int8_channel", "fp8_tensor"])
def test_ranks_add_to_the_whole(scheme, mapped, device):
    """Each rank with its experts, named by its number or by a map: what they return adds up."""
    experts = moe_ops.pipeline.BatchedTritonExperts
    p = Problem(T, E, K, H, 24, torch.float32, scheme=scheme)
    s = setup(p, experts, device)
    whole, parts = s.apply(), torch.zeros(T, H, device=device)
    per_expert = {n: getattr(s.config, n) for n in ("w1_scale", "w2_scale")}
    for rank in range(3):
        mine = slice(2 * rank, 2 * rank + 2)
        scales = {n: None if t is None else t[mine] for n, t in per_expert.items()}
        config = FusedMoEQuantConfig(scheme, **scales)
        local = setup(p.with_(num_local_experts=2), experts, device).kernel.fused_experts
        kernel = moe_ops.FusedMoEKernel(
            BatchedPrepareAndFinalize(T * K, 2, 3, rank),
            type(local)(local.moe_config, config, T * K, 3),
        )
        x, w1, w2, weights, ids, *_ = s.inputs
        expert_map = None
        if mapped:
            expert_map = torch.full((E,), -1, dtype=torch.int32, device=device)
            expert_map[mine] = torch.arange(2, dtype=torch.int32, device=device)
        parts += kernel.apply(x, w1[mine], w2[mine], weights, ids, expert_map=expert_map)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_expert_map_names_the_experts_of_a_rank(rank, device):
    """Placed anywhere: the rows are those of the experts that the map holds, in its order."""
    inputs = inputs_of(device, num_local_experts=3, routing="holes")
    part = BatchedPrepareAndFinalize(T * K, 3, 2, rank)
    result = prepared(part, inputs)
    where = inputs.expert_map.tolist()
    lists = slots_of(inputs.topk_ids, [where.index(e) for e in range(3)])
    assert result.expert_tokens_meta.expert_num_tokens.tolist() == [len(s) for s in lists]
    for e, slots in enumerate(lists):
        wanted = inputs.hidden_states[[s // K for s in slots]]
        assert torch.equal(result.a1q[e, : len(slots)], wanted)
    ids = inputs.topk_ids.flatten().tolist()
    known = [where[e] + 3 * rank if 0 <= e < E and where[e] >= 0 else -1 for e in ids]
    assert result.topk_ids.flatten().tolist() == known
    rows = torch.ones_like(result.a1q)
    out = part.finalize(rows, inputs.topk_weights, result.topk_ids, False, DELEGATE)
    weights = torch.where(result.topk_ids >= 0, inputs.topk_weights, 0.0)
    expected = weights[:, 0] + weights[:, 1]
    assert torch.equal(out, expected[:, None].expand(T, H).bfloat16())


def test_wide_ids_are_not_narrowed_into_range(device):
    """An id or a place of 2**32 + 1 is out of range wherever int32 comes out, and not 1."""
    wide = torch.tensor([[2**32 + 1, 0], [-(2**32), 2]], device=device)
    ones = torch.ones(2, 2, device=device)
    routed = moe_ops.select_experts(
        ones, torch.ones(2, 3, device=device), 2, False, False,
        custom_routing_function=lambda *_: (ones, wide),
    )  # fmt: skip
    assert routed.topk_ids.tolist() == [[2**31 - 1, 0], [-(2**31), 2]]
    expert_map = torch.tensor([2**32 + 1, 1, 0], device=device)
    ids = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=device)
    assert mapped_ids(ids, expert_map, 0, 2).tolist() == [[-1, 1], [0, -1]]
    local = moe_ops.parallel.remap_topk_to_local(ids, expert_map, torch.int32)
    assert local.tolist() == [[2**31 - 1, 1], [0, 2**31 - 1]]


def test_what_the_interface_tells():
    part = BatchedPrepareAndFinalize(7, 2, 3, 1)
    assert part.max_num_tokens_per_rank() == 7 and part.num_dispatchers() == 3
    assert part.topk_indices_dtype() is None and not part.output_is_reduced()
    assert part.activation_format is moe_ops.pipeline.FusedMoEActivationFormat.BatchedExperts
    assert part.activation_format.value == ("batched_experts",) and not part.supports_async()
    beside = moe_ops.pipeline.AsyncPrepareAndFinalize(part)
    assert beside.max_num_tokens_per_rank() == 7 and beside.num_dispatchers() == 3
    assert beside.activation_format is part.activation_format and beside.supports_async()
    meta = moe_ops.pipeline.ExpertTokensMetadata.make_from_list([3, 0, 4], "cpu")
    assert meta.expert_num_tokens.tolist() == meta.expert_num_tokens_cpu.tolist() == [3, 0, 4]
    assert meta.expert_num_tokens.dtype == torch.int32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda i: {"hidden_states": i.hidden_states[0]}, ValueError, "a1 must have 2 axes"),
        (lambda i: {"hidden_states": i.hidden_states[1:]}, ValueError, "must have the 8 tokens"),
        (lambda i: {"topk_ids": i.topk_ids.float()}, TypeError, "topk_ids must have a dtype"),
    ],
)
def test_errors(change, error, message):
    inputs = inputs_of("cpu")
    with pytest.raises(error, match=message):
        prepared(BatchedPrepareAndFinalize(9, E, 1, 0), inputs._replace(**change(inputs)))
