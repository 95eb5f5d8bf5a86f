"""Triton kernels of quantization: per group (or whole row), and with scales known before.

A group stays in registers while its scale is computed. A program takes pieces of several rows where
rows are short.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from moe_ops.kernels._quantize.rounding import (
    divide,
    divide_given,
    encode,
    magnitude,
    scale_of,
    stored_as,
    stored_scale,
)
from moe_ops.kernels._quantize.rows import load_values, readable
from moe_ops.kernels._runtime.dependent import take_turn


class Split(NamedTuple):
    """How rows are split among programs: a constant of a kernel."""

    pieces: int
    """Pieces per row."""
    count: int
    """Pieces per program, a power of two."""
    cols: int
    """Columns of a part of a piece, a power of two."""
    parts: int = 1
    """Parts per piece."""


@triton.jit
def find_pieces(num_rows, PIECES: tl.constexpr, COUNT: tl.constexpr):
    """The COUNT consecutive pieces of one expert's rows that this program takes.

    Returns their rows and their indices in these rows, both (COUNT, 1), and which pieces are real
    (COUNT,). Pieces past the last row are clamped to the last row, so that reading them is safe.
    """
    # Computed in steps: the program's first piece, program * COUNT, may exceed 2**31.
    program = tl.program_id(0)
    piece = program % PIECES * COUNT + tl.arange(0, COUNT)
    rank = program // PIECES * COUNT + piece // PIECES
    last = tl.minimum(rank, num_rows - 1)
    return last[:, None], (piece % PIECES)[:, None], rank < num_rows


@triton.jit
def store_values(q, stored, row, first, WIDTH, valid, RULE: tl.constexpr):
    """Store the values (ROWS, COLS) that `encode` returned, from column ``first`` on."""
    if RULE.kind == "fp4":
        PAIRS: tl.constexpr = stored.shape[1] // 2
        even, odd = tl.split(tl.reshape(stored, (stored.shape[0], PAIRS, 2)))
        stored, first, WIDTH = even | (odd << 4), first // 2, WIDTH // 2
    col = first + tl.arange(0, stored.shape[1])[None, :]
    inside = valid[:, None] & (col < WIDTH)
    tl.store(q + row * WIDTH + col, stored_as(stored, q.dtype.element_ty, RULE), mask=inside)


@triton.jit(do_not_specialize=["num_experts", "num_local_experts", "num_rows"])
def quantize_kernel(
    x, slots, topk_weights, topk_ids, expert_map, counts, num_experts, num_local_experts,
    stride_expert, stride_row, WIDTH, global_scale, q, scale, num_rows,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, UP: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr, RULE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program quantizes groups, perhaps of several rows; a piece of SPLIT is a group.

    Values are divided by the global scale first, if there is one.
    """
    take_turn()
    COUNT: tl.constexpr = SPLIT.count
    COLS: tl.constexpr = SPLIT.cols
    PARTS: tl.constexpr = SPLIT.parts
    expert = tl.program_id(1)
    rank, group, valid = find_pieces(num_rows, SPLIT.pieces, COUNT)
    row = expert.to(tl.int64) * num_rows + rank
    col = tl.arange(0, COLS)[None, :]
    width = readable(
        topk_ids, expert_map, counts, num_experts, num_local_experts, WIDTH, expert, rank, SLOTS
    )
    values, most = (), tl.zeros((COUNT, COLS), dtype=tl.int32)
    for part in tl.static_range(PARTS):
        value = load_values(
            x, slots, topk_weights, stride_expert, stride_row, WIDTH, expert, rank, row,
            (group + part) * COLS + col, width,
            TOP_K, UP, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA,
        )  # fmt: skip
        if global_scale is not None:
            value = tl.div_rn(value, tl.load(global_scale).to(tl.float32))
        most = tl.maximum(most, magnitude(value))
        values = values + (value,)
    own = scale_of(tl.max(most, 1).to(tl.float32, bitcast=True), RULE)
    for part in tl.static_range(PARTS):
        stored = encode(divide(values[part], own[:, None], RULE), RULE)
        store_values(q, stored, row, (group + part) * COLS, WIDTH, valid, RULE)
    used = tl.reshape(width, (COUNT,)) > 0
    own = stored_scale(tl.where(used, own, 0.0), RULE).to(scale.dtype.element_ty)
    first = expert.to(tl.int64) * num_rows * SPLIT.pieces + tl.program_id(0).to(tl.int64) * COUNT
    tl.store(scale + first + tl.arange(0, COUNT), own, mask=valid)


