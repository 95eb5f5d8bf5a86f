"""Prepare and finalize in the Batched format on one rank: padded rows per expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.gradients import wanted
from moe_ops.pipeline.batched_gradients import Places, dispatched
from moe_ops.pipeline.checking import check_none_dropped
from moe_ops.pipeline.experts import FusedMoEExperts
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalizeModular
from moe_ops.pipeline.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
)
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.tensors import narrowed


class BatchedPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Dispatch to the experts ``[El * rank, El * (rank + 1))``: one row per slot, in slot order.

    Without an ``expert_map`` these are the ids of this rank's experts; with one, the map assigns
    global experts to them. Rows that do not fit are dropped and counted on the device in
    ``num_dropped`` (an error within `moe_ops.checking`); no method waits for the device. A
    `FusedMoEKernel` passes at most ``max_num_tokens`` tokens at a time and raises for more, so all
    rows fit as long as the ids of a token are distinct.

    Args:
        max_num_tokens: rows per expert.
        num_local_experts: El.
        num_dispatchers: number of ranks that send tokens.
        rank: index of this rank, which determines the local experts.

    Raises:
        ValueError: a number that is not positive, or a negative rank.

    Source:
        vLLM ``BatchedPrepareAndFinalize``, which waits for the device, ignores ``expert_map``,
        changes its arguments, and takes router weights on the input for k = 1 only.
    """

    def __init__(
        self, max_num_tokens: int, num_local_experts: int, num_dispatchers: int, rank: int
    ) -> None:
        checks.at_least(
            1,
            max_num_tokens=max_num_tokens,
            num_local_experts=num_local_experts,
            num_dispatchers=num_dispatchers,
        )
        checks.at_least(0, rank=rank)
        self.max_num_tokens, self.num_local_experts = max_num_tokens, num_local_experts
        self.dispatchers, self.rank = num_dispatchers, rank
        self.drops = True

    def post_init_setup(self, fused_experts: FusedMoEExperts) -> None:
        """Stop dropping rows: from now on a `FusedMoEKernel` checks that rows fit."""
        self.drops = False

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """BatchedExperts."""
        return FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        """As given."""
        return self.max_num_tokens

    def num_dispatchers(self) -> int:
        """As given."""
        return self.dispatchers

    def has_gradients(self) -> bool:
        """True."""
        return True

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResult:
        """Dispatch, count and quantize in one operator; padding is zeros."""
        checks.tensor("a1", a1, 2, checks.FLOATS)
        checks.topk_pair(topk_weights, topk_ids)
        checks.same_tokens("topk_ids", topk_ids, "a1", a1)
        first, local = self.num_local_experts * self.rank, self.num_local_experts
        ids = topk_ids if expert_map is None else mapped_ids(topk_ids, expert_map, first, local)
        quant = None if defer_input_quant else quant_config.scheme.activation
        weights = topk_weights if apply_router_weight_on_input else None
        places, scale = Places(first, local, self.max_num_tokens), None
        if quant is None and wanted(a1, weights):
            rows, counts, dropped = dispatched(a1, weights, ids, places, self.drops)
        else:
            a1_scale = None if quant is None else quant_config.input_scales[0]
            key = "" if quant is None else quant.key
            rows, scale, counts, dropped = ops.batched_dispatch(
                a1, a1_scale, weights, ids, *places, key, self.drops
            )
        check_none_dropped(dropped, self.max_num_tokens)
        return PrepareResult(
            rows,
            None if quant is None else scale,
            ExpertTokensMetadata(counts, None, dropped),
            None if expert_map is None else ids,
            None,
        )

    def finalize(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Tensor:
        """Sum as the experts specify; if they do not, sum the rows of each token's slots."""
        reduce = weight_and_reduce_impl
        if isinstance(reduce, TopKWeightAndReduceDelegate):
            reduce = TopKWeightAndReduceNaiveBatched(self.rank)
        return reduce.apply(
            None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )


def mapped_ids(
    topk_ids: Tensor, expert_map: Tensor, first_expert: int, num_local_experts: int
) -> Tensor:
    """Map ids so that local experts count from ``first_expert``; skipped slots become -1."""
    valid = (topk_ids >= 0) & (topk_ids < expert_map.shape[0])
    local = narrowed(expert_map, topk_ids.dtype)[torch.where(valid, topk_ids, 0).long()]
    valid = valid & (local >= 0) & (local < num_local_experts)
    return torch.where(valid, local + first_expert, -1)
