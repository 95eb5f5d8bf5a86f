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
    travelling: Pending | None = None
    prepares = [kernel.start_prepare(calls[0])] if calls else []
    for i, call in enumerate(calls):
        prepared = prepares[i].wait()
        if i + 1 < len(calls):
            prepares.append(kernel.start_prepare(calls[i + 1]))
        rows = kernel.run_experts(call, prepared)
        if travelling is not None:
            results.append(kernel.finish(calls[i - 1], travelling))
        travelling = kernel.start_finalize(call, prepared, rows)
    if travelling is not None:
        results.append(kernel.finish(calls[-1], travelling))
    return results
