"""Whole models served by vLLM, with this library's experts and with vLLM's own: tokens a second.

    python benchmarks/served_vllm.py

Two processes serve each model, one after the other: the plug-in is on in one and off in the other
(`served_engine.py`). Checkpoints have real sizes and random numbers, and steps that decode are
replayed from CUDA graphs. The greedy continuations are compared; where they part, the two best
tokens are shown. The record is ``served_vllm.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from continuations import Written, compare
from tables import OURS

from moe_ops.bench.command import (
    Parser,
    add_time_budget,
    conclude,
    count,
    one_of,
    one_or_more,
    print_row,
    progress,
)
from moe_ops.bench.harness import default_output, record_path, write_rows

MARK = "REPLY "
"""What a line of an engine that is no log begins with."""
THEIRS = "vllm"
SWITCH = {OURS: "1", THEIRS: "0"}
KEY = ("model", "scheme", "layers", "phase", "M", "impl")
WIDTHS = {"model": 14, "scheme": 16, "layers": 6, "phase": 8, "M": 6, "impl": 8, "experts": 24,
          "tokens_per_s": 12, "start_s": 8}  # fmt: skip
PREFILL = 512
"""Tokens of each prompt of the phase ``prefill``."""
LIMITS = {
    "max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 4 * 2**30,
}  # fmt: skip
"""Options of ``LLM``."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL"}
"""vLLM's ``compilation_config``: steps as they are, each in one CUDA graph."""


class Case(NamedTuple):
    """A checkpoint."""

    model: str
    scheme: str
    layers: int


CASES = (
    Case("qwen3-30b-a3b", "bf16", 48),
    Case("mixtral-8x7b", "bf16", 8),
    Case("qwen3-30b-a3b", "fp8_block128", 48),
    Case("deepseek-v3", "fp8_block128", 4),
    Case("gpt-oss-120b", "mxfp4_w4a16", 36),
    Case("qwen3-30b-a3b", "int4_w4a16_g128", 48),
    Case("qwen3-30b-a3b", "nvfp4_w4a16", 48),
)


@dataclass(frozen=True)
class ServedRow:
    """One measured combination; the first six fields are its key."""

    model: str
    scheme: str
    layers: int
    phase: str
    """``decode``: sequences get 128 tokens each; ``prefill``: prompts are read."""
    M: int
    """Sequences that decode, or tokens of all prompts together."""
    impl: str
    experts: str
    """The classes of experts that vLLM ran."""
    tokens_per_s: float
    """New tokens, or tokens of prompts, over the median of ``seconds``."""
    seconds: list[float]
    """Each round, from the call of ``generate`` to its return."""
    start_s: float
    """Until the engine could serve: weights made and converted, graphs captured."""
    compared: dict[str, Any] | None
    """How far the continuations of the compared prompts are those of vLLM's own experts."""
    config: dict[str, Any]


class Engine:
    """A process that serves models.

    Args:
        impl: `OURS` or `THEIRS`.
        log: a file that gets what vLLM prints.
    """

    def __init__(self, impl: str, log: Path) -> None:
        environment = {
            **os.environ, "MOE_OPS_VLLM": SWITCH[impl], "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        self.impl = impl
        self.log = log.open("a")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("served_engine.py"))],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, bufsize=1,
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve a model, and return the engine's reply or its error."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.process.poll() is None:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.log.flush()
                return json.loads(line.removeprefix(MARK))
            self.log.write(line)
        self.log.flush()
        return {"error": f"the engine ended with status {self.process.wait()}"}

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.log.close()


def written_of(reply: dict[str, Any]) -> Written:
    """What an engine wrote, as JSON had it."""
    best = [[{int(t): p for t, p in x.items()} for x in one] for one in reply["written"]["best"]]
    return Written(reply["written"]["tokens"], best)


