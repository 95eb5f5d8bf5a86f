"""What Hopper's kernels of one token are made for: sizes of a GEMM, and how it is cut up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moe_ops.activation import Formula, formula, row_steps
from moe_ops.dispatch.hopper import PIECES, ROW_BYTES, TOKEN_ROWS, token_tiles, vector_pieces
from moe_ops.dispatch.tiles import Device, cdiv, next_power_of_2
from moe_ops.kernels._hopper.token import BOX_ROWS
from moe_ops.kernels._quantize.rounding import Rule, rule_of
from moe_ops.scheme import get_scheme

LEAD = 5
"""About as long as GEMM 2 takes to begin; earlier it would take from what GEMM 1 waits for."""
SLOTS_OF_TILE = 8
"""The most slots that share a tile of GEMM 2: each has at least 8 of its rows."""
HELD = 64
"""Registers of a thread for vectors on their way to shared memory."""


@dataclass(frozen=True)
class TokenGemm:
    """What a kernel is made for; no tuple, which Triton would take apart."""

    N: int
    """Output columns."""
    K: int
    SLOTS: int
    COUNT: int
    """Vectors: the token, or the rows of its slots."""
    RULE: Formula | None
    """Of the activation."""
    GATED: bool
    STEP: int
    """From the weight row of an output column to that of the next one."""
    UP: int
    """From a gate row to its up row; 0 where there is no gate."""
    WEIGHT_ROWS: int
    """Of an expert."""
    QUANT: Rule | None
    """How vectors are quantized, if they are not yet."""
    SCALE_ROWS: int
    """Weight rows that share a scale."""
    SCALE_COLS: int | None
    """Elements along K that share a scale, of both operands; None: all, or there are no scales."""
    WEIGHTED: bool
    """Whether routing weights are applied: of GEMM 1 to its product, of GEMM 2 in the sum."""
    ITEMSIZE: int
    BLOCK_K: int
    """Of a piece."""
    STAGES: int
    VECTORS: int
    """Rounded up to a power of two."""
    COLUMNS: int
    """Of the second operand: of each chunk all vectors."""
    CHUNKS: int
    STEPS: int
    """Stages of a chunk."""
    PAIRED: int
    """Pieces of a column, but for the last two where the very last has no numbers in any column.

    That one is made zeros, not loaded and quantized: ptxas packs equal 8-bit floats that it knows
    to be equal with what is left in a register (Triton 3.6), which is NaN now and then.
    """
    BATCH: int
    """Pieces of vectors that are loaded at once."""
    SLOTS_OF_TILE: int
    TILES: int
    """Of GEMM 2, for all slots; of GEMM 1 these two say nothing."""
    UNITS: int
    """Boxes of a slot in GEMM 1; groups of columns in GEMM 2."""
    BOX_ROWS: int
    """Weight rows that are copied at a time."""
    LEAD: int
    """Stages that GEMM 1 has still to ask for when it lets the next kernel in."""
    EARLY: bool
    """Whether GEMM 2 may read the routing before what is before it has ended."""

    @property
    def groups(self) -> int:
        """Along K, that have a scale each."""
        return cdiv(self.K, self.SCALE_COLS or self.K)

    @property
    def bands(self) -> int:
        """Of weight rows, that share one."""
        return cdiv(self.WEIGHT_ROWS, self.SCALE_ROWS)


class TokenKey(NamedTuple):
    """What a kernel is looked up by."""

    weight: tuple[int, int, int]
    itemsize: int
    top_k: int
    activation: str | None
    scheme: str
    scale_rows: int
    weighted: bool
    stored: bool
    """Whether rows are quantized already."""
    device: torch.device
    summed: bool
    early: bool


def token_gemm_of(key: TokenKey, facts: Device) -> TokenGemm | None:
    """None where these kernels do not serve."""
    rule = formula(key.activation) if key.activation else None
    how = (key.weight, key.itemsize, key.top_k, rule, get_scheme(key.scheme), facts)
    tiles = token_tiles(*how, summed=key.summed)
    if tiles is None:
        return None
    lead = LEAD if _sum_follows(key, facts) else 0
    return _constants(key, rule, tiles.num_stages, lead)


def _sum_follows(key: TokenKey, facts: Device) -> bool:
    """Whether GEMM 2 of one token follows GEMM 1: other programs would be put unevenly."""
    num_experts, rows, hidden = key.weight
    gated = key.activation is not None and formula(key.activation).gated
    second = (num_experts, hidden, rows // 2 if gated else rows)
    how = (second, key.itemsize, key.top_k, None, get_scheme(key.scheme), facts)
    return token_tiles(*how, summed=True) is not None


def _constants(key: TokenKey, rule: Formula | None, stages: int, lead: int) -> TokenGemm:
    _, rows, k = key.weight
    quant = get_scheme(key.scheme).activation
    gated = rule is not None and rule.gated
    n, block_k = rows // 2 if gated else rows, ROW_BYTES // key.itemsize
    step, up = row_steps(rule, n)
    count = key.top_k if key.summed else 1
    vectors = next_power_of_2(count)
    columns, steps = vector_pieces(k, key.itemsize, vectors)
    whole = columns > vectors or cdiv(k, block_k) % PIECES == 0
    paired = PIECES * (steps if whole else steps - 1)
    slots = vectors if vectors <= SLOTS_OF_TILE else SLOTS_OF_TILE // 2
    box_columns = BOX_ROWS.value // 2 if gated else BOX_ROWS.value
    return TokenGemm(
        N=n,
        K=k,
        SLOTS=key.top_k,
        COUNT=count,
        RULE=rule,
        GATED=gated,
        STEP=step,
        UP=up,
        WEIGHT_ROWS=rows,
        QUANT=None if quant is None or key.stored else rule_of(quant),
        SCALE_ROWS=key.scale_rows,
        SCALE_COLS=None if quant is None else quant.shared_cols,
        WEIGHTED=key.weighted,
        ITEMSIZE=key.itemsize,
        BLOCK_K=block_k,
        STAGES=stages,
        VECTORS=vectors,
        COLUMNS=columns,
        CHUNKS=columns // vectors,
        STEPS=steps,
        PAIRED=paired,
        BATCH=_batch(paired, columns * block_k * 2 // 512),
        SLOTS_OF_TILE=slots,
        TILES=cdiv(count, slots),
        UNITS=cdiv(n, TOKEN_ROWS // slots) if key.summed else cdiv(n, box_columns),
        BOX_ROWS=TOKEN_ROWS // slots if key.summed else BOX_ROWS.value,
        LEAD=lead,
        EARLY=key.early,
    )


def _batch(pieces: int, registers: int) -> int:
    """The most of so many pieces that divide them evenly; one takes so many registers."""
    most = max(1, min(pieces, HELD // registers))
    return next(batch for batch in range(most, 0, -1) if pieces % batch == 0)
