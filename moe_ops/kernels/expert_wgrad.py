"""Triton kernels of the gradients of expert weights, biases and router weights.

The contraction runs over the slots of one expert, which lie side by side in the plan. One program
owns one tile of one expert's gradient, so sums have one order and experts without slots get zeros,
or stay as they are where sums are added to a gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.device import Device, device_facts
from moe_ops.dispatch.hopper import WGRAD_BAND, WGRAD_BLOCKS, WGRAD_STAGES, takes_wgrad
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.dispatch.tiles import cdiv, is_direct, row_tile
from moe_ops.fake_impls.expert_wgrad import expert_bias_grad as empty_biases
from moe_ops.fake_impls.expert_wgrad import expert_wgrad as empty_weights
from moe_ops.fake_impls.expert_wgrad import expert_wgrad_out as check_gradients
from moe_ops.fake_impls.expert_wgrad import slot_products as empty_products
from moe_ops.kernels._gemm.tile import COUNTED, add_dot, columns_of, planned_tiles, tile_arguments
from moe_ops.kernels._hopper.weight_gradient import STEP_ROWS, WeightGradientConstants
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import HEADER, dense, local_experts, map_size, next_power_of_2
from moe_ops.scheme import UNQUANTIZED
from moe_ops.tensors import AnyTiles, TensorSpec


@triton.jit
def rows_of_expert(tiles, expert, num_slots, num_ids, num_entries, TILE: tl.constexpr):
    """Begin and end of an expert's rows in the plan, or of all slots if no plan is read.

    The experts of a plan's tiles are ascending. A loop must not begin at ``begin``: from Triton 3.7
    on, loads of a loop whose first index comes from a sum are neither wide nor pipelined.
    """
    begin, end = 0, num_slots
    if num_ids is None:
        used = planned_tiles(tiles, num_entries, TILE)
        names = tiles + tl.load(tiles + 1)
        before, mine = tl.zeros((512,), tl.int32), tl.zeros((512,), tl.int32)
        for at in range(0, used, 512):
            i = at + tl.arange(0, 512)
            name = tl.load(names + i, mask=i < used, other=0x7FFFFFFF)
            before += (name < expert).to(tl.int32)
            mine += (name == expert).to(tl.int32)
        begin = tl.sum(before, 0) * TILE
        end = begin + tl.sum(mine, 0) * TILE
    return begin, end


@triton.jit
def load_slots_of(
    tiles, expert_map, start, end, expert, num_slots, num_ids, num_experts,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The slots of rows from ``start`` on (0, a safe address, for others), and which are real."""
    row = start + tl.arange(0, BLOCK_M)
    if num_ids is None:
        if TILE % BLOCK_M == 0:  # an expert's tiles are whole steps
            slot = tl.load(tiles + HEADER + row)
        else:
            slot = tl.load(tiles + HEADER + row, mask=row < end, other=-1)
        real = slot.to(tl.uint32) < num_slots.to(tl.uint32)
    else:
        owner = local_experts(tiles, expert_map, row, row < end, num_ids, num_experts)
        slot, real = row, owner == expert
    return tl.where(real, slot, 0).to(tl.uint32), real


