"""The layer's options: routing, shared and identity experts, balancing, chunks, sizes, names."""

import inspect
import re
from dataclasses import replace

import pytest
import small_layers
import torch
from checkpoints import Experts, per_expert
from small_layers import E, H, I, K, T, batch, make
from torch import nn

import moe_ops
from moe_ops.inspect.traffic import SAME, WAYS
from moe_ops.parallel.parallel_config import GATHERING_BACKENDS, IMPLEMENTED_BACKENDS
from moe_ops.pipeline.exchange.backends import EXCHANGES, exchange_class


def test_the_signature_names_every_option():
    parameters = inspect.signature(moe_ops.FusedMoE).parameters
    wanted = (
        "num_experts top_k hidden_size intermediate_size params_dtype "
        "reduce_results renormalize use_grouped_topk num_expert_group topk_group "
        "scheme quant_config tp_size ep_size dp_size prefix "
        "custom_routing_function scoring_func routed_scaling_factor e_score_correction_bias "
        "apply_router_weight_on_input "
        "activation enable_eplb num_redundant_experts has_bias is_sequence_parallel "
        "zero_expert_num zero_expert_type expert_mapping n_shared_experts "
    )
    assert set(wanted.split()) <= set(parameters)
    with pytest.raises(TypeError, match="no_such_option"):
        make(no_such_option=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_redundant_experts": 2}, "num_redundant_experts must be 0 without enable_eplb"),
        ({"n_shared_experts": -1}, "n_shared_experts must be at least 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"zero_expert_num": 2}, "zero_expert_type must be one of .*, got 'None'"),
        ({"quant_config": "fp9"}, "scheme must be one of"),
        ({"ep_size": 3, "enable_eplb": True}, "must be a multiple of ep_size"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank must be in 0..1"),
        ({"tp_size": 2, "ep_size": 4}, r"ep_size must be 1, or tp_size \* dp_size = 2"),
        ({"expert_placement_strategy": "random"}, "expert_placement_strategy must be one of"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("rank", range(4))
def test_ranks_of_both_kinds_share_the_experts(rank):
    """The rank among the experts is the one that `FusedMoEParallelConfig.make` derives."""
    layer = make(tp_size=4, tp_rank=rank, ep_size=4)
    made = moe_ops.FusedMoEParallelConfig.make(4, rank, enable_expert_parallel=True)
    alone = make(ep_size=4, ep_rank=rank)
    for config in (alone.moe_parallel_config, made):
        assert layer.moe_parallel_config == config
    assert layer.expert_map.tolist() == alone.expert_map.tolist()
    assert layer.w13_weight.shape == alone.w13_weight.shape == (2, 2 * I, H)
    with pytest.raises(ValueError, match=rf"ep_rank must be .* = {rank}, got {(rank + 1) % 4}"):
        make(tp_size=4, tp_rank=rank, ep_size=4, ep_rank=(rank + 1) % 4)


PARALLEL = moe_ops.FusedMoEParallelConfig
WITHOUT_AN_EXCHANGE = (
    (PARALLEL(dp_size=2), "must divide the ranks that share the layer's experts, 1 of .*, got 2"),
    (
        PARALLEL(dp_size=2, ep_size=3, use_ep=True),
        "must divide the ranks that share the layer's experts, 3 of .*, got 2",
    ),
    (
        PARALLEL(dp_size=2, pcp_size=4, ep_size=4, use_ep=True),
        "must divide the ranks that share the layer's experts, 4 of .*, got 8",
    ),
    (
        PARALLEL(tp_size=2, dp_size=2, ep_size=2, use_ep=True),
        "tp_size must be 1 with dp_size and expert parallelism, .*, got tp_size=2",
    ),
    *(
        (
            PARALLEL(**sizes, use_ep=True, all2all_backend=name),
            f"all2all_backend must be one of .*, got '{name}'",
        )
        for name in moe_ops.parallel.ALL2ALL_BACKENDS
        if name not in IMPLEMENTED_BACKENDS
        for sizes in ({"ep_size": 2}, {"dp_size": 2, "ep_size": 2})
    ),
)


@pytest.mark.parametrize(("parallel", "wrong"), WITHOUT_AN_EXCHANGE)
def test_ranks_that_would_have_to_exchange_tokens(parallel, wrong):
    """Refused where the layer is made, and by whatever chooses or explains a kernel."""
    with pytest.raises(NotImplementedError, match=f"{wrong}$"):
        make(moe_parallel_config=parallel)
    config = replace(make().moe_config, moe_parallel_config=parallel)
    found = moe_ops.explain(config, "unquantized")
    assert found.choice is None
    for row in found.rows:
        assert not row.supported and re.search(f"{wrong}$", row.reason)
    with pytest.raises(NotImplementedError, match=f"(?s)TritonExperts: .*{wrong}"):
        moe_ops.select_kernel(config, "unquantized")


@pytest.mark.parametrize(
    ("backend", "exchange"),
    [
        ("allgather_reducescatter", moe_ops.pipeline.AllGatherPrepareAndFinalize),
        ("naive", moe_ops.pipeline.AllGatherPrepareAndFinalize),
        ("fixed_capacity", moe_ops.pipeline.FixedCapacityPrepareAndFinalize),
        ("alltoall", moe_ops.pipeline.ExactAllToAllPrepareAndFinalize),
    ],
)
@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"sp_size": 2}])
def test_ranks_that_exchange_tokens(backend, exchange, sizes):
    """What is explained is what is built, by the layer too."""
    parallel = PARALLEL(ep_size=2, use_ep=True, all2all_backend=backend, **sizes)
    assert parallel.exchanges_tokens
    layer = make(moe_parallel_config=parallel, max_num_tokens=5)
    found = moe_ops.explain(layer.moe_config, "unquantized")
    assert found.choice == "TritonExperts"
    assert found.prepare_finalize == exchange.__name__
    assert "tokens: of all 2 ranks together" in str(found)
    for kernel in (layer.kernel, moe_ops.select_kernel(layer.moe_config, "unquantized")):
        assert type(kernel.prepare_finalize) is exchange
        assert type(kernel.fused_experts) is moe_ops.pipeline.TritonExperts
    assert layer.kernel.prepare_finalize.max_num_tokens == 5
    if exchange is not moe_ops.pipeline.AllGatherPrepareAndFinalize:
        assert layer.kernel.prepare_finalize.expert_ranks.tolist() == [0] * 4 + [1] * 4
    batched = replace(layer.moe_config, max_num_tokens=8)
    with pytest.raises(NotImplementedError, match="an exchange of tokens .* in the Batched format"):
        moe_ops.select_kernel(batched, "unquantized")
    with pytest.raises(NotImplementedError, match="experts must be modular .* MonolithicExperts"):
        moe_ops.select_kernel(
            layer.moe_config, "unquantized", experts=moe_ops.pipeline.MonolithicExperts
        )
    layer.quant_method.exchange = None
    layer.quant_method = layer.quant_method  # a new state
    with pytest.raises(NotImplementedError, match="maybe_make_prepare_finalize must return"):
        layer(torch.zeros(1, H), torch.zeros(1, E))


def test_every_table_of_backends_has_the_same_names():
    assert set(EXCHANGES) == set(IMPLEMENTED_BACKENDS) == WAYS.keys() | SAME.keys()
    assert (
        set(GATHERING_BACKENDS) < set(IMPLEMENTED_BACKENDS) < set(moe_ops.parallel.ALL2ALL_BACKENDS)
    )


def test_all2all_backend():
    ranks = {"dp_size": 2, "ep_size": 2, "max_num_tokens": 4}
    layer = make(**ranks, all2all_backend="symmetric")
    assert type(layer.kernel.prepare_finalize) is moe_ops.pipeline.SymmetricPrepareAndFinalize
    assert make(**ranks).moe_parallel_config.all2all_backend == "allgather_reducescatter"
    with pytest.raises(ValueError, match="all2all_backend must be one of"):
        make(**ranks, all2all_backend="symetric")
    with pytest.raises(ValueError, match="max_num_tokens must be given for .*'symmetric'"):
        make(dp_size=2, ep_size=2, all2all_backend="symmetric")
    parallel = layer.moe_parallel_config
    with pytest.raises(ValueError, match="all2all_backend must be that of moe_parallel_config"):
        make(moe_parallel_config=parallel, max_num_tokens=4, all2all_backend="naive")


def test_capacity_factor():
    parallel = PARALLEL(ep_size=2, dp_size=2, use_ep=True, all2all_backend="fixed_capacity")
    layer = make(moe_parallel_config=parallel, capacity_factor=0.75)
    assert layer.kernel.prepare_finalize.capacity_factor == 0.75
    assert make(moe_parallel_config=parallel).kernel.prepare_finalize.capacity_factor == 1
    with pytest.raises(ValueError, match="capacity_factor must be above 0 and at most 1, got 2"):
        make(moe_parallel_config=parallel, capacity_factor=2)
    for sizes in ({"ep_size": 2}, {"ep_size": 2, "dp_size": 2}):
        with pytest.raises(ValueError, match="capacity_factor must be 1 unless .*, got 0.5"):
            make(**sizes, capacity_factor=0.5)
        make(**sizes, capacity_factor=1.0)
    with pytest.raises(TypeError, match="capacity_factor must be a number, got bool True"):
        make(ep_size=2, dp_size=2, capacity_factor=True)


@pytest.mark.parametrize("backend", IMPLEMENTED_BACKENDS)
def test_options_that_an_exchange_takes(backend):
    """Those of its own arguments; others are refused, whatever the backend."""
    kind = exchange_class(backend)
    assert kind.takes < set(inspect.signature(kind).parameters)
    ranks = {"dp_size": 2, "ep_size": 2, "max_num_tokens": 4, "all2all_backend": backend}
    values = {"equal_num_tokens": True, "capacity_factor": 0.5, "on_dead_rank": "mask"}
    for name, value in values.items():
        if name in kind.takes:
            part = make(**ranks, **{name: value}).kernel.prepare_finalize
            assert part.layout.masked if name == "on_dead_rank" else getattr(part, name) == value
            continue
        message = f"{name} must be .* unless all2all_backend is one of .*, got {value}"
        with pytest.raises(ValueError, match=message):
            make(**ranks, **{name: value})
    with pytest.raises(NotImplementedError, match='on_dead_rank must .* 2 ranks .* got "mask"'):
        made = {**ranks, "ep_size": 4, "tp_size": 2, "all2all_backend": "symmetric"}
        make(**made, on_dead_rank="mask")
    with pytest.raises(ValueError, match="equal_num_tokens must be False unless ranks .*got True"):
        make(ep_size=2, equal_num_tokens=True)


def test_modes_of_tokens():
    """Who has tokens of their own, and exchanges them."""
    for sizes in ({"ep_size": 2}, {"tp_size": 2}, {"tp_size": 2, "ep_size": 2}):
        plain, split = make(**sizes), make(**sizes, is_sequence_parallel=True)
        assert not plain.moe_parallel_config.exchanges_tokens and plain.kernel is None
        assert split.moe_parallel_config.exchanges_tokens and split.kernel is not None
    parts = PARALLEL.make(2, 1, 2, 1)
    assert (parts.replica_size, parts.tokens_rank, parts.exchanges_tokens) == (2, 1, True)
    prefill = PARALLEL.make(2, 1, 1, 0, 2, 1, enable_expert_parallel=True)
    assert (prefill.replica_size, prefill.tokens_rank, prefill.exchanges_tokens) == (2, 1, True)
    for room, share in ((5, 3), (4, 2), (1, 1), (None, None)):
        exchange = make(moe_parallel_config=parts, max_num_tokens=room).kernel.prepare_finalize
        assert exchange.max_num_tokens_per_rank() == room
        assert exchange.exchange.max_num_tokens == share
    assert (exchange.index, exchange.first) == (1, 2)
    with pytest.raises(NotImplementedError, match="strategy must be linear with .* 'round_robin'"):
        make(ep_size=2, enable_eplb=True, expert_placement_strategy="round_robin")
    with pytest.raises(NotImplementedError, match="n_shared_experts must be 0 with enable_eplb"):
        make(n_shared_experts=1, enable_eplb=True)
    with pytest.raises(ValueError, match="max_num_tokens must be None unless ranks .*, got 4"):
        make(ep_size=2, max_num_tokens=4)
    with pytest.raises(ValueError, match="max_num_tokens must be at least 1, got 0"):
        make(ep_size=2, dp_size=2, max_num_tokens=0)
    with pytest.raises(ValueError, match="ep_rank must be one of the 2 .* from 2 on, got 1"):
        PARALLEL(dp_size=2, dp_rank=1, ep_size=4, ep_rank=1, use_ep=True)
    with pytest.raises(ValueError, match="tp_rank must be one of the 1 .* from 0 on, got 1"):
        PARALLEL(dp_size=2, tp_size=2, tp_rank=1)


def test_numbers_beside_a_parallel_config():
    split = PARALLEL(ep_size=2, ep_rank=1, use_ep=True, enable_eplb=True)
    layer = make(moe_parallel_config=split, ep_size=2, ep_rank=1, is_sequence_parallel=True)
    assert layer.enable_eplb and layer.moe_parallel_config == replace(split, sp_size=2)
    with pytest.raises(ValueError, match="tp_size must be that of moe_parallel_config, 1, got 2"):
        make(moe_parallel_config=split, tp_size=2)


def test_none_is_the_default_of_every_option():
    parameters = inspect.signature(moe_ops.FusedMoE).parameters
    options = [p.name for p in parameters.values() if p.default is not inspect.Parameter.empty]
    layer, plain = make(**dict.fromkeys(options)), make()
    assert layer.extra_repr() == plain.extra_repr()
    assert layer.moe_parallel_config == plain.moe_parallel_config
    assert torch.equal(layer(*batch()), plain(*batch()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dtype", "no option 'dtype'; pass params_dtype="),
        ("renormalise", "no option 'renormalise'; did you mean 'renormalize'"),
    ],
)
def test_options_by_another_name(name, message):
    with pytest.raises(TypeError, match=message):
        make(**{name: None})


def test_the_former_name_of_the_scheme():
    with pytest.warns(DeprecationWarning, match=r"quant_config=..\) is now scheme=") as said:
        layer = make(quant_config="fp8_channel")
    assert layer.scheme == moe_ops.get_scheme("fp8_channel")
    assert said[0].filename == small_layers.__file__
    with pytest.raises(TypeError, match="takes scheme or quant_config, got both"):
        make(scheme="fp8_channel", quant_config="fp8_channel")


@pytest.mark.parametrize(
    ("hidden", "logits", "message"),
    [
        (H - 1, E, "hidden_states.shape.1. must be hidden_size = 32, got 31"),
        (H, E - 1, "router_logits.shape.1. must be the number of experts = 8, got 7"),
    ],
)
def test_tokens_and_logits_of_another_width(hidden, logits, message):
    with pytest.raises(ValueError, match=message):
        make()(*batch(logits=logits, hidden=hidden))


def test_grouped_routing():
    bias = torch.linspace(0, 0.5, E)
    options = {
        "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2,
        "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "e_score_correction_bias": bias,
    }  # fmt: skip
    layer, (x, logits) = make(**options), batch()
    weights, ids = moe_ops.grouped_topk(x, logits, K, True, 4, 2, "sigmoid", 2.5, bias)
    expected = moe_ops.fused_experts(x, layer.w13_weight, layer.w2_weight, weights, ids)
    assert torch.equal(layer(x, logits), expected)
    routed = moe_ops.FusedMoE.select_experts(x, logits, K, renormalize=True, **options)
    assert torch.equal(routed.topk_ids, ids)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, logits), expected)


