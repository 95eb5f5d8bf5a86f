"""What holds for every layer, scheme, activation and format, whatever its numbers are."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st
from modular import EXPERTS, Setup, roundings, setup
from strategies import layers
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ops
from moe_ops import FusedMoEQuantConfig
from moe_ops.testing import assert_layer_matches, bounded_oracle, oracle, reference_experts

MODULAR = tuple(e for e in EXPERTS if not e.is_monolithic())
kernel = pytest.mark.kernel
experts_of = st.sampled_from(MODULAR)
ROWWISE = tuple(  # a row's result does not depend on the other rows
    name
    for name, s in moe_ops.SCHEMES.items()
    if s.activation is None or s.activation.static or not s.activation.per_tensor
)


def check(s: Setup, actual):
    """``actual`` is the layer, within the budget of a reference."""
    where = roundings(type(s.kernel.fused_experts), s.problem)
    reference = reference_experts(s.problem, s.inputs, s.config, where)
    exact = bounded_oracle(s.problem, s.exact, s.config, where)
    assert_layer_matches(actual.cpu(), exact, reference.cpu())


def with_experts(s: Setup, index, expert_map=None) -> Setup:
    """The setup with the local experts ``index`` of its own, in that order."""

    def take(t):
        return None if t is None else t[index]

    names = moe_ops.scheme.TENSORS
    given = dict(zip(names, s.config.tensors, strict=True))
    mine = {n: t if n.startswith("a") else take(t) for n, t in given.items()}
    config = FusedMoEQuantConfig(s.config.scheme, **mine)
    inputs, exact = (
        i._replace(w1=i.w1[index], w2=i.w2[index], w1_bias=take(i.w1_bias),
                   w2_bias=take(i.w2_bias), expert_map=expert_map)
        for i in (s.inputs, s.exact)
    )  # fmt: skip
    problem = s.problem.with_(num_local_experts=len(index) if expert_map is not None else None)
    # A kernel for that many experts, around the weights given here.
    fresh = setup(problem, type(s.kernel.fused_experts), inputs.w1.device)
    part = fresh.kernel.fused_experts
    part.quant_config = config
    return Setup(problem, fresh.kernel, inputs, config, exact)


@kernel
@given(problem=layers(), experts=experts_of)
def test_any_layer(problem, experts, device):
    s = setup(problem, experts, device)
    check(s, s.apply())


@kernel
@given(problem=layers(), seed=st.integers(0, 99))
def test_standard_is_batched(problem, seed, device):
    """Both are within the budget that their own roundings set, also of the other's."""
    one = setup(problem, moe_ops.pipeline.TritonExperts, device, seed=seed)
    other = setup(problem, moe_ops.pipeline.BatchedTritonExperts, device, seed=seed)
    check(one, one.apply())
    check(other, other.apply())
    # One product for the rows of an expert, in slot order; router weights on the input are
    # rounded elsewhere where rows are not quantized. Kernels may cut other tiles.
    on_references = not (HAS_CUDA or INTERPRETED)
    same = not problem.on_input or moe_ops.get_scheme(problem.scheme).activation is not None
    if on_references and same and problem.scheme in ROWWISE:
        assert torch.equal(one.apply(), other.apply())


@kernel
@given(problem=layers(), experts=experts_of, seed=st.integers(0, 99))
def test_permuting_tokens_permutes_outputs(problem, experts, seed, device):
    s = setup(problem, experts, device)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(problem.num_tokens, generator=generator).to(device)
    x, _, _, weights, ids, *_ = s.inputs
    actual = s.apply(hidden_states=x[order], topk_weights=weights[order], topk_ids=ids[order])
    back = torch.empty_like(actual)
    back[order] = actual
    check(s, back)


