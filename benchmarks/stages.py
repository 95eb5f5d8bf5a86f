"""Shared code of the single-stage benchmarks: which calls to time, and their times in a record.

Operators with row tiles, plans or kernels to choose are timed with the arguments that a layer gives
them: the layer runs once, and `recorded` keeps its calls. Nothing of the choice is made again here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops import ops
from moe_ops.bench.command import Lines, Recorder, parser
from moe_ops.bench.harness import KEY, Row, default_device, floor_us, measure, record_path
from moe_ops.bench.layer import moe_ops_layer
from moe_ops.bench.problems import Experts, Inputs, Problem, make_experts, make_inputs
from moe_ops.dispatch.device import Device, device_facts
from moe_ops.dispatch.gemm_plan import GemmPlan, plan_gemm
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.inspect.costs import math_of
from moe_ops.inspect.scratch import problem_of_call

MODELS, TOKENS = "qwen3-30b,mixtral", "1,64,4096"
"""Default problems: many small experts, and few large ones."""
WIDTHS = {
    "scheme": 18, "shape": 16, "M": 6, "routing": 8, "impl": 29, "kernel": 14, "time_us": 9,
    "p10_us": 9, "p90_us": 9, "GB/s": 8, "TFLOP/s": 8, "bound_us": 9, "of bound": 8,
}  # fmt: skip


class Case(NamedTuple):
    """One call to time."""

    name: str
    """The operator, as in `moe_ops.ops.STAGES`, with ``:variant`` after it; or a baseline."""
    call: Callable[[], Any]
    nbytes: int
    """The bytes that must move: inputs read once, outputs written once."""
    flops: int = 0
    math: str = "bf16"
    """Dtype of the products, as in `moe_ops.inspect.devices.MEASURED`."""
    problem: GemmProblem | None = None
    """What the launcher of an expert GEMM asks a plan for."""


@dataclass(frozen=True)
class StageRow(Row):
    """A row of ``stages.json``; ``floor_us`` is the lower bound of the one operator."""

    kernel: str | None
    """`GemmPlan.kernel` of an expert GEMM; its tiles and their source are in ``config``."""
    gb_per_s: float
    tflop_per_s: float


def nbytes(*values: Any) -> int:
    """Bytes of all tensors in ``values``."""
    return sum(leaf.nbytes for leaf in _pytree.tree_leaves(values) if isinstance(leaf, Tensor))


class Call(NamedTuple):
    """A call of an operator that was recorded."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def name(self) -> str:
        """As in `moe_ops.ops.STAGES`."""
        return self.operator.name().partition("::")[2]

    def again(self) -> Any:
        """The call, repeated."""
        return self.operator(*self.args, **self.kwargs)


class _Recorder(TorchDispatchMode):
    """Keeps the calls of one stage's operators."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage, self.calls = stage, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then keep the call."""
        call = Call(func, args, kwargs or {}, func(*args, **(kwargs or {})))
        if func.namespace == ops.NAMESPACE and ops.STAGES[call.name] == self.stage:
            self.calls.append(call)
        return call.out


@torch.no_grad()
def recorded(stage: str, run: Callable[[], Any]) -> list[Call]:
    """The calls of a stage's operators that ``run`` makes, in order."""
    with _Recorder(stage) as recorder:
        run()
    return recorder.calls


@lru_cache(maxsize=1)
def _experts(problem: Problem, scheme: str, device: torch.device) -> Experts:
    return make_experts(problem, scheme, device)


@dataclass(frozen=True)
class Layer:
    """One layer with one batch."""

    problem: Problem
    scheme: str
    """A name in `moe_ops.SCHEMES`, or ``bf16`` for unquantized bf16."""
    inputs: Inputs

    @property
    def experts(self) -> Experts:
        """The weights; those of the last layer asked for are kept."""
        return _experts(self.problem, self.scheme, self.inputs.x.device)

    def cases(self, stage: str, run: Callable[[], Any] | None = None) -> Iterator[Case]:
        """A stage's operators, each as ``run`` calls it; None: as `moe_ops.fused_experts` does."""
        seen: Counter[str] = Counter()
        for call in recorded(stage, run or moe_ops_layer(self.experts, self.inputs)):
            seen[call.name] += 1
            problem = problem_of_call(call.operator, call.args)
            if problem is None:
                yield Case(call.name, call.again, nbytes(call.args, call.kwargs, call.out))
            else:
                yield self._gemm(call, problem, seen[call.name])

    def _gemm(self, call: Call, problem: GemmProblem, number: int) -> Case:
        """The first or second expert GEMM: only the weights of experts with tokens are read."""
        num_experts, rows, k = problem.weight
        passed = zip(call.operator._schema.arguments, call.args, strict=False)
        weights = nbytes([x for argument, x in passed if argument.name == "weight"])
        rest = nbytes(call.args, call.out) - weights
        return Case(
            name=call.name if problem.summed else f"{call.name}:w{number}",
            call=call.again,
            nbytes=weights * self.inputs.num_active // num_experts + rest,
            flops=2 * problem.sizes.num_slots * rows * k,
            math=math_of(self.experts.scheme),
            problem=problem,
        )


MakeCases = Callable[[Layer], Iterable[Case]]


def main(stage: str, make_cases: MakeCases, schemes: Sequence[str] = ("bf16",)) -> None:
    """Time the cases of every requested shape, scheme, routing and number of tokens."""
    description = f"Time the operators of the stage {stage}."
    args = parser(description, tokens=TOKENS, cpu_tokens="1,64", models=MODELS).parse_args()
    device, path = default_device(), record_path(args.output, "stages.json")
    recorder = Recorder(path, KEY, Lines(WIDTHS, _cells), args.time_budget_s)
    for problem, scheme in product(args.problems, schemes):
        for routing, tokens in product(args.routing, args.tokens):
            if recorder.out_of_time():
                print(f"no time left for {scheme}, {problem.name}, {tokens} tokens, and the rest")
                return
            layer = Layer(problem, scheme, make_inputs(problem, tokens, routing, device))
            for case in make_cases(layer):
                recorder.add([_row(case, layer, routing)])


def plan_of(case: Case, device: Device) -> GemmPlan | None:
    """The plan that the launcher of an expert GEMM follows on a GPU."""
    return None if case.problem is None else plan_gemm(case.problem, device)


def _row(case: Case, layer: Layer, routing: str) -> StageRow:
    x = layer.inputs.x
    with torch.no_grad():
        timing = measure(case.call, x.device, budget_s=0.3)
    plan = plan_of(case, device_facts(x.device)) if x.is_cuda else None
    config: dict[str, Any] = {"active_experts": layer.inputs.num_active}
    if plan is not None:
        config |= {"tiles": asdict(plan.config), "tiles_from": plan.source}
    return StageRow(
        scheme=layer.scheme,
        shape=layer.problem.name,
        M=len(x),
        impl=case.name,
        routing=routing,
        **timing.times,
        rel_err=None,
        floor_us=floor_us(case.nbytes, case.flops, case.math),
        config=config,
        kernel=None if plan is None else plan.kernel,
        gb_per_s=1e-3 * case.nbytes / timing.time_us,
        tflop_per_s=1e-6 * case.flops / timing.time_us,
    )


def _cells(row: StageRow) -> dict[str, Any]:
    return {
        **asdict(row),
        "GB/s": row.gb_per_s,
        "TFLOP/s": row.tflop_per_s or None,
        "bound_us": row.floor_us,
        "of bound": row.floor_us and row.floor_us / row.time_us,
    }
