"""Reference of the expert GEMM whose operands are not quantized.

With ``expert_order`` the rows between two GEMMs (``out`` of the GEMM with an activation, ``a`` of
the GEMM without) are permuted: sorted by expert as in the plan, without its padding. Batched and
permuted rows, which are grouped by expert already, keep their places. Rows past the rows in use are
undefined. Router weights stay in slot order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.reference.grouped import grouped
from moe_ops.reference.slots import multiply, planned_rows
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
    planned = planned_rows(tiles, rule, len(a) * top_k, w.shape[0])

    def product(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
        multiply(rows[0].float(), columns[expert].float(), out, batch_invariant)

    permuted = None if not expert_order else "out" if activation else "a"
    return grouped(
        product, (a,), w, planned, top_k, a.dtype,
        bias=bias, topk_weights=topk_weights, activation=activation, permuted=permuted,
    )  # fmt: skip
