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

    There is one such error: rows that `BatchedPrepareAndFinalize` dropped because they did not fit.
    Compiled and captured calls must not wait, so they are not affected: read ``num_dropped``
    instead. Calls of other threads and tasks are not affected either.
    """
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


def check_none_dropped(num_dropped: Tensor, max_num_tokens: int) -> None:
    """In checking mode, raise ValueError if rows did not fit."""
    if torch.compiler.is_compiling() or not _enabled.get() or num_dropped.is_meta:
        return
    if num_dropped.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    dropped = int(num_dropped)
    if dropped:
        raise ValueError(
            f"max_num_tokens must be at least the rows of the busiest expert, got {max_num_tokens}"
            f": {dropped} rows did not fit"
        )
