"""How the experts' intermediate axis is cut over ranks, so that no two of them share a scale."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch

from moe_ops.dispatch.tiles import cdiv
from moe_ops.scheme import WHOLE, Scheme, get_scheme

SMALLEST_REFINED = 32
"""Blocks are not refined below this: the axis is padded instead."""


@dataclass(frozen=True)
class LayerSizes:
    """Everything that the shapes of a layer's parameters follow from."""

    num_experts: int
    """Physical experts of this rank."""
    hidden_size: int
    """H of the parameters: that of the model, or more where an exchange of tokens needs it."""
    intermediate_size: int
    """I of this rank."""
    scheme: Scheme
    gated: bool
    interleaved: bool
    """Gate and up rows alternate."""
    has_bias: bool
    dtype: torch.dtype
    """Of what is not quantized."""

    @property
    def rows(self) -> int:
        """Of ``w13``."""
        return self.intermediate_size * (2 if self.gated else 1)

    def with_dtype(self, dtype: torch.dtype) -> LayerSizes:
        """After weights that are not quantized took another dtype."""
        same = self.scheme.weight is not None or dtype == self.dtype
        return self if same else replace(self, dtype=dtype)


def aligned_sizes(sizes: LayerSizes, whole: int, tp_size: int) -> LayerSizes:
    """The sizes of one of ``tp_size`` ranks, of which each owns whole scales.

    A rank gets ``ceil(whole / tp_size)``. Where its end is no end of a scale's block, the block is
    refined: blocks of the greatest common divisor, of at least 32, to which every scale is
    repeated (nothing is lost). Where that is too small, or the scheme has one group size only,
    ranks get a multiple of the block, so that the last ones have less than the others or nothing,
    and zeros behind it. The same for gate and up rows, which have scales of their own in
    checkpoints.

    Args:
        sizes: of one rank that holds everything.
        whole: I.
        tp_size: ranks that share it.

    Raises:
        NotImplementedError: a scheme with blocks of rows, and rows that alternate.

    Source:
        vLLM ``refine_fp8_moe_block_shape`` and ``pad_tp_shard_to_weight_blocks``.
    """
    each = cdiv(whole, tp_size)
    quant = sizes.scheme.weight
    if quant is None:
        return replace(sizes, intermediate_size=each)
    if sizes.interleaved and quant.group.rows > 1:
        raise NotImplementedError(
            f"quant_config must not have blocks of rows where gate and up rows alternate, "
            f"got {sizes.scheme.name}"
        )
    packed = 2 if quant.element.packed else 1
    # Rows of w13 matter where there is more than one part of them: ranks, or gate and up.
    parted = (tp_size > 1 or (sizes.gated and not sizes.interleaved), tp_size > 1)
    blocks = [
        length if cut and length != WHOLE else 1
        for length, cut in zip(quant.group, parted, strict=True)
    ]
    if all(each % length == 0 for length in (*blocks, packed)):
        return replace(sizes, intermediate_size=each)
    finer = _refined(sizes.scheme, blocks, each)
    if finer is not None and each % packed == 0:
        return replace(sizes, intermediate_size=each, scheme=finer)
    unit = math.lcm(*blocks, packed)
    return replace(sizes, intermediate_size=cdiv(each, unit) * unit)


def _refined(scheme: Scheme, blocks: list[int], width: int) -> Scheme | None:
    """The same scheme with blocks that divide ``width``; None where there is none."""
    group = scheme.weight.group if scheme.weight else ()
    rows, cols = (
        old if block == 1 else math.gcd(block, width)
        for block, old in zip(blocks, group, strict=True)
    )
    for block, new in zip(blocks, (rows, cols), strict=True):
        if block != 1 and new < min(block, SMALLEST_REFINED):
            return None
    size = f"{cols}" if rows in (1, cols) else f"{rows}x{cols}"
    name, found = re.subn(r"(_block|_g)\d+(x\d+)?", rf"\g<1>{size}", scheme.name)
    return get_scheme(name) if found else None
