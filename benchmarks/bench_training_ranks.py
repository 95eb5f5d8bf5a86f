"""Time forward and backward of a layer whose experts lie on several GPUs, beside one GPU.

    python benchmarks/bench_training_ranks.py --ranks 2 --model qwen3-30b --tokens 8192

Each rank brings as many tokens as ``--tokens`` says, routed by its own router logits, and gets the
gradients of its tokens, its logits and its experts. Calls are eager. A time is that of the slowest
rank. ``6 * T * k * 3 * H * I`` flops a GPU: a third forward, the rest backward. One GPU holds all
experts and computes the tokens of one rank. Results of the ranks are checked against it: a row that
differs is not recorded. On the CPU, with gloo, this only checks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import moe_ops
from moe_ops.bench.command import Lines, Recorder, parser
from moe_ops.bench.harness import record_path, relative_error
from moe_ops.bench.problems import SEED, Experts, Problem, make_experts, make_inputs
from moe_ops.bench.ranks import ONE_GPU, add_rank_options, slowest

KEY = ("shape", "M", "impl", "ranks")
BACKENDS = ("symmetric", "allgather_reducescatter")
WARM_UPS, STEPS = 5, 20
MAX_REL_ERR = 0.02
"""Largest relative error of the output and of each gradient."""
COLUMNS = {
    "shape": 14, "M": 6, "impl": 24, "ranks": 5, "forward_us": 10, "backward_us": 11,
    "forward_tflop_per_s": 19, "backward_tflop_per_s": 20, "tflop_per_s": 11, "rel_err": 8,
}  # fmt: skip


@dataclass(frozen=True)
class StepRow:
    """One measured combination; TFLOP/s are those of one GPU."""

    shape: str
    M: int
    """Tokens of each rank."""
    impl: str
    """The exchange; or one GPU that holds all experts and computes the tokens of one rank."""
    ranks: int
    forward_us: float
    backward_us: float
    forward_tflop_per_s: float
    backward_tflop_per_s: float
    tflop_per_s: float
    rel_err: float
    """The largest of the output and of the gradients, against the one GPU."""


class Step(NamedTuple):
    """A layer, what goes into it, and the gradient of what comes out."""

    layer: moe_ops.FusedMoE
    x: Tensor
    logits: Tensor
    grad: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get gradients."""
        weights = {"w13_weight": self.layer.w13_weight, "w2_weight": self.layer.w2_weight}
        return {"x": self.x, "logits": self.logits, **weights}

    def run(self, mark: Callable[[], Any]) -> tuple[dict[str, Tensor], list[Any]]:
        """Results by name, and three marks: before, between and after forward and backward."""
        leaves, marks = self.leaves, [mark()]
        out = self.layer(self.x, self.logits)
        marks.append(mark())
        gradients = torch.autograd.grad(out, list(leaves.values()), self.grad)
        marks.append(mark())
        return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}, marks


def layer_of(
    experts: Experts, problem: Problem, rank: int, ranks: int, backend: str, most: int
) -> moe_ops.FusedMoE:
    """The layer that holds a rank's part of the experts."""
    where = {"dp_size": ranks, "dp_rank": rank, "ep_size": ranks, "ep_rank": rank}
    parallel = moe_ops.FusedMoEParallelConfig(**where, use_ep=ranks > 1, all2all_backend=backend)
    layer = moe_ops.FusedMoE(
        problem.num_experts,
        problem.top_k,
        problem.hidden_size,
        problem.intermediate_size,
        renormalize=True,
        activation=problem.activation,
        params_dtype=experts.w1.dtype,
        device=experts.w1.device,
        moe_parallel_config=parallel,
        max_num_tokens=most if ranks > 1 else None,
    )
    held = len(layer.w13_weight)
    part = slice(rank * held, (rank + 1) * held)
    for parameter, whole in ((layer.w13_weight, experts.w1), (layer.w2_weight, experts.w2)):
        parameter.data.copy_(whole[part])
    return layer


