"""How ranks cut the intermediate axis of experts, so that no two ranks share a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from moe_ops.dispatch.tiles import cdiv
from moe_ops.scheme import WHOLE, Group, Scheme, refusal, scheme_of
from moe_ops.scheme.packed import splits_chunks

SMALLEST_REFINED = 32
"""Smallest size to which blocks are refined. Below it the axis is padded instead."""


@dataclass(frozen=True)
class LayerSizes:
    """Everything that determines the shapes of a layer's parameters."""

    num_experts: int
    """Physical experts of this rank."""
    hidden_size: int
    """H of the parameters: H of the model, or more if an exchange of tokens needs more."""
    intermediate_size: int
    """I of this rank."""
    scheme: Scheme
    gated: bool
    interleaved: bool
    """Whether gate and up rows alternate."""
    has_bias: bool
    dtype: torch.dtype
    """Dtype of everything that is not quantized."""
    exact_of: Scheme | None = None
    """The MXFP4 scheme of weights that are held as fp8 (see `FusedMoE.as_fp8_`); None: they are
    not, and ``scheme`` is theirs."""

    @property
    def plain(self) -> LayerSizes:
        """The sizes of the layer with plain weights."""
        return self if self.exact_of is None else replace(self, scheme=self.exact_of, exact_of=None)

    @property
    def rows(self) -> int:
        """Rows of ``w13`` per expert."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def splits_chunks(self) -> bool:
        """Whether the packed form of ``w13`` is not read: see `moe_ops.scheme.packed`."""
        return splits_chunks(self.rows, gated=self.gated, interleaved=self.interleaved)

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """``(N, K)`` of an expert's weights, by the beginning of their parameters' names."""
        hidden = self.hidden_size
        return {"w13": (self.rows, hidden), "w2": (hidden, self.intermediate_size)}

    @property
    def mixes_rows(self) -> bool:
        """Whether gate and up rows share scales, because they alternate within blocks."""
        quant = self.scheme.weight
        return quant is not None and self.interleaved and quant.group.rows > 1

    def with_dtype(self, dtype: torch.dtype) -> LayerSizes:
        """Return the sizes after unquantized weights were cast to ``dtype``."""
        same = self.scheme.weight is not None or dtype == self.dtype
        return self if same else replace(self, dtype=dtype)


def aligned_sizes(sizes: LayerSizes, whole: int, tp_size: int) -> LayerSizes:
    """Return the sizes of one of ``tp_size`` ranks, such that each rank has whole scales.

    A rank gets ``each = ceil(whole / tp_size)`` of I. If ``each`` is not a multiple of the scales'
    blocks, blocks are refined to ``gcd(block, each)``, if that is at least `SMALLEST_REFINED`:
    every scale is repeated, and nothing is lost. Otherwise, and for schemes with one group size
    only, ranks get a multiple of the block; the last ranks then hold less, or nothing, and zeros in
    the rest. Gate and up rows are aligned likewise, because they have scales of their own in
    checkpoints.

    Args:
        sizes: the sizes of one rank that holds everything.
        whole: I of all ranks together.
        tp_size: ranks that share I.

    Raises:
        NotImplementedError: a scheme with blocks of several rows, in a layer whose gate and up rows
            alternate.

    Source:
        vLLM ``refine_fp8_moe_block_shape`` and ``pad_tp_shard_to_weight_blocks``.
    """
    each = cdiv(whole, tp_size)
    quant = sizes.scheme.weight
    if quant is None:
        return replace(sizes, intermediate_size=each)
    if sizes.mixes_rows:
        raise NotImplementedError(
            "scheme must have blocks of one row if gate and up rows alternate, got "
            f"{sizes.scheme.name}"
        )
    per_byte = quant.element.values_per_byte
    # Rows of w13 are cut by ranks, and into gate and up. Columns of w2 are cut by ranks only.
    parted = (tp_size > 1 or (sizes.gated and not sizes.interleaved), tp_size > 1)
    blocks = [
        length if cut and length != WHOLE else 1
        for length, cut in zip(quant.group, parted, strict=True)
    ]
    if all(each % length == 0 for length in (*blocks, per_byte)):
        return replace(sizes, intermediate_size=each)
    finer = _refined(sizes.scheme, blocks, each)
    if finer is not None and each % per_byte == 0:
        return replace(sizes, intermediate_size=each, scheme=finer)
    unit = math.lcm(*blocks, per_byte)
    return replace(sizes, intermediate_size=cdiv(each, unit) * unit)


def _refined(scheme: Scheme, blocks: list[int], width: int) -> Scheme | None:
    """Return the scheme with blocks that divide ``width``; None if there is no such scheme.

    Where stored values are multiplied, activations get the groups of the weight along K.
    """
    activation, weight = scheme.activation, scheme.weight
    if weight is None:
        return None
    group = Group(
        *(
            old if block == 1 else math.gcd(block, width)
            for block, old in zip(blocks, weight.group, strict=True)
        )
    )
    for block, new in zip(blocks, group, strict=True):
        if block != 1 and new < min(block, SMALLEST_REFINED):
            return None
    if activation is not None and activation.local and not scheme.dequantizes_both:
        activation = replace(activation, group=Group(1, group.cols))
    weight = replace(weight, group=group)
    return scheme_of(activation, weight) if refusal(activation, weight) is None else None
