"""Output of the expert GEMM with quantized weights only."""

from __future__ import annotations

from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.scheme import Quant, get_scheme, is_packed
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
    quant = _checked_quant(w_scale, w_zero_point, w_global_scale, scheme)
    each = quant.numbers_per_entry(w.dtype)
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    slots = sizes.gemm(a, w, (1, each), bias, tiles, rule, top_k)
    sizes.entries("topk_weights", topk_weights, slots)
    if w_scale is not None:
        experts, n, width = w.shape
        shape = (experts, n, each * width)
        sizes.weight_scales(scheme, shape, w_scale, w_global_scale, w_zero_point)
        if is_packed(w):
            sizes.packed_weight(scheme, shape, w, w_scale, w_zero_point)
    return a.new_empty(slots, sizes.activated("w", w.shape[1], activation))


def _checked_quant(
    scale: Tensor | None, zero_point: Tensor | None, global_scale: Tensor | None, scheme: str
) -> Quant:
    """How the scheme quantizes weights.

    ValueError if the scheme does not quantize weights only, or if a tensor that it needs is missing
    or one that it does not take is given.
    """
    known = get_scheme(scheme)
    quant = known.weight
    if quant is None or known.activation is not None:
        raise ValueError(f"scheme must quantize weights only, got {scheme!r}")
    for name, value, needed in (
        ("w_scale", scale, True),
        ("w_zero_point", zero_point, quant.zero_point),
        ("w_global_scale", global_scale, quant.global_scale),
    ):
        if (value is not None) != needed:
            rule = "be a Tensor" if needed else "be None"
            got = "None" if value is None else "a Tensor"
            raise ValueError(f"{name} must {rule} for scheme {scheme}, got {got}")
    return quant
