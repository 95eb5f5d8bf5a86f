"""Constants of Hopper's M = 1 decode kernels: the sizes of a GEMM and of its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families.one_token import SECOND
from moe_ops.dispatch.hopper import (
    PIECES,
    ROW_BYTES,
    TOKEN_ROWS,
    sums_integers,
    vector_pieces,
)
from moe_ops.dispatch.problem import STORED, GemmProblem
from moe_ops.dispatch.tiles import cdiv, next_power_of_2
from moe_ops.kernels._hopper.layout import StoredLayout, stored_layout
from moe_ops.kernels._hopper.one_token import BOX_ROWS
from moe_ops.kernels._quantize.rounding import Rule, rule_of
from moe_ops.scheme import get_scheme

LEAD = 5
"""Stages that take about as long as the start of GEMM 2, which would otherwise take bandwidth from
GEMM 1."""
SLOTS_OF_TILE = 8
"""The most slots that share a tile of GEMM 2: each slot has at least 8 of the tile's rows."""
HELD = 64
"""Registers per thread for vectors that are being copied to shared memory."""


@dataclass(frozen=True)
class TokenSizes(StoredLayout):
    """Constants of a kernel. A step is two pieces of `ROW_BYTES` along K."""

    SLOTS: int
    COUNT: int
    """Number of vectors: 1 for the token, or one per slot."""
    INTEGER: bool
    """Whether operands are int8, whose products are summed exactly in int32."""
    QUANT: Rule | None
    """How the kernel quantizes vectors; None if they are quantized already or not at all."""
    VECTORS: int
    """COUNT rounded up to a power of two."""
    COLUMNS: int
    """Columns of the second operand: one per chunk and vector."""
    CHUNKS: int
    PAIRED: int
    """Pieces of a column, less the last two if the last piece is past the end of every column.

    That piece is stored as zeros instead of being loaded and quantized: with Triton 3.6, ptxas
    packs 8-bit floats that it knows to be equal with stale register contents, which are sometimes
    NaN.
    """
    BATCH: int
    """Pieces of vectors that are loaded at a time."""
    SLOTS_OF_TILE: int
    TILES: int
    """Tiles of GEMM 2 for all slots; GEMM 1 uses neither SLOTS_OF_TILE nor TILES."""
    UNITS: int
    """Boxes of a slot in GEMM 1; groups of columns in GEMM 2."""
    BOX_ROWS: int
    """Weight rows that are copied at a time."""
    LEAD: int
    """Stages that GEMM 1 has yet to request when it triggers the dependent launch."""
    EARLY: bool
    """Whether GEMM 2 may read the routing before the previous kernel has ended."""

    @property
    def groups(self) -> int:
        """Number of groups along K, each with a scale."""
        return cdiv(self.K, self.SCALE_COLS or self.K)

    @property
    def bands(self) -> int:
        """Number of bands of weight rows, each sharing a scale."""
        return cdiv(self.WEIGHT_ROWS, self.SCALE_ROWS)


def token_sizes(problem: GemmProblem, stages: int, early: bool, facts: Device) -> TokenSizes:
    """The constants of the M = 1 kernel for a GEMM for which `plan_gemm` chose it."""
    gemm, rule, quant = problem.sizes, problem.rule, problem.quant
    k, itemsize = gemm.k, problem.operand_itemsize
    gated = rule is not None and rule.gated
    n, block_k = gemm.n, ROW_BYTES // itemsize
    count = gemm.num_slots if problem.summed else 1
    vectors = next_power_of_2(count)
    columns, steps = vector_pieces(k, itemsize, vectors)
    whole = columns > vectors or cdiv(k, block_k) % PIECES == 0
    paired = PIECES * (steps if whole else steps - 1)
    slots = vectors if vectors <= SLOTS_OF_TILE else SLOTS_OF_TILE // 2
    box_columns = BOX_ROWS.value // 2 if gated else BOX_ROWS.value
    return TokenSizes(
        **stored_layout(n, k, rule, problem.weight_rows, itemsize),
        SLOTS=gemm.num_slots,
        COUNT=count,
        INTEGER=sums_integers(get_scheme(problem.scheme)),
        QUANT=None if quant is None or problem.rows == STORED else rule_of(quant),
        WEIGHTED=problem.weighted,
        STAGES=stages,
        VECTORS=vectors,
        COLUMNS=columns,
        CHUNKS=columns // vectors,
        STEPS=steps,
        PAIRED=paired,
        BATCH=_batch(paired, columns * block_k * 2 // 512),
        SLOTS_OF_TILE=slots,
        TILES=cdiv(count, slots),
        UNITS=cdiv(n, TOKEN_ROWS // slots) if problem.summed else cdiv(n, box_columns),
        BOX_ROWS=TOKEN_ROWS // slots if problem.summed else BOX_ROWS.value,
        LEAD=LEAD if _sum_follows(problem, facts) else 0,
        EARLY=early,
    )


def _sum_follows(problem: GemmProblem, facts: Device) -> bool:
    """Whether the M = 1 kernel of GEMM 2 follows; other CTAs would be placed unevenly."""
    hidden, width = problem.sizes.k, problem.sizes.n
    sizes = problem.sizes._replace(n=hidden, k=width, halves=1)
    second = problem._replace(sizes=sizes, activation="", summed=True)
    return SECOND.why_not(second, facts) is None


def _batch(pieces: int, registers: int) -> int:
    """The largest divisor of ``pieces`` that fits in `HELD`; a piece takes ``registers``."""
    most = max(1, min(pieces, HELD // registers))
    return next(batch for batch in range(most, 0, -1) if pieces % batch == 0)
