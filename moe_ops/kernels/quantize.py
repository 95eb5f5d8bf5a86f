"""Launchers of quantization, with given scales or with scales from the data.

Scales of groups or rows need one launch, in which the row stays in registers. One scale for all
rows needs two: the first finds partial maxima, and every program of the second reduces them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.fake_impls.quantize import activation_quantize as empty_activated
from moe_ops.fake_impls.quantize import moe_quantize as empty_rows
from moe_ops.kernels._quantize.kernels import Split, amax_kernel, quantize_kernel, scaled_kernel
from moe_ops.kernels._quantize.rounding import rule_of
from moe_ops.kernels._quantize.rows import RowSource, row_constants
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, next_power_of_2, row_parts
from moe_ops.scheme import WHOLE, Quant, parse_quant, rounding

TILE, EACH = 2048, 16
"""Numbers per program, unless a group has more, and per thread: two 16-byte loads."""
PARTIALS, FEWEST_PARTIALS = 512, 8
"""Programs that find the largest magnitude: for all experts together, and at least per expert."""


@lru_cache(maxsize=1024)
def _quantize_launch(source: tuple, quant: str, width: int) -> tuple[Launch, Split]:
    """The kernel, and how its programs split rows."""
    rule = parse_quant(quant)
    cols, parts = rule.group.cols, 1
    if cols == WHOLE:
        cols, parts = row_parts(width)
    # With several parts a thread takes half as much of each: one load.
    count = max(1, TILE // cols // min(parts, 2))
    split = Split(cdiv(width, cols * parts), count, cols, parts)
    threads = count * cols * min(parts, 2) // EACH
    kernel = Launch(
        quantize_kernel,
        **row_constants(*source),
        RULE=rule_of(rule),
        SPLIT=split,
        num_warps=max(1, min(8 if cols <= 8192 else 16, threads // 32)),
    )
    return kernel, split


@lru_cache(maxsize=1024)
def _amax_launch(source: tuple, width: int) -> Launch:
    block = min(4096, next_power_of_2(width))
    return Launch(amax_kernel, **row_constants(*source), BLOCK=block, num_warps=warps(block))


@lru_cache(maxsize=1024)
def _scaled_launch(
    source: tuple, quant: str, width: int, partials: int | None
) -> tuple[Launch, Split]:
    """The kernel, and how its programs split rows; ``partials``: the most partials per expert."""
    cols = min(256, next_power_of_2(width))
    # Twice TILE, because every program reduces all partial maxima.
    split = Split(cdiv(width, cols), 2 * TILE // cols, cols)
    kernel = Launch(
        scaled_kernel,
        **row_constants(*source),
        PARTIALS=partials,
        PER_ROW=not parse_quant(quant).per_tensor,
        RULE=rule_of(parse_quant(quant)),
        SPLIT=split,
        num_warps=4,
    )
    return kernel, split


def warps(block: int) -> int:
    """Number of warps for a block: eight elements per thread, more if the block is long."""
    return max(1, min(16, block // 256))


def quantize_rows(
    rows: RowSource, scale: Tensor | None, quant: str, out: tuple[Tensor, ...]
) -> None:
    """Write the quantized rows and their scales."""
    (experts, count, width), rule = rows.shape, parse_quant(quant)
    q, row_scale = out
    if q.numel() == 0:
        if rule.scale_dtype == torch.float32:
            _scale_nothing(scale, rule, row_scale)
        return
    if rule.global_scale or (scale is None and not rule.per_tensor):
        kernel, split = _quantize_launch(rows.constants(), quant, width)
        grid = (cdiv(count * split.pieces, split.count), experts)
        kernel(grid, *rows.arguments(), dense(scale), q, row_scale, count)
        return
    scales, partials = _static_scale(rows, scale) if scale is not None else _partial_maxima(rows)
    kernel, split = _scaled_launch(rows.constants(), quant, width, partials)
    grid = (cdiv(count * split.pieces, split.count), experts)
    kernel(grid, *rows.arguments(), *scales, q, row_scale, count)


def shape_of_values(q: Tensor, quant: str) -> tuple[int, ...]:
    """The shape of ``q`` in numbers: 4-bit elements are stored two to a byte."""
    *rows, width = q.shape
    return (*rows, width * parse_quant(quant).element.values_per_byte) if quant else (*rows, width)


def _scale_nothing(scale: Tensor | None, quant: Quant, out: Tensor) -> None:
    """Write the scale of the tensor (or of each expert) if there are no rows."""
    if scale is None:
        out.copy_(rounding.scale_of(torch.zeros_like(out), quant))
    else:
        out.copy_(scale.reshape((-1,) + (1,) * (out.dim() - 1)))


def _static_scale(rows: RowSource, scale: Tensor) -> tuple[tuple[Any, ...], None]:
    """The given scales with the strides from expert to expert and from row to row."""
    experts, count, _ = rows.shape
    if scale.numel() == 1:
        strides = (0, 0)
    else:
        strides = (1, 0) if scale.numel() == experts > 1 else (count, 1)
    return (scale.contiguous(), *strides), None


def _partial_maxima(rows: RowSource) -> tuple[tuple[Any, ...], int]:
    """Launch the search for partial maxima: the bits found, and the most partials per expert."""
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
    """Quantize rows: one launch, or two if all rows share a scale from the data."""
    out = empty_rows(x, scale, topk_weights, topk_ids, expert_map, num_local_experts, quant)
    rows = RowSource(
        x,
        (1, *shape_of_values(out[0], quant)),
        topk_weights=topk_weights,
        top_k=1 if topk_weights is None else topk_weights.shape[1],
        topk_ids=topk_ids,
        expert_map=expert_map,
        num_local_experts=num_local_experts,
    )
    quantize_rows(rows, scale, quant, out)
    return out


def wide_rows(
    x: Tensor,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_local_experts: int,
    quant: Quant,
) -> tuple[Tensor, Tensor]:
    """`moe_quantize` with scales from the data, with the fp8 numbers held in bf16: one launch."""
    slots = (topk_ids, expert_map, num_local_experts)
    rows = RowSource(x, (1, *x.shape), None, None, None, 1, *slots)
    scale = x.new_empty(quant.row_scale_shape(*x.shape), dtype=quant.scale_dtype)
    out = x.new_empty(x.shape, dtype=torch.bfloat16), scale
    quantize_rows(rows, None, quant.key, out)
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
    """Apply the activation and quantize: one launch, or two if all rows share a scale from data."""
    out = empty_activated(x, scale, topk_ids, expert_map, num_local_experts, activation, quant)
    rows = RowSource(
        x,
        (1, *shape_of_values(out[0], quant)),
        activation,
        topk_ids=topk_ids,
        expert_map=expert_map,
        num_local_experts=num_local_experts,
    )
    quantize_rows(rows, scale, quant, out)
    return out
