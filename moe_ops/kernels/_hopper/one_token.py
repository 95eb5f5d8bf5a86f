"""M = 1 decode kernels in Gluon for Hopper: GEMM 1, and GEMM 2 with the sum over slots.

All the time goes into reading weights, so these kernels keep memory busy throughout. GEMM 1 is
divided into boxes of 16 weight rows, so that all SMs end at the same time. It triggers the
programmatic dependent launch of GEMM 2 when its last weights are in flight. GEMM 2 then becomes
resident on each SM beside GEMM 1, fills its ring with its own weights, which do not depend on
GEMM 1, and only then waits for GEMM 1. A program of GEMM 2 computes the same columns of all slots,
and so all terms of their sum. Every program quantizes the rows again, which takes less time than a
launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_ops.kernels._gemm.epilogue import activate_rows
from moe_ops.kernels._hopper.memory import load_box, reinterpret, wait_for_group
from moe_ops.kernels._hopper.ring import stage_to_fill, turn_of
from moe_ops.kernels._hopper.vectors import PIECES, make_vectors, put_vectors
from moe_ops.kernels._hopper.weights import (
    OF_WARP,
    PIECE_BYTES,
    ROWS,
    Choices,
    copy_scales,
    expert_of,
    make_ring,
    multiply_tile,
    row_vectors,
    scale_and_shift,
    scales_at,
)

BOX_ROWS = gl.constexpr(16)
"""Weight rows of a box of GEMM 1: 8 gate rows and their 8 up rows if the activation has a gate."""
BOXES = gl.constexpr(4)
"""The most boxes of a tile of GEMM 1."""


@gluon.jit
def share(G: gl.constexpr):
    """This program's boxes of GEMM 1, from ``first`` to ``last - 1``, and the boxes per tile."""
    count: gl.constexpr = G.SLOTS * G.UNITS
    program, programs = gl.program_id(0), gl.num_programs(0)
    first, last = program * count // programs, (program + 1) * count // programs
    # Five boxes are two tiles of 3 + 2. Six are 4 + 2, not 3 + 3: fewer bytes in flight at the end
    # cost less than fewer bytes in flight all the time.
    size = gl.where(last - first == BOXES + 1, BOXES - 1, BOXES)
    return first, last, size


