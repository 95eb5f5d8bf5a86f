"""Profile of one call: its kernels by the stage and the operator that launch them.

While a call is profiled, every operator of `moe_ops.ops` is wrapped in a profiler range called
``stage/operator``. The library itself has no such ranges.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from moe_ops import ops
from moe_ops.bench.command import print_row
from moe_ops.bench.harness import evict_cache

LAYER = "moe_ops.benchmarks/layer"
"""Name of the profiler range around a whole call."""
OTHER = "other"
"""Stage of work outside of this library's operators; for a peer that is all work."""
WIDTHS = {"stage": 18, "operator": 26, "kernels": 8, "time_us": 9, "share": 7}

_CALLS = 5
_STAGES = frozenset(ops.STAGES.values())
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE_WORK = ("kernel", "gpu_memset", "gpu_memcpy")


@dataclass(frozen=True)
class StageTime:
    """One operator's part of a call."""

    stage: str
    operator: str
    kernels: int
    """Number of launched kernels, copies and fills; 0 on the CPU."""
    time_us: float
    """Sum of its kernels' durations; on the CPU wall-clock time."""
    share: float
    """Fraction of the sum over all operators."""


@dataclass(frozen=True)
class ProfileRow:
    """One profiled combination; the first five fields are its key in the record."""

    scheme: str
    shape: str
    M: int
    impl: str
    routing: str
    clock: str
    """``gpu`` or ``cpu``."""
    kernels: int
    time_us: float
    """Sum over the parts, without the gaps between kernels."""
    stages: list[StageTime]


@contextmanager
def named_stages() -> Iterator[None]:
    """Run every operator of `moe_ops.ops` in a profiler range ``stage/operator``."""
    overloads = {
        name: value
        for name, value in vars(ops).items()
        if isinstance(value, torch._ops.OpOverload) and value.namespace == ops.NAMESPACE
    }
    try:
        for name, overload in overloads.items():
            setattr(ops, name, _in_range(overload))
        yield
    finally:
        for name, overload in overloads.items():
            setattr(ops, name, overload)


def _in_range(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    operator = str(overload).removeprefix(f"{ops.NAMESPACE}.").removesuffix(".default")
    label = f"{ops.STAGES[operator]}/{operator}"

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return overload(*args, **kwargs)

    return call


def profile_call(call: Callable[[], Any], device: torch.device) -> list[StageTime]:
    """The parts of one eager call with a cold L2 cache, in the order in which they first run.

    Args:
        call: runs on static inputs; it is called a few times first, which compiles.
        device: the device that the call runs on.

    Raises:
        RuntimeError: the profiler recorded no GPU work.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with named_stages():
        for _ in range(2):
            call()
        with profile(activities=activities) as profiler:
            for _ in range(_CALLS):
                evict_cache(device)
                with record_function(LAYER):
                    call()
            if on_gpu:
                torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return trace_parts(json.loads(path.read_text()), on_gpu=on_gpu)


class _Range(NamedTuple):
    """A profiler range, in CPU time."""

    name: str
    start: float
    end: float


def trace_parts(trace: dict[str, Any], *, on_gpu: bool) -> list[StageTime]:
    """The parts of a call in a Chrome trace, medians over calls: kernels by their launching range.

    Raises:
        RuntimeError: the trace has no call, or no GPU work.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = [
        _Range(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation"
    ]
    calls = [r for r in ranges if r.name == LAYER]
    stages = [r for r in ranges if r.name.partition("/")[0] in _STAGES]
    work = _launched(events) if on_gpu else [(r.start, r.end - r.start) for r in stages]
    durations: dict[str, list[list[float]]] = {}
    for number, call in enumerate(calls):
        for start, duration in work:
            if call.start <= start <= call.end:
                name = next((r.name for r in stages if r.start <= start <= r.end), OTHER)
                per_call = durations.setdefault(name, [[] for _ in calls])
                per_call[number].append(duration)
    if not on_gpu:
        for number, call in enumerate(calls):
            rest = call.end - call.start - sum(sum(d[number]) for d in durations.values())
            durations.setdefault(OTHER, [[] for _ in calls])[number] = [rest]
    if not durations:
        raise RuntimeError(
            "the profiler recorded no GPU work: it needs CUPTI and the permission to use it"
        )
    return _medians(durations, on_gpu=on_gpu)


def _launched(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The launch time (CPU clock) and the duration of each kernel, copy and fill on the GPU.

    Raises:
        RuntimeError: the trace lacks the launch of some GPU work.
    """
    launches, callers = {}, {}
    for event in events:
        category, arguments = event.get("cat"), event.get("args", {})
        if category in _LAUNCHES and "correlation" in arguments:
            launches[arguments["correlation"]] = event["ts"]
        elif category == "cpu_op" and "External id" in arguments:
            callers[arguments["External id"]] = event["ts"]
    work = []
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            arguments = event["args"]
            caller = callers.get(arguments.get("External id"))
            launch = launches.get(arguments.get("correlation"), caller)
            if launch is None:
                raise RuntimeError(f"the profiler recorded no launch of {event['name']}")
            work.append((launch, event["dur"]))
    return sorted(work)


def _medians(durations: dict[str, list[list[float]]], *, on_gpu: bool) -> list[StageTime]:
    times = {name: statistics.median(sum(d) for d in calls) for name, calls in durations.items()}
    total = sum(times.values())
    parts = []
    for name, calls in durations.items():
        stage, _, operator = name.partition("/")
        kernels = statistics.median_high(len(d) for d in calls) if on_gpu else 0
        parts.append(StageTime(stage, operator or "-", kernels, times[name], times[name] / total))
    return parts


def profile_row(key: dict[str, Any], call: Callable[[], Any], device: torch.device) -> ProfileRow:
    """Profile one call of one implementation; ``key`` names the combination."""
    parts = profile_call(call, device)
    clock = "gpu" if device.type == "cuda" else "cpu"
    kernels, time_us = sum(p.kernels for p in parts), sum(p.time_us for p in parts)
    return ProfileRow(**key, clock=clock, kernels=kernels, time_us=time_us, stages=parts)


def print_profile(row: ProfileRow) -> None:
    """Print a table of the parts and their sum."""
    print(f"\n{row.impl}, {row.shape}, {row.scheme}, {row.routing} routing, {row.M} tokens")
    for number, part in enumerate(row.stages):
        kernels = part.kernels if row.clock == "gpu" else None
        cells = {**vars(part), "kernels": kernels, "share": f"{part.share:.1%}"}
        print_row(cells, WIDTHS, head=number == 0)
    kernels = row.kernels if row.clock == "gpu" else None
    total = {"stage": "layer", "operator": f"({row.clock} time)", "kernels": kernels}
    print_row({**total, "time_us": row.time_us, "share": "100.0%"}, WIDTHS)
