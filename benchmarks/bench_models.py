"""Time whole transformers models of real sizes with random weights: tokens per second.

Decode: one token for each of several sequences with a static cache of keys and values. Prefill: one
prompt. Each step runs eagerly, captured in a CUDA graph, and compiled and then captured. Runs merge
into one record, so that a long list can be timed in parts (``--time-budget-s``, ``--missing``).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import whole_models
from whole_models import HF_MXFP4, IMPLS, MXFP4, OURS, SPECS, Impl, Step

from moe_ops.bench.command import (
    RECORDED,
    Lines,
    Parser,
    Recorder,
    add_time_budget,
    checked,
    count,
    named_choice,
    one_or_more,
    progress,
)
from moe_ops.bench.harness import (
    FLUSH_BYTES,
    default_device,
    default_output,
    evict_cache,
    measure,
    record_path,
    relative_error,
)

MODEL_KEY = ("model", "layers", "phase", "M", "scheme", "impl", "mode")
MODES = ("eager", "captured", "compiled")
SCHEMES = ("bf16", "fp8_block128", "int8_w8a16", "int4_w4a16_g128", MXFP4)
REFERENCE = IMPLS["hf-grouped_mm"]
"""What the logits of others are compared with, on unquantized weights."""
ROOM = 4 * 2**30
"""Bytes that a GPU must have beside the weights, for the cache, activations and quantization."""
WIDTHS = {
    "model": 14, "layers": 6, "phase": 8, "M": 5, "scheme": 16, "impl": 14, "mode": 9,
    "tokens_per_s": 12, "time_us": 10, "runs": 5, "rel_diff": 9, "peak_gb": 8, "skipped": 8,
}  # fmt: skip


@dataclass(frozen=True)
class ModelRow:
    """One measured combination, or one that was skipped; the first seven fields are its key."""

    model: str
    layers: int
    """Layers of the model that were built; a model with fewer than published is otherwise whole."""
    phase: str
    """``decode`` or ``prefill``."""
    M: int
    """Sequences of a decode step, tokens of a prompt."""
    scheme: str
    impl: str
    mode: str
    skipped: str | None = None
    """The reason, if nothing was measured."""
    tokens_per_s: float | None = None
    time_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    runs: int = 0
    peak_bytes: int | None = None
    """Most that the allocator held, weights included, the benchmark's own buffer not."""
    weight_bytes: int | None = None
    rel_diff: float | None = None
    """Distance of the logits from those of `REFERENCE` on unquantized weights, relative to them."""
    active_experts: float | None = None
    """Experts with tokens, the mean over layers."""
    config: dict[str, Any] | None = None


class Part(NamedTuple):
    """Cases that share one set of weights."""

    model: str
    layers: int
    scheme: str
    impl: Impl
    cases: list[tuple[str, int, str]]
    """Phase, M and mode of each."""

    def row(self, case: tuple[str, int, str], **facts: Any) -> ModelRow:
        """The row of a case."""
        phase, m, mode = case
        return ModelRow(
            self.model, self.layers, phase, m, self.scheme, self.impl.name, mode, **facts
        )


def planned(args: argparse.Namespace, measured: set[tuple[Any, ...]]) -> Iterator[Part]:
    """The parts in order, without cases whose keys are ``measured``."""
    phases = [("decode", batch) for batch in args.batches]
    phases += [("prefill", tokens) for tokens in args.prefill]
    for model, scheme, impl in product(args.models, args.schemes, args.impls):
        published = SPECS[model].config(None).num_hidden_layers
        native = scheme == MXFP4 == SPECS[model].stored
        if impl is not OURS and (impl is HF_MXFP4) != native:
            continue  # it does not take these weights
        if impl is not OURS and not native and scheme != "bf16":
            continue
        part = Part(model, min(args.layers or published, published), scheme, impl, [])
        cases = ((phase, m, mode) for (phase, m), mode in product(phases, args.modes))
        for case in cases:
            row = part.row(case)
            if tuple(getattr(row, name) for name in MODEL_KEY) not in measured:
                part.cases.append(case)
        if part.cases:
            yield part


def skip_reason(part: Part, case: tuple[str, int, str], device: torch.device) -> str | None:
    """Why a case cannot be measured, as far as that is known before."""
    phase, _, mode = case
    if mode == "captured" and device.type != "cuda":
        return "a CUDA graph needs a GPU"
    return part.impl.decode_only if phase == "prefill" else None


def build(part: Part, device: torch.device) -> Any:
    """The model with random weights.

    Raises:
        ImportError: kernels that the implementation needs are not installed.
        MemoryError: the GPU is too small.
    """
    if part.impl is HF_MXFP4:
        whole_models.triton_kernels()
    model = whole_models.shell(SPECS[part.model], part.layers, torch.bfloat16, part.scheme)
    if device.type == "cuda":
        size, room = whole_models.size_of(model), torch.cuda.mem_get_info(device)[1]
        if size + ROOM > room:
            raise MemoryError(f"weights of {size / 1e9:.0f} GB on a GPU of {room / 1e9:.0f} GB")
    return whole_models.filled(model, device)


def step_of(model: Any, case: tuple[str, int, str], context: int) -> Step:
    """The step that a case times."""
    phase, m, _ = case
    if phase == "decode":
        return whole_models.decode(model, m, context)
    return whole_models.prefill(model, m)


Logits = dict[tuple[str, int], torch.Tensor]


