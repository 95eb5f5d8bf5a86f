"""Reference of the expert GEMM whose operands are not quantized.

With ``expert_order`` the rows between two GEMMs (``out`` of the GEMM with an activation, ``a`` of
the GEMM without) are permuted: sorted by expert as in the plan, without its padding. Batched and
permuted rows, which are grouped by expert already, keep their places. Rows past the rows in use are
undefined. Router weights stay in slot order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.fake_impls.expert_gemm import expert_matmul as empty_rows
from moe_ops.reference.grouped import grouped
from moe_ops.reference.slots import multiply


def expert_matmul(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    topk_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    activation: str = "",
    expert_order: bool = False,
) -> Tensor:
    """``out[s] = f(topk_weights[s] * a[s // top_k] @ w[e].T + bias[e])``; see `grouped`."""
    tiles = (plan, topk_ids, expert_map)
    out = empty_rows(a, w, bias, topk_weights, *tiles, row_tiles, top_k, activation)

    def product(expert: int, source: Tensor, rows: Tensor) -> None:
        multiply(a[source].float(), w[expert].float(), rows, row_tiles)

    permuted = None if not expert_order else "out" if activation else "a"
    return grouped(
        out, product, w.shape, tiles, row_tiles, top_k,
        bias=bias, topk_weights=topk_weights, activation=activation, permuted=permuted,
    )  # fmt: skip
