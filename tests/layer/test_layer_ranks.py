"""Layers over ranks that differ, groups of wrong ranks, and PyTorch's own tools around a layer."""

import copy
import io
import json
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import spawn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_ops
from moe_ops.inspect.warmup import Variants
from moe_ops.layer import module
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.testing import run_ranks

E, K, H, I = 8, 2, 32, 32  # noqa: E741
SIZES = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(**options):
    """A layer whose weights are those of one whole layer, where it has that layer's sizes."""
    layer = moe_ops.FusedMoE(**{**SIZES, "params_dtype": torch.float32, **options})
    experts = {
        "experts.gate_up_proj": random(E, 2 * I, H) / 6,
        "experts.down_proj": random(E, H, I, seed=1) / 6,
    }
    if not options.keys() & {
        *SIZES,
        "scheme",
        "n_shared_experts",
        "has_bias",
        "e_score_correction_bias",
    }:
        moe_ops.load_checkpoint(layer, experts, progress=False)
    return layer


def batch(tokens=5, experts=E, hidden=H):
    return random(tokens, hidden, seed=2), random(tokens, experts, seed=3)


def summed(rank, kind="ep"):
    """Options of rank ``rank % 2`` of a layer whose two ranks have the same tokens."""
    return {f"{kind}_size": 2, f"{kind}_rank": rank % 2, "reduce_results": True}


def exchanging(rank, backend="allgather_reducescatter"):
    """Options of a layer whose two ranks have tokens of their own."""
    return {"dp_size": 2, "dp_rank": rank, "ep_size": 2, "all2all_backend": backend}


GROUPED = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
DIFFERENT = [
    ("top_k", "2 on rank 0, 3 on rank 1", {}, {"top_k": 3}),
    ("num_experts", "8 on rank 0, 10 on rank 1", {}, {"num_experts": 10}),
    ("hidden_size", "32 on rank 0, 64 on rank 1", {}, {"hidden_size": 64}),
    ("intermediate_size", "32 on rank 0, 64 on rank 1", {}, {"intermediate_size": 64}),
    ("expert_placement_strategy", "linear on", {}, {"expert_placement_strategy": "round_robin"}),
    ("activation", "silu on rank 0, gelu on rank 1", {}, {"activation": "gelu"}),
    ("renormalize", "True on rank 0, False", {}, {"renormalize": False}),
    ("scoring_func", "softmax on rank 0, sigmoid", {}, {"scoring_func": "sigmoid"}),
    ("routed_scaling_factor", "1 on rank 0, 2.5", {}, {"routed_scaling_factor": 2.5}),
    ("use_grouped_topk", "False on rank 0, True", {}, GROUPED),
    ("topk_group", "2 on rank 0, 3", GROUPED, {**GROUPED, "topk_group": 3}),
    ("apply_router_weight_on_input", "False", {}, {"apply_router_weight_on_input": True}),
    ("has_bias", "False on rank 0, True", {}, {"has_bias": True}),
    ("chunk_size", "None on rank 0, 2 on rank 1", {}, {"chunk_size": 2}),
    ("params_dtype", "float32 on rank 0, torch.bf", {}, {"params_dtype": torch.bfloat16}),
    ("scheme", "on rank 0, .*fp8", {}, {"scheme": "fp8_channel"}),
    (
        "zero_expert_num", "0 on rank 0, 2",
        {}, {"zero_expert_num": 2, "zero_expert_type": "identity"},
    ),
    ("n_shared_experts", "0 on rank 0, 1", {}, {"n_shared_experts": 1}),
    ("batch_invariant", "False on rank 0, True", {}, {"batch_invariant": True}),
    ("e_score_correction_bias", "None", {}, {"e_score_correction_bias": torch.zeros(E)}),
    (
        "the digest of e_score_correction_bias", "",
        *({"e_score_correction_bias": torch.full((E,), x)} for x in (0.0, 1.0)),
    ),
    ("custom_routing_function", "None", {}, {"custom_routing_function": moe_ops.fused_topk}),
]  # fmt: skip
"""The option that an error names, its values, and options of rank 0 and of rank 1."""
OF_EXCHANGES = [
    ("max_num_tokens", "None on rank 0, 9 on rank 1", {}, {"max_num_tokens": 9}),
    ("equal_num_tokens", "False on", {}, {"equal_num_tokens": True}),
    (
        "all2all_backend", "allgather.*alltoall on rank 1",
        {}, {"all2all_backend": "alltoall"},
    ),
    (
        "on_dead_rank", "raise on rank 0, mask on rank 1",
        *(
            {"all2all_backend": "symmetric", "max_num_tokens": 9, "on_dead_rank": x}
            for x in ("raise", "mask")
        ),
    ),
    (
        "capacity_factor", "1 on rank 0, 0.5",
        *(
            {"all2all_backend": "fixed_capacity", "max_num_tokens": 9, "capacity_factor": x}
            for x in (1, 0.5)
        ),
    ),
]  # fmt: skip


