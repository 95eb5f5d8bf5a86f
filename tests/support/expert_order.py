"""Two expert GEMMs, with the rows between them by slot and in expert order."""

import torch
from products import plain_product

from moe_ops import ops
from moe_ops.reference.slots import local_experts


def places(ids, expert_map, num_experts, direct):
    """The slots of local experts, and their rows in expert order."""
    expert = local_experts(ids, expert_map, num_experts)
    slots = (expert >= 0).nonzero().flatten()
    if direct:
        return slots, slots
    order = expert[slots].argsort(stable=True)
    return slots[order], torch.arange(len(slots), device=ids.device)


def poisoned(rows, places, count):
    """Rows at their places, among others that hold NaN."""
    out = rows.new_full((count, rows.shape[1]), torch.nan)
    out[places] = rows
    return out


def check_both_orders(first, second, plan, k, activation, at, invariant=False):
    """Rows between two products by slot, and by expert: ``at`` says where they are."""
    (slots, rows), (w2, *rest) = at, second
    one, two = (
        plain_product(ops, *first, [*plan], k, activation, ordered, invariant)
        for ordered in (False, True)
    )
    assert one.shape == two.shape and torch.equal(one[slots], two[rows])
    h, count = one[slots], len(one)
    one, two = (
        plain_product(ops, poisoned(h, at, count), w2, *rest, [*plan], 1, "", at is rows, invariant)
        for at in (slots, rows)
    )
    assert one[slots].isfinite().all() and torch.equal(one[slots], two[slots])
