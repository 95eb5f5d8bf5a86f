"""Weighting and summing of the rows that experts return.

An experts implementation names one of these classes; prepare-finalize applies it. All of them
weight and sum in float32, in slot order, and round once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.functional.combine import moe_fused_mul_sum
from moe_ops.gradients import wanted
from moe_ops.pipeline.batched_gradients import Places, combined
from moe_ops.pipeline.slot_gradients import sum_of_slots
from moe_ops.tensors import Routing


class TopKWeightAndReduce(ABC):
    """Combines experts' rows, ``(T, k, H)`` or another layout, to tokens ``(T, H)``."""

    @abstractmethod
    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """Weight and sum.

        Args:
            output: ``(T, H)`` to write to; None: a fresh tensor. No other argument is written.
            fused_expert_output: the experts' rows.
            topk_weights: ``(T, k)``.
            topk_ids: ``(T, k)``.
            apply_router_weight_on_input: whether rows are weighted already; they are then summed
                with weight 1.

        Returns:
            ``(T, H)``: ``output`` if given.
        """


def _into(output: Tensor | None, result: Tensor) -> Tensor:
    """Return ``result``, or ``output`` after copying ``result`` to it, if given."""
    if output is None or output is result:
        return result
    checks.tensor("output", output, None, checks.FLOATS)
    if output.shape != result.shape:
        raise ValueError(
            f"output must have the shape of the result, {tuple(result.shape)}, "
            f"got {tuple(output.shape)}"
        )
    output.copy_(result)
    return output


@dataclass(frozen=True)
class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    """No choice: prepare-finalize uses the class for its format."""

    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """Raise a RuntimeError."""
        raise RuntimeError(
            "TopKWeightAndReduceDelegate does not sum: the caller is expected to choose the "
            "appropriate TopKWeightAndReduce"
        )


@dataclass(frozen=True)
class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    """For experts that return weighted and summed rows."""

    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """Return ``fused_expert_output``, or copy it to ``output``."""
        return fused_expert_output if output is None else _into(output, fused_expert_output)


@dataclass(frozen=True)
class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """For rows in slot order, ``(T * k, H)`` or ``(T, k, H)``, all of them written."""

    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """Weight and sum; slots with a negative id are skipped and not read."""
        checks.topk_pair(topk_weights, topk_ids)
        checks.tensor("fused_expert_output", fused_expert_output, None, checks.FLOATS)
        tokens, k = topk_ids.shape
        fits = fused_expert_output.dim() in (2, 3)
        if fits and not torch.compiler.is_compiling():  # sizes are symbols there
            fits = tuple(fused_expert_output.shape[:-1]) in ((tokens * k,), (tokens, k))
        if not fits:
            raise ValueError(
                "fused_expert_output must be (T * k, H) or (T, k, H) for topk_ids of shape "
                f"{tuple(topk_ids.shape)}, got shape {tuple(fused_expert_output.shape)}"
            )
        width = fused_expert_output.shape[-1]
        weights = topk_weights
        if apply_router_weight_on_input:
            weights = topk_weights.new_ones(topk_weights.shape)
        if len(wanted(fused_expert_output, weights)) > 0:
            flat = fused_expert_output.reshape(tokens * k, width)
            routing = Routing(weights, topk_ids.clamp(max=0))  # 0: the slot has a row
            return _into(output, sum_of_slots(flat, routing, 1, "TopKWeightAndReduceContiguous"))
        rows = fused_expert_output.reshape(tokens, k, width)
        return moe_fused_mul_sum(rows.contiguous(), weights, output, topk_ids)


@dataclass(frozen=True)
class TopKWeightAndReduceNaiveBatched(TopKWeightAndReduce):
    """For rows in the Batched format, ``(El, M, H)``, of experts ``[El * rank, El * (rank + 1))``.

    Args:
        rank: index of the rank whose experts these are.
    """

    rank: int

    def __post_init__(self) -> None:
        checks.at_least(0, rank=self.rank)

    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """Weight and sum; slots of other experts and slots that did not fit add nothing."""
        checks.tensor("fused_expert_output", fused_expert_output, 3, checks.FLOATS)
        checks.topk_pair(topk_weights, topk_ids)
        experts, rows, _ = fused_expert_output.shape
        places = Places(experts * self.rank, experts, rows)
        weights = None if apply_router_weight_on_input else topk_weights
        if wanted(fused_expert_output, weights):
            return _into(output, combined(fused_expert_output, weights, topk_ids, places))
        row_of_slot = ops.batched_rows(topk_ids, *places)
        flat = fused_expert_output.flatten(0, 1)
        return _into(output, ops.moe_unpermute(flat, weights, row_of_slot, None))
