"""Timing, lower bounds and records, shared by all benchmarks."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache, partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_ops
from moe_ops.inspect.devices import MEASURED as HARDWARE
from moe_ops.inspect.workspace import PeakMemory
from moe_ops.tuning.shared_file import locked, replace_file

CHECKOUT = Path(moe_ops.__file__).resolve().parent.parent
"""The root of the repository, if the package is imported from a checkout."""
CONSOLE_SCRIPT = "moe-ops"
"""The name of the installed command."""
KEY = ("scheme", "shape", "M", "impl", "routing")
FLUSH_BYTES = 512 * 10**6
"""Bytes that `evict_cache` reads; its buffer stays on the GPU."""
_WARM_UPS = 3
_WARM_UP_S = 0.05
"""Seconds of untimed replays before the timed ones. After a pause (while weights are made and
kernels compiled) the replays of the first 20 to 30 ms took up to a tenth longer on an H200."""


def default_device() -> torch.device:
    """The current CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gpu_name() -> str:
    """The name of the GPU, or ``CPU``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def floor_us(nbytes: int, flops: int = 0, math: str = "bf16") -> float | None:
    """Lower bound: the time to read ``nbytes`` or to do ``flops``, whichever is longer.

    None if the GPU's rates are not known.
    """
    hardware = HARDWARE.get(gpu_name())
    if hardware is None:
        return None
    return 1e6 * max(nbytes / hardware.read_bytes_per_s, flops / hardware.flops[math])


# Timing


class Timing(NamedTuple):
    """Times of one call in microseconds, and the output of the call."""

    time_us: float
    p10_us: float
    p90_us: float
    runs: int
    output: Any

    @property
    def times(self) -> dict[str, Any]:
        """All but the output, as the fields of a `Row`."""
        return {name: value for name, value in self._asdict().items() if name != "output"}


def measure(
    call: Callable[[], Any],
    device: torch.device,
    budget_s: float = 1.0,
    *,
    captured: bool = True,
) -> Timing:
    """Median, 10th and 90th percentile over 20 to 100 calls; no overhead is subtracted.

    On CUDA a call is one graph replay between two events, after `evict_cache`. On the CPU, and if
    it is not captured, it is one eager call that ends when its kernels have, by the wall clock.

    Args:
        call: runs on static inputs; the first calls, which compile, are not timed.
        device: the device that the call runs on.
        budget_s: target duration of all timed calls in seconds, within the limits of their number.
        captured: whether CUDA calls are captured in a graph.
    """
    graph = captured and device.type == "cuda"
    time_calls, output = (_captured if graph else _eager)(call, device)
    estimate = statistics.median(time_calls(_WARM_UPS))
    fewest = 20 if estimate > 5000 else 40
    runs = min(100, max(fewest, int(budget_s * 1e6 / max(estimate, 1e-3))))
    times = time_calls(runs)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), deciles[0], deciles[-1], runs, output)


_Timer = Callable[[int], list[float]]


def captured(
    call: Callable[[], Any], device: torch.device, warm_ups: int = _WARM_UPS
) -> tuple[Callable[[], None], Any]:
    """Capture a call in a CUDA graph: what replays it, and its output."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # vLLM keeps Marlin's locks for each stream
        output = call()
    return graph.replay, output


def _captured(call: Callable[[], Any], device: torch.device) -> tuple[_Timer, Any]:
    replay, output = captured(call, device)
    if isinstance(output, Tensor) and output.is_floating_point():
        output.fill_(torch.nan)  # elements that a replay does not write show up in the error

    def time_calls(count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            evict_cache(device)
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize(device)
        return [1e3 * start.elapsed_time(end) for start, end in events]

    began = time.perf_counter()
    while time.perf_counter() - began < _WARM_UP_S:
        time_calls(_WARM_UPS)
    return time_calls, output


def evict_cache(device: torch.device) -> None:
    """Enqueue a read that is large enough to evict the GPU's L2 cache.

    (A large write would leave dirty lines, whose write-back would fall into the timed region.)
    """
    if device.type == "cuda":
        _flush_buffer(device).sum()


@cache
def _flush_buffer(device: torch.device) -> Tensor:
    return torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device=device)


