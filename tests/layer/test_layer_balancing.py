"""Layers whose experts are balanced keep their results, and load onto any placement."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from checkpoints import Experts, expected, fused, held, numbers, per_expert
from ranks import compiled_on, mine, spawn

import moe_ops
from moe_ops import EplbState

E, K, H, I, T, REDUNDANT = 8, 2, 64, 128, 12, 4  # noqa: E741
SCHEMES = [None, "fp8_block128", "int4_w4a16_g64_zp", "fp8_tensor_static"]
COUNTS = {1: (12,), 2: (7, 5), 4: (6, 0, 1, 5)}


def source_of(scheme=None, seed=0):
    experts = Experts.random(E, H, I, seed=seed)
    given = 0.5 if scheme == "fp8_tensor_static" else None
    return per_expert(experts if scheme is None else experts.quantized(scheme), input_scale=given)


def layer_of(scheme=None, **options):
    return moe_ops.FusedMoE(E, K, H, I, scheme=scheme, **options)


def balanced(scheme=None, seed=None, **options):
    """A layer with replicas and its state, whose placement ``seed`` has changed."""
    layer = layer_of(scheme, enable_eplb=True, num_redundant_experts=REDUNDANT, **options)
    state = EplbState.make(2, E, REDUNDANT, 4)
    layer.set_eplb_state(1, *state[1:])
    if seed is not None:
        rebalance(layer, state, seed)
    return layer, state


def rebalance(layer, state, seed):
    g = torch.Generator().manual_seed(seed)
    load = torch.randint(0, 1000, state.expert_load.shape, generator=g, dtype=torch.int32)
    state.expert_load.copy_(load)
    before = state.physical_to_logical_map.clone()
    state.rebalance_([[], layer.expert_tensors()], 1, 1, 4)
    assert (before != state.physical_to_logical_map).any()


def same_numbers(layer, seed):
    """The rows hold the checkpoint's experts, as the placement says now."""
    experts, scheme = Experts.random(E, H, I, seed=seed), layer.scheme.name
    source = experts if scheme == "unquantized" else experts.quantized(scheme)
    return all(map(torch.equal, numbers(layer), expected(source, scheme, layer, held(layer))))


def test_a_state_made_in_inference_mode():
    """Calls and `rebalance_` outside of it write to it."""
    x, logits, layer = torch.randn(T, H), torch.randn(T, E), balanced()[0]
    with torch.inference_mode():
        state = EplbState.make(2, E, REDUNDANT, 4)
        layer.set_eplb_state(1, *state[1:])
        layer(x, logits)
    with torch.no_grad():
        expected = layer(x, logits)
        assert int(state.expert_load.sum()) == 2 * T * K and int(layer.eplb_step) == 2
        rebalance(layer, state, 1)
        torch.testing.assert_close(layer(x, logits), expected)


def by_weight_loader(layer, source):
    """As the loaders of vLLM's models do, which know the first placement only."""
    params = dict(layer.named_parameters())
    mapping = moe_ops.parallel.make_expert_params_mapping(
        "gate_proj", "down_proj", "up_proj", E, REDUNDANT
    )
    for name, x in source.items():
        for param_name, weight_name, expert, shard in mapping:
            if weight_name in name:
                mapped = name.replace(weight_name, param_name).removeprefix("experts.")
                param = params[mapped]
                param.weight_loader(param, x, mapped, shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)


