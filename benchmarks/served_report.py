"""The record of `served_vllm.py` as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from report import source
from tables import OURS, Record, markdown

NONE = "No model has been served on a GPU yet (`python benchmarks/served_vllm.py`)."
LEGEND = f"""\
Tokens per second of an engine, of all sequences together: new tokens of sequences that decode, and
tokens of prompts. In brackets: how many times as many {OURS} makes."""
STEPS = """\
The kernels of one step, in ms. In brackets: how many times as long as with ours. Where the engine's
own work on the host takes longer, it hides the difference."""
COMPARED = """\
Greedy continuations with both experts: tokens that are equal before any difference, how far apart
log-probabilities are at most up to there, and at how many places the continuations part. At a near
tie an engine finds the two tokens no further apart than that."""


def report(records: list[Record]) -> str:
    """The Markdown of all ``records``: speeds of each GPU, and what the engines wrote."""
    parts = [part for record in records for part in _parts(record)]
    return "\n\n".join([LEGEND, *parts]) if parts else NONE


def _parts(record: Record) -> list[str]:
    rows = record["rows"]
    if not rows:
        return []
    versions = ", ".join(sorted({row["config"]["vllm"] for row in rows}))
    told = f"vLLM {versions} on {source(record)}"
    speeds = _phases(rows, "tokens_per_s", lambda ours, theirs: ours / theirs)
    timed = [{**row, "step_ms": 1e3 * row["step_s"]} for row in rows if row["step_s"] is not None]
    steps = [STEPS, _phases(timed, "step_ms", lambda ours, theirs: theirs / ours)] if timed else []
    return [f"### {record['gpu']}", told, speeds, *steps, COMPARED, _compared(rows)]


class _Case(NamedTuple):
    """What an engine serves."""

    model: str
    scheme: str
    layers: int
    gpus: int
    parallel: str
    adapters: int

    @property
    def cells(self) -> list[str]:
        """The first cells of a line."""
        gpus = f", {self.gpus} GPUs ({self.parallel})" if self.gpus > 1 else ""
        adapters = f", {self.adapters} adapters" if self.adapters else ""
        return [f"{self.model}, {self.layers} layers{gpus}{adapters}", f"`{self.scheme}`"]


def _case(row: Record) -> _Case:
    return _Case(*(row[name] for name in _Case._fields))


def _by_case(rows: list[Record]) -> dict[_Case, list[Record]]:
    cases: dict[_Case, list[Record]] = {}
    for row in rows:
        cases.setdefault(_case(row), []).append(row)
    return cases


def _phases(rows: list[Record], field: str, better: Callable[[float, float], float]) -> str:
    """Two lines a case: this library's experts, and vLLM's own by their classes.

    Args:
        rows: of one GPU.
        field: what of each row is shown.
        better: how many times as good ours is as theirs, of both.
    """
    phases = sorted({(row["phase"], row["M"]) for row in rows})
    lines = []
    for case, mine in _by_case(rows).items():
        shown = {(row["impl"], row["phase"], row["M"]): row[field] for row in mine}
        for impl in sorted({row["impl"] for row in mine}, key=lambda impl: impl != OURS):
            experts = next(row["experts"] for row in mine if row["impl"] == impl)
            cells = [
                _cell(shown.get((impl, *phase)), shown.get((OURS, *phase)), impl, better)
                for phase in phases
            ]
            name = case.cells if impl == OURS else ["", ""]
            lines.append([*name, OURS if impl == OURS else f"`{experts}`", *cells])
    head = ["model", "weights", "experts", *(f"{phase} {m}" for phase, m in phases)]
    return markdown(head, lines, labels=3)


def _cell(
    mine: float | None, ours: float | None, impl: str, better: Callable[[float, float], float]
) -> str:
    if mine is None:
        return "-"
    text = f"{mine:,.0f}" if mine >= 100 else f"{mine:.3g}"
    return text if impl == OURS or ours is None else f"{text} ({better(ours, mine):.2f})"


def _compared(rows: list[Record]) -> str:
    lines = []
    for case, mine in _by_case(rows).items():
        compared = next((row["compared"] for row in mine if row["compared"]), None)
        if compared is not None:
            ties, apart = compared["near_ties"], f"{compared['apart']:.3f}"
            parted = f"{len(ties)}, near ties: {sum(ties)}"
            lines.append([*case.cells, str(compared["equal"]), apart, parted])
    head = ["model", "weights", "equal tokens", "apart", "parted"]
    return markdown(head, lines, labels=2)
