"""Measure the costs of a layer besides GPU time: host time, memory and cold starts."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cold_start import MODULES
from peers import PEERS

import moe_ops
from moe_ops.bench.command import (
    RECORDED,
    Lines,
    Recorder,
    add_names,
    named_choice,
    one_or_more,
    parser,
    recorded_name,
)
from moe_ops.bench.harness import KEY, default_device, peak_bytes, record_path, wall_times
from moe_ops.bench.layer import IMPLS, OURS, moe_ops_layer
from moe_ops.bench.peers import available
from moe_ops.bench.problems import Call, Experts, Inputs, Problem, make_experts, make_inputs

MODELS = "qwen3-30b,deepseek-v2-lite"
OVERHEAD_KEY = (*KEY, "measure")
CALLS, BATCHES = 16, 50
"""Calls per batch, and batches. A batch is enqueued without waiting, and is small enough that
CUDA's queue of 1024 launches never fills up."""
COLD_TIMEOUT_S = 300
WIDTHS = {
    "scheme": 15, "shape": 16, "M": 6, "routing": 8, "impl": 22, "measure": 12, "value": 11,
    "p10": 9, "p90": 9, "runs": 5,
}  # fmt: skip


def compiled(experts: Experts, inputs: Inputs) -> Call:
    """This library under torch.compile, compiled for these sizes, as the peer is."""
    torch.compiler.reset()
    return torch.compile(moe_ops_layer(experts, inputs), dynamic=False)


MAKERS: dict[str, Callable[[Experts, Inputs], Call]] = {**IMPLS, "moe_ops-compiled": compiled}


@dataclass(frozen=True)
class Overhead:
    """One measured number; all but the last five fields are its key in the record."""

    scheme: str
    shape: str
    M: int
    impl: str
    routing: str
    measure: str
    """``host_us``, ``peak_bytes``, ``import_s``, ``first_call_s`` or ``compile_s``."""
    value: float
    p10: float | None = None
    p90: float | None = None
    runs: int = 1
    config: dict[str, Any] = field(default_factory=dict)


class Case(NamedTuple):
    """One layer with its tokens, to be measured with every implementation."""

    problem: Problem
    experts: Experts
    inputs: Inputs
    routing: str

    def row(self, impl: str, measure: str, value: float, **rest: Any) -> Overhead:
        """The record row of a number measured for an implementation."""
        scheme, tokens = recorded_name(self.experts.scheme), len(self.inputs.x)
        return Overhead(
            scheme, self.problem.name, tokens, impl, self.routing, measure, value, **rest
        )


def host_time(case: Case, impl: str, call: Call) -> Overhead:
    """Microseconds until a call returns to the host, without waiting for its kernels."""
    times = []
    for _ in range(BATCHES):
        _synchronize(case)
        times += wall_times(call, CALLS)
    _synchronize(case)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    spread = {"p10": deciles[0], "p90": deciles[-1], "runs": len(times)}
    return case.row(impl, "host_us", statistics.median(times), **spread)


def peak_memory(case: Case, impl: str, call: Call) -> Overhead:
    """`peak_bytes` of a call, with its output, and what `moe_ops.workspace_nbytes` says of it.

    Memory that the first calls keep (cuBLAS's workspace, for example) is not counted.
    """
    device, problem = case.inputs.x.device, case.problem
    told = {}
    if impl == "moe_ops":
        told["workspace_nbytes"] = moe_ops.workspace_nbytes(
            len(case.inputs.x),
            problem.hidden_size,
            problem.intermediate_size,
            problem.num_experts,
            problem.top_k,
            case.inputs.x.dtype,
            scheme=case.experts.scheme.name,
            device="cpu" if device.type == "cpu" else None,
        )
    return case.row(impl, "peak_bytes", peak_bytes(call, device), config=told)


