"""Any prepare-finalize on a side stream: a complete, testable example of the asynchronous protocol.

A communication backend has this shape: ``*_async`` starts the work and returns at once; the hook
lets it finish; the receiver hands over the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops.pipeline.experts import FusedMoEExperts
from moe_ops.pipeline.formats import FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    Hook,
    Receiver,
)
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce
from moe_ops.scheme import FusedMoEQuantConfig


class AsyncPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Run ``inner`` on a side stream, with bitwise equal results.

    The side stream waits for the work submitted to the current stream so far, and the hook makes
    the current stream (not the host) wait, so this also works in a CUDA graph. On the CPU, and
    while torch.compile traces, the work is done when it is started.

    Args:
        inner: the prepare-finalize that does the work.
    """

    def __init__(self, inner: FusedMoEPrepareAndFinalizeModular) -> None:
        self.inner = inner
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def post_init_setup(self, fused_experts: FusedMoEExperts) -> None:
        """Call the method of ``inner``."""
        self.inner.post_init_setup(fused_experts)

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """Value of ``inner``."""
        return self.inner.activation_format

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Value of ``inner``."""
        return self.inner.topk_indices_dtype()

    def max_num_tokens_per_rank(self) -> int | None:
        """Value of ``inner``."""
        return self.inner.max_num_tokens_per_rank()

    def num_dispatchers(self) -> int:
        """Value of ``inner``."""
        return self.inner.num_dispatchers()

    def output_is_reduced(self) -> bool:
        """Value of ``inner``."""
        return self.inner.output_is_reduced()

    def has_gradients(self) -> bool:
        """Value of ``inner``. Autograd runs backward passes on the streams of their forwards."""
        return self.inner.has_gradients()

    def supports_async(self) -> bool:
        """True: both methods are implemented."""
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
        """Call the method of ``inner`` on the current stream."""
        return self.inner.prepare(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )

    def finalize(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Tensor:
        """Call the method of ``inner`` on the current stream."""
        return self.inner.finalize(
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )

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
    ) -> tuple[Hook, Receiver]:
        """Start `prepare` on the side stream."""
        return self._start(
            self.inner.prepare,
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )

    def finalize_async(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> tuple[Hook, Receiver]:
        """Start `finalize` on the side stream."""
        return self._start(
            self.inner.finalize,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )

    def _start(
        self, function: Callable[..., Any], first: Tensor, *rest: Any
    ) -> tuple[Hook, Receiver]:
        if torch.compiler.is_compiling() or not first.is_cuda:
            result = function(first, *rest)
            return _nothing, lambda: result
        current = torch.cuda.current_stream(first.device)
        side = self._streams.get(first.device)
        if side is None:
            side = self._streams[first.device] = torch.cuda.Stream(first.device)
        # The wait also orders memory that the side stream frees and allocates again after earlier
        # uses by the current stream; the receiver keeps the inputs alive until it is called.
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = function(first, *rest)
            done = side.record_event()

        def hook() -> None:  # an event: work that was started later is not waited for
            torch.cuda.current_stream(first.device).wait_event(done)

        def receiver(_inputs: tuple[Any, ...] = (first, *rest)) -> Any:
            return result

        return hook, receiver


def _nothing() -> None:
    """Hook for work that is already done."""
