"""What follows the products in kernels for packed weights: scales, bias, activation, stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels._gemm.tile import activate
from moe_ops.kernels._hopper.fragments import UNIT


@gluon.jit
def row_of_sums(r, C: gl.constexpr):
    """The weight row of row r of a unit's sums, from the unit's first on."""
    row = r // 16 * 16 + r % 8 * 2 + r // 8 % 2
    if C.MIXED:
        row = row % (UNIT // 2) + row // (UNIT // 2) * (C.APART * UNIT)
    return row


@gluon.jit
def finish(acc, bias, scale, weight, expert, unit, v, C: gl.constexpr):
    """A unit's sums in the order of the weight's rows: scaled, weighted, with the bias.

    ``scale`` and ``weight`` are those of each column's slot, or None.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    r = gl.arange(0, UNIT, layout=gl.SliceLayout(1, LAYOUT))
    FIRST: gl.constexpr = UNIT // 2 if C.MIXED else UNIT  # rows from a unit's first to the next's
    at = expert * C.WEIGHT_ROWS + unit * FIRST + row_of_sums(r, C)
    inside = unit * UNIT + r < C.WEIGHT_ROWS  # a mixed unit is inside whole
    if C.RESTORE != 1.0:
        acc *= C.RESTORE
    if scale is not None:
        acc *= scale[None, :]
    if C.SCALED == "rows":
        acc *= gl.load(v.weight_scale + at // C.SCALE_ROWS, mask=inside, other=0.0).to(gl.float32)[
            :, None
        ]
    if C.GLOBAL_ROWS > 0:
        found = gl.load(v.row_scale + at // C.GLOBAL_ROWS, mask=inside, other=0.0)
        acc *= found[:, None]
    if weight is not None:
        acc *= weight[None, :]
    if bias is not None:
        acc += gl.load(bias + at, mask=inside, other=0.0).to(gl.float32)[:, None]
    ordered = acc.reshape((4, 2, 8, acc.shape[1])).permute((0, 2, 1, 3))
    return ordered.reshape((UNIT, acc.shape[1]))


@gluon.jit
def store_columns(out, value, column, slot, C: gl.constexpr):
    """Store sums, whose columns are slots, from an output column on; negative slots are skipped."""
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    if COLS > 32:
        left, right = value.reshape((ROWS, 2, COLS // 2)).permute((0, 2, 1)).split()
        near, far = slot.reshape((2, COLS // 2)).permute((1, 0)).split()
        store_columns(out, left, column, near, C)
        store_columns(out, right, column, far, C)
    else:
        WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
        to = gl.convert_layout(slot, gl.SliceLayout(0, WIDE))
        col = column + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
        at = out + to.to(gl.int64)[None, :] * C.N + col[:, None]
        mask = (to >= 0)[None, :] & (col < C.N)[:, None]
        gl.store(at, gl.convert_layout(value.to(out.dtype.element_ty), WIDE), mask=mask)


@gluon.jit
def store_mixed(out, value, column, slot, C: gl.constexpr):
    """Store the activation of sums of 32 gate rows and their up rows: see `store_columns`.

    Both of a pair move into one thread, for 16 slots at a time to need little shared memory.
    """
    RULE: gl.constexpr = C.RULE
    HALF: gl.constexpr = UNIT // 2
    COLS: gl.constexpr = value.shape[1]
    if COLS > 16:
        left, right = value.reshape((UNIT, 2, COLS // 2)).permute((0, 2, 1)).split()
        near, far = slot.reshape((2, COLS // 2)).permute((1, 0)).split()
        store_mixed(out, left, column, near, C)
        store_mixed(out, right, column, far, C)
    else:
        PAIRED: gl.constexpr = gl.BlockedLayout([2, 4, 1], [1, 8, 4], [1, 1, 4], [1, 2, 0])
        pairs = gl.convert_layout(value.reshape((2, HALF, COLS)), PAIRED)
        g, u = pairs.permute((1, 2, 0)).split()
        found = activate(g, u, RULE).to(out.dtype.element_ty)
        LAYOUT: gl.constexpr = found.type.layout
        to = gl.convert_layout(slot, gl.SliceLayout(0, LAYOUT))
        col = column + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        at = out + to.to(gl.int64)[None, :] * C.N + col[:, None]
        gl.store(at, found, mask=(to >= 0)[None, :] & (col < C.N)[:, None])


@gluon.jit
def store_units(out, bias, weights, scale, sums, units, slot, expert, v, C: gl.constexpr):
    """Apply what follows the products, and store; ``slot`` of each column, negative: none.

    ``scale``: that of each column's row, if rows are decoded; else None.
    """
    RULE: gl.constexpr = C.RULE
    UNITS: gl.constexpr = C.UNITS
    weight = None
    if weights is not None:
        weight = gl.load(weights + slot, mask=slot >= 0, other=0.0).to(gl.float32)
    expert = gl.maximum(expert, 0).to(gl.int64)
    if C.MIXED:
        both = finish(sums[0], bias, scale, weight, expert, units[0], v, C)
        store_mixed(out, both, units[0] * (UNIT // 2), slot, C)
    elif C.APART > 0:
        g = finish(sums[0], bias, scale, weight, expert, units[0], v, C)
        u = finish(sums[1], bias, scale, weight, expert, units[1], v, C)
        store_columns(out, activate(g, u, RULE), units[0] * UNIT, slot, C)
    else:
        for i in gl.static_range(UNITS):
            acc = finish(sums[i], bias, scale, weight, expert, units[i], v, C)
            if C.INTERLEAVED:
                pairs = acc.reshape((UNIT // 2, 2, acc.shape[1])).permute((0, 2, 1))
                g, u = pairs.split()
                store_columns(out, activate(g, u, RULE), units[i] * (UNIT // 2), slot, C)
            else:
                if RULE is not None:
                    acc = activate(acc, acc, RULE)
                store_columns(out, acc, units[i] * UNIT, slot, C)
