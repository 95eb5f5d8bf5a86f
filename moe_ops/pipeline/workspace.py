"""How much memory a call allocates."""

from __future__ import annotations

import torch

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.scheme import get_scheme
from moe_ops.tiles import ROW_TILES, num_tiles, padded_slots

ALLOCATION = 512
"""The caching allocator's unit, in bytes."""


def workspace_nbytes(
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    *,
    scheme: str = "unquantized",
    activation: MoEActivation | Activation | str = "silu",
    format: str = "standard",
    chunk_size: int | None = None,
) -> int:
    """Bytes that `fused_experts` has allocated at its peak, its output included.

    A pure function of sizes: the plan, plus the larger of (intermediate and expert rows) and
    (expert rows and output), every tensor rounded up to the allocator's 512 bytes. The
    intermediate is as wide as the activation's output, ``I``, for every activation.

    Args:
        num_tokens: T.
        hidden_size: H.
        intermediate_size: I, per partition.
        num_experts: El, local experts.
        top_k: k.
        dtype: of the activations.
        scheme: a name in `SCHEMES`.
        activation: checked; it does not change the size.
        format: ``standard``.
        chunk_size: not supported yet.

    Raises:
        ValueError: an unknown scheme, activation or format; a negative size.
        NotImplementedError: ``chunk_size``.
    """
    get_scheme(scheme)
    kind_and_key(activation)
    checks.one_of("format", format, ("standard",))
    if chunk_size is not None:
        raise NotImplementedError(f"chunk_size must be None in this version, got {chunk_size}")
    sizes = (num_tokens, hidden_size, intermediate_size, num_experts, top_k)
    if min(sizes) < 0:
        raise ValueError(f"sizes must not be negative, got (T, H, I, El, k) = {sizes}")
    slots = num_tokens * top_k
    plan = (
        padded_slots(slots, num_experts, ROW_TILES) * 4,
        num_tiles(slots, num_experts, ROW_TILES) * 4,
        4,
    )
    h = _rounded(slots * intermediate_size * dtype.itemsize)
    y = _rounded(slots * hidden_size * dtype.itemsize)
    out = _rounded(num_tokens * hidden_size * dtype.itemsize)
    return sum(_rounded(n) for n in plan) + y + max(h, out)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALLOCATION) * ALLOCATION
