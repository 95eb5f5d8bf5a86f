"""The command line and the printed table that all commands and benchmarks share."""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_ops import checks
from moe_ops.bench.harness import CONSOLE_SCRIPT, default_output, write_rows
from moe_ops.bench.model_config import read_config
from moe_ops.bench.problems import (
    ROUTINGS,
    UNTUNED,
    Problem,
    find_problem,
    find_problems,
    load_problems,
    problem_of_sizes,
    read_scheme,
    unknown,
)
from moe_ops.brief import aligned
from moe_ops.inspect.devices import GPUS, TARGETS, TargetDevice, target_named, target_of
from moe_ops.scheme import SCHEMES, UNQUANTIZED, Scheme
from moe_ops.tuning.files import check_writable

Value = TypeVar("Value")
OTHER_LAYERS: dict[str, tuple[Callable[[str], Problem], str, str]] = {
    "--config": (read_config, "PATH", "config.json of a transformers MoE model, or its folder"),
    "--sizes": (problem_of_sizes, "E,k,H,I", "experts, experts of a token, hidden, intermediate"),
}
"""Options that describe one layer without a known name: reader, metavar and help."""
SCHEME_NAMES = ", ".join(SCHEMES)
RECORDED = ("bf16", *(name for name in SCHEMES if name != UNQUANTIZED.name))
"""The schemes by their names in the benchmark records."""


class Parser(argparse.ArgumentParser):
    """The parser of a command: options in full, a short usage, and examples at the end of its help.

    Args:
        prog: name of the command; None: that of the script.
        description: what the command does.
        examples: arguments of calls, each of which runs on any machine.
    """

    def __init__(
        self, prog: str | None, description: str, examples: Sequence[str] = (), **more: Any
    ) -> None:
        form = argparse.RawDescriptionHelpFormatter
        fixed: dict[str, Any] = {"formatter_class": form, "allow_abbrev": False}
        super().__init__(prog, "%(prog)s [options]", description, **fixed, **more)
        lines = [f"  {self.prog} {example}".rstrip() for example in examples]
        self.epilog = "\n".join(["examples:", *lines]) if lines else None


def add_layer_options(
    parser: argparse.ArgumentParser, models: str | None, tokens: str | None, *, many: bool = False
) -> None:
    """Add the options of a layer, one of which sets ``problems``, and of its numbers of tokens.

    Args:
        parser: gets ``--model``, ``--config``, ``--sizes`` and ``--tokens``.
        models: names of models if none is given; None: one of the options is required.
        tokens: numbers of tokens if none are given.
        many: whether ``--model`` takes several names.
    """
    layers = parser.add_mutually_exclusive_group(required=models is None)
    if models is None:
        others = (f"{option} {metavar}" for option, (_, metavar, _) in OTHER_LAYERS.items())
        parser.usage = f"%(prog)s ({' | '.join(('--model NAME', *others))}) [options]"
    text = "name of a model, or of a shape that models share"
    if many:
        text += f", or several, or {UNTUNED}"
    layers.add_argument(
        *("--model", *(["--shapes"] if many else [])),
        dest="problems",
        type=_problems if many else _only(find_problem),
        default=models,
        metavar="NAME,.." if many else "NAME",
        help=text if models is None else f"{text} (default: %(default)s)",
    )
    for option, (read, metavar, text) in OTHER_LAYERS.items():
        more: dict[str, Any] = {"dest": "problems", "default": argparse.SUPPRESS}
        layers.add_argument(option, type=_only(read), metavar=metavar, help=text, **more)
    tokens_help = "numbers of tokens (default: %(default)s)"
    parser.add_argument(
        "--tokens", type=one_or_more(count), default=tokens, metavar="T,..", help=tokens_help
    )


def _only(read: Callable[[str], Problem]) -> Callable[[str], list[Problem]]:
    """A reader of a list of one problem, which may have commas in it."""
    return checked(lambda text: [read(text)])


