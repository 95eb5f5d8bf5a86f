"""Quantization of a layer's activations, in the Standard and the Batched format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.gradients import inference_only
from moe_ops.scheme import parse_quant

_ELEMENTS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
_FORMATS = {
    name: parse_quant(key)
    for name, key in (
        ("mxfp8", "fp8:1x32:e8m0"),
        ("mxfp6_e2m3", "fp6_e2m3:1x32:e8m0"),
        ("mxfp6_e3m2", "fp6_e3m2:1x32:e8m0"),
        ("mxfp4", "fp4:1x32:e8m0"),
        ("nvfp4", "fp4:1x16:e4m3:global_scale"),
    )
}
"""Formats that have a name."""


@inference_only
def moe_kernel_quantize_input(
    A: Tensor,
    A_scale: Tensor | None,
    quant_dtype: torch.dtype | str | None,
    per_act_token_quant: bool,
    block_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Quantize rows, with one scale for all rows, for each row, or for each group along a row.

    In float32, with true divisions: ``s = max(amax, 1e-10) / L`` and ``q = round(a / s)``, where L
    is 448 for fp8 (nearest, ties to even, saturated) and 127 for int8 (ties away from zero).

    Formats with a name have one byte of scale per group; the last group may be partial.

    * ``"mxfp8"``, ``"mxfp6_e2m3"``, ``"mxfp6_e3m2"``, ``"mxfp4"``: groups of 32 and scales
      ``2**(s - 127)``, stored as s (uint8). For mxfp8 the scale is the least power of two that is
      at least ``amax / 448``. For the others its exponent is the exponent of amax (rounded to the
      element's precision) minus the exponent of the element's largest number.
    * ``"nvfp4"``: groups of 16 and e4m3 scales ``e4m3(amax / 6)`` of ``A / A_scale``.

    Args:
        A: ``(R, K)`` bf16, fp16 or fp32.
        A_scale: a given (static) scale of one element, with ``per_act_token_quant`` also one per
            row; None: computed from ``A``. For ``"nvfp4"`` the global scale, which is required and
            multiplies like every scale here: ``amax / (448 * 6)``. For other named formats None.
        quant_dtype: ``torch.float8_e4m3fn``, ``torch.int8``, the name of a format, or None: ``A``
            is returned as it is.
        per_act_token_quant: one scale per row; must be False for named formats.
        block_shape: ``[rows, cols]`` of a weight's blocks: one scale per ``cols`` elements of a
            row. ``cols`` is a power of two of at least 16, and the last group may be partial. For
            named formats None, or ``cols`` is their group size.

    Returns:
        ``(q (R, K), scale float32)``, contiguous. The scale is ``(1,)``, ``(R, 1)`` or
        ``(R, ceil(K / cols))``. Named formats return codes in uint8 (e4m3 for ``"mxfp8"``), with
        two 4-bit codes per byte, ``(R, K / 2)``, even k in the low nibble; and scales
        ``(R, ceil(K / 32))`` uint8 or ``(R, ceil(K / 16))`` e4m3. ``dequantize_rows`` of
        `moe_ops.scheme` is the inverse. With ``quant_dtype`` None the result is ``(A, A_scale)``.

    Raises:
        TypeError, ValueError: a wrong dtype or shape; groups together with one scale per row or
            with a given scale; an odd K with 4-bit codes; a missing global scale.
        NotImplementedError: another ``quant_dtype``.

    Source:
        vLLM ``moe_kernel_quantize_input``, which multiplies by reciprocals in some paths, rounds
        int8 differently by granularity, returns dequantized numbers for ``"mxfp4"`` and
        ``"mxfp6_.."``, and takes the reciprocal of nvfp4's global scale.
    """
    if quant_dtype is None:
        return A, A_scale
    checks.tensor("A", A, 2, checks.FLOATS)
    quant = _quant_key("quant_dtype", quant_dtype, A, per_act_token_quant, block_shape, A_scale)
    if A_scale is not None:
        _check_scale(A_scale, A)
        if not per_act_token_quant:
            checks.size("A_scale.numel()", A_scale.numel(), "one element", 1)
        elif A_scale.dim() > 1 or A_scale.numel() != 1:
            checks.same_tokens("A_scale", A_scale.reshape(-1, 1), "A", A)
    return ops.moe_quantize(A, A_scale, None, None, None, 0, quant)


