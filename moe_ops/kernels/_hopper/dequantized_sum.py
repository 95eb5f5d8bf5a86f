"""Gluon kernel of GEMM 2 with the weighted sum over slots, for one token and packed weights.

A program computes 16 columns of all slots, and so all terms of their sums. A job (see
`dequantized_jobs`) is a slot or, with few slots, a part of K of a slot. If `GemmOperands.early`
allows it, the kernel requests its first words before it waits for GEMM 1's rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels._hopper.dequantized_jobs import (
    ROWS,
    WARPS,
    JobInputs,
    add_jobs,
    add_parts,
    begin,
    begin_columns,
    begin_weights,
    find_experts,
    make_ring,
)
from moe_ops.kernels._hopper.dequantized_store import finish_sums
from moe_ops.kernels._hopper.memory import reinterpret
from moe_ops.kernels._hopper.weights import Choices, expert_of
from moe_ops.kernels._runtime.dependent import take_turn


@gluon.jit
def slot_result(sums, slot: gl.constexpr, factors_and_bias, row_scale, choices, column, OUT, C, S):
    """A slot's weighted result, rounded before it is weighted; 0 if its expert is not here."""
    LAYOUT: gl.constexpr = column.type.layout
    PARTS: gl.constexpr = S.PARTS
    expert = expert_of(choices, slot, True)
    at = gl.maximum(expert, 0).to(gl.int64) * C.WEIGHT_ROWS + column
    acc = add_parts(sums, slot * PARTS, PARTS, LAYOUT)
    scale = None
    if row_scale is not None:
        scale = gl.load(row_scale + slot)
    acc = finish_sums(acc, scale, None, factors_and_bias, at, None, None, C).to(OUT).to(gl.float32)
    if choices.weights is not None:
        acc *= gl.load(choices.weights + slot).to(gl.float32)
    return gl.where(expert >= 0, acc, 0.0)


@gluon.jit(do_not_specialize=["num_ids", "num_experts"])
def hopper_decode_sum_kernel(
    h, stride_hm, words, stride_we, scale, zeros, bias, topk_weights, row_scale, out, factors,
    topk_ids, expert_map, num_ids, num_experts, C: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """``out = sum_j weights[j] * round(row_scale[j] * h[j] @ dequantized(w[e]).T + bias[e])``.

    ``e = ids[j]``.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COLUMNS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    OUT: gl.constexpr = out.dtype.element_ty
    COUNT: gl.constexpr = S.COUNT
    inputs = JobInputs(h, stride_hm, words, stride_we, scale, zeros)
    ring = make_ring(inputs, C, S)
    sums = gl.allocate_shared_memory(gl.float32, [S.SUMS, WARPS * ROWS], FLAT)
    choices = Choices(topk_ids, topk_weights, expert_map, num_ids, num_experts)
    strip = gl.program_id(0)
    if S.EARLY:
        experts = find_experts(choices, 0, C, S)
        begin_weights(inputs, ring, experts, 0, strip, C, S)
    take_turn()
    if S.EARLY:
        begin_columns(inputs, ring, experts, 0, C, S)
    else:
        experts = find_experts(choices, 0, C, S)
        begin(inputs, ring, experts, 0, strip, C, S)
    add_jobs(inputs, ring, sums, experts, 0, strip, C, S)
    by_job = reinterpret(sums, gl.float32, [S.SUMS * WARPS, ROWS], FLAT)
    column = strip * ROWS + gl.arange(0, ROWS, layout=COLUMNS)
    factors_and_bias = scale, factors, bias
    total = gl.full((ROWS,), 0, gl.float32, COLUMNS)
    for slot in gl.static_range(COUNT):
        total += slot_result(by_job, slot, factors_and_bias, row_scale, choices, column, OUT, C, S)
    gl.store(out + column, total.to(OUT))
