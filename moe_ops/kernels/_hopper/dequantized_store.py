"""Epilogue of the kernels that dequantize weights in registers: see `_gemm.epilogue`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels._gemm.epilogue import (
    across,
    activate,
    activate_rows,
    add_bias,
    multiply_by,
)
from moe_ops.kernels._hopper.fragments import UNIT, restoring


@gluon.jit
def row_of_sums(r, C: gl.constexpr):
    """The weight row of row r of a unit's sums, from the unit's first on."""
    row = r // 16 * 16 + r % 8 * 2 + r // 8 % 2
    if C.MIXED:
        row = row % (UNIT // 2) + row // (UNIT // 2) * (C.APART * UNIT)
    return row


@gluon.jit
def finish_sums(acc, x_scale, weight, vectors, at, inside, AXIS: gl.constexpr, C: gl.constexpr):
    """Sums of weight rows ``at`` (of all experts): scaled, weighted, with the bias.

    ``x_scale``, ``weight``: of the slots, or None. ``vectors``: the weight's scales, its global
    scales and the bias. ``inside``, AXIS: see `_gemm.epilogue`.
    """
    scale, factor, bias = vectors
    RESTORING: gl.constexpr = restoring(C)
    if RESTORING != 1.0:
        acc *= RESTORING
    if x_scale is not None:
        acc *= across(x_scale, AXIS)
    if C.SCALED == "rows":
        acc = multiply_by(acc, scale, at // C.SCALE_ROWS, inside, AXIS)
    if C.GLOBAL_ROWS > 0:
        acc = multiply_by(acc, factor, at // C.GLOBAL_ROWS, inside, AXIS)
    if weight is not None:
        acc *= across(weight, AXIS)
    return add_bias(acc, bias, 0, at, inside, AXIS)


@gluon.jit
def finish_unit(acc, bias, scale, weight, expert, unit, v, C: gl.constexpr):
    """A unit's finished sums, in the order of the weight's rows: see `finish_sums`."""
    r = gl.arange(0, UNIT, layout=gl.SliceLayout(1, acc.type.layout))
    FIRST: gl.constexpr = UNIT // 2 if C.MIXED else UNIT  # rows from a unit's first to the next's
    at = expert * C.WEIGHT_ROWS + unit * FIRST + row_of_sums(r, C)
    inside = unit * UNIT + r < C.WEIGHT_ROWS  # a mixed unit is inside whole
    acc = finish_sums(acc, scale, weight, (v.weight_scale, v.row_scale, bias), at, inside, 0, C)
    ordered = acc.reshape((4, 2, 8, acc.shape[1])).permute((0, 2, 1, 3))
    return ordered.reshape((UNIT, acc.shape[1]))


@gluon.constexpr_function
def store_layout(ROWS, COLS):
    """The layout ``(ROWS, COLS)`` of a unit's results, as they lie in registers of its sums.

    A thread has each two neighbours of 64 rows; eight threads have 32 bytes of a slot.
    """
    pair = ROWS // 32
    registers = [[1, 0]] * (pair == 2) + [[0, 1]]
    registers += [[0, 8 * 2**i] for i in range((COLS // 8).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [pair, 0], [2 * pair, 0], [4 * pair, 0]]
    warps = [[8 * pair, 0], [16 * pair, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS, COLS])


@gluon.jit
def real_slots(slot, expert, v):
    """The slots of columns, and the number of slots: there are no others to be stored."""
    count = v.num_slots
    slot = gl.minimum(slot.to(gl.uint32, bitcast=True), count.to(gl.uint32)).to(gl.int32)
    return slot, gl.where(expert >= 0, count, 0)


@gluon.jit
def left_and_right(x):
    """The halves of a matrix's columns."""
    ROWS: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
    return x.reshape((ROWS, 2, COLS // 2)).permute((0, 2, 1)).split()


@gluon.jit
def near_and_far(x, left):
    """The halves of what each column has one of; ``left``: half of a matrix of such columns."""
    HALF: gl.constexpr = left.shape[1]
    LAYOUT: gl.constexpr = gl.SliceLayout(0, left.type.layout)
    near, far = x.reshape((2, HALF)).permute((1, 0)).split()
    near = gl.convert_layout(near, LAYOUT, assert_trivial=True)
    return near, gl.convert_layout(far, LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def wide_layout(ROWS):
    """A layout in which a thread has 16 bytes of a slot: eight rows."""
    return gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])


@gluon.jit
def store_columns(out, value, column, slots, C: gl.constexpr):
    """Store sums, whose columns are slots, from an output column on.

    They are stored from where they lie. A warp group with two sums of more columns has no registers
    for so many addresses, or none are left for its products (C7512): there they move through shared
    memory, 32 columns at a time.
    """
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    MOVED: gl.constexpr = C.UNITS == 2 and COLS > 16
    if MOVED and COLS > 32:
        left, right = left_and_right(value)
        near, far = near_and_far(slots[0], left)
        store_columns(out, left, column, (near, slots[1]), C)
        store_columns(out, right, column, (far, slots[1]), C)
    else:
        LAYOUT: gl.constexpr = wide_layout(ROWS) if MOVED else store_layout(ROWS, COLS)
        value = gl.convert_layout(value.to(out.dtype.element_ty), LAYOUT)
        slot = gl.convert_layout(slots[0], gl.SliceLayout(0, LAYOUT))
        col = column + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        at = out + slot.to(gl.int64)[None, :] * C.N + col[:, None]
        gl.store(at, value, mask=(slot < slots[1])[None, :] & (col < C.N)[:, None])


@gluon.jit
def store_mixed(out, value, column, slots, C: gl.constexpr):
    """Store the activation of sums of 32 gate rows and their up rows: see `store_columns`.

    Both of a pair move into one thread, for 16 slots at a time to need little shared memory.
    """
    RULE: gl.constexpr = C.RULE
    HALF: gl.constexpr = UNIT // 2
    COLS: gl.constexpr = value.shape[1]
    if COLS > 16:
        left, right = left_and_right(value)
        near, far = near_and_far(slots[0], left)
        store_mixed(out, left, column, (near, slots[1]), C)
        store_mixed(out, right, column, (far, slots[1]), C)
    else:
        PAIRED: gl.constexpr = gl.BlockedLayout([2, 4, 1], [1, 8, 4], [1, 1, 4], [1, 2, 0])
        pairs = gl.convert_layout(value.reshape((2, HALF, COLS)), PAIRED)
        g, u = pairs.permute((1, 2, 0)).split()
        value_of_gates = activate(g, u, RULE).to(out.dtype.element_ty)
        LAYOUT: gl.constexpr = value_of_gates.type.layout
        slot = gl.convert_layout(slots[0], gl.SliceLayout(0, LAYOUT))
        col = column + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        at = out + slot.to(gl.int64)[None, :] * C.N + col[:, None]
        gl.store(at, value_of_gates, mask=(slot < slots[1])[None, :] & (col < C.N)[:, None])


@gluon.jit
def store_gated(out, bias, scale, weight, sums, units, slots, expert, v, C: gl.constexpr):
    """Store the activation of a unit of gate rows and the unit of their up rows.

    Sums of fp8 products, 32 columns at a time: else too few registers are left for the loop before
    them, which has the sums of a stage besides, and a word is spilled.
    """
    RULE: gl.constexpr = C.RULE
    COLS: gl.constexpr = sums[0].shape[1]
    if C.FP8 and COLS > 32:
        g, u = left_and_right(sums[0]), left_and_right(sums[1])
        near, far = near_and_far(slots[0], g[0])
        scales, weights = near_and_far(scale, g[0]), (None, None)
        if weight is not None:
            weights = near_and_far(weight, g[0])
        left, right = (near, slots[1]), (far, slots[1])
        store_gated(out, bias, scales[0], weights[0], (g[0], u[0]), units, left, expert, v, C)
        store_gated(out, bias, scales[1], weights[1], (g[1], u[1]), units, right, expert, v, C)
    else:
        g = finish_unit(sums[0], bias, scale, weight, expert, units[0], v, C)
        u = finish_unit(sums[1], bias, scale, weight, expert, units[1], v, C)
        store_columns(out, activate(g, u, RULE), units[0] * UNIT, slots, C)


@gluon.jit
def store_units(out, bias, weights, scale, sums, units, slots, expert, v, C: gl.constexpr):
    """Apply what follows the products, and store; ``slots`` of the columns: from `real_slots`.

    ``scale``: that of each column's row, if rows are decoded; else None.
    """
    RULE: gl.constexpr = C.RULE
    UNITS: gl.constexpr = C.UNITS
    weight = None
    if weights is not None:
        weight = gl.load(weights + gl.minimum(slots[0], v.num_slots - 1)).to(gl.float32)
    expert = gl.maximum(expert, 0).to(gl.int64)
    if C.MIXED:
        both = finish_unit(sums[0], bias, scale, weight, expert, units[0], v, C)
        store_mixed(out, both, units[0] * (UNIT // 2), slots, C)
    elif C.APART > 0:
        store_gated(out, bias, scale, weight, sums, units, slots, expert, v, C)
    else:
        for i in gl.static_range(UNITS):
            acc = finish_unit(sums[i], bias, scale, weight, expert, units[i], v, C)
            value = activate_rows(acc, RULE, 1, 0)
            store_columns(out, value, units[i] * value.shape[0], slots, C)