def answer(call):
    """The error of a call; an empty text if there is none."""
    try:
        call()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_whose_layers_differ():
    """All of them raise the same error, in the first call, also without tokens."""
    wrong = []
    for way, rows in ((summed, DIFFERENT), (exchanging, [*DIFFERENT, *OF_EXCHANGES])):
        for name, values, *options in rows:

            def run(rank, group, way=way, options=options):
                given = options[rank]
                layer = layer_of(**{**way(rank), **given}, tp_group=group)
                x = torch.zeros(0, layer.model_hidden_size, dtype=layer.sizes.dtype)
                logits = torch.zeros(0, layer.num_logits)
                return answer(lambda: layer(x, logits))

            first, second = run_ranks(2, run)
            rule = rf"^ValueError: {name} must be the same on every rank of the .*, got .*{values}"
            if first != second or not re.search(rule, first):
                wrong.append((way.__name__, name, first, second))
    assert not wrong, "\n".join(map(str, wrong))


def test_warmup_counts_the_tokens_of_all_ranks(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "run_variants", lambda run, counts, kinds, _: seen.append(kinds))

    def run(rank, group):
        layer_of(**exchanging(rank), tp_group=group, max_num_tokens=4).warmup(3)

    run_ranks(2, run)
    assert [variants.arriving(3) for variants in seen] == [8, 8]  # padded to four tokens
    layer = layer_of(ep_size=2)
    layer.warmup(3)
    assert seen[-1].arriving is None and seen[-1].expert_map is layer.expert_map


@pytest.mark.parametrize("way", [summed, exchanging])
def test_ranks_warm_up_together(way, monkeypatch):
    """Ranks with 4 and 3 experts of 7 have other kernels at some loads, and run all of them."""
    kinds = []

    def run(rank, group):
        def of(self, num_tokens):
            return num_tokens > 5 * self.w1.shape[0], num_tokens > 30

        monkeypatch.setattr(Variants, "of", of)
        layer = layer_of(num_experts=7, **way(rank), tp_group=group)
        kinds.append(len(layer.w13_weight))
        return layer.warmup(40), layer.warmup([40, 1, 18, 2])

    assert run_ranks(2, run) == [([1, 16, 21, 31], [1, 18, 40])] * 2
    assert sorted(kinds) == [3, 4]


