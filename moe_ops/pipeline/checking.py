"""Checking mode: errors that only the device knows of, at the price of waiting for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_enabled: ContextVar[bool] = ContextVar("checking", default=False)


@contextmanager
def checking() -> Iterator[None]:
    """Within this context eager calls wait for the device and raise for what went wrong there.

    Today: rows dropped by `BatchedPrepareAndFinalize` because they did not fit, and numbers of
    tokens that differ between the ranks of a sequence-parallel layer on GPUs. Compiled and captured
    calls are not affected (they must not wait): read ``num_dropped`` instead. Nor are calls of
    other threads and tasks.
    """
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


def may_wait(x: Tensor) -> bool:
    """Whether an eager check may read numbers that belong to ``x``: on a CPU, or in this mode."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    if x.is_cuda:
        return _enabled.get() and not torch.cuda.is_current_stream_capturing()
    return True


def check_none_dropped(num_dropped: Tensor, max_num_tokens: int) -> None:
    """ValueError in checking mode when rows did not fit."""
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
