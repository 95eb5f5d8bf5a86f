"""The tensors of expert-parallel load balancing for all layers of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops import checks
from moe_ops.parallel.agreement import agree, gather_texts, process_group
from moe_ops.parallel.live_ranks import check_live_ranks, live_replicas
from moe_ops.parallel.moves import apply_moves, check_apart, check_rows, plan_moves, staging_for
from moe_ops.parallel.placement import (
    determine_expert_ranks,
    logical_experts,
)
from moe_ops.parallel.rebalance import (
    LogicalMaps,
    compute_logical_maps,
    keep_rows,
    rebalance_experts,
)
from moe_ops.parallel.rounds import Spread
from moe_ops.parallel.trained import check_untrained
from moe_ops.parallel.travel import RowExchange


class EplbTensors(NamedTuple):
    """The tensors of an `EplbState`."""

    physical_to_logical_map: Tensor
    """int64 ``(L, P)``; the same on all ranks."""
    expert_load: Tensor
    """int32 ``(L, P)``: slots that this process sent to each physical expert since the last
    `rebalance_`, at most 2**31 - 1."""
    logical_to_physical_map: Tensor
    """int64 ``(L, E, R)``, padded with -1; R is the number of redundant experts plus one."""
    logical_replica_count: Tensor
    """int64 ``(L, E)``."""


class EplbState(EplbTensors):
    """Placement and load of every layer. The tensors keep their addresses."""

    group_name: str | None = None
    """Name of the process group of the ranks that share the experts; None: this process holds all
    physical experts."""

    @classmethod
    @torch.inference_mode(False)  # calls and `rebalance_` write to the tensors
    def make(
        cls,
        num_layers: int,
        num_experts: int,
        num_redundant_experts: int,
        ep_size: int | None = None,
        device: torch.device | str | None = None,
        *,
        group: Any = None,
    ) -> EplbState:
        """Make the state before any load is known.

        Args:
            num_layers: L.
            num_experts: E.
            num_redundant_experts: physical experts beyond E: P is the sum of both.
            ep_size: ranks, of which rank r holds the physical experts from ``r * P / ep_size`` on;
                None: the ranks of ``group``, or 1.
            device: device of the tensors. With a group: the device of this rank's weights.
            group: the ranks of the layers' experts: a process group, its name, a 1-D `DeviceMesh`
                or a `RankGroup`. Every rank makes a state of its own, counts the slots of the
                tokens that it routes, and calls `rebalance_` together with the others. None: all
                physical experts are in this process.

        Raises:
            TypeError: a ``group`` of another kind; sizes that are no integers.
            ValueError: a negative ``num_layers``; no device of this name;
                ``num_experts + num_redundant_experts`` is not a multiple of ``ep_size``; a
                ``group`` of another number of ranks, or that this process is not in.
        """
        ranks = None if group is None else process_group(group)
        if ranks is not None and ep_size is not None:
            checks.size("ep_size", ep_size, "the number of ranks of group", ranks.size())
        if ep_size is None:
            ep_size = 1 if ranks is None else ranks.size()
        checks.at_least(0, num_layers=num_layers)
        device = None if device is None else checks.device("device", device)
        logical = logical_experts(num_experts, num_redundant_experts, ep_size)
        placement = torch.tensor(logical, device=device).repeat(num_layers, 1)
        maps = compute_logical_maps(placement, num_experts, num_redundant_experts + 1)
        state = cls(placement, torch.zeros_like(placement, dtype=torch.int32), *maps)
        state.group_name = None if ranks is None else ranks.group_name
        return state

    def logical_load(self) -> Tensor:
        """Return the load of every logical expert, summed over its replicas: int64 ``(L, E)``.

        With a group the load is also summed over its ranks, which must all call this. Ranks that
        have the same tokens each count them: only proportions matter.

        Raises:
            ValueError: on all ranks: a negative load on any of them.
        """
        load = torch.zeros_like(self.logical_replica_count)
        load.scatter_add_(1, self.physical_to_logical_map, self.expert_load.long())
        negative = (self.expert_load < 0).sum().reshape(1)
        if self.group_name is not None:
            told = torch.cat([load.flatten(), negative])
            dist.all_reduce(told, group=process_group(self.group_name))
            load, negative = told[:-1].view_as(load), told[-1:]
        if int(negative):
            raise ValueError(
                f"expert_load must not be negative on any rank, got {int(negative)} negative "
                "numbers: they do not count slots, or have wrapped"
            )
        return load

    def rebalance_(
        self,
        weights: Sequence[Sequence[Tensor]],
        num_groups: int,
        num_nodes: int,
        num_gpus: int,
        *,
        rows_in_flight: int = 2,
    ) -> None:
        """Place the experts by the recorded load, move their weights, and count from 0 again.

        Everything is overwritten in place, between two forward passes, so that captured graphs use
        the new placement. Experts that stay on their GPU keep their row.

        With a group, all ranks call this together, with the same arguments beside the contents of
        ``weights``. They sum their loads, compute the same placement, and send each other rows. A
        wrong argument of one rank raises on all ranks before anything has moved.

        Args:
            weights: for every layer its tensors ``(P, ...)``: weights, scales, biases, of any
                dtype (`FusedMoE.expert_tensors`). With a group of n ranks: this rank's own rows,
                ``(P / n, ...)``, on the device of the state.
            num_groups: see `rebalance_experts`.
            num_nodes: see `rebalance_experts`.
            num_gpus: see `rebalance_experts`. With a group: its number of ranks.
            rows_in_flight: the most experts that a rank sends, and the most that it receives, at a
                time. Memory of ``2 * rows_in_flight + 1`` experts of the largest layer is allocated
                with a group; without, that of one row of one tensor.

        Raises:
            TypeError, ValueError: as `rebalance_experts` and `move_experts`, also for tensors of
                two layers that share memory; loads that are negative, because a counter of int32
                has wrapped. Nothing has changed then.
            NotImplementedError: parameters that have received gradients in this process: an
                optimizer's state for their rows would stay behind (see the argument of
                `FusedMoE.expert_tensors`). State that was loaded before is not noticed.
            ValueError: with a group also on the other ranks; and a ``num_gpus`` that is not the
                number of ranks, tensors on another device than the state, arguments or placements
                that differ between ranks.
        """
        rest = (num_groups, num_nodes, num_gpus)
        for _ in self.rebalance_steps(weights, *rest, rows_in_flight=rows_in_flight):
            pass

    def rebalance_steps(
        self,
        weights: Sequence[Sequence[Tensor]],
        num_groups: int,
        num_nodes: int,
        num_gpus: int,
        *,
        rows_in_flight: int = 2,
    ) -> Iterator[int]:
        """Do what `rebalance_` does one layer at a time, so that forward passes can come between.

        The call itself checks the arguments, sums the load and chooses the new placement of all
        layers. Then each step of the returned iterator moves one layer. After a step the weights
        and the maps of every layer belong together, also if the iterator is not used up. With a
        group, all ranks must take a step at the same place between their forward passes.

        Args:
            weights: see `rebalance_`.
            num_groups: see `rebalance_`.
            num_nodes: see `rebalance_`.
            num_gpus: see `rebalance_`.
            rows_in_flight: see `rebalance_`.

        Returns:
            An iterator over the indices of the layers, each after its layer has moved.

        Raises:
            TypeError, ValueError: as `rebalance_`, in the call itself.
        """
        sizes = {"num_groups": num_groups, "num_nodes": num_nodes, "num_gpus": num_gpus}
        mover: _Mover
        if self.group_name is None:
            checks.at_least(1, rows_in_flight=rows_in_flight)
            mover = _RowsHere(self._checked(weights, 1))
        else:
            ranks = process_group(self.group_name)
            mover = agree(
                partial(gather_texts, ranks, self.expert_load.device),
                lambda: self._prepared(ranks, weights, sizes, rows_in_flight),
            )
        num_layers, num_physical = self.physical_to_logical_map.shape
        placement, _, _ = rebalance_experts(self.logical_load(), num_physical, **sizes)
        placement = keep_rows(self.physical_to_logical_map, placement, num_gpus)
        _, num_experts, max_replicas = self.logical_to_physical_map.shape
        maps = compute_logical_maps(placement, num_experts, max_replicas)
        return (self._step(layer, mover, placement, maps) for layer in range(num_layers))

    def set_live_ranks(self, ranks: Sequence[int]) -> None:
        """Choose replicas on these ranks alone, after the other ranks of the group have died.

        The maps are overwritten in place, so that captured graphs use them. Experts whose replicas
        are all on dead ranks keep one of these, whose slots an exchange leaves out: see
        `SymmetricPrepareAndFinalize.set_live_ranks`. All live ranks call both methods, between two
        forward passes. Nothing is sent. `rebalance_` needs all ranks of the group.

        Args:
            ranks: the live ranks of the group.

        Raises:
            TypeError: ``ranks`` is not a sequence of int.
            ValueError: a state without a group; no ranks, a rank twice, or one outside the group.
        """
        if self.group_name is None:
            raise ValueError("group must be given to EplbState.make to leave ranks out, got None")
        size, load = process_group(self.group_name).size(), self.expert_load
        expert_ranks = determine_expert_ranks(size, load.shape[1])
        live = torch.isin(expert_ranks, torch.tensor(check_live_ranks(ranks, size)))
        _, num_experts, max_replicas = self.logical_to_physical_map.shape
        maps = compute_logical_maps(self.physical_to_logical_map, num_experts, max_replicas)
        replicas, counts = live_replicas(maps.logical_to_physical_map, live.to(load.device))
        self.logical_to_physical_map.copy_(replicas)
        self.logical_replica_count.copy_(counts)

    def _step(self, layer: int, mover: _Mover, placement: Tensor, maps: LogicalMaps) -> int:
        """Move one layer's rows, then overwrite its maps."""
        mover.move(layer, self.physical_to_logical_map[layer].tolist(), placement[layer].tolist())
        self.physical_to_logical_map[layer].copy_(placement[layer])
        self.logical_to_physical_map[layer].copy_(maps.logical_to_physical_map[layer])
        self.logical_replica_count[layer].copy_(maps.logical_replica_count[layer])
        self.expert_load[layer].zero_()
        return layer

    def _checked(self, weights: Sequence[Sequence[Tensor]], ranks: int) -> list[list[Tensor]]:
        """Return the tensors of each layer after checking that they have the rows of one rank."""
        num_layers, num_physical = self.physical_to_logical_map.shape
        if not isinstance(weights, Sequence):
            raise TypeError(f"weights must be a sequence, got {type(weights).__name__}")
        checks.size("len(weights)", len(weights), "the number of layers", num_layers)
        layers = [list(tensors) for tensors in weights]
        rule = "the number of physical experts" + (" of a rank" if ranks > 1 else "")
        for i, tensors in enumerate(layers):
            check_rows(f"weights[{i}]", tensors, rule, num_physical // ranks)
        check_apart(_named(layers))
        check_untrained(_named(layers))
        return layers

    def _prepared(
        self,
        group: dist.ProcessGroup,
        weights: Sequence[Sequence[Tensor]],
        sizes: dict[str, int],
        limit: int,
    ) -> tuple[RowExchange, dict[str, str]]:
        """Check one rank's arguments; return what moves its rows, and what ranks must agree on."""
        ranks, device = group.size(), self.expert_load.device
        checks.at_least(1, rows_in_flight=limit, **sizes)
        checks.size("num_gpus", sizes["num_gpus"], "the number of ranks of the group", ranks)
        layers = self._checked(weights, ranks)
        for name, tensor in _named(layers).items():
            checks.same_device(name, tensor, "expert_load", self.expert_load)
        placed = self.physical_to_logical_map
        digest = hashlib.sha256(repr(placed.tolist()).encode()).hexdigest()
        facts = {name: str(number) for name, number in {**sizes, "rows_in_flight": limit}.items()}
        facts["logical_to_physical_map.shape"] = str(tuple(self.logical_to_physical_map.shape))
        facts["the digest of physical_to_logical_map"] = digest
        for i, tensors in enumerate(layers):
            rows = ", ".join(f"{tensor.dtype} {tuple(tensor.shape[1:])}" for tensor in tensors)
            facts[f"the rows of weights[{i}]"] = f"[{rows}]"
        spread = Spread(placed.shape[1] // ranks, ranks, sizes["num_nodes"])
        return RowExchange(group, spread, layers, limit, device), facts


class _Mover(Protocol):
    """What turns the placement ``old`` of one layer's rows into ``new``."""

    def move(self, layer: int, old: Sequence[int], new: Sequence[int]) -> None: ...


class _RowsHere:
    """Moves rows inside the tensors of this process, which hold all physical experts."""

    def __init__(self, weights: Sequence[Sequence[Tensor]]) -> None:
        self._weights = weights
        self._staging = staging_for(_named(weights).values())

    def move(self, layer: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Turn a layer's placement ``old`` into ``new``."""
        apply_moves(self._weights[layer], plan_moves(old, new), self._staging)


def _named(layers: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """All tensors, by the names that errors give them."""
    return {
        f"weights[{i}][{j}]": tensor
        for i, tensors in enumerate(layers)
        for j, tensor in enumerate(tensors)
    }


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

    def num_writes(self) -> int:
        """Return how often the maps were written; 0 if they are inference tensors."""
        maps = self.logical_to_physical_map
        return 0 if maps.is_inference() else maps._version

    def held_experts(self, num_physical: int) -> tuple[int, ...]:
        """Return the logical expert that each physical one holds now; -1: none."""
        held = [-1] * num_physical
        places, counts = self.logical_to_physical_map.tolist(), self.logical_replica_count.tolist()
        for expert, (replicas, count) in enumerate(zip(places, counts, strict=True)):
            for physical in replicas[:count]:
                held[physical] = expert
        return tuple(held)


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
