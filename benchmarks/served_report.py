"""The record of `served_vllm.py` as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable
from operator import truediv

from tables import OURS, Record, beside_ours, markdown, source

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
    speeds = _phases(rows, "tokens_per_s", truediv)
    timed = [{**row, "step_ms": 1e3 * row["step_s"]} for row in rows if row["step_s"] is not None]
    steps = [STEPS, _phases(timed, "step_ms", lambda ours, theirs: theirs / ours)] if timed else []
    return [f"### {record['gpu']}", told, speeds, *steps, COMPARED, _compared(rows)]


def _by_case(rows: list[Record]) -> dict[tuple[str, str], list[Record]]:
    """The rows of each model that is served, by the first cells of its lines."""
    cases: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        gpus = f", {row['gpus']} GPUs ({row['parallel']})" if row["gpus"] > 1 else ""
        adapters = f", {row['adapters']} adapters" if row["adapters"] else ""
        model = f"{row['model']}, {row['layers']} layers{gpus}{adapters}"
        cases.setdefault((model, f"`{row['scheme']}`"), []).append(row)
    return cases


def _phases(rows: list[Record], field: str, better: Callable[[float, float], float]) -> str:
    """Two lines a case: this library's experts, and vLLM's own by their classes.

    Args:
        rows: of one GPU.
        field: what of each row is shown.
        better: how many times as good ours is as theirs.
    """
    phases = sorted({(row["phase"], row["M"]) for row in rows})
    lines = []
    for case, mine in _by_case(rows).items():
        numbers = {(row["impl"], row["phase"], row["M"]): row[field] for row in mine}
        experts = {row["impl"]: f"`{row['experts']}`" for row in mine}
        for impl in sorted(experts, key=lambda impl: impl != OURS):
            name = OURS if impl == OURS else experts[impl]
            lines.append([*case, name, *beside_ours(numbers, impl, phases, _number, better)])
    head = ["model", "weights", "experts", *(f"{phase} {m}" for phase, m in phases)]
    return markdown(head, lines, labels=3, once=2)


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _compared(rows: list[Record]) -> str:
    lines = []
    for case, mine in _by_case(rows).items():
        compared = next((row["compared"] for row in mine if row["compared"]), None)
        if compared is not None:
            ties, apart = compared["near_ties"], f"{compared['apart']:.3f}"
            parted = f"{len(ties)}, near ties: {sum(ties)}"
            lines.append([*case, str(compared["equal"]), apart, parted])
    head = ["model", "weights", "equal tokens", "apart", "parted"]
    return markdown(head, lines, labels=2)