def test_simulated_ranks_are_one_rank():
    """A layer's ranks meet in the group that `run_ranks` gives, once; a warm-up is a call too."""
    x, logits = batch(6)
    expected, halves = layer_of()(x, logits), (slice(0, 4), slice(4, 6))

    def run(rank, group):
        parts = layer_of(**summed(rank, "tp"), tp_group=group)
        torch.testing.assert_close(parts(x, logits), expected)
        tokens = layer_of(**exchanging(rank), tp_group=group, max_num_tokens=4)
        assert tokens.rank_group is group and not tokens.ranks_agree
        tokens.warmup(4)
        assert tokens.ranks_agree
        for layer in (tokens, copy.deepcopy(tokens)):
            own = halves[rank]
            torch.testing.assert_close(layer(x[own], logits[own]), expected[own])
        own = layer_of(ep_size=2, ep_rank=rank, tp_group=group)  # the caller adds
        part = own(x, logits)
        assert not own.ranks_agree
        torch.testing.assert_close(own.maybe_all_reduce_tensor_model_parallel(part), expected)
        with pytest.raises(ValueError, match="tp_group must have 4 ranks, got 2"):
            layer_of(tp_size=4, tp_rank=rank, tp_group=group)
        with pytest.raises(ValueError, match=f"as rank {1 - rank}, .* got rank {rank}"):
            layer_of(tp_size=2, tp_rank=1 - rank, tp_group=group)
        windows = layer_of(**exchanging(rank, "symmetric"), tp_group=group, max_num_tokens=4)
        with pytest.raises(NotImplementedError, match="group must be a process group for windows"):
            windows(x[:2], logits[:2])

    run_ranks(2, run)
    with pytest.raises(ValueError, match="tp_group must have 4 ranks, got 2"):
        layer_of(tp_size=4, tp_group=RankGroup(2))  # of a group that need not exist yet

    def replicas(rank, group):
        own = slice(0, 4) if rank < 2 else slice(4, 6)
        sizes = {"dp_size": 2, "dp_rank": rank // 2, "tp_size": 2, "tp_rank": rank % 2}
        layer = layer_of(**sizes, ep_size=4, tp_group=group)
        torch.testing.assert_close(layer(x[own], logits[own]), expected[own])

    run_ranks(4, replicas)


def entry(saved, **changes):
    """The ``_extra_state`` of a state dict with changes; None: without the key."""
    said = {**json.loads(bytes(saved["_extra_state"].tolist())), **changes}
    gone = {key for key, value in changes.items() if value is None}
    text = json.dumps({key: value for key, value in said.items() if key not in gone})
    return {**saved, "_extra_state": torch.tensor(list(text.encode()), dtype=torch.uint8)}


def test_state_dicts_name_their_rank():
    """Nothing of another rank loads; old state dicts load with a warning; files stay readable."""
    first, second, part = layer_of(**summed(0)), layer_of(**summed(1)), layer_of(**summed(1, "tp"))
    whole, small = layer_of(), layer_of(num_experts=4)
    saved, cut = first.state_dict(), part.state_dict()
    for layer, state, rule in (
        (second, saved, r"\[4, 5, 6, 7\] .*none of expert 4: its rows hold \[0, 1, 2, 3\]"),
        (whole, saved, "none of expert 4"),
        (small, saved, "num_experts of the state dict must be that of the layer, 4, got 8"),
        (layer_of(**summed(0, "tp")), cut, "must be part 0 of 2 .*, got part 1 of 2"),
        (layer_of(intermediate_size=I // 2), cut, "must be part 0 of 1 .*, got part 1 of 2"),
    ):
        before = layer.w2_weight.detach().clone()
        with pytest.raises(RuntimeError, match=rule):
            layer.load_state_dict(state)
        assert torch.equal(layer.w2_weight, before)
    for state, rule in ((saved, "experts in order .*got"), (cut, "whole experts, got part 1 of 2")):
        for layer in (second, whole, part):
            with pytest.raises(ValueError, match=rule):
                moe_ops.load_checkpoint(layer, state, progress=False)
    old = entry(saved, experts=None, num_experts=None, part=None)
    with pytest.warns(UserWarning, match="_extra_state does not name the experts .*be checked"):
        first.load_state_dict(old)
    del old["_extra_state"]
    with pytest.warns(UserWarning, match="_extra_state does not name the experts"):
        first.load_state_dict(old)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = torch.load(file, weights_only=True)
        assert type(again["_extra_state"]) is torch.Tensor
        for state in (again, copy.deepcopy(saved), saved):
            first.load_state_dict(state)
        whole.load_state_dict(layer_of().state_dict())
    assert type(whole.state_dict()["_extra_state"]) is torch.Tensor


def test_experts_of_a_state_dict_are_rows():
    layer, order = layer_of(), [*range(E)]
    saved = {name: x.clone() for name, x in layer.state_dict().items()}
    for said, rule in (
        ({"experts": order[:7]}, "w.*_weight must have a row for each of the 7 experts .*, got 8"),
        ({"experts": [*order, 0]}, "must have a row for each of the 9 experts"),
        ({"experts": [*order[:7], 8]}, "experts of the state dict must be .*0..7, got 8"),
        ({"experts": [*order[:7], -2]}, "must be those of the layer, 0..7, got -2"),
        ({"experts": [*order[:7], 6]}, "none of expert 7"),
        ({"experts": [*order[:7], 7.0]}, r"JSON in a uint8 Tensor, got experts \[.*7.0\]"),
        ({"experts": [*order[:7], True]}, "JSON in a uint8 Tensor, got experts"),
        ({"experts": "01234567"}, "JSON in a uint8 Tensor, got experts 0"),
        ({"num_experts": 8.0}, "JSON in a uint8 Tensor, got num_experts 8.0"),
        ({"part": [2, 2]}, r"JSON in a uint8 Tensor, got part \[2, 2\]"),
        ({"form": "wide"}, "form is one of .*'packed'.*, got 'wide'"),
    ):
        with pytest.raises(RuntimeError, match=rule):
            layer.load_state_dict(entry(saved, **said))
    rows = {name: x[[*order, 3]] for name, x in saved.items() if x.dim() > 1}
    twice = entry({**saved, **rows}, experts=[*order, 3])
    layer.load_state_dict(twice)
    twice["w2_weight"][8, 0, 0] += 1
    with pytest.raises(RuntimeError, match="w2_weight must be the same .*rows 3 and 8 of expert 3"):
        layer.load_state_dict(twice)
    layer.load_state_dict(entry(saved, experts=order[::-1]))
    assert torch.equal(layer.w2_weight, saved["w2_weight"].flip(0))


def check_distributed_checkpoint(rank, folder):
    """`test_sharded_checkpoint` has the rest."""
    layer, fresh = layer_of(**summed(rank)), moe_ops.FusedMoE(**SIZES, **summed(rank))
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_model_state_dict(layer, options=full)
    if rank == 0:  # of one rank's experts, on that rank alone
        fresh.load_state_dict(gathered)
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    error = answer(lambda: set_model_state_dict(fresh, gathered, options=everywhere))
    assert (rank == 0) or "got none of expert 4" in error
    dist.barrier()
    # A file that an earlier version has saved, of one rank's experts.
    old = {name: x.as_subclass(torch.Tensor) for name, x in layer.state_dict().items()}
    dcp.save({"model": old}, checkpoint_id=f"{folder}/old")
    with pytest.raises(dcp.api.CheckpointException, match=r"Size mismatch .*\[4, 64,.*\[8, 64"):
        dcp.load({"model": fresh.state_dict()}, checkpoint_id=f"{folder}/old")


class Block(torch.nn.Module):
    """A router and its experts."""

    def __init__(self, **options):
        super().__init__()
        self.router = torch.nn.Linear(H, E, bias=False)
        self.router.weight.data = random(E, H, seed=7)
        self.experts = layer_of(**options).requires_grad_()

    def forward(self, x):
        return self.experts(x, self.router(x))


def check_wrappers_of_two(rank):
    x, _ = batch()
    names = ["experts.w13_weight", "experts.w2_weight"]
    expected = Block(**summed(rank))(x)
    for ignored in ((), names):  # DistributedDataParallel sends buffers too
        block = Block(**summed(rank))
        block(x)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, ignored)
        with pytest.raises(ValueError, match=r"got ranks \[0, 1\] of the 2 .*_map'\].*_to_ignore"):
            DistributedDataParallel(block)(x)
    for shared in ({}, {"n_shared_experts": 1, "shared_expert_gate": True}):
        block = Block(**summed(rank), **shared)
        alone, ignored = block(x), names_of_experts(block)  # but not the gate, which all ranks have
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, ignored)
        torch.testing.assert_close(DistributedDataParallel(block)(x), alone)
    check_experts_beside_ddp(rank)
    DistributedDataParallel(Block())(x)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(NotImplementedError, match=r"that share the layer \[0, 1\].*replicas"):
        fully_shard(Block(**summed(rank)), mesh=mesh)
    torch.testing.assert_close(fully_shard(Block(), mesh=mesh)(x), expected)
    for original in (False, True):
        with pytest.raises(NotImplementedError, match="part of FullyShardedDataParallel"):
            cpu = torch.device("cpu")
            FullyShardedDataParallel(Block(**summed(rank)), use_orig_params=original, device_id=cpu)


def names_of_experts(model):
    """What is a rank's own, as the guide lists it."""
    names = []
    for prefix, layer in model.named_modules():
        if isinstance(layer, moe_ops.FusedMoE):
            own = {name for name, _ in layer.named_parameters(recurse=False)}
            own = own - {"shared_expert_gate_weight"} | {"expert_map"}
            names += [f"{prefix}.{name}" for name in own]
    return names


def check_experts_beside_ddp(rank):
    """It takes means over ranks for the router; experts keep sums over the tokens of all ranks."""
    x, whole = random(6, H, seed=11), Block()
    whole(x).square().sum().backward()
    block = Block(**exchanging(rank))
    names = names_of_experts(block)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, names)
    ddp = DistributedDataParallel(block)
    ddp(x[4 * rank : 4 + 2 * rank]).square().sum().backward()
    torch.testing.assert_close(block.router.weight.grad, whole.router.weight.grad / 2)
    for name in ("w13_weight", "w2_weight"):
        expected = getattr(whole.experts, name).grad[4 * rank : 4 * rank + 4]
        torch.testing.assert_close(getattr(block.experts, name).grad, expected)


