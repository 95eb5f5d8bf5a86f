"""Replicas of balanced layers under `DistributedDataParallel`: rows must be the same experts."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moe_ops
from moe_ops import EplbState
from moe_ops.layer import rank_checks

E, K, H, I, T, REDUNDANT = 8, 2, 32, 64, 12, 4  # noqa: E741
NAMES = ("w13_weight", "w2_weight")
APART = "replicas that place experts alike, .* different experts. .*all_reduce.state.expert_load"


def layer_of(**options):
    torch.manual_seed(0)  # the numbers of each expert follow from it, wherever it is
    return moe_ops.FusedMoE(E, K, H, I, **options)


def way(rank, ranks):
    """The ranks of a replica, their group, the group of replicas, and the layer's options."""
    if ranks == 2:  # each replica is one process, on which four ranks are balanced
        return 4, None, dist.group.WORLD, {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ep"))
    options = {"ep_size": 2, "ep_rank": rank % 2, "reduce_results": True, "tp_group": mesh["ep"]}
    return 2, mesh["ep"], mesh["data"].get_group(), options


def batch(seed=1):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(T, n, generator=g) for n in (H, E, H))


class Replica:
    """A balanced layer under `DistributedDataParallel`, whose optimizer moves with its experts."""

    def __init__(self, ep_size, group, data, options):
        self.layer = layer_of(enable_eplb=True, num_redundant_experts=REDUNDANT, **options)
        self.data, self.ep_size = data, ep_size
        self.state = EplbState.make(1, E, REDUNDANT, ep_size, group=group)
        self.layer.set_eplb_state(0, *self.state[1:])
        self.optimizer = torch.optim.SGD(self.layer.parameters(), 0.1)
        self.model = None

    def wrap(self):
        self.model = DistributedDataParallel(self.layer, process_group=self.data)
        return self

    def rebalance(self, seed, *, together):
        """Place experts by the loads of all replicas together, or by this replica's own load."""
        g = torch.Generator().manual_seed(10 * seed + self.data.rank())
        load = torch.randint(0, 1000, (1, E + REDUNDANT), generator=g, dtype=torch.int32)
        self.state.expert_load.copy_(load)
        if together:
            dist.all_reduce(self.state.expert_load, group=self.data)
        before = self.state.physical_to_logical_map.clone()
        tensors = self.layer.expert_tensors(self.optimizer)
        self.state.rebalance_([tensors], 1, 1, self.ep_size)
        assert (before != self.state.physical_to_logical_map).any()

    def loss(self, rows):
        """Return the loss over this replica's part of a batch."""
        own = slice(self.data.rank() * T // 2, (self.data.rank() + 1) * T // 2)
        x, logits, y = (tensor[own] for tensor in rows)
        return (self.model(x, logits) - y).square().sum()

    def gradients(self, rows):
        self.optimizer.zero_grad()
        self.loss(rows).backward()
        return [getattr(self.layer, name).grad for name in NAMES]


def gradients_of_whole(rows):
    """Return half of the gradients that one process with all tokens has: the replicas' mean."""
    layer, (x, logits, y) = layer_of(), rows
    (layer(x, logits) - y).square().sum().div(2).backward()
    return [getattr(layer, name).grad for name in NAMES]


@contextmanager
def counted_comparisons():
    """Counts how often this rank has told the others something."""
    calls, gather = [], rank_checks.gather_texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_checks, "gather_texts", lambda *a: calls.append(a) or gather(*a))
        yield calls


def check_one_placement(given):
    """Loads that are summed over replicas place experts alike; nothing else is compared twice."""
    replica, rows = Replica(*given).wrap(), batch()
    expected = gradients_of_whole(rows)
    with counted_comparisons() as calls:
        for seed in range(3):
            if seed:
                replica.rebalance(seed, together=True)
            for _ in range(2):
                found = replica.gradients(rows)
            experts = replica.layer.state.held_placement().experts
            for actual, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(actual, wanted[experts])
            assert len(calls) == 1 + seed


def check_placements_apart(given):
    """A load of each replica's own raises on all of them before a gradient is averaged."""
    replica, rows = Replica(*given).wrap(), batch()
    replica.gradients(rows)
    replica.rebalance(1, together=False)
    with torch.no_grad():
        replica.loss(rows)  # each replica is right by itself
    for _ in range(2):
        with pytest.raises(ValueError, match=APART):
            replica.loss(rows)
    late = Replica(*given)
    late.rebalance(1, together=False)
    late.wrap()  # overwrites the experts of all replicas but the first
    with pytest.raises(ValueError, match=APART), torch.no_grad():
        late.loss(rows)


def check_frozen_experts(given):
    """They have no gradients that could be averaged: each replica moves them when it likes."""
    replica = Replica(*given)
    replica.layer.requires_grad_(False)
    router = torch.nn.Linear(H, E, bias=False)
    block = torch.nn.ModuleDict({"router": router, "experts": replica.layer})
    block.forward = lambda x, logits: replica.layer(x, router(x))
    replica.model = DistributedDataParallel(block, process_group=replica.data)
    replica.loss(batch()).backward()
    if replica.data.rank():
        replica.rebalance(1, together=False)
    replica.loss(batch()).backward()


def check_other_maps(given):
    """Maps that are set later are compared too, even if they were written equally often."""
    replica, rows = Replica(*given).wrap(), batch()
    replica.gradients(rows)
    load, places, counts = (x.clone() for x in replica.state[1:])
    by = 1 if replica.data.rank() else 0
    places, counts = places.roll(by, 1), counts.roll(by, 1)
    for _ in range(replica.layer.eplb_state.num_writes()):
        torch.autograd.graph.increment_version(places)
    before = replica.layer.eplb_state
    replica.layer.set_eplb_state(0, load, places, counts)
    assert replica.layer.eplb_state.num_writes() == before.num_writes()
    with pytest.raises(ValueError, match=APART):
        replica.loss(rows)


def check(rank, ranks):
    given = way(rank, ranks)
    check_one_placement(given)
    check_placements_apart(given)
    check_frozen_experts(given)
    check_other_maps(given)
    dist.barrier()


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_place_experts_alike(ranks):
    spawn(check, ranks)
