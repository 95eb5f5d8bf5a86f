"""Which exchange each ``all2all_backend`` of a parallel config means."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.exchange.all_gather import AllGatherPrepareAndFinalize
from moe_ops.pipeline.exchange.base import TokenExchange
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.exchange.replicas import ReplicaExchange
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalizeModular


class Needs(NamedTuple):
    """What an exchange is made from."""

    config: FusedMoEConfig
    group: RankGroup
    max_num_tokens: int | None
    """The largest number of tokens that any rank sends; None: not known."""
    expert_ranks: Tensor | None
    """int32 ``(E,)``: the rank that holds each expert; None: not known."""


def exchange_of(
    config: FusedMoEConfig,
    group: RankGroup,
    max_num_tokens: int | None = None,
    expert_ranks: Tensor | None = None,
) -> FusedMoEPrepareAndFinalizeModular:
    """Make the exchange that a layer's parallel config names.

    Args:
        config: the layer.
        group: its ranks.
        max_num_tokens: the largest number of tokens that any rank passes; None: not known.
        expert_ranks: int32 ``(E,)``, the rank that holds each expert; None: not known.

    Returns:
        The exchange. If ranks of a replica have the same tokens, inside a `ReplicaExchange`.

    Raises:
        ValueError: an exchange that needs one of the last two without it.
    """
    parallel, most = config.moe_parallel_config, max_num_tokens
    count = parallel.replica_size
    share = None if most is None else cdiv(most, count)
    exchange = MAKERS[parallel.all2all_backend](Needs(config, group, share, expert_ranks))
    if count == 1:
        return exchange
    return ReplicaExchange(exchange, group, parallel.layer_rank, count, most)


def _all_gather(given: Needs) -> TokenExchange:
    return AllGatherPrepareAndFinalize(given.group, given.max_num_tokens)


MAKERS: dict[str, Callable[[Needs], TokenExchange]] = {
    "allgather_reducescatter": _all_gather,
    "naive": _all_gather,
}
"""One entry for each of `moe_ops.parallel.parallel_config.IMPLEMENTED_BACKENDS`."""
