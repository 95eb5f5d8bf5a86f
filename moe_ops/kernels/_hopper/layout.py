"""Layout of a product: constants that several families of Hopper kernels have.

A family adds its own constants in a subclass, which its launcher fills once for each problem. They
are dataclasses, not tuples, which Triton would flatten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.activation import Formula
from moe_ops.dispatch.hopper import ROW_BYTES
from moe_ops.dispatch.problem import WeightRows
from moe_ops.kernels._hopper.boxes import descriptor
from moe_ops.kernels._runtime.cache_keys import KeyedConstants


@dataclass(frozen=True)
class ProductLayout(KeyedConstants):
    """Sizes of a product, of its weight, and of the ring of stages."""

    N: int
    """Output columns."""
    K: int
    RULE: Formula | None
    """Formula of the activation; None: no activation."""
    WEIGHT_ROWS: int
    """Weight rows per expert."""
    SCALE_ROWS: int
    """Weight rows that share a scale."""
    STAGES: int
    """Stages of the ring."""
    STEPS: int
    """Stages of a tile, or of a chunk of K."""


@dataclass(frozen=True)
class TiledLayout(ProductLayout):
    """`ProductLayout` of kernels whose tiles have rows of several slots."""

    TOP_K: int
    """Slots per row of the first operand."""
    BLOCK_M: int
    GROUP_M: int
    GROUPS: int
    """Multiplying warp groups."""
    NUM_N: int
    """Column tiles."""
    ON_DEMAND: bool
    """Whether the persistent schedule is dynamic: see `schedule`."""


@dataclass(frozen=True)
class StoredLayout(ProductLayout):
    """`ProductLayout` of kernels that multiply weights as they are stored."""

    GATED: bool
    STEP: int
    """Distance in weight rows from one output column to the next."""
    UP: int
    """Distance in weight rows from a gate row to its up row; 0 without a gate."""
    TRANSPOSED: bool
    """Whether the weight is contiguous along its rows, not along K."""
    SCALE_COLS: int | None
    """Elements along K that share a scale, of both operands; None: all, or there are no scales."""
    WEIGHTED: bool
    """Whether routing weights multiply the products, before the bias is added or in the sum."""
    ITEMSIZE: int
    BLOCK_K: int
    """Elements of a step along K."""

    def weight_box(self, w: Tensor, rows: int) -> TensorDescriptor:
        """The TMA descriptor of a weight, whose boxes have so many ``rows``.

        With a gate, a box alternates 8 gate and 8 up rows.
        """
        if self.TRANSPOSED:
            return descriptor(w.transpose(1, 2), [1, self.BLOCK_K, rows])
        if not self.GATED:
            return descriptor(w, [1, rows, self.BLOCK_K])
        expert, row, _ = w.stride()
        shape = [w.shape[0], self.N // 8, 2, 8, self.K]
        strides = [expert, 8 * self.STEP * row, self.UP * row, self.STEP * row, 1]
        return descriptor(w, [1, rows // 16, 2, 8, self.BLOCK_K], shape, strides)


def stored_layout(
    n: int, k: int, rule: Formula | None, weight: WeightRows, itemsize: int
) -> dict[str, Any]:
    """The fields of a `StoredLayout` that follow from a product's sizes and its weight."""
    return {
        "N": n,
        "K": k,
        "RULE": rule,
        "GATED": rule is not None and rule.gated,
        "STEP": weight.step,
        "UP": weight.up,
        "WEIGHT_ROWS": weight.rows,
        "SCALE_ROWS": weight.scale_rows,
        "TRANSPOSED": weight.transposed,
        "SCALE_COLS": weight.scale_cols,
        "ITEMSIZE": itemsize,
        "BLOCK_K": ROW_BYTES // itemsize,
    }
