"""Outputs of the routing operators."""

from __future__ import annotations

import torch
from torch import Tensor


def _routing(gating_output: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """``(T, k)`` float32 weights and int32 ids."""
    shape = (gating_output.shape[0], topk)
    return (
        gating_output.new_empty(shape, dtype=torch.float32),
        gating_output.new_empty(shape, dtype=torch.int32),
    )


def fused_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """``topk`` slots a token."""
    return _routing(gating_output, topk)


def grouped_topk(
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
    num_expert_group: int,
    topk_group: int,
) -> tuple[Tensor, Tensor]:
    """``topk`` slots a token."""
    return _routing(gating_output, topk)


def hash_topk(
    gating_output: Tensor,
    input_ids: Tensor,
    table: Tensor,
    renormalize: bool,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """As many slots a token as the table has columns."""
    return _routing(gating_output, table.shape[1])


def sparsemixer(gating_output: Tensor, jitter_eps: float) -> tuple[Tensor, Tensor]:
    """Two slots a token."""
    return _routing(gating_output, 2)
