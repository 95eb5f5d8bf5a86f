"""What balancing gains: the load of every rank under a skewed routing, before and after."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.parallel.eplb import eplb_map_to_physical_and_record
from moe_ops.parallel.eplb_state import EplbState


class BalanceReport(NamedTuple):
    """Number of slots of each rank, for tokens that the balancer had not seen."""

    before: Tensor
    """int64 ``(ep_size,)``: with the initial placement."""
    after: Tensor
    """int64 ``(ep_size,)``: with the placement made from the load of other tokens."""


def imbalance(rank_load: Tensor) -> float:
    """Return the busiest rank's load over the average load: 1 is balanced.

    Returns:
        The ratio, at least 1; without any load 1.
    """
    mean = rank_load.double().mean()
    return (rank_load.max() / mean).item() if mean else 1.0


def simulate_balance(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    num_redundant_experts: int,
    ep_size: int,
    *,
    exponent: float = 1.0,
    num_groups: int = 1,
    num_nodes: int = 1,
    seed: int = 0,
) -> BalanceReport:
    """Route tokens by a Zipf law, balance, and route as many other tokens by the same law.

    The odds of the r-th favourite expert are ``r ** -exponent``; favourites are in random places.

    Args:
        num_tokens: T of each of the two batches.
        num_experts: E.
        top_k: k.
        num_redundant_experts: physical experts beyond E.
        ep_size: ranks, dividing the physical experts.
        exponent: 0 is uniform.
        num_groups: see `rebalance_experts`.
        num_nodes: see `rebalance_experts`.
        seed: seed of the routing.

    Returns:
        The load of each rank under the second batch, before and after balancing.

    Raises:
        TypeError, ValueError: as `rebalance_experts`; ``top_k`` outside 1..E; an ``exponent`` that
            is not finite.
    """
    checks.at_least(0, num_tokens=num_tokens)
    checks.at_least(1, num_experts=num_experts)
    checks.topk("top_k", top_k, num_experts)
    checks.factor("exponent", exponent)
    checks.integer("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    favourite = torch.randperm(num_experts, generator=generator, device="cpu") + 1
    log_odds = -exponent * favourite.double().log()

    def draw() -> Tensor:
        """Distinct experts for each token: the largest of its perturbed log odds."""
        size = num_tokens, num_experts
        uniform = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
        return (log_odds - (-uniform.log()).log()).topk(top_k).indices

    state = EplbState.make(1, num_experts, num_redundant_experts, ep_size, "cpu")

    def rank_load(ids: Tensor) -> Tensor:
        _, load, replicas, count = (x[0] for x in state)
        load.zero_()
        eplb_map_to_physical_and_record(ids, load, replicas, count)
        return load.view(ep_size, -1).sum(1)

    seen, unseen = draw(), draw()
    before = rank_load(unseen)
    rank_load(seen)
    state.rebalance_([[]], num_groups, num_nodes, ep_size)
    return BalanceReport(before, rank_load(unseen))
