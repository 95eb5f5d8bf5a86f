"""Files to which several processes add: one process at a time, and each time in one step."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which processes take before they read, change and replace the file.

    The lock is a file beside it, which exists only while a process holds or awaits the lock.
    ``flock`` on a file that is open for writing also excludes the processes of other hosts where
    the folder is on NFS. (A lock on the folder itself would need no file, but fails on NFS.) The
    system releases the lock of a process that dies, and the next process uses the file that is
    left. In a folder without locks, only what processes write at the same time may be lost.
    """
    beside = path.with_name(f"{path.name}.lock")
    while True:
        with beside.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:  # such as Lustre's without -o flock
                warnings.warn(f"{path.parent} has no locks: {error}", stacklevel=3)
            if not _is_at(lock.fileno(), beside):  # its last holder has removed it
                continue
            try:
                yield
            finally:
                beside.unlink(missing_ok=True)
            return


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that a path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def replace_file(path: Path, text: str) -> None:
    """Replace a file in one step by a draft that is on disk."""
    draft = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
