"""The record of ``python -m moe_ops tune --record FOLDER``: default tiles beside the best."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_ops.bench.command import recorded_name
from moe_ops.bench.harness import record_path, write_rows
from moe_ops.tuning.search import Subject

FILE = "tuning.json"
KEY = ("scheme", "shape", "M", "gemm")


@dataclass(frozen=True)
class TunedRow:
    """One GEMM at one number of tokens."""

    scheme: str
    shape: str
    M: int
    gemm: int
    """GEMM 1 or 2."""
    sizes: tuple[int, int, int, int]
    """E, k, H and I of the layer."""
    default: dict[str, Any]
    """The analytic config."""
    best: dict[str, Any]
    """The fastest config that was found; the default unless another is clearly faster."""
    default_us: float
    best_us: float
    ratio: float
    """Time of both GEMMs with default tiles over their time with the best tiles."""


def tuned_rows(subject: Subject, shape: str, num_tokens: int, entry: dict[str, Any]) -> list[Any]:
    """The rows of a tuned file's entry.

    Args:
        subject: the layer.
        shape: the layer's name in records.
        num_tokens: T.
        entry: what `moe_ops.tuning.search.tune_tokens` returned.
    """
    experts, width, hidden = subject.sizes
    times = ("time_us", "default_us")
    return [
        TunedRow(
            scheme=recorded_name(subject.scheme),
            shape=shape,
            M=num_tokens,
            gemm=which,
            sizes=(experts, subject.top_k, hidden, width),
            default=asdict(start.tiles),
            best={k: v for k, v in entry[f"gemm{which}"].items() if k not in times},
            default_us=entry[f"gemm{which}"]["default_us"],
            best_us=entry[f"gemm{which}"]["time_us"],
            ratio=round(entry["default_us"] / entry["time_us"], 4),
        )
        for which, start in enumerate(subject.starts(num_tokens), start=1)
    ]


def record_entry(
    folder: Path | None, subject: Subject, shape: str, num_tokens: int, entry: dict[str, Any]
) -> None:
    """Merge an entry's rows into the record in a folder; None: there is no record."""
    path = record_path(folder, FILE)
    if path is not None:
        write_rows(path, tuned_rows(subject, shape, num_tokens, entry), KEY)
