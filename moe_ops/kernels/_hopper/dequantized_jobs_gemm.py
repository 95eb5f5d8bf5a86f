"""Launchers of the kernels for few slots that dequantize weights in registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.hopper import HopperTiles
from moe_ops.dispatch.hopper_decode import JOB_CTAS, JOB_REGISTERS, Jobs, count_sums, divide_jobs
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._hopper.dequantized_gemm import (
    DequantizedConstants,
    TensorFacts,
    dequantized_constants,
    rows_in_16_bits,
    variant_of,
    with_shared_scale,
)
from moe_ops.kernels._hopper.dequantized_jobs import ROWS, WARPS
from moe_ops.kernels._hopper.dequantized_slot import hopper_decode_slot_kernel
from moe_ops.kernels._hopper.dequantized_sum import hopper_decode_sum_kernel
from moe_ops.kernels._runtime.cache_keys import KeyedConstants
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import all_dense, dense, dense_vectors, map_size
from moe_ops.scheme import get_scheme


@dataclass(frozen=True)
class JobConstants(KeyedConstants):
    """Constants of the kernels for few slots, beside the `DequantizedConstants` of the product."""

    COUNT: int
    """Slots."""
    BLOCKS: int
    """Programs per slot; with the weighted sum, programs of all slots."""
    STRIPS: int
    """Strips of 16 weight rows of a job."""
    PARTS: int
    """Parts of K of a slot, each a job."""
    PASSES: int
    """Passes of eight jobs."""
    CHUNKS: int
    """Chunks along K."""
    STEPS: int
    """Chunks of a job."""
    ROUNDS: int
    """Rounds of chunks of a pass."""
    DEPTH: int
    """Chunks of a round."""
    BUFFERS: int
    """Rounds for which there is shared memory."""
    FIRST: int
    """Rounds that are copied ahead."""
    SUMS: int
    """Places for the sums of a strip in a pass: see `count_sums`."""
    GROUPS: int
    """Groups along K of a weight row."""
    ROOM: bool
    """Whether every SM has room for programs of the next kernel."""
    EARLY: bool
    """Whether GEMM 2 reads ids and the weight before GEMM 1 has ended: see `GemmOperands.early`."""


@lru_cache(maxsize=4096)
def ready(
    problem: GemmProblem,
    tiles: HopperTiles,
    variant: TensorFacts,
    jobs: Jobs,
    groups: int,
    early: bool,
) -> Launch:
    """The launch of a problem's kernel."""
    total = jobs.passes * jobs.rounds
    common: DequantizedConstants = dequantized_constants(problem, tiles, variant)
    more = JobConstants(
        COUNT=problem.sizes.num_slots,
        BLOCKS=problem.weight[1] // tiles.block_n,
        STRIPS=jobs.strips,
        PARTS=jobs.parts,
        PASSES=jobs.passes,
        CHUNKS=jobs.chunks,
        STEPS=jobs.steps,
        ROUNDS=jobs.rounds,
        DEPTH=jobs.depth,
        BUFFERS=tiles.num_stages,
        FIRST=total if tiles.num_stages == total else tiles.num_stages - 1,
        SUMS=count_sums(jobs, tiles.num_stages, get_scheme(problem.scheme).weight),
        GROUPS=groups,
        ROOM=tiles.ctas < JOB_CTAS,
        EARLY=early,
    )
    kernel = hopper_decode_sum_kernel if problem.summed else hopper_decode_slot_kernel
    registers = JOB_REGISTERS[jobs.strips]
    return Launch(kernel, C=common, S=more, num_warps=WARPS.value, maxnreg=registers)


class DecodeJobs:
    """The kernel of a slot or the one with the weighted sum, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        self.problem, self.tiles = problem, plan.config
        sizes, quant = problem.sizes, get_scheme(problem.scheme).weight
        slots = sizes.num_slots if problem.summed else 1
        self.jobs = divide_jobs(sizes, quant, self.tiles.block_n // ROWS.value, slots)
        blocks = problem.weight[1] // self.tiles.block_n
        self.programs = blocks if problem.summed else blocks * sizes.num_slots

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """``out[s] = f(weights[s] * a[s // top_k] @ dequantized(w[e]).T + bias[e])``; or the sum.

        The sum is ``out = sum_j weights[j] * round(a[j] @ dequantized(w[e]).T + bias[e])``.
        """
        operands = with_shared_scale(operands, self.problem)
        weight = operands.weight
        w, scale, zeros = weight.data, dense(weight.scale), dense(weight.zero_point)
        _, topk_ids, expert_map = operands.tiles
        groups = scale.shape[1] if scale.ndim == 3 else 1
        early = operands.early and all_dense(weight.scale, weight.zero_point, topk_ids, expert_map)
        variant = variant_of(self.problem, operands)
        launch = ready(self.problem, self.tiles, variant, self.jobs, groups, early)
        rows, row_scale = rows_in_16_bits(operands, self.problem)
        if scale.dtype == torch.float8_e4m3fn:  # masked loads have no 8-bit zero
            scale = scale.view(torch.uint8)
        bias, weights, factors, ids, mapped = dense_vectors(
            weight.bias, operands.topk_weights, weight.global_scale, topk_ids, expert_map
        )
        launch(
            (self.programs,),
            rows,
            rows.stride(0),
            w,
            w.stride(0),
            scale,
            zeros,
            bias,
            weights,
            row_scale,
            out,
            factors,
            ids,
            mapped,
            map_size(expert_map, w.shape[0]),
            w.shape[0],
        )