def identity_by_hand(layer, x, logits):
    weights, ids = moe_ops.fused_topk(x, logits, K, False, routed_scaling_factor=6.0)
    weights = weights * (ids < E), weights * (ids >= E)
    routed = moe_ops.fused_experts(
        x, layer.w13_weight, layer.w2_weight, weights[0], torch.where(ids < E, ids, 0)
    )
    return routed + x * weights[1].sum(1, keepdim=True)


def test_identity_experts():
    options = {
        "zero_expert_num": 4, "zero_expert_type": "identity", "renormalize": False,
        "routed_scaling_factor": 6.0,
    }  # fmt: skip
    layer, (x, logits) = make(**options), batch(logits=E + 4)
    expected = identity_by_hand(layer, x, logits)
    torch.testing.assert_close(layer(x, logits), expected)
    parts = []
    for rank in range(2):
        part = moe_ops.FusedMoE(E, K, H, I, ep_size=2, ep_rank=rank, **options)
        part.w13_weight.data.copy_(layer.w13_weight[rank * 4 : rank * 4 + 4])
        part.w2_weight.data.copy_(layer.w2_weight[rank * 4 : rank * 4 + 4])
        parts.append(part(x, logits))
    torch.testing.assert_close(sum(parts), expected)


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(48, 48)

    def forward(self, x):
        return x * 2