@inference_only
def batched_moe_kernel_quantize_input(
    A: Tensor,
    A_scale: Tensor | None,
    num_tokens: int,
    E: int,
    N: int,
    expert_num_tokens: Tensor,
    qtype: torch.dtype | str | None,
    per_act_token_quant: bool,
    block_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Quantize rows in the Batched format; padding is not read, and becomes 0.

    A per-tensor scale is one scale per expert, from the expert's valid rows, eager and compiled
    alike.

    Args:
        A: ``(E, num_tokens, K)`` bf16, fp16 or fp32.
        A_scale: a given scale of one element or one per expert; with ``per_act_token_quant`` also
            one per row, ``(E, num_tokens, 1)``. None: computed from ``A``. For ``"nvfp4"`` the
            global scale, one element.
        num_tokens: rows of an expert, padding included.
        E: experts.
        N: not used; part of the signature of vLLM's function.
        expert_num_tokens: int32 or int64 ``(E,)``, the valid rows of each expert.
        qtype: as ``quant_dtype`` of `moe_kernel_quantize_input`.
        per_act_token_quant: one scale per row.
        block_shape: as in `moe_kernel_quantize_input`.

    Returns:
        ``(q (E, num_tokens, K), scale float32)``, contiguous. The scale is ``(E, 1, 1)``,
        ``(E, num_tokens, 1)`` or ``(E, num_tokens, ceil(K / cols))``. Named formats return codes
        and scales as `moe_kernel_quantize_input` does, with an axis for experts. With ``qtype``
        None the result is ``(A, A_scale)``, where a scale that is not 3-D is viewed as
        ``(E, .., ..)``.

    Raises:
        TypeError, ValueError, NotImplementedError: as `moe_kernel_quantize_input`.

    Source:
        vLLM ``batched_moe_kernel_quantize_input``, whose per-tensor scales under compile and
        capture are one over all experts and padding.
    """
    if qtype is None:
        return A, _per_expert(A_scale, E)
    checks.tensor("A", A, 3, checks.FLOATS)
    for name, value in (("E", E), ("num_tokens", num_tokens)):
        checks.integer(name, value)
    checks.size("A.shape[0]", A.shape[0], "E", E)
    checks.size("A.shape[1]", A.shape[1], "num_tokens", num_tokens)
    checks.tensor("expert_num_tokens", expert_num_tokens, 1, checks.INDICES)
    checks.size("expert_num_tokens.shape[0]", expert_num_tokens.shape[0], "E", E)
    checks.same_device("expert_num_tokens", expert_num_tokens, "A", A)
    quant = _quant_key("qtype", qtype, A, per_act_token_quant, block_shape, A_scale)
    if A_scale is not None:
        _check_scale(A_scale, A)
        sizes = [1] if qtype in _FORMATS else [1, E]
        sizes += [E * num_tokens] if per_act_token_quant else []
        if A_scale.numel() not in sizes:
            raise ValueError(f"A_scale.numel() must be one of {sizes}, got {A_scale.numel()}")
    return ops.batched_quantize(A, A_scale, expert_num_tokens, quant)


def _check_scale(scale: Tensor, rows: Tensor) -> None:
    checks.tensor("A_scale", scale, None, (torch.float32,))
    checks.same_device("A_scale", scale, "A", rows)


def _per_expert(scale: Tensor | None, num_experts: int) -> Tensor | None:
    if scale is None:
        return scale
    checks.tensor("A_scale", scale, None, None)
    checks.at_least(1, E=num_experts)
    if scale.dim() == 3:
        return scale
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1).repeat(num_experts, 1, 1)
    if scale.numel() == 0 or scale.numel() % (num_experts * scale.shape[-1]):
        raise ValueError(
            f"A_scale must have rows for each of the {num_experts} experts, got shape "
            f"{tuple(scale.shape)}"
        )
    return scale.reshape(num_experts, -1, scale.shape[-1])


def _quant_key(
    name: str,
    dtype: torch.dtype | str,
    rows: Tensor,
    per_row: bool,
    block_shape: Sequence[int] | None,
    scale: Tensor | None,
) -> str:
    """Return the key of the `moe_ops.Quant` that the arguments describe; errors name the dtype."""
    checks.flags(per_act_token_quant=per_row)
    cols = None if block_shape is None else _block_columns(block_shape)
    if cols is not None and per_row:
        raise ValueError("per_act_token_quant must be False with block_shape, got True")
    if isinstance(dtype, str) and dtype in _FORMATS:
        return _named_quant(rows, dtype, per_row, cols, scale)
    if not isinstance(dtype, torch.dtype) or dtype not in _ELEMENTS:
        choices = [*_ELEMENTS, *_FORMATS]
        raise NotImplementedError(f"{name} must be one of {choices}, got {dtype!r}")
    group = "1x*" if per_row else "*x*"
    if cols is not None:
        if scale is not None:
            raise ValueError("A_scale must be None with block_shape, got a Tensor")
        if not 16 <= cols <= checks.MAX_SIZE or cols & (cols - 1):
            raise ValueError(f"block_shape[1] must be a power of two from 16 to 2**30, got {cols}")
        group = f"1x{cols}"
    return f"{_ELEMENTS[dtype]}:{group}:float32" + ("" if scale is None else ":static")


def _block_columns(block_shape: Sequence[int]) -> int:
    """Return the columns of a weight's blocks."""
    if not (isinstance(block_shape, Sequence) and len(block_shape) == 2):
        raise ValueError(f"block_shape must be [rows, cols], got {block_shape!r}")
    checks.integer("block_shape[1]", block_shape[1])
    return int(block_shape[1])  # Dynamo may pass a symbol


def _named_quant(
    rows: Tensor, name: str, per_row: bool, cols: int | None, scale: Tensor | None
) -> str:
    quant = _FORMATS[name]
    if per_row:
        raise ValueError(f"per_act_token_quant must be False for {name}, got True")
    if cols is not None and cols != quant.group.cols:
        raise ValueError(f"block_shape[1] must be {quant.group.cols} for {name}, got {cols}")
    if quant.global_scale != (scale is not None):
        wanted, got = ("a Tensor", "None") if quant.global_scale else ("None", "a Tensor")
        raise ValueError(f"A_scale must be {wanted} for {name}, got {got}")
    if rows.shape[-1] % quant.element.values_per_byte:
        last = rows.dim() - 1
        raise ValueError(f"A.shape[{last}] must be even for {name}, got {rows.shape[-1]}")
    return quant.key
