"""References of the expert GEMMs whose operands are not quantized.

With ``expert_order`` the rows between two GEMMs (``out`` of the GEMM with an activation, ``a`` of
the GEMM without) are permuted: sorted by expert as in the plan, without its padding. Batched and
permuted rows, which are grouped by expert already, keep their places. Rows past the rows in use are
undefined. Router weights stay in slot order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.reference.grouped import Epilogue, grouped
from moe_ops.reference.slots import multiply, planned_rows, take
from moe_ops.scheme import UNQUANTIZED
from moe_ops.tensors import AnyTiles


def expert_matmul(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    activation: str = "",
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """``out[s] = f(topk_weights[s] * a[s // top_k] @ w[e].T + bias[e])``; see `grouped`."""
    rule, columns = gemm_rule(UNQUANTIZED.key, a, tiles, batch_invariant), w.mT

    def product(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
        multiply(rows[0].float(), columns[expert].float(), out, batch_invariant)

    permuted = None if not expert_order else "out" if activation else "a"
    then = Epilogue(bias, topk_weights, activation)
    return grouped(product, (a,), w, tiles, rule, top_k, a.dtype, then, permuted=permuted)


def expert_matmul_add(
    a: Tensor,
    w: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    batch_invariant: bool = False,
    *,
    out: Tensor,
) -> None:
    """``out[s] += topk_weights[s] * a[s // top_k] @ w[e].T``, added in float32, rounded once.

    Rows of skipped slots stay as they are.
    """
    rule = gemm_rule(UNQUANTIZED.key, a, tiles, batch_invariant)
    slots, experts, counts, _ = planned_rows(tiles, rule, len(out), len(w))
    rows = take(a, slots // top_k).float().split(counts)
    products = out.new_empty((len(slots), out.shape[1]), dtype=torch.float32)
    for expert, mine, result in zip(experts, rows, products.split(counts), strict=True):
        multiply(mine, w[expert].mT.float(), result, batch_invariant)
    if topk_weights is not None:
        products *= topk_weights.flatten()[slots, None].float()
    out.index_copy_(0, slots, (take(out, slots).float() + products).to(out.dtype))