def rows_of(
    problem: Problem, tokens: int, backends: Sequence[str], device: torch.device
) -> Iterator[StepRow]:
    """A row for the one GPU and for each exchange, on all ranks of the default group.

    Raises:
        ArithmeticError: a result differs from that of the one GPU.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts = make_experts(problem, "bf16", device).loaded
    generator = torch.Generator(device).manual_seed(SEED + 1 + rank)
    x = make_inputs(problem, ranks * tokens, "uniform", device).x.view(ranks, tokens, -1)[rank]
    logits, grad = x.new_empty(tokens, problem.num_experts), torch.empty_like(x)
    for made in (logits, grad):
        made.normal_(generator=generator)
    leaves = [t.clone().requires_grad_() for t in (x, logits)]
    flops = 6 * tokens * problem.top_k * problem.hidden_size
    flops *= problem.w1_rows + problem.intermediate_size
    expected: dict[str, Tensor] = {}
    for impl in (ONE_GPU, *backends):
        place = (0, 1) if impl == ONE_GPU else (rank, ranks)
        backend = backends[0] if impl == ONE_GPU else impl
        step = Step(layer_of(experts, problem, *place, backend, tokens), *leaves, grad)
        results, _ = step.run(lambda: None)
        if impl == ONE_GPU:
            expected = results
        worst = max(_errors(results, expected, spread=impl != ONE_GPU))
        forward, backward = (slowest(part, device) for part in _times(step, device))
        yield StepRow(
            problem.name,
            tokens,
            impl,
            ranks=place[1],
            forward_us=forward,
            backward_us=backward,
            forward_tflop_per_s=flops / 3 / forward / 1e6,
            backward_tflop_per_s=flops / 1.5 / backward / 1e6,
            tflop_per_s=flops / (forward + backward) / 1e6,
            rel_err=worst,
        )


def _errors(
    results: dict[str, Tensor], expected: dict[str, Tensor], *, spread: bool
) -> Iterator[float]:
    """The relative error of each result; weights' gradients are sums over the ranks' tokens."""
    for name, actual in results.items():
        wanted = expected[name].float()
        if spread and name.endswith("weight"):
            dist.all_reduce(wanted)
            wanted = wanted.view(dist.get_world_size(), *actual.shape)[dist.get_rank()]
        error = relative_error(actual, wanted)
        if not error < MAX_REL_ERR:
            raise ArithmeticError(
                f"relative error of {name} must be below {MAX_REL_ERR}, got {error:.3g}"
            )
        yield error


def _times(step: Step, device: torch.device) -> tuple[list[float], list[float]]:
    """Microseconds of each forward and of each backward pass; ranks begin each step together."""
    on_gpu, ticks = device.type == "cuda", []

    def mark() -> Any:
        if not on_gpu:
            return 1e6 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    for number in range(WARM_UPS + STEPS if on_gpu else 1):
        dist.all_reduce(torch.zeros(1, device=device))
        marks = step.run(mark)[1]
        if number >= WARM_UPS or not on_gpu:
            ticks.append(marks)
    if not on_gpu:
        return [b - a for a, b, _ in ticks], [c - b for _, b, c in ticks]
    torch.cuda.synchronize()
    return (
        [1e3 * a.elapsed_time(b) for a, b, _ in ticks],
        [1e3 * b.elapsed_time(c) for _, b, c in ticks],
    )


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    command = parser(__doc__ or "", tokens="8192", models="qwen3-30b")
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    add_rank_options(command, BACKENDS)
    args = command.parse_args(arguments)
    for problem in args.problems:
        if problem.num_experts % args.ranks:
            command.error(f"--ranks must divide {problem.num_experts} experts, got {args.ranks}")
    return args


def _run(number: int, args: argparse.Namespace, store: str) -> None:
    """One rank."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, f"file://{store}", rank=number, world_size=args.ranks)
    path = record_path(args.output, "training_ranks.json") if on_gpu else None
    recorder = Recorder(path, KEY, Lines(COLUMNS, vars))
    for problem, tokens in product(args.problems, args.tokens):
        for row in rows_of(problem, tokens, args.backend, device):
            if number == 0:
                recorder.add([row])
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = options(arguments)
    gpus = torch.cuda.device_count()
    if 0 < gpus < args.ranks:
        print(f"--ranks {args.ranks} needs as many GPUs, found {gpus}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(partial(_run, args=args, store=f"{folder}/store"), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
