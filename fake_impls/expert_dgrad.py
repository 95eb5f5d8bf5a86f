"""Output of the expert GEMM with transposed stored weights."""

from __future__ import annotations

from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.scheme import get_scheme
from moe_ops.tensors import AnyTiles


def expert_dgrad(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    batch_invariant: bool = False,
) -> Tensor:
    """``(slots, K)`` for rows ``(R, N)`` and a weight ``(E, N, K)``."""
    quant = get_scheme(scheme).weight
    if quant is None:
        raise ValueError(f"scheme must quantize weights, got {scheme!r}")
    sizes.axes("w", w, 3)
    experts, n, width = w.shape
    k = quant.numbers_per_entry(w.dtype) * width
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    turned = a.new_empty(()).expand(experts, k, n)
    slots = sizes.gemm_slots(a, turned, (1, 1), None, tiles, rule, top_k)
    sizes.weight_parts(scheme, (experts, n, k), w, w_scale, w_global_scale, w_zero_point)
    return a.new_empty((slots, k))
