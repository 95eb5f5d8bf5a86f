"""Every valid combination of modular kernel parts, from what they declare; one that takes notes."""

from __future__ import annotations

import inspect
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import moe_ops
from moe_ops import FusedMoEConfig, FusedMoEKernel
from moe_ops.pipeline import FusedMoEActivationFormat
from moe_ops.testing import Inputs, Problem, Roundings, make_inputs, quantize_inputs

BATCHED = FusedMoEActivationFormat.BatchedExperts
PUBLIC = [getattr(moe_ops.pipeline, name) for name in moe_ops.pipeline.__all__]


def concrete(base: type) -> tuple[type, ...]:
    """The public concrete subclasses of a class."""
    kinds = [c for c in PUBLIC if inspect.isclass(c) and issubclass(c, base)]
    return tuple(c for c in kinds if not inspect.isabstract(c))


EXPERTS = concrete(moe_ops.pipeline.FusedMoEExperts)
SIZES = {"max_num_tokens", "num_local_experts", "num_dispatchers", "rank"}
PREPARES = tuple(
    c
    for c in concrete(moe_ops.pipeline.FusedMoEPrepareAndFinalize)
    if set(inspect.signature(c).parameters) <= SIZES
)
"""Prepare-finalize classes that run alone on one rank; others wrap one, or need a process group."""
SEPARATE = (
    moe_ops.pipeline.GroupedGemmExperts,
    moe_ops.pipeline.BatchedGroupedGemmExperts,
    moe_ops.pipeline.NaiveBatchedExperts,
)
"""Experts whose documentation says that GEMM 1's product is rounded before the activation."""


def layer_config(problem: Problem, device: Any = "cpu") -> FusedMoEConfig:
    """The `FusedMoEConfig` of a problem, with which experts are built."""
    local = problem.num_local_experts or problem.num_experts
    gated = moe_ops.MoEActivation.from_str(problem.activation.split("(")[0]).is_gated
    return FusedMoEConfig(
        problem.num_experts, problem.top_k, problem.hidden_size, problem.intermediate_size, local,
        problem.activation, device, moe_ops.RoutingMethodType.Renormalize,
        in_dtype=problem.dtype, has_bias=problem.has_bias, is_act_and_mul=gated,
        max_num_tokens=capacity(problem),
    )  # fmt: skip


def capacity(problem: Problem) -> int:
    """Rows per expert, so many that no routing drops a row."""
    return max(1, problem.num_tokens * problem.top_k)


def build_prepare(kind: type, problem: Problem, asynchronous: bool = False) -> Any:
    """A prepare-finalize for a problem; with ``asynchronous`` on its own stream."""
    local = problem.num_local_experts or problem.num_experts
    sizes = dict(
        max_num_tokens=capacity(problem), num_local_experts=local, num_dispatchers=1, rank=0
    )
    part = kind(**{n: sizes[n] for n in inspect.signature(kind).parameters})
    return moe_ops.pipeline.AsyncPrepareAndFinalize(part) if asynchronous else part


def build_experts(kind: type, problem: Problem, quant_config: Any, device: Any = "cpu") -> Any:
    """Experts for a problem."""
    numbers = (capacity(problem), 1) if kind.activation_format() is BATCHED else ()
    return kind(layer_config(problem, device), quant_config, *numbers)


@cache
def example(kind: type) -> Any:
    """Example experts of a class, to query what they support."""
    return build_experts(kind, Problem(), moe_ops.FusedMoEQuantConfig("unquantized"))


@cache
def example_prepare(kind: type) -> Any:
    """An example prepare-finalize of a class."""
    return build_prepare(kind, Problem())


def fit(experts: type, prepare: type) -> bool:
    """Whether both are modular or both monolithic, with the same activation format."""
    modular = issubclass(prepare, moe_ops.pipeline.FusedMoEPrepareAndFinalizeModular)
    same = example_prepare(prepare).activation_format is experts.activation_format()
    return experts.is_monolithic() is not modular and same