@kernel
@given(problem=layers(), experts=experts_of, seed=st.integers(0, 99))
def test_relabelling_experts_changes_nothing(problem, experts, seed, device):
    """Every expert moves to another place, weights and scales with it."""
    s = setup(problem.with_(num_local_experts=None), experts, device)
    generator = torch.Generator().manual_seed(seed)
    place = torch.randperm(problem.num_experts, generator=generator).to(device)
    moved = with_experts(s, torch.argsort(place))
    ids = s.inputs.topk_ids
    known = (ids >= 0) & (ids < problem.num_experts)
    new = torch.where(known, place[torch.where(known, ids, 0).long()].int(), ids)
    actual = moved.apply(topk_ids=new)
    check(s, actual)


@kernel
@given(problem=layers(schemes=ROWWISE), experts=experts_of, seed=st.integers(0, 99))
def test_two_maps_add_to_the_whole(problem, experts, seed, device):
    """Ranks that share the experts: each within its budget, and together the layer."""
    s = setup(problem.with_(num_local_experts=None), experts, device)
    E = problem.num_experts
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(E, generator=generator)
    total = torch.zeros(problem.num_tokens, problem.hidden_size, dtype=torch.float64)
    for index in (order[: E // 2], order[E // 2 :]):
        if not len(index):
            continue
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[index] = torch.arange(len(index), dtype=torch.int32)
        part = with_experts(s, index.to(device), expert_map.to(device))
        actual = part.apply()
        check(part, actual)
        total += oracle(part.problem, part.exact)
    torch.testing.assert_close(total, oracle(s.problem, s.exact))


@kernel
@given(problem=layers(), experts=experts_of)
def test_what_is_not_used_has_no_influence(problem, experts, device):
    """Tokens, router weights and experts without a slot, poisoned; repeated calls agree."""
    s = setup(problem.with_(routing="holes"), experts, device)
    ids, expert_map = s.inputs.topk_ids, s.inputs.expert_map
    known = (ids >= 0) & (ids < problem.num_experts)
    local = torch.where(known, ids, 0).long()
    if expert_map is not None:
        local = expert_map[local].long()
    used = known & (local >= 0)
    expected = s.apply()
    assert torch.equal(s.apply(), expected)
    x, weights = s.inputs.hidden_states, s.inputs.topk_weights
    x = torch.where(used.any(1, keepdim=True), x, torch.nan)
    weights = torch.where(used, weights, torch.nan)
    actual = s.apply(hidden_states=x, topk_weights=weights)
    assert torch.equal(actual, expected) and actual.isfinite().all()
    idle = sorted(set(range(len(s.inputs.w1))) - set(local[used].tolist()))
    if problem.scheme == "unquantized" and experts is not moe_ops.pipeline.NaiveBatchedExperts:
        w1, w2 = s.inputs.w1.clone(), s.inputs.w2.clone()
        w1[idle] = w2[idle] = torch.nan
        assert torch.equal(s.apply(w1=w1, w2=w2), expected)


@settings(max_examples=max(4, settings().max_examples // 4))  # each compiles anew
@given(problem=layers(), experts=experts_of)
def test_eager_is_compiled(problem, experts, device):
    """Dynamo's graph; `test_modular_compile` has AOTAutograd's, which takes twice as long."""
    torch._dynamo.reset()
    s = setup(problem, experts, device)
    compiled = torch.compile(s.apply, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(), s.apply())


@given(problem=layers(), experts=experts_of)
def test_fake_is_real(problem, experts, device):
    """Shape, dtype, strides and device, without computing."""
    s = setup(problem, experts, device)
    real = s.apply()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def fake(t):
            return mode.from_tensor(t) if isinstance(t, torch.Tensor) else t

        part = s.kernel.fused_experts
        part.quant_config = torch.utils._pytree.tree_map(fake, s.config)
        result = s.apply(**{n: fake(t) for n, t in s.arguments().items()})
    for fact in ("shape", "dtype", "device"):
        assert getattr(result, fact) == getattr(real, fact)
    assert result.stride() == real.stride()
