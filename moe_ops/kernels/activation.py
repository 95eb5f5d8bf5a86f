"""Triton kernels of the activations and their derivatives; GEMM epilogues use their formulas."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.activation import Formula, formula
from moe_ops.dispatch.tiles import cdiv
from moe_ops.fake_impls.activation import activation as empty_output
from moe_ops.fake_impls.activation import moe_activation_backward as empty_gradients
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, local_experts, map_size, next_power_of_2


def activation_constants(rule: Formula) -> dict:
    """The constexpr arguments of a kernel that applies an activation."""
    return {
        "FUNCTION": rule.function,
        "LIMIT": rule.limit,
        "ALPHA": rule.alpha,
        "BETA": rule.beta,
        "LINEAR_BETA": rule.linear_beta,
    }


@triton.jit
def tanh(x):
    """Tanh without libdevice (which the interpreter lacks); a series where ``1 - e`` cancels."""
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    large = tl.where(x < 0, -large, large)
    s = x * x
    small = x * (1.0 + s * (-0.3333333333333333 + s * (0.13333333333333333 - s * 0.053968253968)))
    return tl.where(tl.abs(x) < 0.1, small, large)


@triton.jit
def bounded(x, LIMIT: tl.constexpr):
    """The smaller one; NaN stays NaN.

    An instruction for it, since LLVM moves what is added later into a comparison's branches. There
    it may become one with a product before, so that kernels of one formula had other bits.
    """
    return tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gate(g, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr):
    """The activation function of the gate, in float32."""
    if FUNCTION == "swiglu":
        if LIMIT is not None:
            g = bounded(g, LIMIT)
        value = g * tl.sigmoid(ALPHA * g)
    elif FUNCTION == "swiglustep":
        value = g * tl.sigmoid(g)
        value = bounded(value, LIMIT)
    elif FUNCTION == "situ":
        value = BETA * tanh(g / BETA) * tl.sigmoid(g)
    elif FUNCTION == "relu2":
        value = tl.where(g < 0, 0.0, g)
        value = value * value
    elif FUNCTION == "gelu_tanh":
        value = 0.5 * g * (1.0 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)))
    else:
        tl.static_assert(FUNCTION == "gelu")
        value = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    return value


@triton.jit
def up_factor(
    u, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr
):  # fmt: skip
    """The factor that up makes."""
    if LIMIT is not None:
        u = bounded(tl.maximum(u, -LIMIT, propagate_nan=tl.PropagateNan.ALL), LIMIT)
    if FUNCTION == "swiglu":
        u = u + BETA
    if LINEAR_BETA is not None:
        u = LINEAR_BETA * tanh(u / LINEAR_BETA)
    return u


@triton.jit
def gate_up(
    g, u, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):  # fmt: skip
    """The gated activation in float32."""
    factor = up_factor(u, FUNCTION, LIMIT, BETA, LINEAR_BETA)
    return gate(g, FUNCTION, LIMIT, ALPHA, BETA) * factor


@triton.jit
def gate_slope(
    g, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr
):  # fmt: skip
    """The derivative of `gate`, in float32; 0 where the gate is clamped."""
    if FUNCTION == "swiglu":
        x = g
        if LIMIT is not None:
            x = bounded(g, LIMIT)
        s = tl.sigmoid(ALPHA * x)
        slope = s + ALPHA * x * s * tl.sigmoid(-ALPHA * x)
        if LIMIT is not None:
            slope = tl.where(g > LIMIT, 0.0, slope)
    elif FUNCTION == "swiglustep":
        s = tl.sigmoid(g)
        slope = tl.where(g * s > LIMIT, 0.0, s + g * s * tl.sigmoid(-g))
    elif FUNCTION == "situ":
        t, s = tanh(g / BETA), tl.sigmoid(g)
        slope = s * (1.0 - t * t) + BETA * t * s * tl.sigmoid(-g)
    elif FUNCTION == "relu2":
        slope = tl.where(g < 0, 0.0, 2.0 * g)
    elif FUNCTION == "gelu_tanh":
        # (1 + tanh(z / 2)) / 2 is sigmoid(z), in whose tail nothing cancels.
        z = 1.5957691216057308 * (g + 0.044715 * g * g * g)
        inner = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        s = tl.sigmoid(z)
        slope = s + g * s * tl.sigmoid(-z) * inner
    else:
        tl.static_assert(FUNCTION == "gelu")
        density = 0.3989422804014327 * tl.exp(-0.5 * g * g)
        slope = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476)) + g * density
    return slope


@triton.jit
def up_slope(u, LIMIT: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """The derivative of `up_factor`, in float32."""
    slope = tl.full(u.shape, 1.0, tl.float32)
    if LINEAR_BETA is not None:
        t = tanh(u / LINEAR_BETA)
        slope = 1.0 - t * t
    if LIMIT is not None:
        slope = tl.where(tl.abs(u) > LIMIT, 0.0, slope)
    return slope


@triton.jit
def load_activated(
    source, col, inside, WIDTH, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):  # fmt: skip
    """Columns of the activation of the row at ``source``, in float32; zeros outside."""
    if GATED:
        if INTERLEAVED:
            g = tl.load(source + 2 * col, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(source + 2 * col + 1, mask=inside, other=0.0).to(tl.float32)
        else:
            g = tl.load(source + col, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(source + WIDTH + col, mask=inside, other=0.0).to(tl.float32)
        value = gate_up(g, u, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA)
    else:
        g = tl.load(source + col, mask=inside, other=0.0).to(tl.float32)
        value = gate(g, FUNCTION, LIMIT, ALPHA, BETA)
    return value


@triton.jit
def _activation_kernel(
    x, out, stride_row, WIDTH, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes a piece of one row."""
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < WIDTH
    value = load_activated(
        x + row * stride_row, col, inside, WIDTH, GATED, INTERLEAVED,
        FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA,
    )  # fmt: skip
    tl.store(out + row * WIDTH + col, value.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=1024)
