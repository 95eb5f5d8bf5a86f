"""Products of a weight in host memory: the waves of a call, and the streams that they run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from torch import Tensor

from moe_ops.dispatch.tile_plan import plan_to_read
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._runtime.slots import dense
from moe_ops.kernels.residency import make_resident, tiles_in_rows
from moe_ops.residency.slots import Residency, residency_of
from moe_ops.residency.state import wave_slots, waves_of


def waves(operands: GemmOperands, row_tile: int) -> Iterator[GemmOperands]:
    """Yield the operands of each wave of a product once its experts are in the slots.

    The first wave of the first weight's product serves both weights.

    Args:
        operands: their weight is in host memory.
        row_tile: the row tile of the plan.
    """
    owner, number = residency_of(operands.weight.host)
    _, topk_ids, expert_map = operands.tiles
    num_ids = topk_ids.numel()
    plan = plan_to_read(operands.tiles, num_ids, owner.num_experts)
    tiles = plan, topk_ids.contiguous(), dense(expert_map)
    most = wave_slots(owner.num_experts, owner.num_slots, num_ids)
    overlapping = most < owner.num_slots
    own = owner.take_ahead(operands.tiles) if number == 1 else None
    early = operands.early and own is not None
    if own is None:
        own, *others = out = tiles_in_rows(owner, number, tiles, overlapping=overlapping)
        _wait_for_other_stream(owner, topk_ids)
        make_resident(owner, number, tiles, row_tile, 0, out, most=most)
        owner.ahead = (operands.tiles, others[0]) if others else None
    weight, experts = owner.slots[number], owner.num_experts
    operands = operands._replace(weight=weight, tiles=own, early=early, experts=experts)
    if not overlapping:
        yield operands
        for wave in range(1, waves_of(experts, most, num_ids)):
            make_resident(owner, number, tiles, row_tile, wave, [own], most=most)
            yield operands
        return
    both = own, tiles_in_rows(owner, number, tiles, overlapping=overlapping)[0]
    count = waves_of(experts, most, num_ids)
    for wave in range(count):
        after = wave + 1
        if after < count:
            with _side_stream(owner, topk_ids):
                make_resident(owner, number, tiles, row_tile, after, [both[after % 2]], most=most)
        yield operands._replace(tiles=both[wave % 2])
        _join(owner, topk_ids)


@contextmanager
def _side_stream(owner: Residency, x: Tensor) -> Iterator[None]:
    """Context manager: launch beside what the current stream launches from now on."""
    if not x.is_cuda:
        yield
        return
    side = owner.side_stream = owner.side_stream or torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        yield


def _join(owner: Residency, x: Tensor) -> None:
    """Let the current stream wait for the one beside it."""
    if owner.side_stream is not None:
        torch.cuda.current_stream(x.device).wait_stream(owner.side_stream)


def _wait_for_other_stream(owner: Residency, x: Tensor) -> None:
    """Let the current stream wait for the stream of the call before, which uses the same slots.

    Calls that are captured wait for nothing: whoever replays them orders the replays.
    """
    if not x.is_cuda:
        return
    stream = triton.runtime.driver.active.get_current_stream(x.get_device())
    before = owner.stream
    if before is None:
        owner.stream = stream
    elif before != stream and not torch.cuda.is_current_stream_capturing():
        owner.stream = stream
        default = torch.cuda.default_stream(x.device)
        other = torch.cuda.ExternalStream(before, x.device) if before else default
        torch.cuda.current_stream(x.device).wait_stream(other)
