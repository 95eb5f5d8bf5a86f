"""The command line: ``moe-ops <command>``, or ``python -m moe_ops <command>``.

Every command runs wherever the package is installed. The demo needs transformers.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from moe_ops.activation import kind_and_key
from moe_ops.bench import layer, offload, ranks
from moe_ops.bench.command import (
    SCHEME_NAMES,
    Parser,
    add_layer_options,
    add_time_budget,
    amount,
    checked,
    count,
    device_help,
    finite_number,
    gpu_named,
    progress,
)
from moe_ops.bench.compile_ahead import CompileAhead, usable_cores
from moe_ops.bench.gemm_clock import GemmClock
from moe_ops.bench.harness import CONSOLE_SCRIPT, run_header
from moe_ops.bench.problems import Problem, read_scheme
from moe_ops.bench.tuning_record import record_entry
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import device_facts
from moe_ops.doctor import DISTRIBUTION, LOADS, SHAPE, diagnose
from moe_ops.inspect.devices import target_named, target_of
from moe_ops.inspect.explanation import explain
from moe_ops.inspect.host_costs import HOST_GBPS
from moe_ops.inspect.traffic import LINKS, Link
from moe_ops.parallel import FusedMoEParallelConfig
from moe_ops.parallel.parallel_config import IMPLEMENTED_BACKENDS
from moe_ops.scheme import Scheme, get_scheme
from moe_ops.tuning import files, report
from moe_ops.tuning.search import Clock, Prepare, Subject
from moe_ops.version import __version__

IS_SCRIPT = Path(sys.argv[0]).stem == CONSOLE_SCRIPT
PROGRAM = CONSOLE_SCRIPT if IS_SCRIPT else "python -m moe_ops"
"""What the user typed, for messages."""
USAGE_ERROR, INTERRUPTED, NOT_READ = 2, 130, 141
"""The exit status after a usage error, as in argparse, after Ctrl-C, and when nobody reads the
output any longer, as in a shell."""
SCHEME_HELP = (
    f"bf16 or among {SCHEME_NAMES}; other group sizes too, such as int4_w4a16_g64 (default: what "
    "--config says, or unquantized)"
)
_CUDA = torch.device("cuda")
COMPANIONS = {
    "--backend": "--ranks", "--link": "--ranks", "--link-gbps": "--ranks",
    "--host-gbps": "--resident",
}  # fmt: skip
"""Options of ``explain``, each with the one without which it says nothing."""


def _options_given(arguments: Sequence[str]) -> set[str]:
    """The options that a command line gives."""
    return {argument.partition("=")[0] for argument in arguments}


def _bench(arguments: Sequence[str]) -> int:
    """Time layers on one GPU, with ``--ranks`` on several, or with ``--resident`` offloaded."""
    named = _options_given(arguments)
    spread, on_host = "--ranks" in named, "--resident" in named
    chosen = ranks if spread else offload if on_host else layer
    return chosen.main(arguments, prog=f"{PROGRAM} bench")


def _explain(arguments: Sequence[str]) -> int:
    """Print an `Explanation`; the exit status is 1 if no kernel serves the configuration."""
    parser = _explain_parser()
    chosen = parser.parse_args(arguments)
    if (chosen.format == "batched") is (chosen.max_num_tokens is None):
        parser.error("--format batched and --max-num-tokens go together")
    _check_companions(parser, _options_given(arguments))
    (problem,), ranks = chosen.problems, chosen.ranks
    if ranks > problem.num_experts:
        parser.error(f"--ranks must be at most the {problem.num_experts} experts, got {ranks}")
    activation = chosen.activation or problem.activation
    spread = {"dp_size": ranks, "ep_size": ranks, "use_ep": ranks > 1}
    options = {
        "num_tokens": chosen.tokens, "device": chosen.device, "link": _link(chosen),
        "resident": chosen.resident, "host_gbps": chosen.host_gbps,
    }  # fmt: skip
    try:
        config = problem.config(
            "cuda" if torch.cuda.is_available() else "cpu",
            num_local_experts=-(-problem.num_experts // ranks),
            activation=activation,
            moe_parallel_config=FusedMoEParallelConfig(**spread, all2all_backend=chosen.backend),
            max_num_tokens=chosen.max_num_tokens,
            batch_invariant=chosen.batch_invariant,
        )
        explanation = explain(config, _scheme_of(chosen), **options)
    except (NotImplementedError, ValueError) as error:
        parser.error(str(error))
    print(explanation.to_json() if chosen.json else explanation)
    return 0 if explanation.choice else 1


def _check_companions(parser: argparse.ArgumentParser, named: set[str]) -> None:
    """Refuse options of `_explain` that would not be read, or that no layer has together."""
    for option, needed in COMPANIONS.items():
        if option in named and needed not in named:
            parser.error(f"{option} must come with {needed}")
    if {"--ranks", "--resident"} <= named:
        parser.error("--resident must come without --ranks: offloaded layers exchange no tokens")


def _link(chosen: argparse.Namespace) -> Link:
    """The named link, at the given rate if there is one."""
    link, gigabytes = LINKS[chosen.link], chosen.link_gbps
    if gigabytes is None:
        return link
    rate = gigabytes * 1e9
    return link._replace(
        name=f"{link.name} at {gigabytes:g} GB/s",
        collective_bytes_per_s=rate,
        push_bytes_per_s=None if link.push_bytes_per_s is None else rate,
        source=f"the given rate, and the least times of {link.name}",
    )


def _explain_parser() -> argparse.ArgumentParser:
    examples = (
        "--model qwen3-30b-a3b --tokens 1,64",
        "--model deepseek-v3 --scheme fp8_block128 --device h100",
        "--sizes 128,8,2048,768 --scheme int4_w4a16_g128 --device sm_90 --json",
        "--model qwen3-30b-a3b --device h200 --ranks 8",
        "--model qwen3-30b-a3b --device h100 --resident 32",
    )
    about = "Say which kernels a layer runs on, why, and what it costs. Runs no kernel."
    parser = Parser(f"{PROGRAM} explain", about, examples)
    add_layer_options(parser, None, "1,64")
    add = parser.add_argument
    add("--scheme", type=checked(read_scheme), metavar="NAME", help=SCHEME_HELP)
    device_text = f"cpu, {device_help()}; need not be in this machine (default: this machine's)"
    add("--device", type=checked(_existing_device), metavar="NAME", help=device_text)
    add("--format", choices=("standard", "batched"), default="standard", help="(default: standard)")
    rows_help = "rows of each expert in the batched format"
    add("--max-num-tokens", type=checked(count), metavar="N", help=rows_help)
    activation_help = "such as gelu_tanh (default: what --config says, or silu)"
    add("--activation", type=checked(_activation), metavar="NAME", help=activation_help)
    invariant_help = "results of a token do not depend on the rest of the batch"
    add("--batch-invariant", action="store_true", help=invariant_help)
    ranks_help = "ranks that hold the experts together and exchange tokens (default: %(default)s)"
    add("--ranks", type=checked(count), default="1", metavar="R", help=ranks_help)
    backend_help = "how they exchange tokens (default: %(default)s)"
    backends = IMPLEMENTED_BACKENDS
    add("--backend", choices=backends, default=backends[0], help=backend_help)
    add("--link", choices=LINKS, default="nvlink4", help="what joins them (default: %(default)s)")
    rate_help = "gigabytes per second that leave a rank, in place of the link's"
    add("--link-gbps", type=checked(finite_number), metavar="GB/S", help=rate_help)
    resident_help = (
        "experts on the GPU if all are in host memory: a number, a share, or 2.5GB for one layer"
    )
    add("--resident", type=checked(amount), metavar="N", help=resident_help)
    host_help = "gigabytes per second from host memory (default: %(default)s)"
    add(
        "--host-gbps",
        type=checked(finite_number),
        default=HOST_GBPS,
        metavar="GB/S",
        help=host_help,
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _existing_device(device: str) -> str:
    """A device's name, after a look whether there is such a device."""
    target_named(device)
    return device


