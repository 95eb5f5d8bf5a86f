"""Experts in host memory of which the device holds some: memory, slots, and who is in which slot.

A *store* holds all E experts of a layer in host memory, and the device has K *slots*. An expert is
*resident* while a slot holds it. A call whose routing wants more than K experts runs in *waves* of
at most K experts.
"""

from moe_ops.residency.amount import Amount, parse_amount
from moe_ops.residency.slots import Residency, open_residencies, residency_of
from moe_ops.residency.state import OffloadStats, StateLayout, wave_slots, waves_of

__all__ = [
    "Amount",
    "OffloadStats",
    "Residency",
    "StateLayout",
    "open_residencies",
    "parse_amount",
    "residency_of",
    "wave_slots",
    "waves_of",
]