def warm_rows(case: Case, impl: str) -> Iterator[Overhead]:
    """Measure a layer that has run before."""
    call = MAKERS[impl](case.experts, case.inputs)
    for _ in range(3):
        call()
    yield peak_memory(case, impl, call)
    yield host_time(case, impl, call)


def cold_rows(case: Case, impl: str) -> Iterator[Overhead]:
    """Measure a process that starts with empty Triton and Inductor caches.

    Raises:
        CalledProcessError: the process failed; its error has been printed.
        TimeoutExpired: the process took longer than `COLD_TIMEOUT_S`.
    """
    script = Path(__file__).with_name("cold_start.py")
    tokens = len(case.inputs.x)
    what = ("--impl", impl, "--model", case.problem.name, "--tokens", tokens)
    command = [sys.executable, script, *what, "--routing", case.routing]
    paths = [str(Path(moe_ops.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        done = subprocess.run(
            list(map(str, command)),
            env={**os.environ, **environment},
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=COLD_TIMEOUT_S,
        )
    for measure, value in json.loads(done.stdout.splitlines()[-1]).items():
        yield case.row(impl, measure, value)


def _synchronize(case: Case) -> None:
    if case.inputs.x.is_cuda:
        torch.cuda.synchronize(case.inputs.x.device)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    command = parser(__doc__ or "", tokens="1,64,4096")
    if torch.cuda.is_available():
        command.set_defaults(problems=MODELS)
    usable = [*OURS, "moe_ops-compiled", *available()]
    command.add_argument(
        *("--scheme", "--schemes"),
        dest="schemes",
        type=one_or_more(named_choice("scheme", RECORDED)),
        default="bf16",
        metavar="NAME,..",
        help="bf16 or names in moe_ops.SCHEMES, which are measured warm (default: %(default)s)",
    )
    default = ",".join(("moe_ops", "moe_ops-compiled", *available()))
    text = (
        f"among {', '.join(usable)} (of {', '.join(PEERS)} those that can run here; "
        "default: %(default)s)"
    )
    add_names(command, "--impls", "implementation", usable, default, text)
    text = (
        "warm: host time and peak memory; cold: import, first call and torch.compile in "
        "processes of their own, at the first of --tokens (default: %(default)s)"
    )
    add_names(command, "--measures", "measure", ("warm", "cold"), "warm,cold", text)
    return command.parse_args(arguments)


def planned(args: argparse.Namespace) -> Iterator[tuple[Case, str, Callable[..., Any]]]:
    """The measurements in order: pairs of a case and an implementation."""
    device = default_device()
    for scheme, problem in product(args.schemes, args.problems):
        experts, dense = make_experts(problem, scheme, device), scheme == "bf16"
        for number, (routing, tokens) in enumerate(product(args.routing, args.tokens)):
            impls = [
                impl
                for impl in args.impls
                if impl not in PEERS or PEERS[impl].takes(scheme, problem, tokens)
            ]
            inputs = make_inputs(problem, tokens, routing, device)
            case = Case(problem, experts, inputs, routing)
            if "warm" in args.measures:
                yield from ((case, impl, warm_rows) for impl in impls)
            if "cold" in args.measures and number == 0 and dense:
                yield from ((case, impl, cold_rows) for impl in impls if impl in MODULES)


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run all requested measurements within the time budget; returns 1 after a failure."""
    args, skipped = options(arguments), 0
    path = record_path(args.output, "overheads.json")
    recorder = Recorder(path, OVERHEAD_KEY, Lines(WIDTHS), args.time_budget_s)
    for case, impl, measure in planned(args):
        if recorder.out_of_time():
            skipped += 1
            continue
        name = f"{impl} {case.problem.name} {len(case.inputs.x)} {measure.__name__}"
        with recorder.attempt(name):
            recorder.add(list(measure(case, impl)))
    return recorder.conclude(f"; {skipped} cases skipped for lack of time")


if __name__ == "__main__":
    sys.exit(main())
