"""Time the whole layer, from (hidden_states, topk_weights, topk_ids) to the output."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import (
    Row,
    Timing,
    default_device,
    floor_us,
    measure,
    names,
    parser,
    print_row,
    record_path,
    relative_error,
    write_rows,
)
from peers import PEERS, Call, available
from problems import (
    Experts,
    Inputs,
    Problem,
    load_problems,
    make_experts,
    make_inputs,
    pick,
    reference_rows,
)

import moe_ops
from moe_ops import tiles

SAMPLED_TOKENS = 64
MAX_REL_ERR = {"bf16": 0.02, "fp8": 0.1}
"""By the dtype of the products. A result further off is wrong, and its time is not recorded."""

WIDTHS = {
    "scheme": 15, "shape": 16, "M": 6, "routing": 8, "impl": 22, "time_us": 9, "p10_us": 9,
    "p90_us": 9, "runs": 5, "rel_err": 9, "floor_us": 9, "x floor": 8, "x peer": 8,
}  # fmt: skip


def moe_ops_layer(experts: Experts, inputs: Inputs) -> Call:
    """This library."""
    arguments = (inputs.x, experts.w1, experts.w2, inputs.topk_weights, inputs.topk_ids)
    return lambda: moe_ops.fused_experts(*arguments, quant_config=experts.quant_config)


IMPLS: dict[str, Callable[[Experts, Inputs], Call]] = {
    "moe_ops": moe_ops_layer,
    **{name: make for name, (_, make) in PEERS.items()},
}


def math_of(experts: Experts) -> str:
    """The dtype of the products, as `harness.HARDWARE` names it; int8 is as fast on paper."""
    activation = experts.scheme.activation
    return "bf16" if activation is None else "fp8"


def layer_floor_us(problem: Problem, experts: Experts, inputs: Inputs) -> float | None:
    """Active weights, tokens and outputs moved once, or the products done at the peak rate."""
    nbytes = inputs.num_active * experts.bytes_per_expert + 2 * inputs.x.nbytes
    slots = inputs.topk_ids.numel()
    flops = 2 * slots * 3 * problem.hidden_size * problem.intermediate_size
    return floor_us(nbytes, flops, math_of(experts))


def config_of(impl: str, problem: Problem, experts: Experts, inputs: Inputs) -> dict[str, Any]:
    """What the time depends on besides the row's key."""
    config: dict[str, Any] = {"active_experts": inputs.num_active}
    if impl == "moe_ops" and inputs.x.is_cuda:
        h, i, itemsize = problem.hidden_size, problem.intermediate_size, experts.w1.itemsize
        facts, rows = tiles.device_facts(inputs.x.device), inputs.topk_ids.numel()
        for name, n, k, halves in (("gemm1", i, h, 2), ("gemm2", h, i, 1)):
            gemm = tiles.Gemm(rows, problem.num_experts, n, k, itemsize, halves, tiles.ROW_TILES)
            config[name] = asdict(tiles.gemm_tiles(gemm, facts))
    return config


def bench_case(
    impls: list[str], key: dict[str, Any], problem: Problem, experts: Experts, inputs: Inputs
) -> tuple[list[Row], list[str]]:
    """The rows of one (scheme, shape, M, routing), and the implementations that failed."""
    device = inputs.x.device
    chosen = torch.randperm(len(inputs.x), generator=torch.Generator().manual_seed(0))
    chosen = chosen[:SAMPLED_TOKENS].to(device)
    reference = reference_rows(experts, inputs, chosen)
    limit = MAX_REL_ERR[math_of(experts)]
    floor = layer_floor_us(problem, experts, inputs)
    rows, failed = [], []
    for impl in impls:
        try:
            timing = measure(IMPLS[impl](experts, inputs), device)
            error = relative_error(timing.output[chosen], reference)
            if not (error < limit and timing.output.isfinite().all()):
                raise ArithmeticError(f"relative error {error:.3g}, must be below {limit}")
        except Exception:  # one implementation's failure must not cost the others their rows
            traceback.print_exc()
            failed.append(" ".join(map(str, (impl, *key.values()))))
            continue
        config = config_of(impl, problem, experts, inputs)
        rows.append(
            Row(**key, impl=impl, **_times(timing), rel_err=error, floor_us=floor, config=config)
        )
    return rows, failed


def _times(timing: Timing) -> dict[str, Any]:
    return {name: value for name, value in timing._asdict().items() if name != "output"}


def print_case(rows: list[Row], *, head: bool) -> None:
    """One line a row, with its ratios to the floor and to the best peer of this run."""
    best_peer = min((row.time_us for row in rows if row.impl != "moe_ops"), default=None)
    for number, row in enumerate(rows):
        ratios = {
            "x floor": row.floor_us and row.time_us / row.floor_us,
            "x peer": best_peer and row.time_us / best_peer,
        }
        print_row({**asdict(row), **ratios}, WIDTHS, head=head and number == 0)


def options() -> argparse.Namespace:
    """The command line."""
    command = parser(__doc__ or "", tokens="1,8,64,512,4096,16384")
    default = ["moe_ops", *available()]
    command.add_argument("--schemes", type=names, default=["bf16"], help="default: bf16")
    command.add_argument("--impls", type=names, default=default, help=f"among {', '.join(IMPLS)}")
    args = command.parse_args()
    unknown = set(args.schemes) - {"bf16", *moe_ops.SCHEMES}
    if unknown:
        command.error(f"--schemes must be bf16 or in moe_ops.SCHEMES; got {', '.join(unknown)}")
    for impl in args.impls:
        if impl not in IMPLS:
            command.error(f"--impls must be among {', '.join(IMPLS)}; got {impl}")
        if impl not in ("moe_ops", *available()):
            command.error(f"--impls {impl} needs the package {PEERS[impl][0]}")
    return args


def main() -> None:
    """Run every case asked for, within the time budget."""
    args = options()
    device, started = default_device(), time.monotonic()
    path = record_path(args.output, "layer.json")
    done: list[Row] = []
    failed: list[str] = []
    skipped = 0
    for scheme in args.schemes:
        impls = [impl for impl in args.impls if impl == "moe_ops" or scheme == "bf16"]
        for problem in pick(load_problems(), args.shapes):
            experts = None
            for routing, tokens in product(args.routing, args.tokens):
                if time.monotonic() - started > args.time_budget_s:
                    skipped += 1
                    continue
                if experts is None:
                    experts = make_experts(problem, scheme, device)
                key = {"scheme": scheme, "shape": problem.name, "M": tokens, "routing": routing}
                inputs = make_inputs(problem, tokens, routing, device)
                rows, errors = bench_case(impls, key, problem, experts, inputs)
                print_case(rows, head=not done)
                done += rows
                failed += errors
                if path and rows:
                    write_rows(path, rows)
    finish(path, len(done), skipped, failed)


def finish(path: Path | None, done: int, skipped: int, failed: list[str]) -> None:
    """Say what came of it; exit status 1 after a failure."""
    print(f"{done} rows{f' in {path}' if path else ''}; {skipped} cases skipped for lack of time")
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    with torch.no_grad():
        main()