def rows_of(
    case: Case, replies: dict[str, dict[str, Any]], more: dict[str, Any]
) -> Iterator[ServedRow]:
    """The rows of a case, from the replies of both engines."""
    agreement = None
    if len(replies) == len(SWITCH):
        compared = compare(*(written_of(replies[impl]) for impl in (THEIRS, OURS)))
        agreement = compared.as_json()
    installed = {name: metadata.version(name) for name in ("vllm", "transformers")}
    for impl, reply in replies.items():
        for phase, m, new, seconds in reply["times"]:
            yield ServedRow(
                *case,
                phase=phase,
                M=m,
                impl=impl,
                experts=", ".join(reply["experts"]),
                tokens_per_s=m * new / median(seconds),
                seconds=seconds,
                start_s=reply["start_s"],
                compared=agreement if impl == OURS else None,
                config={**installed, **GRAPHS, **more},
            )


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    command = Parser(None, __doc__ or "")
    named = {f"{case.model}:{case.scheme}": case for case in CASES}
    lists = {
        "--cases": ("cases", one_of("case", named), ",".join(named)),
        "--impls": ("impls", one_of("implementation", {x: x for x in SWITCH}), ",".join(SWITCH)),
        "--batches": ("batches", count, "1,8,64"),
        "--prefill": ("prefill", count, "8192"),
    }  # fmt: skip
    for option, (dest, read, default) in lists.items():
        text = "(default: %(default)s)"
        command.add_argument(
            option, dest=dest, type=one_or_more(read), default=default, metavar="..,", help=text
        )
    command.add_argument("--layers", type=count, help="build fewer layers")
    command.add_argument("--new", type=count, default=128, help="tokens after a prompt")
    command.add_argument("--options", type=json.loads, default={}, help="of LLM, as JSON")
    command.add_argument("--logs", type=Path, default=Path("served_vllm"), help="folder of logs")
    command.add_argument(
        "--output", type=Path, default=default_output(), help="folder of the records"
    )
    add_time_budget(command, "start no case after this long")
    return command.parse_args(arguments)


def request_of(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """What an engine is asked to do for a case."""
    graphs = {**GRAPHS, "cudagraph_capture_sizes": args.batches}
    phases = [("decode", m, m, 32, args.new) for m in args.batches]
    phases += [("prefill", m, m // PREFILL, PREFILL, 1) for m in args.prefill]
    return {
        "case": case._asdict(), "options": {**LIMITS, "compilation_config": graphs, **args.options},
        "phases": phases, "compared": args.new,
    }  # fmt: skip


def serve(case: Case, engines: Sequence[Engine], request: dict[str, Any]) -> dict[str, Any]:
    """Each engine's reply, or its error, by its implementation."""
    replies = {}
    for engine in engines:
        progress(f"{case.model} {case.scheme}, {case.layers} layers: {engine.impl}")
        replies[engine.impl] = engine.ask(request)
    return replies


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve all cases within the time budget; returns 1 after a failure."""
    args, started = options(arguments), time.monotonic()
    path = record_path(args.output, "served_vllm.json")
    args.logs.mkdir(parents=True, exist_ok=True)
    engines = [Engine(impl, args.logs / f"{impl}.log") for impl in args.impls]
    rows, failed = 0, []
    for case in args.cases:
        if time.monotonic() - started > args.time_budget_s:
            print(f"no time left for {case.model} {case.scheme}, and the rest")
            break
        case = case._replace(layers=min(case.layers, args.layers or case.layers))
        replies = serve(case, engines, request_of(case, args))
        errors = {impl: reply["error"] for impl, reply in replies.items() if "error" in reply}
        failed += [f"{case.model} {case.scheme} {impl}: {text}" for impl, text in errors.items()]
        for row in rows_of(
            case, {k: v for k, v in replies.items() if k not in errors}, args.options
        ):
            print_row(asdict(row), WIDTHS, head=rows == 0)
            rows += 1
            if path:
                write_rows(path, [row], KEY)
    for engine in engines:
        engine.end()
    return conclude(rows, path, failed)


if __name__ == "__main__":
    sys.exit(main())
