"""Overlap of two micro-batches: one computes while the other's tokens are being sent.

There is no global state: a scheduler is a function that starts, runs and finishes the steps of
`FusedMoEKernel` in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.pipeline.calls import Call, Pending
from moe_ops.pipeline.modular_kernel import FusedMoEKernel


def run_micro_batches(
    kernel: FusedMoEKernel, calls: Sequence[Call]
) -> list[Tensor | tuple[Tensor, Tensor]]:
    """`FusedMoEKernel.apply` for several calls, with their communication overlapped.

    The order for calls 0, 1, ..: prepare 0 is started. Then, for each call, the next call's prepare
    is started before the call's experts run, and the call's rows are sent back while the next call
    computes.

    Args:
        kernel: a modular kernel; overlap needs a prepare-finalize with ``supports_async()``.
        calls: the arguments of each `apply`.

    Returns:
        The results, in order; equal to the results of separate calls.
    """
    results: list[Tensor | tuple[Tensor, Tensor]] = []
    waiting = [(call, kernel.start_prepare(call)) for call in calls[:1]]
    travelling: list[tuple[Call, Pending]] = []
    for following in (*calls[1:], None):
        if not waiting:
            break
        original, prepared = waiting.pop()
        if following is not None:
            waiting.append((following, kernel.start_prepare(following)))
        call, rows = kernel.run_experts(original, prepared)
        results += [kernel.finish(*step) for step in travelling]
        travelling = [(original, kernel.start_finalize(call, rows))]
    return results + [kernel.finish(*step) for step in travelling]
