"""Which exchange each ``all2all_backend`` of a parallel config means."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.exchange.base import TokenExchange
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.exchange.records import Needs
from moe_ops.pipeline.exchange.replicas import ReplicaExchange

EXCHANGES = {
    "allgather_reducescatter": ("all_gather", "AllGatherPrepareAndFinalize"),
    "naive": ("all_gather", "AllGatherPrepareAndFinalize"),
    "symmetric": ("symmetric", "SymmetricPrepareAndFinalize"),
    "fixed_capacity": ("fixed_capacity", "FixedCapacityPrepareAndFinalize"),
    "alltoall": ("exact", "ExactAllToAllPrepareAndFinalize"),
}
"""Module and class of each backend of `moe_ops.parallel.parallel_config.IMPLEMENTED_BACKENDS`.

A module is imported when an exchange of its class is made.
"""


def exchange_of(
    config: FusedMoEConfig,
    group: RankGroup,
    max_num_tokens: int | None = None,
    expert_ranks: Callable[[], Tensor] | None = None,
    top_k: int | None = None,
    **options: Any,
) -> TokenExchange:
    """Make the exchange that a layer's parallel config names.

    Args:
        config: the layer.
        group: its ranks.
        max_num_tokens: the largest number of tokens that any rank passes; None: not known.
        expert_ranks: returns int32 ``(E,)``, the rank that holds each expert. It is called only if
            the exchange takes that. None: not known.
        top_k: slots of a token; None: as in the config. Fused shared experts add slots.
        **options: the fields of `Needs` that have a default.

    Returns:
        The exchange. If ranks of a replica have the same tokens, inside a `ReplicaExchange`.

    Raises:
        ValueError: an exchange that needs ``max_num_tokens`` without it; an option that the
            exchange does not take.
        NotImplementedError: ``on_dead_rank`` "mask" where ranks of a replica have the same tokens.
    """
    parallel = config.moe_parallel_config
    backend, count = parallel.all2all_backend, parallel.replica_size
    kind = exchange_class(backend)
    # Without expert parallelism every rank has a part of each expert.
    holders = expert_ranks if parallel.use_ep and "expert_ranks" in kind.takes else None
    needs = Needs(
        group,
        None if max_num_tokens is None else cdiv(max_num_tokens, count),
        None if holders is None else holders(),
        config.hidden_dim,
        config.experts_per_token if top_k is None else top_k,
        config.in_dtype,
        **options,
    )
    _check_taken(kind, needs)
    if count > 1 and needs.on_dead_rank != "raise":
        raise NotImplementedError(
            f'on_dead_rank must be "raise" where {count} ranks have the same tokens, whose results '
            f'travel in a collective of these, got "{needs.on_dead_rank}"'
        )
    exchange = kind.make(needs)
    if count == 1:
        return exchange
    return ReplicaExchange(exchange, parallel.layer_rank, count, max_num_tokens)


def exchange_class(backend: str) -> type[TokenExchange]:
    """The class of a backend's exchanges."""
    module, name = EXCHANGES[backend]
    return getattr(import_module(f"moe_ops.pipeline.exchange.{module}"), name)


def _check_taken(kind: type[TokenExchange], needs: Needs) -> None:
    """Raise ValueError if an option is given that this exchange does not take."""
    for name, default in Needs._field_defaults.items():
        value = getattr(needs, name)
        if name not in kind.takes and value != default:
            able = [backend for backend in EXCHANGES if name in exchange_class(backend).takes]
            raise ValueError(
                f"{name} must be {default} unless all2all_backend is one of {able}, got {value}"
            )
