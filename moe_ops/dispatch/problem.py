"""The description of an expert GEMM from which its kernel is chosen, as a value.

`plan_gemm` reads nothing else of the GEMM: launchers, `explain`, warm-up, the workspace and tests
find out which kernel runs by planning a `GemmProblem`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch

from moe_ops.activation import Formula, formula, row_steps
from moe_ops.dispatch.hopper_decode import dequantizes
from moe_ops.dispatch.operands import OperandSpecs
from moe_ops.dispatch.portable import ScaleGroups, scale_groups, scaled_group
from moe_ops.dispatch.tiles import Gemm, TileRule
from moe_ops.scheme import WHOLE, Quant, Scheme, get_scheme
from moe_ops.scheme.packed import CHUNK, PACKED_DTYPES, splits_chunks
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import TensorSpec

BOX_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
"""Dtypes that Hopper's kernels multiply."""
REACH = 2**31
"""Numbers that 32-bit offsets reach, with which Hopper's kernel fetches rows."""
STORED, EACH, ALL = "stored", "each", "all"
"""States of rows: already in the form that the kernel multiplies; to be quantized independently of
each other; to be quantized with one scale that depends on all rows, or with one scale per
expert."""


class WeightRows(NamedTuple):
    """Layout of a weight's rows and of their scales."""

    step: int
    """Distance in weight rows from one output column to the next."""
    up: int
    """Distance in weight rows from a gate row to its up row; 0 without a gate."""
    rows: int
    """Weight rows per expert."""
    scale_rows: int
    """Weight rows that share a scale."""
    scale_cols: int | None
    """Elements along K that share a scale; None: all, or there are no scales."""
    transposed: bool = False
    """Whether the weight is contiguous along its rows, not along K."""

    @staticmethod
    def of(rule: Formula | None, n: int, quant: Quant | None, scale_rows: int | None) -> WeightRows:
        """The layout for ``n`` output columns with an activation; ``quant`` is the weight's."""
        step, up = row_steps(rule, n)
        cols = None if quant is None else quant.shared_cols
        return WeightRows(step, up, 2 * n if up else n, scale_rows or 1, cols)


