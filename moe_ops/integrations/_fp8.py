"""transformers' fp8 experts (``FP8Experts``), as `fused_experts` takes them.

Weights are e4m3 with block scales or one scale per expert (gate and up each have their own), or
packed e2m1 with one scale per 32 elements. Nothing is copied, except scales if gate rows do not
fill their last block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import FP8Experts

from moe_ops import checks, ops
from moe_ops.activation import MoEActivation
from moe_ops.gradients import inference_only
from moe_ops.integrations._experts import Weights, scheme_named
from moe_ops.pipeline.gemms import expert_weights, gemm
from moe_ops.pipeline.layer_checks import check_layer
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.scheme import WHOLE, FusedMoEQuantConfig, Group, Quant
from moe_ops.scheme.values import ELEMENTS
from moe_ops.tensors import Routing, Rows

EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)
"""Dtypes of scales that are powers of two."""


class ScaleLayout(NamedTuple):
    """The layout of the scales of a module's weights."""

    stored: int
    """Rows of a block in the module."""
    used: int
    """Rows of a block in the scheme: fewer if gate rows do not fill their last block."""
    parts: int
    """Number of pieces of the first weight whose blocks begin at their own first row."""


def is_quantized(module: Any) -> bool:
    """Whether a module is transformers' ``FP8Experts`` and its weights are not dequantized."""
    return isinstance(module, FP8Experts) and module.down_proj.dtype not in checks.FLOATS


def unsupported(experts: Any) -> str:
    """Say why this library does not run a quantized module; empty if it does."""
    if "parametrizations" in experts._modules:
        return "weights that PEFT adds adapters to (adapt(model) runs the adapters beside them)"
    (w1, w1_scale), block = _first_weight(experts), experts.block_size
    if w1.dtype == torch.int8:
        if w1_scale.dtype not in EXPONENTS:
            return f"fp4 weights with scales of {w1_scale.dtype} (scale_fmt='ue8m0' works)"
        if experts.activation_scheme == "static":
            return "static activation scales with fp4 weights (activation_scheme='dynamic' works)"
        return ""
    if w1.dtype != torch.float8_e4m3fn:
        return f"weights of {w1.dtype} (e4m3 and packed fp4 work)"
    if block is None:
        return ""
    if any(size < 16 or size & (size - 1) for size in block):
        return f"weight_block_size {list(block)} (powers of two from 16 on work)"
    if _blocks(experts) is None:
        shape, scales = tuple(w1.shape), tuple(w1_scale.shape)
        return f"scales {scales} of a weight {shape} (one a block of {list(block)} works)"
    return ""


def fp8_weights(experts: Any) -> Weights:
    """Return the weights of an ``FP8Experts`` module with their scales.

    Scales of activations are not powers of two even if the weights' scales are (e8m0), as in
    transformers' kernels on Hopper.

    Raises:
        NotImplementedError: a module that is not supported, with the reason from `unsupported`.
    """
    reason = unsupported(experts)
    if reason:
        raise NotImplementedError(
            f'experts_implementation="moe_ops" must have supported experts, got '
            f"{type(experts).__name__} with {reason}"
        )
    (w1, w1_scale), (w2, w2_scale) = _first_weight(experts), _second(experts)
    if w1.dtype == torch.int8:  # already in the layout of kernels: even k in the low nibble
        scales = {"w1_scale": w1_scale.view(torch.uint8), "w2_scale": w2_scale.view(torch.uint8)}
        config = FusedMoEQuantConfig(scheme_named("mxfp4_w4a16"), **scales)
        return Weights(w1.view(torch.uint8), w2.view(torch.uint8), None, None, config)
    blocks = _blocks(experts)
    scheme = "fp8_channel"  # one scale per expert is the scale of each row
    if blocks is None:
        blocks = ScaleLayout(WHOLE, WHOLE, 1)
    else:
        rows, cols = blocks.used, experts.block_size[1]
        scheme = f"fp8_block{rows}" if rows == cols else f"fp8_block{rows}x{cols}"
    w1_scale = _scales(w1_scale, w1.shape[1], blocks)
    w2_scale = _scales(w2_scale, w2.shape[1], blocks._replace(parts=1))
    config = FusedMoEQuantConfig(scheme_named(scheme), w1_scale=w1_scale, w2_scale=w2_scale)
    return Weights(w1, w2, None, None, config)


