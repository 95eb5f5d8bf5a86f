"""Rules for block-scaled matrix instructions: which GEMMs run on them, and with which tiles.

Blackwell's matrix units multiply stored small floats together with the one-byte scales of their
groups. On other GPUs, and for all other formats, the kernel dequantizes stored numbers.
"""

from __future__ import annotations

from functools import lru_cache

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.tiles import Gemm, TileConfig
from moe_ops.scheme import get_scheme

ONE_ELEMENT = frozenset({"mxfp4", "mxfp8", "nvfp4"})
"""Schemes whose rows and weights have the same element."""
TWO_ELEMENTS = frozenset({"mxfp4_mxfp8", "mxfp4_w4a8", "mxfp4_w4a8_token"})
"""Schemes with fp8 rows and fp4 weights. The kernel gives rows without group scales group scales of
1, and applies the scale of the tensor or of each row to the sums."""
BLOCK_SCALED = {
    100: ONE_ELEMENT | TWO_ELEMENTS,
    103: ONE_ELEMENT | TWO_ELEMENTS,
    120: ONE_ELEMENT,
}
"""Schemes whose products Triton 3.6 compiles to block-scaled instructions, by architecture:
``tcgen05.mma`` on sm_100 and sm_103, ``mma.sync`` on sm_120. Triton dequantizes two different
elements on sm_120, and everything on sm_121. Compiled and interpreted by the tests; **not yet run
on such a GPU**."""

TILES_FROM = "analytic default for block-scaled instructions (compiled, not yet run on hardware)"
"""The source of block-scaled tiles that `explain` prints. Tuned files are not looked up, because
their tiles would have to have `WEIGHT_ROWS`."""
WEIGHT_ROWS = 128
"""Weight rows of a tile: the first operand of ``tcgen05.mma`` has that many rows. Weights are the
first operand, since they have more rows than there are tokens."""


def is_block_scaled(scheme: str, arch: int) -> bool:
    """Whether the products of a scheme (given by its key) run on block-scaled instructions."""
    return scheme in BLOCK_SCALED.get(arch, ())


@lru_cache(maxsize=4096)
def block_scaled_tiles(gemm: Gemm, scheme: str, device: Device) -> TileConfig:
    """Tiles of an expert GEMM on block-scaled instructions: an estimate, nothing was measured.

    A step takes 128 bytes of an operand's row. The number of stages lets two CTAs fit on an SM, so
    that one works while the other waits. With four warps, a thread loads four scales at once, which
    allows loading them ahead; on sm_120, where accumulators are in registers, large tiles take
    eight warps.

    Args:
        gemm: sizes of the GEMM.
        scheme: key of a scheme that `is_block_scaled` on the GPU.
        device: the GPU.
    """
    block_m = gemm.row_tile
    rows, weight = get_scheme(scheme).activation, get_scheme(scheme).weight
    nibbles = all(q is not None and q.element.values_per_byte == 2 for q in (rows, weight))
    block_k = 256 if nibbles else 128
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
