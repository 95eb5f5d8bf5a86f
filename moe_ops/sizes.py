"""Size checks of the operators, made on every call.

The functions that allocate an operator's outputs (`fake_impls`) call these checks, so that kernel,
reference and trace reject the same arguments. Public functions check more, before they call
operators. These checks run in every call, so they only compare numbers that are already known.
Symbolic sizes are not compared, because that would add guards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from moe_ops.activation import formula
from moe_ops.checks import MAX_EXPERTS
from moe_ops.dispatch.tiles import MAX_ROW_TILE, TileRule, is_direct, plan_sizes
from moe_ops.scheme import WHOLE, Quant, get_scheme, is_packed
from moe_ops.scheme.packed import check_packed, groups_first
from moe_ops.tensors import AnyTiles, AnyWeight, ExpertWeight


def shaped(name: str, x: Tensor, *sizes: int | None) -> None:
    """Check that ``x`` has these sizes (None: any)."""
    axes(name, x, len(sizes))
    shape = x.shape
    for axis, expected in enumerate(sizes):
        if expected is not None:
            equal(f"{name}.shape[{axis}]", shape[axis], expected)


def added_to(out: Tensor, dtype: torch.dtype, rule: str) -> None:
    """Check what results are added to: contiguous, with the dtype that ``rule`` explains."""
    if out.dtype != dtype:
        raise TypeError(f"out must have the dtype {rule}, {dtype}, got {out.dtype}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")


def axes(name: str, x: Tensor, count: int) -> None:
    """Check that ``x`` has ``count`` axes."""
    if x.dim() != count:
        raise ValueError(f"{name} must have {count} axes, got shape {tuple(x.shape)}")


def equal(name: str, actual: int, expected: int) -> None:
    """Check that two sizes are equal."""
    if type(actual) is int and type(expected) is int and actual != expected:
        raise ValueError(f"{name} must be {expected}, got {actual}")


def in_range(name: str, value: int, least: int, most: int) -> None:
    """Check that a number is in ``least .. most``."""
    if type(value) is int and type(most) is int and not least <= value <= most:
        raise ValueError(f"{name} must be in {least}..{most}, got {value}")


def weights(topk_weights: Tensor | None, tokens: int, k: int) -> None:
    """Check that routing weights are ``(T, k)`` or None."""
    if topk_weights is not None:
        axes("topk_weights", topk_weights, 2)
        entries("topk_weights", topk_weights, tokens * k)


def entries(name: str, x: Tensor | None, *counts: int) -> None:
    """Check that ``x`` is None or that its number of entries is one of ``counts``."""
    if x is None:
        return
    count = x.numel()
    if type(count) is int and count not in counts and all(type(n) is int for n in counts):
        rule = " or ".join(str(n) for n in dict.fromkeys(counts))
        raise ValueError(f"{name} must have {rule} entries, got shape {tuple(x.shape)}")


def rows_apart(name: str, x: Tensor) -> None:
    """Check that the rows of ``x`` are contiguous and do not overlap."""
    (rows, width), (stride, unit) = x.shape, x.stride()
    if not (type(rows) is int and type(width) is int and type(stride) is int):
        return
    if (unit != 1 and width > 1) or (stride < width and rows > 1):
        raise ValueError(
            f"{name} must have contiguous rows that lie apart, got shape {tuple(x.shape)} and "
            f"strides {x.stride()}"
        )


def num_experts(name: str, count: int) -> None:
    """Check a number of experts."""
    in_range(name, count, 1, MAX_EXPERTS)


def slots(topk_ids: Tensor, expert_map: Tensor | None = None) -> tuple[int, int]:
    """Check ``topk_ids (T, k)`` and the axes of an expert map; returns T and k."""
    axes("topk_ids", topk_ids, 2)
    if expert_map is not None:
        axes("expert_map", expert_map, 1)
    tokens, k = topk_ids.shape
    return tokens, k


def block_size(rows: int) -> None:
    """Check the rows of a tile of alignment."""
    in_range("block_size", rows, 1, MAX_ROW_TILE)
    if rows & (rows - 1):
        raise ValueError(f"block_size must be a power of two, got {rows}")


def gemm_slots(
    a: Tensor,
    w: Tensor,
    numbers: tuple[int, int],
    bias: Tensor | None,
    tiles: AnyTiles,
    rule: TileRule,
    top_k: int,
) -> int:
    """Check an expert GEMM of rows ``(R, K)`` and a weight ``(E, N, K)``; returns its slots.

    ``numbers``: numbers per entry of ``a`` and of ``w``.
    """
    if a.dim() != 2 or w.dim() != 3:
        raise ValueError(
            f"a and w must have 2 and 3 axes, got shapes {tuple(a.shape)} and {tuple(w.shape)}"
        )
    (rows, width), (experts, n, k), (plan, topk_ids, expert_map) = a.shape, w.shape, tiles
    equal("a.shape[1]", width, k * numbers[1] // numbers[0])
    if type(experts) is type(n) is type(k) is int and 0 in w.shape:
        raise ValueError(f"w must have no size of 0, got shape {tuple(w.shape)}")
    if bias is not None:
        shaped("bias", bias, experts, n)
    if expert_map is not None:
        axes("expert_map", expert_map, 1)
    in_range("top_k", top_k, 1, MAX_EXPERTS)
    num_slots = rows * top_k
    if topk_ids is not None and type(num_slots) is int:
        equal("topk_ids.numel()", topk_ids.numel(), num_slots)
    _plan_size(plan, topk_ids, num_slots, experts, rule)
    return num_slots


def _plan_size(
    plan: Tensor | None, topk_ids: Tensor | None, num_slots: int, num_experts: int, rule: TileRule
) -> None:
    """Check the size of a plan, unless slots are so few that nothing reads it."""
    if plan is None or not (type(num_slots) is type(num_experts) is int):
        return
    if topk_ids is None or not is_direct(num_slots, num_experts):
        axes("plan", plan, 1)
        equal("plan.numel()", plan.numel(), plan_sizes(num_slots, num_experts, rule).entries)


def planned(rows: Sequence[Tensor], tiles: AnyTiles, num_experts: int, rule: TileRule) -> int:
    """Check rows that a plan groups by expert, one per slot or one per token; returns the slots."""
    plan, topk_ids, expert_map = tiles
    in_range("num_experts", num_experts, 1, MAX_EXPERTS)
    num_tokens = num_slots = rows[0].shape[0]
    if topk_ids is not None:
        num_tokens, top_k = slots(topk_ids, expert_map)
        num_slots = num_tokens * top_k
    for x in rows:
        axes("rows", x, 2)
        count, width = x.shape
        in_range("rows.shape[1]", width, 1, 2**31 - 1)
        if type(count) is type(num_slots) is int and count not in (num_tokens, num_slots):
            raise ValueError(
                f"rows must be one per token = {num_tokens} or one per slot = {num_slots}, got "
                f"{count}"
            )
    _plan_size(plan, topk_ids, num_slots, num_experts, rule)
    return num_slots


def row_scale(scale: Tensor | None, quant: Quant, rows: int, experts: int = 1) -> None:
    """Check the scales given for quantizing ``rows`` rows of each expert.

    There may be one scale for all rows, one per expert or one per row.
    """
    if scale is None:
        return
    if quant.local and not quant.global_scale:
        raise ValueError("scale must be None if scales are per group of columns, got a Tensor")
    alone = quant.global_scale or quant.per_tensor
    more = () if quant.global_scale else (experts,) if alone else (experts, experts * rows)
    entries("scale", scale, 1, *more)


def stored_row_scale(scale: Tensor, quant: Quant, rows: int, k: int, experts: int) -> None:
    """Check the scales of ``rows`` quantized rows of ``k`` numbers."""
    if quant.per_tensor:
        entries("a_scale", scale, 1, experts)
    else:
        axes("a_scale", scale, 2)
        groups = quant.row_scale_shape(1, k)[1]
        entries("a_scale", scale, rows * groups)


def expert_weight(weight: AnyWeight) -> ExpertWeight:
    """The weight that an operator's list of fields describes."""
    if not 0 < len(weight) <= len(ExpertWeight._fields):
        names = ", ".join(ExpertWeight._fields)
        raise ValueError(f"weight must be [{names}], got {len(weight)} entries")
    if weight[0] is None:
        raise ValueError("weight[0] must be the stored values, got None")
    return ExpertWeight(*weight)


