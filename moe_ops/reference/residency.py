"""References of the operators for experts in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.reference import expert_product as products
from moe_ops.reference.slots import local_experts
from moe_ops.reference.weight_and_reduce import moe_fused_mul_sum
from moe_ops.residency.slots import Waves, residency_of
from moe_ops.residency.state import (
    BYTES,
    CLOCK,
    HITS,
    MIRROR,
    MISSES,
    MISSING,
    RESIDENT,
    WAVES,
    StateLayout,
    waves_of,
)
from moe_ops.sizes import activated
from moe_ops.tensors import AnyTiles, ExpertWeight


def make_resident(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    state: Tensor,
    num_experts: int,
    num_slots: int,
) -> None:
    """Decide which slot every wanted expert gets in which wave, and write that to ``state``.

    Missing experts take the slots of experts that the call does not want, the one used longest ago
    first (of several, the first slot; empty slots come before all). Experts that find no slot left
    are the later waves, K at a time in the order of experts, in the slots 0, 1, .. Slots whose
    content will change hold no expert until the last copy of the call.

    Args:
        topk_ids: ``(T, k)``, in which any number stands for a slot that is skipped.
        expert_map: the local expert of each global one.
        state: see `StateLayout`.
        num_experts: E, local experts.
        num_slots: K.
    """
    at = StateLayout(num_experts, num_slots)
    ids = local_experts(topk_ids, expert_map, num_experts)
    wanted = ids[ids >= 0].unique().tolist()
    held = state[at.held : at.last_use].tolist()
    last_use = state[at.last_use : at.pending].tolist()
    slot_of = {expert: slot for slot, expert in enumerate(held) if expert >= 0}
    resident = [expert for expert in wanted if expert in slot_of]
    missing = [expert for expert in wanted if expert not in slot_of]

    kept = {slot_of[expert] for expert in resident}
    others = [slot for slot in range(num_slots) if slot not in kept]
    others.sort(key=lambda slot: (-1 if held[slot] < 0 else last_use[slot], slot))
    now, pending = int(state[CLOCK]), [*held]
    place = [-1] * num_experts
    for expert in resident:
        place[expert] = slot_of[expert]
        last_use[slot_of[expert]] = now
    targets = []
    for number, expert in enumerate(missing, len(resident)):
        wave, slot = divmod(number, num_slots)
        if wave == 0:
            slot = others[number - len(resident)]
        place[expert] = wave * num_slots + slot
        targets.append(slot)
        pending[slot], last_use[slot] = expert, now
    held = [old if old == new else -1 for old, new in zip(held, pending, strict=True)]

    rest = [-1] * (num_experts - len(missing))
    parts = (held, last_use, pending, place, [*missing, *rest], [*targets, *rest])
    written = torch.tensor([x for part in parts for x in part], dtype=torch.int64)
    state[at.held : at.held + len(written)] = written.to(state.device)
    state[CLOCK] += 1
    state[HITS] += len(resident)
    state[MISSES] += len(missing)
    state[WAVES] += waves_of(num_experts, num_slots, len(wanted))
    state[RESIDENT], state[MISSING] = len(resident), len(missing)


def copy_experts(
    table: Tensor, state: Tensor, num_experts: int, num_slots: int, wave: int, last: bool
) -> None:
    """Copy the missing experts of a wave to their slots, and write the wave's rows to ``state``.

    Args:
        table: rows of `Residency.table`: the tensors to copy.
        state: see `StateLayout`.
        num_experts: E.
        num_slots: K.
        wave: the wave.
        last: whether all that the call copies is in the slots then.
    """
    owner, at = residency_of(table)[0], StateLayout(num_experts, num_slots)
    resident, missing = int(state[RESIDENT]), int(state[MISSING])
    first = max(0, wave * num_slots - resident)
    end = min(missing, (wave + 1) * num_slots - resident)
    for number in range(first, end):
        expert, slot = int(state[at.experts + number]), int(state[at.targets + number])
        for source, target in owner.pairs_of(table):
            target[slot].copy_(source[expert])
            state[BYTES] += source[expert].nbytes
    place = state[at.place : at.experts]
    rows = torch.where(place // num_slots == wave, place % num_slots, -1)
    at.rows_of(state).copy_(rows)
    if last:
        state[at.held : at.last_use] = state[at.pending : at.place]
    if int(state[MIRROR]):
        owner.counters.copy_(state[HITS : HITS + len(owner.counters)])


_WAVES = Waves(make_resident, copy_experts)


def host_product(
    a: Tensor,
    a_scale: Tensor | None,
    table: Tensor,
    state: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    num_rows: int,
    out_dtype: torch.dtype,
    activation: str = "",
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """`expert_product` with a weight in host memory, wave by wave into the same rows.

    Args:
        a: as in `expert_product`, like every argument not named here.
        a_scale: see `expert_product`.
        table: one of `Residency.tables`.
        state: `Residency.state`.
        topk_weights: see `expert_product`.
        tiles: the fields of a `Tiles`, with ``topk_ids``.
        top_k: see `expert_product`.
        num_rows: N, rows of the weight.
        out_dtype: see `expert_product`.
        activation: see `expert_product`.
        expert_order: see `expert_product`.
        batch_invariant: see `expert_product`.
    """
    scheme, width = residency_of(table)[0].scheme, activated("w", num_rows, activation)
    out = a.new_zeros((a.shape[0] * top_k, width), dtype=out_dtype)

    def multiply(weight: ExpertWeight) -> None:
        products.expert_product(
            a,
            a_scale,
            weight,
            topk_weights,
            tiles,
            top_k,
            scheme,
            out_dtype,
            activation,
            expert_order,
            batch_invariant,
            out=out,
        )

    _WAVES.run(table, state, tiles, multiply)
    return out


def host_product_sum(
    a: Tensor,
    a_scale: Tensor | None,
    table: Tensor,
    state: Tensor,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    num_rows: int,
    out_dtype: torch.dtype,
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """``out[t] = sum_j topk_weights[t, j] * y[t * k + j]``; y is the `host_product` of slots."""
    y = host_product(
        a,
        a_scale,
        table,
        state,
        None,
        tiles,
        1,
        num_rows,
        out_dtype,
        "",
        expert_order,
        batch_invariant,
    )
    _, topk_ids, expert_map = tiles
    experts = residency_of(table)[0].num_experts
    return moe_fused_mul_sum(y, topk_weights, topk_ids, expert_map, None, experts)
