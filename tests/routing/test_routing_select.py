"""select_experts: which method it takes, what follows it, and that all of it compiles whole."""

import pytest
import torch
from routing_oracle import Call, assert_routed, chosen, exact_scores, make_logits
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops.parallel import eplb_map_to_physical_and_record
from moe_ops.routing import select_experts, simulate, zero_experts

E, K, H = 16, 4, 24


def sample(tokens, device, experts=E):
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(tokens)).to(device)
    return x, make_logits("random", tokens, experts, tokens).to(device)


def last_experts(hidden_states, gating_output, topk, renormalize):
    """A router of a user: the last experts, in bf16 and int64."""
    tokens, experts = gating_output.shape
    ids = torch.arange(experts - topk, experts, device=gating_output.device).expand(tokens, -1)
    return torch.ones(tokens, topk, dtype=torch.bfloat16, device=ids.device), ids


BIAS = torch.linspace(-0.2, 0.2, E)
METHODS = {
    "softmax": (dict(scoring_func="softmax"), Call(K, True, "softmax", None, 2.5)),
    "bias": (
        dict(scoring_func="sqrtsoftplus", e_score_correction_bias=BIAS),
        Call(K, True, "sqrtsoftplus", BIAS, 2.5),
    ),
    "groups": (
        dict(use_grouped_topk=True, num_expert_group=4, topk_group=2, scoring_func="sigmoid",
             e_score_correction_bias=BIAS),
        Call(K, True, "sigmoid", BIAS, 2.5, 4, 2),
    ),
    "groups without bias": (
        dict(use_grouped_topk=True, num_expert_group=4, topk_group=2),
        Call(K, True, "softmax", None, 2.5, 4, 2),
    ),
    "one group": (
        dict(use_grouped_topk=True, num_expert_group=1, topk_group=1),
        Call(K, True, "softmax", None, 2.5),
    ),
}  # fmt: skip


def select(x, logits, **options):
    """With K experts of a token, renormalized, scaled by 2.5, where not said otherwise."""
    moved = {n: o.to(x.device) if torch.is_tensor(o) else o for n, o in options.items()}
    common = {"use_grouped_topk": False, "renormalize": True, "routed_scaling_factor": 2.5}
    return select_experts(x, logits, K, **{**common, **moved})


@pytest.mark.kernel
@pytest.mark.parametrize("name", METHODS)
def test_every_method_scales_once(name, device):
    options, call = METHODS[name]
    x, logits = sample(6, device)
    weights, ids, result = select(x, logits, **options)
    assert_routed(logits.cpu(), call, weights, ids)
    torch.testing.assert_close(weights.sum(-1), torch.full((6,), 2.5, device=device))
    assert result is None


def test_a_custom_function_is_scaled_once_too(device):
    x, logits = sample(3, device)
    weights, ids, _ = select(x, logits, custom_routing_function=last_experts)
    assert weights.dtype == torch.float32 and (weights == 2.5).all()
    assert ids.dtype == torch.int32 and ids.tolist() == [[12, 13, 14, 15]] * 3


def test_groups_come_before_a_custom_function(device):
    x, logits = sample(3, device)
    options, call = METHODS["groups"]
    result = select(x, logits, custom_routing_function=last_experts, **options)
    assert_routed(logits.cpu(), call, *result[:2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, None])
def test_indices_type(dtype, device):
    x, logits = sample(3, device)
    for options in ({}, {"custom_routing_function": last_experts}, METHODS["groups"][0]):
        assert select(x, logits, indices_type=dtype, **options)[1].dtype == (dtype or torch.int32)


def test_identity_experts(device):
    """LongCat: softmax plus bias over all logits, not renormalized, the last ones identity."""
    x, logits = sample(9, device)
    options = dict(e_score_correction_bias=BIAS, renormalize=False, routed_scaling_factor=6.0)
    weights, ids, out = select(
        x, logits, zero_expert_num=6, zero_expert_type="identity", global_num_experts=10, **options
    )
    plain = select(x, logits, **options)
    for a, b in zip((weights, ids, out), zero_experts(x, *plain[:2], 10), strict=True):
        assert torch.equal(a, b)
    assert (ids < 10).all() and out.count_nonzero()


