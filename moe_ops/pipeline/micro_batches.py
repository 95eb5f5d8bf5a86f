"""Two micro-batches at a time: one computes while the other's tokens are on their way.

No global state: a scheduler is a function that starts, runs and finishes the steps of
`FusedMoEKernel` in the order it likes.
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

    The order for calls 0, 1, ..: prepare 0 is started; then for each call, the next one's prepare
    is started before its own experts run, and its rows travel back while the next one computes.

    Args:
        kernel: modular; overlap needs a prepare-finalize that works asynchronously.
        calls: the arguments of each apply; their results equal those of separate calls.

    Returns:
        The results, in order.
    """
    results: list[Tensor | tuple[Tensor, Tensor]] = []
    waiting = [(call, kernel.start_prepare(call)) for call in calls[:1]]
    travelling: list[tuple[Call, Pending]] = []
    for following in (*calls[1:], None):
        if not waiting:
            break
        call, prepared = waiting.pop()
        if following is not None:
            waiting.append((following, kernel.start_prepare(following)))
        call, rows = kernel.run_experts(call, prepared)
        results += [kernel.finish(*step) for step in travelling]
        travelling = [(call, kernel.start_finalize(call, rows))]
    return results + [kernel.finish(*step) for step in travelling]
