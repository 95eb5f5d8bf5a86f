"""Checking mode: raise errors that only the device can see, at the cost of waiting for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_enabled: ContextVar[bool] = ContextVar("checking", default=False)


@contextmanager
def checking() -> Iterator[None]:
    """Within this context eager calls wait for the device, and raise errors found on it.

    There are two such errors: rows that `BatchedPrepareAndFinalize` or
    `FixedCapacityPrepareAndFinalize` dropped because they did not fit, and ranks of experts that
    contradict the ranks' expert maps. Compiled and captured calls must not wait, so they are
    not affected: read ``num_dropped`` instead. Calls of other threads and tasks are not affected
    either. The checks of ranks that exchange tokens are collectives: all ranks must be in checking
    mode.
    """
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


def is_checking(x: Tensor) -> bool:
    """Whether a call on ``x`` is in checking mode: enabled, eager, and not being captured."""
    if torch.compiler.is_compiling() or not _enabled.get() or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_none_dropped(num_dropped: Tensor, max_num_tokens: int) -> None:
    """In checking mode, raise ValueError unless all counts of rows that did not fit are 0."""
    dropped = int(num_dropped.sum()) if is_checking(num_dropped) else 0
    if dropped:
        raise ValueError(
            f"max_num_tokens must be at least the rows of the busiest expert, got {max_num_tokens}"
            f": {dropped} rows did not fit"
        )


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph of the current stream is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
