"""Time decode steps of whole transformers models whose experts are in host memory.

Models have real sizes and random weights. Routers choose experts that are drawn anew in each step
(`drawn_routings.py`). Each model is built on the GPU and runs with all experts there; then with a
share of each layer's experts; then with a share of the layers, and the experts of other layers
copied before each forward (`moved_weights.py`); and as accelerate does that, if it is installed.
All shares take the same memory. Steps are captured in a CUDA graph, except accelerate's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import bench_models
import torch
import whole_models
from drawn_routings import ROUTINGS, DrawnRouters
from moved_weights import ACCELERATE, COPIES, CopiedLayers, with_accelerate
from torch import Tensor
from whole_models import MXFP4, OURS, SPECS

import moe_ops
from moe_ops.bench import command, harness
from moe_ops.bench.command import checked, count, named_choice, one_or_more

KEY = ("model", "layers", "scheme", "share", "routing", "M", "impl")
ALL = "all-resident"
IMPLS = (ALL, OURS.name, COPIES, ACCELERATE)
CASES = {
    "gpt-oss-120b": ((MXFP4, 0.5),),
    "qwen3-30b-a3b": (("bf16", 0.25), ("int4_w4a16_g128", 0.25)),
}
"""Schemes and shares of each model if none are named."""
TINY_CASES = {"tiny-gpt-oss": ((MXFP4, 0.5),), "tiny-qwen3": (("bf16", 0.5), ("int8_w8a16", 0.5))}
DRAWS = 512
"""Steps with draws of their own."""
MOST_STEPS = {COPIES: 8, ACCELERATE: 2}
"""Most timed steps of what copies the same bytes in each."""
WIDTHS = {
    "model": 14, "layers": 6, "scheme": 16, "share": 6, "routing": 8, "M": 4, "impl": 14,
    "tokens_per_s": 12, "time_us": 10, "hit_rate": 8, "copied_gb": 9, "gpu_gb": 7, "same_bits": 9,
    "skipped": 8,
}  # fmt: skip


@dataclass(frozen=True)
class HostModelRow:
    """One measured combination, or one that was skipped; the first seven fields are its key."""

    model: str
    layers: int
    """Layers that were built."""
    scheme: str
    share: float
    """Experts of each layer on the GPU; for copied layers: layers on the GPU."""
    routing: str
    M: int
    """Sequences of a step."""
    impl: str
    published_layers: int
    skipped: str | None = None
    """The reason, if nothing was measured."""
    captured: bool = False
    runs: int = 0
    """Steps that were timed, of which each wants other experts."""
    tokens_per_s: float | None = None
    """Tokens of all sequences in a step over ``time_us``, the average time of a step."""
    time_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    """Deciles of the times of steps."""
    hit_rate: float | None = None
    copied_gb: float | None = None
    """Gigabytes that a step copies to the GPU."""
    gpu_gb: float | None = None
    """Gigabytes that the allocator held at most while steps ran."""
    same_bits: bool | None = None
    """Whether the first step's logits are, bit for bit, those with all experts on the GPU."""


class Case(NamedTuple):
    """A model with its weights."""

    name: str
    model: Any
    scheme: str
    share: float
    batches: list[int]
    routings: list[str]
    context: int
    steps: int

    def row(self, routing: str, m: int, impl: str, **facts: Any) -> HostModelRow:
        """The row of a step."""
        published = SPECS[self.name].config(None).num_hidden_layers
        return HostModelRow(
            self.name,
            self.model.config.num_hidden_layers,
            self.scheme,
            self.share,
            routing,
            m,
            impl,
            published,
            **facts,
        )


Logits = dict[tuple[str, int], Tensor]


def ready(
    call: Callable[[], Tensor], device: torch.device, warm_ups: int, *, captured: bool
) -> Callable[[], Any]:
    """A step that has run ``warm_ups`` times; a replay of its CUDA graph if it is ``captured``."""
    run: Callable[[], Any] = harness.captured(call, device, 1)[0] if captured else call
    for _ in range(warm_ups):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return run


