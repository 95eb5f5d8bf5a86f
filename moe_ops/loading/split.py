"""Splits one tensor of gate and up rows into gate and up."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.loading.names import Piece
from moe_ops.loading.stored import Form, canonical


def halves(piece: Piece, x: Tensor, form: Form, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return one expert's gate and up projection, canonical, from one tensor of both.

    Args:
        piece: what the tensor is.
        x: the tensor, without an axis for experts.
        form: the form of both together, ``n = 2I``.
        interleaved: whether rows alternate.

    Raises:
        TypeError, ValueError: as `canonical`; a block of scales that gate and up rows share.
    """
    own = form.own
    one_number = piece.kind in ("global_scale", "input_scale")
    if one_number or (piece.kind == "scale" and own is not None and own.per_tensor):
        gate, up = x.flatten()[0], x.flatten()[-1]
        if x.numel() > 2:
            raise ValueError(f"shape must be that of one or two numbers, got {tuple(x.shape)}")
        first, second = (canonical(piece.kind, part, piece.suffix, form) for part in (gate, up))
        return first, second
    both = canonical(piece.kind, x, piece.suffix, form)
    if interleaved:
        return both[0::2], both[1::2]
    rows = own.group.rows if piece.kind == "scale" and own is not None else 1
    if rows > 1:
        return _split_blocks(both, form.n // 2, rows)
    gate, up = both.chunk(2)
    return gate, up


def _split_blocks(scales: Tensor, width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Split scales counted in blocks from the first gate row; up's blocks begin with its rows."""
    if width % rows == 0:
        gate, up = scales.chunk(2)
        return gate, up
    of_row = scales.repeat_interleave(rows, 0)[: 2 * width]
    gate, up = of_row[:width], of_row[width:]
    blocks = up[::rows]
    if not torch.equal(blocks.repeat_interleave(rows, 0)[:width], up):
        raise ValueError(
            f"blocks of {rows} rows must not reach from the {width} gate rows into the up rows"
        )
    return gate[::rows], blocks
