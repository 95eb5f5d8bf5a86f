"""Shared code of the single-stage benchmarks: times and records the cases that each lists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.bench.command import parser, print_row
from moe_ops.bench.harness import Row, default_device, floor_us, measure, record_path, write_rows
from moe_ops.bench.problems import Inputs, Problem, make_inputs

WIDTHS = {
    "shape": 16, "M": 6, "routing": 8, "impl": 28, "time_us": 9, "p10_us": 9, "p90_us": 9,
    "GB/s": 8, "TFLOP/s": 8, "bound_us": 9, "of bound": 8,
}  # fmt: skip


class Case(NamedTuple):
    """One call to time."""

    name: str
    """The operator, as in `moe_ops.ops.STAGES`, with ``:variant`` after it; or a baseline."""
    call: Callable[[], Any]
    nbytes: int
    """The bytes that must move: inputs read once, outputs written once."""
    flops: int = 0


@dataclass(frozen=True)
class StageRow(Row):
    """A row of ``stages.json``; ``floor_us`` is the lower bound of the one operator."""

    gb_per_s: float
    tflop_per_s: float


MakeCases = Callable[[Problem, Inputs], Iterable[Case]]


def nbytes(*tensors: Tensor) -> int:
    """Bytes of all ``tensors``."""
    return sum(tensor.nbytes for tensor in tensors)


def layer_plan(problem: Problem, scheme: str, ids: Tensor) -> list[Tensor | None]:
    """The ``tiles`` that a layer in this scheme passes to its GEMMs."""
    return [ops.plan_slots(ids, None, problem.num_experts, scheme, torch.bfloat16), ids, None]


def main(stage: str, make_cases: MakeCases) -> None:
    """Time the cases of every requested shape, number of tokens and routing.

    Raises:
        SystemExit: an operator of the stage has no case.
    """
    args = parser(f"Time the operators of the stage {stage}.", tokens="1,64,4096").parse_args()
    device, started = default_device(), time.monotonic()
    path = record_path(args.output, "stages.json")
    seen: set[str] = set()
    for problem in args.problems:
        for routing, tokens in product(args.routing, args.tokens):
            if time.monotonic() - started > args.time_budget_s:
                print(f"no time left for {problem.name} with {tokens} tokens, and what follows")
                return
            inputs = make_inputs(problem, tokens, routing, device)
            rows = []
            for case in make_cases(problem, inputs):
                row = _row(case, problem, tokens, routing, inputs)
                _print(row, head=not seen)
                seen.add(case.name.partition(":")[0])
                rows.append(row)
            if path:
                write_rows(path, rows)
    missing = {name for name, of in ops.STAGES.items() if of == stage} - seen
    if missing:
        raise SystemExit(f"operators of the stage {stage} without a case: {sorted(missing)}")


def _row(case: Case, problem: Problem, tokens: int, routing: str, inputs: Inputs) -> StageRow:
    with torch.no_grad():
        timing = measure(case.call, inputs.x.device, budget_s=0.3)
    return StageRow(
        scheme="bf16",
        shape=problem.name,
        M=tokens,
        impl=case.name,
        routing=routing,
        time_us=timing.time_us,
        p10_us=timing.p10_us,
        p90_us=timing.p90_us,
        runs=timing.runs,
        rel_err=None,
        floor_us=floor_us(case.nbytes, case.flops),
        config={"active_experts": inputs.num_active},
        gb_per_s=1e-3 * case.nbytes / timing.time_us,
        tflop_per_s=1e-6 * case.flops / timing.time_us,
    )


def _print(row: StageRow, *, head: bool) -> None:
    cells = {
        "GB/s": row.gb_per_s,
        "TFLOP/s": row.tflop_per_s or None,
        "bound_us": row.floor_us,
        "of bound": row.floor_us and row.floor_us / row.time_us,
    }
    print_row({**asdict(row), **cells}, WIDTHS, head=head)