class GemmProblem(NamedTuple):
    """An expert GEMM: sizes, formats, and the facts of its tensors on which the choice depends.

    The defaults are the facts of a whole layer's tensors: contiguous, aligned, on one device.
    """

    sizes: Gemm
    """Sizes; ``itemsize`` is that of the rows as they come."""
    scheme: str = "unquantized"
    """Key of the scheme."""
    activation: str = ""
    """Key of the activation of the product; empty: the product is the result."""
    top_k: int = 1
    """Slots that read the same row."""
    rows: str = STORED
    """`STORED`, `EACH` or `ALL`."""
    scale_rows: int | None = None
    """Weight rows that share a scale; None: as the scheme says."""
    expert_scales: bool = False
    """Whether the rows of each expert have a separate scale."""
    shared_scale: bool = False
    """Whether all rows share one static scale."""
    boxes: bool = True
    """Whether Hopper's kernels can read the operands, which are aligned: of one dtype with float32
    scales, or a packed weight that they dequantize."""
    within_reach: bool = True
    """Whether rows begin at multiples of 16 bytes, all within `REACH` of the first."""
    transposed: bool = False
    """Whether `boxes` holds but for a weight that is contiguous along its rows, not along K."""
    num_tokens: int | None = None
    """Tokens of the routing; None: the GEMM gets a plan but no routing."""
    summed: bool = False
    """Whether the weighted sum over the slots of a token follows in the same operator."""
    out_itemsize: int = 2
    """Bytes of a number in the product that is summed."""
    weighted: bool = False
    """Whether routing weights multiply the product."""
    permuted: str | None = None
    """Which of ``a`` and ``out`` has permuted rows; None: both are in slot order."""
    fragments: bool = False
    """Whether the weight is in the packed form."""
    adds: int = 0
    """The step between the columns of rows to which products are added; 0: they are not added. Only
    the dense portable kernel adds."""
    unread: str = ""
    """Why no kernel reads the packed weight with the other operands; empty: one does."""

    @property
    def quant(self) -> Quant | None:
        """How rows are quantized if stored values are multiplied; None: they are not."""
        scheme = get_scheme(self.scheme)
        return None if scheme.dequantizes_both else scheme.activation

    @property
    def operand_itemsize(self) -> int:
        """Bytes per number of the operands that are multiplied: 1 for stored values."""
        return self.sizes.itemsize if self.quant is None else 1

    @property
    def gemm(self) -> Gemm:
        """Sizes of the product, whose ``itemsize`` is that of the operands that are multiplied."""
        return self.sizes._replace(itemsize=self.operand_itemsize)

    @property
    def weight_bits(self) -> int:
        """Bits of a stored weight."""
        weight = get_scheme(self.scheme).weight
        if weight is None or self.quant is not None:
            return 8 * self.operand_itemsize
        return weight.element.stored_bits

    @property
    def row_scales(self) -> str:
        """What shares a scale of quantized rows that are multiplied in bf16; empty: no such rows.

        See `Quant.granularity`. Scales of groups multiply the numbers, others the sums.
        """
        scheme = get_scheme(self.scheme)
        return cast(Quant, scheme.activation).granularity if scheme.dequantizes_both else ""

    @property
    def groups(self) -> ScaleGroups | None:
        """The scale groups of two quantized operands; None: the operands are not quantized."""
        scheme, weight_rows = get_scheme(self.scheme), self.scale_rows
        if self.quant is None or scheme.weight is None:
            return None
        if weight_rows is None:
            rows = scheme.weight.group.rows
            weight_rows = self.weight[1] if rows == WHOLE else rows
        return scale_groups(self.sizes.n, scaled_group(scheme), weight_rows, self.rule)

    @property
    def rule(self) -> Formula | None:
        """Formula of the activation; None without one."""
        return formula(self.activation) if self.activation else None

    @property
    def weight(self) -> tuple[int, int, int]:
        """``(E, rows, K)`` of the weight, in numbers."""
        _, num_experts, n, k, _, halves, _ = self.sizes
        return num_experts, halves * n, k

    @property
    def weight_rows(self) -> WeightRows:
        """Layout of the weight's rows and of their scales."""
        quant = get_scheme(self.scheme).weight
        rows = WeightRows.of(self.rule, self.sizes.n, quant, self.scale_rows)
        return rows._replace(transposed=self.transposed)

    @property
    def one_token(self) -> bool:
        """Whether all slots belong to one token, as the M = 1 kernels require."""
        return self.num_tokens == 1 and (self.summed or self.top_k == self.sizes.num_slots)


