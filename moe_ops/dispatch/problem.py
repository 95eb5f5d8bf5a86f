"""The description of an expert GEMM from which its kernel is chosen, as a value.

`plan_gemm` reads nothing else of the GEMM: launchers, `explain`, warm-up, the workspace and tests
find out which kernel runs by planning a `GemmProblem`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import Formula, formula, row_steps
from moe_ops.dispatch.hopper import takes_one_token
from moe_ops.dispatch.hopper_decode import decodes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.dispatch.tiles import Gemm, TileRule
from moe_ops.scheme import UNQUANTIZED, Quant, Scheme, get_scheme, is_packed
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import AnyTiles

BOX_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
"""Dtypes that Hopper's kernels multiply."""
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
    """Sizes; ``itemsize`` is that of the given rows."""
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
    """Whether all rows share one given scale."""
    boxes: bool = True
    """Whether Hopper's kernels can read the operands, which are aligned: of one dtype with float32
    scales, or a packed weight that they decode."""
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
    packed: bool = False
    """Whether the weight is in the packed form."""
    adds: bool = False
    """Whether the product is added to rows that are there; only the dense portable kernel can."""
    unread: str = ""
    """Why no kernel reads the packed weight with the other operands; empty: one does."""

    @property
    def quant(self) -> Quant | None:
        """How rows are quantized if stored values are multiplied; None: they are not."""
        scheme = get_scheme(self.scheme)
        return None if scheme.decoded else scheme.activation

    @property
    def operand_itemsize(self) -> int:
        """Bytes per number of the operands that are multiplied: 1 for stored values."""
        return self.sizes.itemsize if self.quant is None else 1

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
        return WeightRows.of(self.rule, self.sizes.n, quant, self.scale_rows)

    @property
    def one_token(self) -> bool:
        """Whether all slots belong to one token, as the M = 1 kernels require."""
        return self.num_tokens == 1 and (self.summed or self.top_k == self.sizes.num_slots)