def test_shared_experts_follow_with_weight_one(device):
    x, logits = sample(5, device)
    weights, ids, _ = select(x, logits, num_fused_shared_experts=2)
    plain_weights, plain_ids, _ = select(x, logits)
    assert torch.equal(ids[:, :K], plain_ids) and torch.equal(weights[:, :K], plain_weights)
    assert ids[:, K:].tolist() == [[E, E + 1]] * 5 and (weights[:, K:] == 1).all()


def replicas(device):
    """Expert e has replicas e and E + e."""
    first = torch.arange(E, device=device)
    maps = {
        "logical_to_physical_map": torch.stack((first, E + first), 1),
        "logical_replica_count": torch.full((E,), 2, device=device),
        "expert_load_view": torch.zeros(2 * E, dtype=torch.int32, device=device),
    }
    return {"enable_eplb": True, "global_num_experts": 2 * E, **maps}


@pytest.mark.parametrize("name", METHODS)
def test_balancing_maps_and_counts(name, device):
    x, logits = sample(20, device)
    options, eplb = METHODS[name][0], replicas(device)
    logical = select(x, logits, **options)
    physical = select(x, logits, indices_type=torch.int64, **options, **eplb)
    count = torch.zeros_like(eplb["expert_load_view"])
    expected = eplb_map_to_physical_and_record(
        logical.topk_ids, count, eplb["logical_to_physical_map"], eplb["logical_replica_count"]
    )
    assert physical.topk_ids.dtype == torch.int64
    assert torch.equal(physical.topk_ids, expected.long())
    assert torch.equal(physical.topk_weights, logical.topk_weights)
    assert torch.equal(physical.topk_ids % E, logical.topk_ids.long())
    assert torch.equal(eplb["expert_load_view"], count) and count.sum() == 20 * K


def test_pinned_vector_of_balancing(device):
    def given(hidden_states, gating_output, topk, renormalize):
        ids = torch.tensor([[0, 1], [2, 3], [0, 2]], device=device)
        return torch.ones(3, 2, device=device), ids

    x, logits = torch.zeros(3, H, device=device), torch.zeros(3, 4, device=device)
    load = torch.zeros(8, dtype=torch.int32, device=device)
    _, ids, _ = select_experts(
        x, logits, 2, False, True, custom_routing_function=given, enable_eplb=True,
        expert_load_view=load, logical_replica_count=torch.full((4,), 2, device=device),
        logical_to_physical_map=torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7]], device=device),
    )  # fmt: skip
    assert ids.tolist() == [[0, 1], [6, 7], [0, 2]]
    assert load.tolist() == [2, 1, 1, 0, 0, 0, 1, 1]


def everything(x, logits, words, bias, load, l2p, count):
    """Every router and all that follows, in one graph."""
    kinds = [
        select_experts(x, logits, K, False, True, scoring_func=f, routed_scaling_factor=2.5,
                       e_score_correction_bias=bias, num_fused_shared_experts=1)
        for f in moe_ops.routing.SCORING_FUNCS
    ]  # fmt: skip
    kinds += [
        select_experts(x, logits, K, True, True, 2, 4, None, "sigmoid", 2.5, bias, torch.int64),
        select_experts(x, logits, K, False, True, zero_expert_num=6, zero_expert_type="identity"),
        select_experts(x, logits, K, False, True, custom_routing_function=last_experts),
        select_experts(x, logits, 1, False, False,
                       custom_routing_function=moe_ops.routing.llama4_routing),
        select_experts(x, logits, 2, False, False,
                       custom_routing_function=moe_ops.routing.sparsemixer),
        select_experts(x, logits, K, False, True, enable_eplb=True, expert_load_view=load,
                       logical_to_physical_map=l2p, logical_replica_count=count),
        moe_ops.routing.gemma4_routing(x, logits, K, True, bias),
        moe_ops.routing.hash_topk(x, logits, words, l2p, True),
        moe_ops.routing.adjust_routing(*moe_ops.fused_topk(x, logits, K, True), E,
                                       is_padding=words.bool()),
    ]  # fmt: skip
    return [t for kind in kinds for t in kind if t is not None]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_compilation_for_every_token_count(backend, device):
    torch._dynamo.reset()
    state = replicas(device)
    maps = (state["logical_to_physical_map"], state["logical_replica_count"])
    bias, loads = BIAS.to(device), [state["expert_load_view"], state["expert_load_view"].clone()]
    counter = CompileCounterWithBackend(backend)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend=counter)
        for number, tokens in enumerate((7, 5, 64, 1, 2, 0, 300)):
            arguments = (*sample(tokens, device), torch.arange(tokens, device=device) % 3)
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                actual = compiled(*arguments, bias, loads[0], *maps)
            expected = everything(*arguments, bias, loads[1], *maps)
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert counter.frame_count == 1
    assert torch.equal(*loads) and loads[0].sum() == 379 * K