def _scheme_of(chosen: argparse.Namespace) -> Scheme:
    """The given scheme, or that of the model's ``config.json``, or unquantized."""
    return chosen.scheme or get_scheme(chosen.problems[0].scheme or "unquantized")


def _activation(name: str) -> str:
    kind_and_key(name)
    return name


def _tune(arguments: Sequence[str]) -> int:
    """Tune the token counts that a file lacks, and print its entries; returns 2 after an error."""
    parser = _tune_parser()
    chosen = parser.parse_args(arguments)
    (problem,) = chosen.problems
    if chosen.device is None:
        if not torch.cuda.is_available():
            parser.error(f"--device must name a GPU on a machine without one: {device_help()}")
        chosen.device = target_of(_CUDA)
    try:
        folder = chosen.output or files.default_folder()
        return _tune_layer(chosen, problem, folder)
    except (NotImplementedError, OSError, ValueError) as error:  # of the scheme, or of a file
        print(f"{PROGRAM} tune: {error}", file=sys.stderr)
        return USAGE_ERROR


def _tune_layer(chosen: argparse.Namespace, problem: Problem, folder: Path) -> int:
    if not kind_and_key(problem.activation)[0].is_gated:
        raise NotImplementedError(f"activation must have a gate, got {problem.activation}")
    sizes = (problem.num_experts, problem.intermediate_size, problem.hidden_size)
    subject = Subject(sizes, problem.top_k, _scheme_of(chosen), chosen.device.facts)
    counts = [tokens for tokens in chosen.tokens if subject.has_tiles(tokens)]
    for tokens in sorted({*chosen.tokens} - {*counts}):
        told = "1 token" if tokens == 1 else f"{tokens} tokens"
        progress(f"{told}: no tiles to tune, as they follow from the sizes")
    if chosen.dry_run:
        trials = [trial for tokens in counts for trial in subject.candidates(tokens)]
        print(report.trials_json(subject, trials) if chosen.json else report.trials_table(trials))
        return 0
    entries, timed = files.read(subject, folder), []
    if counts and (chosen.again or any(str(tokens) not in entries for tokens in counts)):
        for written in filter(None, (folder, chosen.record)):
            files.check_writable(written)
        (clock, prepare), again = _gemm_clock(problem, subject, chosen.jobs), chosen.again
        made_with = ", ".join(run_header().values())
        report_entry = partial(record_entry, chosen.record, subject, problem.name)
        timed = files.tune(
            subject,
            counts,
            folder,
            clock,
            again=again,
            made_with=made_with,
            budget_s=chosen.time_budget_s,
            hooks=files.Hooks(prepare, report_entry),
        )
    entries = files.read(subject, folder)
    if chosen.json:
        print(report.entries_json(subject, folder, timed, entries))
    else:
        print(folder / subject.file, report.entries_table(entries), sep="\n")
    return 0


