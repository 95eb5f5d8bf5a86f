"""Tuning a layer: what its file lacks is searched for and written, token count by token count."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import moe_ops.dispatch.tuned
from moe_ops.dispatch.tuned import FOLDER
from moe_ops.dispatch.tuned_file import parse
from moe_ops.tuning.search import Clock, Subject, Trial, tune_tokens

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    tqdm = None

PACKAGED = Path(moe_ops.dispatch.tuned.__file__).parent / "configs"


def default_folder() -> Path:
    """The user's, or the package's."""
    return Path(FOLDER) if FOLDER else PACKAGED


def read(subject: Subject, folder: Path) -> dict[str, Any]:
    """The entries of its file by number of tokens; none without a file.

    Raises:
        ValueError: a file that is refused, or one for layers of another ``top_k``.
    """
    path = folder / subject.file
    if not path.is_file():
        return {}
    text = path.read_text()
    known = parse(path.name, text).top_k
    if known != subject.top_k:
        raise ValueError(f"{path.name}: top_k must be {subject.top_k}, got {known}")
    record = json.loads(text)
    return {key: record[key] for key in record if key != "top_k"}


def write(subject: Subject, folder: Path, entries: dict[str, Any]) -> None:
    """Put a file in place of the old one, if it is one that would be read."""
    ordered = {key: entries[key] for key in sorted(entries, key=int)}
    text = json.dumps({"top_k": subject.top_k, **ordered}, indent=1) + "\n"
    parse(subject.file, text)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / (subject.file + ".tmp")
    draft.write_text(text)
    os.replace(draft, folder / subject.file)


def tune(
    subject: Subject,
    num_tokens: Sequence[int],
    folder: Path,
    clock: Clock,
    *,
    again: bool = False,
    made_with: str = "",
    budget_s: float = math.inf,
) -> list[int]:
    """Tune what the file lacks, and write after each number of tokens, the largest first.

    Numbers of tokens of one class of load share a row tile: that of the first that was tuned.

    Args:
        subject: the layer.
        num_tokens: those wanted.
        folder: of the file.
        clock: what times a GEMM.
        again: whether to tune those that the file has too.
        made_with: noted in each entry.
        budget_s: after so many seconds none is begun any more.

    Returns:
        The numbers of tokens that were tuned.
    """
    entries, started, tuned = read(subject, folder), time.monotonic(), []
    todo = sorted({n for n in num_tokens if again or str(n) not in entries}, reverse=True)
    entries = {key: entry for key, entry in entries.items() if int(key) not in todo}
    shares = [len(subject.candidates(tokens)) for tokens in todo]
    progress, expected = _Progress(sum(shares), f"{subject.scheme.name}, {len(todo)} counts"), 0
    for tokens, share in zip(todo, shares, strict=True):
        if time.monotonic() - started > budget_s:
            break
        expected += share
        same = [e for n, e in entries.items() if subject.load(int(n)) == subject.load(tokens)]
        tiles = [same[0]["BLOCK_M"]] if same else subject.row_tiles(tokens)
        entry = tune_tokens(subject, tokens, tiles, progress.ticking(clock, expected))
        entries[str(tokens)] = {**entry, "made_with": made_with}
        write(subject, folder, entries)
        progress.reach(expected)
        tuned.append(tokens)
    progress.close()
    return tuned


class _Progress:
    """A bar where tqdm is installed, else a line that counts; on stderr."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self.bar = tqdm and tqdm(total=total, desc=what, unit="trial")

    def ticking(self, clock: Clock, last: int) -> Clock:
        """The clock, whose trials count up to ``last``: how many there will be is a guess."""

        def timed(trial: Trial) -> float:
            self.reach(min(self.done + 1, last))
            return clock(trial)

        return timed

    def reach(self, done: int) -> None:
        """Show that so much is done."""
        if self.bar is not None:
            self.bar.update(done - self.done)
        else:
            print(f"\r{self.what}: {done} of {self.total}", end="", file=sys.stderr, flush=True)
        self.done = done

    def close(self) -> None:
        """End the line."""
        if self.bar is not None:
            self.bar.close()
        elif self.total:
            print(file=sys.stderr)
