"""Several ranks, Standard format: equal blocks of one copy for each rank of a token's experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.pipeline.checking import is_checking
from moe_ops.pipeline.exchange.one_copy import Copies, OneCopyExchange
from moe_ops.pipeline.exchange.records import Outgoing


class FixedCapacityPrepareAndFinalize(OneCopyExchange):
    """Send a token once to each rank of its experts, in all-to-alls of equal blocks of C rows.

    See `OneCopyExchange` for what travels. Every rank sends C rows to every rank, each way. What
    is not a copy of a token is zeros with ids of -1, so experts skip it. Shapes do not depend on
    the routing and nothing waits for the device, so calls trace and can be captured, over any
    backend of `torch.distributed`. (Call it once before a capture: kernels are compiled then, and
    ``expert_ranks`` are copied to the device.)

    **Capacity.** ``C = ceil(P * capacity_factor)``. P is the largest number of tokens of a rank:
    ``max_num_tokens``, or without it the number that calls agree on, as in
    `AllGatherPrepareAndFinalize`. With the default factor of 1 every copy fits, and as many bytes
    travel as if all tokens were gathered. A smaller factor saves bytes and memory in proportion:
    with R ranks and uniform routing a rank needs ``1 - (1 - 1 / R) ** k`` of a rank's tokens.
    ``python -m moe_ops explain --ranks R`` prints a factor with room to spare.

    **Copies that do not fit** belong to the last tokens of a block. They are not sent, so the
    results of these tokens lack the experts of that rank. `num_dropped` counts them on the device,
    and within `moe_ops.checking` they raise on all ranks.

    All ranks must call this equally often and in the same order, as `AllGatherPrepareAndFinalize`.
    Results are bitwise the results of that class if the experts' kernels use the same tiles for
    both numbers of rows (in batch-invariant mode they always do), except that a sum of negative
    zeros is a positive zero.

    Args:
        group: as in `TokenExchange`.
        max_num_tokens: as in `TokenExchange`.
        expert_ranks: as in `OneCopyExchange`.
        capacity_factor: C over P, above 0 and at most 1, in whole millionths.

    Raises:
        TypeError, ValueError: as `OneCopyExchange`; a ``capacity_factor`` that is not a number in
            this range. In a call within `moe_ops.checking`: copies that do not fit.

    Source:
        GShard (Lepikhin et al. 2020), section 2.2: the capacity of experts, here of pairs of ranks.
    """

    takes = frozenset({"expert_ranks", "capacity_factor"})

    def __init__(
        self,
        group: Any = None,
        max_num_tokens: int | None = None,
        expert_ranks: Tensor | None = None,
        *,
        capacity_factor: float = 1.0,
    ) -> None:
        super().__init__(group, max_num_tokens, expert_ranks)
        checks.number("capacity_factor", capacity_factor)
        if not 0 < capacity_factor <= 1:
            raise ValueError(
                f"capacity_factor must be above 0 and at most 1, got {capacity_factor}"
            )
        self.capacity_factor = capacity_factor

    def num_dropped(
        self, topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None
    ) -> Tensor:
        """Count the copies that do not fit if this rank's tokens have these ids.

        Nothing waits for the device, so compiled and captured programs may call this and add the
        number to a metric. It depends on ``max_num_tokens``, which must have been given.

        Args:
            topk_ids: ``(T, k)``, global experts.
            num_experts: E.
            expert_map: the experts of this rank; needed without ``expert_ranks`` only.

        Returns:
            int32 ``(1,)``.

        Raises:
            ValueError: no ``max_num_tokens``.
        """
        if self.max_num_tokens is None:
            raise ValueError("max_num_tokens must be given to count rows that do not fit, got None")
        ranks = self.ranks_of(topk_ids, num_experts, expert_map)
        size = self.capacity(self.max_num_tokens if self.group.size > 1 else topk_ids.shape[0])
        return _dropped(ranks, ops.batched_rows(ranks, 0, self.group.size, size))

    def capacity(self, rows: int) -> int:
        """C, the rows of a block, for P ``rows``."""
        return capacity_of(rows, self.capacity_factor)

    def num_arriving(self, num_tokens: int) -> int:
        """A block of every rank."""
        ranks = self.group.size
        return ranks * self.capacity(super().num_arriving(num_tokens) // ranks)

    def copies_of(self, tokens: Outgoing, ranks: Tensor) -> Copies:
        """The first C copies for each rank, and zeros in the rest of its block."""
        size = self.capacity(self.rows_per_rank(tokens))
        num_rows = self.group.size * size
        places = ops.batched_rows(ranks, 0, self.group.size, size)
        self._check_none_dropped(ranks, places, size)
        # The row after the last one takes the slots that copy nothing, whose place is -1.
        rows = places.flatten().long().remainder(num_rows + 1)
        slots = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        none = places.new_full((num_rows + 1,), -1)
        end = places.new_full((2,), num_rows, dtype=torch.int64)
        return Copies(none.scatter(0, rows, slots)[:num_rows], end, places)

    def _check_none_dropped(self, ranks: Tensor, places: Tensor, size: int) -> None:
        """In checking mode, raise on all ranks if copies of any rank do not fit."""
        if self.capacity_factor == 1 or not is_checking(places):
            return
        of_ranks = self.group.all_gather(_dropped(ranks, places)).tolist()
        if any(of_ranks):
            raise ValueError(
                "capacity_factor must leave room for the tokens that any rank has for another, "
                f"got {self.capacity_factor} ({size} rows): of the ranks {of_ranks} rows did not "
                "fit"
            )


def capacity_of(rows: int, capacity_factor: float) -> int:
    """``ceil(rows * capacity_factor)``, in integers: ``rows`` may be a symbol of a trace."""
    if capacity_factor == 1:
        return rows
    millionths = max(1, round(capacity_factor * 10**6))
    return -(-rows * millionths // 10**6)


def _dropped(ranks: Tensor, places: Tensor) -> Tensor:
    """int32 ``(1,)``: the copies that have no place."""
    return ((ranks >= 0) & (places < 0)).sum(dtype=torch.int32).reshape(1)
