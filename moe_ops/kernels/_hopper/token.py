"""Gluon kernels of a layer for one token on Hopper: its two expert GEMMs, the second with the sum.

All the time goes into reading weights, and what these kernels are about is that memory is never
idle. GEMM 1 is shared out in boxes of 16 weight rows, so that all processors end together. GEMM 2
is let in when the last weights of GEMM 1 are on their way (programmatic dependent launch): beside
it on each processor it fills a ring with weights of its own, which depend on nothing that GEMM 1
computes, and only then waits for it. A program of GEMM 2 has the same columns of all slots, and so
all that is summed. Rows are quantized by every program anew, which takes less than a launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_ops.kernels._gemm.tile import activate
from moe_ops.kernels._hopper.packed import load_box
from moe_ops.kernels._hopper.schedule import wait_for_group
from moe_ops.kernels._hopper.vectors import PIECES, make_vectors, put_vectors
from moe_ops.kernels._hopper.weights import (
    OF_WARP,
    ROWS,
    Choices,
    copy_scales,
    expert_of,
    make_ring,
    multiply_tile,
    row_vectors,
    scale_and_shift,
    scales_at,
    stage_to_fill,
)

BOX_ROWS = gl.constexpr(16)
"""Of GEMM 1: 8 gate rows and their 8 up rows where an activation has a gate."""
BOXES = gl.constexpr(4)
"""Of a tile of GEMM 1, at most."""


@gluon.jit
def share(G: gl.constexpr):
    """The boxes of GEMM 1 that are this program's, and how many of them are a tile."""
    count: gl.constexpr = G.SLOTS * G.UNITS
    program, programs = gl.program_id(0), gl.num_programs(0)
    first, last = program * count // programs, (program + 1) * count // programs
    # Of six boxes four are a tile: few bytes on their way at the end cost less than fewer always.
    size = gl.where(last - first == BOXES + 1, BOXES - 1, BOXES)
    return first, last, size


