"""Gluon kernel of an expert GEMM of few slots with packed weights: one token's GEMM 1.

A program computes one slot's results from one or two strips of weight rows. A job (see
`dequantized_jobs`) is an eighth of K. So programs are many and short: all fit on the GPU at once,
and their words are under way soon after the routing is known.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels._gemm.epilogue import activate, activate_rows
from moe_ops.kernels._hopper.dequantized_jobs import (
    ROWS,
    WARPS,
    JobInputs,
    add_jobs,
    add_parts,
    begin,
    find_experts,
    make_ring,
    strip_of,
)
from moe_ops.kernels._hopper.dequantized_store import finish_sums
from moe_ops.kernels._hopper.memory import reinterpret
from moe_ops.kernels._hopper.weights import Choices, expert_of
from moe_ops.kernels._runtime.dependent import take_turn


@gluon.jit
def strip_result(sums, i: gl.constexpr, strip, expert, added, factors_and_bias, C: gl.constexpr):
    """The finished sums of a strip's rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    row_scale, weight = added
    row = strip * ROWS + gl.arange(0, ROWS, layout=LAYOUT)
    acc = add_parts(sums, i * WARPS, WARPS, LAYOUT)
    at = expert.to(gl.int64) * C.WEIGHT_ROWS + row
    return finish_sums(acc, row_scale, weight, factors_and_bias, at, None, None, C)


@gluon.jit
def store_strip(out, value, column, inside):
    """Store a row's results from ``column`` on."""
    COUNT: gl.constexpr = value.shape[0]
    at = column + gl.arange(0, COUNT, layout=value.type.layout)
    gl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def store_strips(
    out, sums, block, expert, inside, added, factors_and_bias, C: gl.constexpr, S: gl.constexpr
):
    """Apply what follows the products, and store a slot's row."""
    RULE: gl.constexpr = C.RULE
    STRIPS: gl.constexpr = S.STRIPS
    HALF: gl.constexpr = STRIPS // 2
    if C.APART > 0:
        for i in gl.static_range(HALF):
            strip, above = strip_of(block, i, C, S), strip_of(block, i + HALF, C, S)
            g = strip_result(sums, i, strip, expert, added, factors_and_bias, C)
            u = strip_result(sums, i + HALF, above, expert, added, factors_and_bias, C)
            store_strip(out, activate(g, u, RULE), strip * ROWS, inside)
    else:
        for i in gl.static_range(STRIPS):
            strip = strip_of(block, i, C, S)
            acc = strip_result(sums, i, strip, expert, added, factors_and_bias, C)
            value = activate_rows(acc, RULE, 1, None)
            store_strip(out, value, strip * value.shape[0], inside)


@gluon.jit(do_not_specialize=["num_ids", "num_experts"])
def hopper_decode_slot_kernel(
    a, stride_am, words, stride_we, scale, zeros, bias, topk_weights, row_scale, out, factors,
    topk_ids, expert_map, num_ids, num_experts, C: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """``out[s] = f(row_scale[s // TOP_K] * a[s // TOP_K] @ dequantized(w[e]).T + bias[e])``.

    ``e = ids[s]``; slots without an expert here are skipped.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    inputs = JobInputs(a, stride_am, words, stride_we, scale, zeros)
    ring = make_ring(inputs, C, S)
    sums = gl.allocate_shared_memory(gl.float32, [S.SUMS, WARPS * ROWS], FLAT)
    choices = Choices(topk_ids, topk_weights, expert_map, num_ids, num_experts)
    slot, block = gl.program_id(0) // S.BLOCKS, gl.program_id(0) % S.BLOCKS
    take_turn(ROOM=S.ROOM)
    experts = find_experts(choices, slot, C, S)
    begin(inputs, ring, experts, slot, block, C, S)
    add_jobs(inputs, ring, sums, experts, slot, block, C, S)
    by_job = reinterpret(sums, gl.float32, [S.SUMS * WARPS, ROWS], FLAT)
    expert = expert_of(choices, slot, True)
    of_row, weight = None, None
    if row_scale is not None:
        of_row = gl.load(row_scale + slot // C.TOP_K)
    if topk_weights is not None:
        weight = gl.load(topk_weights + slot).to(gl.float32)
    to, added, factors_and_bias = (
        out + slot.to(gl.int64) * C.N,
        (of_row, weight),
        (scale, factors, bias),
    )
    store_strips(
        to, by_job, block, gl.maximum(expert, 0), expert >= 0, added, factors_and_bias, C, S
    )
