"""Gradients of weights that backward passes add to float32 main gradients.

`with_main_grad` returns a weight with a node of the graph that adds what reaches it to the main
gradient. If experts read this very tensor, their backward pass adds the float32 sums of its kernels
itself, and nothing reaches the node. A weight that was cut or reshaped on the way is another
tensor, whose gradient is rounded to its dtype before the node adds it.

A main gradient is not saved for the backward pass as other tensors are: between a forward pass and
its backward pass other micro-batches may add to it.

Source:
    Megatron-LM's ``gradient_accumulation_fusion`` and Transformer Engine's
    ``fuse_wgrad_accumulation``, which add to the ``main_grad`` of a parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_ops import checks
from moe_ops.gradients import check_transforms, once

_MAIN_GRAD = "_moe_ops_main_grad"
"""Attribute of a weight, by which experts find its main gradient."""


def with_main_grad(weight: Tensor, main_grad: Tensor) -> Tensor:
    """Return ``weight``; a backward pass adds its gradient to ``main_grad``, and not to its own.

    Call it in every forward pass. `fused_experts` and a `FusedMoEKernel` add the float32 sums of
    the gradient without rounding them. Weights of experts without tokens keep the bits of their
    main gradients. Every backward pass through a function of the result adds, also that of
    ``torch.autograd.grad`` for other tensors. Under ``torch.no_grad()`` the result is ``weight``.

    Args:
        weight: weights or biases of experts, which require grad; bf16, fp16 or fp32.
        main_grad: float32, shape and device of ``weight``, contiguous. A captured graph adds to the
            memory that it had during capture.

    Returns:
        A view of ``weight``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: another shape or device; a main gradient that is not contiguous, requires grad
            or shares memory with ``weight``; a weight that does not require grad.
        NotImplementedError: transforms of ``torch.func``.
    """
    checks.tensor("weight", weight, None, checks.FLOATS)
    if not weight.requires_grad:
        raise ValueError("weight must require grad, got a Tensor that does not")
    if not torch.is_grad_enabled():
        return weight
    check_transforms("with_main_grad")
    check_main_grad("main_grad", main_grad, "weight", weight)
    return _attached(_Added.apply(weight, main_grad), main_grad)


def check_main_grad(name: str, main_grad: Tensor, of: str, weight: Tensor) -> None:
    """Check the main gradient of a weight; ``name`` and ``of`` are their names in errors."""
    checks.tensor(name, main_grad, None, (torch.float32,))
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"{name} must have the shape of {of}, {tuple(weight.shape)}, got "
            f"{tuple(main_grad.shape)}"
        )
    checks.same_device(name, main_grad, of, weight)
    if not main_grad.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {main_grad.stride()}")
    if main_grad.requires_grad:
        raise ValueError(f"{name} must not require grad, got a Tensor that does")
    if not torch.compiler.is_compiling() and _share_memory(main_grad, weight):
        raise ValueError(f"{name} must not share memory with {of}, got a part of it")


def main_grad_of(weight: Tensor | None) -> Tensor | None:
    """Return what experts add the gradient of a weight to; None: it is returned."""
    main_grad: Tensor | None = getattr(weight, _MAIN_GRAD, None)
    return main_grad


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in another dtype, with its main gradient."""
    main_grad = main_grad_of(weight)
    weight = weight.to(dtype)
    return weight if main_grad is None else _attached(weight, main_grad)


def _attached(weight: Tensor, main_grad: Tensor) -> Tensor:
    setattr(weight, _MAIN_GRAD, main_grad)
    return weight


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have bytes in common, judged by the first and the last of each."""
    (one, begin, end), (other, start, stop) = map(_bytes_of, (x, y))
    return one == other and begin < stop and start < end


def _bytes_of(x: Tensor) -> tuple[Any, ...]:
    """A tensor's storage, and the range of its bytes there."""
    first = x.storage_offset()
    last = first + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.untyped_storage()._cdata, first * x.itemsize, (last + 1) * x.itemsize


class _Added(Function):
    """A weight whose gradient is added to its main gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        """Return a view of the weight."""
        ctx.main_grad = main_grad
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once("with_main_grad")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None) -> Any:
        """Add the gradient, unless experts did."""
        if grad is not None:
            ctx.main_grad.add_(grad)
        return None, None
