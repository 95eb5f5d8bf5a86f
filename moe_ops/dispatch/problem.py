"""What is known of one expert GEMM before its kernel is chosen, as a value.

`plan_gemm` reads nothing else, so whoever wants to know which kernel runs (a launcher, `explain`,
warm-up, the workspace, a test) makes a `GemmProblem` and asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import Formula, formula, row_steps
from moe_ops.dispatch.hopper import operand_bytes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.dispatch.tiles import Gemm, TileRule
from moe_ops.scheme import UNQUANTIZED, Quant, Scheme, get_scheme
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import AnyTiles

BOX_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Dtypes that Hopper's kernels multiply."""
STORED, EACH, ALL = "stored", "each", "all"
"""Rows that come as the kernel multiplies them; rows to be quantized, each by itself; rows to be
quantized with a scale that all of them decide, or that every expert has of its own."""


class WeightRows(NamedTuple):
    """How the rows of a weight lie, and their scales: what every kernel has to know of them."""

    step: int
    """From the weight row of an output column to that of the next one."""
    up: int
    """From a gate row to its up row; 0 without a gate."""
    rows: int
    """Weight rows of an expert."""
    scale_rows: int
    """Weight rows that share a scale."""
    scale_cols: int | None
    """Elements along K that share a scale; None: all, or there are no scales."""

    @staticmethod
    def of(rule: Formula | None, n: int, quant: Quant | None, scale_rows: int | None) -> WeightRows:
        """The rows for ``n`` output columns with an activation; ``quant``: of the weight."""
        step, up = row_steps(rule, n)
        cols = None if quant is None else quant.shared_cols
        return WeightRows(step, up, 2 * n if up else n, scale_rows or 1, cols)


class GemmProblem(NamedTuple):
    """One expert GEMM: sizes, formats, and the facts of its tensors that decide.

    The defaults are the facts of a whole layer's tensors: contiguous, aligned, of one device.
    """

    sizes: Gemm
    """``itemsize`` is that of the rows as they are given."""
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
    """Whether every expert has a scale of its own for its rows."""
    shared_scale: bool = False
    """Whether all rows share one scale, which is given."""
    boxes: bool = True
    """Whether TMA boxes can be made of the operands: aligned, of one dtype, with float32 scales."""
    num_tokens: int | None = None
    """Tokens of the routing, where the GEMM gets it; None: it gets only a plan."""
    summed: bool = False
    """Whether the weighted sum over the slots of a token follows in the same operator."""
    out_itemsize: int = 2
    """Bytes of a number in the product that is summed."""
    weighted: bool = False
    """Whether routing weights multiply the product."""
    permuted: str | None = None
    """``a`` or ``out`` where those rows lie in the order of the plan; None: in slot order."""

    @property
    def quant(self) -> Quant | None:
        """How rows are quantized where stored values are multiplied; None: they are not."""
        scheme = get_scheme(self.scheme)
        return None if scheme.decoded else scheme.activation

    @property
    def operand_itemsize(self) -> int:
        """Bytes per number of the operands that are multiplied: stored values take one."""
        return self.sizes.itemsize if self.quant is None else 1

    @property
    def rule(self) -> Formula | None:
        """The activation's formula."""
        return formula(self.activation) if self.activation else None

    @property
    def weight(self) -> tuple[int, int, int]:
        """``(E, rows, K)`` of the weight, in numbers."""
        _, num_experts, n, k, _, halves, _ = self.sizes
        return num_experts, halves * n, k

    @property
    def weight_rows(self) -> WeightRows:
        """How the rows of the weight and their scales lie."""
        quant = get_scheme(self.scheme).weight
        return WeightRows.of(self.rule, self.sizes.n, quant, self.scale_rows)

    @property
    def one_token(self) -> bool:
        """Whether all slots are those of one token, as the M = 1 kernels have it."""
        return self.num_tokens == 1 and (self.summed or self.top_k == self.sizes.num_slots)