def check_two(rank, ranks, folder):
    x, logits = batch()
    out = layer_of(**exchanging(rank, "symmetric"), max_num_tokens=8)(x, logits)
    torch.testing.assert_close(out, layer_of()(x, logits))
    for given, name in ((exchanging(rank, "symmetric"), "top_k"), (summed(rank), "top_k")):
        more = {"max_num_tokens": 8} if "dp_size" in given else {}
        layer = layer_of(**given, **more, top_k=2 + rank)
        error = answer(lambda layer=layer: layer(x, logits))
        assert error == answer(lambda layer=layer: layer(x, logits))  # and again
        assert f"{name} must be the same on every rank of the group, got 2 on rank 0, 3" in error
    error = answer(lambda: layer_of(**summed(rank))(x[: 3 + rank], logits[: 3 + rank]))
    assert "number of tokens must be the same on every rank of the group, got 3 on rank 0" in error
    if rank:  # the number of ranks is right
        with pytest.raises(ValueError, match="tp_group must have this process as rank 0"):
            layer_of(tp_size=2, tp_rank=0, reduce_results=True)
    dist.barrier()
    check_distributed_checkpoint(rank, folder)
    check_wrappers_of_two(rank)


def test_two_ranks(tmp_path):
    spawn(check_two, 2, str(tmp_path))


