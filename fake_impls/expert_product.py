"""Output of the expert GEMMs, and what a scheme lets them take.

A scheme quantizes neither operand, the weight alone, or both: `num_slots` is the one place that
tells these three apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import sizes
from moe_ops.dispatch.row_tiles import gemm_rule
from moe_ops.scheme import UNQUANTIZED, Scheme, get_scheme, is_packed
from moe_ops.scheme.packed import widens_rows
from moe_ops.tensors import AnyTiles, AnyWeight


def expert_product(
    a: Tensor,
    a_scale: Tensor | None,
    weight: AnyWeight,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str = "",
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """``(slots, N)``, or ``(slots, I)`` with a gated activation; in slot order or permuted."""
    slots, n = num_slots(
        a, a_scale, weight, tiles, top_k, scheme, out_dtype, expert_order, batch_invariant
    )
    if topk_weights is not None and get_scheme(scheme).activation is not None:
        rule = f"topk_weights must be None for scheme {scheme}, whose rows are quantized"
        raise ValueError(f"{rule}, got a Tensor")
    sizes.entries("topk_weights", topk_weights, slots)
    return a.new_empty(slots, sizes.activated_width("w", n, activation), dtype=out_dtype)


def activated_product(
    a: Tensor,
    a_scale: Tensor | None,
    weight: AnyWeight,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    activation: str,
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(slots, I)`` or ``(slots, N)``, as `expert_product`, and the product ``(slots, N)``."""
    h = expert_product(
        a,
        a_scale,
        weight,
        topk_weights,
        tiles,
        top_k,
        scheme,
        out_dtype,
        activation,
        expert_order,
        batch_invariant,
    )
    return h, h.new_empty(h.shape[0], weight[0].shape[1])


def expert_product_out(
    a: Tensor,
    weight: AnyWeight,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    top_k: int,
    batch_invariant: bool = False,
    first_column: int = 0,
    column_step: int = 1,
    *,
    out: Tensor,
) -> None:
    """Check ``out``, to columns of which products are added: contiguous, dtype of ``a``.

    ``(slots, W)``: column c of the products goes to column ``first_column + column_step * c``.
    """
    scheme = UNQUANTIZED.key
    slots, n = num_slots(a, None, weight, tiles, top_k, scheme, a.dtype, False, batch_invariant)
    _, bias, *_, host = sizes.expert_weight(weight)
    if bias is not None or host is not None:
        name = "bias" if host is None else "host"
        raise ValueError(f"{name} must be None where products are added, got a Tensor")
    sizes.entries("topk_weights", topk_weights, slots)
    sizes.shaped("out", out, slots, None)
    if first_column < 0 or column_step < 1 or first_column + column_step * (n - 1) >= out.shape[1]:
        raise ValueError(
            f"out must have column first_column + column_step * c for each of the {n} columns c of "
            f"the products, got {first_column}, {column_step} and shape {tuple(out.shape)}"
        )
    sizes.added_to(out, a.dtype, "of a")


def expert_product_sum(
    a: Tensor,
    a_scale: Tensor | None,
    weight: AnyWeight,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    scheme: str,
    out_dtype: torch.dtype,
    expert_order: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """``(T, N)``."""
    _, n = num_slots(a, a_scale, weight, tiles, 1, scheme, out_dtype, expert_order, batch_invariant)
    _, topk_ids, expert_map = tiles
    if topk_ids is None:
        raise ValueError("tiles[1] must be topk_ids, got None")
    tokens, k = sizes.slots(topk_ids, expert_map)
    sizes.weights(topk_weights, tokens, k)
    return a.new_empty(tokens, n, dtype=out_dtype)


def num_slots(
    a: Tensor,
    a_scale: Tensor | None,
    weight: AnyWeight,
    tiles: AnyTiles,
    top_k: int,
    scheme: str,
    out_dtype: torch.dtype,
    expert_order: bool,
    batch_invariant: bool,
) -> tuple[int, int]:
    """The number of slots, and of weight rows.

    Raises:
        ValueError: sizes disagree, or the scheme does not take what is given.
        TypeError: another ``out_dtype`` than that of rows which are not quantized.
    """
    rule, parsed = gemm_rule(scheme, a, tiles, batch_invariant), get_scheme(scheme)
    w, bias, w_scale, zero_point, global_scale, host = sizes.expert_weight(weight)
    if host is not None and tiles[1] is None:
        raise NotImplementedError("tiles[1] must be topk_ids for experts in host memory, got None")
    quant, each = parsed.activation, parsed.numbers_per_entry(w.dtype)
    each_row = 1 if quant is None else quant.element.values_per_byte
    slots = sizes.gemm_slots(a, w, (each_row, each), bias, tiles, rule, top_k)
    experts, n, width = w.shape
    one = w if host is None else w.narrow(0, 0, 1)  # one expert lies for all
    sizes.weight_parts(scheme, (experts, n, each * width), one, w_scale, global_scale, zero_point)
    if expert_order and parsed.weight is not None:
        rule_of_order = f"expert_order must be False for scheme {scheme}, whose weight is quantized"
        raise ValueError(f"{rule_of_order}, got True")
    if quant is not None:
        scales = experts if host is None else 1  # kernels know an expert's slot, not its number
        _quantized_rows(a, a_scale, parsed, fragments=is_packed(w), experts=scales)
    elif a_scale is not None:
        raise ValueError(f"a_scale must be None for scheme {scheme}, got a Tensor")
    elif out_dtype != a.dtype:
        raise TypeError(f"out_dtype must be the dtype of a, {a.dtype}, got {out_dtype}")
    return slots, n


def _quantized_rows(
    a: Tensor, a_scale: Tensor | None, scheme: Scheme, *, fragments: bool, experts: int
) -> None:
    """Check rows that are quantized, or that the operator quantizes.

    It quantizes rows which it also dequantizes for a weight in the packed form alone.
    """
    quant, _ = scheme.quants
    stored, later = a.dtype == quant.dtype, fragments and a_scale is None and widens_rows(scheme)
    if scheme.dequantizes_both and not later and (a_scale is None or not stored):
        rule = f"a must be rows as scheme {scheme.key} stores them, with scales"
        got = "None" if a_scale is None else f"rows of dtype {a.dtype}"
        raise ValueError(f"{rule}, got {got}")
    if a_scale is None:
        if stored:
            raise ValueError(f"a_scale must be given with rows of dtype {a.dtype}, got None")
        return
    rows, width = a.shape
    if stored:
        k = quant.element.values_per_byte * width
        sizes.stored_row_scale(a_scale, quant, rows, k, experts)
    else:
        sizes.row_scale(a_scale, quant, rows)
