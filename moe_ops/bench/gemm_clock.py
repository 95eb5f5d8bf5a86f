"""Timing of one expert GEMM with given tiles, for ``python -m moe_ops tune``."""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.bench.harness import default_device, measure
from moe_ops.bench.layer_gemms import LayerGemms
from moe_ops.bench.problems import Problem, make_experts, make_inputs
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.tensors import Rows
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
        experts = experts.in_fragments([which for which in (1, 2) if subject.in_fragments(which)])
        weights = expert_weights(experts.w1, experts.w2, experts.quant_config)
        self.gemms = LayerGemms(subject.scheme, problem.top_k, problem.activation, weights)
        self.inputs = lru_cache(maxsize=1)(self._inputs)

    @torch.no_grad()
    def __call__(self, trial: Trial) -> float:
        """Microseconds; infinite if the tiles do not run, or if their result is wrong."""
        inputs = self.inputs(trial.num_tokens)
        try:
            space = self.gemms.space(inputs.ids)
            rows = inputs.rows[trial.gemm - 1]
            tiles = trial.tiles if self.launches else None
            timing = self.timer(
                lambda: self.gemms.product(trial.gemm, rows, space, tiles), self.device, BUDGET_S
            )
        except Exception as error:  # a compiler or a driver may reject tiles with any exception
            print(f"{trial}: {error!r:.200}", file=sys.stderr)
            return math.inf
        if not rows_agree(timing.output, inputs.expected[trial.gemm - 1]):
            print(f"{trial}: another result than with the default tiles", file=sys.stderr)
            return math.inf
        return timing.time_us

    def _inputs(self, num_tokens: int) -> _Inputs:
        x, _, ids, _ = make_inputs(self.problem, num_tokens, "uniform", self.device)
        gemms, space = self.gemms, self.gemms.space(ids)
        tokens = gemms.rows(1, x, space)
        h = gemms.product(1, tokens, space)
        between = gemms.rows(2, h, space)
        return _Inputs(ids, (tokens, between), (h, gemms.product(2, between, space)))


def rows_agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether rows differ by at most two roundings of the row's largest number.

    Both results are float32 sums in different orders, rounded. Compares on the tensors' device.
    """
    largest = expected.abs().amax(-1).float()
    error = (actual - expected).abs().amax(-1).float()
    return bool((error <= 2 * torch.finfo(expected.dtype).eps * largest).all())
