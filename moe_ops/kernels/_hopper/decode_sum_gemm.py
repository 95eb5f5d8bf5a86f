"""Launcher of GEMM 2 with the weighted sum, for one token and packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.hopper import HopperTiles
from moe_ops.dispatch.hopper_decode import SUM_CTAS, SUM_WARPS, SumJobs, sum_jobs
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._hopper.decode_gemm import Constants, Variant, constants, variant_of, wide
from moe_ops.kernels._hopper.decode_sum import ROWS, WARPS, hopper_decode_sum_kernel
from moe_ops.kernels._hopper.early import all_dense, routing_was_read
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, map_size
from moe_ops.scheme import get_scheme

REGISTERS = 65536 // (SUM_CTAS * 32 * SUM_WARPS)
"""maxnreg: SUM_CTAS programs share the registers of an SM."""


@dataclass(frozen=True)
class SumConstants:
    """Constants of the kernel besides those of every GEMM with packed weights."""

    COUNT: int
    """Slots."""
    PARTS: int
    """Parts of K of a slot, each a job."""
    PASSES: int
    """Rounds of eight jobs."""
    CHUNKS: int
    """Chunks along K."""
    STEPS: int
    """Chunks of a job."""
    ROUNDS: int
    """Rounds of chunks of a job."""
    AHEAD: int
    """Chunks that are loaded at once."""
    GROUPS: int
    """Groups along K of a weight row."""
    WEIGHTED: bool
    """Whether routing weights multiply the results."""
    EARLY: bool
    """Whether ids and weights are read before GEMM 1 has ended: see `early`."""


@lru_cache(maxsize=4096)
def ready(
    problem: GemmProblem,
    tiles: HopperTiles,
    variant: Variant,
    jobs: SumJobs,
    groups: int,
    early: bool,
) -> Launch:
    """The launch of a problem's kernel."""
    common: Constants = constants(problem, tiles, variant)
    more = SumConstants(
        COUNT=problem.sizes.num_slots,
        PARTS=jobs.parts,
        PASSES=jobs.passes,
        CHUNKS=jobs.chunks,
        STEPS=jobs.steps,
        ROUNDS=jobs.rounds,
        AHEAD=jobs.ahead,
        GROUPS=groups,
        WEIGHTED=problem.weighted,
        EARLY=early,
    )
    how = {"num_warps": WARPS.value, "maxnreg": REGISTERS}
    return Launch(hopper_decode_sum_kernel, C=common, S=more, **how)


class DecodeSum:
    """The kernel, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        self.problem, self.tiles = problem, plan.config
        self.jobs = sum_jobs(problem.sizes, get_scheme(problem.scheme).weight)

    def __call__(self, out: Tensor, given: GemmOperands) -> None:
        """``out = sum_j weights[j] * round(a[j] @ dequantized(w[e]).T + bias[e])``."""
        w, scale, zeros = given.w, dense(given.w_scale), dense(given.w_zero_point)
        _, topk_ids, expert_map = given.tiles
        groups = scale.shape[1] if scale.ndim == 3 else 1
        read = (given.w_scale, given.w_zero_point, topk_ids, expert_map)
        early = all_dense(*read) and routing_was_read(topk_ids, expert_map)
        how = (variant_of(self.problem, given), self.jobs, groups, early)
        launch = ready(self.problem, self.tiles, *how)
        # After `early` is known: a kernel that quantizes ends the wait for GEMM 1, as GEMM 1 does.
        rows, row_scale = wide(given, get_scheme(self.problem.scheme).activation)
        if scale.dtype == torch.float8_e4m3fn:  # masked loads have no 8-bit zero
            scale = scale.view(torch.uint8)
        weights, factors = given.topk_weights, given.w_global_scale
        launch(
            (self.problem.sizes.n // ROWS.value,),
            rows,
            rows.stride(0),
            w,
            w.stride(0),
            scale,
            zeros,
            dense(given.bias),
            topk_ids if weights is None else dense(weights),
            row_scale,
            out,
            out if factors is None else dense(factors),
            dense(topk_ids),
            dense(expert_map),
            map_size(expert_map, w.shape[0]),
            w.shape[0],
        )
