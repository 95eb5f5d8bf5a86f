"""Epilogue of the expert GEMM kernels: what follows the products of a tile, in float32.

The sums of a tile are multiplied by scales and routing weights, get the bias, and go through the
activation. AXIS is the axis of the sums along which weight rows lie: 1 if slots are rows, 0 if
operands are swapped, None if the sums are a vector of weight rows of one slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.activation import gate, gate_up


@triton.jit
def along(x, AXIS: tl.constexpr):
    """A vector along an axis of a tile's sums."""
    if AXIS is None:
        value = x
    elif AXIS == 1:
        value = x[None, :]
    else:
        value = x[:, None]
    return value


@triton.jit
def across(x, AXIS: tl.constexpr):
    """A vector of slots beside weight rows along AXIS; a number if AXIS is None."""
    return x if AXIS is None else along(x, 1 - AXIS)


@triton.jit
def load_vector(pointers, inside):
    """Load float32 elements, 0 outside; ``inside``: None if all are inside."""
    value = tl.load(pointers) if inside is None else tl.load(pointers, mask=inside, other=0.0)
    return value.to(tl.float32)


@triton.jit
def multiply_by(acc, vector, at, inside, AXIS: tl.constexpr):
    """Multiply by the elements ``at`` of a vector along AXIS; nothing without a vector."""
    if vector is not None:
        acc *= along(load_vector(vector + at, inside), AXIS)
    return acc


@triton.jit
def add_bias(acc, bias, first, row, inside, AXIS: tl.constexpr):
    """Add the bias of each weight row, counted from ``first``; nothing without a bias."""
    if bias is not None:
        acc += along(load_vector(bias + first + row, inside), AXIS)
    return acc


@triton.jit
def activate(g, u, RULE: tl.constexpr):
    """Apply a `Formula` to gate and up, in float32; to ``g`` alone if the formula is not gated."""
    FUNCTION: tl.constexpr = RULE.function
    LIMIT: tl.constexpr = RULE.limit
    ALPHA: tl.constexpr = RULE.alpha
    BETA: tl.constexpr = RULE.beta
    LINEAR_BETA: tl.constexpr = RULE.linear_beta
    if RULE.gated:
        value = gate_up(g, u, FUNCTION, LIMIT, ALPHA, BETA, LINEAR_BETA)
    else:
        value = gate(g, FUNCTION, LIMIT, ALPHA, BETA)
    return value


@triton.jit
def activate_rows(acc, RULE: tl.constexpr, RUN: tl.constexpr, AXIS: tl.constexpr):
    """Apply an activation, if any, to sums in which RUN gate rows alternate with their up rows."""
    if RULE is not None and RULE.gated:
        PAIRS: tl.constexpr = acc.shape[1 if AXIS == 1 else 0] // (2 * RUN)
        if AXIS == 1:
            pairs = acc.reshape((acc.shape[0], PAIRS, 2, RUN)).permute((0, 1, 3, 2))
            g, u = pairs.split()
            acc = activate(g, u, RULE).reshape((acc.shape[0], PAIRS * RUN))
        elif AXIS == 0:
            pairs = acc.reshape((PAIRS, 2, RUN, acc.shape[1])).permute((0, 2, 3, 1))
            g, u = pairs.split()
            acc = activate(g, u, RULE).reshape((PAIRS * RUN, acc.shape[1]))
        else:
            g, u = acc.reshape((PAIRS, 2, RUN)).permute((0, 2, 1)).split()
            acc = activate(g, u, RULE).reshape((PAIRS * RUN,))
    elif RULE is not None:
        acc = activate(acc, acc, RULE)
    return acc


@triton.jit
def store_tile(out, value, row, n, real, inside, N: tl.constexpr):
    """Store the real rows and the columns inside of a tile, in the dtype of ``out`` (rows, N)."""
    at = out + row[:, None] * N + n[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
