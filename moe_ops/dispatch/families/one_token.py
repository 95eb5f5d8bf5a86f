"""Hopper's kernels for one token: GEMM 1 with the activation, or GEMM 2 with the sum."""

from __future__ import annotations

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.base import (
    BOXES,
    DIRECT,
    FOLLOWS_LOAD,
    ONE_TOKEN,
    SUM,
    Condition,
    Family,
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
    vector_pieces,
)
from moe_ops.dispatch.problem import ALL, EACH, GemmProblem
from moe_ops.dispatch.tiles import next_power_of_2
from moe_ops.scheme import get_scheme


def _one_token_tiles(problem: GemmProblem, device: Device) -> HopperTiles:
    """The number of stages that leaves room on an SM for one CTA of each GEMM and the vectors."""
    gemm, quant = problem.gemm, get_scheme(problem.scheme).activation
    vectors = next_power_of_2(gemm.num_slots) if problem.summed else 1
    columns, steps = vector_pieces(gemm.k, gemm.itemsize, vectors)
    row = ROW_BYTES + (0 if quant is None or quant.shared_cols is None else 4)
    room = device.shared_memory // 2 - 1024 - OTHER_BYTES - PIECES * steps * columns * row
    stages = min(TOKEN_STAGES, room // (PIECES * TOKEN_ROWS * row + 16))
    return HopperTiles(TOKEN, 1, TOKEN_ROWS, 1, stages)


def _has_room(problem: GemmProblem, device: Device) -> bool:
    return _one_token_tiles(problem, device).num_stages >= LEAST_TOKEN_STAGES


def _scales_each_row(problem: GemmProblem, _: Device) -> bool:
    quant = get_scheme(problem.scheme).activation
    return quant is None or not quant.per_tensor and quant.shared_cols in (None, ROW_BYTES)


def _family(kernel: str, product: Condition, *, sums: bool) -> Family:
    conditions = (
        Condition("rows must have a scale each, or one for every 128 columns", _scales_each_row),
        served_by(90), FOLLOWS_LOAD, ONE_TOKEN, DIRECT, BOXES, WHOLE_BOXES,
        Condition(f"K must leave room for {LEAST_TOKEN_STAGES} stages, got {{problem.sizes.k}}",
                  _has_room),
    )  # fmt: skip
    return Family(
        kernel,
        "_hopper.one_token_gemm:TokenGemm",
        (product, OPERANDS),
        conditions,
        _one_token_tiles,
        quantizes=(EACH, ALL),
        buffers=lambda problem: (),
        sums=sums,
    )


FIRST = _family(
    TOKEN,
    Condition("GEMM 1 must have the activation", lambda p, _: p.activation != "" and not p.summed),
    sums=False,
)
SECOND = _family(TOKEN_SUM, SUM, sums=True)
