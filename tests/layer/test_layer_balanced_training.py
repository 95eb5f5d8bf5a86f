"""Training with load balancing: replicas stay equal, and learn what one rank without them does.

The oracle is a layer on one rank that has each expert once, and all tokens.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from checkpoints import held
from ranks import compiled_on, four_gpus, here, mine, spawn, two_gpus
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops import EplbState
from moe_ops.training import clip_grad_norm_

E, K, H, I, T, REDUNDANT = 8, 2, 32, 64, 24, 4  # noqa: E741
COUNTS = {1: (T,), 2: (13, 11), 4: (10, 0, 5, 9)}
NAMES = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")


def layer_of(seed=0, **options):
    torch.manual_seed(seed)  # the numbers of each expert follow from it, wherever it is
    return moe_ops.FusedMoE(E, K, H, I, has_bias=True, **options).to(here())


def balanced(ranks=None, group=None, seed=None, **options):
    """A layer with replicas, whose first placement ``seed`` has changed, and its state."""
    layer = layer_of(enable_eplb=True, num_redundant_experts=REDUNDANT, **options)
    state = EplbState.make(1, E, REDUNDANT, ranks, group=group, device=here())
    layer.set_eplb_state(0, *state[1:])
    if seed is not None:
        rebalance(layer, state, seed, ranks or layer.moe_parallel_config.ep_size)
    return layer, state


def rebalance(layer, state, seed, ranks, optimizer=None):
    """Give experts a random load, and move them."""
    g = torch.Generator().manual_seed(seed)
    load = torch.randint(0, 1000, state.expert_load.shape, generator=g, dtype=torch.int32)
    load[:, seed % E] += 9000 * (seed % 2)  # an expert with five replicas, or several with two
    state.expert_load.copy_(load)
    before = state.physical_to_logical_map.clone()
    state.rebalance_([layer.expert_tensors(optimizer)], 1, 1, ranks)
    assert (before != state.physical_to_logical_map).any()


def batch(seed=1):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, generator=g) - torch.arange(1.0, E + 1).log()
    rows = (torch.randn(T, H, generator=g), logits, torch.randn(T, H, generator=g))
    return tuple(x.to(here()) for x in rows)


def gradients(run, layer, rows, names=NAMES):
    """The result, and gradients of tokens, logits and parameters."""
    x, logits = (y.clone().requires_grad_() for y in rows[:2])
    out = run(x, logits)
    found = torch.autograd.grad(out, [x, logits, *(getattr(layer, n) for n in names)], rows[2])
    return dict(zip(("out", "x", "logits", *names), (out.detach(), *found), strict=True))


def assert_equal(found, expected):
    for name, actual in found.items():
        assert torch.equal(actual, expected[name]), name


def same_replicas(tensors, experts):
    """Whether rows of one expert have the same bits."""
    first = [experts.index(expert) for expert in experts]
    return all(torch.equal(x, x[first]) for x in tensors)


def test_every_replica_has_the_gradient_of_its_expert():
    """In eager and compiled calls and with checkpoints; of all parameters and of some."""
    whole, rows = layer_of(), batch()
    layer, _ = balanced(ranks=4, seed=1)
    experts = held(layer)
    assert experts != list(layer.placement.logical)
    expected = {
        name: x[experts] if name in NAMES else x
        for name, x in gradients(whole, whole, rows).items()
    }
    found = gradients(layer, layer, rows)
    for name, actual in found.items():
        torch.testing.assert_close(actual, expected[name])
    assert same_replicas([found[name] for name in NAMES], experts)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for run in (compiled, lambda *x: checkpoint(layer, *x, use_reentrant=False)):
        layer.eplb_step.zero_()  # the calls choose equal replicas
        assert_equal(gradients(run, layer, rows), found)
    layer.eplb_step.zero_()
    layer.w13_weight.requires_grad_(False)
    assert_equal(gradients(layer, layer, rows, NAMES[1:]), found)
    out = layer(*rows[:2])
    (grad,) = torch.autograd.grad(out.square().sum(), [layer.w2_weight], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives of FusedMoE with num_redund"):
        grad.sum().backward()
    layer.w2_weight.requires_grad_(False)
    with torch.no_grad():
        layer.eplb_step.zero_()
        assert torch.equal(layer(*rows[:2]), found["out"])


def test_biases_of_a_quantized_layer():
    """They train beside weights that are frozen."""
    whole, rows = layer_of(scheme="int8_w8a16"), batch()
    layer, _ = balanced(ranks=4, seed=1, scheme="int8_w8a16")
    weights = moe_ops.quantize_weight(torch.randn(E, 2 * I, H) / 6, "int8_w8a16")
    second = moe_ops.quantize_weight(torch.randn(E, H, I) / 8, "int8_w8a16")
    for model in (whole, layer):
        for which, stored in (("w13", weights), ("w2", second)):
            getattr(model, f"{which}_weight").data.copy_(stored.data[held(model)])
            scale = getattr(model, f"{which}_weight_scale").data
            scale.copy_(stored.scale[held(model)].view(scale.shape))
        for bias in (model.w13_bias, model.w2_bias):
            bias.requires_grad_()
    expected = gradients(whole, whole, rows, NAMES[2:])
    found = gradients(layer, layer, rows, NAMES[2:])
    for name in NAMES[2:]:
        torch.testing.assert_close(found[name], expected[name][held(layer)])
    assert same_replicas([found[name] for name in NAMES[2:]], held(layer))


def test_experts_must_not_move_before_the_backward_pass():
    layer, state = balanced(ranks=4)
    out = layer(*batch()[:2])
    rebalance(layer, state, 1, 4, torch.optim.SGD(layer.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        out.sum().backward()


class Doubled(moe_ops.layer.UnquantizedFusedMoEMethod):
    """Reads the layer's weights in its own way."""

    def apply(self, layer, *arguments, **more):
        """Twice the result."""
        return 2 * super().apply(layer, *arguments, **more)