LOADERS = {
    "load_checkpoint": lambda layer, source: moe_ops.load_checkpoint(layer, source, progress=False),
    "load_weights": lambda layer, source: list(layer.load_weights(source.items())),
    "weight_loader": by_weight_loader,
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("loader", LOADERS)
def test_checkpoints_load_onto_any_placement(scheme, loader):
    layer, state = balanced(scheme, 1)
    moved = copy.deepcopy(held(layer))
    assert moved != list(layer.placement.logical)
    LOADERS[loader](layer, source_of(scheme, 3))
    assert held(layer) == moved and same_numbers(layer, 3)
    rebalance(layer, state, 2)
    assert held(layer) != moved and same_numbers(layer, 3)


def test_fused_checkpoints_load_onto_any_placement():
    layer, _ = balanced(None, 1)
    experts = Experts.random(E, H, I, seed=3)
    moe_ops.load_checkpoint(layer, fused(experts), progress=False)
    assert same_numbers(layer, 3)
    gate_up = fused(experts)["experts.gate_up_proj"]
    layer.w13_weight.data.zero_()
    for shard, part in zip(("w1", "w3"), gate_up.chunk(2, 1), strict=True):
        layer.weight_loader(layer.w13_weight, part, "gate_up_proj", shard, 0)
    assert same_numbers(layer, 3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_dicts_load_onto_any_placement(scheme):
    """Rows go where their experts are now, also from and to layers without replicas."""
    layer, state = balanced(scheme)
    moe_ops.load_checkpoint(layer, source_of(scheme, 3), progress=False)
    saved = [copy.deepcopy(layer.state_dict())]
    rebalance(layer, state, 1)
    saved.append(copy.deepcopy(layer.state_dict()))
    old = {name: x for name, x in saved[0].items() if name != "_extra_state"}
    plain = layer_of(scheme)
    moe_ops.load_checkpoint(plain, source_of(scheme, 3), progress=False)
    saved.append(copy.deepcopy(plain.state_dict()))
    for placed in (balanced(scheme, 2)[0], balanced(scheme)[0], layer):
        for tensors in saved:
            for param in placed.parameters():
                param.data.view(torch.uint8).zero_()
            placed.load_state_dict(tensors)
            assert same_numbers(placed, 3)
    placed = balanced(scheme, 2)[0]
    placed.load_state_dict(old, strict=False)  # of an earlier version: the first placement
    assert same_numbers(placed, 3)
    moe_ops.load_checkpoint(plain, source_of(scheme, 4), progress=False)
    plain.load_state_dict(saved[1])
    assert same_numbers(plain, 3)


def test_weights_that_were_trained_do_not_move():
    """An optimizer's state would stay; it may move with the weights."""
    layer, state = layer_of(enable_eplb=True).requires_grad_(False), EplbState.make(1, E, 0, 2)
    layer.set_eplb_state(0, *state[1:])
    moe_ops.load_checkpoint(layer, source_of(), progress=False)
    layer.requires_grad_()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    x, logits = torch.randn(T, H), torch.randn(T, E) + torch.tensor([0, 9, 0, 0, 0, 0, 9, 9])
    layer(x, logits)  # requires_grad alone is no sign of training
    state.rebalance_([layer.expert_tensors()], 1, 1, 2)
    layer(x, logits).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [x.clone() for x in (*state, *layer.expert_tensors())]
    with pytest.raises(NotImplementedError, match="the optimizer's state .* would stay behind"):
        state.rebalance_([layer.expert_tensors()], 1, 1, 2)
    assert all(map(torch.equal, before, (*state, *layer.expert_tensors())))
    expected = layer(x, logits)
    state.expert_load.copy_(torch.tensor([[9, 9, 1, 1, 9, 1, 1, 1]]))
    state.rebalance_([layer.expert_tensors(optimizer)], 1, 1, 2)
    torch.testing.assert_close(layer(x, logits), expected)


def test_state_dicts_that_lack_an_expert():
    """Ranks save their own rows; after a rebalance another rank may need them."""
    first, second = (
        layer_of(None, ep_size=2, ep_rank=r, enable_eplb=True, num_redundant_experts=REDUNDANT)
        for r in range(2)
    )
    for rank in (first, second):
        moe_ops.load_checkpoint(rank, source_of(), progress=False)
    saved = first.state_dict()
    message = r"must hold every expert .*\(load_checkpoint .*got none of expert 6"
    with pytest.raises(RuntimeError, match=message):
        second.load_state_dict(saved)
    with pytest.raises(ValueError, match="rows must hold the experts in order .*load_state_dict"):
        moe_ops.load_checkpoint(layer_of(), saved, progress=False)
    state = {**saved, "_extra_state": torch.tensor(list(b'{"scheme":"","weight":null,'
        b'"interleaved":false,"experts":["0"]}'), dtype=torch.uint8)}  # fmt: skip
    with pytest.raises(RuntimeError, match=r"JSON in a uint8 Tensor, got experts \['0'\]"):
        first.load_state_dict(state)


def test_copies_have_no_state():
    """They run on maps of their own; rows move once a state has been set, such as a copied one."""
    x, logits = torch.randn(T, H), torch.randn(T, E)
    layer, state = balanced(seed=1)
    layer.requires_grad_(False)
    moe_ops.load_checkpoint(layer, source_of(), progress=False)
    expected = layer(x, logits)
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        other, own = copied((layer, state))
        torch.testing.assert_close(other(x, logits), expected)
        assert same_numbers(other, 0) and held(other) == held(layer)
        with pytest.raises(ValueError, match="set_eplb_state must be called before the experts of"):
            other.expert_tensors()
        other.set_eplb_state(1, *own[1:])
        rebalance(other, own, 2)
        assert held(other) != held(layer) and same_numbers(other, 0)
        torch.testing.assert_close(other(x, logits), expected)
    rebalance(layer, state, 2)
    copy.deepcopy(layer_of()).expert_tensors()


def test_how_often_maps_were_written():
    """Inference tensors do not know."""
    layer, state = balanced()
    before = layer.eplb_state.num_writes()
    rebalance(layer.requires_grad_(False), state, 1)
    assert layer.eplb_state.num_writes() > before
    with torch.inference_mode():
        layer.set_eplb_state(0, *(x.clone() for x in state[1:]))
    assert layer.eplb_state.num_writes() == 0


def test_tensors_of_experts():
    layer = layer_of("int4_w4a16_g128_zp", has_bias=True, shared_experts=torch.nn.Linear(2, 2))
    names = [name for name, x in layer.named_parameters() if "shared" not in name]
    own = dict(layer.named_parameters())
    assert {id(x) for x in layer.expert_tensors()} == {id(own[name]) for name in names}
    layer.w13_input_order = torch.arange(H).int().repeat(E, 1)
    assert layer.expert_tensors()[-1] is layer.w13_input_order
    layer.w13_input_order = layer.w13_input_order[:1]
    assert len(layer.expert_tensors()) == len(names)
    part = layer_of("int4_w4a16_g128", ep_size=2)
    part.w13_input_order = layer.w13_input_order
    with pytest.raises(NotImplementedError, match="w13_input_order must be None to move experts"):
        part.expert_tensors()


def ways(rank, ranks):
    yield {"dp_size": ranks, "dp_rank": rank, "ep_size": ranks}
    yield {"tp_size": ranks, "tp_rank": rank, "ep_size": ranks, "is_sequence_parallel": True}
    yield {"ep_size": ranks, "ep_rank": rank, "reduce_results": True}
    if ranks == 2:
        for backend in ("symmetric", "fixed_capacity"):
            config = moe_ops.FusedMoEParallelConfig(
                dp_size=2, dp_rank=rank, ep_size=2, ep_rank=rank, use_ep=True,
                all2all_backend=backend,
            )  # fmt: skip
            yield {"moe_parallel_config": config, "max_num_tokens": T}
    if ranks == 4:
        yield {
            "dp_size": 2, "dp_rank": rank // 2, "tp_size": 2, "tp_rank": rank % 2, "ep_size": 4,
        }  # fmt: skip


def check_results(rank, ranks):
    """Before and after balancing, and after loading, results are those of one rank.

    Each way is compiled on two ranks, every other one by AOTAutograd, which takes twice as long as
    Dynamo; on four, only the way that two do not have.
    """
    g = torch.Generator().manual_seed(1)
    x, logits = torch.randn(T, H, generator=g), torch.randn(T, E, generator=g)
    logits -= 2 * torch.arange(1.0, E + 1).log()  # the first experts are popular
    padding = torch.arange(T) % 5 == 3
    for number, way in enumerate(ways(rank, ranks)):
        scheme = SCHEMES[number % 3]
        whole = layer_of(scheme)
        moe_ops.load_checkpoint(whole, source_of(scheme), progress=False)
        wanted = whole(x, logits).masked_fill(padding[:, None], 0)
        layer = layer_of(scheme, enable_eplb=True, num_redundant_experts=REDUNDANT, **way)
        config = layer.moe_parallel_config
        batches = config.layer_size // config.replica_size
        state = EplbState.make(1, E, REDUNDANT, group=dist.group.WORLD)
        layer.set_eplb_state(0, *state[1:])
        assert layer.eplb_state.seed == (config.tokens_rank if batches > 1 else 0)
        moe_ops.load_checkpoint(layer, source_of(scheme), progress=False)
        tokens = mine(COUNTS[batches], config.tokens_rank)
        own = x[tokens], logits[tokens]
        compiled = layer
        if ranks == 2 or {"dp_size", "tp_size"} <= way.keys():
            backend = "eager" if ranks == 2 and number % 2 else "aot_eager"
            compiled = compiled_on(number, layer, dynamic=False, backend=backend)
        for step in range(3):
            for _ in range(2):
                out = layer(*own, is_padding=padding[tokens])
                torch.testing.assert_close(out, wanted[tokens])
            count = (
                moe_ops.fused_topk(x, logits, K, True)[1][~padding]
                .flatten()
                .long()
                .bincount(minlength=E)
            )
            assert torch.equal(state.logical_load()[0], 2 * count * config.replica_size)
            equal = slice(2)
            again = compiled(x[equal], logits[equal])
            torch.testing.assert_close(again, whole(x[equal], logits[equal]))
            before = state.physical_to_logical_map.clone()
            state.rebalance_([layer.expert_tensors()], 1, 1, ranks)
            assert step or not torch.equal(before, state.physical_to_logical_map)
            if step == 1:  # another checkpoint
                moe_ops.load_checkpoint(whole, source_of(scheme, 9), progress=False)
                moe_ops.load_checkpoint(layer, source_of(scheme, 9), progress=False)
                wanted = whole(x, logits).masked_fill(padding[:, None], 0)


def check_seeds(rank, ranks):
    """One token on each rank, all to the same expert: its replicas share them."""
    layer = layer_of(enable_eplb=True, num_redundant_experts=REDUNDANT, **next(ways(rank, ranks)))
    state = EplbState.make(1, E, REDUNDANT, group=dist.group.WORLD)
    layer.set_eplb_state(0, *state[1:])
    logits = torch.zeros(1, E)
    logits[0, :2] = 9
    layer(torch.zeros(1, H), logits)
    load = state.expert_load.clone()
    dist.all_reduce(load)
    assert load[0, :2].tolist() == load[0, E : E + 2].tolist() == [ranks // 2] * 2


def check(rank, ranks):
    check_results(rank, ranks)
    check_seeds(rank, ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_balanced_ranks_are_one_rank(ranks):
    spawn(check, ranks)
