"""What a state dict says about the rank that it belongs to.

Ranks of a layer have tensors of the same names and shapes that hold different experts, or different
parts of experts. So the entry ``_extra_state`` of a layer over several ranks names the experts of
the rows, the number of all experts, and the part of each expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.layer.rank_tensor import RankPiece, RankTensor
from moe_ops.layer.state import LayerState, short

WHOLE_EXPERTS = (0, 1)
"""The part of a rank that does not share its experts with others."""
ORDER = "w13_input_order"
"""The end of the name of a tensor that may have one row for all experts."""


class RankState(RankTensor):
    """The entry ``_extra_state`` of one rank.

    `torch.distributed.checkpoint` saves and loads ``whole`` instead, the entry of the layer on one
    rank, since it saves the tensors of the whole layer.
    """

    whole: Tensor

    def saved(self) -> Tensor:
        """Return ``whole``."""
        return self.whole


def rank_state(entry: Tensor, whole: Tensor, refusal: str) -> RankState:
    """Return the entry of a rank, which knows that of the whole layer."""
    state = entry.as_subclass(RankState)
    state.global_shape, state.whole, state.refusal = whole.shape, whole, refusal
    state.pieces = (RankPiece((0,), (0,), tuple(whole.shape)),)
    return state


class RankPart(NamedTuple):
    """What the rows of one rank's tensors hold."""

    experts: tuple[int, ...] | None = None
    """The expert of each row, -1 for none; None: not said."""
    num_experts: int | None = None
    """Number of experts of the layer, all ranks together."""
    part: tuple[int, int] | None = None
    """``(i, n)``: part i of n of each expert, cut along I; None: not said."""

    @classmethod
    def of(cls, state: LayerState) -> RankPart:
        """Return what the rows of a layer over several ranks, or with ``enable_eplb``, hold."""
        experts, parallel = state.held_placement().experts, state.parallel
        if parallel.layer_size == 1:
            return cls(tuple(experts)) if parallel.enable_eplb else cls()
        return cls(tuple(experts), state.num_experts, (parallel.tp_rank, parallel.tp_size))

    @classmethod
    def parse(cls, entries: dict[str, Any]) -> RankPart:
        """Read the entries of an ``_extra_state``.

        Raises:
            ValueError: a value of another kind, which is the message.
        """
        experts, count, part = (entries.get(name) for name in cls._fields)
        if not (experts is None or _are_ints(experts)):
            raise ValueError(f"experts {experts}")
        if not (count is None or _are_ints([count])):
            raise ValueError(f"num_experts {count}")
        if part is not None and not (_are_ints(part) and len(part) == 2 and 0 <= part[0] < part[1]):
            raise ValueError(f"part {part}")
        rows = None if experts is None else tuple(experts)
        return cls(rows, count, None if part is None else (part[0], part[1]))

    def entries(self) -> dict[str, Any]:
        """Return the entries of an ``_extra_state``: what is known."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def check_fits(self, state: LayerState) -> None:
        """Check that tensors of this rank may be loaded into a layer; rows may be in other orders.

        Raises:
            ValueError: a layer of another number of experts, another part of the experts, or an
                expert that the layer does not have.
        """
        self._check_count(state)
        own = (state.parallel.tp_rank, state.parallel.tp_size)
        if self.part not in (None, own):
            raise ValueError(
                f"tensors of the state dict must be part {own[0]} of {own[1]} of each expert, as "
                f"this rank's are, got part {self.part[0]} of {self.part[1]}"
            )
        unknown = [e for e in self.experts or () if e != -1 and e not in state.placement.rows]
        if unknown:
            raise ValueError(
                "experts of the state dict must be those of the layer, "
                f"0..{max(state.placement.rows)}, got {unknown[0]}"
            )

    def check_whole(self, state: LayerState) -> None:
        """Check that the rows are all experts of a layer in order, and whole.

        Raises:
            ValueError: they are not.
        """
        self._check_count(state)
        if self.experts not in (None, tuple(range(state.num_experts))):
            raise ValueError(
                "rows must hold the experts in order (load_state_dict takes other placements), got "
                f"experts {short(self.experts)}"
            )
        if self.part not in (None, WHOLE_EXPERTS):
            raise ValueError(
                f"tensors must hold whole experts, got part {self.part[0]} of {self.part[1]} of "
                "each, which one rank saved"
            )

    def _check_count(self, state: LayerState) -> None:
        if self.num_experts not in (None, state.num_experts):
            raise ValueError(
                f"num_experts of the state dict must be that of the layer, {state.num_experts}, "
                f"got {self.num_experts}"
            )

    def check_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Check that tensors have a row for each expert; an order of columns may have one for all.

        Raises:
            ValueError: the name of a tensor with another number of rows.
        """
        count = len(self.experts or ())
        for name, x in rows.items():
            if x.shape[0] != count and not (name.endswith(ORDER) and x.shape[0] == 1):
                raise ValueError(
                    f"{name} must have a row for each of the {count} experts that _extra_state "
                    f"names, got {x.shape[0]}"
                )

    def reordered(self, rows: Mapping[str, Tensor], wanted: Sequence[int]) -> dict[str, Tensor]:
        """Return tensors with the rows of the ``wanted`` experts, where these are other rows.

        Raises:
            ValueError: no row holds one of the experts, or rows of an expert differ.
        """
        experts = self.experts or ()
        if experts == tuple(wanted):
            return {}
        lacking = {*wanted} - {-1, *experts}
        if lacking:
            raise ValueError(
                "rows of the state dict must hold every expert that the layer's rows hold now, "
                f"{short(wanted)} (load_checkpoint reads any expert from a whole checkpoint), got "
                f"none of expert {min(lacking)}: its rows hold {short(experts)}"
            )
        first = {expert: row for row, expert in reversed([*enumerate(experts)])}
        copies = [(row, first[e]) for row, e in enumerate(experts) if e >= 0 and first[e] != row]
        tensors = {}
        for name, x in rows.items():
            if x.shape[0] != len(experts):
                continue
            for row, other in copies:
                if not _equal(x[row], x[other]):
                    raise ValueError(
                        f"{name} must be the same in all replicas of an expert, got rows {other} "
                        f"and {row} of expert {experts[row]} that differ"
                    )
            tensors[name] = torch.stack([x[first.get(expert, 0)] for expert in wanted])
        return tensors


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether two rows have the same bytes; rows without contents do."""
    if x.is_meta or y.is_meta:
        return True
    first, second = (t.reshape(-1).contiguous().view(torch.uint8) for t in (x, y))
    return torch.equal(first, second)


def _are_ints(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)
