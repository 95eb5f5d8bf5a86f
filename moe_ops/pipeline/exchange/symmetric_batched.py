"""Several ranks, Batched format: each slot's row is written into its expert's rows, wherever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.pipeline.batched_gradients import Places, dispatched
from moe_ops.pipeline.batched_prepare import BatchedPrepareAndFinalize, mapped_ids
from moe_ops.pipeline.checking import check_none_dropped
from moe_ops.pipeline.exchange.records import Arrived, Outgoing
from moe_ops.pipeline.exchange.symmetric import SymmetricPrepareAndFinalize
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat
from moe_ops.pipeline.prepare_finalize import Receiver
from moe_ops.windows import Windows

_GLOBAL = "_moe_ops_global"
"""Attribute of the ids that prepare returns in grad mode: the ids of global experts."""


class BatchedSymmetricPrepareAndFinalize(SymmetricPrepareAndFinalize):
    """`SymmetricPrepareAndFinalize` for experts of the Batched format, for few tokens a rank.

    **Prepare** is one kernel of two steps: ids travel to all ranks, which then know the place of
    every row, and rows are written straight into ``(El, R * max_num_tokens, H)`` of their experts'
    ranks. The rows of an expert are in the order of ranks, tokens and slots, without gaps. Padding
    is not written. Rows are quantized on the way, and multiplied by router weights if asked to. A
    scale that all rows of an expert share and that comes from the data (``fp8_tensor``) is found
    after the rows have travelled.

    **Finalize** sums the local rows of each token, and returns sums as the base class does.

    k rows travel for a token, one for each slot on another rank; the Standard format sends one for
    each other rank. A batch of many tokens is better off there.

    **Gradients.** In grad mode a token travels once to each rank, as in the base class, and is
    copied to its experts there. Results have the same bits. Gradients travel as in the base class.

    Rows fit as long as the ids of a token are distinct. Rows that do not fit are dropped and
    counted on the device in ``num_dropped`` (an error within `moe_ops.checking`).

    Args:
        group: see `TokenExchange`.
        max_num_tokens: the largest number of tokens that any rank passes; the same on all ranks.
        hidden_size: H of the rows.
        top_k: the largest k of a call.
        expert_ranks: int32 ``(E,)``, the rank that holds each expert. A rank holds its experts in
            the order of their ids, and each rank holds equally many. The ``expert_map`` of a call
            is not read.
        dtype: see `SymmetricPrepareAndFinalize`.
        timeout: see `SymmetricPrepareAndFinalize`.
        share: see `SymmetricPrepareAndFinalize`.
        in_flight: see `SymmetricPrepareAndFinalize`.
        on_dead_rank: see `SymmetricPrepareAndFinalize`.

    Raises:
        ValueError: ranks that hold different numbers of experts; otherwise as the base class.
        NotImplementedError: in a call: router weights on the input with ``fp8_tensor`` or
            ``int8_tensor``.

    Source:
        DeepEP's low-latency dispatch, which places rows in the order of arrival.
    """

    expert_ranks: Tensor
    takes = SymmetricPrepareAndFinalize.takes - {"equal_num_tokens"}
    sends_slots = True

    def __init__(
        self,
        group: Any,
        max_num_tokens: int,
        hidden_size: int,
        top_k: int,
        expert_ranks: Tensor,
        *,
        dtype: torch.dtype | None = None,
        timeout: float = 30.0,
        share: str | None = None,
        in_flight: int = 1,
        on_dead_rank: str = "raise",
    ) -> None:
        checks.instance("expert_ranks", expert_ranks, Tensor)
        windows: dict[str, Any] = {"timeout": timeout, "share": share, "in_flight": in_flight}
        super().__init__(
            group,
            max_num_tokens,
            hidden_size,
            top_k,
            dtype=dtype,
            expert_ranks=expert_ranks,
            on_dead_rank=on_dead_rank,
            **windows,
        )
        held = torch.bincount(expert_ranks.long().cpu(), minlength=self.group.size).tolist()
        if len(set(held)) != 1 or len(held) != self.group.size:
            raise ValueError(
                "expert_ranks must give each rank of the group equally many experts, got counts "
                f"{held}"
            )
        self.layout = self.layout._replace(num_local_experts=held[0])
        self.local = BatchedPrepareAndFinalize(max_num_tokens, held[0], self.group.size, 0)

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """BatchedExperts."""
        return FusedMoEActivationFormat.BatchedExperts

    def attach(self, windows: list[Windows]) -> None:
        """Use windows that are allocated already, one for each call in flight."""
        super().attach(windows)
        ranks = self.expert_ranks
        same = ranks[:, None] == ranks
        rows = same.tril(-1).sum(1, dtype=torch.int32)
        self.placement, own = torch.stack([ranks, rows]), ranks == windows[0].rank
        self.held = own.nonzero().flatten().int()
        self.expert_map = torch.where(own, rows, -1)
        for tensor in (self.placement, self.held, self.expert_map):
            torch._dynamo.mark_static_address(tensor)

    def send_back(self, sums: Tensor, topk_ids: Tensor) -> Receiver:
        """Write partial sums to their tokens' ranks, and add."""
        return super().send_back(sums, _global_ids(topk_ids))

    def send_again(self, rows: Tensor, topk_ids: Tensor) -> Receiver:
        """Write rows to the ranks of the experts once more, one for each token."""
        return super().send_again(rows, _global_ids(topk_ids))

    def arranged(self, arrived: Arrived, on_input: bool) -> Arrived:
        """Copy the tokens' rows to the places that `send` gives them in calls without gradients."""
        rows, _, weights, ids, *_ = arrived
        places = Places(0, self.layout.num_local_experts, rows.shape[0])
        local = mapped_ids(ids, self.expert_map, places.first_expert, places.num_local_experts)
        router_weights = weights if on_input else None
        copies, counts, dropped = dispatched(rows, router_weights, local, places, True)
        check_none_dropped(dropped, places.max_num_tokens)
        setattr(local, _GLOBAL, ids)
        meta = ExpertTokensMetadata(counts, None, dropped)
        return Arrived(copies, None, weights, local, meta=meta)

    def send(self, tokens: Outgoing) -> Callable[[], Arrived]:
        """Write rows to their experts; ids of the result count from this rank's first expert.

        Rows of a call that is recorded travel once to each rank, as in the base class.
        """
        if tokens.recorded:
            return super().send(tokens)
        windows, quant = self._ready(tokens.a1, tokens.topk_ids), tokens.quant
        a1_scale = tokens.input_scale
        after = quant is not None and quant.of_all_rows
        if after and tokens.on_input:  # rounded before it is known by which scale
            raise NotImplementedError(
                "apply_router_weight_on_input must be False where rows of an expert share a scale "
                f"that comes from the data, got True with {tokens.quant_config.scheme.name}"
            )
        key = "" if quant is None or after else quant.key
        if key and a1_scale is not None and a1_scale.numel() != 1:
            raise ValueError(
                f"a1_scale must be one number where tokens are sent, got {a1_scale.numel()} numbers"
            )
        rows, scale, counts, dropped, ids, weights = ops.symmetric_send_batched(
            tokens.a1,
            a1_scale if key else None,
            tokens.topk_weights,
            tokens.topk_ids,
            self.placement,
            self.held,
            windows.peers,
            windows.state,
            self.max_num_tokens,
            tokens.on_input,
            key,
        )
        self._check_done(windows)
        if after and quant is not None:
            rows, scale = ops.batched_quantize(rows, None, counts, quant.key)
        check_none_dropped(dropped, self.group.size * self.max_num_tokens)
        self._begin(windows, ids)
        meta = ExpertTokensMetadata(counts, None, dropped)
        there = None if quant is None else scale
        return lambda: Arrived(rows, there, weights, ids, meta=meta)


def _global_ids(topk_ids: Tensor) -> Tensor:
    """Return the ids by which the base class knows the call."""
    ids: Tensor = getattr(topk_ids, _GLOBAL, topk_ids)
    return ids
