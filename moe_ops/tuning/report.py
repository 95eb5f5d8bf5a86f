"""The output of ``python -m moe_ops tune``: the trials of a dry run, and the entries of a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_ops.brief import aligned
from moe_ops.dispatch.tuned_file import HOPPER_SIZES, SIZES, written
from moe_ops.tuning.search import Subject, Trial

_SIZES = "columns x K / warps / stages / group"
"""Form of a portable config; a Hopper one has name, weight rows, stages, group and CTAs per SM."""


def trials_table(trials: Iterable[Trial]) -> str:
    """A table with a line for each trial."""
    lines: list[Sequence[str]] = [("tokens", "GEMM", "rows", _SIZES)]
    for tokens, gemm, tiles in trials:
        lines.append((str(tokens), str(gemm), str(tiles.block_m), _sizes(written(tiles))))
    return aligned(lines)


def trials_json(subject: Subject, trials: Iterable[Trial]) -> str:
    """The trials as a JSON object."""
    candidates = [{**trial._asdict(), "tiles": asdict(trial.tiles)} for trial in trials]
    return json.dumps({**_subject(subject), "candidates": candidates}, indent=1)


def entries_table(entries: dict[str, Any]) -> str:
    """A table with a line for each number of tokens; times only of an entry that has both."""
    head = ("tokens", "rows", f"GEMM 1 ({_SIZES})", "GEMM 2", "default us", "us", "ratio")
    lines, ratios = [head], [1.0]
    for tokens, entry in entries.items():
        tiles = [_sizes(entry[gemm]) for gemm in ("gemm1", "gemm2")]
        times = [entry.get(name) for name in ("default_us", "time_us")]
        cells = ("-", "-", "-")  # an entry that nobody timed
        if all(isinstance(time, (int, float)) and time > 0 for time in times):
            ratios.append(times[0] / times[1])
            cells = (f"{times[0]:.1f}", f"{times[1]:.1f}", f"{ratios[-1]:.2f}")
        lines.append((tokens, str(entry["BLOCK_M"]), tiles[0], tiles[1], *cells))
    return f"{aligned(lines)}\nthe analytic default takes at most {max(ratios):.2f} times as long"


def entries_json(
    subject: Subject, folder: Path, timed: Sequence[int], entries: dict[str, Any]
) -> str:
    """The entries as a JSON object, with the token counts that were timed in this run."""
    parts = {"file": str(folder / subject.file), **_subject(subject)}
    return json.dumps({**parts, "timed": list(timed), "entries": entries}, indent=1)


def _subject(subject: Subject) -> dict[str, Any]:
    experts, width, hidden = subject.sizes
    return {
        "gpu": subject.device.name,
        "scheme": subject.scheme.key,
        "E": experts,
        "N": width,
        "K": hidden,
        "top_k": subject.top_k,
    }


def _sizes(gemm: dict[str, Any]) -> str:
    """The tiles of one GEMM in a file's entry, as a table cell."""
    if "kernel" in gemm:
        block_n, group_m, num_stages = (gemm[size] for size in HOPPER_SIZES)
        schedule = " on demand" if gemm.get("ON_DEMAND") else ""
        schedule += f" x{gemm['CTAS']}" if "CTAS" in gemm else ""
        return f"{gemm['kernel']} {block_n} /{num_stages} /{group_m}{schedule}"
    block_n, block_k, group_m, num_warps, num_stages = (gemm[size] for size in SIZES)
    return f"{block_n}x{block_k} /{num_warps} /{num_stages} /{group_m}"
