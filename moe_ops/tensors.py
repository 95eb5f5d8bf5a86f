"""NamedTuples of tensors that belong together, without settings; no callee changes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor


def narrowed(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Ids as int32 or int64; ids too large for int32 stay out of range: 2**32 is not expert 0."""
    if ids.dtype == torch.int64 and dtype == torch.int32:
        ids = ids.clamp(-(2**31), 2**31 - 1)
    return ids.to(dtype)


class TensorSpec(NamedTuple):
    """Shape, dtype and place in memory of a tensor, without its data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = 0
    """Bytes past a multiple of 16."""

    @staticmethod
    def of(x: Tensor) -> TensorSpec:
        """The description of a tensor."""
        return TensorSpec(x.dtype, tuple(x.shape), x.stride(), x.data_ptr() % 16)

    @staticmethod
    def contiguous(dtype: torch.dtype, *shape: int) -> TensorSpec:
        """The description of a new tensor: contiguous, and aligned to 16 bytes."""
        return TensorSpec(dtype, shape, (*accumulate(shape[:0:-1], mul, initial=1),)[::-1])

    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


class TilePlan(NamedTuple):
    """Which tile of rows belongs to which expert.

    Slot ``t * k + j`` is the j-th choice of token t. For ids ``[[2,3,4],[1,2,4],[1,3,4],[1,2,3]]``
    (12 slots), 5 experts and tiles of 4 rows, ``sorted_token_ids`` begins
    ``[3,6,9,12, 0,4,10,12, 1,7,11,12, 2,5,8,12]``, ``expert_ids`` is ``[1,2,3,4,-1,..]`` and
    ``num_tokens_post_padded`` is ``[16]``.
    """

    sorted_token_ids: Tensor
    """int32: slots grouped by expert, in slot order; each group padded with ``T * k`` up to a
    multiple of the tile, and everything past the last group is ``T * k``."""
    expert_ids: Tensor
    """int32: the expert of each tile; -1 where it is not local, and past the last tile."""
    num_tokens_post_padded: Tensor
    """int32 ``[1]``: rows in use, a multiple of the tile."""


class Tiles(NamedTuple):
    """The tile plan and the routing of an expert GEMM."""

    plan: Tensor | None
    """int32: see `PlanSizes`. May be None if `plan_to_read` returns None anyway."""
    topk_ids: Tensor | None = None
    """``(T, k)`` if the rows of the GEMM are the slots of a routing."""
    expert_map: Tensor | None = None
    """Expert map of that routing; see `Routing`."""


AnyTiles = Sequence[Tensor | None]
"""A `Tiles`, or the list of its three fields that operators take."""


class Permutation(NamedTuple):
    """Slots in the order of their experts; skipped slots come last."""

    expert_first_token_offset: Tensor
    """int64 ``(El + 1,)``: first row of each expert; the last entry counts the rows in use."""
    inv_permuted_idx: Tensor
    """int32 ``(T, k)``: the row of each slot."""
    permuted_idx: Tensor
    """int32 ``(T * k,)``: the slot of each row."""


class QTensor(NamedTuple):
    """A quantized weight, as `moe_ops.quantize_weight` makes it."""

    data: Tensor
    """``(E, N, K)`` stored values; ``(E, N, K / 2)`` uint8 for 4-bit values, two per byte; int32 in
    the packed form: see `moe_ops.pack_weight`."""
    scale: Tensor | None = None
    """Scales, shaped as the scheme says; None if the scheme has none."""
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    """float32 ``(E,)``: a factor on top of the scales."""


class Rows(NamedTuple):
    """Activations, quantized or not, as input of a GEMM."""

    data: Tensor
    """``(R, K)``: stored values, or numbers that are not quantized (yet)."""
    scale: Tensor | None = None
    """Scales of stored values, or the given scale for quantizing numbers, if any."""


class ExpertWeight(NamedTuple):
    """One weight of a layer with its bias, scales and zero points.

    Operators take the fields as a list, ``weight``, in this order. Later fields are appended and
    have a default, so that shorter lists stay valid. E is the number of experts of the scales.
    """

    data: Tensor
    """``(El, N, K)``, or as its scheme packs it."""
    bias: Tensor | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    host: Tensor | None = None
    """The experts' addresses in host memory, a table of `moe_ops.residency.Residency`; None: the
    experts are on the device. With a table, the tensors above have the shapes, dtypes and device of
    all experts, and no numbers."""

    @property
    def of_experts(self) -> tuple[Tensor | None, ...]:
        """The fields that hold experts."""
        return self[:-1]

    @property
    def stored(self) -> QTensor:
        """The weight without its bias."""
        return QTensor(self.data, self.scale, self.zero_point, self.global_scale)


AnyWeight = Sequence[Any]
"""An `ExpertWeight`, or the list of its fields that operators take: tensors and None."""


class ExpertWeights(NamedTuple):
    """Both weights of a layer, and the static scales of their inputs, if any."""

    w1: ExpertWeight
    w2: ExpertWeight
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None


class Routing(NamedTuple):
    """The experts of each token and their weights."""

    topk_weights: Tensor
    """``(T, k)``."""
    topk_ids: Tensor
    """``(T, k)``, global experts; any other number skips the slot."""
    expert_map: Tensor | None = None
    """``(E,)``: the local expert of each global expert, -1 if it is not local."""