def parser(
    description: str,
    tokens: str,
    *,
    cpu_tokens: str = "1,8",
    models: str | None = None,
    prog: str | None = None,
    examples: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share.

    Args:
        description: what the command does.
        tokens: default numbers of tokens on a GPU.
        cpu_tokens: those without a GPU, where the default problem is tiny.
        models: default problems on a GPU; None: all that ``shapes.json`` marks as timed.
        prog: name of the command in its help.
        examples: arguments of calls for its help.
    """
    cuda = torch.cuda.is_available()
    timed = models or ",".join(p.name for p in load_problems().values() if p.timed)
    result = Parser(prog, description, examples)
    many_tokens = tokens if cuda else cpu_tokens
    add_layer_options(result, timed if cuda else "tiny", many_tokens, many=True)
    text = f"among {', '.join(ROUTINGS)} (default: %(default)s)"
    add_names(result, "--routing", "routing", ROUTINGS, "uniform", text)
    add = result.add_argument
    add(
        "--device",
        type=checked(_this_machines),
        metavar="NAME",
        help="the device meant: anything but what this machine has is an error",
    )
    add(
        "--output",
        type=checked(_writable),
        default=default_output(),
        help="folder of the records (default: benchmarks/results in a checkout with a GPU)",
    )
    add_time_budget(result, "start no case after this long")
    return result


def add_time_budget(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--time-budget-s``, in seconds; the default is no limit."""
    read = checked(partial(finite_number, zero=True))
    parser.add_argument("--time-budget-s", type=read, default=math.inf, metavar="S", help=text)


def device_help() -> str:
    """The names that ``--device`` takes, for its help."""
    archs = [name for name, target in TARGETS.items() if target.facts is not None]
    return f"a GPU ({', '.join(GPUS)}), an architecture ({', '.join(archs)})"


def _problems(text: str) -> list[Problem]:
    """The problems of comma-separated names, each once."""
    groups = one_or_more(find_problems)(text)
    return list(dict.fromkeys(problem for problems in groups for problem in problems))


def gpu_named(name: str) -> TargetDevice:
    """The GPU of a name: this machine's if the name fits that, else a known one.

    Raises:
        ValueError: an unknown name, or no GPU.
    """
    target = target_named(name)
    if target.facts is None:
        raise ValueError(f"device must be {device_help()}, got {name!r}")
    here = target_of(torch.device("cuda")) if torch.cuda.is_available() else target
    same = here.name == target.name and (name in TARGETS or here.gpu == target.gpu)
    return here if same else target


def _writable(name: str) -> Path:
    """A folder to which records can be written."""
    check_writable(Path(name), hint="")
    return Path(name)


def _this_machines(name: str) -> TargetDevice:
    """The target of a name, which must be what this machine has."""
    here = target_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    target = target_named(name)
    if here.name != target.name or (name not in TARGETS and here.gpu != target.gpu):
        raise ValueError(f"device must be that of this machine, {here.gpu or 'cpu'}, got {name!r}")
    return here


def add_scheme_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--scheme``, one or more names; `with_schemes` fills in the default."""
    parser.add_argument(
        *("--scheme", "--schemes"),
        dest="schemes",
        type=one_or_more(lambda text: recorded_name(read_scheme(text))),
        metavar="NAME,..",
        help=f"bf16 or among {SCHEME_NAMES} (default: that of --config, or bf16)",
    )


def recorded_name(scheme: Scheme) -> str:
    """The name of a scheme in the benchmark records."""
    return "bf16" if scheme.weight is None else scheme.name


def with_schemes(chosen: argparse.Namespace) -> argparse.Namespace:
    """The options with the default schemes: what the model's ``config.json`` says, or bf16."""
    if chosen.schemes is None:
        chosen.schemes = [chosen.problems[0].scheme or "bf16"]
    return chosen


def progress(text: str) -> None:
    """Say on stderr what is done next, before a step that may take seconds."""
    print(f"{CONSOLE_SCRIPT}: {text}", file=sys.stderr, flush=True)


def checked(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """Wrap ``read`` so that argparse prints the text of its error."""

    def read_checked(text: str) -> Value:
        try:
            return read(text)
        except (NotImplementedError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_checked


def one_or_more(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """A reader of comma-separated lists, whose errors name the value and the known values."""

    def read_all(text: str) -> list[Value]:
        values = [checked(read)(part.strip()) for part in text.split(",") if part.strip()]
        if not values:
            raise argparse.ArgumentTypeError("nothing given")
        return list(dict.fromkeys(values))

    return read_all


def named_choice(what: str, names: Collection[str]) -> Callable[[str], str]:
    """A reader of one of some names."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError(unknown(what, text, names))
        return text

    return read


def add_names(
    parser: argparse.ArgumentParser,
    option: str,
    what: str,
    names: Collection[str],
    default: str,
    text: str,
    dest: str | None = None,
) -> None:
    """Add an option for one or more of some names, with its default and its help."""
    read = one_or_more(named_choice(what, names))
    parser.add_argument(option, dest=dest, type=read, default=default, metavar="NAME,..", help=text)


def count(text: str) -> int:
    """A positive integer."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"a number must be a positive integer, got {text!r}")
    checks.at_least(1, number=int(text))
    return int(text)


def finite_number(text: str, *, zero: bool = False) -> float:
    """A finite number above 0, or with ``zero`` of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf or (zero and value == 0)):
        rule = "a number of at least 0" if zero else "a positive number"
        raise ValueError(f"must be {rule}, got {text!r}")
    return value


def amount(text: str) -> int | float | str:
    """Experts that are resident: an int, a share or a size, which `parse_amount` checks."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def print_row(cells: dict[str, Any], widths: dict[str, int], *, head: bool = False) -> None:
    """Print one aligned line, with ``head`` the column names above it."""
    lines = [[_text(cells.get(name)) for name in widths]]
    if head:
        lines.insert(0, list(widths))
    print(aligned(lines, widths=[*widths.values()]), flush=True)


class Lines:
    """Prints a line per row.

    Args:
        widths: the columns and their widths.
        cells: from a row to its columns.
    """

    def __init__(
        self, widths: dict[str, int], cells: Callable[[Any], dict[str, Any]] = asdict
    ) -> None:
        self.widths, self.cells = widths, cells

    def __call__(self, rows: Sequence[Any], *, head: bool) -> None:
        """Print rows, with ``head`` the names of the columns above them."""
        for number, row in enumerate(rows):
            print_row(self.cells(row), self.widths, head=head and number == 0)


class Recorder:
    """The rows of a run: printed and recorded as they come, and counted at the end.

    Args:
        path: the record; None: nothing is written.
        key: the fields that tell the rows of the record apart.
        show: prints rows, with ``head=True`` those that come first.
        budget_s: seconds after which no case starts.
    """

    def __init__(
        self,
        path: Path | None,
        key: Sequence[str],
        show: Callable[..., None],
        budget_s: float = math.inf,
    ) -> None:
        self.path, self.key, self.show = path, key, show
        self.rows: list[Any] = []
        self.failed: list[str] = []
        self._end = time.monotonic() + budget_s

    def out_of_time(self) -> bool:
        """Whether no further case may start."""
        return time.monotonic() > self._end

    def add(self, rows: Sequence[Any]) -> None:
        """Print rows, and merge them into the record."""
        self.show(rows, head=not self.rows)
        self.rows += rows
        if self.path and rows:
            write_rows(self.path, rows, self.key)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Context of a case, whose failure must not lose the rows of other cases."""
        try:
            yield
        except Exception:
            traceback.print_exc()
            self.failed.append(name)

    def conclude(self, more: str = "") -> int:
        """Print how many rows were recorded and what failed; returns the status of the command."""
        print(f"\n{len(self.rows)} rows{f' in {self.path}' if self.path else ''}{more}")
        if self.failed:
            print("failed: " + "; ".join(self.failed), file=sys.stderr)
        return 1 if self.failed else 0


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