def sizes_of(
    num_slots: int,
    weight: Sequence[int],
    itemsize: int,
    rule: TileRule,
    activation: str,
) -> Gemm:
    """Sizes of a GEMM with a weight of ``(E, rows, K)`` numbers."""
    num_experts, rows, k = weight
    halves = 2 if activation and formula(activation).gated else 1
    return Gemm(num_slots, num_experts, rows // halves, k, itemsize, halves, rule)


def dense_problem(
    a: Tensor,
    w: Tensor,
    tiles: AnyTiles,
    top_k: int,
    activation: str = "",
    *,
    weighted: bool = False,
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> GemmProblem:
    """Problem of a GEMM whose operands are not quantized; arguments are the operator's."""
    rule = gemm_rule(UNQUANTIZED.key, a, tiles, batch_invariant)
    permuted = None if not expert_order else "out" if activation else "a"
    return GemmProblem(
        sizes_of(a.shape[0] * top_k, w.shape, w.itemsize, rule, activation),
        activation=activation,
        top_k=top_k,
        boxes=boxable(w, a.dtype, a if permuted == "a" else None),
        num_tokens=_tokens(tiles),
        weighted=weighted,
        permuted=permuted,
    )


def scaled_problem(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    activation: str = "",
    *,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> GemmProblem:
    """Problem of a GEMM with two quantized operands; the rows may not be quantized yet.

    ``out_dtype`` counts if the weight is packed.
    """
    known = get_scheme(scheme)
    if known.decoded:
        return stored_problem(
            a, w, tiles, top_k, scheme, activation,
            w_scale=w_scale, out_dtype=out_dtype, batch_invariant=batch_invariant,
        )  # fmt: skip
    quant, weight_quant = known.quants
    given = None if a_scale is None else a_scale.numel()
    rows = STORED
    if a.dtype != quant.dtype:
        alone = not quant.per_tensor if given is None else quant.per_tensor and given == 1
        rows = EACH if alone else ALL
    floats = quant.scale_dtype == w_scale.dtype == torch.float32
    if rows == STORED:
        floats &= a_scale is not None and a_scale.dtype == torch.float32
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    return GemmProblem(
        sizes_of(a.shape[0] * top_k, w.shape, a.itemsize, rule, activation),
        scheme,
        activation,
        top_k,
        rows,
        rows_per_scale(w_scale, weight_quant, w.shape[1]),
        expert_scales=quant.per_tensor and given is not None and given > 1,
        shared_scale=quant.per_tensor and given == 1,
        boxes=floats and boxable(w, quant.dtype),
        num_tokens=_tokens(tiles),
    )


def stored_problem(
    a: Tensor,
    w: Tensor,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    activation: str = "",
    *,
    w_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> GemmProblem:
    """Problem of a GEMM whose kernel dequantizes the weights or both operands.

    ``w_scale`` and ``out_dtype`` (None: that of the rows) count if the weight is packed. Then rows
    that are decoded may not be quantized yet.
    """
    known, (num_experts, n, _) = get_scheme(scheme), w.shape
    quant = known.activation
    k = a.shape[1] * (2 if quant is not None and quant.element.packed else 1)
    itemsize = a.itemsize if quant is None else 2
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    sizes = sizes_of(a.shape[0] * top_k, (num_experts, n, k), itemsize, rule, activation)
    unread = _unread(a, w, w_scale, known, out_dtype or a.dtype) if is_packed(w) else ""
    return GemmProblem(
        sizes,
        scheme,
        activation,
        top_k,
        STORED if quant is None or a.dtype == quant.dtype else EACH,
        boxes=is_packed(w) and _on_gpu(w) and not unread,
        num_tokens=_tokens(tiles),
        packed=is_packed(w),
        unread=unread,
    )


def _unread(
    a: Tensor, w: Tensor, w_scale: Tensor | None, scheme: Scheme, out_dtype: torch.dtype
) -> str:
    """Why Hopper's kernels do not read rows and a packed weight with these scales; empty: they do.

    Rows that are quantized are copied, and the scales of their weights have one byte.
    """
    quant, decoded = scheme.weight, f"{scheme.name} in the packed form"
    if quant is None or not decodes(scheme, out_dtype):
        known = [str(x) for x in (torch.bfloat16, torch.float16) if decodes(scheme, x)]
        return f"the result must be {' or '.join(known)} for w of {decoded}, got {out_dtype}"
    same_dtype = scheme.activation is None and scaled_in_rows_dtype(quant)
    if same_dtype and w_scale is not None and w_scale.dtype != a.dtype:
        rule = f"w_scale must have the dtype of a, {a.dtype}, for w of {decoded}"
        return f"{rule}, got {w_scale.dtype}"
    if w.data_ptr() % 16 != 0:
        return f"w must begin at a multiple of 16 bytes in the packed form, got {w.data_ptr()}"
    if scheme.activation is None and (a.stride(0) % 8 != 0 or a.data_ptr() % 16 != 0):
        rule = f"rows of a must begin at multiples of 16 bytes for w of {decoded}"
        return f"{rule}, got address {a.data_ptr()} and {a.stride(0)} numbers from row to row"
    return ""


def scaled_in_rows_dtype(quant: Quant) -> bool:
    """Whether kernels decode a packed weight with scales in the dtype of the rows alone."""
    return quant.scale == "input" and (quant.local or quant.zero_point)


def sum_problem(gemm: GemmProblem, weighted: bool, out_itemsize: int) -> GemmProblem:
    """Problem of a GEMM with the weighted sum, made from the GEMM's problem."""
    return gemm._replace(summed=True, weighted=weighted, out_itemsize=out_itemsize)


def without_sum(problem: GemmProblem) -> GemmProblem:
    """Problem of the GEMM alone, made from the problem with the weighted sum."""
    return problem._replace(summed=False, weighted=False)


def _tokens(tiles: AnyTiles) -> int | None:
    """Tokens of the routing that the tiles carry; None: they carry a plan alone."""
    return None if tiles[1] is None else tiles[1].shape[0]


def boxable(w: Tensor, dtype: torch.dtype, in_place: Tensor | None = None) -> bool:
    """Whether TMA can address a weight and rows of a dtype.

    Args:
        w: the weight; its strides and address count.
        dtype: dtype of the rows that are multiplied with it.
        in_place: the rows, if the kernel reads them without packing them first.
    """
    expert, row, unit = w.stride()
    size = w.itemsize
    whole = expert * size % 16 == row * size % 16 == w.data_ptr() % 16 == 0
    if in_place is not None:
        whole &= in_place.stride(0) * size % 16 == in_place.data_ptr() % 16 == 0
    return _on_gpu(w) and w.dtype in BOX_DTYPES and dtype == w.dtype and unit == 1 and whole


def _on_gpu(x: Tensor) -> bool:
    """Whether Gluon kernels can run: there is no interpreter for Gluon in Triton."""
    return x.device.type in ("cuda", "meta")


@lru_cache(maxsize=4096)
def layer_problem(
    sizes: Gemm,
    scheme: Scheme,
    activation: str,
    num_tokens: int | None,
    top_k: int,
    *,
    packed: bool = False,
) -> GemmProblem:
    """Problem of a layer's GEMM, with the facts of a whole layer's tensors.

    Args:
        sizes: sizes of the GEMM; ``itemsize`` is that of numbers that are not quantized.
        scheme: the layer's scheme.
        activation: key of the activation that GEMM 1 applies to its product; empty: none.
        num_tokens: T if rows are the slots of a routing; None: rows are grouped by expert.
        top_k: k for GEMM 1; 1 for GEMM 2, whose rows are slots.
        packed: whether the weight is in the packed form.
    """
    quant, rows, shared = scheme.activation, STORED, False
    if quant is not None and (packed or not scheme.decoded):
        shared = quant.per_tensor
        dynamic = shared and not quant.static
        rows = STORED if num_tokens is None or dynamic else EACH
    second = num_tokens == 1 and not activation and top_k == 1
    summed = second and (packed or sums_one_token(scheme))
    return GemmProblem(
        sizes,
        scheme.key,
        activation,
        top_k,
        rows,
        shared_scale=shared,
        num_tokens=num_tokens,
        summed=summed,
        packed=packed,
    )


def sums_one_token(scheme: Scheme) -> bool:
    """Whether there are kernels that also sum the second GEMM of one token.

    For a weight in the plain form: those of packed weights always do.
    """
    return scheme.activation is None or takes_one_token(scheme)