def test_what_is_not_trained():
    """Biases beside a kernel that was set; weights that another method reads."""
    x, logits, _ = batch()
    layer, _ = balanced()
    biases = {"w1_bias": layer.w13_bias, "w2_bias": layer.w2_bias}
    config = moe_ops.FusedMoEQuantConfig("unquantized", **biases)
    layer.kernel = moe_ops.select_kernel(layer.moe_config, config)
    with pytest.raises(NotImplementedError, match="w2_bias must not require grad .* layer.kernel"):
        layer(x, logits)
    layer, _ = balanced()
    layer.quant_method = Doubled()
    with pytest.raises(NotImplementedError, match="must be 0 to train with a quant_method .* 4"):
        layer(x, logits).sum().backward()
    layer.requires_grad_(False)(x.requires_grad_(), logits).sum().backward()
    assert x.grad.any()


def test_state_of_an_optimizer():
    """It has rows as the parameter has; gradients move too."""
    layer, state = balanced()
    parameters = dict(layer.named_parameters())
    others = torch.optim.SGD([layer.w2_weight], 0.1)
    with pytest.raises(ValueError, match="optimizer must have w13_weight, which requires grad"):
        layer.expert_tensors(others)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(*batch()[:2]).square().sum().backward()
    optimizer.step()
    tensors = layer.expert_tensors(optimizer)
    assert len(tensors) == 4 * len(parameters)  # weight, gradient, two moments
    before = [[x.clone() for x in tensors], held(layer)]
    rebalance(layer, state, 1, 4, optimizer)
    rows = [before[1].index(expert) for expert in held(layer)]
    assert all(torch.equal(x, y[rows]) for x, y in zip(tensors, before[0], strict=True))
    optimizer.state[layer.w2_bias]["flat"] = torch.zeros(3)
    with pytest.raises(NotImplementedError, match=r"of w2_bias must have .* 12 .*'flat' of shape"):
        layer.expert_tensors(optimizer)


