"""Launchers of Hopper's M = 1 decode kernels: GEMM 1, and GEMM 2 with the weighted sum."""

from __future__ import annotations

from torch import Tensor

from moe_ops.dispatch.device import Device, device_facts
from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._hopper.boxes import Boxes
from moe_ops.kernels._hopper.one_token import hopper_token_kernel, hopper_token_sum_kernel
from moe_ops.kernels._hopper.one_token_sizes import TokenSizes, token_sizes
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import all_dense, dense_vectors, map_size

REGISTERS = {False: 96, True: 160}
"""maxnreg of GEMM 1 (False) and of GEMM 2 with the sum (True).

One CTA of each fits on an SM, two CTAs of GEMM 2 never do: otherwise an SM on which a CTA of GEMM 1
has ended would get two of them, and another SM none."""


class TokenGemm:
    """The M = 1 decode kernel for GEMM 1 or for GEMM 2 with the weighted sum, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        self.problem, self.stages = problem, plan.config.num_stages
        self.summed = problem.summed
        self.kernels: dict[bool, _Ready] = {}
        """Kernels, keyed by `GemmOperands.early`."""

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """``out[j] = f(weights[j] * a @ w[e].T + bias[e])``, ``e = topk_ids[0, j]``; or the sum.

        The sum is ``out = sum_j weights[j] * round(a[j] @ w[e].T + bias[e])``.
        """
        (w, bias, scale, *_), (_, topk_ids, expert_map) = operands.weight, operands.tiles
        early = operands.early and all_dense(scale, topk_ids, expert_map)
        ready = self.kernels.get(early)
        if ready is None:
            ready = _ready(self.problem, self.stages, early, device_facts(w.device))
            self.kernels[early] = ready
        num_experts = w.shape[0]
        a_scale, bias, w_scale, weights, ids, mapped = dense_vectors(
            operands.a_scale, bias, scale, operands.topk_weights, topk_ids, expert_map
        )
        ready.launch(
            (ready.programs,),
            operands.a.contiguous(),
            a_scale,
            ready.boxes.of(w),
            bias,
            w_scale,
            out,
            weights,
            ids,
            mapped,
            map_size(expert_map, num_experts),
            num_experts,
        )


class _Ready:
    """A kernel with its constants, its number of programs, and a cache of TMA descriptors."""

    def __init__(self, launch: Launch, sizes: TokenSizes, programs: int) -> None:
        self.launch, self.programs = launch, programs
        self.boxes = Boxes(lambda w: sizes.weight_box(w, sizes.BOX_ROWS))


def _ready(problem: GemmProblem, stages: int, early: bool, facts: Device) -> _Ready:
    """Build a kernel; ``early``: GEMM 2 reads what `GemmOperands.early` allows."""
    sizes = token_sizes(problem, stages, early, facts)
    kernel = hopper_token_sum_kernel if problem.summed else hopper_token_kernel
    launch = Launch(kernel, G=sizes, num_warps=4, maxnreg=REGISTERS[problem.summed])
    return _Ready(launch, sizes, facts.processors)
