"""Outputs of the quantization operators."""

from __future__ import annotations

from torch import Tensor

from moe_ops import sizes
from moe_ops.scheme import Quant, parse_quant


def moe_quantize(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_local_experts: int,
    quant: str,
) -> tuple[Tensor, Tensor]:
    """A quantized row per row of ``x``, or with ``topk_weights`` per slot; and scales."""
    sizes.axes("x", x, 2)
    rows, width = x.shape
    sizes.row_scale(scale, parse_quant(quant), rows)
    if topk_weights is not None:
        sizes.shaped("topk_weights", topk_weights, rows, None)
        rows *= topk_weights.shape[1]
    _check_slots(topk_ids, expert_map, rows)
    return _rows_and_scales(x, rows, width, quant)


def activation_quantize(
    x: Tensor,
    scale: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_local_experts: int,
    activation: str,
    quant: str,
) -> tuple[Tensor, Tensor]:
    """A quantized row of the activation's width per row of ``x``, and scales."""
    sizes.axes("x", x, 2)
    rows, width = x.shape
    sizes.row_scale(scale, parse_quant(quant), rows)
    _check_slots(topk_ids, expert_map, rows)
    return _rows_and_scales(x, rows, sizes.activated_width("x", width, activation), quant)


def _check_slots(topk_ids: Tensor | None, expert_map: Tensor | None, rows: int) -> None:
    """Check that the rows are slots, or that each row has the same number of slots."""
    if topk_ids is None:
        return
    sizes.slots(topk_ids, expert_map)
    slots = topk_ids.numel()
    if type(slots) is int and type(rows) is int and slots % max(rows, 1):
        raise ValueError(
            f"topk_ids must have a multiple of the {rows} rows as entries, got shape "
            f"{tuple(topk_ids.shape)}"
        )


def _rows_and_scales(x: Tensor, rows: int, width: int, quant: str) -> tuple[Tensor, Tensor]:
    rule = parse_quant(quant)
    check_width(width, rule)
    scale = x.new_empty(rule.row_scale_shape(rows, width), dtype=rule.scale_dtype)
    return x.new_empty((rows, rule.data_width(width)), dtype=rule.dtype), scale


def check_width(width: int, rule: Quant) -> None:
    """ValueError for 4-bit rows with an odd number of columns."""
    if width % rule.element.values_per_byte:
        raise ValueError(f"x must have an even number of columns for 4-bit elements, got {width}")
