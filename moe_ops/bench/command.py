"""The command line and the printed table that all benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_ops.bench.harness import CONSOLE_SCRIPT, default_output
from moe_ops.bench.model_config import read_config
from moe_ops.bench.problems import (
    ROUTINGS,
    UNTUNED,
    Problem,
    find_problem,
    find_problems,
    load_problems,
    problem_of_sizes,
    unknown,
)
from moe_ops.scheme import SCHEMES

Value = TypeVar("Value")


def device_name() -> str:
    """The name of this machine's device for ``--device``, such as ``sm_90``; or ``cpu``."""
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def parser(
    description: str,
    tokens: str,
    *,
    cpu_tokens: str = "1,8",
    models: str | None = None,
    prog: str | None = None,
) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share.

    Args:
        description: what the command does.
        tokens: default numbers of tokens on a GPU.
        cpu_tokens: those without a GPU, where the default problem is tiny.
        models: default problems on a GPU; None: all that ``shapes.json`` marks as timed.
        prog: name of the command in its help.
    """
    cuda = torch.cuda.is_available()
    timed = models or ",".join(p.name for p in load_problems().values() if p.timed)
    result = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    add = result.add_argument
    layers = result.add_mutually_exclusive_group()
    layers.add_argument(
        *("--model", "--shapes"),
        dest="problems",
        type=_problems,
        default=timed if cuda else "tiny",
        metavar="NAME,..",
        help=f"names of models or of their shapes, or {UNTUNED} (default: %(default)s)",
    )
    for option, (read, metavar, text) in OTHER_LAYERS.items():
        more: dict[str, Any] = {"dest": "problems", "default": argparse.SUPPRESS}
        layers.add_argument(option, type=_only(read), metavar=metavar, help=text, **more)
    add(
        "--tokens",
        type=one_or_more(_count),
        default=tokens if cuda else cpu_tokens,
        metavar="M,..",
        help="(default: %(default)s)",
    )
    add(
        "--routing",
        type=one_or_more(_routing),
        default="uniform",
        metavar="NAME,..",
        help=f"among {', '.join(ROUTINGS)} (default: %(default)s)",
    )
    add(
        "--device",
        choices=[device_name()],
        help="the device meant: anything but what this machine has is an error",
    )
    add(
        "--output",
        type=Path,
        default=default_output(),
        help="folder of the records (default: benchmarks/results in a checkout with a GPU)",
    )
    add(
        "--time-budget-s",
        type=float,
        default=float("inf"),
        metavar="S",
        help="start no case after this long",
    )
    return result


OTHER_LAYERS: dict[str, tuple[Callable[[str], Problem], str, str]] = {
    "--config": (read_config, "PATH", "config.json of a transformers MoE model, or its folder"),
    "--sizes": (problem_of_sizes, "E,k,H,I", "experts, experts of a token, hidden, intermediate"),
}
"""Options that describe one layer without a known name: reader, metavar and help."""


def _problems(text: str) -> list[Problem]:
    """The problems of comma-separated names, each once."""
    found = one_or_more(find_problems)(text)
    return list(dict.fromkeys(problem for problems in found for problem in problems))


def _only(read: Callable[[str], Problem]) -> Callable[[str], list[Problem]]:
    """A reader of a list of one problem, which may have commas in it."""
    return readable(lambda text: [read(text)])


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, ``--config`` and ``--sizes``, one of which sets ``model`` to a `Problem`."""
    group = parser.add_mutually_exclusive_group(required=True)
    text = "the name of a model, or of a shape that models share"
    group.add_argument("--model", type=readable(find_problem), metavar="NAME", help=text)
    for option, (read, metavar, text) in OTHER_LAYERS.items():
        more: dict[str, Any] = {"dest": "model", "default": argparse.SUPPRESS}
        group.add_argument(option, type=readable(read), metavar=metavar, help=text, **more)


def add_scheme_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--scheme``, one or more names; `with_schemes` fills in the default."""
    names = {"bf16": "bf16", **{name: name for name in SCHEMES}, "unquantized": "bf16"}
    parser.add_argument(
        *("--scheme", "--schemes"),
        dest="schemes",
        type=one_or_more(one_of("scheme", names)),
        metavar="NAME,..",
        help="bf16 (unquantized) or names in moe_ops.SCHEMES (default: that of --config, or bf16)",
    )


def with_schemes(chosen: argparse.Namespace) -> argparse.Namespace:
    """The options with the default schemes: what the model's ``config.json`` says, or bf16."""
    if chosen.schemes is None:
        chosen.schemes = [chosen.problems[0].scheme or "bf16"]
    return chosen


def progress(text: str) -> None:
    """Say on stderr what is done next, before a step that may take seconds."""
    print(f"{CONSOLE_SCRIPT}: {text}", file=sys.stderr, flush=True)


def readable(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """Wrap ``read`` so that argparse prints the text of its ValueError."""

    def checked(text: str) -> Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def one_or_more(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """A reader of comma-separated lists, whose errors name the value and the known values."""

    def read_all(text: str) -> list[Value]:
        values = [readable(read)(part.strip()) for part in text.split(",") if part.strip()]
        if not values:
            raise argparse.ArgumentTypeError("nothing given")
        return list(dict.fromkeys(values))

    return read_all


def one_of(what: str, known: dict[str, Value]) -> Callable[[str], Value]:
    """A reader of one of the names in ``known``."""

    def read(text: str) -> Value:
        if text not in known:
            raise ValueError(unknown(what, text, known))
        return known[text]

    return read


_routing = one_of("routing", {name: name for name in ROUTINGS})


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"a number of tokens must be a positive integer; got {text!r}")
    return int(text)


def print_row(cells: dict[str, Any], widths: dict[str, int], *, head: bool = False) -> None:
    """Print one aligned line, with ``head`` the column names above it."""
    if head:
        print("  ".join(f"{name:>{width}}" for name, width in widths.items()))
    texts = {name: _text(cells.get(name)) for name in widths}
    print("  ".join(f"{texts[name]:>{width}}" for name, width in widths.items()), flush=True)


def conclude(count: int, path: Path | None, failed: Sequence[str], more: str = "") -> int:
    """Print how many rows were recorded and what failed; returns the status of the command."""
    print(f"\n{count} rows{f' in {path}' if path else ''}{more}")
    if failed:
        print("failed: " + "; ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
