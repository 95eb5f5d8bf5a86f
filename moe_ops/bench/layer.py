"""Benchmark of the whole layer, from (hidden_states, topk_weights, topk_ids) to the output.

`moe-ops bench --ranks 2` times layers whose experts are spread over GPUs, and `moe-ops bench
--resident 0.5` layers whose experts are in host memory; with --help both list their options.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

import moe_ops
from moe_ops.bench.command import (
    Recorder,
    add_names,
    add_scheme_option,
    parser,
    print_row,
    progress,
    with_schemes,
)
from moe_ops.bench.harness import (
    KEY,
    Row,
    default_device,
    floor_us,
    measure,
    record_path,
    relative_error,
    run_header,
)
from moe_ops.bench.peers import PEERS, available
from moe_ops.bench.problems import (
    Call,
    Experts,
    Inputs,
    Problem,
    make_experts,
    make_inputs,
    reference_rows,
)
from moe_ops.bench.stage_profile import ProfileRow, print_profile, profile_row
from moe_ops.inspect.costs import math_of

SAMPLED_TOKENS = 64
MAX_REL_ERR = {"bf16": 0.02, "fp8": 0.1, "fp4": 0.3}
"""Largest relative error of rows that are not quantized, and of rows in 8 and in 4 bits; a case
with a larger error is not recorded."""

WIDTHS = {
    "scheme": 15, "shape": 16, "M": 6, "routing": 8, "impl": 22, "time_us": 9, "p10_us": 9,
    "p90_us": 9, "runs": 5, "rel_err": 9, "floor_us": 9, "x floor": 8, "x peer": 8,
}  # fmt: skip


def moe_ops_layer(experts: Experts, inputs: Inputs) -> Call:
    """This library, with weights as a layer keeps them."""
    return plain_layer(experts.loaded, inputs)


def plain_layer(experts: Experts, inputs: Inputs, *, batch_invariant: bool = False) -> Call:
    """This library, with weights as they are given."""
    keywords: dict[str, Any] = {
        "activation": experts.activation,
        "quant_config": experts.quant_config,
        "batch_invariant": batch_invariant,
    }
    w1, w2 = experts.w1, experts.w2
    return lambda: moe_ops.fused_experts(
        inputs.x, w1, w2, inputs.topk_weights, inputs.topk_ids, **keywords
    )


def invariant_layer(experts: Experts, inputs: Inputs) -> Call:
    """This library in batch-invariant mode, with weights as a layer keeps them."""
    return plain_layer(experts.loaded_invariant, inputs, batch_invariant=True)


INVARIANT = "moe_ops-invariant"
"""This library in batch-invariant mode; timed only if ``--impls`` names it."""
PLAIN = "moe_ops-plain"
"""This library with weights in the plain form; likewise."""
IMPLS: ChainMap[str, Callable[[Experts, Inputs], Call]] = ChainMap(
    {
        "moe_ops": moe_ops_layer,
        INVARIANT: invariant_layer,
        PLAIN: plain_layer,
    },
    PEERS,  # type: ignore[arg-type]
)
OURS = ("moe_ops", INVARIANT, PLAIN)
"""This library's implementations, which run every scheme. (Batch-invariant mode does not run
schemes with a scale shared by all tokens.)"""


def layer_floor_us(problem: Problem, experts: Experts, inputs: Inputs) -> float | None:
    """Lower bound: active weights, tokens and outputs moved once, or products at the peak rate."""
    nbytes = inputs.num_active * experts.bytes_per_expert + 2 * inputs.x.nbytes
    slots = inputs.topk_ids.numel()
    flops = 2 * slots * (problem.w1_rows + problem.intermediate_size) * problem.hidden_size
    return floor_us(nbytes, flops, math_of(experts.scheme))


def config_of(impl: str, problem: Problem, experts: Experts, inputs: Inputs) -> dict[str, Any]:
    """Facts besides the row's key that the time depends on: active experts and tiles."""
    config: dict[str, Any] = {"active_experts": inputs.num_active}
    if impl in OURS and impl != PLAIN and inputs.x.is_cuda:
        changes = {"activation": experts.activation, "batch_invariant": impl == INVARIANT}
        layer = problem.config(inputs.x.device, **changes)
        told = moe_ops.explain(layer, experts.scheme, num_tokens=(len(inputs.x),))
        for name in ("gemm1", "gemm2"):
            config[name] = asdict(getattr(told.costs[0], name))
    return config


@dataclass(frozen=True)
class Case:
    """One (scheme, shape, M, routing), to be run with every implementation."""

    key: dict[str, Any]
    problem: Problem
    experts: Experts
    inputs: Inputs