def test_shared_experts_beside():
    layer, (x, logits) = make(shared_experts=Recorder()), batch()
    routed = make()(x, logits)
    shared, out = layer(x, logits)
    assert torch.equal(out, routed) and torch.equal(shared, x * 2)
    wide = torch.randn(T, 48)
    shared, out = layer(x, logits, shared_experts_input=wide)
    assert torch.equal(out, routed) and torch.equal(shared, wide * 2)
    layer.to(torch.bfloat16)
    assert layer.shared_experts.proj.weight.dtype == torch.bfloat16
    assert "shared_experts.proj.weight" in layer.state_dict()


def test_shared_experts_inside():
    """Every token goes to them with weight 1; on the first rank."""
    x, logits = batch()
    experts = Experts.random(E + 2, H, I)
    source = per_expert(Experts(*(w[:E] for w in experts)))
    for w, name, axis in zip(
        experts, ("gate_proj", "up_proj", "down_proj"), (0, 0, 1), strict=True
    ):
        source[f"shared_experts.{name}.weight"] = torch.cat((w[E], w[E + 1]), axis)
    weights, ids = moe_ops.fused_topk(x, logits, K, True)
    w1 = torch.cat((experts.gate, experts.up), 1)
    one = torch.ones(T, 2)
    both = torch.tensor([E, E + 1], dtype=ids.dtype).expand(T, 2)
    expected = moe_ops.fused_experts(
        x, w1, experts.down, torch.cat((weights, one), 1), torch.cat((ids, both), 1)
    )
    for size in (1, 2, 4):
        total = 0
        for rank in range(size):
            layer = moe_ops.FusedMoE(E, K, H, I, n_shared_experts=2, ep_size=size, ep_rank=rank)
            moe_ops.load_checkpoint(layer, source, progress=False)
            total = total + layer(x, logits)
        torch.testing.assert_close(total, expected)


