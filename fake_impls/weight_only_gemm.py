"""Output of the expert GEMM with quantized weights only."""

from __future__ import annotations

from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.dispatch.tiles import TileRule
from moe_ops.scheme import get_scheme
from moe_ops.tensors import AnyTiles


def weight_only_matmul(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    activation: str = "",
    batch_invariant: bool = False,
) -> Tensor:
    """``(slots, N)``, or ``(slots, I)`` with a gated activation, in slot order."""
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    weight = (w, w_scale, w_zero_point, w_global_scale)
    slots = num_slots(a, weight, bias, tiles, rule, top_k, scheme)
    sizes.entries("topk_weights", topk_weights, slots)
    return a.new_empty(slots, sizes.activated("w", w.shape[1], activation))


def weight_only_sum(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    scheme: str,
    batch_invariant: bool = False,
) -> Tensor:
    """``(T, N)``."""
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    _, topk_ids, expert_map = tiles
    if topk_ids is None:
        raise ValueError("tiles[1] must be topk_ids, got None")
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.weights(topk_weights, tokens, k)
    weight = (w, w_scale, w_zero_point, w_global_scale)
    num_slots(a, weight, bias, tiles, rule, 1, scheme)
    return a.new_empty(tokens, w.shape[1])


def num_slots(
    a: Tensor,
    weight: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
    tiles: AnyTiles,
    rule: TileRule,
    top_k: int,
    scheme: str,
) -> int:
    """The number of slots; ValueError if sizes disagree, or for another kind of scheme.

    ``weight`` has the fields of a `QTensor` in the order of the operator.
    """
    w, w_scale, w_zero_point, w_global_scale = weight
    known = get_scheme(scheme)
    quant = known.weight
    if quant is None or known.activation is not None:
        raise ValueError(f"scheme must quantize weights only, got {scheme!r}")
    each = quant.numbers_per_entry(w.dtype)
    slots = sizes.gemm(a, w, (1, each), bias, tiles, rule, top_k)
    experts, n, width = w.shape
    shape = (experts, n, each * width)
    sizes.quantized_weight(scheme, shape, w, w_scale, w_global_scale, w_zero_point)
    return slots