@gluon.jit
def experts_of_boxes(choices, box, last, G: gl.constexpr):
    """Those of some boxes, and whether there are any; past the weight where there is none."""
    experts, real = (), gl.to_tensor(0)
    for i in gl.static_range(BOXES):
        found = expert_of(choices, (box + i) // G.UNITS, box + i < last)
        experts += (gl.where(found < 0, choices.num_experts, found),)
        real += (found >= 0).to(gl.int32)
    return experts, real > 0


@gluon.jit
def place_rows(box, last, choices, G: gl.constexpr, LAYOUT: gl.constexpr):
    """The slot, its expert (-1: none), the output column and the weight row of a tile's rows."""
    r = gl.arange(0, ROWS, layout=LAYOUT)
    at, inside = box + r // BOX_ROWS, r % BOX_ROWS
    slot, n = at // G.UNITS, at % G.UNITS
    found = expert_of(choices, slot, at < last)
    if G.GATED:
        column = n * (BOX_ROWS // 2) + inside % 8
        row = column * G.STEP + inside // 8 * G.UP
    else:
        column = n * BOX_ROWS + inside
        row = column
    return slot, found, column, row


@gluon.jit
def copy_rows(w_desc, w_scale, ring, choices, PIECE: gl.constexpr, G: gl.constexpr):
    """A copying warp of GEMM 1. Boxes past the weight's end become zeros, and nothing is read."""
    step = gl.to_tensor(0)
    first, last, size = share(G)
    leave = (last - first + size - 1) // size * (G.CHUNKS * G.STEPS) - G.LEAD
    for box in range(first, last, size):
        end = gl.minimum(box + size, last)
        experts, real = experts_of_boxes(choices, box, end, G)
        if real:
            _, found, _, row = place_rows(box, end, choices, G, OF_WARP)
            scale_at = scales_at(w_scale, gl.maximum(found, 0), row, G)
            for t in range(G.CHUNKS * G.STEPS):
                if step == leave:
                    gdc_launch_dependents()
                stage, full = stage_to_fill(step, ring, G)
                k = (PIECES * t + PIECE) * G.BLOCK_K
                copy_scales(scale_at, ring, stage, full, PIECES * t + PIECE, PIECE, G)
                for i in gl.static_range(BOXES):
                    n = (box + i) % G.UNITS
                    at = [experts[i], n, 0, 0, k] if G.GATED else [experts[i], n * BOX_ROWS, k]
                    load_box(
                        w_desc, at, full, ring.boxes.index((stage * PIECES + PIECE) * BOXES + i)
                    )
                step += 1
    gdc_launch_dependents()


@gluon.jit
def copy_rows_left(w_desc, w_scale, ring, choices, G: gl.constexpr):
    """See `copy_rows`."""
    copy_rows(w_desc, w_scale, ring, choices, 0, G)


@gluon.jit
def copy_rows_right(w_desc, w_scale, ring, choices, G: gl.constexpr):
    """See `copy_rows`."""
    copy_rows(w_desc, w_scale, ring, choices, 1, G)


@gluon.jit
def multiply_rows(x, x_scale, bias, w_scale, h, ring, vectors, choices, G: gl.constexpr):
    """The multiplying warp group of GEMM 1."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.COLUMNS, 32 // G.ITEMSIZE])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    RULE: gl.constexpr = G.RULE
    OUT: gl.constexpr = ROWS // 2 if G.GATED else ROWS
    WIDE: gl.constexpr = OUT // BOXES
    put_vectors(x, x_scale, vectors, G)
    step = gl.to_tensor(0)
    first, last, size = share(G)
    for box in range(first, last, size):
        end = gl.minimum(box + size, last)
        _, real = experts_of_boxes(choices, box, end, G)
        if real:
            slot, found, column, row = place_rows(box, end, choices, G, gl.SliceLayout(1, L))
            inside = (found >= 0) & (column < G.N)
            expert = gl.maximum(found, 0).to(gl.int64)
            rows = row_vectors(w_scale, bias, expert, row, inside, G)
            total, step = multiply_tile(step, ring, vectors, L, G)
            acc = gl.sum(total, 1)
            if G.WEIGHTED:
                acc *= gl.load(choices.weights + slot, mask=inside, other=0.0).to(gl.float32)
            acc = scale_and_shift(acc, rows, bias, G)
            if G.GATED:
                g, u = acc.reshape((BOXES, 2, BOX_ROWS // 2)).permute((0, 2, 1)).split()
                acc = activate(g, u, RULE).reshape((OUT,))
            elif RULE is not None:
                acc = activate(acc, acc, RULE)
            value = gl.convert_layout(acc.to(h.dtype.element_ty), FLAT)
            i = gl.arange(0, OUT, layout=FLAT)
            at = box + i // WIDE
            slot, column = at // G.UNITS, at % G.UNITS * WIDE + i % WIDE
            real_slot = expert_of(choices, slot, at < end) >= 0
            gl.store(h + slot * G.N + column, value, mask=real_slot & (column < G.N))


@gluon.jit(do_not_specialize=["num_ids", "num_experts"])
def hopper_token_kernel(
    x, x_scale, w_desc, bias, w_scale, h, topk_weights, topk_ids, expert_map, num_ids, num_experts,
    G: gl.constexpr,
):  # fmt: skip
    """GEMM 1: ``h[j] = f(x @ w[e].T + bias[e])`` with ``e = ids[j]``; rows of others stay."""
    ring, vectors = make_ring(w_desc, BOXES, G), make_vectors(w_desc.dtype, G)
    choices = Choices(topk_ids, topk_weights, expert_map, num_ids, num_experts)
    gdc_wait()
    gl.warp_specialize(
        [
            (multiply_rows, (x, x_scale, bias, w_scale, h, ring, vectors, choices, G)),
            (copy_rows_left, (w_desc, w_scale, ring, choices, G)),
            (copy_rows_right, (w_desc, w_scale, ring, choices, G)),
        ],
        [1, 1],
        [48, 48],
    )


@gluon.jit
def place_columns(unit, tile, choices, G: gl.constexpr, LAYOUT: gl.constexpr):
    """The slot, its expert (-1: none) and the output column of the rows of a tile of GEMM 2."""
    WIDE: gl.constexpr = ROWS // G.SLOTS_OF_TILE
    r = gl.arange(0, ROWS, layout=LAYOUT)
    slot = tile * G.SLOTS_OF_TILE + r // WIDE
    return slot, expert_of(choices, slot, slot < G.COUNT), unit * WIDE + r % WIDE


@gluon.jit
def copy_columns(w_desc, w_scale, ring, choices, PIECE: gl.constexpr, G: gl.constexpr):
    """A copying warp of GEMM 2: does not wait for what computes the rows."""
    TILES: gl.constexpr = G.TILES
    SLOTS: gl.constexpr = G.SLOTS_OF_TILE
    experts = ()
    for slot in gl.static_range(TILES * SLOTS):
        chosen = expert_of(choices, slot, slot < G.COUNT)
        experts += (gl.where(chosen < 0, choices.num_experts, chosen),)
    step = gl.to_tensor(0)
    for unit in range(gl.program_id(0), G.UNITS, gl.num_programs(0)):
        for tile in gl.static_range(TILES):
            _, found, column = place_columns(unit, tile, choices, G, OF_WARP)
            scale_at = scales_at(w_scale, gl.maximum(found, 0), column, G)
            for t in range(G.CHUNKS * G.STEPS):
                stage, full = stage_to_fill(step, ring, G)
                copy_scales(scale_at, ring, stage, full, PIECES * t + PIECE, PIECE, G)
                for s in gl.static_range(SLOTS):
                    at = [
                        experts[tile * SLOTS + s],
                        unit * (ROWS // SLOTS),
                        (PIECES * t + PIECE) * G.BLOCK_K,
                    ]
                    load_box(
                        w_desc, at, full, ring.boxes.index((stage * PIECES + PIECE) * SLOTS + s)
                    )
                step += 1


@gluon.jit
def copy_columns_left(w_desc, w_scale, ring, choices, G: gl.constexpr):
    """See `copy_columns`."""
    copy_columns(w_desc, w_scale, ring, choices, 0, G)


@gluon.jit
def copy_columns_right(w_desc, w_scale, ring, choices, G: gl.constexpr):
    """See `copy_columns`."""
    copy_columns(w_desc, w_scale, ring, choices, 1, G)


@gluon.jit
def multiply_columns(h, h_scale, bias, w_scale, out, ring, vectors, sums, choices, G: gl.constexpr):
    """The multiplying warp group of GEMM 2, which weights and sums."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.COLUMNS, 32 // G.ITEMSIZE])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    TILES: gl.constexpr = G.TILES
    SLOTS: gl.constexpr = G.SLOTS_OF_TILE
    WIDE: gl.constexpr = ROWS // SLOTS
    COUNT: gl.constexpr = G.COUNT
    vector = gl.arange(0, G.COLUMNS, layout=gl.SliceLayout(0, L)) % G.VECTORS
    by_slot = sums._reinterpret(gl.float32, [TILES * SLOTS, WIDE], sums.layout)
    slots, experts, weights = (), (), ()
    for tile in gl.static_range(TILES):  # before the wait, as they take as long as it
        slot, found, _ = place_columns(0, tile, choices, G, gl.SliceLayout(1, L))
        slots += (slot,)
        experts += (found,)
    gdc_wait()
    for tile in gl.static_range(TILES):
        weight = experts[tile]
        if G.WEIGHTED:
            real = experts[tile] >= 0
            weight = gl.load(choices.weights + slots[tile], mask=real, other=0.0).to(gl.float32)
        weights += (weight,)
    put_vectors(h, h_scale, vectors, G)
    step = gl.to_tensor(0)
    for unit in range(gl.program_id(0), G.UNITS, gl.num_programs(0)):
        for tile in gl.static_range(TILES):
            _, _, column = place_columns(unit, tile, choices, G, gl.SliceLayout(1, L))
            inside = (experts[tile] >= 0) & (column < G.N)
            expert = gl.maximum(experts[tile], 0).to(gl.int64)
            rows = row_vectors(w_scale, bias, expert, column, inside, G)
            total, step = multiply_tile(step, ring, vectors, L, G)
            acc = gl.sum(gl.where(slots[tile][:, None] == vector[None, :], total, 0.0), 1)
            acc = scale_and_shift(acc, rows, bias, G).to(out.dtype.element_ty).to(gl.float32)
            if G.WEIGHTED:
                acc *= weights[tile]
            sums.index(tile).store(gl.where(inside, acc, 0.0))
        wait_for_group()
        result = gl.full([WIDE], 0, gl.float32, FLAT)
        for j in gl.static_range(COUNT):
            result += by_slot.index(j).load(FLAT)
        wait_for_group()
        to = unit * WIDE + gl.arange(0, WIDE, layout=FLAT)
        gl.store(out + to, result.to(out.dtype.element_ty), mask=to < G.N)


@gluon.jit(do_not_specialize=["num_ids", "num_experts"])
def hopper_token_sum_kernel(
    h, h_scale, w_desc, bias, w_scale, out, topk_weights, topk_ids, expert_map, num_ids,
    num_experts, G: gl.constexpr,
):  # fmt: skip
    """GEMM 2: ``out = sum_j weights[j] * round(h[j] @ w[e].T + bias[e])`` with ``e = ids[j]``."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring, vectors = make_ring(w_desc, G.SLOTS_OF_TILE, G), make_vectors(w_desc.dtype, G)
    sums = gl.allocate_shared_memory(gl.float32, [G.TILES, ROWS], FLAT)
    if not G.EARLY:
        gdc_wait()
    choices = Choices(topk_ids, topk_weights, expert_map, num_ids, num_experts)
    gl.warp_specialize(
        [
            (multiply_columns, (h, h_scale, bias, w_scale, out, ring, vectors, sums, choices, G)),
            (copy_columns_left, (w_desc, w_scale, ring, choices, G)),
            (copy_columns_right, (w_desc, w_scale, ring, choices, G)),
        ],
        [1, 1],
        [48, 48],
    )
