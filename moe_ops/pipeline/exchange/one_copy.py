"""What exchanges share that send one copy of a token to each rank that holds one of its experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.parallel.placement import ranks_of_experts
from moe_ops.pipeline.checking import is_checking
from moe_ops.pipeline.exchange.base import TokenExchange
from moe_ops.pipeline.exchange.groups import check_expert_ranks
from moe_ops.pipeline.exchange.messages import bytes_of_fp8, message_of, parts_of
from moe_ops.pipeline.exchange.records import Arrived, Outgoing
from moe_ops.pipeline.prepare_finalize import Receiver

_COPIES = "_moe_ops_copies"
"""Attribute of the ids that prepare returns, by which finalize finds the `Copies` of its call.

It lives as long as these ids, so calls under way at once do not disturb each other, and a call that
fails leaves nothing behind.
"""


class Copies(NamedTuple):
    """The rows that a rank sends, and where the sums of its tokens come back."""

    slots: Tensor
    """int32 ``(rows,)``: a slot of the token that each row copies; -1: the row is zeros."""
    end: Tensor
    """int64 ``(n,)``, n > 1, whose last entry is the number of rows."""
    places: Tensor
    """int32 ``(T, k)``: the rows that copy each token, in the order of ranks; rows that do not
    exist stand for no copy."""
    sent: list[int] | None = None
    """Rows for each rank; None: equal blocks."""
    received: list[int] | None = None
    """Rows from each rank; None: equal blocks."""


class OneCopyExchange(TokenExchange):
    """Base class of exchanges that send a token once to each rank that holds one of its experts.

    See `TokenExchange` for what all exchanges share. Copies for one rank are in the order of
    tokens, and each rank gets its copies in the order of the ranks that sent them. Sums come back
    the same way.

    Args:
        group: as in `TokenExchange`.
        max_num_tokens: as in `TokenExchange`.
        expert_ranks: int32 ``(E,)``, the rank in the group that holds each expert; on any device,
            the same on all ranks. None: ranks exchange their ``expert_map`` in every call, which is
            one more collective, of E bytes a rank.

    Raises:
        TypeError, ValueError: as `TokenExchange`; ``expert_ranks`` of another dtype or shape, or
            with ranks that are not in the group. In a call: ``expert_ranks`` for another number of
            experts; neither ``expert_ranks`` nor an ``expert_map``; within `moe_ops.checking`,
            ``expert_ranks`` that contradict the ranks' ``expert_map`` (on all ranks).
    """

    takes = frozenset({"expert_ranks"})

    def __init__(
        self,
        group: Any = None,
        max_num_tokens: int | None = None,
        expert_ranks: Tensor | None = None,
    ) -> None:
        super().__init__(group, max_num_tokens)
        if expert_ranks is not None:
            check_expert_ranks(expert_ranks, self.group.size)
        self.expert_ranks = expert_ranks

    @abstractmethod
    def copies_of(self, tokens: Outgoing, ranks: Tensor) -> Copies:
        """Choose the rows that are sent.

        Args:
            tokens: the tokens of this rank.
            ranks: `ranks_of` their slots.
        """

    def takes_lora(self) -> bool:
        """True."""
        return True

    def send(self, tokens: Outgoing) -> Callable[[], Arrived]:
        """Copy rows, ids and weights for each rank, and start to send them."""
        self.check_room(tokens.a1)
        ranks = self.ranks_of(tokens.topk_ids, tokens.num_experts, tokens.expert_map)
        copies = self.copies_of(tokens, ranks)
        rows, scale = self.rows_of(tokens)
        # Ids travel as their complement: rows that copy no token are zeros, whose ids are then -1.
        beside = [tokens.topk_weights, ~tokens.topk_ids]
        if scale is not None and scale.dim() > 1:  # of each row
            beside.append(scale)
        has_adapters = tokens.lora_ids is not None
        if tokens.lora_ids is not None:
            beside.append(tokens.lora_ids)
        travelling = self._start(bytes_of_fp8(rows), copies)
        facts = self._start(message_of(beside), copies)
        dtype = rows.dtype

        def receive() -> Arrived:
            weights, complement, *scales = parts_of(self.group.wait(facts), beside)
            ids = ~complement
            setattr(ids, _COPIES, copies)
            arrived = self.group.wait(travelling).view(dtype)
            adapters = scales[-1] if has_adapters else None
            own = scales[0] if len(scales) > has_adapters else scale
            return Arrived(arrived, own, weights, ids, adapters)

        return receive

    def send_back(self, sums: Tensor, topk_ids: Tensor) -> Receiver:
        """Start to send sums back; the receiver adds the sums of each token in the order of ranks.

        The sum is accumulated in float32 and rounded once. Ranks that hold none of a token's
        experts add nothing, which is what adding their zeros would give.

        Raises:
            ValueError: ``topk_ids`` that are not the tensor that prepare returned.
        """
        copies = _copies_of(topk_ids)
        places = copies.places
        travelling = self.group.start_exchange(sums, copies.received, copies.sent)
        return lambda: ops.moe_unpermute(self.group.wait(travelling), None, places, None)

    def send_again(self, rows: Tensor, topk_ids: Tensor) -> Receiver:
        """Copy rows for the ranks that tokens were copied for, and start to send them."""
        copies = _copies_of(topk_ids)
        travelling = self._start(rows, copies)
        return lambda: self.group.wait(travelling)

    def ranks_of(self, topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
        """int32 ``(T, k)``: the ranks that hold a token's experts, ascending, each once; else -1.

        ``expert_map`` is needed without ``expert_ranks`` only.
        """
        expert_ranks = self._ranks(topk_ids, num_experts, expert_map)
        # Ids that are not experts find one of two entries of -1 behind the last expert.
        table = torch.cat([expert_ranks, expert_ranks.new_full((2,), -1)])
        ranks = table[topk_ids.clamp(-1, num_experts)].sort(1).values
        again = ranks[:, 1:] == ranks[:, :-1]
        ranks[:, 1:].masked_fill_(again, -1)
        return ranks

    def _start(self, x: Tensor, copies: Copies) -> Tensor:
        rows = ops.gather_rows(x, copies.slots, copies.end, copies.places.shape[1])
        return self.group.start_exchange(rows, copies.sent, copies.received)

    def _ranks(self, topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
        """int32 ``(E,)`` on the tokens' device: the rank that holds each expert."""
        expert_ranks = self.expert_ranks
        if expert_ranks is None:
            if expert_map is None:
                raise ValueError("expert_map must be given without expert_ranks, got None")
            return self._by_maps(expert_map)
        checks.size("expert_ranks.shape[0]", expert_ranks.shape[0], "E", num_experts)
        if expert_ranks.device != topk_ids.device:
            expert_ranks = expert_ranks.to(topk_ids.device)
            if not torch.compiler.is_compiling():
                self.expert_ranks = expert_ranks  # a captured call must not copy from the host
        if expert_map is not None and is_checking(expert_ranks):
            by_maps = self._by_maps(expert_map)
            if not torch.equal(by_maps, expert_ranks):
                raise ValueError(
                    "expert_ranks must be the ranks whose expert_map has each expert, "
                    f"{by_maps.tolist()}, got {expert_ranks.tolist()}"
                )
        return expert_ranks

    def _by_maps(self, expert_map: Tensor) -> Tensor:
        return ranks_of_experts(self.group.all_gather((expert_map >= 0)[None]))


def _copies_of(topk_ids: Tensor) -> Copies:
    """The copies of the call whose prepare returned these ids."""
    copies: Copies | None = getattr(topk_ids, _COPIES, None)
    if copies is None:
        raise ValueError("topk_ids must be the tensor that prepare returned, got another one")
    return copies
