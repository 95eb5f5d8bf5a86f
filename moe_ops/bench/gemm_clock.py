"""Times one expert GEMM under given tiles, for ``python -m moe_ops tune``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.bench.harness import default_device, measure
from moe_ops.bench.problems import Problem, make_experts, make_inputs
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import plain_name
from moe_ops.dispatch.tuned_file import Entry, TunedLayer
from moe_ops.pipeline.fused_experts import NOT_QUANTIZED
from moe_ops.pipeline.gemms import activated_product, expert_weights, gemm
from moe_ops.pipeline.no_ep import quantize_tokens
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.tensors import ExpertWeights, Routing, Rows, Tiles
from moe_ops.tuning.search import Subject, Trial

LAUNCHERS = ("expert_gemm", "scaled_gemm", "weight_only_gemm")
"""They remember what they chose."""
BUDGET_S = 0.05


class _Inputs(NamedTuple):
    """Of both GEMMs, and what comes out with the default tiles."""

    ids: Tensor
    rows: tuple[Rows, Rows]
    expected: tuple[Tensor, Tensor]


class GemmClock:
    """A `moe_ops.tuning.search.Clock`: CUDA graph replay with an evicted L2, the median.

    A trial runs as a file would have it run, and its result has to agree with the default's.

    Args:
        problem: the sizes of the layer.
        subject: the same, with its scheme and the GPU.
        timer: `harness.measure`, or what stands for it in tests.
    """

    def __init__(self, problem: Problem, subject: Subject, timer=measure) -> None:
        self.problem, self.subject, self.timer = problem, subject, timer
        self.device = default_device()
        experts = make_experts(problem, subject.scheme.name, self.device)
        self.config = experts.quant_config or NOT_QUANTIZED
        self.weights: ExpertWeights = expert_weights(experts.w1, experts.w2, self.config)
        self.inputs = lru_cache(maxsize=1)(self._inputs)

    @torch.no_grad()
    def __call__(self, trial: Trial) -> float:
        """Microseconds; infinite where tiles do not run, or compute something else."""
        inputs = self.inputs(trial.num_tokens)
        try:
            with _only(self._layer(trial)):
                space = self._space(inputs.ids, trial.tiles.block_m)
                timing = self.timer(
                    lambda: self._product(trial.gemm, inputs.rows[trial.gemm - 1], space),
                    self.device,
                    BUDGET_S,
                )
        except Exception as error:  # whatever a compiler or a driver says to tiles
            print(f"{trial}: {error!r:.200}", file=sys.stderr)
            return math.inf
        if not agree(timing.output, inputs.expected[trial.gemm - 1]):
            print(f"{trial}: another result than with the default tiles", file=sys.stderr)
            return math.inf
        return timing.time_us

    def _inputs(self, num_tokens: int) -> _Inputs:
        x, weights, ids, _ = make_inputs(self.problem, num_tokens, "uniform", self.device)
        scheme, experts = self.subject.scheme, self.problem.num_experts
        tokens = Rows(*quantize_tokens(x, self.config, Routing(weights, ids), experts, False))
        with _only():
            space = self._space(ids, self.subject.row_tile(num_tokens))
            h = self._product(1, tokens, space)
            between = Rows(h)
            if scheme.activation is not None:
                between = space.quantize(h, self.weights.a2_scale, scheme.activation)
            return _Inputs(ids, (tokens, between), (h, self._product(2, between, space)))

    def _space(self, ids: Tensor, row_tile: int) -> SlotRows:
        """With a choice of one row tile, twice: what a file says is not for a single one."""
        tiles, experts = (row_tile, row_tile), self.problem.num_experts
        plan = ops.plan_slots(ids, None, tiles, experts)
        return SlotRows(Tiles(plan, ids), tiles, experts)

    def _product(self, which: int, rows: Rows, space: SlotRows) -> Tensor:
        scheme, dtype = self.subject.scheme, torch.bfloat16
        if which == 2:
            return gemm(rows, self.weights.w2, space, 1, scheme, dtype)
        k = self.subject.top_k
        return activated_product(rows, self.weights.w1, space, k, scheme, dtype, "silu")

    def _layer(self, trial: Trial) -> TunedLayer:
        subject, tiles = self.subject, trial.tiles
        entry = Entry(trial.num_tokens, tiles, tiles)
        gpu = plain_name(subject.device.name)
        rest = (subject.scheme.name, subject.top_k, (), (entry,))
        return TunedLayer("trial", subject.sizes, gpu, *rest)


def agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether rows differ by roundings: two of each row's largest number. Nothing moves to a CPU.

    Both are roundings of float32 sums in different orders.
    """
    largest = expected.abs().amax(-1).float()
    error = (actual - expected).abs().amax(-1).float()
    return bool((error <= 2 * torch.finfo(expected.dtype).eps * largest).all())


@contextmanager
def _only(*layers: TunedLayer) -> Iterator[None]:
    """No files but these."""
    before = tuned.TABLES
    try:
        tuned.TABLES = tuned.tables(layers)
        _forget()
        yield
    finally:
        tuned.TABLES = before
        _forget()


def _forget() -> None:
    for name in LAUNCHERS:
        module = sys.modules.get(f"moe_ops.kernels.{name}")  # none on a CPU
        for value in list(vars(module).values()) if module else []:
            if hasattr(value, "cache_clear"):
                value.cache_clear()