def time_steps(run: Callable[[], Any], device: torch.device, steps: int) -> list[float]:
    """Microseconds of each step."""
    if device.type != "cuda":
        return harness.wall_times(run, steps)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    return [1e3 * start.elapsed_time(end) for start, end in pairwise(events)]


def timed(case: Case, impl: str, expected: Logits, copied: int = 0) -> Iterator[HostModelRow]:
    """Time the steps of a model as it is; the first implementation writes ``expected``.

    Args:
        case: the model.
        impl: what runs.
        expected: logits of first steps.
        copied: bytes that each step copies, if they are the same in each.
    """
    for routing, m in product(case.routings, case.batches):
        routers = DrawnRouters(whole_models.moe_blocks(case.model), routing, m, DRAWS)
        step = whole_models.decode(case.model, m, case.context)

        def call(routers: Any = routers, step: Any = step) -> Tensor:
            routers.advance()
            return step.call()

        first = call().clone()
        same = torch.equal(first, expected.setdefault((routing, m), first))
        facts = measured(case, impl, call, copied)
        tokens_per_s = 1e6 * m / facts["time_us"]
        yield case.row(routing, m, impl, tokens_per_s=tokens_per_s, same_bits=same, **facts)
        routers.remove()
        bench_models.release()


def measured(case: Case, impl: str, call: Callable[[], Tensor], copied: int) -> dict[str, Any]:
    """Times of steps, and what they hit, copied and held."""
    device, model = case.model.device, case.model
    cuda, own = device.type == "cuda", impl == OURS.name
    steps = min(case.steps, MOST_STEPS.get(impl, case.steps))
    warm_ups = 1 if impl in MOST_STEPS else case.steps
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    run = ready(call, device, warm_ups, captured=cuda and impl != ACCELERATE)
    before = moe_ops.offload_stats(model)
    times = time_steps(run, device, steps)
    after = moe_ops.offload_stats(model)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    size = (after.bytes_copied - before.bytes_copied) / steps if own else copied
    return {
        "time_us": statistics.fmean(times), "p10_us": deciles[0], "p90_us": deciles[-1],
        "runs": steps, "captured": cuda and impl != ACCELERATE, "copied_gb": size / 1e9,
        "hit_rate": hits / max(1, hits + misses) if own else None,
        "gpu_gb": torch.cuda.max_memory_allocated(device) / 1e9 if cuda else None,
    }  # fmt: skip


def moved(case: Case) -> list[Any]:
    """The experts modules of the layers that do not stay on the GPU: the last ones."""
    experts = [block.experts for block in whole_models.moe_blocks(case.model)]
    return experts[round(case.share * len(experts)) :]


def run_case(case: Case, impls: Sequence[str]) -> Iterator[HostModelRow]:
    """Rows of a model whose experts are all on the device, in the order of `IMPLS`."""
    device, expected = case.model.device, {}
    rows = list(timed(case, ALL, expected))  # also what others are compared with
    yield from rows if ALL in impls else ()
    if OURS.name in impls:
        command.progress(f"moving experts of {case.name} to host memory")
        moe_ops.offload_(case.model, resident=case.share, progress=False)
        yield from timed(case, OURS.name, expected)
        moe_ops.offload_(case.model, resident=1.0, progress=False)
        bench_models.release()
    if COPIES in impls:
        command.progress(f"moving layers of {case.name} to host memory")
        layers = CopiedLayers(moved(case), device)
        bench_models.release()
        yield from timed(case, COPIES, expected, layers.nbytes)
        layers.remove(device)
    if ACCELERATE in impls:
        yield from _accelerated(case, expected)


