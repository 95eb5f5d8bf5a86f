"""What operators allocate on a GPU and free again before they return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops.activation import formula
from moe_ops.dispatch.choice import tiles_of
from moe_ops.dispatch.hopper import packed_rows, token_tiles
from moe_ops.dispatch.portable import quantizes_slots
from moe_ops.dispatch.tiles import Device, Gemm, is_direct
from moe_ops.fake_impls.scaled_gemm import stored_rows
from moe_ops.scheme import get_scheme

PACKING = ("expert_gemm", "expert_gemm_act", "scaled_gemm", "scaled_gemm_act", "gemm_sum")
"""Operators whose kernels for Hopper may pack rows."""


def scratch_sizes(func: Any, given: tuple[Any, ...], out: Any, device: Device) -> tuple[int, ...]:
    """Bytes of each tensor that an operator allocates besides ``out``; none of most.

    Args:
        func: any operator.
        given: its positional arguments.
        out: what it returned.
        device: the GPU that it would run on.
    """
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "moe_ops" or name not in PACKING:
        return ()
    names = (argument.name for argument in func._schema.arguments)
    named = dict(zip(names, given, strict=False))
    if name != "gemm_sum":
        return _packed(named, out, device)
    if _of_token(named, device, summed=True):
        return ()
    rows = named["a"].new_empty(len(named["a"]), out.shape[1], dtype=out.dtype)
    return (rows.nbytes, *_packed(named, rows, device))


def _of_token(given: dict[str, Any], device: Device, *, summed: bool) -> bool:
    """Whether a GEMM is computed by a kernel of one token."""
    w, ids, activation = given["w"], given["topk_ids"], given.get("activation")
    if ids is None or len(ids) != 1 or len(given["row_tiles"]) == 1:
        return False
    rule, scheme = formula(activation) if activation else None, get_scheme(given["scheme"])
    sizes = (tuple(w.shape), w.itemsize, ids.shape[1])
    return token_tiles(*sizes, rule, scheme, device, summed=summed) is not None


def _packed(given: dict[str, Any], out: Tensor, device: Device) -> tuple[int, ...]:
    """Of a GEMM: a count of tiles; its rows in the order of its plan, or quantized, their scales.

    Rows that lie by expert are not packed; rows that came quantized are not quantized.
    """
    weighted = given.get("output_weights") is not None
    (num_experts, rows, k), num_slots = given["w"].shape, out.shape[0]
    activation, scheme = given.get("activation"), get_scheme(given.get("scheme", "unquantized"))
    in_order = given.get("expert_order", False) and activation is None
    if weighted or num_slots == 0:
        return ()
    rule = formula(activation) if activation else None
    halves, itemsize = 2 if rule is not None and rule.gated else 1, given["w"].itemsize
    tiles = tuple(given["row_tiles"])
    gemm = Gemm(num_slots, num_experts, rows // halves, k, itemsize, halves, tiles)
    own, quant = tiles_of(gemm, scheme, rule, device).hopper, scheme.activation
    counts: tuple[int, ...] = ()
    a, scale, most = given["a"], given.get("a_scale"), 0
    if own is not None and own.packed:
        most = packed_rows(num_slots, num_experts, own.block_m)
        counts = (4,) if own.on_demand else ()
    if quant is None:
        return (*counts, most * k * itemsize) if most and not in_order else counts
    shared = quant.per_tensor and scale is not None and scale.numel() == 1
    groups = 1 if shared else quant.row_scale_shape(1, k)[-1]
    if stored_rows(a, scale, quant) is None and not most:
        direct = is_direct(num_slots, num_experts) and quantizes_slots(quant, k, tiles)
        direct |= activation is not None and _of_token(given, device, summed=False)
        most = 0 if direct else len(a)
    elif quant.per_tensor and not shared:
        most, counts = 0, ()  # experts' own scales, which the kernel for all GPUs takes
    return (*counts, most * k * quant.dtype.itemsize, most * groups * 4) if most else ()