def time_case(case: Case, impl: str) -> Row:
    """Time one implementation.

    Raises:
        ArithmeticError: its result is wrong.
    """
    experts, inputs = case.experts, case.inputs
    device = inputs.x.device
    chosen = torch.randperm(len(inputs.x), generator=torch.Generator().manual_seed(0))
    chosen = chosen[:SAMPLED_TOKENS].to(device)
    timing = measure(IMPLS[impl](experts, inputs), device)
    if IMPLS[impl] is moe_ops_layer:
        experts = experts.loaded
    elif IMPLS[impl] is invariant_layer:
        experts = experts.loaded_invariant
    error = relative_error(timing.output[chosen], reference_rows(experts, inputs, chosen))
    rows = experts.scheme.activation
    limit = MAX_REL_ERR["bf16" if rows is None else "fp4" if rows.element.bits == 4 else "fp8"]
    if not (error < limit and timing.output.isfinite().all()):
        raise ArithmeticError(f"relative error {error:.3g}, must be below {limit}")
    return Row(
        **case.key,
        impl=impl,
        **timing.times,
        rel_err=error,
        floor_us=layer_floor_us(case.problem, experts, inputs),
        config=config_of(impl, case.problem, experts, inputs),
    )


def profile_case(case: Case, impl: str) -> ProfileRow:
    """Profile one implementation's call."""
    call = IMPLS[impl](case.experts, case.inputs)
    return profile_row({**case.key, "impl": impl}, call, case.inputs.x.device)


def print_times(rows: list[Row], *, head: bool) -> None:
    """Print a line per row, with its ratios to the estimate and to the best peer of this run."""
    peers = [row.time_us for row in rows if not row.impl.startswith(OURS[0])]
    best_peer = min(peers, default=None)
    for number, row in enumerate(rows):
        ratios = {
            "x floor": row.floor_us and row.time_us / row.floor_us,
            "x peer": best_peer and row.time_us / best_peer,
        }
        print_row({**asdict(row), **ratios}, WIDTHS, head=head and number == 0)


def print_profiles(rows: list[ProfileRow], *, head: bool) -> None:
    """Print a table per row."""
    for row in rows:
        print_profile(row)


class Work(NamedTuple):
    """What to do with every case (timing or profiling), and where to record it."""

    file: str
    run: Callable[[Case, str], Any]
    show: Callable[..., None]


TIME = Work("layer.json", time_case, print_times)
PROFILE = Work("profile.json", profile_case, print_profiles)


EXAMPLES = (
    "--model tiny --tokens 1,8 --impls moe_ops",
    "--sizes 8,2,64,32 --tokens 1 --scheme fp8_channel --impls moe_ops",
    "--model tiny --tokens 2 --impls moe_ops --profile",
)


def options(arguments: Sequence[str] | None, prog: str | None) -> argparse.Namespace:
    """Parse the command line; for an unknown name exits with 2 and prints the known names."""
    command = parser(__doc__ or "", "1,8,64,512,4096,16384", prog=prog, examples=EXAMPLES)
    installed = ["moe_ops", *available()]
    add = command.add_argument
    add_scheme_option(command)
    text = f"among {', '.join(IMPLS)} (default: those that are installed)"
    add_names(command, "--impls", "implementation", IMPLS, ",".join(installed), text)
    add("--json", action="store_true", help="the record on stdout, the table on stderr")
    add("--profile", action="store_true", help="profile the stages of one call instead of timing")
    args = with_schemes(command.parse_args(arguments))
    for impl in args.impls:
        if impl not in (*OURS, *installed):
            command.error(f"--impls {impl} needs {PEERS[impl].missing()}")
    return args


@torch.no_grad()
def run_cases(args: argparse.Namespace, work: Work) -> tuple[list[Any], int]:
    """Run every requested case within the time budget; returns the rows and the exit status."""
    device, skipped = default_device(), 0
    path = record_path(args.output, work.file)
    recorder = Recorder(path, KEY, work.show, args.time_budget_s)
    for scheme, problem in product(args.schemes, args.problems):
        experts = case = None  # frees the weights before the next ones are made
        for routing, tokens in product(args.routing, args.tokens):
            if recorder.out_of_time():
                skipped += 1
                continue
            if experts is None:
                progress(f"making the weights of {problem.name} in {scheme}")
                try:
                    experts = make_experts(problem, scheme, device)
                except (MemoryError, RuntimeError) as error:  # there is no room for the weights
                    reason = str(error).partition("\n")[0]
                    recorder.failed.append(f"{scheme} {problem.name}: {reason}")
                    break
            key = {"scheme": scheme, "shape": problem.name, "M": tokens, "routing": routing}
            case = Case(key, problem, experts, make_inputs(problem, tokens, routing, device))
            rows = []
            for impl in args.impls:
                if impl in PEERS and not PEERS[impl].takes(scheme, problem, tokens):
                    continue
                progress(f"{impl} with {tokens} tokens, {routing} routing")
                with recorder.attempt(" ".join(map(str, (impl, *key.values())))):
                    rows.append(work.run(case, impl))
            recorder.add(rows)
    return recorder.rows, recorder.conclude(f"; {skipped} cases skipped for lack of time")


def main(arguments: Sequence[str] | None = None, prog: str | None = None, work: Work = TIME) -> int:
    """Run the benchmark and return the exit status: 1 after a failure.

    Args:
        arguments: command-line arguments; None: ``sys.argv[1:]``.
        prog: name of the command in its help.
        work: what ``--profile`` replaces by `PROFILE`.
    """
    args = options(arguments, prog)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        rows, status = run_cases(args, PROFILE if args.profile else work)
    if args.json:
        print(json.dumps({**run_header(), "rows": [asdict(row) for row in rows]}, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