@gluon.jit
def experts_of_boxes(choices, box, last, G: gl.constexpr):
    """The experts of the boxes of a tile, and whether any box has one.

    A box without an expert gets the index ``num_experts``, which lies past the end of the weight.
    """
    experts, real = (), gl.to_tensor(0)
    for i in gl.static_range(BOXES):
        expert = expert_of(choices, (box + i) // G.UNITS, box + i < last)
        experts += (gl.where(expert < 0, choices.num_experts, expert),)
        real += (expert >= 0).to(gl.int32)
    return experts, real > 0


@gluon.jit
def place_rows(box, last, choices, G: gl.constexpr, LAYOUT: gl.constexpr):
    """For each row of a tile: its slot, its expert (-1: none), output column and weight row."""
    r = gl.arange(0, ROWS, layout=LAYOUT)
    at, inside = box + r // BOX_ROWS, r % BOX_ROWS
    slot, n = at // G.UNITS, at % G.UNITS
    chosen = expert_of(choices, slot, at < last)
    if G.GATED:
        column = n * (BOX_ROWS // 2) + inside % 8
        row = column * G.STEP + inside // 8 * G.UP
    else:
        column = n * BOX_ROWS + inside
        row = column
    return slot, chosen, column, row


@gluon.jit
def boxes_of(ring, desc, BOXES: gl.constexpr, G: gl.constexpr):
    """A ring's pieces as the boxes of a TMA descriptor, BOXES for each piece."""
    shape: gl.constexpr = [G.STAGES * PIECES * BOXES] + desc.block_shape
    return reinterpret(ring.weights, desc.dtype, shape, desc.layout)


@gluon.jit
def copy_rows(w_desc, w_scale, ring, choices, PIECE: gl.constexpr, G: gl.constexpr):
    """A copying warp of GEMM 1.

    TMA fills a box past the end of the weight with zeros, and reads nothing.
    """
    boxes, step = boxes_of(ring, w_desc, BOXES, G), gl.to_tensor(0)
    first, last, size = share(G)
    leave = (last - first + size - 1) // size * (G.CHUNKS * G.STEPS) - G.LEAD
    for box in range(first, last, size):
        end = gl.minimum(box + size, last)
        experts, real = experts_of_boxes(choices, box, end, G)
        if real:
            _, chosen, _, row = place_rows(box, end, choices, G, OF_WARP)
            scale_at = scales_at(w_scale, gl.maximum(chosen, 0), row, G)
            for t in range(G.CHUNKS * G.STEPS):
                if step == leave:
                    gdc_launch_dependents()
                stage, full = stage_to_fill(ring, turn_of(step, G))
                mbarrier.expect(full, PIECE_BYTES)
                k = (PIECES * t + PIECE) * G.BLOCK_K
                copy_scales(scale_at, ring, stage, full, PIECES * t + PIECE, PIECE, G)
                for i in gl.static_range(BOXES):
                    n = (box + i) % G.UNITS
                    at = [experts[i], n, 0, 0, k] if G.GATED else [experts[i], n * BOX_ROWS, k]
                    load_box(w_desc, at, full, boxes.index((stage * PIECES + PIECE) * BOXES + i))
                step += 1
    gdc_launch_dependents()


@gluon.jit
def multiply_rows(x, x_scale, bias, w_scale, h, ring, vectors, choices, G: gl.constexpr):
    """The multiplying warp group of GEMM 1: multiply, scale, activate and store."""
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
            slot, chosen, column, row = place_rows(box, end, choices, G, gl.SliceLayout(1, L))
            inside = (chosen >= 0) & (column < G.N)
            expert = gl.maximum(chosen, 0).to(gl.int64)
            rows = row_vectors(w_scale, bias, expert, row, inside, G)
            total, step = multiply_tile(step, ring, vectors, L, G)
            acc = gl.sum(total, 1)
            if G.WEIGHTED:
                acc *= gl.load(choices.weights + slot, mask=inside, other=0.0).to(gl.float32)
            acc = activate_rows(scale_and_shift(acc, rows, bias, G), RULE, BOX_ROWS // 2, None)
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
    """GEMM 1: ``h[j] = f(x @ w[e].T + bias[e])`` with ``e = ids[j]``.

    A row ``h[j]`` without a local expert is not written.
    """
    ring, vectors = make_ring(w_desc, G), make_vectors(w_desc.dtype, G)
    choices = Choices(topk_ids, topk_weights, expert_map, num_ids, num_experts)
    gdc_wait()
    gl.warp_specialize(
        [
            (multiply_rows, (x, x_scale, bias, w_scale, h, ring, vectors, choices, G)),
            (copy_rows, (w_desc, w_scale, ring, choices, 0, G)),
            (copy_rows, (w_desc, w_scale, ring, choices, 1, G)),
        ],
        [1, 1],
        [48, 48],
    )


@gluon.jit
def place_columns(unit, tile, choices, G: gl.constexpr, LAYOUT: gl.constexpr):
    """For each row of a tile of GEMM 2: its slot, its expert (-1: none) and its output column."""
    WIDE: gl.constexpr = ROWS // G.SLOTS_OF_TILE
    r = gl.arange(0, ROWS, layout=LAYOUT)
    slot = tile * G.SLOTS_OF_TILE + r // WIDE
    return slot, expert_of(choices, slot, slot < G.COUNT), unit * WIDE + r % WIDE


@gluon.jit
def copy_columns(w_desc, w_scale, ring, choices, PIECE: gl.constexpr, G: gl.constexpr):
    """A copying warp of GEMM 2, which does not wait for GEMM 1 (if G.EARLY)."""
    TILES: gl.constexpr = G.TILES
    SLOTS: gl.constexpr = G.SLOTS_OF_TILE
    experts = ()
    for slot in gl.static_range(TILES * SLOTS):
        chosen = expert_of(choices, slot, slot < G.COUNT)
        experts += (gl.where(chosen < 0, choices.num_experts, chosen),)
    boxes, step = boxes_of(ring, w_desc, SLOTS, G), gl.to_tensor(0)
    for unit in range(gl.program_id(0), G.UNITS, gl.num_programs(0)):
        for tile in gl.static_range(TILES):
            _, expert, column = place_columns(unit, tile, choices, G, OF_WARP)
            scale_at = scales_at(w_scale, gl.maximum(expert, 0), column, G)
            for t in range(G.CHUNKS * G.STEPS):
                stage, full = stage_to_fill(ring, turn_of(step, G))
                mbarrier.expect(full, PIECE_BYTES)
                copy_scales(scale_at, ring, stage, full, PIECES * t + PIECE, PIECE, G)
                for s in gl.static_range(SLOTS):
                    at = [
                        experts[tile * SLOTS + s],
                        unit * (ROWS // SLOTS),
                        (PIECES * t + PIECE) * G.BLOCK_K,
                    ]
                    load_box(w_desc, at, full, boxes.index((stage * PIECES + PIECE) * SLOTS + s))
                step += 1


@gluon.jit
def multiply_columns(h, h_scale, bias, w_scale, out, ring, vectors, sums, choices, G: gl.constexpr):
    """The multiplying warp group of GEMM 2: multiply, scale, weight, sum over slots and store."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G.COLUMNS, 32 // G.ITEMSIZE])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    TILES: gl.constexpr = G.TILES
    SLOTS: gl.constexpr = G.SLOTS_OF_TILE
    WIDE: gl.constexpr = ROWS // SLOTS
    COUNT: gl.constexpr = G.COUNT
    vector = gl.arange(0, G.COLUMNS, layout=gl.SliceLayout(0, L)) % G.VECTORS
    by_slot = reinterpret(sums, gl.float32, [TILES * SLOTS, WIDE], sums.layout)
    slots, experts, weights = (), (), ()
    for tile in gl.static_range(TILES):  # loaded before the wait, so that the wait hides the loads
        slot, chosen, _ = place_columns(0, tile, choices, G, gl.SliceLayout(1, L))
        slots += (slot,)
        experts += (chosen,)
    gdc_wait()
    for tile in gl.static_range(TILES):
        if G.WEIGHTED:
            real = experts[tile] >= 0
            weight = gl.load(choices.weights + slots[tile], mask=real, other=0.0)
            weights += (weight.to(gl.float32),)
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
    ring, vectors = make_ring(w_desc, G), make_vectors(w_desc.dtype, G)
    sums = gl.allocate_shared_memory(gl.float32, [G.TILES, ROWS], FLAT)
    if not G.EARLY:
        gdc_wait()
    choices = Choices(topk_ids, topk_weights, expert_map, num_ids, num_experts)
    gl.warp_specialize(
        [
            (multiply_columns, (h, h_scale, bias, w_scale, out, ring, vectors, sums, choices, G)),
            (copy_columns, (w_desc, w_scale, ring, choices, 0, G)),
            (copy_columns, (w_desc, w_scale, ring, choices, 1, G)),
        ],
        [1, 1],
        [48, 48],
    )
