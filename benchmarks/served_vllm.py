"""Whole models served by vLLM, with this library's experts and with vLLM's own: tokens a second.

    python benchmarks/served_vllm.py

Two processes serve each model, with the plug-in on in one and off in the other
(`served_engine.py`). They start at the same time, so that a GPU must hold the model twice, and take
turns to be timed. Checkpoints have real sizes and random numbers, and steps that decode are
replayed from CUDA graphs. The greedy continuations are compared; where they part, the best tokens
are recorded. The record is ``served_vllm.json``. Without a GPU a tiny model is served.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from continuations import Written, compare
from tables import OURS

from moe_ops.bench import command
from moe_ops.bench.harness import default_output, record_path

MARK = "REPLY "
"""What a line of an engine that is no log begins with."""
THEIRS = "vllm"
SWITCH = {OURS: "1", THEIRS: "0"}
"""Implementation -> ``MOE_OPS_VLLM`` of its process."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    # With several GPUs: workers import what registers the loader, and are asked for their experts.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}  # fmt: skip
KEY = ("model", "scheme", "layers", "gpus", "parallel", "adapters", "phase", "M", "impl")
WIDTHS = {"model": 14, "scheme": 16, "layers": 6, "gpus": 4, "parallel": 8, "adapters": 8,
          "phase": 8, "M": 6, "impl": 8, "experts": 24, "tokens_per_s": 12, "step_s": 10,
          "start_s": 8}  # fmt: skip
ROUNDS = 5
"""Timed rounds of a phase, after one that is not."""
PROFILED = 8
"""Steps that decode, of which the time of the kernels is taken."""
DECODE, PREFILL = 32, 512
"""Tokens of each prompt of the phases ``decode`` and ``prefill``."""
LIMITS = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
"""Options of ``LLM``."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL"}
"""vLLM's ``compilation_config`` on a GPU: a step is not compiled, and is one CUDA graph."""
MEMORY = {"kv_cache_memory_bytes": 2 * 2**30, "gpu_memory_utilization": 0.2}


class Case(NamedTuple):
    """A checkpoint."""

    model: str
    scheme: str
    layers: int

    def __str__(self) -> str:
        return " ".join((self.model, self.scheme))


CASES = (
    Case("qwen3-30b-a3b", "bf16", 48),
    Case("gpt-oss-120b", "mxfp4_w4a16", 18),
    Case("qwen3-30b-a3b", "fp8_block128", 24),
    Case("mixtral-8x7b", "bf16", 8),
    Case("deepseek-v3", "fp8_block128", 4),
    Case("qwen3-30b-a3b", "int4_w4a16_g128", 24),
    Case("qwen3-30b-a3b", "nvfp4_w4a16", 24),
)
"""What is served on a GPU, with the layers of which an H200 holds two models."""
TINY = Case("tiny", "bf16", 2)


@dataclass(frozen=True)
class ServedRow:
    """One measured combination; the first nine fields are its key."""

    model: str
    scheme: str
    layers: int
    gpus: int
    """GPUs that divide the experts."""
    parallel: str
    """``tensor``: they split attention; ``data``: each has sequences of its own, and tokens are
    exchanged; empty for one GPU."""
    adapters: int
    """Adapters of all experts, which the sequences of a batch have in turns; 0: none."""
    phase: str
    """``decode``: sequences get new tokens; ``prefill``: prompts are read."""
    M: int
    """Sequences that decode, or tokens of all prompts together; with ``data`` of each GPU."""
    impl: str
    experts: str
    """The classes of experts that vLLM ran."""
    tokens_per_s: float
    """New tokens, or tokens of prompts, over the median of ``seconds``."""
    seconds: list[float]
    """Each round, from the call of ``generate`` to its return."""
    step_s: float | None
    """Time of the kernels of a step; the host's own time hides behind it, or is longer."""
    start_s: float
    """Until the engine could serve: weights made and converted, graphs captured."""
    compared: dict[str, Any] | None
    """How far the continuations of the compared prompts are those of vLLM's own experts."""
    config: dict[str, Any]