def sizes_of(
    num_slots: int, weight: Sequence[int], itemsize: int, rule: TileRule, activation: str
) -> Gemm:
    """Sizes of a GEMM with a weight of ``(E, rows, K)`` numbers."""
    num_experts, rows, k = weight
    halves = 2 if activation and formula(activation).gated else 1
    return Gemm(num_slots, num_experts, rows // halves, k, itemsize, halves, rule)


@lru_cache(maxsize=8192)
def problem_of(operands: OperandSpecs) -> GemmProblem:
    """The problem of an expert GEMM with these operands."""
    a, w, w_scale = operands.a, operands.w, operands.w_scale
    scheme, activation, (experts, n, width) = (
        get_scheme(operands.scheme),
        operands.activation,
        w.shape,
    )
    weight = (experts, n, width * scheme.numbers_per_entry(w.dtype))
    itemsize = 2 if scheme.dequantizes_both else a.dtype.itemsize
    fragments = w.dtype in PACKED_DTYPES
    unread = _unread(operands, scheme) if fragments else ""
    boxes = not unread if fragments else not operands.adds and _boxable(operands, scheme, w.strides)
    expert, row, unit = w.strides
    transposed = row == 1 and _boxable(operands, scheme, (expert, unit, row))
    rows, scales = _row_facts(operands, scheme)
    return GemmProblem(
        sizes_of(a.shape[0] * operands.top_k, weight, itemsize, operands.rule, activation),
        operands.scheme,
        activation,
        operands.top_k,
        rows,
        None if w_scale is None else rows_per_scale(w_scale, cast(Quant, scheme.weight), n),
        expert_scales=scales > 1,
        shared_scale=scales == 1,
        boxes=operands.gluon and boxes,
        within_reach=_aligned(operands.a) and a.shape[0] * a.strides[0] <= REACH,
        transposed=operands.gluon and not (fragments or operands.adds or boxes) and transposed,
        num_tokens=operands.num_tokens,
        summed=operands.summed,
        out_itemsize=operands.out_dtype.itemsize,
        weighted=operands.weighted,
        permuted=None if not operands.expert_order else "out" if activation else "a",
        fragments=fragments,
        adds=operands.adds,
        unread=unread,
    )


def _row_facts(operands: OperandSpecs, scheme: Scheme) -> tuple[str, int]:
    """The state of the rows, and the number of scales that all rows, or an expert's rows, share."""
    quant, scale = scheme.activation, operands.a_scale
    if quant is None:
        return STORED, 0
    scales = 0 if scale is None else scale.numel()
    alone = scales == int(quant.per_tensor)
    state = STORED if operands.a.dtype == quant.dtype else EACH if alone else ALL
    return state, scales * (quant.per_tensor and not scheme.dequantizes_both)


def _unread(operands: OperandSpecs, scheme: Scheme) -> str:
    """Why Hopper's kernels do not read rows and a packed weight with these scales; empty: they do.

    Rows that are quantized are copied, and the scales of their weights have one byte.
    """
    a, w, w_scale, out_dtype = operands.a, operands.w, operands.w_scale, operands.out_dtype
    quant, weight = scheme.weight, f"{scheme.name} in the packed form"
    if quant is None or not dequantizes(scheme, out_dtype):
        dtypes = [str(x) for x in (torch.bfloat16, torch.float16) if dequantizes(scheme, x)]
        return f"the result must be {' or '.join(dtypes)} for w of {weight}, got {out_dtype}"
    same_dtype = scheme.activation is None and scaled_in_rows_dtype(quant)
    if same_dtype and w_scale is not None and w_scale.dtype != a.dtype:
        rule = f"w_scale must have the dtype of a, {a.dtype}, for w of {weight}"
        return f"{rule}, got {w_scale.dtype}"
    gate = formula(operands.activation) if operands.activation else None
    n = w.shape[1]
    if gate is not None and splits_chunks(n, gated=gate.gated, interleaved=gate.interleaved):
        rule = f"N must be a multiple of {2 * CHUNK} for w of {weight} under {operands.activation}"
        return f"{rule}, got {n}"
    if w.address != 0:
        return f"w must begin at a multiple of 16 bytes in the packed form, got {w.address} more"
    if scheme.activation is None and (a.strides[0] % 8 != 0 or a.address != 0):
        rule = f"rows of a must begin at multiples of 16 bytes for w of {weight}"
        return f"{rule}, got address 16 n + {a.address} and {a.strides[0]} numbers from row to row"
    return ""


def scaled_in_rows_dtype(quant: Quant) -> bool:
    """Whether kernels dequantize a packed weight with scales in the dtype of the rows alone."""
    return quant.scale == "input" and (quant.local or quant.zero_point)


def without_sum(problem: GemmProblem) -> GemmProblem:
    """Problem of the GEMM alone, made from the problem with the weighted sum."""
    return problem._replace(summed=False, weighted=False)


def _aligned(rows: TensorSpec) -> bool:
    """Whether rows begin at multiples of 16 bytes."""
    return rows.strides[0] * rows.dtype.itemsize % 16 == rows.address == 0


def _boxable(operands: OperandSpecs, scheme: Scheme, strides: tuple[int, ...]) -> bool:
    """Whether TMA can address a plain weight and rows of its dtype, with float32 scales.

    ``strides``: from one expert, one contiguous row and one number of the weight to the next. The
    place of the rows counts only if the kernel reads them without gathering them first.
    """
    a, w, quant = operands.a, operands.w, scheme.activation
    dtype, size = a.dtype if quant is None else quant.dtype, w.dtype.itemsize
    scales = (operands.w_scale, operands.a_scale if a.dtype == dtype else None)
    expert, row, unit = strides
    whole = expert * size % 16 == row * size % 16 == w.address == 0
    if operands.expert_order and not operands.activation:
        whole &= _aligned(a)
    whole &= all(x is None or x.dtype == torch.float32 for x in scales)
    return w.dtype in BOX_DTYPES and dtype == w.dtype and unit == 1 and whole
