"""The ``main_grad`` of a layer's parameters, to which backward passes add: see `with_main_grad`."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from moe_ops.layer.base import ExpertLayer
from moe_ops.pipeline.main_grads import check_main_grad, with_main_grad

Weights: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Both weights of a layer, and their biases."""
NAMES = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")


def with_main_grads(layer: ExpertLayer) -> Weights:
    """Return the weights and biases of a layer with ``fuse_wgrad_accumulation``, for one call.

    Those that require grad must have a ``main_grad`` in grad mode; nothing is added for others.

    Raises:
        TypeError, ValueError: a ``main_grad`` is missing, or wrong: see `with_main_grad`.
        NotImplementedError: a bias that requires grad beside a ``layer.kernel`` that was set.
    """
    weights: Weights = (layer.w13_weight, layer.w2_weight, layer.w13_bias, layer.w2_bias)
    if not torch.is_grad_enabled():
        return weights
    trained = [x is not None and x.requires_grad for x in weights]
    if layer.state.kernel is not None and any(trained[2:]):
        raise NotImplementedError(
            "w13_bias and w2_bias must not require grad with fuse_wgrad_accumulation beside a "
            "layer.kernel that was set, which has biases of its own, got biases that do"
        )
    joined: list[Any] = []
    for name, x, adds in zip(NAMES, weights, trained, strict=True):
        if x is not None and adds:
            main_grad: Any = getattr(x, "main_grad", None)
            check_main_grad(f"{name}.main_grad", main_grad, name, x)
            x = with_main_grad(x, main_grad)
        joined.append(x)
    return tuple(joined)  # type: ignore[return-value]