class Server:
    """Processes that serve models together: one, or a rank each of data parallelism.

    ``facts`` is what the first rank said when it had started the model.

    Args:
        impl: `OURS` or `THEIRS`.
        log: a file that gets what vLLM prints.
        ranks: how many processes there are.
    """

    def __init__(self, impl: str, log: Path, ranks: int) -> None:
        self.impl = impl
        self.log = log.open("a", buffering=1)
        self.facts: dict[str, Any] = {}
        self.processes = [_process(variables) for variables in _variables(impl, ranks)]

    def send(self, verb: str, **arguments: Any) -> None:
        """Ask all ranks for something, unless they have ended."""
        for process in self.processes:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps([verb, arguments]) + "\n")
                process.stdin.flush()

    def receive(self) -> list[Any]:
        """The reply of each rank.

        Raises:
            RuntimeError: what was asked for failed, or a process has ended.
        """
        answers = [self._answer(process) for process in self.processes]
        for answer in answers:  # all are read by now: none is left for the next question
            if "error" in answer:
                raise RuntimeError(answer["error"])
        return [answer["reply"] for answer in answers]

    def _answer(self, process: Any) -> dict[str, Any]:
        for line in process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            self.log.write(line)
        raise RuntimeError(f"the engine ended with status {process.wait()}")

    def ask(self, verb: str, **arguments: Any) -> list[Any]:
        """Ask for something, and return the replies."""
        self.send(verb, **arguments)
        return self.receive()

    def end(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.log.close()


def _process(environment: dict[str, str]) -> Any:
    """Start `served_engine.py` with further variables."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("served_engine.py"))],
        env={**os.environ, **ENVIRONMENT, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )


def _variables(impl: str, ranks: int) -> list[dict[str, str]]:
    """The variables of each process: the plug-in's switch, and which of several ranks it is."""
    switch = {"MOE_OPS_VLLM": SWITCH[impl]}
    if ranks == 1:
        return [switch]
    shared = {**switch, "VLLM_DP_SIZE": str(ranks), "VLLM_DP_MASTER_PORT": str(free_port())}
    return [{**shared, "VLLM_DP_RANK": n, "VLLM_DP_RANK_LOCAL": n} for n in map(str, range(ranks))]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def started(
    case: Case, servers: Sequence[Server], args: argparse.Namespace, failed: list[str]
) -> list[Server]:
    """Start a model in all servers at the same time; returns those that could.

    ``failed`` gets the errors of the others.
    """
    asked = {"case": case._asdict(), "options": engine_options(args), "adapters": args.adapters}
    for server in servers:
        server.send("start", **asked)
    serving = []
    for server in servers:
        try:
            server.facts, *_ = server.receive()
            serving.append(server)
        except RuntimeError as error:
            failed.append(f"{case} {server.impl}: {error}")
    return serving


def compared(servers: Sequence[Server], new: int) -> dict[str, Any] | None:
    """How far the continuations of both servers agree; None with one server alone."""
    written = {server.impl: _written(server.ask("write", new=new)[0]) for server in servers}
    if len(written) < len(SWITCH):
        return None
    return compare(written[THEIRS], written[OURS]).as_json()


def _written(reply: dict[str, Any]) -> Written:
    """What a rank wrote, from JSON."""
    best = [[{int(t): p for t, p in x.items()} for x in one] for one in reply["best"]]
    return Written(reply["tokens"], best)


def step_time(server: Server, prompts: dict[str, int], new: int) -> float | None:
    """The time of the kernels of one step: of prompts, or of sequences that decode."""
    first, *_ = server.ask("busy", **prompts, new=1)
    if first is None or new == 1:
        return first
    more, *_ = server.ask("busy", **prompts, new=1 + PROFILED)
    return (more - first) / PROFILED


def measured(
    case: Case, servers: Sequence[Server], args: argparse.Namespace
) -> Iterator[ServedRow]:
    """The rows of a case: servers take turns, and the time of the slowest rank counts."""
    agreement = compared(servers, args.new)
    phases = [("decode", m, {"count": m, "length": DECODE}, args.new) for m in args.batches]
    phases += [("prefill", m, {"count": m // PREFILL, "length": PREFILL}, 1) for m in args.prefill]
    for phase, m, prompts, new in phases:
        _, *rounds = (
            [max(server.ask("time", **prompts, new=new)) for server in servers]
            for _ in range(1 + ROUNDS)
        )
        for server, *seconds in zip(servers, *rounds, strict=True):
            yield ServedRow(
                *case,
                gpus=args.gpus,
                parallel=args.parallel,
                adapters=args.adapters,
                phase=phase,
                M=m,
                impl=server.impl,
                experts=", ".join(server.facts["experts"]),
                tokens_per_s=len(server.processes) * m * new / median(seconds),
                seconds=seconds,
                step_s=step_time(server, prompts, new),
                start_s=server.facts["start_s"],
                compared=agreement if server.impl == OURS else None,
                config={"vllm": server.facts["vllm"], "new": new, **args.options},
            )


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; without a GPU the default is the tiny model."""
    cuda = torch.cuda.is_available()
    parser, number = command.Parser(None, __doc__ or ""), command.checked(command.count)
    add = parser.add_argument
    named = {f"{case.model}:{case.scheme}": case for case in (*CASES, TINY)}
    usual = [name for name, case in named.items() if (case is TINY) != cuda]
    lists = {
        "cases": (command.named_choice("case", named), ",".join(usual)),
        "impls": (command.named_choice("implementation", SWITCH), ",".join(SWITCH)),
        "batches": (command.count, "1,8,64" if cuda else "1,4"),
        "prefill": (command.count, "8192" if cuda else "1024"),
    }
    for name, (read, default) in lists.items():
        several, text = command.one_or_more(read), "(default: %(default)s)"
        add(f"--{name}", type=several, default=default, metavar="..,", help=text)
    add("--layers", type=number, help="build fewer layers; nothing is scaled up")
    add("--gpus", type=number, default=1, help="that divide the experts (default: %(default)s)")
    add("--parallel", choices=("tensor", "data"), help="how several GPUs do (default: tensor)")
    add(
        "--adapters", type=number, default=0, help="of the experts, in turns (default: %(default)s)"
    )
    add("--new", type=number, default=128 if cuda else 8, help="tokens after a prompt")
    add("--options", type=json.loads, default={}, metavar="JSON", help="further ones of vLLM's LLM")
    add("--logs", type=Path, default=Path("served_vllm"), help="folder of vLLM's logs")
    add("--output", type=Path, default=default_output(), help="folder of the records")
    command.add_time_budget(parser, "start no case after this long")
    args = parser.parse_args(arguments)
    args.cases = [named[name] for name in args.cases]
    if args.parallel and args.gpus == 1:
        parser.error("--parallel needs --gpus of at least 2")
    args.parallel = "" if args.gpus == 1 else args.parallel or "tensor"
    return args


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of ``LLM``: on a GPU the sizes that are timed are captured."""
    chosen: dict[str, Any] = {**LIMITS}
    if args.parallel:
        chosen["enable_expert_parallel"] = True
        chosen["tensor_parallel_size"] = args.gpus if args.parallel == "tensor" else 1
    if torch.cuda.is_available():
        graphs = {**GRAPHS, "cudagraph_capture_sizes": args.batches}
        chosen |= {**MEMORY, "compilation_config": graphs}
    else:
        chosen["enforce_eager"] = True
    return chosen | args.options


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve all cases within the time budget; returns 1 after a failure."""
    args = options(arguments)
    path = record_path(args.output, "served_vllm.json")
    recorder = command.Recorder(path, KEY, command.Lines(WIDTHS), args.time_budget_s)
    args.logs.mkdir(parents=True, exist_ok=True)
    ranks = args.gpus if args.parallel == "data" else 1
    servers = [Server(impl, args.logs / f"{impl}.log", ranks) for impl in args.impls]
    for case in args.cases:
        if recorder.out_of_time():
            print(f"no time left for {case}, and the rest")
            break
        case = case._replace(layers=min(case.layers, args.layers or case.layers))
        command.progress(f"{case}, {case.layers} layers")
        serving = started(case, servers, args, recorder.failed)
        try:
            for row in measured(case, serving, args):
                recorder.add([row])
        except RuntimeError as error:
            recorder.failed.append(f"{case}: {error}")
        for server in servers:
            with suppress(RuntimeError):
                server.ask("stop")
    for server in servers:
        server.end()
    return recorder.conclude(f"; logs in {args.logs}")


if __name__ == "__main__":
    sys.exit(main())
