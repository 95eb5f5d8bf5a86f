"""Rules for block-scaled matrix instructions: which GEMMs run on them, and with which tiles.

Blackwell's matrix units multiply small floats as they are stored, together with the one-byte scales
of their groups. Elsewhere, and for all other formats, stored numbers are decoded in the kernel.
"""

from __future__ import annotations

from functools import lru_cache

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.tiles import Gemm, TileConfig
from moe_ops.scheme import get_scheme

ONE_ELEMENT = frozenset({"mxfp4", "mxfp8", "nvfp4"})
"""Schemes whose rows and weights have the same element."""
TWO_ELEMENTS = frozenset({"mxfp4_mxfp8", "mxfp4_w4a8"})
"""fp8 rows under fp4 weights; ``mxfp4_w4a8``: with scales of 1, the one of all rows comes last."""
BLOCK_SCALED = {
    100: ONE_ELEMENT | TWO_ELEMENTS,
    103: ONE_ELEMENT | TWO_ELEMENTS,
    120: ONE_ELEMENT,
}
"""Schemes whose products Triton 3.6 compiles to block-scaled instructions, by architecture:
``tcgen05.mma`` on sm_100 and sm_103, ``mma.sync`` on sm_120. It decodes two elements on sm_120, and
everything on sm_121. Compiled and interpreted by the tests; **not yet run on such a GPU**."""

TILES_FROM = "analytic default for block-scaled instructions (compiled, not yet run on hardware)"
"""What `explain` says of them. Files of tuned tiles are not looked up: they would have to keep to
`WEIGHT_ROWS`."""
WEIGHT_ROWS = 128
"""Weight rows of a tile: ``tcgen05.mma`` has that many rows in its first operand, whose place
weights take, since there are more of them than of tokens."""


def is_block_scaled(scheme: str, arch: int) -> bool:
    """Whether products of a scheme, by its key, run on block-scaled instructions."""
    return scheme in BLOCK_SCALED.get(arch, ())


@lru_cache(maxsize=4096)
def block_scaled_tiles(gemm: Gemm, scheme: str, device: Device) -> TileConfig:
    """The tiles of an expert GEMM on block-scaled instructions: a guess, nothing was measured.

    128 bytes of an operand's row in a step, and so many steps under way that two blocks fit on a
    processor, each of which works while the other waits. Four warps, so that a thread has four
    scales to load at once, which can then be loaded ahead; on sm_120, where sums are in registers,
    eight where they are many.

    Args:
        gemm: its sizes.
        scheme: the key of one that `is_block_scaled` there.
        device: the GPU.
    """
    block_m = gemm.row_tile
    known = get_scheme(scheme)
    operands = known.activation, known.weight
    block_k = 256 if all(q is not None and q.element.packed for q in operands) else 128
    stage = 128 * (block_m + WEIGHT_ROWS)  # fp4 beside fp8 takes a byte, too
    num_stages = min(4, 1 + device.shared_memory // 2 // stage)
    return TileConfig(
        block_m=block_m,
        block_n=WEIGHT_ROWS // gemm.halves,
        block_k=block_k,
        group_m=1 if block_m <= 32 else 8,
        num_warps=8 if device.arch >= 120 and block_m >= 64 else 4,
        num_stages=num_stages,
    )