def test_balancing():
    state = moe_ops.EplbState.make(3, E, 4)
    layer, (x, logits) = make(enable_eplb=True, num_redundant_experts=4), batch()
    layer.w13_weight.data[E:] = layer.w13_weight[:4]
    layer.w2_weight.data[E:] = layer.w2_weight[:4]
    with pytest.raises(ValueError, match="set_eplb_state must be called before"):
        layer(x, logits)
    layer.set_eplb_state(
        1, state.expert_load, state.logical_to_physical_map, state.logical_replica_count
    )
    plain = make()
    plain.w13_weight.data.copy_(layer.w13_weight[:E])
    plain.w2_weight.data.copy_(layer.w2_weight[:E])
    torch.testing.assert_close(layer(x, logits), plain(x, logits))
    assert state.expert_load[1].sum() == T * K and not state.expert_load[[0, 2]].any()
    assert (layer.route(x, logits).topk_ids >= E).any()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    state.expert_load.zero_()
    torch.testing.assert_close(compiled(x, logits), plain(x, logits))
    assert state.expert_load[1].sum() == T * K


@pytest.mark.parametrize("tokens", [0, 1, 4, 9])
def test_chunks(tokens):
    layer, (x, logits) = make(), batch(tokens)
    expected = layer(x, logits)
    layer.chunk_size = 4
    torch.testing.assert_close(layer(x, logits), expected)
    counts = []
    layer.quant_method.apply = lambda layer, x, w, i: counts.append(len(x)) or x
    layer.forward_impl_chunked(x, logits, max_tokens_across_ranks=14)
    assert counts == {0: [1] * 4, 1: [1] * 4, 4: [4, 1, 1, 1], 9: [4, 4, 1, 1]}[tokens]


