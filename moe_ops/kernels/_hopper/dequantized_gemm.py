"""Launchers of the Hopper kernels that dequantize weights in registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.dispatch.device import device_facts
from moe_ops.dispatch.gemm_plan import GemmPlan
from moe_ops.dispatch.hopper import HopperTiles
from moe_ops.dispatch.hopper_decode import (
    DECODE_FEW,
    STAGE_K,
    decodes_to_fp8,
    multiplying_groups,
    places,
    stage_bytes,
    stage_groups,
    unit_bytes,
)
from moe_ops.dispatch.portable import EVERY_COLUMN
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.dispatch.tiles import cdiv, max_row_tiles
from moe_ops.kernels._gemm.operands import GemmOperands
from moe_ops.kernels._gemm.tile import tile_arguments
from moe_ops.kernels._hopper.boxes import Boxes, descriptor
from moe_ops.kernels._hopper.dequantized_few import copying_registers, hopper_decode_few_kernel
from moe_ops.kernels._hopper.dequantized_many import hopper_decode_many_kernel
from moe_ops.kernels._hopper.dequantized_products import ALONE
from moe_ops.kernels._hopper.layout import TiledLayout
from moe_ops.kernels._hopper.pack import RIFFLED, WIDE, pack_rows, quantize_rows
from moe_ops.kernels._hopper.plain_rows import gathered_plain_rows, plain_rows
from moe_ops.kernels._hopper.products import BOX_ROWS
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.kernels._runtime.slots import dense, dense_vectors
from moe_ops.kernels.quantize import wide_rows
from moe_ops.scheme import Quant, get_scheme
from moe_ops.scheme.packed import CHUNK
from moe_ops.scheme.values import SCALE_BITS
from moe_ops.scheme.weights import rows_per_scale


@dataclass(frozen=True)
class DequantizedConstants(TiledLayout):
    """Constants of the kernels that dequantize weights in registers."""

    INTERLEAVED: bool
    """Whether gate and up rows alternate."""
    APART: int
    """Units of 64 rows from a gate row to its up row; 0: they alternate, or there is no gate."""
    HALF: bool
    """Whether rows are fp16, else bf16 or fp8."""
    FP8: bool
    """Whether rows are fp8, and weights become fp8: see `decodes_to_fp8`."""
    BITS: int
    """Bits of a stored number: 4 or 8."""
    EXPONENT: int
    """Exponent bits of a float; 0: an integer."""
    OFFSET: int
    """The offset added to an integer when it is stored; 0: two's complement."""
    STORED: int
    """Bits of a number, without the padding of its byte."""
    SCALE: str
    """The form of scales, see `Quant.scale`."""
    SCALE_BITS: int
    """Bits of a scale."""
    COLS: int
    """Elements along K that share a scale; 0: all."""
    SCALED: str
    """What scales multiply: ``weights``, ``sums`` of a stage, or ``rows`` of the result."""
    GLOBAL_ROWS: int
    """Weight rows with the same global scale, counted over all experts; 0: there is none."""
    CTAS: int
    """CTAs per SM."""
    UNITS: int
    """Units of 64 weight rows of a multiplying warp group."""
    MIXED: bool
    """Whether a unit has 32 gate rows and their up rows, which are apart in the weight."""
    STAGE_UNITS: int
    """Units of a tile."""
    STAGE_GROUPS: int
    """Scales of a weight row in a stage."""
    SCALE_PLACES: int
    """Boxes in shared memory for each box of scales: see `places`."""
    ZERO_BYTES: int
    """Bytes of a unit's zero points in a group; 0: there are none."""
    ZERO_PLACES: int
    STAGE_BYTES: int
    """Bytes of weights, scales and zero points that TMA copies for a stage."""
    GATHERED: bool
    """Whether rows are gathered before the kernel and copied by TMA: see `pack`."""

    @property
    def HALVES(self) -> int:  # noqa: N802 (a constant of the kernel)
        """Parts of the weight that a stage copies from: 2 if gate and up rows are apart, else 1."""
        return 2 if self.APART else 1

    @property
    def ROW_ITEM(self) -> int:  # noqa: N802
        """Bytes of a number of a row."""
        return 1 if self.FP8 else 2

    @property
    def PART_ROWS(self) -> int:  # noqa: N802
        """Rows of a part of a tile of the kernel for many rows: see `schedule`."""
        return self.BLOCK_M // 4

    @property
    def _registers(self) -> int:
        """Registers of a thread of the kernel for few rows, on average."""
        return 65536 // (128 * (self.GROUPS + 1) * self.CTAS) // 8 * 8

    @property
    def GROUP_REGISTERS(self) -> int:  # noqa: N802
        """Registers per thread of the second multiplying warp group; the first has up to 8 more."""
        return (3 * self._registers - copying_registers(self.BLOCK_M)) // 2 // 8 * 8

    @cached_property
    def few(self) -> Launch:
        """The launch of the kernel for few rows, with `CTAS` CTAs per SM."""
        return Launch(hopper_decode_few_kernel, C=self, num_warps=4, maxnreg=self._registers)

    @cached_property
    def many(self) -> Launch:
        """The launch of the kernel for many rows; without PDL, see `gemm.Constants.many`."""
        return Launch(hopper_decode_many_kernel, C=self, num_warps=4, launch_pdl=False)

    @cached_property
    def words(self) -> Boxes:
        """TMA descriptors of packed weights: a box holds the chunks of a stage."""
        return Boxes(self._word_box)

    @cached_property
    def scales(self) -> Boxes:
        """TMA descriptors of scales: a box holds the scales of a stage."""
        return Boxes(lambda scale: self._group_box(scale, CHUNK))

    @cached_property
    def zeros(self) -> Boxes:
        """TMA descriptors of zero points: a box holds the zero points of a stage."""
        return Boxes(lambda zeros: self._group_box(zeros, self.ZERO_BYTES))

    @cached_property
    def rows(self) -> Boxes:
        """TMA descriptors of gathered rows."""
        return Boxes(lambda rows: descriptor(rows, [BOX_ROWS.value, CHUNK]))

    def _word_box(self, w: Tensor) -> TensorDescriptor:
        pieces = self.K // CHUNK * self.BITS // 2  # of 256 words, the most of an axis of a box
        units = self.WEIGHT_ROWS // CHUNK // self.HALVES
        shape = [w.shape[0], self.HALVES, units, pieces, 256]
        strides = [w.stride(0), units * pieces * 256, pieces * 256, 256, 1]
        box = [1, self.HALVES, self.STAGE_UNITS // self.HALVES, STAGE_K // CHUNK * self.BITS // 2]
        return descriptor(w, [*box, 256], shape, strides, swizzled=False)

    def _group_box(self, x: Tensor, width: int) -> TensorDescriptor:
        """The TMA descriptor of scales or zero points ``(E, G, N)``, ``width`` for a unit.

        The stride of an axis of one group may be anything; TMA wants multiples of 16 bytes.
        """
        experts, count, n = x.shape
        half = n // self.HALVES
        shape, strides = [experts, count, self.HALVES, half], [count * n, n, half, 1]
        of_half = self.STAGE_UNITS // self.HALVES * width
        box = [1, self.STAGE_GROUPS, self.HALVES, of_half]
        return descriptor(x, box, shape, strides, swizzled=False)


class TensorFacts(NamedTuple):
    """Facts of the tensors that constants depend on."""

    half: bool
    """Whether rows are fp16, else bf16."""
    scale_rows: int
    """Weight rows that share a scale of all K."""
    global_rows: int
    """Weight rows with the same global scale, counted over all experts; 0: there is none."""


@lru_cache(maxsize=4096)
def dequantized_constants(
    problem: GemmProblem, tiles: HopperTiles, variant: TensorFacts
) -> DequantizedConstants:
    """The `DequantizedConstants` of a GEMM."""
    sizes, rule, quant = problem.sizes, problem.rule, get_scheme(problem.scheme).weight
    gated = rule is not None and rule.gated
    apart = gated and not rule.interleaved
    stage_units, warp_groups = tiles.block_n // CHUNK, multiplying_groups(tiles)
    cols = quant.shared_cols or (EVERY_COLUMN if quant.zero_point else 0)
    fp8 = decodes_to_fp8(tiles.kernel, get_scheme(problem.scheme))
    scaled = "rows" if not cols else "weights"
    if fp8 or (
        tiles.kernel == DECODE_FEW
        and tiles.block_m <= ALONE.value
        and cols >= STAGE_K
        and quant.scale == "input"
    ):
        scaled = "sums"
    copied, groups = unit_bytes(quant), stage_groups(quant)
    return DequantizedConstants(
        N=sizes.n,
        K=sizes.k,
        TOP_K=problem.top_k,
        RULE=rule,
        INTERLEAVED=gated and not apart,
        APART=sizes.n // CHUNK if apart else 0,
        WEIGHT_ROWS=problem.weight[1],
        HALF=variant.half,
        FP8=fp8,
        BITS=quant.element.stored_bits,
        EXPONENT=4 if quant.element.name == "fp8" else quant.element.exponent,
        OFFSET=quant.element.offset,
        STORED=quant.element.bits,
        SCALE=quant.scale,
        SCALE_BITS=SCALE_BITS[quant.scale],
        COLS=cols,
        SCALED=scaled,
        SCALE_ROWS=variant.scale_rows,
        GLOBAL_ROWS=variant.global_rows,
        BLOCK_M=tiles.block_m,
        GROUP_M=tiles.group_m,
        STAGES=tiles.num_stages,
        CTAS=tiles.ctas,
        GROUPS=warp_groups,
        UNITS=stage_units // warp_groups,
        MIXED=apart and stage_units == warp_groups,
        STAGE_UNITS=stage_units,
        STAGE_GROUPS=groups,
        SCALE_PLACES=places(stage_units * copied.scales),
        ZERO_BYTES=copied.zeros // max(1, groups),
        ZERO_PLACES=places(stage_units * copied.zeros),
        STAGE_BYTES=stage_bytes(tiles, quant),
        GATHERED=tiles.kernel != DECODE_FEW,
        ON_DEMAND=tiles.on_demand,
        NUM_N=cdiv(problem.weight[1], tiles.block_n),
        STEPS=cdiv(sizes.k, STAGE_K),
    )


class DecodeGemm:
    """A kernel for packed weights, ready to run."""

    def __init__(self, problem: GemmProblem, plan: GemmPlan) -> None:
        self.problem, self.tiles, self.num_rows = problem, plan.config, plan.gathered_rows

    def __call__(self, out: Tensor, operands: GemmOperands) -> None:
        """``out[s] = f(topk_weights[s] * a[s // top_k] @ dequantized(w[e]).T + bias[e])``."""
        operands = with_shared_scale(operands, self.problem)
        c = dequantized_constants(self.problem, self.tiles, variant_of(self.problem, operands))
        weight = operands.weight
        told = tile_arguments(operands.tiles, out.shape[0], self.problem.sizes.num_experts)
        quant = get_scheme(self.problem.scheme).activation
        words, scale = c.words.of(weight.data), weight.scale
        scales = c.scales.of(scale) if c.STAGE_GROUPS else None
        zeros = c.zeros.of(weight.zero_point) if c.ZERO_BYTES else None
        boxes = words, scales, zeros
        bias, weights, factor, scale = dense_vectors(
            weight.bias, operands.topk_weights, weight.global_scale, scale
        )
        added, factors = (bias, weights), (factor, scale)
        processors = device_facts(out.device).processors
        if self.tiles.kernel == DECODE_FEW:
            most = max_row_tiles(out.shape[0], told[4], c.BLOCK_M) * c.NUM_N
            programs = min(c.CTAS * processors, most)
            rows, row_scale = rows_in_16_bits(operands, self.problem)
            c.few(
                (programs,), rows, rows.stride(0), *boxes, *added, row_scale, out, *factors, *told
            )
        else:
            plan, _, num_slots, *_ = told
            rows, row_scale = self.gathered(operands, quant, plan, num_slots)
            counter = plan.new_zeros(1) if c.ON_DEMAND else None
            c.many(
                (processors,), out, c.rows.of(rows), *boxes, *added, row_scale, *factors, counter,
                *told,
            )  # fmt: skip

    def gathered(
        self, operands: GemmOperands, quant: Quant | None, plan: Tensor, num_slots: int
    ) -> tuple[Tensor, Tensor | None]:
        """Gather the rows in plan order, in 16 bits or in fp8; return the rows and their scales."""
        a = operands.a
        order: dict[str, Any] = {
            "plan": plan,
            "num_slots": num_slots,
            "num_rows": self.num_rows,
            "top_k": self.problem.top_k,
        }
        if not self.problem.row_scales:
            return pack_rows(a, None, **order)
        if self.problem.row_scales == "group":
            return gathered_plain_rows(a, operands.a_scale, quant, **order), None
        fp8 = decodes_to_fp8(self.tiles.kernel, get_scheme(self.problem.scheme))
        form = RIFFLED if fp8 else WIDE
        if a.dtype == quant.dtype:
            return pack_rows(a, dense(operands.a_scale), **order, form=form)
        return quantize_rows(a, None, quant, **order, form=form)


def with_shared_scale(operands: GemmOperands, problem: GemmProblem) -> GemmOperands:
    """Make a scale that all rows share, or all rows of an expert, a global scale of the weight.

    Both multiply the sums. Where the weight has a global scale already, it becomes their product.
    """
    if problem.row_scales != "tensor":
        return operands
    factor, scale = operands.weight.global_scale, operands.a_scale.flatten()
    if factor is not None:
        scale = factor * scale.view(-1, *[1] * (factor.dim() - 1))
    return operands._replace(a_scale=None, weight=operands.weight._replace(global_scale=scale))


def rows_in_16_bits(operands: GemmOperands, problem: GemmProblem) -> tuple[Tensor, Tensor | None]:
    """Rows in 16 bits, and the scales of their sums: quantized rows become bf16, which is exact.

    A copy, not a conversion where rows are loaded: each tile loads them, and the kernel that
    quantizes them to fp8 writes bf16 at the same cost.
    """
    quant = get_scheme(problem.scheme).activation
    if not problem.row_scales:
        return operands.a, None
    plan, topk_ids, expert_map = operands.tiles
    if problem.row_scales == "group":
        # Rows that are grouped by expert may be padding.
        named_by = dense(plan) if topk_ids is None else None
        rows = plain_rows(
            operands.a,
            operands.a_scale,
            quant,
            named_by,
            num_slots=problem.sizes.num_slots,
            top_k=problem.top_k,
        )
        return rows, None
    if operands.a.dtype == quant.dtype:
        return operands.a.to(torch.bfloat16), dense(operands.a_scale)
    return wide_rows(operands.a, topk_ids, expert_map, operands.num_experts, quant)


def variant_of(problem: GemmProblem, operands: GemmOperands) -> TensorFacts:
    """The `TensorFacts` of a GEMM's operands."""
    rows, factor = problem.weight[1], operands.weight.global_scale
    quant = get_scheme(problem.scheme).weight
    scale_rows = rows_per_scale(operands.weight.scale, quant, rows)
    experts = operands.weight.data.shape[0]
    global_rows = 0 if factor is None else experts * rows // factor.numel()
    half = operands.a.dtype == torch.float16 and get_scheme(problem.scheme).activation is None
    return TensorFacts(half, scale_rows, global_rows)
