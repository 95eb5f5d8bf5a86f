"""Reference of the kernel that makes experts resident."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from moe_ops.reference.slots import local_experts
from moe_ops.residency.slots import Residency, residency_of
from moe_ops.residency.state import (
    BEGUN,
    BYTES,
    CLOCK,
    COUNTERS,
    HITS,
    LEFT,
    MIRROR,
    MISSES,
    WAVES,
    waves_of,
)
from moe_ops.tensors import AnyTiles, ExpertWeight


def make_resident(
    owner: Residency,
    number: int,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    wave: int,
    most: int | None = None,
) -> None:
    """Copy the missing experts of a wave, and write the wave's rows: see `residency.state`.

    Args:
        owner: the slots.
        number: the number of the weight.
        topk_ids: ``(T, k)``, in which any number stands for a slot that is skipped.
        expert_map: the local expert of each global one.
        wave: the number of the wave.
        most: the most experts of a wave; None: K.
    """
    state, at, most = owner.state[number], owner.layout, most or owner.num_slots
    slot = state[at.slot : at.last_use].tolist()
    used = state[at.last_use : at.keys].tolist()
    now = int(state[CLOCK])
    begun = int(state[BEGUN]) if wave else now
    ids = local_experts(topk_ids, expert_map, owner.num_experts)
    todo = [expert for expert in ids[ids >= 0].unique().tolist() if used[expert] < begun]
    resident = [expert for expert in todo if slot[expert] >= 0 and used[expert] >= 0]
    missing = [expert for expert in todo if expert not in resident]
    resident = resident[:most]
    gains = missing[: most - len(resident)]

    present = (*resident, *gains)
    others = [expert for expert, held in enumerate(slot) if held >= 0 and expert not in present]
    others.sort(key=lambda expert: (used[expert], slot[expert]))
    for expert, loser in zip([e for e in gains if slot[e] < 0], others, strict=False):
        slot[expert], slot[loser] = slot[loser], -1
    for expert in gains:
        for source, copy in owner.pairs[number]:
            copy[slot[expert]].copy_(source[expert])
            state[BYTES] += source[expert].nbytes
    rows = torch.full((owner.num_experts,), -1, dtype=torch.int32, device="cpu")
    for expert in present:
        rows[expert], used[expert] = slot[expert], now
    owner.row_maps[number].copy_(rows)
    if not wave or todo:
        state[at.slot : at.keys] = torch.tensor([*slot, *used], device=state.device)
        state[CLOCK] = now + 1
    state[BEGUN], state[LEFT] = begun, len(todo) - len(present)
    state[HITS] += len(resident)
    state[MISSES] += len(gains)
    state[WAVES] += bool(todo)
    if int(state[MIRROR]):
        owner.counters[number].copy_(state[HITS : HITS + COUNTERS])


def in_waves(weight: ExpertWeight, tiles: AnyTiles) -> Iterator[tuple[ExpertWeight, Tensor]]:
    """Yield the slots and the slot of each expert for each wave of a product.

    Args:
        weight: it is in host memory.
        tiles: the fields of a `Tiles`, with ``topk_ids``.
    """
    owner, number = residency_of(cast(Tensor, weight.host))
    _, topk_ids, expert_map = tiles
    ids = cast(Tensor, topk_ids)
    for wave in range(max(1, waves_of(owner.num_experts, owner.num_slots, ids.numel()))):
        make_resident(owner, number, ids, expert_map, wave)
        yield owner.slots[number], owner.row_maps[number]