def references(model: Any, part: Part, context: int) -> Logits:
    """The logits of each step on unquantized weights; none where the model has no such weights."""
    if part.scheme == MXFP4 == SPECS[part.model].stored:
        return {}
    model.set_experts_implementation(REFERENCE.experts)
    steps = dict.fromkeys(case[:2] for case in part.cases)
    return {key: step_of(model, (*key, ""), context).call().float() for key in steps}


def time_case(
    part: Part, model: Any, case: tuple[str, int, str], context: int, expected: Logits
) -> ModelRow:
    """Time one case.

    Raises:
        ArithmeticError: logits that are not finite.
    """
    device, (phase, m, mode) = default_device(), case
    step = step_of(model, case, context)
    with whole_models.routed(model) as active:
        step.call()
    call = torch.compile(step.call, dynamic=False) if mode == "compiled" else step.call
    release()
    evict_cache(device)  # whose buffer is there from now on, and is not counted
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    timing = measure(call, device, captured=mode != "eager")
    peak = None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - FLUSH_BYTES
    if not timing.output.isfinite().all():
        raise ArithmeticError("logits must be finite")
    logits = expected.get((phase, m))
    return part.row(
        case,
        tokens_per_s=1e6 * step.tokens / timing.time_us,
        **timing.times,
        peak_bytes=peak,
        weight_bytes=whole_models.size_of(model),
        rel_diff=None if logits is None else relative_error(timing.output, logits),
        active_experts=sum(active) / len(active) if active else None,
        config={
            "context": context if phase == "decode" else 0,
            "published_layers": SPECS[part.model].config(None).num_hidden_layers,
            "transformers": transformers.__version__,
        },
    )


def release() -> None:
    """Give back the memory of what no longer runs."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_part(part: Part, context: int, recorder: Recorder) -> None:
    """Record the rows of one part."""
    device = default_device()
    reasons = {case: skip_reason(part, case, device) for case in part.cases}
    recorder.add([part.row(case, skipped=why) for case, why in reasons.items() if why])
    part = part._replace(cases=[case for case, why in reasons.items() if not why])
    if not part.cases or recorder.out_of_time():
        return
    progress(f"making {part.model} with {part.layers} layers for {part.impl.name}, {part.scheme}")
    try:
        model = build(part, device)
        expected = references(model, part, context)
        whole_models.prepare(model, part.impl, part.scheme, SPECS[part.model].stored)
    except CANNOT as error:
        recorder.add([part.row(case, skipped=first_line(error)) for case in part.cases])
        return
    for case in part.cases:
        if recorder.out_of_time():
            return
        name = " ".join(map(str, (part.model, part.impl.name, part.scheme, *case)))
        progress(name)
        with recorder.attempt(name):
            try:
                row = time_case(part, model, case, context, expected)
            except torch.OutOfMemoryError as error:
                row = part.row(case, skipped=first_line(error))
            recorder.add([row])


CANNOT = (NotImplementedError, ImportError, MemoryError, torch.OutOfMemoryError)
"""Errors for which a model with some weights and implementation is left out of the record."""


def first_line(error: BaseException) -> str:
    """The first sentence of an error's text."""
    return str(error).partition("\n")[0].partition(". ")[0]


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; without a GPU the default is the tiny models."""
    cuda = torch.cuda.is_available()
    command = Parser(None, __doc__ or "")
    add = command.add_argument
    real = ("qwen3-30b-a3b", "gpt-oss-120b")
    lists = {
        "--model": ("models", named_choice("model", SPECS),
                    ",".join(real if cuda else [n for n in SPECS if n not in real])),
        "--scheme": ("schemes", named_choice("scheme", RECORDED), ",".join(SCHEMES)),
        "--impls": ("impls", named_choice("implementation", IMPLS), ",".join(IMPLS)),
        "--modes": ("modes", named_choice("mode", MODES), ",".join(MODES)),
        "--batches": ("batches", count, "1,8,64" if cuda else "1,3"),
        "--prefill": ("prefill", count, "4096" if cuda else "40"),
    }  # fmt: skip
    for option, (dest, read, default) in lists.items():
        text = "(default: %(default)s)"
        add(option, dest=dest, type=one_or_more(read), default=default, metavar="..,", help=text)
    add("--no-prefill", dest="prefill", action="store_const", const=[], help="decode only")
    add("--layers", type=checked(count), help="build fewer layers; nothing is scaled up")
    context = 512 if cuda else 20
    add("--context", type=checked(count), default=context, help="tokens in the cache before")
    add("--missing", action="store_true", help="only what the record does not have")
    add("--output", type=Path, default=default_output(), help="folder of the records")
    add_time_budget(command, "start no case after this long")
    args = command.parse_args(arguments)
    args.impls = [IMPLS[name] for name in args.impls]
    return args


def keys_in(path: Path | None) -> set[tuple[Any, ...]]:
    """The keys of a record's rows."""
    if path is None or not path.exists():
        return set()
    return {tuple(row[name] for name in MODEL_KEY) for row in json.loads(path.read_text())["rows"]}


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run all requested cases within the time budget; returns 1 after a failure."""
    args = options(arguments)
    path = record_path(args.output, "models.json")
    recorder = Recorder(path, MODEL_KEY, Lines(WIDTHS, _cells), args.time_budget_s)
    for part in planned(args, keys_in(path) if args.missing else set()):
        if recorder.out_of_time():
            print(f"no time left for {part.model}, {part.impl.name}, {part.scheme}, and the rest")
            break
        run_part(part, args.context, recorder)
        release()
    return recorder.conclude()


def _cells(row: ModelRow) -> dict[str, Any]:
    return {**asdict(row), "peak_gb": row.peak_bytes and row.peak_bytes / 1e9}


if __name__ == "__main__":
    sys.exit(main())
