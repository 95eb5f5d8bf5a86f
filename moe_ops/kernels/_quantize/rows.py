"""Source rows of the quantization kernels and of the batched format's kernels.

A row of the result is row ``rank`` of ``expert``; a flat result has one expert. Its source is a row
of ``x``, a slot's row times its router weight, or the activation of a row. A row past its expert's
count, or without a local slot, is skipped: it is never read, and the result has zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.kernels._runtime.slots import dense, local_experts, map_size
from moe_ops.kernels.activation import activation_constants, load_activated


class RowSource(NamedTuple):
    """The source of a result's rows."""

    x: Tensor
    shape: tuple[int, int, int]
    """Shape of the result: experts, rows per expert, columns."""
    activation: str | None = None
    slots: Tensor | None = None
    """int32: the slot of each row of the result; None: row r is slot r (or row r of ``x``)."""
    topk_weights: Tensor | None = None
    top_k: int = 1
    """Slots per row of ``x``."""
    topk_ids: Tensor | None = None
    expert_map: Tensor | None = None
    num_local_experts: int = 0
    counts: Tensor | None = None
    """int32: the number of rows of each expert."""

    def arguments(self) -> tuple[Any, ...]:
        """The first arguments of every kernel that reads rows."""
        x = self.x if self.x.stride(-1) == 1 else self.x.contiguous()
        per_expert = x.stride(0) if x.dim() == 3 else 0
        return (
            x,
            self.slots,
            dense(self.topk_weights),
            dense(self.topk_ids),
            dense(self.expert_map),
            dense(self.counts),
            map_size(self.expert_map, self.num_local_experts),
            self.num_local_experts,
            per_expert,
            x.stride(-2),
            self.shape[2],
        )

    def constants(self) -> tuple[str | None, int, int]:
        """The arguments of `row_constants`."""
        slots = 1 if self.topk_ids is None else self.topk_ids.numel() // max(self.shape[1], 1)
        return self.activation, self.top_k, slots


def row_constants(activation: str | None, top_k: int, slots: int) -> dict:
    """The constexpr arguments of every kernel that reads rows."""
    rule = formula(activation or "silu")
    return {
        "TOP_K": top_k,
        "SLOTS": slots,
        "UP": None if not rule.gated else "next" if rule.interleaved else "half",
        **activation_constants(rule),
        **({} if activation else {"FUNCTION": None}),
    }


@triton.jit
def readable(
    topk_ids, expert_map, counts, num_experts, num_local_experts, WIDTH, expert, rank,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Number of columns of a row that may be read: all, or 0 for a skipped row."""
    used = rank >= 0
    if counts is not None:
        used = rank < tl.load(counts + expert)
    if topk_ids is not None:
        used = rank < 0
        for j in tl.static_range(SLOTS):
            local = local_experts(
                topk_ids, expert_map, rank * SLOTS + j, rank >= 0, num_experts, num_local_experts
            )
            used = used | (local >= 0)
    return tl.where(used, WIDTH, 0)


@triton.jit
def load_values(
    x, slots, topk_weights, stride_expert, stride_row, WIDTH, expert, rank, row, col, width,
    TOP_K: tl.constexpr, UP: tl.constexpr, FUNCTION: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
):  # fmt: skip
    """Columns of a row in float32 (an activation rounded to the dtype of x first), zeros outside.

    ``row`` is the row in the flattened result, ``width`` the result of `readable`.
    """
    inside = col < width
    slot = rank
    if slots is not None:
        slot = tl.load(slots + row, mask=width > 0, other=0)
    source = x + expert.to(tl.int64) * stride_expert + (slot // TOP_K).to(tl.int64) * stride_row
    if FUNCTION is None:
        value = tl.load(source + col, mask=inside, other=0.0).to(tl.float32)
    else:
        value = load_activated(
            source, col, inside, WIDTH, UP is not None, UP == "next",
            FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA,
        ).to(x.dtype.element_ty).to(tl.float32)  # fmt: skip
    if topk_weights is not None:
        weight = tl.load(topk_weights + slot, mask=width > 0, other=0.0).to(tl.float32)
        value *= weight
    return value
