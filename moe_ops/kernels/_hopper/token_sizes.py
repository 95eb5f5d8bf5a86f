"""What Hopper's kernels of one token are made for: sizes of a GEMM, and how it is cut up."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ops.activation import Formula
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.hopper import PIECES, ROW_BYTES, TOKEN_ROWS, token_tiles, vector_pieces
from moe_ops.dispatch.problem import STORED, GemmProblem
from moe_ops.dispatch.tiles import cdiv, next_power_of_2
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
class TokenSizes:
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


def token_sizes(problem: GemmProblem, stages: int, early: bool, facts: Device) -> TokenSizes:
    """The constants of the M = 1 kernel of a GEMM that `plan_gemm` gives to it."""
    gemm, rule, quant = problem.sizes, problem.rule, problem.quant
    k, itemsize = gemm.k, problem.operand_itemsize
    gated = rule is not None and rule.gated
    n, block_k = gemm.n, ROW_BYTES // itemsize
    weight = problem.weight_rows
    count = gemm.num_slots if problem.summed else 1
    vectors = next_power_of_2(count)
    columns, steps = vector_pieces(k, itemsize, vectors)
    whole = columns > vectors or cdiv(k, block_k) % PIECES == 0
    paired = PIECES * (steps if whole else steps - 1)
    slots = vectors if vectors <= SLOTS_OF_TILE else SLOTS_OF_TILE // 2
    box_columns = BOX_ROWS.value // 2 if gated else BOX_ROWS.value
    return TokenSizes(
        N=n,
        K=k,
        SLOTS=gemm.num_slots,
        COUNT=count,
        RULE=rule,
        GATED=gated,
        STEP=weight.step,
        UP=weight.up,
        WEIGHT_ROWS=weight.rows,
        QUANT=None if quant is None or problem.rows == STORED else rule_of(quant),
        SCALE_ROWS=weight.scale_rows,
        SCALE_COLS=weight.scale_cols,
        WEIGHTED=problem.weighted,
        ITEMSIZE=itemsize,
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
        UNITS=cdiv(n, TOKEN_ROWS // slots) if problem.summed else cdiv(n, box_columns),
        BOX_ROWS=TOKEN_ROWS // slots if problem.summed else BOX_ROWS.value,
        LEAD=LEAD if _sum_follows(problem, facts) else 0,
        EARLY=early,
    )


def _sum_follows(problem: GemmProblem, facts: Device) -> bool:
    """Whether GEMM 2 of one token follows this GEMM: other programs would be put unevenly."""
    num_experts, _, hidden = problem.weight
    second = (num_experts, hidden, problem.sizes.n)
    scheme, slots = get_scheme(problem.scheme), problem.sizes.num_slots
    tiles = token_tiles(second, problem.operand_itemsize, slots, None, scheme, facts, summed=True)
    return tiles is not None


def _batch(pieces: int, registers: int) -> int:
    """The most of so many pieces that divide them evenly; one takes so many registers."""
    most = max(1, min(pieces, HELD // registers))
    return next(batch for batch in range(most, 0, -1) if pieces % batch == 0)
