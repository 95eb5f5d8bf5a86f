"""Launchers of the Hopper expert GEMM kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from moe_ops.activation import Formula
from moe_ops.dispatch.device import device_facts
from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.hopper import FETCH, ROW_BYTES, HopperTiles, sums_integers
from moe_ops.dispatch.problem import GemmProblem, WeightRows
from moe_ops.dispatch.tiles import TALL_ROW_TILE, cdiv, max_row_tiles
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.tile import tile_arguments
from moe_ops.kernels._hopper.boxes import Boxes, descriptor
from moe_ops.kernels._hopper.gathered import hopper_gemm_kernel
from moe_ops.kernels._hopper.layout import StoredLayout, TiledLayout, stored_layout
from moe_ops.kernels._hopper.pack import pack_rows, quantize_rows
from moe_ops.kernels._hopper.products import BOX_ROWS
from moe_ops.kernels._hopper.stream import hopper_stream_kernel
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense
from moe_ops.scheme import get_scheme

STREAM_REGISTERS = 128
"""maxnreg of the swap-AB decode kernel: two CTAs fit on an SM."""


@dataclass(frozen=True)
class Constants(StoredLayout, TiledLayout):
    """Constants of the kernels for many and for few rows."""

    ORDERED: str | None
    """Which of ``a`` and ``out`` has permuted rows instead of rows in slot order; None: neither."""
    ROW_SCALE_STRIDE: int
    """Stride between row scales that span K; 0 if all rows share one scale."""
    FETCHES: bool
    """Whether the kernel copies rows from where they lie, not from gathered or permuted rows."""
    INTEGER: bool
    """Whether operands are int8, whose products are summed exactly in int32."""
    BLOCK_N: int
    """Weight rows of a tile; with a gate, half of them are gate rows."""
    BY_COLUMNS: bool
    """Whether a warp group computes half of a tile's columns instead of 64 of its rows."""
    PARTS: int
    """Parts of a warp group's share of a tile, multiplied one after the other so that they fit in
    registers: an fp8 GEMM holds the sums and one more product, and with three warp groups a thread
    has fewer registers than one instruction for the whole share needs. For int8 Triton has no
    instruction of 256 columns."""
    OUT_N: int
    """Output columns of a tile."""

    PART_ROWS = BOX_ROWS.value
    """Rows of a part of a tile: see `schedule`."""

    @property
    def SUMS_INTEGERS(self) -> bool:  # noqa: N802 (a constant of the kernel)
        """Whether all of K is summed in int32, as no scales divide it."""
        return self.INTEGER and self.SCALE_COLS is None

    @cached_property
    def many(self) -> Launch:
        """The launch of the kernel for many rows.

        Without programmatic dependent launch, as for the kernels that gather rows: starting CTAs
        before the previous kernel ended took up to a sixth longer.
        """
        return Launch(hopper_gemm_kernel, C=self, num_warps=4, launch_pdl=False)

    @cached_property
    def stream(self) -> Launch:
        """The launch of the swap-AB decode kernel, which gathers rows itself."""
        return Launch(hopper_stream_kernel, C=self, num_warps=4, maxnreg=STREAM_REGISTERS)

    @cached_property
    def weights(self) -> Boxes:
        """TMA descriptors of weights."""
        return Boxes(lambda w: self.weight_box(w, self.BLOCK_N))

    @cached_property
    def rows(self) -> Boxes:
        """TMA descriptors of gathered rows."""
        return Boxes(lambda rows: descriptor(rows, [BOX_ROWS.value, self.BLOCK_K]))

    @cached_property
    def row_scales(self) -> Boxes:
        """TMA descriptors of the scales of gathered rows, ``(groups, rows)``."""
        return Boxes(lambda scales: descriptor(scales, [1, self.BLOCK_M], swizzled=False))


class RowFacts(NamedTuple):
    """The numbers of the first operand, and the layout of its scales."""

    itemsize: int
    integer: bool = False
    """Whether numbers are int8."""
    shared: bool = False
    """Whether all rows share one scale."""
    of_slots: bool = False
    """Whether each slot has a factor for its product: a routing weight."""


