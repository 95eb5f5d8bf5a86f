"""References of expert GEMMs with quantized weights only.

The weight of each expert that has rows is dequantized and rounded to the rows' dtype, as in vLLM;
products are summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.reference.grouped import Epilogue, grouped
from moe_ops.reference.slots import multiply
from moe_ops.reference.weight_and_reduce import moe_fused_mul_sum
from moe_ops.scheme import dequantize_weight
from moe_ops.tensors import AnyTiles, QTensor


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
    """``out[s] = f(topk_weights[s] * a[s // top_k] @ dequantized(w[e]).T + bias[e])``."""
    stored = QTensor(w, w_scale, w_zero_point, w_global_scale)
    rule = gemm_rule(scheme, a, tiles, batch_invariant)

    def product(expert: int, rows: Sequence[Tensor], out: Tensor) -> None:
        weight = dequantize_weight(one_expert(stored, expert), scheme, a.dtype)[0].float()
        multiply(rows[0].float(), weight.t(), out, batch_invariant)

    then = Epilogue(bias, topk_weights, activation)
    return grouped(product, (a,), w, tiles, rule, top_k, a.dtype, then)


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
    """``out[t] = sum_j topk_weights[t, j] * y[t * k + j]``; y: of `weight_only_matmul`."""
    scales = (w_scale, w_zero_point, w_global_scale)
    y = weight_only_matmul(a, w, *scales, bias, None, tiles, 1, scheme, "", batch_invariant)
    _, topk_ids, expert_map = tiles
    return moe_fused_mul_sum(y, topk_weights, topk_ids, expert_map, None, w.shape[0])


def one_expert(stored: QTensor, expert: int) -> QTensor:
    """The stored weight of one expert, with its scales and zero points."""
    only = slice(expert, expert + 1)
    rest = (None if t is None else t[only] for t in stored[1:])
    return QTensor(stored.data[only], *rest)
