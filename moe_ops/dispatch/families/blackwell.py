"""The kernel of Blackwell's block-scaled instructions."""

from __future__ import annotations

from moe_ops.dispatch.blackwell import TILES_FROM, block_scaled_tiles, is_block_scaled
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.base import NO_SUM, PLAIN, Rule
from moe_ops.dispatch.families.portable import Portable
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.dispatch.tiles import TileConfig


class BlockScaled(Portable):
    """A kernel in Triton whose tiles may be given, but have not been tuned."""

    def most_stages(self, tiles: KernelTiles, problem: GemmProblem, device: Device) -> int:
        """Any: the scales, which count too, are the compiler's to place."""
        return tiles.num_stages


def _tiles(problem: GemmProblem, device: Device) -> TileConfig:
    return block_scaled_tiles(problem.sizes, problem.scheme, device)


BLOCK_SCALED = BlockScaled("block_scaled", "_gemm.block_scaled:BlockScaledGemm", (
    Rule("the GPU must have block-scaled instructions for {scheme.name}, got sm_{device.arch}",
         lambda p, device: is_block_scaled(p.scheme, device.arch) and not device.portable_only),
    PLAIN, NO_SUM,
), source=TILES_FROM, make=_tiles)  # fmt: skip