@lru_cache(maxsize=4096)
def constants(
    n: int,
    k: int,
    top_k: int,
    rule: Formula | None,
    weight: WeightRows,
    rows: RowFacts,
    tiles: HopperTiles,
    ordered: str | None = None,
) -> Constants:
    """The `Constants` for ``n`` output columns."""
    gated = rule is not None and rule.gated
    out_n = tiles.block_n // 2 if gated else tiles.block_n
    tallest = 128 if rows.itemsize == 1 else TALL_ROW_TILE
    return Constants(
        **stored_layout(n, k, rule, weight, rows.itemsize),
        TOP_K=top_k,
        ORDERED=ordered,
        WEIGHTED=rows.of_slots,
        ROW_SCALE_STRIDE=0 if rows.shared else 1,
        FETCHES=tiles.kernel == FETCH,
        INTEGER=rows.integer,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        GROUP_M=tiles.group_m,
        STAGES=tiles.num_stages,
        BY_COLUMNS=tiles.block_m == 64,
        ON_DEMAND=tiles.on_demand,
        GROUPS=max(2, tiles.block_m // BOX_ROWS.value),
        PARTS=2 if tiles.block_n == 256 and tiles.block_m == tallest else 1,
        OUT_N=out_n,
        NUM_N=cdiv(n, out_n),
        STEPS=cdiv(k, ROW_BYTES // rows.itemsize),
    )


class HopperGemm:
    """A warp-specialised kernel, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        sizes, quant, tiles = problem.sizes, problem.quant, plan.config
        self.num_experts = sizes.num_experts
        numbers = (problem.operand_itemsize, sums_integers(get_scheme(problem.scheme)))
        rows = RowFacts(*numbers, quant is not None and quant.per_tensor, problem.weighted)
        self.constants = constants(
            sizes.n, sizes.k, problem.top_k, problem.rule, problem.weight_rows, rows, tiles,
            problem.permuted,
        )  # fmt: skip
        self.alone, self.num_rows = tiles.alone, plan.gathered_rows
        self.quant = quant if plan.quantizes_rows else None
        """How rows are quantized while they are packed; None if they are not."""

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """``out[s] = f(a[s // top_k] @ w[e].T + bias[e])`` for the slots s of some tiles."""
        told = tile_arguments(operands.tiles, out.shape[0], self.num_experts)
        scales = operands.topk_weights if self.constants.WEIGHTED else operands.a_scale
        vectors = dense(scales), dense(operands.weight.scale), dense(operands.weight.bias)
        to, a, w = (out, operands.product), operands.a, operands.weight.data
        if self.alone:
            self._multiply(to, a, w, vectors, told)
        else:
            self._stream(out, a, w, vectors, told)

    def _multiply(
        self,
        to: tuple[Tensor, Tensor | None],
        a: Tensor,
        w: Tensor,
        vectors: Vectors,
        told: tuple[Any, ...],
    ) -> None:
        """Launch one program per SM, after the rows were gathered if they must be."""
        (out, product), c, (a_scale, w_scale, bias) = to, self.constants, vectors
        plan, _, num_slots, *_ = told
        pieces, boxes, scale_boxes = a.stride(0) * a.itemsize // 16, None, None
        if not c.FETCHES:
            rows, a_scale = self._in_boxes(a, a_scale, plan, num_slots)
            boxes, a, pieces = c.rows.of(rows), None, None
            scale_boxes = None if c.SCALE_COLS is None else c.row_scales.of(a_scale)
        c.many(
            (device_facts(out.device).processors,), out, product, a, pieces, boxes,
            c.weights.of(w), scale_boxes, bias, a_scale, w_scale,
            plan.new_zeros(1) if c.ON_DEMAND else None, *told,
        )  # fmt: skip

    def _in_boxes(
        self, a: Tensor, a_scale: Tensor | None, plan: Tensor, num_slots: int
    ) -> tuple[Tensor, Tensor | None]:
        """Gather rows and their scales, unless the rows are permuted already."""
        c, num_rows = self.constants, self.num_rows
        if c.ORDERED == "a":
            return a, a_scale
        if c.WEIGHTED:
            return pack_rows(a, None, plan, num_slots, num_rows, c.TOP_K)[0], a_scale
        if self.quant is None:
            return pack_rows(a, a_scale, plan, num_slots, num_rows, c.TOP_K)
        return quantize_rows(a, a_scale, self.quant, plan, num_slots, num_rows, c.TOP_K)

    def _stream(
        self, out: Tensor, a: Tensor, w: Tensor, vectors: Vectors, told: tuple[Any, ...]
    ) -> None:
        """Launch two programs per SM."""
        c, (a_scale, w_scale, bias) = self.constants, vectors
        most = max_row_tiles(out.shape[0], told[4], c.BLOCK_M) * c.NUM_N
        c.stream(
            (min(2 * device_facts(out.device).processors, most),), a, a.stride(0), c.weights.of(w),
            bias, out, a_scale, w_scale, *told,
        )  # fmt: skip


Vectors = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Scales of rows (or a routing weight per slot), scales of weights, and bias."""
