"""Splits tensors of checkpoints: gate and up rows, and shared experts side by side along I."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.loading.names import Piece
from moe_ops.loading.stored import Form, canonical
from moe_ops.scheme import Quant


def split_gate_and_up(
    piece: Piece, x: Tensor, form: Form, interleaved: bool
) -> tuple[Tensor, Tensor]:
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
    if is_one_number(piece.kind, own):
        gate, up = x.flatten()[0], x.flatten()[-1]
        if x.numel() > 2:
            raise ValueError(f"shape must be that of one or two numbers, got {tuple(x.shape)}")
        first, second = (canonical(piece.kind, part, piece.suffix, form) for part in (gate, up))
        return first, second
    rows = own.group.rows if piece.kind == "scale" and own is not None else 1
    if piece.is_saved and rows > 1:  # gate and up have blocks of their own
        half = form._replace(n=form.n // 2)
        gate, up = (canonical(piece.kind, part, piece.suffix, half) for part in x.chunk(2))
        return gate, up
    both = canonical(piece.kind, x, piece.suffix, form)
    if interleaved:
        return both[0::2], both[1::2]
    if rows > 1:
        return _split_blocks(both, form.n // 2, rows)
    gate, up = both.chunk(2)
    return gate, up


def is_one_number(kind: str, quant: Quant | None) -> bool:
    """Whether a tensor of a checkpoint is one number for each expert, or each projection."""
    per_tensor = quant is not None and quant.per_tensor
    return kind in ("global_scale", "input_scale") or (kind == "scale" and per_tensor)


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


def shared_part(
    x: Tensor, kind: str, shard: str, share: tuple[int, int], width: int, own: Quant | None
) -> Tensor:
    """Return one shared expert's part of a canonical tensor of several.

    Numbers of the rows of ``w2`` belong to every expert. The bias of ``w2`` goes to the first
    expert alone, because the experts' results are added.

    Args:
        x: the projection of all shared experts, which are side by side along I.
        kind: a kind of `ParameterSpec`.
        shard: ``w1``, ``w2`` or ``w3``.
        share: ``(i, n)``: number i of n experts.
        width: I of one expert.
        own: how the layer stores the weight; None: unquantized.

    Raises:
        ValueError: a block of numbers, or a byte, that two experts share.
    """
    i, count = share
    if count == 1 or not x.dim():
        return x
    axis = int(shard == "w2")
    if axis and kind == "bias":
        return x if i == 0 else torch.zeros_like(x)
    if x.dim() <= axis or (x.shape[axis] == 1 and kind != "weight"):
        return x
    is_blocked = kind in ("scale", "zero_point") and x.shape[axis] != width * count
    block = own.group[axis] if is_blocked and own else width * count // x.shape[axis]
    if width % block and block % width:
        raise ValueError(
            f"blocks of {block} numbers must not reach from one shared expert into the next, got "
            f"I = {width}"
        )
    return x.narrow(axis, i * width // block, max(1, width // block))