def ways(rank, ranks):
    """Ways to share a layer of whole experts, of which each rank trains with its own tokens."""
    yield {"ep_size": ranks, "ep_rank": rank, "reduce_results": True}
    yield {"tp_size": ranks, "tp_rank": rank, "ep_size": ranks, "is_sequence_parallel": True}
    for backend in ("allgather_reducescatter", "fixed_capacity", "alltoall", "symmetric"):
        config = moe_ops.FusedMoEParallelConfig(
            dp_size=ranks, dp_rank=rank, ep_size=ranks, ep_rank=rank, use_ep=True,
            all2all_backend=backend,
        )  # fmt: skip
        yield {"moe_parallel_config": config, "max_num_tokens": T}
    if ranks == 4:
        replicas = {"dp_size": 2, "dp_rank": rank // 2, "tp_size": 2, "tp_rank": rank % 2}
        yield {**replicas, "ep_size": 4}


def of_all_ranks(x):
    """The rows of all ranks."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    return torch.cat(parts)


def check_same(layer, whole, optimizers):
    """Weights and moments of all replicas are those of the expert on one rank."""
    experts = list(layer.state.held_placement().logical)
    for name in NAMES:
        both = [getattr(model, name) for model in (layer, whole)]
        states = [of.state[x] for of, x in zip(optimizers, both, strict=True)]
        moments = [[state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")]
        for own, expected in (both, *moments):
            rows = of_all_ranks(own)
            assert same_replicas([rows], experts), name
            torch.testing.assert_close(rows, expected[experts])


def check_training(rank, ranks, compiled):
    """Steps of Adam with clipping; experts move between them, and their moments with them."""
    for number, way in enumerate(ways(rank, ranks)):
        if compiled and number != 2:  # an exchange that a graph can run
            continue
        whole = layer_of()
        layer, state = balanced(group=dist.group.WORLD, **way)
        config = layer.moe_parallel_config
        batches = config.layer_size // config.replica_size
        tokens = mine(COUNTS[batches], config.tokens_rank)
        run = layer
        if number % 2:
            run = partial(checkpoint, layer, use_reentrant=False)
        elif compiled:
            layer(*(rows[tokens] for rows in batch()[:2]))  # compares ranks, which a graph cannot
            run = compiled_on(-1, layer, dynamic=False, backend="aot_eager")

        # An epsilon that is no smaller than noise: a gradient of 0 takes no step.
        optimizers = [torch.optim.Adam(x.parameters(), 1e-2, eps=1e-2) for x in (layer, whole)]
        for step in range(3):
            x, logits, y = batch(step)
            (whole(x, logits) - y).square().sum().backward()
            (run(x[tokens], logits[tokens]) - y[tokens]).square().sum().backward()
            norms = [clip_grad_norm_(model, 20.0) for model in (layer, whole)]
            torch.testing.assert_close(*norms, rtol=1e-5, atol=0)  # float32 sums of 50,000
            assert norms[0] > 20
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            check_same(layer, whole, optimizers)
            rebalance(layer, state, 10 * number + step, ranks, optimizers[0])


def check_wrapped(rank, ranks):
    """Replicas of the whole layer take means of the gradients; their replicas of experts, sums."""
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("data", "ep"))
    data, ep, whole = mesh["data"], mesh["ep"], layer_of()
    x, logits, y = batch()
    (whole(x, logits) - y).square().sum().div(2).backward()
    tokens = mine((T // 2, T // 2), data.get_local_rank())
    way = {"ep_size": 2, "ep_rank": ep.get_local_rank(), "reduce_results": True, "tp_group": ep}
    for wrap in (
        lambda layer: DistributedDataParallel(layer, process_group=data.get_group()),
        lambda layer: fully_shard(layer, mesh=data),
    ):
        layer, _ = balanced(group=ep, seed=3, **way)
        experts = layer.state.held_placement().experts
        model = wrap(layer)
        (model(x[tokens], logits[tokens]) - y[tokens]).square().sum().backward()
        for name, own in layer.named_parameters():
            grad = own.grad.full_tensor() if hasattr(own.grad, "full_tensor") else own.grad
            torch.testing.assert_close(grad, getattr(whole, name).grad[experts])
        for norm_type in (1.0, 2.0, float("inf")):
            expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9, norm_type)
            norm = clip_grad_norm_(model, 1e9, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)  # float32 sums of 50,000
        for own in layer.parameters():
            own.grad.fill_(torch.inf)
        assert clip_grad_norm_(model, 1.0) == torch.inf


def check_moved_too_early(rank, ranks):
    """Experts that move before the backward pass raise also on the ranks whose rows stay."""
    for number, way in enumerate(ways(rank, ranks)):
        layer = layer_of(enable_eplb=True, **way)
        state = EplbState.make(1, E, 0, group=dist.group.WORLD, device=here())
        layer.set_eplb_state(0, *state[1:])
        out = layer(*batch()[:2])
        before = [x.clone() for x in layer.parameters()]
        load = [6, 5, 7, 2, 5, 6, 6, 5] if rank == 0 else [0] * E
        state.expert_load.copy_(torch.tensor([load]))
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        state.rebalance_([layer.expert_tensors(optimizer)], 1, 1, ranks)
        assert all(map(torch.equal, before, layer.parameters())) == (rank > 1), number
        with pytest.raises(RuntimeError, match="has been modified by an inplace"):
            out.sum().backward()


def check(rank, ranks, compiled):
    check_training(rank, ranks, compiled)
    if ranks == 4:
        check_moved_too_early(rank, ranks)
        check_wrapped(rank, ranks)


@pytest.mark.parametrize(
    ("ranks", "compiled", "backend"),
    [
        (2, False, "gloo"),
        (4, False, "gloo"),
        pytest.param(2, True, "gloo", marks=pytest.mark.exhaustive),
        pytest.param(2, True, "nccl", marks=two_gpus),
        pytest.param(4, False, "nccl", marks=four_gpus),
    ],
)
def test_ranks_learn_what_one_rank_does(ranks, compiled, backend):
    spawn(check, ranks, compiled, backend=backend)


def test_clipping_asks_for_the_model():
    """Not for its parameters, as torch's function does: it has to know which are experts'."""
    with pytest.raises(TypeError, match="model must be a Module, got generator"):
        clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1.0)