@triton.jit(do_not_specialize=["num_experts", "num_local_experts", "max_rows"])
def amax_kernel(
    x, slots, topk_weights, topk_ids, expert_map, counts, num_experts, num_local_experts,
    stride_expert, stride_row, WIDTH, partials, max_rows, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    UP: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds the largest magnitude of its share of one expert's rows."""
    take_turn()
    first, step, expert = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    last = max_rows
    if counts is not None:
        last = tl.minimum(max_rows, tl.load(counts + expert))
    most = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in range(0, (last - first + step - 1) // step):
        rank = first + i * step
        row = expert.to(tl.int64) * max_rows + rank
        width = readable(
            topk_ids, expert_map, counts, num_experts, num_local_experts, WIDTH, expert, rank, SLOTS
        )
        for at in range(0, width, BLOCK):
            value = load_values(
                x, slots, topk_weights, stride_expert, stride_row, WIDTH, expert, rank, row,
                at + tl.arange(0, BLOCK), width,
                TOP_K, UP, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA,
            )  # fmt: skip
            most = tl.maximum(most, magnitude(value))
    tl.store(partials + expert * step + first, tl.max(most, 0))


@triton.jit(do_not_specialize=["num_experts", "num_local_experts", "per_expert", "num_rows"])
def scaled_kernel(
    x, slots, topk_weights, topk_ids, expert_map, counts, num_experts, num_local_experts,
    stride_expert, stride_row, WIDTH, scales, per_expert, per_row, q, scale, num_rows,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, UP: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr, PARTIALS: tl.constexpr, PER_ROW: tl.constexpr,
    RULE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program quantizes pieces of rows with known scales.

    ``scales`` holds scales, or (PARTIALS) each expert's ``per_expert`` partial maxima.
    """
    take_turn()
    expert = tl.program_id(1)
    rank, piece, valid = find_pieces(num_rows, SPLIT.pieces, SPLIT.count)
    row = expert.to(tl.int64) * num_rows + rank
    col = piece * SPLIT.cols + tl.arange(0, SPLIT.cols)[None, :]
    width = readable(
        topk_ids, expert_map, counts, num_experts, num_local_experts, WIDTH, expert, rank, SLOTS
    )
    value = load_values(
        x, slots, topk_weights, stride_expert, stride_row, WIDTH, expert, rank, row, col, width,
        TOP_K, UP, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA,
    )  # fmt: skip
    if PARTIALS is None:
        at = scales + expert * per_expert
        if PER_ROW:
            at += rank // TOP_K * per_row
        own = tl.load(at).to(tl.float32)
        ratio = divide_given(value, own)
    else:
        part = tl.arange(0, PARTIALS)
        bits = tl.load(scales + expert * per_expert + part, mask=part < per_expert, other=0)
        own = scale_of(tl.max(bits, 0).to(tl.float32, bitcast=True), RULE)
        ratio = divide(value, own, RULE)
    stored = encode(tl.where(col < width, ratio, 0.0), RULE)
    store_values(q, stored, row, piece * SPLIT.cols, WIDTH, valid, RULE)
    if PER_ROW:
        tl.store(scale + row, tl.where(width > 0, own, 0.0), mask=valid[:, None] & (piece == 0))
    else:
        tl.store(scale + expert, own, mask=tl.program_id(0) == 0)