@triton.jit
def load_grad_rows(dy, topk_weights, slot, real, n, inside, N: tl.constexpr, TOP_K: tl.constexpr):
    """Columns of the rows of slots, in float32 times router weights if there are any."""
    at = dy + (slot // TOP_K).to(tl.int64)[:, None] * N + n[None, :]
    d = tl.load(at, mask=real[:, None] & inside[None, :], other=0.0)
    if topk_weights is not None:
        weight = tl.load(topk_weights + slot, mask=real, other=0.0).to(tl.float32)
        d = d.to(tl.float32) * weight[:, None]
    return d


@triton.jit(do_not_specialize=COUNTED)
def _expert_wgrad_kernel(
    dy, x, topk_weights, out,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    N: tl.constexpr, K: tl.constexpr, DY_TOP_K: tl.constexpr, X_TOP_K: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """``out[e, n, k] = sum_s topk_weights[s] * dy[s // DY_TOP_K, n] * x[s // X_TOP_K, k]``.

    ADDS: added to ``out``, of which experts without slots are neither read nor written.
    """
    take_turn(LONG=True)
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PER_EXPERT: tl.constexpr = COLUMNS * ((N + BLOCK_N - 1) // BLOCK_N)
    expert, tile = tl.program_id(0) // PER_EXPERT, tl.program_id(0) % PER_EXPERT
    n, n_inside = columns_of(tile // COLUMNS, N, BLOCK_N)
    k, k_inside = columns_of(tile % COLUMNS, K, BLOCK_K)
    begin, end = rows_of_expert(tiles, expert, num_slots, num_ids, num_entries, TILE)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    rows = end - begin if num_ids is None else 0
    start = begin  # no bound of the loop: `rows_of_expert`
    for _ in range(0, end - begin, BLOCK_M):
        slot, real = load_slots_of(
            tiles, expert_map, start, end, expert, num_slots, num_ids, num_experts, TILE, BLOCK_M
        )
        start += BLOCK_M
        if ADDS and num_ids is not None:
            rows += tl.sum(real.to(tl.int32))
        r = load_grad_rows(x, None, slot, real, k, k_inside, K, X_TOP_K)
        d = load_grad_rows(dy, topk_weights, slot, real, n, n_inside, N, DY_TOP_K)
        acc = add_dot(acc, tl.trans(d.to(r.dtype)), r)
    at = out + (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    mask = n_inside[:, None] & k_inside[None, :]
    if ADDS:
        mask = mask & (rows > 0)
        acc += tl.load(at, mask=mask, other=0.0)
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTED)
def _expert_spans_kernel(
    spans, tiles, num_slots, num_entries, TILE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Program e stores the first row of expert e in the plan, and its number of steps.

    Padding comes last in a tile: steps of an expert's last tile that are all padding do not count.
    """
    take_turn()
    expert = tl.program_id(0)
    begin, end = rows_of_expert(tiles, expert, num_slots, None, num_entries, TILE)
    steps = (end - begin) // STEP
    for part in tl.static_range(1, TILE // STEP):
        slot = tl.load(tiles + HEADER + end - part * STEP, mask=end > begin, other=0)
        steps -= (slot.to(tl.uint32) >= num_slots.to(tl.uint32)).to(tl.int32)
    tl.store(spans + 2 * expert, begin)
    tl.store(spans + 2 * expert + 1, steps)


class WgradTiles(NamedTuple):
    """Blocks of a weight gradient: rows of a step, and rows and columns of the gradient."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def wgrad_tiles(n: int, k: int, itemsize: int, tile: int, device: Device) -> WgradTiles:
    """Default tiles, for rows of ``itemsize`` bytes per number and the plan's row tile."""
    most, block_m, stages = (128, 64, 4) if itemsize == 2 else (64, 16, 3)
    block_n, block_k = (max(16, min(most, next_power_of_2(size))) for size in (n, k))
    block_m = max(16, min(block_m, tile & -tile))
    stage = block_m * (block_n + block_k) * itemsize
    return WgradTiles(block_m, block_n, block_k, 4, min(stages, device.shared_memory // stage))


@lru_cache(maxsize=1024)
def _wgrad_launch(
    sizes: WgradTiles, n: int, k: int, top_k: tuple[int, int], tile: int, adds: bool
) -> Launch:
    return Launch(
        _expert_wgrad_kernel,
        N=n,
        K=k,
        DY_TOP_K=top_k[0],
        X_TOP_K=top_k[1],
        TILE=tile,
        BLOCK_M=sizes.block_m,
        BLOCK_N=sizes.block_n,
        BLOCK_K=sizes.block_k,
        ADDS=adds,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )


@lru_cache(maxsize=1024)
def _hopper_launches(
    n: int, k: int, top_k: tuple[int, int], tile: int, adds: bool
) -> tuple[Launch, Launch]:
    """The kernel that finds the rows of each expert, and the one that multiplies them."""
    constants = WeightGradientConstants(
        n, k, *top_k, *WGRAD_BLOCKS, GROUP_N=WGRAD_BAND, STAGES=WGRAD_STAGES, ADDS=adds
    )
    spans = Launch(_expert_spans_kernel, TILE=tile, STEP=STEP_ROWS.value)
    return spans, constants.launch


def launch_on_hopper(
    out: Tensor, dy: Tensor, x: Tensor, plan: Tensor, num_slots: int, tile: int, *, adds: bool
) -> None:
    """Launch one program per SM, which share out the tiles of all gradients."""
    num_experts, n, k = out.shape
    top_k = num_slots // dy.shape[0], num_slots // x.shape[0]
    find, multiply = _hopper_launches(n, k, top_k, tile, adds)
    spans = plan.new_empty(2 * num_experts)
    find((num_experts,), spans, plan, num_slots, plan.shape[0])
    most = num_experts * cdiv(n, WGRAD_BLOCKS[0]) * cdiv(k, WGRAD_BLOCKS[1])
    programs = min(device_facts(out.device).processors, most)
    multiply((programs,), dy, x, out, spans, plan, num_slots, num_experts)


def _slots_and_tile(
    dy: Tensor, tiles: AnyTiles, num_experts: int, scheme: str, batch_invariant: bool
) -> tuple[int, int]:
    """The number of slots, and the plan's row tile (16 if no plan is read)."""
    num_slots = dy.shape[0] if tiles[1] is None else tiles[1].numel()
    if num_slots == 0 or (tiles[1] is not None and is_direct(num_slots, num_experts)):
        return num_slots, 16
    rule = gemm_rule(scheme, dy, tiles, batch_invariant)
    return num_slots, row_tile(rule, num_slots, num_experts)


def expert_wgrad(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    scheme: str,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """Launch one program for each tile of each expert's gradient."""
    out = empty_weights(dy, x, topk_weights, tiles, num_experts, scheme, out_dtype, batch_invariant)
    num_slots, tile = _slots_and_tile(dy, tiles, num_experts, scheme, batch_invariant)
    if num_slots == 0:
        return out.zero_()
    _multiply(out, dy, x, topk_weights, tiles, num_slots, tile, adds=False)
    return out


def expert_wgrad_out(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    batch_invariant: bool = False,
    *,
    out: Tensor,
) -> None:
    """`expert_wgrad` whose float32 sums are added to ``out``."""
    check_gradients(dy, x, topk_weights, tiles, num_experts, batch_invariant, out=out)
    num_slots, tile = _slots_and_tile(dy, tiles, num_experts, UNQUANTIZED.key, batch_invariant)
    if num_slots:
        _multiply(out, dy, x, topk_weights, tiles, num_slots, tile, adds=True)


def _multiply(
    out: Tensor,
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_slots: int,
    tile: int,
    *,
    adds: bool,
) -> None:
    """Launch the kernel that takes the rows."""
    (num_experts, n, k), top_k = out.shape, (num_slots // dy.shape[0], num_slots // x.shape[0])
    dy, x, told = dy.contiguous(), x.contiguous(), tile_arguments(tiles, num_slots, num_experts)
    device = device_facts(x.device)
    rows = TensorSpec.of(dy), TensorSpec.of(x)
    if x.is_cuda and topk_weights is None and takes_wgrad(*rows, tile, device):
        launch_on_hopper(out, dy, x, told[0], num_slots, tile, adds=adds)
        return
    sizes = wgrad_tiles(n, k, x.itemsize, tile, device)
    if adds and sizes.block_n * sizes.block_k > 64 * 128:  # threads hold what sums are added to
        sizes = sizes._replace(num_warps=8)
    programs = num_experts * cdiv(n, sizes.block_n) * cdiv(k, sizes.block_k)
    launch = _wgrad_launch(sizes, n, k, top_k, tile, adds)
    launch((programs,), dy, x, dense(topk_weights), out, *told)


@triton.jit(do_not_specialize=COUNTED)
def _expert_bias_grad_kernel(
    dy, topk_weights, out,
    tiles, expert_map, num_slots, num_ids, num_experts, num_entries,
    N: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program sums a few columns of the rows of one expert."""
    take_turn()
    expert = tl.program_id(0)
    n, inside = columns_of(tl.program_id(1), N, BLOCK_N)
    begin, end = rows_of_expert(tiles, expert, num_slots, num_ids, num_entries, TILE)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    start = begin  # no bound of the loop: `rows_of_expert`
    for _ in range(0, end - begin, BLOCK_M):
        slot, real = load_slots_of(
            tiles, expert_map, start, end, expert, num_slots, num_ids, num_experts, TILE, BLOCK_M
        )
        start += BLOCK_M
        d = load_grad_rows(dy, topk_weights, slot, real, n, inside, N, TOP_K)
        total += d.to(tl.float32)
    tl.store(out + expert.to(tl.int64) * N + n, tl.sum(total, 0), mask=inside)


@lru_cache(maxsize=1024)
def _bias_launch(n: int, top_k: int, tile: int) -> tuple[Launch, int]:
    """The kernel, and programs along a row."""
    block = min(64, next_power_of_2(max(n, 16)))
    tiles = {"TILE": tile, "BLOCK_M": 32, "BLOCK_N": block}
    return Launch(_expert_bias_grad_kernel, N=n, TOP_K=top_k, **tiles), cdiv(n, block)


def expert_bias_grad(
    dy: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_experts: int,
    scheme: str,
    batch_invariant: bool = False,
) -> Tensor:
    """Launch one program for each piece of each expert's gradient."""
    out = empty_biases(dy, topk_weights, tiles, num_experts, scheme, batch_invariant)
    num_slots, tile = _slots_and_tile(dy, tiles, num_experts, scheme, batch_invariant)
    if num_slots == 0:
        return out.zero_()
    n = dy.shape[1]
    launch, pieces = _bias_launch(n, num_slots // dy.shape[0], tile)
    launch(
        (num_experts, pieces), dy.contiguous(), dense(topk_weights), out,
        *tile_arguments(tiles, num_slots, num_experts),
    )  # fmt: skip
    return out


@triton.jit
def _slot_products_kernel(
    x, y, topk_ids, expert_map, out, num_ids, num_experts, WIDTH,
    TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program multiplies the rows of one slot; a skipped slot's are not read."""
    take_turn()
    slot = tl.program_id(0).to(tl.int64)
    expert = local_experts(topk_ids, expert_map, slot, True, num_ids, num_experts)
    row = tl.where(expert >= 0, expert, 0).to(tl.int64) if BY_EXPERT else slot
    width = tl.where(expert >= 0, WIDTH, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        a = tl.load(x + slot // TOP_K * WIDTH + col, mask=col < width, other=0.0)
        b = tl.load(y + row * WIDTH + col, mask=col < width, other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)
    tl.store(out + slot, tl.sum(total, 0))


@lru_cache(maxsize=1024)
def _products_launch(top_k: int, width: int, by_expert: bool) -> Launch:
    block = min(1024, next_power_of_2(width))
    return Launch(_slot_products_kernel, TOP_K=top_k, BY_EXPERT=by_expert, BLOCK=block)


def slot_products(
    x: Tensor,
    y: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_local_experts: int,
    by_expert: bool,
) -> Tensor:
    """Launch one program per slot."""
    slots = (topk_ids, expert_map, num_local_experts)
    out = empty_products(x, y, *slots, by_expert)
    width = x.shape[1]
    if out.numel():
        _products_launch(topk_ids.shape[1], width, by_expert)(
            (out.numel(),), x.contiguous(), y.contiguous(), topk_ids.contiguous(),
            dense(expert_map), out, map_size(expert_map, num_local_experts), num_local_experts,
            width,
        )  # fmt: skip
    return out
