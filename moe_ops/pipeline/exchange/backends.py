"""Which exchange each ``all2all_backend`` of a parallel config means."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.exchange.all_gather import AllGatherPrepareAndFinalize
from moe_ops.pipeline.exchange.base import TokenExchange
from moe_ops.pipeline.exchange.exact import ExactAllToAllPrepareAndFinalize
from moe_ops.pipeline.exchange.fixed_capacity import FixedCapacityPrepareAndFinalize
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.exchange.replicas import ReplicaExchange
from moe_ops.pipeline.exchange.symmetric import SymmetricPrepareAndFinalize
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalizeModular


class Needs(NamedTuple):
    """What an exchange is made from."""

    config: FusedMoEConfig
    group: RankGroup
    max_num_tokens: int | None
    """The largest number of tokens that any rank sends; None: not known."""
    expert_ranks: Tensor | None
    """int32 ``(E,)``: the rank that holds each expert; None: not known."""
    top_k: int
    """Slots of a token."""
    equal_num_tokens: bool
    """See `TokenExchange`."""
    capacity_factor: float
    """See `FixedCapacityPrepareAndFinalize`."""


def exchange_of(
    config: FusedMoEConfig,
    group: RankGroup,
    max_num_tokens: int | None = None,
    expert_ranks: Tensor | None = None,
    top_k: int | None = None,
    *,
    equal_num_tokens: bool = False,
    capacity_factor: float = 1.0,
) -> FusedMoEPrepareAndFinalizeModular:
    """Make the exchange that a layer's parallel config names.

    Args:
        config: the layer.
        group: its ranks.
        max_num_tokens: the largest number of tokens that any rank passes; None: not known.
        expert_ranks: int32 ``(E,)``, the rank that holds each expert; None: not known.
        top_k: slots of a token; None: those of the config. Fused shared experts add slots.
        equal_num_tokens: see `TokenExchange`.
        capacity_factor: see `FixedCapacityPrepareAndFinalize`; other exchanges have none.

    Returns:
        The exchange. If ranks of a replica have the same tokens, inside a `ReplicaExchange`.

    Raises:
        ValueError: an exchange that needs ``max_num_tokens`` without it.
    """
    parallel, most = config.moe_parallel_config, max_num_tokens
    backend, count = parallel.all2all_backend, parallel.replica_size
    if equal_num_tokens and backend in ("fixed_capacity", "alltoall"):
        raise ValueError(f"equal_num_tokens must be False with all2all_backend {backend!r}")
    slots = config.experts_per_token if top_k is None else top_k
    share = None if most is None else cdiv(most, count)
    ranks = expert_ranks if parallel.use_ep else None  # else every rank has a part of each expert
    options = (slots, equal_num_tokens, capacity_factor)
    exchange = MAKERS[backend](Needs(config, group, share, ranks, *options))
    if count == 1:
        return exchange
    return ReplicaExchange(exchange, group, parallel.layer_rank, count, most)


def _all_gather(given: Needs) -> TokenExchange:
    equal = given.equal_num_tokens
    return AllGatherPrepareAndFinalize(given.group, given.max_num_tokens, equal_num_tokens=equal)


def _symmetric(given: Needs) -> TokenExchange:
    if given.max_num_tokens is None:
        raise ValueError("max_num_tokens must be given for all2all_backend 'symmetric', got None")
    return SymmetricPrepareAndFinalize(
        given.group,
        given.max_num_tokens,
        given.config.hidden_dim,
        given.top_k,
        dtype=given.config.in_dtype,
        expert_ranks=given.expert_ranks,
        equal_num_tokens=given.equal_num_tokens,
        share="layers",
    )


def _fixed_capacity(given: Needs) -> TokenExchange:
    return FixedCapacityPrepareAndFinalize(
        given.group,
        given.max_num_tokens,
        given.expert_ranks,
        capacity_factor=given.capacity_factor,
    )


def _exact(given: Needs) -> TokenExchange:
    return ExactAllToAllPrepareAndFinalize(given.group, given.max_num_tokens, given.expert_ranks)


MAKERS: dict[str, Callable[[Needs], TokenExchange]] = {
    "allgather_reducescatter": _all_gather,
    "naive": _all_gather,
    "symmetric": _symmetric,
    "fixed_capacity": _fixed_capacity,
    "alltoall": _exact,
}
"""One entry for each of `moe_ops.parallel.parallel_config.IMPLEMENTED_BACKENDS`."""
