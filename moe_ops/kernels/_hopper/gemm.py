"""Launchers of Hopper's own kernels of the expert GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.activation import Formula
from moe_ops.dispatch.device import device_facts
from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.hopper import ROW_BYTES, HopperTiles
from moe_ops.dispatch.problem import GemmProblem, WeightRows
from moe_ops.dispatch.tiles import TALL_ROW_TILE, cdiv, max_row_tiles
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.tile import tile_arguments
from moe_ops.kernels._hopper.boxes import Boxes, descriptor
from moe_ops.kernels._hopper.pack import pack_rows, quantize_rows
from moe_ops.kernels._hopper.packed import hopper_gemm_kernel
from moe_ops.kernels._hopper.products import BOX_ROWS
from moe_ops.kernels._hopper.stream import hopper_stream_kernel
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense

STREAM_REGISTERS = 128
"""Of a thread, so that two programs fit a processor."""


@dataclass(frozen=True)
class Constants:
    """What a kernel is made for; no tuple, which Triton would take apart."""

    N: int
    """Output columns."""
    K: int
    TOP_K: int
    """Slots of a row of the first operand."""
    ORDERED: str | None
    """Which of ``a`` and ``out`` has its rows in expert order, not by slot, if any."""
    RULE: Formula | None
    """Of the activation."""
    GATED: bool
    STEP: int
    """From the weight row of an output column to that of the next one."""
    UP: int
    """From a gate row to its up row; 0 where there is no gate."""
    WEIGHT_ROWS: int
    """Of an expert."""
    SCALE_ROWS: int
    """Weight rows that share a scale."""
    SCALE_COLS: int | None
    """Elements along K that share a scale, of both operands; None: all, or there are no scales."""
    WEIGHTED: bool
    """Whether each slot's products are multiplied by its routing weight, before the bias."""
    ROW_SCALE_STRIDE: int
    """From one row's scale to the next one's where they span K: 0 where all rows share one."""
    ITEMSIZE: int
    BLOCK_M: int
    BLOCK_N: int
    """Weight rows of a tile: half of them gate rows where there are such."""
    BLOCK_K: int
    GROUP_M: int
    STAGES: int
    BY_COLUMNS: bool
    """Whether a warp group takes half of a tile's columns (else 64 of its rows)."""
    ON_DEMAND: bool
    """How programs come to their tiles: see `schedule`."""
    GROUPS: int
    """Warp groups that multiply: each 64 rows of a tile, or half of the columns of 64 rows."""
    PARTS: int
    """Of a warp group's share of a tile, multiplied one after the other: the sums of 8-bit products
    and one more product stay in registers, and so do those of three warp groups, whose threads have
    fewer registers than one instruction would ask for."""
    OUT_N: int
    """Output columns of a tile."""
    NUM_N: int
    STEPS: int

    @cached_property
    def packed(self) -> Launch:
        """The kernel of packed rows.

        Its programs wait for the end of what is before them, as those that pack do: put in place
        early they took up to a sixth longer.
        """
        return Launch(hopper_gemm_kernel, C=self, num_warps=4, launch_pdl=False)

    @cached_property
    def stream(self) -> Launch:
        """The kernel that gathers rows as it goes."""
        return Launch(hopper_stream_kernel, C=self, num_warps=4, maxnreg=STREAM_REGISTERS)

    @cached_property
    def weights(self) -> Boxes:
        """Boxes of weights."""
        return Boxes(self._weight_box)

    @cached_property
    def rows(self) -> Boxes:
        """Boxes of packed rows."""
        return Boxes(lambda rows: descriptor(rows, [BOX_ROWS.value, self.BLOCK_K]))

    @cached_property
    def row_scales(self) -> Boxes:
        """Boxes of the scales of packed rows, a group's side by side."""
        return Boxes(lambda scales: descriptor(scales, [1, self.BLOCK_M]))

    def _weight_box(self, w: Tensor) -> TensorDescriptor:
        """Boxes of a weight; of gate and up rows, 8 of each in turn, where there are both."""
        if not self.GATED:
            return descriptor(w, [1, self.BLOCK_N, self.BLOCK_K])
        expert, row, _ = w.stride()
        shape = [w.shape[0], self.N // 8, 2, 8, self.K]
        strides = [expert, 8 * self.STEP * row, self.UP * row, self.STEP * row, 1]
        return descriptor(w, [1, self.BLOCK_N // 16, 2, 8, self.BLOCK_K], shape, strides)


class RowScales(NamedTuple):
    """Scales of the first operand."""

    shared: bool = False
    """Whether all rows share one."""
    of_slots: bool = False
    """Whether each slot has one, by which its products are multiplied: a routing weight."""


@lru_cache(maxsize=4096)
def constants(
    n: int,
    k: int,
    itemsize: int,
    top_k: int,
    rule: Formula | None,
    weight: WeightRows,
    scales: RowScales,
    tiles: HopperTiles,
    ordered: str | None = None,
) -> Constants:
    """The constants for ``n`` output columns."""
    gated = rule is not None and rule.gated
    out_n, block_k = tiles.block_n // 2 if gated else tiles.block_n, ROW_BYTES // itemsize
    tallest = 128 if itemsize == 1 else TALL_ROW_TILE
    return Constants(
        N=n,
        K=k,
        TOP_K=top_k,
        ORDERED=ordered,
        RULE=rule,
        GATED=gated,
        STEP=weight.step,
        UP=weight.up,
        WEIGHT_ROWS=weight.rows,
        SCALE_ROWS=weight.scale_rows,
        SCALE_COLS=weight.scale_cols,
        WEIGHTED=scales.of_slots,
        ROW_SCALE_STRIDE=0 if scales.shared else 1,
        ITEMSIZE=itemsize,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=block_k,
        GROUP_M=tiles.group_m,
        STAGES=tiles.num_stages,
        BY_COLUMNS=tiles.block_m == 64,
        ON_DEMAND=tiles.on_demand,
        GROUPS=max(2, tiles.block_m // BOX_ROWS.value),
        PARTS=2 if tiles.block_n == 256 and tiles.block_m == tallest else 1,
        OUT_N=out_n,
        NUM_N=cdiv(n, out_n),
        STEPS=cdiv(k, block_k),
    )


class HopperGemm:
    """A warp-specialised kernel, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        sizes, quant, tiles = problem.sizes, problem.quant, plan.config
        scales = RowScales(quant is not None and quant.per_tensor, problem.weighted)
        product = (sizes.n, sizes.k, problem.operand_itemsize, problem.top_k, problem.rule)
        rest = (problem.weight_rows, scales, tiles, problem.permuted)
        self.constants = constants(*product, *rest)
        self.packed, self.packed_rows = tiles.packed, plan.packed_rows
        self.quant = quant if plan.quantizes_rows else None
        """How rows are quantized as they are packed, where they are not yet."""

    def __call__(self, out: Tensor, given: GemmOperands) -> None:
        """``out[s] = f(a[s // top_k] @ w[e].T + bias[e])`` for the slots s of some tiles."""
        told = tile_arguments(given.tiles, out.shape[0], given.w.shape[0])
        scales = given.topk_weights if self.constants.WEIGHTED else given.a_scale
        vectors = dense(scales), dense(given.w_scale), dense(given.bias)
        run = self._pack_and_run if self.packed else self._stream
        run(out, given.a, given.w, vectors, told)

    def _pack_and_run(
        self, out: Tensor, a: Tensor, w: Tensor, vectors: Vectors, told: tuple[Any, ...]
    ) -> None:
        """Pack the rows unless they lie in expert order, then one program a processor."""
        c, (a_scale, w_scale, bias) = self.constants, vectors
        plan, _, num_slots, *_ = told
        sizes = (plan, num_slots, self.packed_rows, c.TOP_K)
        if c.ORDERED == "a":
            rows, scales = a, a_scale
        elif c.WEIGHTED:
            (rows, _), scales = pack_rows(a, None, *sizes), a_scale
        elif self.quant is None:
            rows, scales = pack_rows(a, a_scale, *sizes)
        else:
            rows, scales = quantize_rows(a, a_scale, self.quant, *sizes)
        a_box = c.rows.of(rows)
        c.packed(
            (device_facts(out.device).processors,), out, a_box, c.weights.of(w),
            a_box if c.SCALE_COLS is None else c.row_scales.of(scales), bias,
            plan if scales is None else scales, plan if w_scale is None else w_scale,
            plan.new_zeros(1) if c.ON_DEMAND else plan, *told,
        )  # fmt: skip

    def _stream(
        self, out: Tensor, a: Tensor, w: Tensor, vectors: Vectors, told: tuple[Any, ...]
    ) -> None:
        """Two programs a processor."""
        c, (a_scale, w_scale, bias) = self.constants, vectors
        most = max_row_tiles(out.shape[0], w.shape[0], c.BLOCK_M) * c.NUM_N
        c.stream(
            (min(2 * device_facts(out.device).processors, most),), a, a.stride(0), c.weights.of(w),
            bias, out, out if a_scale is None else a_scale, out if w_scale is None else w_scale,
            *told,
        )  # fmt: skip


Vectors = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Scales of rows (or a routing weight for each slot), scales of weights, bias."""
