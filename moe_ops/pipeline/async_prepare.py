"""Any prepare-finalize on a stream of its own: the asynchronous protocol, complete and testable.

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
    """``inner``, run beside the current stream; results are those of ``inner``, bit by bit.

    The side stream waits for what the current one has been given so far, and the current stream
    waits in the hook (not the host), so this works in a CUDA graph too. On the CPU, and while
    torch.compile traces, the work is done when it is started.

    Args:
        inner: what does the work.
    """

    def __init__(self, inner: FusedMoEPrepareAndFinalizeModular) -> None:
        self.inner = inner
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def post_init_setup(self, fused_experts: FusedMoEExperts) -> None:
        """Passed on."""
        self.inner.post_init_setup(fused_experts)

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """That of ``inner``."""
        return self.inner.activation_format

    def topk_indices_dtype(self) -> torch.dtype | None:
        """That of ``inner``."""
        return self.inner.topk_indices_dtype()

    def max_num_tokens_per_rank(self) -> int | None:
        """That of ``inner``."""
        return self.inner.max_num_tokens_per_rank()

    def num_dispatchers(self) -> int:
        """That of ``inner``."""
        return self.inner.num_dispatchers()

    def output_is_reduced(self) -> bool:
        """That of ``inner``."""
        return self.inner.output_is_reduced()

    def supports_async(self) -> bool:
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
        """On the current stream."""
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
        """On the current stream."""
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
        """`prepare`, started."""
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
        """`finalize`, started."""
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
        # What the side stream frees and allocates again is thereby free of the current stream's
        # earlier use; the receiver keeps the inputs until then.
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = function(first, *rest)
            done = side.record_event()

        def hook() -> None:  # an event: whatever was started later is not waited for
            torch.cuda.current_stream(first.device).wait_event(done)

        def receiver(_inputs: tuple[Any, ...] = (first, *rest)) -> Any:
            return result

        return hook, receiver


def _nothing() -> None:
    """There is nothing to wait for."""
