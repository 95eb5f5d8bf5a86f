"""The command line: ``python -m moe_ops <command>``.

Benchmarks and the demo are part of the repository, not of the installed package: their commands run
the scripts that lie beside the package in a checkout, and say so where there is none.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
PROGRAM = "python -m moe_ops"
USAGE_ERROR = 2
"""The exit status after a command line that cannot be run as it is, as argparse has it."""


def _script(path: str) -> Path:
    """A script of the checkout.

    Raises:
        SystemExit: the package is installed without the repository.
    """
    script = CHECKOUT / path
    if not script.is_file():
        print(
            f"{PROGRAM}: this command needs {path} of the moe_ops repository, which is not beside "
            "the installed package; run it in a checkout",
            file=sys.stderr,
        )
        raise SystemExit(USAGE_ERROR)
    return script


def _bench(arguments: Sequence[str]) -> int:
    folder = str(_script("benchmarks/bench_layer.py").parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # its modules import each other by their plain names
    return import_module("bench_layer").main(arguments, prog=f"{PROGRAM} bench")


def _demo(arguments: Sequence[str]) -> int:
    script = str(_script("examples/demo.py"))
    if find_spec("transformers") is None:
        print(f"{PROGRAM} demo needs transformers: moe_ops[transformers]", file=sys.stderr)
        return USAGE_ERROR
    before, sys.argv = sys.argv, [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")  # leaves through SystemExit
    finally:
        sys.argv = before
    return 0


class Command(NamedTuple):
    """What a command does, in words and in fact."""

    help: str
    run: Callable[[Sequence[str]], int]
    """Takes the arguments after the command's name, returns the exit status."""


COMMANDS = {
    "bench": Command("time or profile whole layers, next to other implementations", _bench),
    "demo": Command("read and write text with a small MoE language model", _demo),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: those of the process by default.

    Raises:
        SystemExit: help was asked for (0), or the command line names something unknown (2).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog=PROGRAM, epilog=f"{PROGRAM} <command> --help says what a command takes."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="<command>")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    chosen = parser.parse_args(arguments[:1]).command
    return COMMANDS[chosen].run(arguments[1:])
