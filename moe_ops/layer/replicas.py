"""Training experts that have replicas: every replica gets the gradient of its logical expert.

That is the sum over the replicas, each of which has computed a part of the expert's tokens. It is
summed once, in the order of rows and of ranks, and all replicas get the same bits. So equal
replicas stay equal under an optimizer that treats all rows alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from moe_ops import ops
from moe_ops.dispatch.tiles import cdiv
from moe_ops.gradients import once, wanted
from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.main_grads import Weights
from moe_ops.parallel.trained import watch
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.exchange.messages import padded, sum_of_ranks


class Own(NamedTuple):
    """The rows of a rank among the physical experts."""

    group: RankGroup
    """The ranks that share the experts."""
    first: int
    """The physical expert of the first row."""
    rows: int
    most: int
    """The most experts that may have replicas."""


def trained_together(layer: ExpertLayer) -> Weights:
    """Return the weights and biases of a layer with ``enable_eplb``, for one call.

    Gradients of what requires grad are summed over replicas, in collectives if ranks share the
    experts. `EplbState.rebalance_` refuses to move weights that get gradients without the
    optimizer's state: see `FusedMoE.expert_tensors`.

    Raises:
        NotImplementedError: a bias that requires grad beside a ``layer.kernel`` that was set.
    """
    weights: Weights = (layer.w13_weight, layer.w2_weight, layer.w13_bias, layer.w2_bias)
    trained, state, own = wanted(*weights), layer.eplb_state, own_rows(layer)
    if not torch.compiler.is_compiling():
        watch(trained)
    if own is None or state is None or len(trained) == 0:
        return weights
    biases = wanted(*weights[2:])
    if layer.state.kernel is not None and len(biases) > 0:
        raise NotImplementedError(
            "w13_bias and w2_bias must not require grad with num_redundant_experts beside a "
            "layer.kernel that was set, which has biases of its own, got biases that do"
        )
    maps = state.logical_to_physical_map, state.logical_replica_count
    together = iter(_Together.apply(own, *maps, *trained))
    joined: Any = tuple(next(together) if any(x is y for y in trained) else x for x in weights)
    return joined  # type: ignore[no-any-return]


def own_rows(layer: ExpertLayer) -> Own | None:
    """Return which rows a layer holds; None: no expert has replicas."""
    redundant = layer.global_num_experts - layer.num_experts
    if not layer.enable_eplb or not redundant:
        return None
    most, rows = min(redundant, layer.num_experts), layer.sizes.num_experts
    if not layer.placement.is_shared_out:
        return Own(RankGroup(), 0, rows, most)
    return Own(layer.rank_group, layer.moe_parallel_config.ep_rank * rows, rows, most)


def first_replicas(layer: ExpertLayer) -> Tensor | None:
    """Return bool ``(El,)``, True for one row of each expert over all ranks; None: for all rows."""
    state, own = layer.eplb_state, own_rows(layer)
    if state is None or own is None:
        return None
    physical = torch.arange(own.first, own.first + own.rows, device=layer.w13_weight.device)
    return (physical[:, None] == state.logical_to_physical_map[:, 0]).any(1)


class _Together(Function):
    """Weights of experts whose gradients are summed over replicas."""

    @staticmethod
    def forward(
        ctx: Any, own: Own, places: Tensor, counts: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the weights; rows must not move between this and the backward pass."""
        ctx.own = own
        ctx.save_for_backward(places, counts)
        return tuple(x.view_as(x) for x in weights)

    @staticmethod
    @once("FusedMoE with num_redundant_experts")
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> Any:
        """Sum the gradients of each expert's replicas."""
        rows = rows_of_replicas(ctx.own, *saved)
        return None, None, None, *(_summed(grad, rows, ctx.own.group) for grad in grads)


def rows_of_replicas(own: Own, places: Tensor, counts: Tensor) -> Tensor:
    """Return this rank's rows of each expert that has replicas, ascending, then El: ``(D, C)``.

    Args:
        own: this rank's El rows.
        places: ``(E, R)``, the physical experts of each logical one.
        counts: ``(E,)``, how many there are.
    """
    replicated = (counts > 1).int().argsort(descending=True, stable=True)[: own.most]
    used = torch.arange(places.shape[1], device=places.device) < counts[replicated, None]
    rows = places[replicated].long() - own.first
    rows = torch.where(used & (rows >= 0) & (rows < own.rows), rows, own.rows)
    return rows.sort(1).values[:, : own.rows]


def _summed(grad: Tensor, rows: Tensor, group: RankGroup) -> Tensor:
    """Replace the gradients of ``rows (D, C)`` by sums over each row of ``rows`` and the ranks."""
    num_rows, (experts, columns) = grad.shape[0], rows.shape
    flat = grad.contiguous().view(-1, grad.shape[-1])
    each = flat.shape[0] // num_rows  # rows of a matrix
    at = rows[:, None] * each + torch.arange(each, device=rows.device)[:, None]
    sums = ops.moe_unpermute(flat, None, at.view(-1, columns).int(), None)
    size = cdiv(len(sums), group.size) * group.size
    shares = group.wait(group.start_exchange(padded(sums, size)))
    sums = group.all_gather(sum_of_ranks(shares, group.size))[: len(sums)]
    number = torch.arange(experts, device=rows.device).repeat_interleave(columns)
    place = rows.new_full((num_rows + 1,), -1).scatter(0, rows.flatten(), number)[:num_rows]
    summed = sums.view(experts, *grad.shape[1:])[place.clamp(min=0)]
    return torch.where(place.view(-1, *[1] * (grad.dim() - 1)) >= 0, summed, grad)