def _activation_launch(activation: str, width: int) -> tuple[Launch, int]:
    """The kernel, and programs along a row."""
    rule, block = formula(activation), min(1024, next_power_of_2(width))
    kernel = Launch(
        _activation_kernel,
        GATED=rule.gated,
        INTERLEAVED=rule.interleaved,
        **activation_constants(rule),
        BLOCK=block,
    )
    return kernel, cdiv(width, block)


def activation(x: Tensor, activation: str) -> Tensor:
    """Launch one program for each piece of a row."""
    out = empty_output(x, activation)
    rows, width = out.shape
    if out.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        kernel, pieces = _activation_launch(activation, width)
        kernel((rows, pieces), x, out, x.stride(0), width)
    return out


@triton.jit
def _activation_backward_kernel(
    grad, x, topk_weights, topk_ids, expert_map, grad_x, activated, products, num_ids, num_experts,
    WIDTH: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, FUNCTION: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes the row of one slot; of a skipped slot, the product 0 alone."""
    take_turn()
    slot = tl.program_id(0).to(tl.int64)
    expert = local_experts(topk_ids, expert_map, slot, True, num_ids, num_experts)
    width = tl.where(expert >= 0, WIDTH, 0)
    weight = 1.0
    if topk_weights is not None:
        weight = tl.load(topk_weights + slot).to(tl.float32)
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else WIDTH
    COUNT: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < width
        at = slot * COUNT + STEP * col
        d = tl.load(grad + slot * WIDTH + col, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = gate(g, FUNCTION, LIMIT, ALPHA, BETA)
        slope = gate_slope(g, FUNCTION, LIMIT, ALPHA, BETA)
        if GATED:
            u = tl.load(x + at + UP, mask=inside, other=0.0).to(tl.float32)
            factor = up_factor(u, FUNCTION, LIMIT, BETA, LINEAR_BETA)
            d_up = d * value * up_slope(u, LIMIT, LINEAR_BETA) * weight
            tl.store(grad_x + at + UP, d_up.to(grad_x.dtype.element_ty), mask=inside)
            value, slope = value * factor, slope * factor
        tl.store(grad_x + at, (d * slope * weight).to(grad_x.dtype.element_ty), mask=inside)
        if activated is not None:
            rounded = (value * weight).to(activated.dtype.element_ty)
            tl.store(activated + slot * WIDTH + col, rounded, mask=inside)
        total += tl.where(inside, d * value, 0.0)
    tl.store(products + slot, tl.sum(total, 0))


@lru_cache(maxsize=1024)
def _backward_launch(activation: str, width: int) -> Launch:
    rule = formula(activation)
    return Launch(
        _activation_backward_kernel,
        WIDTH=width,
        GATED=rule.gated,
        INTERLEAVED=rule.interleaved,
        **activation_constants(rule),
        BLOCK=min(1024, next_power_of_2(width)),
    )


def moe_activation_backward(
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_local_experts: int,
    activation: str,
    activated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch one program per slot."""
    slots = (topk_ids, expert_map, num_local_experts)
    result = empty_gradients(grad, x, topk_weights, *slots, activation, activated)
    grad_x, rows, products = result
    if products.numel():
        _backward_launch(activation, grad.shape[1])(
            (x.shape[0],), grad.contiguous(), x.contiguous(), dense(topk_weights),
            topk_ids.contiguous(), dense(expert_map), grad_x, rows if activated else None, products,
            map_size(expert_map, num_local_experts), num_local_experts,
        )  # fmt: skip
    return result
