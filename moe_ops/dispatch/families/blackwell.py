"""The kernel of Blackwell's block-scaled instructions."""

from __future__ import annotations

from moe_ops.dispatch.blackwell import TILES_FROM, block_scaled_tiles, is_block_scaled
from moe_ops.dispatch.families.base import NO_SUM, PLAIN, Condition
from moe_ops.dispatch.families.portable import Portable

BLOCK_SCALED = Portable(
    "block_scaled",
    "_gemm.block_scaled:BlockScaledGemm",
    (
        Condition(
            "the GPU must have block-scaled instructions for {scheme.name}, got sm_{device.arch}",
            lambda p, device: is_block_scaled(p.scheme, device.arch) and not device.portable_only,
        ),
        PLAIN,
        NO_SUM,
    ),
    (),
    lambda problem, device: block_scaled_tiles(problem.sizes, problem.scheme, device),
    source=TILES_FROM,
)
"""A family whose tiles may be set, but have not been tuned."""
