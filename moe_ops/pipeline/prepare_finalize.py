"""Interfaces for sending tokens to experts and for combining the results.

A communication backend implements `FusedMoEPrepareAndFinalizeModular`: ``prepare`` sends tokens to
the ranks of their experts in one of the formats, ``finalize`` brings the rows back and sums them.
All methods return fresh tensors and do not write to the caller's tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops.pipeline.experts import FusedMoEExperts
from moe_ops.pipeline.formats import FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce
from moe_ops.scheme import FusedMoEQuantConfig

Receiver = Callable[[], Any]
"""Waits for the work that was launched, and returns its result."""
Hook = Callable[[], None]
"""Lets the communication finish; a scheduler may call it at any time before the receiver."""


class FusedMoEPrepareAndFinalize(ABC):
    """Base class of the modular and the monolithic kind.

    Source:
        vLLM ``FusedMoEPrepareAndFinalize``.
    """

    def post_init_setup(self, fused_experts: FusedMoEExperts) -> None:  # noqa: B027 (a default)
        """Hook called once with the experts of the kernel; does nothing by default."""

    @property
    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """The format that ``prepare`` produces and ``finalize`` takes."""

    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype that ``topk_ids`` must have; None: any."""
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        """The most tokens that one rank may send; None: no limit.

        The modular kernel runs more tokens in parts. A compiled call passes any number to
        ``prepare``, which must check it, as the operators of this library do.
        """
        return None

    def num_dispatchers(self) -> int:
        """Number of ranks that send tokens."""
        return 1

    def num_arriving(self, num_tokens: int) -> int:
        """Rows that the experts get, at most, if every rank sends ``num_tokens`` tokens."""
        return num_tokens

    def output_is_reduced(self) -> bool:
        """Whether ``finalize`` sums over ranks, so that no all-reduce is needed."""
        return False


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    """Prepare and finalize for modular experts, which get their tokens' routing."""

    @abstractmethod
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
        """Send tokens to their experts.

        Args:
            a1: ``(T, H)`` tokens of this rank.
            topk_weights: ``(T, k)``.
            topk_ids: ``(T, k)``, global experts.
            num_experts: E.
            expert_map: ``(E,)`` or None.
            apply_router_weight_on_input: scale each slot's row by its weight, in float32, before it
                is quantized. The Standard format then has a row per slot, ``(T * k, H)``.
            quant_config: how rows are quantized.
            defer_input_quant: do not quantize rows; the experts do.
        """

    @abstractmethod
    def finalize(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Tensor:
        """Bring rows back and sum them: ``(T, H)``.

        With several dispatchers there may be more rows than this rank's T tokens: the modular
        kernel returns the first T.

        Args:
            fused_expert_output: unweighted and not summed, unless ``weight_and_reduce_impl`` is
                `TopKWeightAndReduceNoOP`.
            topk_weights: ``(T, k)``.
            topk_ids: ``(T, k)``; the ids that ``prepare`` returned, if it returned any.
            apply_router_weight_on_input: whether the weights are in the rows already.
            weight_and_reduce_impl: how rows are summed; `TopKWeightAndReduceDelegate` leaves the
                choice to this class.
        """

    def has_gradients(self) -> bool:
        """Whether results of both methods have gradients where rows are not quantized."""
        return False

    def takes_lora(self) -> bool:
        """Whether calls may have adapters.

        ``prepare`` and ``prepare_async`` then take the keyword ``lora_ids`` (see `ExpertLora`),
        which is given only if the caller has such ids. If they return ``topk_ids``, those have the
        ids of their tokens attached: see `attach_lora_ids`.
        """
        return False

    def supports_async(self) -> bool:
        """Whether `prepare_async` and `finalize_async` are implemented."""
        return False

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> Receiver | tuple[Hook, Receiver]:
        """Start `prepare`; the receiver returns its result."""
        raise NotImplementedError(f"{type(self).__name__} does not prepare asynchronously")

    def finalize_async(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Receiver | tuple[Hook, Receiver]:
        """Start `finalize`; the receiver returns its result."""
        raise NotImplementedError(f"{type(self).__name__} does not finalize asynchronously")


class FusedMoEPrepareAndFinalizeMonolithic(FusedMoEPrepareAndFinalize):
    """Prepare and finalize for monolithic experts, which route themselves."""

    @abstractmethod
    def prepare(
        self,
        a1: Tensor,
        router_logits: Tensor,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Send tokens to their experts; returns ``(a1q, its scale or None, router_logits)``."""

    @abstractmethod
    def finalize(self, fused_expert_output: Tensor) -> Tensor:
        """Combine the experts' output to ``(T, H)``."""