def _tune_parser() -> argparse.ArgumentParser:
    examples = (
        "--model qwen3-30b-a3b --device sm_90 --tokens 8,64 --dry-run",
        "--sizes 96,6,4096,1536 --scheme int4_w4a16_g128 --device h100 --dry-run --json",
    )
    about = "Time tiles on this machine's GPU, and write the fastest to a file that layers look up."
    parser = Parser(f"{PROGRAM} tune", about, examples)
    add_layer_options(parser, None, "1,8,64,512,4096")
    add = parser.add_argument
    add("--scheme", type=checked(read_scheme), metavar="NAME", help=SCHEME_HELP)
    device_text = f"{device_help()}; of another than this machine's, shows the file (default: its)"
    add("--device", type=checked(gpu_named), metavar="NAME", help=device_text)
    output_help = f"folder of the files (default: {tuned.FOLDER}, where layers look them up)"
    add("--output", type=Path, metavar="FOLDER", help=output_help)
    record_help = "folder of records, such as benchmarks/results: adds to <GPU>/tuning.json there"
    add("--record", type=Path, metavar="FOLDER", help=record_help)
    add("--again", action="store_true", help="also time token counts that the file already has")
    add_time_budget(parser, "start no token count after this long; the next run continues")
    jobs_help = "processes that compile kernels before they are timed (default: %(default)s)"
    add("--jobs", type=checked(count), default=usable_cores(), metavar="N", help=jobs_help)
    add("--dry-run", action="store_true", help="print the tiles that would be tried first")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _gemm_clock(problem: Problem, subject: Subject, jobs: int) -> tuple[Clock, Prepare]:
    """A clock that times GEMMs on the GPU of this machine, and what compiles kernels for it.

    Raises:
        SystemExit: there is no GPU, or it is not the GPU of ``subject``.
    """
    here = device_facts(_CUDA) if torch.cuda.is_available() else None
    if here != subject.device:
        print(
            f"{PROGRAM} tune: kernels can be timed only on the GPU that a file is for, here "
            f"{subject.device.name}; this machine has {here.name if here else 'none'} "
            "(--dry-run prints what would be tried)",
            file=sys.stderr,
        )
        raise SystemExit(USAGE_ERROR)
    progress(f"making the weights of {problem.name} in {subject.scheme.name}")
    return GemmClock(problem, subject), CompileAhead(problem, subject, jobs)


