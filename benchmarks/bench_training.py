"""Time forward and backward of a layer: full fine-tuning, and adapters over frozen weights.

* ``all``: gradients of tokens, router weights and both weights, beside transformers' `grouped_mm`,
  Liger's experts and SonicMoE.
  ``6 * T * k * 3 * H * I`` flops: three products, each once forward and twice backward.
* ``adapters``: gradients of tokens, router weights and a LoRA adapter of rank r on both weights,
  which stay frozen in a scheme. ``4 * T * k * 3 * H * I`` flops, and ``6 * T * k * r * (2H + 3I)``
  for the adapter. transformers' `grouped_mm` is given ``W + B @ A``, as PEFT does.
* ``frozen``: the same without an adapter, so that the difference is the adapter's cost.

``--main-grads`` adds gradients of both weights (``all``) to float32 main gradients, in the kernels
(``moe_ops-main``) and by ``main_grad += grad`` (``moe_ops-added``).

Weights are larger than the L2 cache, so that nothing needs to be rotated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from main_grads import MAIN_GRADS
from peers import PEERS
from peers.trained import (
    TRAINED_PEERS,
    Differentiable,
    TrainedPeer,
    address,
    hf_adapted,
    hf_trained,
)
from torch import Tensor

import moe_ops
from moe_ops.bench.command import Recorder, add_names, parser, print_row, progress
from moe_ops.bench.harness import (
    KEY,
    Row,
    default_device,
    floor_us,
    measure,
    peak_bytes,
    record_path,
    relative_error,
)
from moe_ops.bench.layer import SAMPLED_TOKENS
from moe_ops.bench.problems import SEED, Experts, Inputs, Problem, make_experts, make_inputs
from moe_ops.training import ExpertLora

TRAINING_KEY = (*KEY, "trained", "mode")
TRAINED = {
    "all": ("x", "topk_weights", "w1", "w2"),
    "adapters": ("x", "topk_weights", "a1", "b1", "a2", "b2"),
    "frozen": ("x", "topk_weights"),
}
"""What is trained -> the tensors that have gradients. ``a1`` to ``b2`` are the adapter's factors,
``(1, E, r, K)`` and ``(1, E, N, r)``."""
MODES = ("eager", "captured")
SCALING = 2.0
"""Factor of the low-rank products: PEFT's ``lora_alpha / r`` for an alpha of twice the rank."""
MAX_REL_ERR = 0.02
"""Largest relative error of the output and of each gradient; a row with a larger one is not
recorded."""
WIDTHS = {
    "scheme": 15, "shape": 10, "M": 6, "routing": 8, "trained": 8, "impl": 13, "mode": 8,
    "time_us": 9, "p10_us": 9, "p90_us": 9, "runs": 5, "rel_err": 9, "tflop_per_s": 11,
    "x floor": 8, "x peer": 8, "peak_mb": 8, "saved_mb": 8, "formula_mb": 10,
}  # fmt: skip


@dataclass(frozen=True)
class TrainingRow(Row):
    """One forward and backward pass; ``floor_us`` is the lower bound of both together."""

    trained: str
    """A key of `TRAINED`."""
    mode: str
    """``eager`` or ``captured``."""
    tflop_per_s: float
    """The flops of the module's docstring over ``time_us``."""
    peak_bytes: int
    """Most memory of an eager step beyond what was there before, gradients included."""
    saved_bytes: int
    """What forward keeps for backward: all but weights and adapters."""
    formula_bytes: int
    """What SonicMoE keeps (arXiv 2512.14080): tokens and the product of the first GEMM in bf16,
    ``2 * T * H + 4 * T * k * I``."""


class Case(NamedTuple):
    """A layer with its tokens and the gradient of its result, for every implementation."""

    scheme: str
    problem: Problem
    experts: Experts
    """Weights as a layer keeps them, which may be in another form than the scheme's."""
    inputs: Inputs
    routing: str
    trained: str
    grad: Tensor
    """``(T, H)`` bf16."""
    factors: dict[str, Tensor]
    """The adapter by its names in `TRAINED`; empty if weights are trained."""

    @property
    def flops(self) -> int:
        """See the docstring of the module."""
        width, hidden = self.problem.intermediate_size, self.problem.hidden_size
        rows = self.problem.w1_rows
        slots, passes = self.inputs.topk_ids.numel(), 3 if self.trained == "all" else 2
        flops = 2 * passes * slots * (rows + width) * hidden
        if self.factors:
            flops += 6 * slots * self.factors["a1"].shape[2] * (2 * hidden + rows + width)
        return flops

    @property
    def nbytes(self) -> int:
        """Bytes that must move: active weights twice, gradients of weights, tokens and results."""
        active = 2 * self.inputs.num_active * self.experts.bytes_per_expert
        trained = self.experts.w1.nbytes + self.experts.w2.nbytes if self.trained == "all" else 0
        return active + trained + 4 * self.inputs.x.nbytes

    @property
    def formula_bytes(self) -> int:
        """See `TrainingRow.formula_bytes`."""
        size = self.inputs.x.element_size()
        return self.inputs.x.nbytes + size * self.inputs.topk_ids.numel() * self.problem.w1_rows


