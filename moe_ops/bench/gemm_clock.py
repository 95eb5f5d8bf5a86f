"""Timing of one expert GEMM with given tiles, for ``python -m moe_ops tune``."""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.bench.harness import default_device, measure
from moe_ops.bench.problems import Problem, make_experts, make_inputs
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.ops import STAGES
from moe_ops.pipeline.fused_experts import NOT_QUANTIZED
from moe_ops.pipeline.gemms import expert_weights, gemm_call, quantized
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.pipeline.token_rows import quantize_tokens
from moe_ops.scheme import is_packed
from moe_ops.tensors import ExpertWeights, Routing, Rows, Tiles
from moe_ops.tuning.search import Subject, Trial

BUDGET_S = 0.05


class _Inputs(NamedTuple):
    """Inputs of both GEMMs, and their results with the default tiles."""

    ids: Tensor
    rows: tuple[Rows, Rows]
    expected: tuple[Tensor, Tensor]


class GemmClock:
    """A `moe_ops.tuning.search.Clock`: median time of CUDA graph replays with an evicted L2.

    A trial runs with its own tiles, not with tuned ones; its result must agree with the default's.

    Args:
        problem: the sizes of the layer.
        subject: the same sizes with scheme and GPU.
        timer: `harness.measure`, or its replacement in tests.
    """

    def __init__(self, problem: Problem, subject: Subject, timer=measure) -> None:
        self.problem, self.subject, self.timer = problem, subject, timer
        self.device = default_device()
        self.launches = self.device.type == "cuda"  # a reference has no tiles
        experts = make_experts(problem, subject.scheme.key, self.device)
        experts = experts.packed(subject.packed(1), subject.packed(2))
        self.config = experts.quant_config or NOT_QUANTIZED
        self.weights: ExpertWeights = expert_weights(experts.w1, experts.w2, self.config)
        self.inputs = lru_cache(maxsize=1)(self._inputs)

    @torch.no_grad()
    def __call__(self, trial: Trial) -> float:
        """Microseconds; infinite if the tiles do not run, or if their result is wrong."""
        inputs = self.inputs(trial.num_tokens)
        try:
            space = self._space(inputs.ids)
            rows = inputs.rows[trial.gemm - 1]
            timing = self.timer(
                lambda: self._product(trial.gemm, rows, space, trial.tiles), self.device, BUDGET_S
            )
        except Exception as error:  # a compiler or a driver may reject tiles with any exception
            print(f"{trial}: {error!r:.200}", file=sys.stderr)
            return math.inf
        if not agree(timing.output, inputs.expected[trial.gemm - 1]):
            print(f"{trial}: another result than with the default tiles", file=sys.stderr)
            return math.inf
        return timing.time_us

    def _inputs(self, num_tokens: int) -> _Inputs:
        x, weights, ids, _ = make_inputs(self.problem, num_tokens, "uniform", self.device)
        scheme, experts = self.subject.scheme, self.problem.num_experts
        given, space = self.weights, self._space(ids)
        if is_packed(given.w1.data):  # the GEMM may quantize them
            how = (scheme, self.subject.top_k, self.problem.activation)
            tokens = quantized(x, given.a1_scale, given.w1, space, *how)
        else:
            routing = Routing(weights, ids)
            tokens = Rows(*quantize_tokens(x, self.config, routing, experts, False))
        h = self._product(1, tokens, space)
        between = Rows(h)
        if is_packed(given.w2.data):
            between = quantized(h, given.a2_scale, given.w2, space, scheme)
        elif scheme.activation is not None:
            between = space.quantize(h, given.a2_scale, scheme.activation)
        return _Inputs(ids, (tokens, between), (h, self._product(2, between, space)))

    def _space(self, ids: Tensor) -> SlotRows:
        experts, scheme = self.problem.num_experts, self.subject.scheme
        plan = ops.plan_slots(ids, None, experts, scheme.key, torch.bfloat16)
        return SlotRows(Tiles(plan, ids), experts)

    def _product(
        self, which: int, rows: Rows, space: SlotRows, config: KernelTiles | None = None
    ) -> Tensor:
        """Run GEMM 1 or 2 with its own tiles or with given ones; on the CPU there are no tiles."""
        first = which == 1
        weight = self.weights.w1 if first else self.weights.w2
        top_k, activation = (self.subject.top_k, self.problem.activation) if first else (1, "")
        operator, arguments = gemm_call(
            rows, weight, space, top_k, self.subject.scheme, torch.bfloat16, activation
        )
        if config is None or not self.launches:
            return operator(*arguments)
        name = operator.name().split("::")[1]
        launcher = getattr(import_module(f"moe_ops.kernels.{STAGES[name]}"), name)
        return launcher(*arguments, config=config)


def agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether rows differ by at most two roundings of the row's largest number.

    Both results are float32 sums in different orders, rounded. Compares on the tensors' device.
    """
    largest = expected.abs().amax(-1).float()
    error = (actual - expected).abs().amax(-1).float()
    return bool((error <= 2 * torch.finfo(expected.dtype).eps * largest).all())