def weight_parts(
    scheme: str,
    shape: tuple[int, int, int],
    w: Tensor,
    scale: Tensor | None,
    global_scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> None:
    """Check the tensors of a weight with ``(E, N, K)`` numbers, in either form.

    A weight that the scheme does not quantize is one tensor alone.
    """
    parsed = get_scheme(scheme)
    quant = parsed.weight
    for name, value, needed in (
        ("w_scale", scale, quant is not None),
        ("w_zero_point", zero_point, quant is not None and quant.zero_point),
        ("w_global_scale", global_scale, quant is not None and quant.global_scale),
    ):
        if (value is not None) != needed:
            rule = "be a Tensor" if needed else "be None"
            got = "None" if value is None else "a Tensor"
            raise ValueError(f"{name} must {rule} for scheme {scheme}, got {got}")
    if quant is None:
        return
    fragments = is_packed(w)
    if w.dtype != quant.dtype and not fragments:
        raise TypeError(f"w must have dtype {quant.dtype} for scheme {scheme}, got {w.dtype}")
    experts, n, k = shape
    if not (type(experts) is int and type(n) is int and type(k) is int):
        return
    counts, zero_points = _weight_entries(scheme, experts, n, k)
    _of_experts("w_scale", scale, experts, *counts)
    _of_experts("w_global_scale", global_scale, experts, experts, 2 * experts, experts * n)
    _of_experts("w_zero_point", zero_point, experts, zero_points)
    if fragments:
        check_packed("w", w, parsed, n, k)
        if quant.local:
            _groups_first("w_scale", scale, quant.weight_scale_shape(experts, n, k))
            _groups_first("w_zero_point", zero_point, quant.zero_point_shape(experts, n, k))


def _groups_first(name: str, x: Tensor | None, plain: tuple[int, ...]) -> None:
    """Check that ``x``, if given, has the packed form's shape."""
    if x is not None:
        shaped(name, x, *groups_first(plain))


def _of_experts(name: str, x: Tensor | None, experts: int, *counts: int) -> None:
    """Check that ``x``, if given, has a row per expert and one of these numbers of entries."""
    if x is not None and (x.numel() not in counts or x.shape[0] != experts):
        rule = " or ".join(str(count) for count in dict.fromkeys(counts))
        raise ValueError(
            f"{name} must have {rule} entries, a row for each of {experts} experts, got shape "
            f"{tuple(x.shape)}"
        )


@lru_cache(maxsize=1024)
def _weight_entries(scheme: str, experts: int, n: int, k: int) -> tuple[tuple[int, ...], int]:
    """The numbers of scales that a weight may have, and its number of zero points."""
    quant = get_scheme(scheme).weight
    if quant is None:
        return (0,), 0
    zero_rows = -(-n // quant.element.values_per_byte)
    if quant.group.cols == WHOLE:  # one per tensor, per half or per row
        return (experts, 2 * experts, experts * n), experts * zero_rows
    rows, groups = quant.weight_scale_shape(1, n, k)[1:]
    return (experts * rows * groups,), experts * zero_rows * groups


def activated_width(name: str, width: int, activation: str) -> int:
    """Output columns of an activation of ``width`` columns: half of them if it is gated."""
    if not activation or not formula(activation).gated:
        return width
    if type(width) is int and width % 2:
        raise ValueError(f"{name} must have an even number of columns for gate and up, got {width}")
    return width // 2
