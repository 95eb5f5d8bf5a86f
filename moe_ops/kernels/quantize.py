"""Triton kernels of quantization: scales from the data of a group, a row, or all rows; or given.

A scale of a group or a row needs one pass: the row stays in registers. One scale for all rows needs
two launches: partial maxima first, which every program of the second one reduces in the same way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.fake_impls.quantize import activation_quantize as empty_activated
from moe_ops.fake_impls.quantize import moe_quantize as empty_rows
from moe_ops.kernels.dependent import take_turn
from moe_ops.kernels.launch import Launch
from moe_ops.kernels.rounding import (
    encode,
    magnitude,
    quantize_groups,
    rule_of,
    scale_of,
    stored_scale,
)
from moe_ops.kernels.rows import Rows, load_values, readable, row_constants
from moe_ops.kernels.slots import dense, next_power_of_2
from moe_ops.scheme import WHOLE, Quant, parse_quant, rounding

PARTIALS, FEWEST_PARTIALS = 512, 8
"""Programs that look for the largest magnitude: of all experts together, and at least of each."""


@triton.jit(do_not_specialize=["num_experts", "num_local_experts"])
def _quantize_kernel(
    x, slots, topk_weights, topk_ids, expert_map, counts, num_experts, num_local_experts,
    stride_expert, stride_row, WIDTH, global_scale, q, scale,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, UP: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr, GROUP: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program quantizes whole groups of one row, divided by a global scale if there is one."""
    take_turn()
    rank, piece, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = expert.to(tl.int64) * tl.num_programs(0) + rank
    col = piece * BLOCK + tl.arange(0, BLOCK)
    width = readable(
        topk_ids, expert_map, counts, num_experts, num_local_experts, WIDTH, expert, rank, SLOTS
    )
    value = load_values(
        x, slots, topk_weights, stride_expert, stride_row, WIDTH, expert, rank, row, col, width,
        TOP_K, UP, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA,
    )  # fmt: skip
    if global_scale is not None:
        value = tl.div_rn(value, tl.load(global_scale).to(tl.float32))
    GROUPS: tl.constexpr = BLOCK // GROUP
    stored, scales = quantize_groups(tl.reshape(value, (1, BLOCK)), GROUP, RULE)
    if RULE.kind == "fp4":
        even, odd = tl.split(tl.reshape(stored, (BLOCK // 2, 2)))
        pair = piece * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        both = (even | (odd << 4)).to(q.dtype.element_ty)
        tl.store(q + row * (WIDTH // 2) + pair, both, mask=pair < WIDTH // 2)
    else:
        stored = tl.reshape(stored, (BLOCK,)).to(q.dtype.element_ty)
        tl.store(q + row * WIDTH + col, stored, mask=col < WIDTH)
    group, num_groups = piece * GROUPS + tl.arange(0, GROUPS), (WIDTH + GROUP - 1) // GROUP
    scales = stored_scale(tl.where(width > 0, tl.reshape(scales, (GROUPS,)), 0.0), RULE)
    scales = scales.to(scale.dtype.element_ty)
    tl.store(scale + row * num_groups + group, scales, mask=group < num_groups)


@triton.jit(do_not_specialize=["num_experts", "num_local_experts", "max_rows"])
def _amax_kernel(
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


@triton.jit(do_not_specialize=["num_experts", "num_local_experts", "given_expert"])
def _scaled_kernel(
    x, slots, topk_weights, topk_ids, expert_map, counts, num_experts, num_local_experts,
    stride_expert, stride_row, WIDTH, given, given_expert, given_row, q, scale,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, UP: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr, PARTIALS: tl.constexpr, PER_ROW: tl.constexpr,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program quantizes a piece of one row with a scale that is known before.

    ``given`` holds scales, or (PARTIALS) each expert's ``given_expert`` partial maxima.
    """
    take_turn()
    rank, piece, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = expert.to(tl.int64) * tl.num_programs(0) + rank
    col = piece * BLOCK + tl.arange(0, BLOCK)
    width = readable(
        topk_ids, expert_map, counts, num_experts, num_local_experts, WIDTH, expert, rank, SLOTS
    )
    value = load_values(
        x, slots, topk_weights, stride_expert, stride_row, WIDTH, expert, rank, row, col, width,
        TOP_K, UP, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA,
    )  # fmt: skip
    if PARTIALS is None:
        own = tl.load(given + expert * given_expert + (rank // TOP_K) * given_row).to(tl.float32)
    else:
        part = tl.arange(0, PARTIALS)
        bits = tl.load(given + expert * given_expert + part, mask=part < given_expert, other=0)
        own = scale_of(tl.max(bits, 0).to(tl.float32, bitcast=True), RULE)
    ratio = tl.where(col < width, tl.div_rn(value, own), 0.0)
    stored = encode(ratio, RULE).to(q.dtype.element_ty)
    tl.store(q + row * WIDTH + col, stored, mask=col < WIDTH)
    if PER_ROW:
        tl.store(scale + row, tl.where(width > 0, own, 0.0), mask=piece == 0)
    else:
        tl.store(scale + expert, own, mask=(piece == 0) & (rank == 0))


@lru_cache(maxsize=1024)
def _quantize_launch(source: tuple, quant: str, width: int) -> tuple[Launch, int]:
    """The kernel, and the programs along a row."""
    rule, whole = parse_quant(quant), next_power_of_2(width)
    cols = rule.group.cols
    block = whole if cols == WHOLE else max(cols, min(1024, whole))
    kernel = Launch(
        _quantize_kernel,
        **row_constants(*source),
        GROUP=block if cols == WHOLE else cols,
        RULE=rule_of(rule),
        BLOCK=block,
        num_warps=warps(block),
    )
    return kernel, triton.cdiv(width, block)


@lru_cache(maxsize=1024)
def _amax_launch(source: tuple, width: int) -> Launch:
    block = min(4096, next_power_of_2(width))
    return Launch(_amax_kernel, **row_constants(*source), BLOCK=block, num_warps=warps(block))


@lru_cache(maxsize=1024)
def _scaled_launch(
    source: tuple, quant: str, width: int, partials: int | None
) -> tuple[Launch, int]:
    """The kernel, and the programs along a row; ``partials``: as many as an expert may have."""
    block = min(1024, next_power_of_2(width))
    kernel = Launch(
        _scaled_kernel,
        **row_constants(*source),
        PARTIALS=partials,
        PER_ROW=not parse_quant(quant).per_tensor,
        RULE=rule_of(parse_quant(quant)),
        BLOCK=block,
        num_warps=warps(block),
    )
    return kernel, triton.cdiv(width, block)


def warps(block: int) -> int:
    """Eight elements a thread, more where a row is long."""
    return max(1, min(16, block // 256))


def quantize_rows(rows: Rows, scale: Tensor | None, quant: str, out: tuple[Tensor, ...]) -> None:
    """Write the quantized rows and their scales."""
    (experts, count, width), rule = rows.shape, parse_quant(quant)
    q, row_scale = out
    if q.numel() == 0:
        if rule.scale_dtype == torch.float32:
            _scale_nothing(scale, rule, row_scale)
        return
    if rule.global_scale or (scale is None and not rule.per_tensor):
        kernel, pieces = _quantize_launch(rows.constants(), quant, width)
        kernel((count, pieces, experts), *rows.arguments(), dense(scale), q, row_scale)
        return
    given, partials = _given(rows, scale) if scale is not None else _partial_maxima(rows)
    kernel, pieces = _scaled_launch(rows.constants(), quant, width, partials)
    kernel((count, pieces, experts), *rows.arguments(), *given, q, row_scale)


def unpacked(q: Tensor, quant: str) -> tuple[int, ...]:
    """The shape of the numbers that are stored in ``q``."""
    *rows, width = q.shape
    return (*rows, 2 * width) if quant and parse_quant(quant).element.packed else (*rows, width)


def _scale_nothing(scale: Tensor | None, quant: Quant, out: Tensor) -> None:
    """The one scale (of each expert) where there are no rows."""
    if scale is None:
        out.copy_(rounding.scale_of(torch.zeros_like(out), quant))
    else:
        out.copy_(scale.reshape((-1,) + (1,) * (out.dim() - 1)))


def _given(rows: Rows, scale: Tensor) -> tuple[tuple[Any, ...], None]:
    """Scales that came in, and where an expert's and a row's are."""
    experts, count, _ = rows.shape
    if scale.numel() == 1:
        strides = (0, 0)
    else:
        strides = (1, 0) if scale.numel() == experts > 1 else (count, 1)
    return (scale.contiguous(), *strides), None


def _partial_maxima(rows: Rows) -> tuple[tuple[Any, ...], int]:
    """Bits of the largest magnitudes that each program found, and how many it may be."""
    experts, count, width = rows.shape
    most = max(FEWEST_PARTIALS, PARTIALS // next_power_of_2(experts))
    programs = min(most, count)
    partials = rows.x.new_empty(experts * programs, dtype=torch.int32)
    _amax_launch(rows.constants(), width)((programs, experts), *rows.arguments(), partials, count)
    return (partials, programs, 0), most


def moe_quantize(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_local_experts: int,
    quant: str,
) -> tuple[Tensor, Tensor]:
    """One launch; two where all rows share a scale that comes from the data."""
    out = empty_rows(x, scale, topk_weights, topk_ids, expert_map, num_local_experts, quant)
    rows = Rows(
        x,
        (1, *unpacked(out[0], quant)),
        topk_weights=topk_weights,
        top_k=1 if topk_weights is None else topk_weights.shape[1],
        topk_ids=topk_ids,
        expert_map=expert_map,
        num_local_experts=num_local_experts,
    )
    quantize_rows(rows, scale, quant, out)
    return out


def activation_quantize(
    x: Tensor,
    scale: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_local_experts: int,
    activation: str,
    quant: str,
) -> tuple[Tensor, Tensor]:
    """One launch; two where all rows share a scale that comes from the data."""
    out = empty_activated(x, scale, topk_ids, expert_map, num_local_experts, activation, quant)
    rows = Rows(
        x,
        (1, *unpacked(out[0], quant)),
        activation,
        topk_ids=topk_ids,
        expert_map=expert_map,
        num_local_experts=num_local_experts,
    )
    quantize_rows(rows, scale, quant, out)
    return out