def make_case(case: Case, rank: int) -> Case:
    """The case with a random gradient, and with a random adapter if adapters are trained."""
    problem, experts, inputs = case.problem, case.experts, case.inputs
    generator = torch.Generator(inputs.x.device).manual_seed(SEED + 2)

    def random(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=inputs.x.dtype, device=inputs.x.device)
        return made.normal_(generator=generator)

    factors = {}
    if case.trained == "adapters":
        count, width, hidden = len(experts.w1), problem.intermediate_size, problem.hidden_size
        for number, (n, k) in enumerate(((problem.w1_rows, hidden), (hidden, width)), 1):
            factors[f"a{number}"] = random(1, count, rank, k) * k**-0.5
            factors[f"b{number}"] = random(1, count, n, rank) * rank**-0.5
    return case._replace(grad=random(*inputs.x.shape), factors=factors)


# Implementations


def moe_ops_trained(case: Case) -> Differentiable:
    """This library."""
    experts, inputs = case.experts, case.inputs
    tensors = {"w1": experts.w1, "w2": experts.w2, **inputs._asdict(), **case.factors}
    leaves = {name: tensors[name].detach().requires_grad_() for name in TRAINED[case.trained]}
    tensors.update(leaves)
    keywords: dict[str, Any] = {"quant_config": experts.quant_config}
    if case.factors:
        pairs = ((tensors["a1"], tensors["b1"]), (tensors["a2"], tensors["b2"]))
        keywords["lora"] = ExpertLora(*pairs, scaling=SCALING)
    arguments = [tensors[name] for name in ("x", "w1", "w2", "topk_weights", "topk_ids")]
    return Differentiable(lambda: moe_ops.fused_experts(*arguments, **keywords), leaves)


def grouped_mm_trained(case: Case) -> Differentiable:
    """The experts function `grouped_mm` of transformers, with adapters as PEFT runs them."""
    layer = ("grouped_mm", case.experts, case.inputs)
    if case.factors:
        return hf_adapted(*layer, case.factors, SCALING)
    return hf_trained(*layer, frozen=case.trained == "frozen")


def peer_trained(peer: TrainedPeer, case: Case) -> Differentiable:
    """A peer that computes the gradients of all weights."""
    return peer.make(case.experts, case.inputs)


OURS, GROUPED_MM = "moe_ops", "hf-grouped_mm"
IMPLS: dict[str, Callable[[Case], Differentiable]] = {
    OURS: moe_ops_trained,
    GROUPED_MM: grouped_mm_trained,
    **{n: partial(peer_trained, peer) for n, peer in {**TRAINED_PEERS, **MAIN_GRADS}.items()},
}


def missing(impl: str) -> str | None:
    """What is missing to run an implementation here."""
    peer = TRAINED_PEERS.get(impl) or PEERS.get(impl)
    return peer and peer.missing()


def runs(impl: str, mode: str, case: Case) -> bool:
    """Whether an implementation computes a case in a mode.

    Peers are timed eager only: `grouped_mm` and SonicMoE are not known to be capturable on sm_90,
    and Liger reads a number back on every call.
    """
    if impl == OURS or (impl in MAIN_GRADS and case.trained == "all"):
        return mode != "captured" or case.inputs.x.is_cuda
    computed = case.trained == "all" or impl not in (*TRAINED_PEERS, *MAIN_GRADS)
    return mode != "captured" and computed and case.scheme == "bf16"


def saved_bytes(layer: Differentiable, case: Case) -> int:
    """Bytes of storages that autograd holds after forward, without weights and given adapters."""
    experts, config = case.experts, case.experts.quant_config
    operands = [experts.w1, experts.w2, *case.factors.values()]
    operands += [t for t in config.tensors if t is not None]
    weights = set(map(address, operands))
    return sum(nbytes for place, nbytes in layer.kept().items() if place not in weights)


