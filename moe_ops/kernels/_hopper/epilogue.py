"""Epilogue of the Hopper kernels for 16-bit and 8-bit operands: see `_gemm.epilogue`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels._gemm.epilogue import across, activate_rows, add_bias, along

RUN = gl.constexpr(8)
"""Gate rows that alternate with their up rows in a tile of the weight."""


@gluon.jit
def weight_rows(first, COUNT: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The weight row of each of COUNT rows of a tile, and whether it is inside.

    ``first``: the output column with which the rows begin. LAYOUT: of a vector of the rows.
    """
    r = gl.arange(0, COUNT, layout=LAYOUT)
    if C.GATED:
        column = first + r // (2 * RUN) * RUN + r % RUN
        row = column * C.STEP + (r // RUN % 2) * C.UP
    else:
        column = first + r
        row = column
    return row, column < C.N


@gluon.jit
def load_scales(expert, rows, v, C: gl.constexpr):
    """The scales of weight rows (from `weight_rows`), which span K."""
    GROUPS: gl.constexpr = (C.WEIGHT_ROWS + C.SCALE_ROWS - 1) // C.SCALE_ROWS
    at = v.weight_scale + expert * GROUPS + rows[0] // C.SCALE_ROWS
    return gl.load(at, mask=rows[1], other=0.0)


@gluon.jit
def finish_product(
    acc, scale, w_scale, weight, bias, expert, rows, AXIS: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Apply scales that span K, routing weights and the bias, in float32.

    ``scale``, ``weight``: of the slots, or None. ``rows``: weight rows (from `weight_rows`);
    ``w_scale``: their scales (from `load_scales`), or None.
    """
    row, inside = rows
    acc = acc.to(gl.float32)
    if w_scale is not None:
        acc *= across(scale, AXIS) * along(w_scale, AXIS)
    if weight is not None:
        acc *= across(weight, AXIS)
    return add_bias(acc, bias, expert * C.WEIGHT_ROWS, row, inside, AXIS)


@gluon.jit
def finish_sums(
    acc, scale, w_scale, weight, bias, expert, rows, AXIS: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """`finish_product`, followed by the activation."""
    RULE: gl.constexpr = C.RULE
    acc = finish_product(acc, scale, w_scale, weight, bias, expert, rows, AXIS, C)
    return activate_rows(acc, RULE, RUN, AXIS)