def check_four(rank, ranks, made_before):
    x, logits = batch()
    for kind in ("tp", "ep"):
        with pytest.raises(ValueError, match=r"tp_group must have 2 ranks, got 4 \(all processes"):
            layer_of(**summed(rank, kind))
    with pytest.raises(ValueError, match="tp_group must have 2 ranks, got 4"):
        made_before[rank % 2](x, logits)
    part = layer_of(tp_size=2, tp_rank=rank % 2)  # the caller adds, over some group
    with pytest.raises(ValueError, match="tp_group must have 2 ranks, got 4"):
        part.maybe_all_reduce_tensor_model_parallel(part(x, logits))
    with pytest.raises(ValueError, match="tp_group must have 1 ranks, got 4"):
        layer_of(tp_group=dist.group.WORLD)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ep"))
    check_replicas(rank, mesh)
    pairs = [[0, 3], [1, 2]]  # not replicas, though no two of them share a layer
    crossed, _ = dist.new_subgroups_by_enumeration(pairs)
    block = Block(**summed(rank), tp_group=mesh["ep"])
    with pytest.raises(ValueError, match="process_group of replicas that hold the same experts"):
        DistributedDataParallel(block, process_group=crossed)(x)


def check_replicas(rank, mesh):
    """Over replicas gradients are means: those of one process with all tokens, halved."""
    data, whole = mesh["data"], Block()
    x = random(8, H, seed=11)
    own = x[:4] if data.get_local_rank() == 0 else x[4:]
    whole(x).square().sum().div(2).backward()
    held = slice(0, 4) if rank % 2 == 0 else slice(4, 8)
    expected = whole.experts.w13_weight.grad[held]
    options = {**summed(rank), "tp_group": mesh["ep"]}
    ddp = DistributedDataParallel(Block(**options), process_group=data.get_group())
    ddp(own).square().sum().backward()
    torch.testing.assert_close(ddp.module.experts.w13_weight.grad, expected)
    sharded = fully_shard(Block(**options), mesh=data)
    torch.testing.assert_close(sharded(own), whole(own))


def test_four_ranks():
    spawn(check_four, 4, [layer_of(**summed(rank)) for rank in range(2)])
