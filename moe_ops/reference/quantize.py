"""Reference of the quantization operators."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.reference import activation as activations
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import WHOLE, Quant, parse_quant
from moe_ops.scheme.formats import join_nibbles
from moe_ops.scheme.rounding import encode, range_scale, scale_value


def moe_quantize(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_local_experts: int,
    quant: str,
) -> tuple[Tensor, Tensor]:
    """Quantize the rows of ``x``, or each slot's row times its router weight.

    Skipped rows are zeros. A row of ``x`` that several slots share is skipped if all of its slots
    are.
    """
    rows, rule = x.float(), parse_quant(quant)
    if topk_weights is not None:
        k = topk_weights.shape[1]
        rows = rows.repeat_interleave(k, 0) * topk_weights.reshape(-1, 1).float()
        if scale is not None and scale.numel() > 1:
            scale = scale.reshape(-1).repeat_interleave(k)
    used = _used_rows(len(rows), topk_ids, expert_map, num_local_experts, x.device)
    q, row_scale = quantize_rows(rows[None], scale, used[None], rule)
    return q[0], row_scale.view(-1) if rule.per_tensor else row_scale[0]


def activation_quantize(
    x: Tensor,
    scale: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_local_experts: int,
    activation: str,
    quant: str,
) -> tuple[Tensor, Tensor]:
    """Apply the activation, round to the dtype of ``x``, then `moe_quantize`."""
    h = activations.activation(x, activation)
    return moe_quantize(h, scale, None, topk_ids, expert_map, num_local_experts, quant)


def _used_rows(
    rows: int,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_local_experts: int,
    device: torch.device,
) -> Tensor:
    """Mask of the rows with at least one slot that is not skipped."""
    if topk_ids is None or rows == 0:
        return torch.ones(rows, dtype=torch.bool, device=device)
    return (local_experts(topk_ids, expert_map, num_local_experts).view(rows, -1) >= 0).any(1)


def quantize_rows(
    x: Tensor, scale: Tensor | None, used: Tensor, rule: Quant
) -> tuple[Tensor, Tensor]:
    """Quantize the ``used`` ``(E, M)`` rows of ``x`` ``(E, M, K)``, float32; others are zeros.

    ``scale``: given scales, one for all rows, one per expert or one per row; or the global scale,
    by which rows are divided first. None: scales from the data.
    """
    x = torch.where(used[..., None], x, 0.0).contiguous()
    if rule.global_scale and scale is not None:
        x, scale = x / scale.float().reshape(()), None
    shape = rule.batched_scale_shape(*x.shape)
    if scale is None:
        amax = _group_amax(x, rule)
        scale, _ = range_scale(-amax, amax, rule, torch.float32)
    else:
        experts, rows, _ = x.shape
        per_expert = scale.float().reshape((1, 1, 1) if scale.numel() == 1 else (experts, -1, 1))
        scale = per_expert.expand(shape).clone()
    if not rule.per_tensor and rule.scale_dtype == torch.float32:  # one-byte scales: 0 already
        scale = torch.where(used[..., None], scale, 0.0)
    divisor = _spread(scale_value(scale), rule, x.shape[2])
    ratio = torch.where(used[..., None] & (divisor != 0), x / divisor, 0.0)
    codes = encode(ratio, rule.element)
    return join_nibbles(codes, 2) if rule.element.values_per_byte == 2 else codes, scale


def _group_amax(x: Tensor, rule: Quant) -> Tensor:
    """The largest magnitude of each group: an expert's rows, a row, or a piece of a row."""
    experts, rows, width = x.shape
    if x.numel() == 0:
        return x.new_zeros(rule.batched_scale_shape(*x.shape))
    if rule.per_tensor:
        return x.abs().amax((1, 2), keepdim=True)
    cols = rule.shared_cols or width
    groups = torch.nn.functional.pad(x.abs(), (0, -width % cols)).view(experts, rows, -1, cols)
    return groups.amax(3)


def _spread(scale: Tensor, rule: Quant, width: int) -> Tensor:
    """Expand scales so that they broadcast to the rows."""
    if rule.group.cols == WHOLE:
        return scale
    return scale.repeat_interleave(rule.group.cols, 2)[..., :width]