def _eager(call: Callable[[], Any], device: torch.device) -> tuple[_Timer, Any]:
    def finished() -> Any:
        output = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return output

    for _ in range(_WARM_UPS if device.type == "cuda" else 1):
        output = finished()
    return partial(wall_times, finished), output


def wall_times(call: Callable[[], Any], count: int) -> list[float]:
    """Microseconds of each of ``count`` calls, one after the other, by the wall clock."""
    stamps = [time.perf_counter()]
    for _ in range(count):
        call()
        stamps.append(time.perf_counter())
    return [1e6 * (end - start) for start, end in pairwise(stamps)]


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Peak bytes that the allocator hands out during a call, beyond those that it held before.

    On the CPU the outputs of operators are counted, in an eager call even if it is compiled.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.compiler.set_stance("force_eager"), PeakMemory() as memory:
        call()
    return memory.peak


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """``||actual - reference|| / ||reference||``; NaN if ``actual`` is not finite."""
    difference = torch.linalg.vector_norm(actual.float() - reference)
    return (difference / torch.linalg.vector_norm(reference)).item()


# Records


@dataclass(frozen=True)
class Row:
    """One measured combination."""

    scheme: str
    shape: str
    M: int
    impl: str
    routing: str
    time_us: float
    p10_us: float
    p90_us: float
    runs: int
    rel_err: float | None
    floor_us: float | None
    config: dict[str, Any]


def write_rows(path: Path, rows: Sequence[Any], key: Sequence[str] = KEY) -> None:
    """Merge ``rows`` (dataclasses) into the record at ``path``, replacing rows of equal ``key``.

    The header describes the latest run. ``parts`` lists every run that added to the record, and
    each row has the commit of its own run.
    """
    header = run_header()
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        old = json.loads(path.read_text()) if path.exists() else {"rows": [], "parts": []}
        replace_file(path, _merged(header, old, rows, key))


def _merged(
    header: dict[str, Any], old: dict[str, Any], rows: Sequence[Any], key: Sequence[str]
) -> str:
    """The text of a record with the rows of a run."""
    part = {name: header[name] for name in ("commit", "date", "command")}
    merged = {tuple(row[name] for name in key): row for row in old["rows"]}
    for row in map(asdict, rows):
        merged[tuple(row[name] for name in key)] = {**row, "commit": header["commit"]}
    # A run writes after every case, so its own entry in ``parts`` is replaced.
    parts = [p for p in old["parts"] if p["date"] != part["date"]] + [part]
    ordered = [merged[values] for values in sorted(merged)]
    return json.dumps({**header, "parts": parts, "rows": ordered}, indent=1) + "\n"


@cache
def run_header() -> dict[str, str]:
    """The GPU, driver, versions, commit, date and command of this run."""
    return {
        "gpu": gpu_name(),
        "driver": driver_version() or "unknown",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": os.environ.get("MOE_OPS_COMMIT") or _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
    }


def driver_version() -> str | None:
    """The version of the GPU's driver; None without a GPU."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    version = _output_of(*query)
    return None if version == "unknown" else version


def _commit() -> str:
    """The git commit of a checkout, or the version of an installed package."""
    if not (CHECKOUT / ".git").exists():
        return f"moe_ops {moe_ops.__version__}"
    return _output_of("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--exclude=*")


def _command() -> str:
    """The command line as typed in the root of the checkout."""
    program = Path(sys.argv[0])
    if program.name in ("__main__.py", CONSOLE_SCRIPT):
        typed = ["-m", "moe_ops"]
    else:
        typed = [str(Path(*program.absolute().parts[-2:]))]
    return shlex.join(["python", *typed, *sys.argv[1:]])


def _output_of(*command: str) -> str:
    """The first line that a command prints, or ``unknown``."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def default_output() -> Path | None:
    """The repository's folder of records; None without a GPU or outside of a checkout."""
    folder = CHECKOUT / "benchmarks" / "results"
    return folder if torch.cuda.is_available() and folder.is_dir() else None


def record_path(output: Path | None, name: str) -> Path | None:
    """``<output>/<gpu>/<name>``, or None without an output folder."""
    return output and output / gpu_name().lower().replace(" ", "-") / name
