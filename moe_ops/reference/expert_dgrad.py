"""Reference of the expert GEMM with transposed stored weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.reference.grouped import Columns, Epilogue, grouped
from moe_ops.reference.products import one_expert
from moe_ops.reference.slots import multiply
from moe_ops.scheme import dequantize_weight, get_scheme
from moe_ops.tensors import AnyTiles, QTensor


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
    """``out[s] = a[s // top_k] @ dequantized(w[e])``, with weights rounded to the rows' dtype."""
    stored = QTensor(w, w_scale, w_zero_point, w_global_scale)
    parsed = get_scheme(scheme)
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    k = w.shape[2] * parsed.numbers_per_entry(w.dtype)

    def product(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
        weight = dequantize_weight(one_expert(stored, expert), parsed, a.dtype)[0].float()
        multiply(rows[0].float(), weight, out, batch_invariant)

    return grouped(product, (a,), Columns(k, len(w)), tiles, rule, top_k, a.dtype, Epilogue(None))