def sizes_of(
    num_slots: int,
    weight: Sequence[int],
    itemsize: int,
    rule: TileRule,
    activation: str,
) -> Gemm:
    """The sizes of a GEMM with a weight of ``(E, rows, K)`` numbers."""
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
    """The problem of operands that are not quantized; arguments as the operator has them."""
    rule = gemm_rule(UNQUANTIZED.key, a, tiles, batch_invariant)
    permuted = None if not expert_order else "out" if activation else "a"
    return GemmProblem(
        sizes_of(a.shape[0] * top_k, w.shape, w.itemsize, rule, activation),
        activation=activation,
        top_k=top_k,
        boxes=boxable(w, a.dtype, a if permuted == "a" else None),
        num_tokens=None if tiles[1] is None else tiles[1].shape[0],
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
    batch_invariant: bool = False,
) -> GemmProblem:
    """The problem of two quantized operands, of which rows may still have to be quantized."""
    known = get_scheme(scheme)
    if known.decoded:
        return stored_problem(
            a, w, tiles, top_k, scheme, activation, batch_invariant=batch_invariant
        )
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
        num_tokens=None if tiles[1] is None else tiles[1].shape[0],
    )


def stored_problem(
    a: Tensor,
    w: Tensor,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    activation: str = "",
    *,
    batch_invariant: bool = False,
) -> GemmProblem:
    """The problem of weights, or of both operands, that become numbers in the kernel."""
    known, (num_experts, n, _) = get_scheme(scheme), w.shape
    packed = known.activation is not None and known.activation.element.packed
    k = a.shape[1] * (2 if packed else 1)
    itemsize = a.itemsize if known.activation is None else 2
    rule = gemm_rule(scheme, a, tiles, batch_invariant)
    sizes = sizes_of(a.shape[0] * top_k, (num_experts, n, k), itemsize, rule, activation)
    return GemmProblem(
        sizes,
        scheme,
        activation,
        top_k,
        boxes=False,
        num_tokens=None if tiles[1] is None else tiles[1].shape[0],
    )


def sum_problem(gemm: GemmProblem, weighted: bool, out_itemsize: int) -> GemmProblem:
    """The problem of a GEMM with the weighted sum, from that of the GEMM."""
    return gemm._replace(summed=True, weighted=weighted, out_itemsize=out_itemsize)


def without_sum(problem: GemmProblem) -> GemmProblem:
    """The problem of the GEMM alone, from that with the weighted sum."""
    return problem._replace(summed=False, weighted=False)


def boxable(w: Tensor, dtype: torch.dtype, in_place: Tensor | None = None) -> bool:
    """Whether TMA boxes can be made of a weight and of rows of a dtype.

    Args:
        w: the weight; its strides and address count.
        dtype: dtype of the rows that are multiplied with it.
        in_place: the rows, where the kernel reads them without packing them first.
    """
    expert, row, unit = w.stride()
    size = w.itemsize
    whole = expert * size % 16 == row * size % 16 == w.data_ptr() % 16 == 0
    if in_place is not None:
        whole &= in_place.stride(0) * size % 16 == in_place.data_ptr() % 16 == 0
    on_gpu = w.device.type in ("cuda", "meta")  # there is no interpreter for Gluon
    return on_gpu and w.dtype in BOX_DTYPES and dtype == w.dtype and unit == 1 and whole


@lru_cache(maxsize=4096)
def layer_problem(
    sizes: Gemm, scheme: Scheme, activation: str, num_tokens: int | None, top_k: int
) -> GemmProblem:
    """The problem of a layer's GEMM, with the facts of a whole layer's tensors.

    Args:
        sizes: of the GEMM; ``itemsize`` of a number that is not quantized.
        scheme: the layer's scheme.
        activation: of the first GEMM, where it activates its product.
        num_tokens: T where rows are the slots of a routing; None: rows lie by expert.
        top_k: k for the first GEMM, 1 for the second one, whose rows are slots.
    """
    quant, rows, shared = scheme.activation, STORED, False
    if quant is not None and not scheme.decoded:
        shared = quant.per_tensor
        dynamic = shared and not quant.static
        rows = STORED if num_tokens is None or dynamic else EACH
    summed = num_tokens == 1 and not activation and top_k == 1 and operand_bytes(scheme) is not None
    return GemmProblem(
        sizes,
        scheme.key,
        activation,
        top_k,
        rows,
        shared_scale=shared,
        num_tokens=num_tokens,
        summed=summed,
    )
