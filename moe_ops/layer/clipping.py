"""The norm of all gradients of a model whose experts lie on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from moe_ops import checks
from moe_ops.layer.adapters import ranks_of_adapters
from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.parameters import parameter_specs
from moe_ops.layer.replicas import first_replicas
from moe_ops.pipeline.exchange.groups import RankGroup


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of a model such that their norm, over all ranks, is at most ``max_norm``.

    As `torch.nn.utils.clip_grad_norm_`, which would give each rank another norm, that of its own
    experts, and so another factor. Here the experts of every rank count once, also those that have
    replicas, and so do adapters of them (see `mark_rank_adapters`) and a gradient that all ranks
    have. Gradients that `fully_shard` has made DTensors may be there too. All ranks of the layers
    must call this.

    Args:
        model: gradients of its parameters are scaled in place; parameters without one are skipped.
        max_norm: largest norm.
        norm_type: p of the p-norm, 1 or more; ``inf``: the largest entry.
        error_if_nonfinite: raise where the norm is no finite number.

    Returns:
        The norm before, a tensor with one element. It is the same on all ranks.

    Raises:
        TypeError: ``model`` is no module.
        TypeError, ValueError: ``max_norm`` is no number from 0 on, or ``norm_type`` none from 1 on.
        RuntimeError: a norm that is not finite, with ``error_if_nonfinite``.
    """
    checks.instance("model", model, nn.Module)
    for name, value, least in (("max_norm", max_norm, 0), ("norm_type", norm_type, 1)):
        checks.number(name, value)
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    groups, firsts = _of_single_ranks(model)
    norms = [_norms((x for x in model.parameters() if id(x) not in firsts), norm_type, {})]
    for group, spread in groups.items():
        norms.append(group.all_gather(_norms(spread, norm_type, firsts)))
    total = torch.linalg.vector_norm(torch.cat([x.to(norms[-1].device) for x in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients must be finite, got {float(total)}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    grads: dict[torch.device, list[Tensor]] = {}
    for x in model.parameters():
        if x.grad is not None:
            grads.setdefault(x.device, []).append(_local(x.grad))
    for device, tensors in grads.items():
        torch._foreach_mul_(tensors, factor.to(device))
    return total


def _of_single_ranks(
    model: nn.Module,
) -> tuple[dict[RankGroup, list[Tensor]], dict[int, Tensor | None]]:
    """Return the parameters that differ between ranks.

    Returns:
        The parameters of each group of ranks, and the `first_replicas` by the id of a parameter.
    """
    groups: dict[RankGroup, list[Tensor]] = {}
    firsts: dict[int, Tensor | None] = {}
    for module in model.modules():
        first = first_replicas(module) if isinstance(module, ExpertLayer) else None
        if isinstance(module, ExpertLayer) and (module.is_spread or first is not None):
            experts = (module._parameters.get(name) for name in parameter_specs(module.sizes))
            held = [x for x in experts if x is not None]  # not the gate of shared experts
            groups.setdefault(module.rank_group, []).extend(held)
            firsts |= {id(x): first for x in held}
    for x in model.parameters():
        group = ranks_of_adapters(x)
        if group is not None:
            groups.setdefault(group, []).append(x)
            firsts[id(x)] = None
    return groups, firsts


def _norms(
    parameters: Iterable[Tensor], norm_type: float, firsts: Mapping[int, Tensor | None]
) -> Tensor:
    """Return norms whose norm is that of all gradients, in float32 and in a fixed number.

    The first is that of plain tensors, the second that of DTensors over all of their ranks.
    ``firsts`` has the `first_replicas` by the id of a parameter: these rows are counted.
    """
    parameters = [*parameters]
    grads = [
        _first_rows(x.grad, firsts.get(id(x)), norm_type) for x in parameters if x.grad is not None
    ]
    sharded = [grad for grad in grads if hasattr(grad, "full_tensor")]
    plain = get_total_norm([x for x in grads if not hasattr(x, "full_tensor")], norm_type)
    whole: Any = get_total_norm(sharded, norm_type)
    device = parameters[0].device if parameters else plain.device
    both = (plain, _of_all_shards(whole))
    return torch.stack([x.to(device, torch.float32) for x in both])


def _first_rows(grad: Tensor, first: Tensor | None, norm_type: float) -> Tensor:
    """Return the gradient, or the norms of its rows, 0 for those that are not counted."""
    if first is None:
        return grad
    rows: Any = torch.linalg.vector_norm(grad.flatten(1), norm_type, 1, dtype=torch.float32)
    return torch.where(first, _of_all_shards(rows), 0)  # infinity times 0 would be NaN


def _of_all_shards(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x