def test_hidden_sizes_that_an_exchange_pads():
    config = moe_ops.FusedMoEParallelConfig(use_ep=True, all2all_backend="deepep_high_throughput")
    layer = moe_ops.FusedMoE(E, K, H, I, moe_parallel_config=config, params_dtype=torch.float32)
    assert layer.hidden_size == 128 and layer.w2_weight.shape == (E, 128, I)
    experts, (x, logits) = Experts.random(E, H, I), batch()
    moe_ops.load_checkpoint(layer, per_expert(experts), progress=False)
    plain = moe_ops.FusedMoE(E, K, H, I)
    moe_ops.load_checkpoint(plain, per_expert(experts), progress=False)
    out = layer(x, logits)
    assert out.is_contiguous() and out.shape == x.shape
    torch.testing.assert_close(out, plain(x, logits))


def test_text():
    layer = make(tp_size=2, tp_rank=1, quant_config="fp8_channel", reduce_results=True)
    text = layer.extra_repr()
    for fact in (
        "num_experts=8", "local_num_experts=8", "top_k=2", "tp_size=2", "ep_size=1",
        "intermediate_size_per_partition=12", "reduce_results=True", "renormalize=True",
        "use_grouped_topk=False", "scoring_func=softmax", "scheme=fp8_channel",
    ):  # fmt: skip
        assert fact in text


def test_names_may_repeat_and_are_in_no_graph():
    layers = [make(prefix="model.layers.0.mlp") for _ in range(2)]
    graphs = []

    def keep(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    torch._dynamo.reset()
    torch.compile(layers[0], fullgraph=True, backend=keep)(*batch())
    assert "model.layers" not in graphs[0]


def test_reducing_without_processes_says_so():
    layer = make(tp_size=2, reduce_results=True)
    with pytest.raises(ValueError, match="torch.distributed initialized to sum over 2 ranks"):
        layer(*batch())
