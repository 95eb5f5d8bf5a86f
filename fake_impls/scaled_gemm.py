"""Output of the expert GEMM with two quantized operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.scheme import get_scheme
from moe_ops.tensors import AnyTiles


def scaled_matmul(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str = "",
) -> Tensor:
    """``(slots, N)``, or ``(slots, I)`` with a gated activation, in slot order."""
    weight, tiles = (w, w_scale, w_global_scale), (plan, topk_ids, expert_map)
    slots = num_slots(a, a_scale, weight, bias, tiles, row_tiles, top_k, scheme)
    return a.new_empty(slots, sizes.activated("w", w.shape[1], activation), dtype=out_dtype)


def num_slots(
    a: Tensor,
    a_scale: Tensor | None,
    weight: tuple[Tensor, Tensor, Tensor | None],
    bias: Tensor | None,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
) -> int:
    """The number of slots; ValueError if sizes disagree, or for another kind of scheme."""
    known, (w, w_scale, global_scale) = get_scheme(scheme), weight
    quant, weight_quant = known.quants
    if (global_scale is not None) != weight_quant.global_scale:
        rule = "be a Tensor" if weight_quant.global_scale else "be None"
        got = "None" if global_scale is None else "a Tensor"
        raise ValueError(f"w_global_scale must {rule} for scheme {scheme}, got {got}")
    each = [2 if q.element.packed else 1 for q in (quant, weight_quant)]
    slots = sizes.gemm(a, w, (each[0], each[1]), bias, tiles, row_tiles, top_k)
    (rows, width), (experts, n, k) = a.shape, w.shape
    sizes.weight_scales(scheme, (experts, n, each[1] * k), w_scale, global_scale)
    if known.decoded and (a_scale is None or a.dtype != quant.dtype):
        got = "None" if a_scale is None else f"rows of dtype {a.dtype}"
        raise ValueError(f"a must be rows as scheme {scheme} stores them, with scales, got {got}")
    if a_scale is not None:
        if a.dtype == quant.dtype:
            sizes.stored_row_scale(a_scale, quant, rows, each[0] * width, experts)
        else:
            sizes.row_scale(a_scale, quant, rows)
    elif a.dtype == quant.dtype:
        raise ValueError(f"a_scale must be given with rows of dtype {a.dtype}, got None")
    return slots
