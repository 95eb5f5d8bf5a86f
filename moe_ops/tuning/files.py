"""Tune a layer: search tiles for the token counts that its file lacks, and write the file.

Several processes may tune one layer at the same time: each adds its entries to the file while it
holds the file's lock, and readers see either the old file or the new one.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from moe_ops.dispatch import tuned
from moe_ops.dispatch.tuned_file import parse_tuned_layer
from moe_ops.tuning.search import Clock, Prepare, Subject, Trial, tune_tokens
from moe_ops.tuning.shared_file import locked, replace_file

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    tqdm = None


class Hooks(NamedTuple):
    """What `tune` calls besides the clock."""

    prepare: Prepare = list
    """Called with trials before they are timed."""
    report: Callable[[int, dict[str, Any]], object] = lambda tokens, entry: None
    """Called with a number of tokens and its new entry, which has been written."""


NO_HOOKS = Hooks()
OF_TUNED_FILES = f"; --output or {tuned.VARIABLE} names another one for tuned files"


def default_folder() -> Path:
    """The user's folder of tuned files, which layers look into.

    Raises:
        ValueError: there is none.
    """
    if tuned.FOLDER is None:
        raise ValueError(
            f"{tuned.VARIABLE} or --output must name a folder for a user without a home, got none"
        )
    return Path(tuned.FOLDER)


def check_writable(folder: Path, hint: str = OF_TUNED_FILES) -> None:
    """Check that files can be written to a folder, or that it can be made. Makes nothing.

    Raises:
        ValueError: they cannot.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with TemporaryFile(dir=there):
            return
    except OSError as error:
        raise ValueError(
            f"the folder must be writable, got {folder} ({error.strerror or error}){hint}"
        ) from None


def read(subject: Subject, folder: Path) -> dict[str, Any]:
    """The entries of a layer by number of tokens: its file's in a folder, and what ships.

    A file in the user's folder takes the place of the package's, so it begins with what ships.

    Raises:
        ValueError: an invalid file, or a file for another ``top_k``.
    """
    top_k, packaged = _entries(tuned.PACKAGED / subject.file)
    packaged = packaged if top_k == subject.top_k else {}
    top_k, entries = _entries(folder / subject.file)
    if top_k not in (None, subject.top_k):
        raise ValueError(f"{subject.file}: top_k must be {subject.top_k}, got {top_k}")
    return _ordered({**packaged, **entries})


def _entries(path: Any) -> tuple[int | None, dict[str, Any]]:
    """``top_k`` and the entries of a file (a path or a resource); None without a file."""
    if not path.is_file():
        return None, {}
    text = tuned.read_file(path)
    top_k, record = parse_tuned_layer(path.name, text).top_k, json.loads(text)
    return top_k, {key: record[key] for key in record if key != "top_k"}


def _ordered(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: entries[key] for key in sorted(entries, key=int)}


def write(subject: Subject, folder: Path, entries: dict[str, Any]) -> None:
    """Add entries to a layer's tuned file, in place of entries for the same numbers of tokens.

    Raises:
        OSError: the folder cannot be written to.
        ValueError: an invalid entry, or a file that `read` rejects.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / subject.file):
        merged = _ordered({**read(subject, folder), **entries})
        text = json.dumps({"top_k": subject.top_k, **merged}, indent=1) + "\n"
        parse_tuned_layer(subject.file, text)
        replace_file(folder / subject.file, text)


def tune(
    subject: Subject,
    num_tokens: Sequence[int],
    folder: Path,
    clock: Clock,
    *,
    again: bool = False,
    made_with: str = "",
    budget_s: float = math.inf,
    hooks: Hooks = NO_HOOKS,
) -> list[int]:
    """Tune the token counts that the file lacks, the largest first, and write after each.

    Entries that other processes write meanwhile stay in the file.

    Args:
        subject: the layer.
        num_tokens: the requested token counts.
        folder: folder of the file.
        clock: times a GEMM.
        again: whether to tune token counts again that the file already has.
        made_with: note stored in each entry.
        budget_s: no token count is started after this many seconds.
        hooks: what else is called.

    Returns:
        The numbers of tokens that were tuned.

    Raises:
        ValueError: the folder cannot be written to, or its file for this layer is invalid.
    """
    entries, started, done = read(subject, folder), time.monotonic(), []
    todo = sorted({n for n in num_tokens if again or str(n) not in entries}, reverse=True)
    check_writable(folder)
    shares = [len(subject.candidates(tokens)) for tokens in todo]
    progress, expected = _Progress(sum(shares), f"{subject.scheme.name}, {len(todo)} counts"), 0
    for tokens, share in zip(todo, shares, strict=True):
        if time.monotonic() - started > budget_s:
            break
        expected += share
        ticking = progress.ticking(clock, expected)
        entry = tune_tokens(subject, tokens, ticking, hooks.prepare)
        write(subject, folder, {str(tokens): {**entry, "made_with": made_with}})
        hooks.report(tokens, entry)
        progress.reach(expected)
        done.append(tokens)
    progress.close()
    return done


class _Progress:
    """A progress bar if tqdm is installed, else a line with a count; on stderr."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self.bar = tqdm and tqdm(total=total, desc=what, unit="trial")

    def ticking(self, clock: Clock, last: int) -> Clock:
        """The clock, counting trials up to ``last``; the number of trials is only an estimate."""

        def timed(trial: Trial) -> float:
            self.reach(min(self.done + 1, last))
            return clock(trial)

        return timed

    def reach(self, done: int) -> None:
        """Show ``done`` trials as done."""
        if self.bar is not None:
            self.bar.update(done - self.done)
        else:
            print(f"\r{self.what}: {done} of {self.total}", end="", file=sys.stderr, flush=True)
        self.done = done

    def close(self) -> None:
        """Close the bar, or end the line."""
        if self.bar is not None:
            self.bar.close()
        elif self.total:
            print(file=sys.stderr)
