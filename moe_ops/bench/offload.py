"""Benchmark of layers whose experts are in host memory, beside the layer on the device.

For each case three times: the layer with all experts on the device; with all wanted experts in its
slots; and over a sequence of routings, of which each wants other experts. The last has the rate of
its copies, and the copy engine's rate in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_ops
from moe_ops.bench.command import (
    Lines,
    Recorder,
    add_scheme_option,
    amount,
    one_or_more,
    parser,
    progress,
    with_schemes,
)
from moe_ops.bench.harness import captured, default_device, measure, record_path, wall_times
from moe_ops.bench.layer import moe_ops_layer
from moe_ops.bench.problems import Experts, Inputs, Problem, make_experts, make_inputs
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.pipeline.host_experts import HostExperts, host_experts, store
from moe_ops.residency import Amount, parse_amount

STEPS = 64
"""Routings of a sequence."""
WARM_UPS, ENGINE_COPIES = 3, 10
"""Untimed and timed copies."""
KEY = ("scheme", "shape", "M", "routing", "resident")
WIDTHS = {
    "scheme": 15, "shape": 16, "M": 6, "routing": 8, "resident": 8, "all_us": 9, "hits_us": 9,
    "steps_us": 9, "hit_rate": 8, "misses": 7, "copied GB/s": 11, "engine GB/s": 11, "same_bits": 9,
}  # fmt: skip


@dataclass(frozen=True)
class OffloadRow:
    """One layer, with one number of experts on the device."""

    scheme: str
    shape: str
    M: int
    routing: str
    resident: int
    all_us: float
    """The layer with all experts on the device."""
    hits_us: float | None
    """With all wanted experts in the slots; None if they do not fit."""
    steps_us: float
    """Average over a sequence of routings."""
    hit_rate: float
    """Hits of the sequence over the experts that it wanted."""
    misses: float
    """Average number of experts that a call copies."""
    copied_gb_per_s: float | None
    """Copied bytes by the time beyond ``hits_us``, or of the whole call without it."""
    engine_gb_per_s: float | None
    """The copy engine's rate for as many bytes as a call copies."""
    same_bits: bool
    """Whether results equal, bit for bit, the layer with all experts on the device."""


class HostCase(NamedTuple):
    """A layer with all experts on the device, and in host memory."""

    problem: Problem
    experts: Experts
    host: HostExperts
    device: torch.device


def offloaded(case: HostCase, inputs: Inputs) -> Callable[[], Tensor]:
    """The layer whose experts are in host memory."""
    host = case.host
    return lambda: moe_ops.fused_experts(
        inputs.x,
        host.w1,
        host.w2,
        inputs.topk_weights,
        inputs.topk_ids,
        activation=case.experts.activation,
        quant_config=host.quant_config,
    )


def run_case(case: HostCase, scheme: str, tokens: int, routing: str) -> OffloadRow:
    """Time one case."""
    problem, device, residency = case.problem, case.device, case.host.residency
    inputs = make_inputs(problem, tokens, routing, device)
    everything, call = moe_ops_layer(case.experts, inputs), offloaded(case, inputs)
    same = torch.equal(call(), everything())
    all_us = measure(everything, device).time_us
    hits_us = None
    if inputs.num_active <= residency.num_slots:
        hits_us = measure(call, device).time_us
    before = residency.stats()
    steps_us = statistics.fmean(_sequence(call, inputs, problem, routing, device))
    after = residency.stats()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    copied = (after.bytes_copied - before.bytes_copied) / STEPS
    copy_us = steps_us - (hits_us or 0.0)
    return OffloadRow(
        scheme,
        problem.name,
        tokens,
        routing,
        residency.num_slots,
        all_us,
        hits_us,
        steps_us,
        hit_rate=hits / max(1, hits + misses),
        misses=misses / STEPS,
        copied_gb_per_s=copied / copy_us / 1e3 if copied and copy_us > 0 else None,
        engine_gb_per_s=_engine(copied, device) if copied else None,
        same_bits=same,
    )


def _sequence(
    call: Callable[[], Tensor],
    inputs: Inputs,
    problem: Problem,
    routing: str,
    device: torch.device,
) -> list[float]:
    """Microseconds of each call of a sequence, in which other tokens have other experts."""
    many = make_inputs(problem, STEPS * len(inputs.x), routing, device)
    weights, ids = (x.unflatten(0, (STEPS, -1)) for x in (many.topk_weights, many.topk_ids))
    run: Callable[[], Any] = call
    if device.type == "cuda":
        run = captured(call, device, 1)[0]
    times = []
    for step in range(STEPS):
        inputs.topk_weights.copy_(weights[step])
        inputs.topk_ids.copy_(ids[step])
        times.append(_call_us(run, device))
    return times


def _call_us(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        return wall_times(run, 1)[0]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return 1e3 * start.elapsed_time(end)


def _engine(size: float, device: torch.device) -> float:
    """Gigabytes per second of plain copies of ``size`` bytes from pinned memory."""
    source = torch.empty(int(size), dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    times = [
        _call_us(lambda: target.copy_(source, non_blocking=True), device)
        for _ in range(WARM_UPS + ENGINE_COPIES)
    ]
    return size / statistics.median(times[WARM_UPS:]) / 1e3


def options(arguments: Sequence[str] | None, prog: str | None) -> argparse.Namespace:
    """Parse the command line."""
    about = "Time layers whose experts are in host memory."
    examples = ("--resident 4 --model tiny --tokens 1,8",)
    command = parser(about, "1,8,64,4096", prog=prog, examples=examples)
    add_scheme_option(command)
    text = "experts on the GPU: numbers, shares or sizes such as 2.5GB (default: %(default)s)"
    command.add_argument(
        "--resident", type=one_or_more(amount), default="0.5", metavar="N,..", help=text
    )
    return with_schemes(command.parse_args(arguments))


@torch.no_grad()
def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the benchmark; the exit status is 1 after a failure.

    Args:
        arguments: command-line arguments; None: the process's.
        prog: name of the command in its help.
    """
    args, device = options(arguments, prog), default_device()
    path = record_path(args.output, "offload.json")
    recorder = Recorder(path, KEY, Lines(WIDTHS, _cells), args.time_budget_s)
    for scheme, problem in product(args.schemes, args.problems):
        progress(f"making the weights of {problem.name} in {scheme}")
        experts = make_experts(problem, scheme, device).loaded
        for resident in args.resident:
            try:
                case = _host_case(problem, experts, resident, device)
            except (RuntimeError, ValueError) as error:  # too little memory, or a wrong number
                recorder.failed.append(f"{scheme} {problem.name} with {resident}: {error}")
                continue
            for routing, tokens in product(args.routing, args.tokens):
                if not recorder.out_of_time():
                    recorder.add([run_case(case, scheme, tokens, routing)])
            del case
    return recorder.conclude()


def _host_case(problem: Problem, experts: Experts, resident: Any, device: torch.device) -> HostCase:
    config = experts.quant_config
    amounts = [Amount(problem.num_experts, problem.top_k, experts.bytes_per_expert)]
    (count,) = parse_amount("--resident", resident, amounts)
    weights = expert_weights(experts.w1, experts.w2, config)
    held = store(weights, pinned=device.type == "cuda")
    return HostCase(problem, experts, host_experts(held, config, count, device), device)


def _cells(row: OffloadRow) -> dict[str, Any]:
    cells = asdict(row)
    renamed = {"copied GB/s": "copied_gb_per_s", "engine GB/s": "engine_gb_per_s"}
    return {**cells, **{shown: cells[name] for shown, name in renamed.items()}}


if __name__ == "__main__":
    sys.exit(main())
