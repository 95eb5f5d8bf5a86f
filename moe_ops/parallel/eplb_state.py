"""The tensors of expert-parallel load balancing for all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.parallel.moves import apply_moves, check_apart, checked_moves, staging_for
from moe_ops.parallel.placement import initial_physical_to_logical_map
from moe_ops.parallel.rebalance import compute_logical_maps, rebalance_experts


class EplbState(NamedTuple):
    """Placement and load of every layer. The tensors keep their addresses."""

    physical_to_logical_map: Tensor
    """int64 ``(L, P)``."""
    expert_load: Tensor
    """int32 ``(L, P)``: slots sent to each physical expert since the last `rebalance_`."""
    logical_to_physical_map: Tensor
    """int64 ``(L, E, R)``, padded with -1; R is the number of redundant experts plus one."""
    logical_replica_count: Tensor
    """int64 ``(L, E)``."""

    @classmethod
    def make(
        cls,
        num_layers: int,
        num_experts: int,
        num_redundant_experts: int,
        ep_size: int = 1,
        device: torch.device | str | None = None,
    ) -> EplbState:
        """Make the state before any load is known.

        Raises:
            ValueError: ``num_experts + num_redundant_experts`` is not a multiple of ``ep_size``.
        """
        placement = initial_physical_to_logical_map(num_experts, num_redundant_experts, ep_size)
        placement = placement.to(device).repeat(num_layers, 1)
        maps = compute_logical_maps(placement, num_experts, num_redundant_experts + 1)
        return cls(placement, torch.zeros_like(placement, dtype=torch.int32), *maps)

    def logical_load(self) -> Tensor:
        """Return the load of every logical expert, summed over its replicas: int64 ``(L, E)``."""
        load = torch.zeros_like(self.logical_replica_count)
        return load.scatter_add_(1, self.physical_to_logical_map, self.expert_load.long())

    def rebalance_(
        self,
        weights: Sequence[Sequence[Tensor]],
        num_groups: int,
        num_nodes: int,
        num_gpus: int,
    ) -> None:
        """Place the experts by the recorded load, move their weights, and count from 0 again.

        Everything is overwritten in place, between two forward passes, so that captured graphs use
        the new placement. All physical experts are in this process.

        Args:
            weights: for every layer its tensors ``(P, ...)``: weights, scales, biases.
            num_groups: see `rebalance_experts`.
            num_nodes: see `rebalance_experts`.
            num_gpus: see `rebalance_experts`.

        Raises:
            TypeError, ValueError: as `rebalance_experts` and `move_experts`, also for tensors of
                two layers that share memory. Nothing has changed then.
        """
        num_layers, num_physical = self.physical_to_logical_map.shape
        checks.size("len(weights)", len(weights), "the number of layers", num_layers)
        placement, _, _ = rebalance_experts(
            self.logical_load(), num_physical, num_groups, num_nodes, num_gpus
        )
        _, num_experts, max_replicas = self.logical_to_physical_map.shape
        maps = compute_logical_maps(placement, num_experts, max_replicas)
        named, plans = {}, []
        for layer, tensors in enumerate(weights):
            old, name = self.physical_to_logical_map[layer], f"weights[{layer}]"
            plans.append(checked_moves(name, tensors, old, placement[layer]))
            named.update({f"{name}[{i}]": tensor for i, tensor in enumerate(tensors)})
        check_apart(named)
        staging = staging_for(named.values())
        changes = (
            (self.physical_to_logical_map, placement),
            (self.logical_to_physical_map, maps.logical_to_physical_map),
            (self.logical_replica_count, maps.logical_replica_count),
        )
        for layer, tensors in enumerate(weights):  # weights and maps of one layer stay together
            apply_moves(tensors, plans[layer], staging)
            for tensor, new in changes:
                tensor[layer].copy_(new[layer])
            self.expert_load[layer].zero_()


class LayerEplbState(NamedTuple):
    """What the calls of one layer read and count: see `eplb_map_to_physical_and_record`."""

    expert_load_view: Tensor
    """``(P,)``."""
    logical_to_physical_map: Tensor
    """``(E, R)``."""
    logical_replica_count: Tensor
    """``(E,)``."""
    record_enabled: Tensor | None = None
    seed: int = 0
    step: Tensor | None = None
    """None: the layer counts its calls."""


def layer_of(
    layer: int,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    num_experts: int,
    num_physical: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one layer's views of the tensors of all layers, checked against the layer's sizes.

    Raises:
        TypeError, ValueError: a wrong dtype or number of axes, a layer out of range, or sizes and a
            placement that do not match the layer's experts.
    """
    checks.integer("moe_layer_idx", layer)
    for name, x, ndim in (
        ("expert_load_view", expert_load_view, 2),
        ("logical_to_physical_map", logical_to_physical_map, 3),
        ("logical_replica_count", logical_replica_count, 2),
    ):
        checks.tensor(name, x, ndim, checks.INDICES)
        if not 0 <= layer < x.shape[0]:
            raise ValueError(
                f"moe_layer_idx must be in 0..{x.shape[0] - 1}, the layers of {name}, got {layer}"
            )
    for name, size, rule, expected in (
        ("expert_load_view", expert_load_view.shape[1], "physical experts", num_physical),
        ("logical_to_physical_map", logical_to_physical_map.shape[1], "experts", num_experts),
        ("logical_replica_count", logical_replica_count.shape[1], "experts", num_experts),
    ):
        checks.size(f"{name}.shape[1]", size, f"the layer's {rule}", expected)
    places, counts = logical_to_physical_map[layer], logical_replica_count[layer]
    if not places.is_meta and places.numel():
        check_placement(places, counts, num_physical)
    return expert_load_view[layer], places, counts


def check_placement(places: Tensor, counts: Tensor, num_physical: int) -> None:
    """Check that every expert has replicas, all of them physical experts.

    A slot that is sent anywhere else would add zeros to the result.

    Raises:
        ValueError: a count outside ``1..R``, or a replica that the layer does not hold.
    """
    most = places.shape[1]
    lowest, highest = (int(x) for x in counts.aminmax())
    if lowest < 1 or highest > most:
        raise ValueError(
            f"logical_replica_count must be in 1..{most}, got {lowest if lowest < 1 else highest}"
        )
    used = torch.arange(most, device=places.device) < counts[:, None]
    lowest, highest = (int(x) for x in places[used].aminmax())
    if lowest < 0 or highest >= num_physical:
        raise ValueError(
            f"logical_to_physical_map must be in 0..{num_physical - 1}, the layer's physical "
            f"experts, got {lowest if lowest < 0 else highest}"
        )