def _accelerated(case: Case, expected: Logits) -> Iterator[HostModelRow]:
    command.progress(f"{case.name} with the hooks of accelerate")
    modules = moved(case)
    size = sum(x.nbytes for module in modules for x in module.parameters())
    try:
        with_accelerate(modules, case.model.device)
        yield from timed(case, ACCELERATE, expected, size)
    except Exception as error:  # accelerate may be missing, and hooks may not know these modules
        if not isinstance(error, ImportError):
            traceback.print_exc()
        why = f"{type(error).__name__}: {bench_models.first_line(error)}"
        for routing, m in product(case.routings, case.batches):
            yield case.row(routing, m, ACCELERATE, skipped=why)


def build(name: str, layers: int | None, scheme: str, device: torch.device) -> Any:
    """The model with random weights, all of them on the device."""
    published = SPECS[name].config(None).num_hidden_layers
    part = bench_models.Part(name, min(layers or published, published), scheme, OURS, [])
    model = bench_models.build(part, device)
    whole_models.prepare(model, OURS, scheme, SPECS[name].stored)
    return model


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; without a GPU the default is the tiny models."""
    cuda = torch.cuda.is_available()
    parser = command.Parser(None, __doc__ or "")
    add, text = parser.add_argument, "(default: %(default)s)"
    lists = {
        "models": ("model", SPECS, ",".join(CASES if cuda else TINY_CASES)),
        "schemes": ("scheme", command.RECORDED, None),
        "routings": ("routing", ROUTINGS, ",".join(ROUTINGS)),
        "impls": ("implementation", IMPLS, ",".join(IMPLS)),
    }
    for dest, (what, names, default) in lists.items():
        option = "--impls" if dest == "impls" else f"--{dest[:-1]}"
        shown = text if default else "(default: as in the guide's table)"
        read = one_or_more(named_choice(what, names))
        add(option, dest=dest, type=read, default=default, metavar="..,", help=shown)
    share = "experts on the GPU, such as 0.25 (default: as in the guide's table)"
    add("--resident", type=checked(command.amount), metavar="SHARE", help=share)
    number, context, steps = checked(count), 512 if cuda else 20, 128 if cuda else 6
    batches = "1,8" if cuda else "1"
    add("--batches", type=one_or_more(count), default=batches, metavar="M,..", help=text)
    add("--layers", type=number, help="build fewer layers; nothing is scaled up")
    add("--context", type=number, default=context, help=f"cached tokens {text}")
    add("--steps", type=number, default=steps, help=f"timed steps {text}")
    add("--output", type=Path, default=harness.default_output(), help="folder of the records")
    command.add_time_budget(parser, "start no model after this long")
    return parser.parse_args(arguments)


def cases_of(args: argparse.Namespace) -> Iterator[tuple[str, str, float]]:
    """Model, scheme and share of each case."""
    for name in args.models:
        default = {**CASES, **TINY_CASES}[name]
        for scheme in args.schemes or [scheme for scheme, _ in default]:
            share = args.resident or dict(default).get(scheme, default[0][1])
            if not isinstance(share, float) or not 0 < share < 1:
                raise SystemExit(f"--resident must be a share in (0, 1) such as 0.25, got {share}")
            yield name, scheme, share


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run all requested cases within the time budget; returns 1 after a failure."""
    args, device = options(arguments), harness.default_device()
    path = harness.record_path(args.output, "host_models.json")
    recorder = command.Recorder(path, KEY, command.Lines(WIDTHS), args.time_budget_s)
    for name, scheme, share in cases_of(args):
        if recorder.out_of_time():
            print(f"no time left for {name} in {scheme}, and the rest")
            break
        try:
            command.progress(f"making {name} in {scheme}")
            model = build(name, args.layers, scheme, device)
            case = Case(
                name, model, scheme, share, args.batches, args.routings, args.context, args.steps
            )
            for row in run_case(case, args.impls):
                recorder.add([row])
        except Exception as error:  # one failure must not lose the rows of other cases
            traceback.print_exc()
            recorder.failed.append(f"{name} {scheme}: {bench_models.first_line(error)}")
        model = case = None  # noqa: F841 (its memory is needed)
        bench_models.release()
    return recorder.conclude()


if __name__ == "__main__":
    sys.exit(main())