def supported(experts: type, scheme: str, activation: str) -> bool:
    """Whether the class supports a scheme with an activation."""
    rule = moe_ops.get_scheme(scheme)
    config = layer_config(Problem(activation=activation))
    form = experts.activation_format()
    holds, reason = experts.is_supported_config(experts, config, rule.weight, rule.activation, form)
    assert holds is (reason is None)
    return holds


RULES = (
    (("experts", "prepare"), fit),
    (("experts", "scheme", "activation"), supported),
    (
        ("experts", "chunked"),
        lambda e, chunked: (
            not chunked or (not e.is_monolithic() and example(e).supports_chunking())
        ),
    ),
    (("experts", "asynchronous"), lambda e, wanted: not (wanted and e.is_monolithic())),
    (("experts", "shared"), lambda e, wanted: not (wanted and e.is_monolithic())),
    (("experts", "inplace"), lambda e, wanted: not (wanted and e.is_monolithic())),
    (("shared", "inplace"), lambda shared, inplace: not (shared and inplace)),
)
"""Rules for which factor values go together, from what the classes declare."""


def roundings(experts: type, problem: Problem, chunk_size: int | None = None) -> Roundings:
    """The roundings of an implementation."""
    batched, separate = experts.activation_format() is BATCHED, experts in SEPARATE
    return Roundings(separate, batched or separate, batched, chunk_size)


class Setup(NamedTuple):
    """A problem, and a kernel with the arguments of its ``apply``."""

    problem: Problem
    kernel: FusedMoEKernel
    inputs: Inputs
    config: moe_ops.FusedMoEQuantConfig
    exact: Inputs
    """The inputs for the oracle."""

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """The arguments of ``apply`` by name."""
        x, w1, w2, weights, ids, expert_map, _, _ = self.inputs
        given = dict(
            hidden_states=x, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids,
            activation=self.problem.activation, global_num_experts=self.problem.num_experts,
            expert_map=expert_map, apply_router_weight_on_input=self.problem.on_input,
        )  # fmt: skip
        return {**given, **changes}

    def apply(self, **changes: Any) -> Any:
        """Run the kernel."""
        return self.kernel.apply(**self.arguments(**changes))


@lru_cache(maxsize=16)
def _quantized(problem: Problem, device: str, seed: int) -> Any:
    """Inputs that neighbouring tests share: to quantize them takes as long as the experts do."""
    return quantize_inputs(problem, make_inputs(problem, device, seed))


def setup(
    problem: Problem,
    experts: type,
    device: Any = "cpu",
    prepare: type | None = None,
    asynchronous: bool = False,
    seed: int = 0,
    **kernel: Any,
) -> Setup:
    """A kernel of one class of experts, with the given or a matching prepare-finalize."""
    if prepare is None:
        prepare = next(p for p in PREPARES if fit(experts, p))
    quantized = tree_map_only(Tensor, torch.clone, _quantized(problem, str(device), seed))
    parts = (
        build_prepare(prepare, problem, asynchronous),
        build_experts(experts, problem, quantized.config, device),
    )
    return Setup(problem, FusedMoEKernel(*parts, **kernel), *quantized)


def twice(x: Tensor) -> Tensor:
    """A stand-in for shared experts."""
    return 2 * x


def router_logits(problem: Problem, device: Any) -> Tensor:
    """Router logits for experts that route themselves."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(problem.num_tokens, problem.num_experts, generator=generator).to(device)


class Recorder(moe_ops.pipeline.AsyncPrepareAndFinalize):
    """Notes what is started, and when hooks and receivers run."""

    def __init__(self, inner, events):
        super().__init__(inner)
        self.events, self.count = events, {"prepare": 0, "finalize": 0}

    def _noted(self, what, started):
        number = self.count[what]
        self.count[what] += 1
        hook, receiver = started
        self.events.append(f"start {what} {number}")
        return (
            lambda: (self.events.append(f"hook {what} {number}"), hook()),
            lambda: (self.events.append(f"receive {what} {number}"), receiver())[1],
        )

    def prepare_async(self, *arguments):
        return self._noted("prepare", super().prepare_async(*arguments))

    def finalize_async(self, *arguments):
        return self._noted("finalize", super().finalize_async(*arguments))
