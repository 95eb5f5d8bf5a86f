"""The M = 1 decode kernels of Hopper: GEMM 1 with the activation, or GEMM 2 with the sum."""

from __future__ import annotations

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.base import (
    BOXES,
    DIRECT,
    FOLLOWS_LOAD,
    ONE_TOKEN,
    Family,
    Rule,
    served_by,
)
from moe_ops.dispatch.families.many_rows import OPERANDS, WHOLE_BOXES
from moe_ops.dispatch.hopper import (
    LEAST_TOKEN_STAGES,
    OTHER_BYTES,
    PIECES,
    ROW_BYTES,
    TOKEN,
    TOKEN_ROWS,
    TOKEN_STAGES,
    TOKEN_SUM,
    HopperTiles,
    KernelTiles,
    takes_one_token,
    vector_pieces,
)
from moe_ops.dispatch.plan import GemmPlan
from moe_ops.dispatch.problem import STORED, GemmProblem
from moe_ops.dispatch.tiles import next_power_of_2
from moe_ops.scheme import get_scheme


def _stages(problem: GemmProblem, device: Device) -> int:
    """Stages of weights beside the vectors, if one CTA of each GEMM is to fit on an SM."""
    gemm, quant = problem.gemm, get_scheme(problem.scheme).activation
    vectors = next_power_of_2(gemm.num_slots) if problem.summed else 1
    columns, steps = vector_pieces(gemm.k, gemm.itemsize, vectors)
    row = ROW_BYTES + (0 if quant is None or quant.shared_cols is None else 4)
    room = device.shared_memory // 2 - 1024 - OTHER_BYTES - PIECES * steps * columns * row
    return min(TOKEN_STAGES, room // (PIECES * TOKEN_ROWS * row + 16))


def _scales_of_rows(problem: GemmProblem, _: Device) -> bool:
    quant = get_scheme(problem.scheme).activation
    return quant is None or not quant.per_tensor and quant.shared_cols in (None, ROW_BYTES)


class OneToken(Family):
    """An M = 1 decode kernel, whose programs gather the token's experts themselves."""

    def tiles(self, problem: GemmProblem, device: Device) -> HopperTiles:
        """As many stages as fit."""
        return HopperTiles(TOKEN, 1, TOKEN_ROWS, 1, _stages(problem, device))

    def plan(self, problem: GemmProblem, tiles: KernelTiles, source: str) -> GemmPlan:
        """No scratch memory: the kernel quantizes the row."""
        return GemmPlan(self.kernel, tiles, problem.rows != STORED, 0, (), source)


RULES = (
    OPERANDS,
    Rule("products must not be of int8", lambda p, _: takes_one_token(get_scheme(p.scheme))),
    Rule("rows must have a scale each, or one for every 128 columns", _scales_of_rows),
    served_by(90), FOLLOWS_LOAD, ONE_TOKEN, DIRECT, BOXES, WHOLE_BOXES,
    Rule(f"K must be so short that {LEAST_TOKEN_STAGES} stages fit, got {{problem.sizes.k}}",
         lambda problem, device: _stages(problem, device) >= LEAST_TOKEN_STAGES),
)  # fmt: skip
LAUNCHER = "_hopper.token_gemm:TokenGemm"
FIRST = OneToken(TOKEN, LAUNCHER, (
    *RULES,
    Rule("GEMM 1 must have the activation", lambda p, _: p.activation != "" and not p.summed),
))  # fmt: skip
SECOND = OneToken(TOKEN_SUM, LAUNCHER, (
    *RULES, Rule("GEMM 2 must have the weighted sum", lambda p, _: p.summed),
), sums=True)  # fmt: skip
