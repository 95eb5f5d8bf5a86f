"""Outputs of the expert GEMMs of which only the weights are quantized."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.activation import formula
from moe_ops.scheme import get_scheme


def weight_only_gemm(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
) -> Tensor:
    """One row of ``N`` for each slot, in slot order."""
    _check(w_scale, w_zero_point, w_global_scale, scheme)
    return a.new_empty(a.shape[0] * top_k, w.shape[1])


def weight_only_gemm_act(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    w_zero_point: Tensor | None,
    w_global_scale: Tensor | None,
    bias: Tensor | None,
    input_weights: Tensor | None,
    plan: Tensor | None,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    row_tiles: Sequence[int],
    top_k: int,
    scheme: str,
    activation: str,
) -> Tensor:
    """One row of ``I`` for each slot, in slot order."""
    _check(w_scale, w_zero_point, w_global_scale, scheme)
    width = w.shape[1] // 2 if formula(activation).gated else w.shape[1]
    return a.new_empty(a.shape[0] * top_k, width)


def _check(
    scale: Tensor | None, zero_point: Tensor | None, global_scale: Tensor | None, scheme: str
) -> None:
    """A scheme of weights alone, with all that it needs."""
    known = get_scheme(scheme)
    quant = known.weight
    if quant is None or known.activation is not None:
        raise ValueError(f"scheme must quantize weights only, got {scheme!r}")
    for name, value, needed in (
        ("w_scale", scale, True),
        ("w_zero_point", zero_point, quant.zero_point),
        ("w_global_scale", global_scale, quant.global_scale),
    ):
        if (value is not None) != needed:
            rule = "be a Tensor" if needed else "be None"
            got = "None" if value is None else "a Tensor"
            raise ValueError(f"{name} must {rule} for scheme {scheme}, got {got}")
