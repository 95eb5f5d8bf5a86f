"""Run small problems through every kernel, for compute-sanitizer, and list the kernels that ran.

    python tests/support/sanitize.py [--list] [--part 1/2] [--lines FILE] [NAME ...]

Prints a line per case: its name, ``ok`` or what is wrong, milliseconds, kernels. Exits with 1 if a
value is wrong or if, after all cases, a kernel for the GPU never ran. `make sanitize` runs this
under the sanitizer's tools. On the CPU operators are their references, which launch no kernel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from operator_cases import Case, copied
from sanitize_cases import cases

from moe_ops.dispatch.blackwell import BLOCK_SCALED

SPECIALIZED = {
    "hopper_gemm_kernel", "hopper_stream_kernel", "hopper_token_kernel", "hopper_token_sum_kernel",
    "hopper_decode_few_kernel", "hopper_decode_many_kernel", "hopper_wgrad_kernel",
}  # fmt: skip
"""Warp-specialised kernels, whose warps pass shared memory to each other with mbarriers."""
HOPPER = SPECIALIZED | {
    "_pack_kernel", "_quantize_pack_kernel", "hopper_decode_slot_kernel",
    "hopper_decode_sum_kernel", "_expert_spans_kernel",
}  # fmt: skip
BLACKWELL = {"block_scaled_gemm_kernel"}


class Outcome(NamedTuple):
    """The outcome of a case."""

    case: str
    wrong: str | None
    seconds: float
    kernels: list[str]


def part_of(text: str) -> tuple[int, int]:
    """Parse a part ``i/n`` with 1 <= i <= n."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"a part must be i/n with 1 <= i <= n, got {text}")
    return int(number), int(count)


def kernels_of(arch: int) -> set[str]:
    """The kernels of the library that a GPU of an architecture (90: Hopper) runs."""
    import moe_ops.kernels as package

    names = set()
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        names |= {n for n, v in vars(module).items() if n.endswith("_kernel") and hasattr(v, "fn")}
    served = (HOPPER if arch == 90 else set()) | (BLACKWELL if arch in BLOCK_SCALED else set())
    return names - (HOPPER | BLACKWELL) | served


@contextmanager
def launches() -> Iterator[set[str]]:
    """The names of the kernels launched in this context, through Triton or through `Launch`."""
    names: set[str] = set()
    try:
        from triton.runtime.jit import JITFunction

        from moe_ops.kernels._runtime.launch import Launch
    except ImportError:
        yield names
        return
    launch, run = Launch.__call__, JITFunction.run

    def launched(self: Any, *arguments: Any) -> None:
        names.add(self.kernel.__name__)
        launch(self, *arguments)

    def ran(self: Any, *arguments: Any, **options: Any) -> Any:
        names.add(self.__name__)
        return run(self, *arguments, **options)

    with (
        mock.patch.object(Launch, "__call__", launched),
        mock.patch.object(JITFunction, "run", ran),
    ):
        yield names


def run_case(case: Case, device: str) -> Outcome:
    """Run and check a case; an exception is reported as what is wrong."""
    started, wrong = time.perf_counter(), None
    with launches() as names:
        try:
            inputs = case.inputs()
            result = copied(case.run(copied(inputs, device)), "cpu")
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
    if wrong is None:
        try:
            case.check(inputs, result)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
    return Outcome(case.name, wrong, time.perf_counter() - started, sorted(names))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="run cases whose names contain one of these")
    parser.add_argument("--part", type=part_of, default=(1, 1), help="i/n: every n-th case")
    parser.add_argument("--list", action="store_true", help="only print the names")
    parser.add_argument(
        "--lines", type=Path, help="append outcomes to this file, JSON line by line"
    )
    parser.add_argument("--raw", action="store_true", help="do not fill fresh memory with NaN")
    return parser.parse_args()


def chosen(names: Sequence[str], part: tuple[int, int]) -> list[Case]:
    """Every n-th of the cases; with ``names`` only cases whose names contain one of them."""
    number, count = part
    wanted = [c for c in cases() if not names or any(n in c.name for n in names)]
    return wanted[number - 1 :: count]


def report(outcome: Outcome, lines: Path | None) -> None:
    """Print a line, and write one for the record."""
    say = partial(print, flush=True)  # in order with the sanitizer's output
    first = "ok" if outcome.wrong is None else f"WRONG: {outcome.wrong.splitlines()[0]}"
    say(f"{outcome.case}: {first} ({1e3 * outcome.seconds:.0f} ms) {' '.join(outcome.kernels)}")
    if lines is not None:
        with lines.open("a") as file:
            file.write(json.dumps(outcome._asdict()) + "\n")


def main() -> int:
    """Run the requested cases; returns 1 if something is wrong."""
    args = arguments()
    torch.utils.deterministic.fill_uninitialized_memory = not args.raw
    wanted = chosen(args.names, args.part)
    if args.list:
        print(*(case.name for case in wanted), sep="\n")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    outcomes = []
    for case in wanted:
        outcomes.append(run_case(case, device))
        report(outcomes[-1], args.lines)
    wrong = [o.case for o in outcomes if o.wrong is not None]
    never: set[str] = set()
    if device == "cuda" and not args.names and args.part == (1, 1):
        major, minor = torch.cuda.get_device_capability()
        never = kernels_of(10 * major + minor) - {k for o in outcomes for k in o.kernels}
    for title, names in (("wrong", wrong), ("never ran", sorted(never))):
        print(f"{title}: {' '.join(names) or 'none'}")
    return int(bool(wrong or never))


if __name__ == "__main__":
    sys.exit(main())
