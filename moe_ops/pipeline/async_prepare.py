"""Any prepare-finalize on a side stream: a complete, testable example of the asynchronous protocol.

A communication backend has this shape: ``*_async`` starts the work and returns at once; the hook
lets it finish; the receiver hands over the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ops.pipeline.experts import FusedMoEExperts
from moe_ops.pipeline.formats import FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalizeModular, Hook, Receiver


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

    def num_arriving(self, num_tokens: int) -> int:
        """Value of ``inner``."""
        return self.inner.num_arriving(num_tokens)

    def takes_lora(self) -> bool:
        """Value of ``inner``, which gets the ``lora_ids``."""
        return self.inner.takes_lora()

    def output_is_reduced(self) -> bool:
        """Value of ``inner``."""
        return self.inner.output_is_reduced()

    def has_gradients(self) -> bool:
        """Value of ``inner``. Autograd runs backward passes on the streams of their forwards."""
        return self.inner.has_gradients()

    def supports_async(self) -> bool:
        """True: both methods are implemented."""
        return True

    def prepare(self, *arguments: Any, **named: Any) -> PrepareResult:
        """Call the method of ``inner`` on the current stream."""
        return self.inner.prepare(*arguments, **named)

    def finalize(self, *arguments: Any, **named: Any) -> Tensor:
        """Call the method of ``inner`` on the current stream."""
        return self.inner.finalize(*arguments, **named)

    def prepare_async(self, a1: Tensor, *rest: Any, **named: Any) -> tuple[Hook, Receiver]:
        """Start `prepare` on the side stream."""
        return self._start(partial(self.inner.prepare, a1, *rest, **named), a1.device)

    def finalize_async(
        self, fused_expert_output: Tensor, *rest: Any, **named: Any
    ) -> tuple[Hook, Receiver]:
        """Start `finalize` on the side stream."""
        call = partial(self.inner.finalize, fused_expert_output, *rest, **named)
        return self._start(call, fused_expert_output.device)

    def _start(self, call: Callable[[], Any], device: torch.device) -> tuple[Hook, Receiver]:
        if torch.compiler.is_compiling() or device.type != "cuda":
            result = call()
            return (lambda: None), lambda: result
        current = torch.cuda.current_stream(device)
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)
        # The wait also orders memory that the side stream frees and allocates again after earlier
        # uses by the current stream; the receiver keeps the inputs alive until it is called.
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = call()
            done = side.record_event()

        def hook() -> None:  # an event: work that was started later is not waited for
            torch.cuda.current_stream(device).wait_event(done)

        def receiver(_inputs: Callable[[], Any] = call) -> Any:
            return result

        return hook, receiver
