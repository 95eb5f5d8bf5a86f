"""Check that weights, the tensors of a quantization configuration and tokens fit each other."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.activation import MoEActivation
from moe_ops.dispatch.problem import scaled_in_rows_dtype
from moe_ops.scheme import TENSORS, FusedMoEQuantConfig, Quant, is_packed
from moe_ops.scheme.packed import PACKED_DTYPES, check_packed, groups_first

SCALE_DTYPES = {"e8m0": (torch.uint8,), "e4m3": (torch.float8_e4m3fn,)}
"""Dtypes of scales that are not stored as ordinary floats, by the form of the scale."""


def check_quantized(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, kind: MoEActivation, config: FusedMoEQuantConfig
) -> None:
    """Check that weights are stored as the scheme says, and that its tensors are given and fit.

    Raises:
        TypeError, ValueError: the message names the tensor, the rule and the value.
    """
    quant, scheme = config.scheme.weight, config.scheme
    checks.tensor("hidden_states", hidden_states, 2, checks.FLOATS)
    if quant is None:
        raise ValueError(f"quant_config must have quantized weights, got scheme {scheme.name}")
    config.check_complete()
    for name, w in (("w1", w1), ("w2", w2)):
        checks.tensor(name, w, 3, (quant.dtype, *PACKED_DTYPES))
        checks.same_device(name, w, "hidden_states", hidden_states)
        checks.one_unit_stride(name, w)
    hidden, intermediate = hidden_states.shape[1], _columns(w2, quant)
    rows = 2 * intermediate if kind.is_gated else intermediate
    sizes = {"w1": (w1, rows, hidden), "w2": (w2, hidden, intermediate)}
    for name, (w, n, k) in sizes.items():
        checks.size(f"{name}.shape[0]", w.shape[0], "w1.shape[0]", w1.shape[0])
        checks.size(f"{name}.shape[1]", w.shape[1], "the rows that the sizes ask for", n)
        checks.size(f"{name}.shape[2]", _columns(w, quant), "the columns (unpacked)", k)
        if is_packed(w):
            # The view that stands for experts in host memory has one. Operators check real weights.
            check_packed(name, w if w.stride(0) else w[:1], scheme, n, k)
        halves = name == "w1" and kind.is_gated and not kind.is_interleaved
        size = (w.shape[0], n, k)
        _check_scales(config, name, quant, size, halves=halves, fragments=is_packed(w))
        if is_packed(w) and hidden_states.is_cuda:
            _check_packed_scale(config, name, quant, hidden_states.dtype)
    for name in ("a1_scale", "a2_scale", "a1_gscale", "a2_gscale"):
        scale = getattr(config, name)
        if scale is not None:
            checks.tensor(f"quant_config.{name}", scale, None, checks.FLOATS)
            checks.size(f"quant_config.{name}.numel()", scale.numel(), "one a tensor", 1)
    for name, x in zip(TENSORS, config.tensors, strict=True):
        if x is not None:
            checks.tensor(f"quant_config.{name}", x, None, None)
            checks.same_device(f"quant_config.{name}", x, "hidden_states", hidden_states)


def _columns(w: Tensor, quant: Quant) -> int:
    """K of a weight in either form."""
    return w.shape[2] * quant.numbers_per_entry(w.dtype)


def _check_scales(
    config: FusedMoEQuantConfig,
    which: str,
    quant: Quant,
    weight: tuple[int, int, int],
    *,
    halves: bool,
    fragments: bool,
) -> None:
    """Check the scales, zero points and global scales of one weight ``(E, N, K)``.

    With ``halves`` the gate's rows come first, and an expert may have a number for each half.
    """
    experts, n, _ = weight
    shape = quant.weight_scale_shape(*weight)
    two = [(experts, 2)] if halves else []
    same = two if quant.per_tensor else [shape[:-1]] if shape[-1] == 1 else []
    if quant.per_row:  # rows that share a scale may name it once
        same = [*same, (experts, 1, 1), *((*half, 1) for half in two)]
    dtypes_of_scale = SCALE_DTYPES.get(quant.scale, checks.FLOATS)
    if config.scheme.activation is not None:
        dtypes_of_scale = (*dtypes_of_scale, torch.uint8)  # powers of two may be stored as e8m0
    zero_points = [quant.zero_point_shape(*weight)]
    rules: tuple[tuple[str, list[tuple[int, ...]], Sequence[torch.dtype]], ...] = (
        (f"{which}_scale", [shape, *same], dtypes_of_scale),
        (f"{which}_zp", zero_points, (torch.uint8,)),
        (f"{which}_gscale", [(experts,), *two], checks.FLOATS),
        (f"g{which[1:]}_alphas", [(experts, n)], checks.FLOATS),
    )
    for field, shapes, dtypes in rules:
        x, name = getattr(config, field), f"quant_config.{field}"
        if x is not None:
            checks.tensor(name, x, None, dtypes)
            _check_shape(name, x, [groups_first(s) for s in shapes] if fragments else shapes)


def _check_packed_scale(
    config: FusedMoEQuantConfig, which: str, quant: Quant, rows: torch.dtype
) -> None:
    """Check the dtype of a packed weight's scales, which kernels read in that of the rows."""
    scale = getattr(config, f"{which}_scale")
    if config.scheme.activation is None and scaled_in_rows_dtype(quant) and scale.dtype != rows:
        raise NotImplementedError(
            f"quant_config.{which}_scale must have the dtype of hidden_states, {rows}, with "
            f"{which} in the packed form, got {scale.dtype} (unpack_weight gives the plain form)"
        )


def _check_shape(name: str, x: Tensor, allowed: Sequence[tuple[int, ...]]) -> None:
    """Check that ``x`` has the scheme's shape, or another shape that means the same."""
    # Size by size: `in` on tuples of symbolic sizes is False even if they are equal.
    if not any(
        len(shape) == x.dim() and all(map(operator.eq, x.shape, shape)) for shape in allowed
    ):
        raise ValueError(
            f"{name} must have a shape of {list(allowed)} for this scheme, got {tuple(x.shape)}"
        )
