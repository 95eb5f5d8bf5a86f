"""Public functions of quantization: activations of a layer, in both formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops import checks, ops

_ELEMENTS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


def moe_kernel_quantize_input(
    A: Tensor,
    A_scale: Tensor | None,
    quant_dtype: torch.dtype | None,
    per_act_token_quant: bool,
    block_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Quantize rows: one scale for all of them, for each row, or for each group along a row.

    In float32, with true divisions: ``s = max(amax, 1e-10) / L`` and ``q = round(a / s)``, where L
    is 448 for fp8 (nearest, ties to even, saturated) and 127 for int8 (ties away from zero).

    Args:
        A: ``(R, K)`` bf16, fp16 or fp32.
        A_scale: a given (static) scale, one element, or with ``per_act_token_quant`` also one a
            row; None: computed from ``A``.
        quant_dtype: ``torch.float8_e4m3fn``, ``torch.int8``, or None: ``A`` is returned as it is.
        per_act_token_quant: a scale for each row.
        block_shape: ``[rows, cols]`` of a weight's blocks: a scale for ``cols`` elements of a row,
            a power of two of at least 16; the last group may be partial.

    Returns:
        ``(q (R, K), scale float32)``, contiguous: ``(1,)``, or ``(R, 1)``, or
        ``(R, ceil(K / cols))``. With ``quant_dtype`` None ``(A, A_scale)``.

    Raises:
        TypeError, ValueError: a wrong dtype or shape, groups together with a scale a row or with a
            given scale.
        NotImplementedError: another ``quant_dtype``.

    Source:
        vLLM ``moe_kernel_quantize_input``, which multiplies by reciprocals in some paths and rounds
        int8 differently by granularity.
    """
    if quant_dtype is None:
        return A, A_scale
    checks.tensor("A", A, 2, checks.FLOATS)
    checks.inference_only(A=A)
    if A_scale is not None:
        _check_scale(A_scale, A)
        if not per_act_token_quant:
            checks.size("A_scale.numel()", A_scale.numel(), "one element", 1)
        elif A_scale.dim() > 1:
            checks.same_tokens("A_scale", A_scale, "A", A)
    quant = _quant(quant_dtype, per_act_token_quant, block_shape, A_scale)
    return ops.moe_quantize(A, A_scale, None, None, None, 0, quant)


def batched_moe_kernel_quantize_input(
    A: Tensor,
    A_scale: Tensor | None,
    num_tokens: int,
    E: int,
    N: int,
    expert_num_tokens: Tensor,
    qtype: torch.dtype | None,
    per_act_token_quant: bool,
    block_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`moe_kernel_quantize_input` for the batched format: padding is not read, and written as 0.

    One scale a tensor is one an expert, from its valid rows, eager and compiled alike.

    Args:
        A: ``(E, num_tokens, K)`` bf16, fp16 or fp32.
        A_scale: a given scale of one element or one an expert; with ``per_act_token_quant`` also
            one a row, ``(E, num_tokens, 1)``. None: computed from ``A``.
        num_tokens: rows of an expert, padding included.
        E: experts.
        N: not used; here for the signature's sake.
        expert_num_tokens: int32 or int64 ``(E,)``, the valid rows of each expert.
        qtype: as ``quant_dtype`` of `moe_kernel_quantize_input`.
        per_act_token_quant: a scale for each row.
        block_shape: as in `moe_kernel_quantize_input`.

    Returns:
        ``(q (E, num_tokens, K), scale float32)``, contiguous: ``(E, 1, 1)``,
        ``(E, num_tokens, 1)`` or ``(E, num_tokens, ceil(K / cols))``. With ``qtype`` None
        ``(A, A_scale)``, a scale that is not 3-D viewed as ``(E, .., ..)``.

    Raises:
        TypeError, ValueError, NotImplementedError: as `moe_kernel_quantize_input`.

    Source:
        vLLM ``batched_moe_kernel_quantize_input``, whose per-tensor scales under compile and
        capture are one over all experts and padding.
    """
    if qtype is None:
        return A, _per_expert(A_scale, E)
    checks.tensor("A", A, 3, checks.FLOATS)
    checks.inference_only(A=A)
    checks.size("A.shape[0]", A.shape[0], "E", E)
    checks.size("A.shape[1]", A.shape[1], "num_tokens", num_tokens)
    checks.tensor("expert_num_tokens", expert_num_tokens, 1, checks.INDICES)
    checks.size("expert_num_tokens.shape[0]", expert_num_tokens.shape[0], "E", E)
    checks.same_device("expert_num_tokens", expert_num_tokens, "A", A)
    if A_scale is not None:
        _check_scale(A_scale, A)
        sizes = (1, E, E * num_tokens) if per_act_token_quant else (1, E)
        if A_scale.numel() not in sizes:
            raise ValueError(f"A_scale.numel() must be one of {sizes}, got {A_scale.numel()}")
    quant = _quant(qtype, per_act_token_quant, block_shape, A_scale)
    return ops.batched_quantize(A, A_scale, expert_num_tokens, quant)


def _check_scale(scale: Tensor, rows: Tensor) -> None:
    checks.tensor("A_scale", scale, scale.dim(), (torch.float32,))
    checks.same_device("A_scale", scale, "A", rows)


def _per_expert(scale: Tensor | None, num_experts: int) -> Tensor | None:
    if scale is None or scale.dim() == 3:
        return scale
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1).repeat(num_experts, 1, 1)
    return scale.reshape(num_experts, -1, scale.shape[-1])


def _quant(
    dtype: torch.dtype,
    per_row: bool,
    block_shape: Sequence[int] | None,
    given: Tensor | None,
) -> str:
    """The key of the `moe_ops.Quant` that the arguments describe."""
    if dtype not in _ELEMENTS:
        raise NotImplementedError(f"quant_dtype must be one of {list(_ELEMENTS)}, got {dtype}")
    group = "1x*" if per_row else "*x*"
    if block_shape is not None:
        cols = int(block_shape[1])  # a number, also where Dynamo made it a symbol
        if per_row:
            raise ValueError("per_act_token_quant must be False with block_shape, got True")
        if given is not None:
            raise ValueError("A_scale must be None with block_shape, got a Tensor")
        if cols < 16 or cols & (cols - 1):
            raise ValueError(f"block_shape[1] must be a power of two >= 16, got {cols}")
        group = f"1x{cols}"
    return f"{_ELEMENTS[dtype]}:{group}:float32" + ("" if given is None else ":static")