def test_a_capture_has_what_was_chosen(device):
    """Padding is -1 there; what follows the choice is not seen."""
    x, logits = sample(5, device)
    padding, seen = torch.tensor([False, True, False, False, True], device=device), []
    select(x, logits, is_padding=padding, capture_fn=seen.append, num_fused_shared_experts=1)
    expected = select(x, logits).topk_ids.masked_fill(padding[:, None], -1)
    assert len(seen) == 1 and torch.equal(seen[0], expected)


@pytest.mark.parametrize("name", simulate.STRATEGIES)
def test_simulated_routings_compile(name, device):
    def route(x, logits):
        return select(x, logits, custom_routing_function=simulate.STRATEGIES[name])[1]

    compiled = torch.compile(route, fullgraph=True, dynamic=True, backend="aot_eager")
    ids = compiled(*sample(50, device))
    assert ids.shape == (50, K) and ((ids >= 0) & (ids < E)).all()


def test_what_was_chosen_does_not_depend_on_the_batch(device):
    x, logits = sample(64, device)
    whole = select(x, logits)
    alone = [select(x[t : t + 1], logits[t : t + 1]) for t in range(64)]
    for field in (0, 1):
        assert torch.equal(whole[field], torch.cat([one[field] for one in alone]))
    assert whole.topk_ids.tolist() == chosen(
        exact_scores(logits.cpu(), "softmax"), Call(K, True, "softmax", None, 2.5)
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_grouped_topk": True}, ValueError, "num_expert_group and topk_group must be"),
        ({"use_grouped_topk": True, "num_expert_group": 4}, ValueError, "got 4 and None"),
        ({"indices_type": torch.int16}, TypeError, "indices_type must be one of"),
        ({"enable_eplb": True}, ValueError, "expert_load_view must be a Tensor"),
        ({"zero_expert_num": 4}, ValueError, "zero_expert_type must be one of .*got 'None'"),
        (
            {"zero_expert_num": 16, "zero_expert_type": "identity"},
            ValueError,
            "zero_expert_num must leave at least one other expert",
        ),
        (
            {"zero_expert_num": 4, "zero_expert_type": "identity", "global_num_experts": 16},
            ValueError,
            "global_num_experts must be router_logits.shape",
        ),
        (
            {"enable_eplb": True, "num_fused_shared_experts": 1},
            NotImplementedError,
            "num_fused_shared_experts must be 0 with enable_eplb",
        ),
        (
            {"custom_routing_function": lambda *a: (torch.ones(4, 2), torch.ones(4, 2).int())},
            ValueError,
            "custom_routing_function's k must be top_k = 4, got 2",
        ),
        (
            {"custom_routing_function": lambda *a: (torch.ones(4, 4), torch.ones(4, 4))},
            TypeError,
            "custom_routing_function's ids must have a dtype",
        ),
        (
            {"custom_routing_function": lambda *a: (torch.ones(4, 4).int(),) * 2},
            TypeError,
            "custom_routing_function's weights must have a dtype",
        ),
        ({"custom_routing_function": print}, TypeError, r"must return .* got NoneType"),
    ],
)
def test_errors(changes, error, message):
    with pytest.raises(error, match=message):
        select(torch.zeros(4, H), torch.zeros(4, E), **changes)


class Router(torch.nn.Module):
    """As a layer holds it."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("bias", BIAS.to(device))

    def forward(self, x, logits):
        options = dict(METHODS["groups"][0], e_score_correction_bias=self.bias)
        return tuple(select(x, logits, num_fused_shared_experts=1, **options)[:2])


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, device):
    router, tokens = Router(device), torch.export.Dim.AUTO
    program = torch.export.export(
        router, sample(7, device), dynamic_shapes=({0: tokens}, {0: tokens}), strict=strict
    )
    for count in (7, 30, 2):
        for a, b in zip(
            program.module()(*sample(count, device)), router(*sample(count, device)), strict=True
        ):
            assert torch.equal(a, b)