def static_scales(experts: Any) -> tuple[Tensor, Tensor]:
    """Return the scales ``(E,)`` of both GEMMs' inputs, for a static ``activation_scheme``."""
    return experts.gate_up_proj_activation_scale, experts.down_proj_activation_scale


@inference_only
def static_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    config: FusedMoEQuantConfig,
    input_scales: tuple[Tensor, Tensor],
    routing: Routing,
    gate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Run `gated_experts` with given input scales per expert, which makes one row per slot.

    Args:
        hidden_states: ``(T, H)``.
        w1: see `gated_experts`.
        w2: see `gated_experts`.
        config: scheme and scales of the weights.
        input_scales: float32 ``(E,)``, for the first and the second GEMM.
        routing: routing of the tokens.
        gate: see `gated_experts`.
    """
    topk_weights, topk_ids, expert_map = routing
    scheme, num_experts, dtype = config.scheme, w1.shape[0], hidden_states.dtype
    kind = MoEActivation.SILU if w1.shape[1] == 2 * w2.shape[2] else MoEActivation.SILU_NO_MUL
    check_layer(*routing, -1, hidden_states, w1, w2, None, None, kind, scheme, *config.tensors)
    tokens, k = topk_ids.shape
    expert = topk_ids.flatten().clamp(0, num_experts - 1)  # rows of sentinels are not read
    space = SlotRows.of(routing, num_experts, scheme, dtype)
    both = expert_weights(w1, w2, config)

    cols = None if config.block_shape is None else config.block_shape[1]

    def quantized(rows: Tensor, scales: Tensor) -> Rows:
        slots = topk_ids.view(-1, 1), expert_map, num_experts
        q, scale = ops.moe_quantize(rows, scales.float()[expert], None, *slots, STATIC.key)
        groups = 1 if cols is None else -(-rows.shape[1] // cols)
        return Rows(q, scale.expand(-1, groups).contiguous())

    x = hidden_states[:, None].expand(tokens, k, -1).flatten(0, 1)
    h = gate(gemm(quantized(x, input_scales[0]), both.w1, space, 1, scheme, dtype))
    h = h.to(dtype).contiguous()
    y = gemm(quantized(h, input_scales[1]), both.w2, space, 1, scheme, dtype)
    return ops.moe_fused_mul_sum(y, topk_weights, topk_ids, expert_map, None, num_experts)


STATIC = Quant(ELEMENTS["fp8"], Group(1, WHOLE), static=True)
"""A given scale for each row."""


def _first_weight(experts: Any) -> tuple[Tensor, Tensor]:
    if experts.has_gate:
        return experts.gate_up_proj, experts.gate_up_proj_scale_inv
    return experts.up_proj, experts.up_proj_scale_inv


def _second(experts: Any) -> tuple[Tensor, Tensor]:
    return experts.down_proj, experts.down_proj_scale_inv


def _blocks(experts: Any) -> ScaleLayout | None:
    """Return the layout of block scales; None: one scale per expert, or scales that do not fit.

    Gate and up are quantized separately. If gate rows do not fill their last block, the up rows'
    first block begins in the middle of a block that is counted from the first gate row. Smaller
    blocks that end with the gate rows store the same scales.
    """
    if experts.block_size is None:
        return None
    (w1, scale), rows = _first_weight(experts), experts.block_size[0]
    n, count = w1.shape[1], scale.shape[1]
    if count == -(-n // rows):
        return ScaleLayout(rows, rows, 1)
    used = min(rows, (n // 2) & -(n // 2))
    if experts.has_gate and count == 2 * -(-(n // 2) // rows) and used >= 16:
        return ScaleLayout(rows, used, 2)
    return None


def _scales(scale: Tensor, n: int, blocks: ScaleLayout) -> Tensor:
    """Return the scales of a weight with ``n`` rows, one per block of the scheme; e8m0 as bytes."""
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if blocks.used == blocks.stored:
        return scale
    count = -(-n // blocks.parts // blocks.used)
    pieces = scale.unflatten(1, (blocks.parts, -1))
    pieces = pieces.repeat_interleave(blocks.stored // blocks.used, 2)
    return pieces[:, :, :count].flatten(1, 2)