# References


def expected(case: Case, tokens: Tensor, expert: int) -> dict[str, Tensor]:
    """The sampled results in float32, on dequantized weights.

    Returns:
        ``out``, ``x`` and ``topk_weights``: the rows ``tokens`` of the output and of both
        gradients. All others: the gradient of one expert's part.
    """
    inputs, names = case.inputs, TRAINED[case.trained]
    x = inputs.x[tokens].float().requires_grad_()
    weights = inputs.topk_weights[tokens].float().requires_grad_()
    ids, out = inputs.topk_ids[tokens], torch.zeros_like(x)
    for number in ids.unique().tolist():
        row, slot = (ids == number).nonzero(as_tuple=True)
        y = _through(_parts(case, number), x[row], weights[row, slot])
        out = out.index_add(0, row, y)
    gradients = torch.autograd.grad(out, (x, weights), case.grad[tokens].float())
    of_tokens = dict(zip(("out", "x", "topk_weights"), (out.detach(), *gradients), strict=True))
    if case.trained == "frozen":
        return of_tokens
    row, slot = (inputs.topk_ids == expert).nonzero(as_tuple=True)
    parts = _parts(case, expert)
    trained = {name: parts[name].requires_grad_() for name in names if name in parts}
    y = _through(parts, inputs.x[row].float(), inputs.topk_weights[row, slot])
    of_expert = torch.autograd.grad(y, list(trained.values()), case.grad[row].float())
    return {**of_tokens, **dict(zip(trained, of_expert, strict=True))}


def _parts(case: Case, expert: int) -> dict[str, Tensor]:
    """Weights and adapter of one expert in float32, new tensors."""
    w1, w2 = case.experts.dense(expert)
    return {"w1": w1, "w2": w2, **{n: f[0, expert].float() for n, f in case.factors.items()}}


def _through(parts: dict[str, Tensor], x: Tensor, weights: Tensor) -> Tensor:
    """One expert's part of the layer's output: gated SiLU, times router weights."""
    w1, w2 = parts["w1"], parts["w2"]
    if "a1" in parts:
        w1 = w1 + SCALING * parts["b1"] @ parts["a1"]
        w2 = w2 + SCALING * parts["b2"] @ parts["a2"]
    gate, up = (x @ w1.t()).chunk(2, dim=-1)
    return weights[:, None] * ((torch.nn.functional.silu(gate) * up) @ w2.t())