def _demo(arguments: Sequence[str]) -> int:
    """Run `moe_ops.demo`; exit status 2 without transformers."""
    if find_spec("transformers") is None:
        lacks = f"needs transformers: pip install '{DISTRIBUTION}[transformers]'"
        if any(argument in ("-h", "--help") for argument in arguments):
            print(f"usage: {PROGRAM} demo [--model FOLDER] [--prompt TEXT]\n\nHere it {lacks}.")
            return 0
        print(f"{PROGRAM} demo: {lacks}", file=sys.stderr)
        return USAGE_ERROR
    before, sys.argv = sys.argv, [f"{PROGRAM} demo", *arguments]
    progress("loading transformers")
    try:
        runpy.run_module("moe_ops.demo", run_name="__main__")  # exits through SystemExit
    finally:
        sys.argv = before
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    """Print a `Diagnosis`; the exit status is 1 if it found a problem."""
    about = "Say what is installed, which kernels a layer runs here, and test small layers."
    parser = Parser(f"{PROGRAM} doctor", about, ("", "--model mixtral --tokens 1,64 --json"))
    add_layer_options(parser, SHAPE, ",".join(map(str, LOADS)))
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    chosen = parser.parse_args(arguments)
    (problem,) = chosen.problems
    diagnosis = diagnose(progress, problem, chosen.tokens)
    print(diagnosis.to_json() if chosen.json else diagnosis)
    return 1 if diagnosis.problems else 0


class Command(NamedTuple):
    """A command: its help text and its function."""

    help: str
    run: Callable[[Sequence[str]], int]
    """Takes the arguments after the command's name and returns the exit status."""


COMMANDS = {
    "bench": Command("time or profile whole layers", _bench),
    "explain": Command("say which kernels a layer runs on, why, and what it costs", _explain),
    "tune": Command("time tiles on this GPU and record the fastest", _tune),
    "demo": Command("read and write text with a small MoE language model", _demo),
    "doctor": Command("say what is installed, what runs here, and test it", _doctor),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 130 after Ctrl-C, 141 after a broken pipe.

    Args:
        arguments: command-line arguments; None: ``sys.argv[1:]``.

    Raises:
        SystemExit: help was requested (0), or the command line has an unknown name (2).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog=PROGRAM, epilog=f"{PROGRAM} <command> --help says what a command takes."
    )
    parser.add_argument("--version", action="version", version=f"moe_ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="<command>")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    chosen = parser.parse_args(arguments[:1]).command
    try:
        status = COMMANDS[chosen].run(arguments[1:])
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"{PROGRAM} {chosen}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError as error:  # such as `head` has read enough
        print(f"{PROGRAM} {chosen}: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return NOT_READ
