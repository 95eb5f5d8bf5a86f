"""Which fused tensors of a checkpoint may have columns as rows, and the shapes that show it."""

from __future__ import annotations

from moe_ops.loading.names import Piece
from moe_ops.loading.stored import Form
from moe_ops.scheme import Quant


def may_be_transposed(piece: Piece, quant: Quant | None) -> bool:
    """Whether tools transpose such a tensor: weights of all experts, and scales of blocks.

    Tensors of one expert are never transposed, nor are gpt-oss's (``blocks``, ``scales``).

    Args:
        piece: what the tensor is.
        quant: how the layer's checkpoints store weights.
    """
    if piece.expert is not None or piece.is_shared:
        return False
    if piece.kind == "scale":
        return quant is not None and not quant.per_tensor and piece.suffix != "scales"
    return piece.kind == "weight" and piece.suffix == "weight"


def matrix_shape(piece: Piece, form: Form, *, is_plain: bool) -> tuple[int, int]:
    """Return the shape of one expert's weight, or of its scales, that is not transposed.

    Args:
        piece: what the tensor is.
        form: the form of the projection.
        is_plain: whether weights are not quantized, whatever the form says.
    """
    quant = form.quant
    if is_plain or quant is None:
        return form.n, form.k
    if piece.kind == "weight":
        return form.n, quant.data_width(form.k)
    rows, *groups = quant.weight_scale_shape(1, form.n, form.k)[1:]
    return rows, groups[0] if groups else 1