def errors_of(case: Case, results: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of the output and of every gradient, on sampled tokens and one expert.

    Raises:
        ArithmeticError: one of them is too large, or a number is not finite.
    """
    device, count = case.inputs.x.device, len(case.inputs.x)
    tokens = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    tokens = tokens[:SAMPLED_TOKENS].to(device)
    expert = int(case.inputs.topk_ids[0, 0])
    errors = {}
    for name, exact in expected(case, tokens, expert).items():
        actual = results[name]
        if not actual.isfinite().all():
            raise ArithmeticError(f"{name} must be finite")
        errors[name] = relative_error(_sampled(name, actual, tokens, expert), exact)
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] < MAX_REL_ERR:
        raise ArithmeticError(
            f"relative error of {worst} must be below {MAX_REL_ERR}, got {errors[worst]:.3g}"
        )
    return errors


def _sampled(name: str, result: Tensor, tokens: Tensor, expert: int) -> Tensor:
    """The part of a result that `expected` computes."""
    if name in ("out", "x", "topk_weights"):
        return result[tokens]
    return result[expert] if name in ("w1", "w2") else result[0, expert]


# Measurements


def rows_of(case: Case, impl: str, modes: Sequence[str]) -> Iterator[TrainingRow]:
    """Time an implementation in each mode in which it runs; its memory is that of eager steps.

    Raises:
        ArithmeticError: see `errors_of`.
    """
    modes = [mode for mode in modes if runs(impl, mode, case)]
    if not modes:
        return
    what = f"{case.trained} of {case.problem.name} in {case.scheme}"
    progress(f"{impl}, {what} with {len(case.inputs.x)} tokens")
    device, layer = case.inputs.x.device, IMPLS[impl](case)
    call = partial(layer.step, case.grad)
    call()  # compiles, and allocates what stays
    memory: dict[str, Any] = {
        "peak_bytes": peak_bytes(call, device),
        "saved_bytes": saved_bytes(layer, case),
        "formula_bytes": case.formula_bytes,
    }
    config: dict[str, Any] = {"active_experts": case.inputs.num_active, "flops": case.flops}
    if case.factors:
        config["rank"] = case.factors["a1"].shape[2]
    for mode in modes:
        timing = measure(call, device, captured=mode == "captured")
        results = timing.output
        if layer.mains:  # sums of all calls by now
            for main in layer.mains.values():
                main.zero_()
            results = call()
        errors = errors_of(case, results)
        yield TrainingRow(
            case.scheme,
            case.problem.name,
            len(case.inputs.x),
            impl,
            case.routing,
            **timing.times,
            rel_err=max(errors.values()),
            floor_us=floor_us(case.nbytes, case.flops),
            config={**config, "errors": errors},
            trained=case.trained,
            mode=mode,
            tflop_per_s=case.flops / timing.time_us / 1e6,
            **memory,
        )


def planned(args: argparse.Namespace) -> Iterator[Case]:
    """The cases in order; weights are made once per scheme and problem."""
    device = default_device()
    for scheme, problem in product(args.schemes, args.problems):
        trained = [t for t in args.trained if t != "all" or scheme == "bf16"]
        if not trained:
            continue
        experts = make_experts(problem, scheme, device).loaded
        for what, routing, tokens in product(trained, args.routing, args.tokens):
            inputs = make_inputs(problem, tokens, routing, device)
            case = Case(scheme, problem, experts, inputs, routing, what, inputs.x, {})
            yield make_case(case, args.rank)


def print_times(rows: Sequence[TrainingRow], *, head: bool) -> None:
    """Print a line per row, with its ratios to the lower bound and to the best peer in its mode."""
    for number, row in enumerate(rows):
        ours = (OURS, *MAIN_GRADS)
        same = [r.time_us for r in rows if r.mode == row.mode and r.impl not in ours]
        peer = min(same, default=None)
        more = {
            "x floor": row.floor_us and row.time_us / row.floor_us,
            "x peer": peer and row.time_us / peer,
            **{f"{n}_mb": getattr(row, f"{n}_bytes") / 1e6 for n in ("peak", "saved", "formula")},
        }
        print_row({**asdict(row), **more}, WIDTHS, head=head and number == 0)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    command = parser(__doc__ or "", tokens="4096,32768", models="qwen3-30b")
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    usable = [impl for impl in IMPLS if impl not in MAIN_GRADS and missing(impl) is None]
    frozen = [name for name, s in moe_ops.SCHEMES.items() if s.weight and s.activation is None]
    lists = {
        "--trained": ("trained", "choice", TRAINED, ",".join(TRAINED), ""),
        "--scheme": ("schemes", "scheme", ("bf16", *frozen), "bf16,mxfp4_w4a16",
                     "of frozen weights under adapters; bf16 is also that of `all` "),
        "--impls": ("impls", "implementation", usable, ",".join(usable), ""),
        "--modes": ("modes", "mode", MODES, ",".join(MODES), ""),
    }  # fmt: skip
    for option, (dest, what, names, default, text) in lists.items():
        text += "(default: %(default)s)"
        add_names(command, option, what, names, default, text, dest=dest)
    command.add_argument("--rank", type=int, default=16, help="of the adapter (default: 16)")
    command.add_argument("--main-grads", action="store_true", help="also add to float32: see above")
    args = command.parse_args(arguments)
    args.impls = [*args.impls, *MAIN_GRADS] if args.main_grads else args.impls
    if args.rank < 1:
        command.error(f"--rank must be positive, got {args.rank}")
    for problem in args.problems:
        if problem.activation != "silu":
            command.error(f"the activation must be silu, got {problem.activation}: {problem.name}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all requested cases within the time budget; returns 1 after a failure."""
    args = options(arguments)
    path = record_path(args.output, "training.json")
    recorder = Recorder(path, TRAINING_KEY, print_times, args.time_budget_s)
    for case in planned(args):
        done: list[TrainingRow] = []
        for impl in args.impls:
            if recorder.out_of_time():
                break
            name = f"{impl} {case.scheme} {case.trained} {len(case.inputs.x)}"
            with recorder.attempt(name):
                done += rows_of(case, impl, args.modes)
        recorder.add(done)
    return recorder.conclude()


if __name__ == "__main__":
    sys.exit(main())
