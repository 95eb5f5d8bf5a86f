"""Output of the expert GEMM with two quantized operands."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.dispatch.tiles import TileRule
from moe_ops.scheme import Quant, get_scheme, is_packed
from moe_ops.tensors import AnyTiles


def scaled_matmul(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str = "",
    batch_invariant: bool = False,
) -> Tensor:
    """``(slots, N)``, or ``(slots, I)`` with a gated activation, in slot order."""
    weight, rule = (w, w_scale, w_global_scale), gemm_rule(scheme, a, tiles, batch_invariant)
    slots = num_slots(a, a_scale, weight, bias, tiles, rule, top_k, scheme)
    return a.new_empty(slots, sizes.activated("w", w.shape[1], activation), dtype=out_dtype)


def num_slots(
    a: Tensor,
    a_scale: Tensor | None,
    weight: tuple[Tensor, Tensor, Tensor | None],
    bias: Tensor | None,
    tiles: AnyTiles,
    rule: TileRule,
    top_k: int,
    scheme: str,
) -> int:
    """The number of slots; ValueError if sizes disagree, or for another kind of scheme."""
    w, w_scale, global_scale = weight
    quant, weight_quant, decoded = _facts(scheme)
    each = 2 if quant.element.packed else 1, weight_quant.numbers_per_entry(w.dtype)
    slots = sizes.gemm(a, w, each, bias, tiles, rule, top_k)
    (rows, width), (experts, n, k) = a.shape, w.shape
    sizes.quantized_weight(scheme, (experts, n, each[1] * k), w, w_scale, global_scale)
    later = is_packed(w) and a_scale is None  # rows that the operator quantizes
    if decoded and not later and (a_scale is None or a.dtype != quant.dtype):
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


@lru_cache(maxsize=256)
def _facts(scheme: str) -> tuple[Quant, Quant, bool]:
    """How rows and weights are quantized, and whether both are decoded.

    ValueError unless the scheme quantizes both operands.
    """
    known = get_scheme(scheme)
    quant, weight_quant = known.quants
    return quant, weight_quant, known.decoded
