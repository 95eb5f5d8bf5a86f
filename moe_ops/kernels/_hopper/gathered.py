"""Gluon kernel of the expert GEMMs for many rows on Hopper: persistent and warp-specialised.

One warp issues TMA copies of tiles of both operands into a ring in shared memory. Two or three warp
groups multiply, each 64 rows of the output tile (or half of the columns of 64 rows), and write rows
to their slots. The kernel is bound by L2 bandwidth: tiles are as tall as registers allow, and with
a dynamic schedule boxes of 64 padding rows are neither copied nor multiplied.

The rows of the first operand are gathered and padded (`pack`), so that 64 of them are one TMA box;
or they are permuted rows without padding, and the last rows of a tile are not stored; or two more
warps fetch them where they lie (`fetched`). If the activation has a gate, a weight box alternates 8
gate rows with their 8 up rows: a thread then holds both elements of each pair, and the activation
needs no data exchange. A weight may be contiguous along its rows instead of along K.

Source: the structure is that of CUTLASS's and DeepGEMM's warp-specialised kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moe_ops.kernels._gemm.epilogue import activate_rows
from moe_ops.kernels._gemm.tile import COUNTED
from moe_ops.kernels._hopper.epilogue import RUN, finish_product, load_scales, weight_rows
from moe_ops.kernels._hopper.fetched import WARPS, fetch_rows
from moe_ops.kernels._hopper.find import plan_arguments
from moe_ops.kernels._hopper.memory import load_box
from moe_ops.kernels._hopper.products import (
    BOX_ROWS,
    add_products,
    add_scaled,
    add_wide,
    pass_by,
)
from moe_ops.kernels._hopper.ring import Ring, make_barriers, stage_to_fill, turn_of
from moe_ops.kernels._hopper.schedule import hear, make_queue, schedule
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.slots import HEADER


@gluon.jit
def copy_tiles(a_desc, w_desc, scale_desc, ring, queue, C: gl.constexpr):
    """The copying warp: copy every tile of both operands, in the order of the products.

    ``a_desc``, ``scale_desc``: None if other warps copy the rows and their scales.
    """
    BOXES: gl.constexpr = C.BLOCK_M // BOX_ROWS
    BOX_BYTES: gl.constexpr = C.BLOCK_K * C.ITEMSIZE * BOX_ROWS
    SCALE_BYTES: gl.constexpr = 4 * C.BLOCK_M if scale_desc is not None else 0
    BYTES: gl.constexpr = C.BLOCK_K * C.ITEMSIZE * C.BLOCK_N + SCALE_BYTES
    step, number = gl.to_tensor(0), gl.to_tensor(0)
    m, n, expert, first, boxes = hear(queue, number, 1)
    while boxes > 0:
        row = first if C.ORDERED == "a" else m * C.BLOCK_M
        for k in range(C.STEPS):
            stage, full = stage_to_fill(ring, turn_of(step, C))
            if a_desc is None:
                mbarrier.expect(full, BYTES)
            else:
                for count in gl.static_range(1, BOXES + 1):
                    mbarrier.expect(full, BYTES + count * BOX_BYTES, pred=boxes == count)
                for box in gl.static_range(BOXES):
                    at = [row + box * BOX_ROWS, k * C.BLOCK_K]
                    to = ring.rows.index(stage * BOXES + box)
                    load_box(a_desc, at, full, to, pred=box < boxes)
            if C.GATED:
                at = [expert, n * (C.OUT_N // 8), 0, 0, k * C.BLOCK_K]
            elif C.TRANSPOSED:
                at = [expert, k * C.BLOCK_K, n * C.OUT_N]
            else:
                at = [expert, n * C.OUT_N, k * C.BLOCK_K]
            load_box(w_desc, at, full, ring.weights.index(stage))
            if scale_desc is not None:
                at = [k, m * C.BLOCK_M]
                load_box(scale_desc, at, full, ring.scales.index(stage))
            step += 1
        number += 1
        m, n, expert, first, boxes = hear(queue, number, 1)


@gluon.jit
def store_rows(
    out, value, slot, first, num_slots, WIDTH: gl.constexpr, END: gl.constexpr
):  # fmt: skip
    """Store columns of rows to their slots, 64 columns at a time: 128 contiguous bytes per row.

    ``first``: the first column of the ``WIDTH`` of ``out``, of which columns from END on stay.
    """
    COLS: gl.constexpr = value.shape[1]
    if COLS > 64:
        left, right = value.reshape((value.shape[0], 2, COLS // 2)).permute((0, 2, 1)).split()
        store_rows(out, left, slot, first, num_slots, WIDTH, END)
        store_rows(out, right, slot, first + COLS // 2, num_slots, WIDTH, END)
    else:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        row = gl.convert_layout(slot, gl.SliceLayout(1, WIDE))
        n = first + gl.arange(0, COLS, layout=gl.SliceLayout(0, WIDE))
        at = out + row.to(gl.int64)[:, None] * WIDTH + n[None, :]
        mask = (row < num_slots)[:, None] & (n < END)[None, :]
        gl.store(at, gl.convert_layout(value.to(out.dtype.element_ty), WIDE), mask=mask)


@gluon.jit
def store_product(product, acc, slot, first, num_slots, C: gl.constexpr):
    """Store finished sums before the activation, each in the column of its weight row."""
    if C.GATED:
        PAIRS: gl.constexpr = acc.shape[1] // (2 * RUN)
        pairs = acc.reshape((acc.shape[0], PAIRS, 2, RUN)).permute((0, 1, 3, 2))
        if C.STEP == 1:
            g, u = pairs.split()
            g, u = g.reshape((acc.shape[0], PAIRS * RUN)), u.reshape((acc.shape[0], PAIRS * RUN))
            store_rows(product, g, slot, first, num_slots, C.WEIGHT_ROWS, C.N)
            store_rows(product + C.UP, u, slot, first, num_slots, C.WEIGHT_ROWS, C.N)
        else:  # the up row of a gate row is the next row
            both = pairs.reshape((acc.shape[0], 2 * PAIRS * RUN))
            store_rows(product, both, slot, 2 * first, num_slots, C.WEIGHT_ROWS, C.WEIGHT_ROWS)
    else:
        store_rows(product, acc, slot, first, num_slots, C.N, C.N)


@gluon.jit
def find_scales(expert, first, v, C: gl.constexpr):
    """Pointers to the scales of each part of a weight tile: of its gate rows and its up rows."""
    PARTS: gl.constexpr = C.PARTS
    GROUPS: gl.constexpr = (C.WEIGHT_ROWS + C.SCALE_ROWS - 1) // C.SCALE_ROWS
    scales = v.weight_scale + expert * (GROUPS * C.STEPS)
    pointers = ()
    for part in gl.static_range(PARTS):
        at = gl.minimum(first + part * (C.OUT_N // C.PARTS), C.N - 1) * C.STEP
        of_gate = scales + at // C.SCALE_ROWS * C.STEPS
        of_up = scales + (at + C.UP) // C.SCALE_ROWS * C.STEPS
        pointers += ((of_gate, of_up),)
    return pointers


@gluon.jit
def finish_and_store(
    acc, bias, row_scale, expert, first, v, to, row, num_slots, C: gl.constexpr
):  # fmt: skip
    """Finish and store a part, few columns at a time where it would need too many registers.

    ``to``: the result, and the product before the activation or None; ``row``: their rows.
    """
    COLS: gl.constexpr = acc.shape[1]
    FEW: gl.constexpr = 32 if C.GROUPS == 3 else 64
    TIGHT: gl.constexpr = C.GROUPS == 3 or (C.FETCHES and C.ITEMSIZE == 1)
    if COLS > FEW and (to[1] is not None or (TIGHT and bias is not None)):
        left, right = acc.reshape((acc.shape[0], 2, COLS // 2)).permute((0, 2, 1)).split()
        THEN: gl.constexpr = COLS * C.OUT_N // C.BLOCK_N // 2
        finish_and_store(left, bias, row_scale, expert, first, v, to, row, num_slots, C)
        finish_and_store(right, bias, row_scale, expert, first + THEN, v, to, row, num_slots, C)
    else:
        LAYOUT: gl.constexpr = acc.type.layout
        RULE: gl.constexpr = C.RULE
        out, product = to
        rows = weight_rows(first, COLS, gl.SliceLayout(0, LAYOUT), C)
        scale, weight = None, None
        if C.WEIGHTED:
            weight = gl.convert_layout(row_scale.to(gl.float32), gl.SliceLayout(1, LAYOUT))
        elif row_scale is not None:
            scale = gl.convert_layout(row_scale, gl.SliceLayout(1, LAYOUT))
        w_scale = None
        if C.ITEMSIZE == 1 and C.SCALE_COLS is None:
            w_scale = load_scales(expert, rows, v, C)
        acc = finish_product(acc, scale, w_scale, weight, bias, expert, rows, 1, C)
        if product is not None:
            store_product(product, acc, row[1], first, num_slots, C)
        value = activate_rows(acc, RULE, RUN, 1)
        store_rows(out, value, row[0], first, num_slots, C.N, C.N)


@gluon.jit
def multiply_tile(to, bias, ring, v, tile, step, GROUP: gl.constexpr, C: gl.constexpr):
    """Compute and store a warp group's share of a tile; return the next step of the ring."""
    PARTS: gl.constexpr = C.PARTS
    COLS: gl.constexpr = C.BLOCK_N // 2 if C.BY_COLUMNS else C.BLOCK_N // C.PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32 // C.ITEMSIZE])
    FIRST_ROW: gl.constexpr = 0 if C.BY_COLUMNS else GROUP * BOX_ROWS
    FIRST_COL: gl.constexpr = GROUP * (C.OUT_N // 2) if C.BY_COLUMNS else 0
    m, n, choice, first_row = tile
    expert = gl.maximum(choice, 0).to(gl.int64)
    first = n * C.OUT_N + FIRST_COL
    zeros = gl.full((BOX_ROWS, COLS), 0, gl.int32 if C.SUMS_INTEGERS else gl.float32, LAYOUT)
    sums = (zeros, zeros) if C.PARTS == 2 else (zeros,)
    if C.SCALE_COLS is not None:
        scales = find_scales(expert, first, v, C)
        sums, step = add_scaled(step, ring, scales, sums, GROUP, C)
    elif C.ITEMSIZE == 1 and not C.SUMS_INTEGERS:
        sums, step = add_wide(step, ring, sums, GROUP, C)
    else:
        sums, step = add_products(step, ring, sums, GROUP, C)
    inside = FIRST_ROW + gl.arange(0, BOX_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    place = m * C.BLOCK_M + inside
    slot = gl.load(v.tiles + HEADER + place)
    slot = gl.where(slot < 0, v.num_slots, slot)
    row_scale = None
    if C.WEIGHTED:
        row_scale = gl.load(v.row_scale + slot, mask=slot < v.num_slots, other=0.0)
    elif C.ITEMSIZE == 1 and C.SCALE_COLS is None:
        at = place
        if C.FETCHES:
            at = gl.minimum(slot, v.num_slots - 1) // C.TOP_K * C.ROW_SCALE_STRIDE
        row_scale = gl.load(v.row_scale + at)
    row = slot
    if C.ORDERED == "out":
        row = gl.where(slot < v.num_slots, first_row + inside, slot)
    # Store nothing for a tile without an expert.
    num_slots = gl.where(choice < 0, 0, v.num_slots)
    for part in gl.static_range(PARTS):
        column = first + part * (C.OUT_N // C.PARTS)
        rows = row, slot
        finish_and_store(sums[part], bias, row_scale, expert, column, v, to, rows, num_slots, C)
    return step


@gluon.jit
def multiply(to, bias, ring, queue, v, GROUP: gl.constexpr, C: gl.constexpr):
    """A multiplying warp group: compute its share of every tile of this program."""
    step, number = gl.to_tensor(0), gl.to_tensor(0)
    m, n, choice, first, boxes = hear(queue, number, 4)
    while boxes > 0:
        tile = m, n, choice, first
        if C.BY_COLUMNS or GROUP == 0:
            step = multiply_tile(to, bias, ring, v, tile, step, GROUP, C)
        else:
            if boxes > GROUP:
                step = multiply_tile(to, bias, ring, v, tile, step, GROUP, C)
            else:
                step = pass_by(step, ring, C)
        number += 1
        m, n, choice, first, boxes = hear(queue, number, 4)


@gluon.jit(do_not_specialize=COUNTED)
def hopper_gemm_kernel(
    out, product, a, pieces_am, a_desc, w_desc, scale_desc, bias, row_scale, weight_scale, counter,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C: gl.constexpr,
):  # fmt: skip
    """``out[s] = f(a[row of s] @ w[e].T + bias[e])``; padding rows are not written.

    ``product``: the result before f, in slot order, or None. ``a``: rows that are fetched,
    ``pieces_am`` pieces of 16 bytes after each other; or else ``a_desc`` and ``scale_desc``: rows
    that are gathered or permuted, and their scales of each step along K, if there are any.
    """
    STAGES: gl.constexpr = C.STAGES
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8 * C.ITEMSIZE, rank=2)
    boxes: gl.constexpr = [STAGES * (C.BLOCK_M // BOX_ROWS), BOX_ROWS, C.BLOCK_K]
    rows = gl.allocate_shared_memory(w_desc.dtype, boxes, SWIZZLED)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    scales = None
    if C.SCALE_COLS is not None:
        FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, C.BLOCK_M], FLAT)
    FETCHING: gl.constexpr = 32 * WARPS if C.FETCHES else 0
    barriers = make_barriers(STAGES, 1 + FETCHING, C.GROUPS)
    queue = make_queue(C.GROUPS + 1 + C.FETCHES, C.BLOCK_M if C.FETCHES else 0)
    fence_async_shared()
    ring = Ring(rows, weights, scales, None, *barriers)
    take_turn(LONG=True)
    scales, to = (row_scale, weight_scale), (out, product)
    v = plan_arguments(
        scales, tiles, expert_map, num_slots, num_ids, num_experts, num_entries, C
    )  # fmt: skip
    if C.FETCHES:
        gl.warp_specialize(
            [
                (multiply, (to, bias, ring, queue, v, 0, C)),
                (multiply, (to, bias, ring, queue, v, 1, C)),
                (fetch_rows, (a, pieces_am, ring, queue, v, C)),
                (copy_tiles, (a_desc, w_desc, scale_desc, ring, queue, C)),
                (schedule, (queue, counter, v, C)),
            ],
            [4, WARPS, 1, 1],
            [224, 56, 56, 56],
        )
    elif C.GROUPS == 3:
        gl.warp_specialize(
            [
                (multiply, (to, bias, ring, queue, v, 0, C)),
                (multiply, (to, bias, ring, queue, v, 1, C)),
                (multiply, (to, bias, ring, queue, v, 2, C)),
                (copy_tiles, (a_desc, w_desc, scale_desc, ring, queue, C)),
                (schedule, (queue, counter, v, C)),
            ],
            [4, 4, 1, 1],
            [160, 160, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (to, bias, ring, queue, v, 0, C)),
                (multiply, (to, bias, ring, queue, v, 1, C)),
                (copy_tiles, (a_desc, w_desc, scale_desc, ring, queue, C)),
                (schedule, (queue, counter, v, C)),
            ],
            [4, 1, 1],  # warps of each partition but the first
            [232, 24, 24],  # registers per thread of these; the first partition gets the rest
        )
