"""Time whole transformers models on the CPU: this library's experts beside `grouped_mm`.

python benchmarks/bench_cpu.py                              # prints a table
python benchmarks/bench_cpu.py --output benchmarks/results  # and writes cpu.json

Two models of one architecture share their random weights, and differ in what runs the experts.
They take turns in one process, a step each, and change who comes first from round to round, so
that what else the machine does slows both. `ratio` is the median over rounds of one step's time
over the other's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
import whole_models
from torch import Tensor
from whole_models import IMPLS, OURS, SDPA, Spec

from moe_ops.bench import command, harness
from moe_ops.bench.command import checked, count, named_choice, one_or_more

SIZES = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True,
}  # fmt: skip
SPEC = Spec(transformers.Qwen3MoeConfig, SIZES, SDPA)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("eager", "compiled")
STEPS = {"decode": 1, "prefill-128": 128, "prefill-512": 512}
"""Tokens of each step."""
CONTEXT = 64
"""Cached tokens of a decode step."""
WARM_UPS = 5
KEY = ("step", "dtype", "mode", "threads")
WIDTHS = {"step": 12, "dtype": 6, "mode": 9, "ours_us": 9, "theirs_us": 10, "ratio": 7,
          "p25": 7, "p75": 7, "rel_err": 9, "rounds": 7}  # fmt: skip


@dataclass(frozen=True)
class CpuRow:
    """One step of both models; the first four fields are its key."""

    step: str
    dtype: str
    mode: str
    threads: int
    ours_us: float
    theirs_us: float
    """Medians of the times of a step."""
    ratio: float
    """The median over rounds of our time over theirs."""
    p25: float
    p75: float
    """Quartiles of these ratios."""
    ours_min_us: float
    theirs_min_us: float
    rel_err: float
    """The distance of both models' logits over the norm of theirs."""
    rounds: int
    layers: int
    cpu: str
    """The instructions that PyTorch uses."""


def models(dtype: torch.dtype, layers: int | None) -> tuple[Any, Any]:
    """Our model and theirs, with the same weights."""
    ours, theirs = (whole_models.shell(SPEC, layers, dtype, "bf16") for _ in range(2))
    whole_models.filled(ours, torch.device("cpu"))
    whole_models.filled(theirs, torch.device("cpu"))  # buffers that no state dict has
    theirs.load_state_dict(ours.state_dict(), assign=True)
    for model, impl in ((ours, OURS), (theirs, IMPLS["hf-grouped_mm"])):
        whole_models.prepare(model, impl, "bf16", SPEC.stored)
    return ours, theirs


def ready(model: Any, step: str, mode: str) -> Callable[[], Tensor]:
    """A step of a model, which has run, and is compiled if ``mode`` says so."""
    tokens = STEPS[step]
    decodes = step == "decode"
    made = (
        whole_models.decode(model, 1, CONTEXT) if decodes else whole_models.prefill(model, tokens)
    )
    call = torch.compile(made.call, dynamic=False) if mode == "compiled" else made.call
    for _ in range(WARM_UPS):
        call()
    return call


def alternate(
    ours: Callable[[], Any], theirs: Callable[[], Any], budget_s: float, least: int
) -> list[tuple[float, float]]:
    """Microseconds of both in each round.

    Args:
        ours: the first step.
        theirs: the second one.
        budget_s: seconds for all rounds.
        least: rounds at least.
    """
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + budget_s
    while len(times) < least or time.perf_counter() < end:
        both = [0.0, 0.0]
        for which in (0, 1) if len(times) % 2 else (1, 0):
            start = time.perf_counter()
            (ours, theirs)[which]()
            both[which] = 1e6 * (time.perf_counter() - start)
        times.append((both[0], both[1]))
    return times


def measured(
    both: tuple[Any, Any], case: tuple[str, str, str], budget_s: float, least: int
) -> CpuRow:
    """The row of a case: a step, a dtype and a mode."""
    step, dtype, mode = case
    torch.compiler.reset()
    ours, theirs = (ready(model, step, mode) for model in both)
    rel_err = harness.relative_error(ours(), theirs().float())
    times = alternate(ours, theirs, budget_s, least)
    low, ratio, high = statistics.quantiles([a / b for a, b in times], n=4, method="inclusive")
    first, second = zip(*times, strict=True)
    return CpuRow(
        step=step,
        dtype=dtype,
        mode=mode,
        threads=torch.get_num_threads(),
        ours_us=statistics.median(first),
        theirs_us=statistics.median(second),
        ratio=ratio,
        p25=low,
        p75=high,
        ours_min_us=min(first),
        theirs_min_us=min(second),
        rel_err=rel_err,
        rounds=len(times),
        layers=both[0].config.num_hidden_layers,
        cpu=torch.backends.cpu.get_cpu_capability(),
    )


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command.Parser(None, __doc__ or "")
    add, text = parser.add_argument, "(default: %(default)s)"
    lists = {"steps": STEPS, "dtypes": DTYPES, "modes": MODES}
    for dest, names in lists.items():
        read, default = one_or_more(named_choice(dest[:-1], names)), ",".join(names)
        add(f"--{dest[:-1]}", dest=dest, type=read, default=default, metavar="..,", help=text)
    add("--layers", type=checked(count), help="build fewer layers; nothing is scaled up")
    add("--rounds", type=checked(count), default=30, help=f"rounds at least {text}")
    add(
        "--seconds",
        type=checked(partial(command.finite_number, zero=True)),
        default=8.0,
        help=f"time of the rounds of a case {text}",
    )
    add("--output", type=Path, help="folder of the record, cpu.json")
    return parser.parse_args(arguments)


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases."""
    args = options(arguments)
    path = args.output and args.output / "cpu.json"
    recorder = command.Recorder(path, KEY, command.Lines(WIDTHS))
    for dtype in args.dtypes:
        both = models(DTYPES[dtype], args.layers)
        for mode, step in product(args.modes, args.steps):
            recorder.add([measured(both, (step, dtype, mode), args.seconds, args.rounds)])
    return recorder.conclude()


if __name__ == "__main__":
    sys.exit(main())
