"""Whether weights and the tensors of a quantization configuration fit each other and the tokens."""

from __future__ import annotations

import operator

from torch import Tensor

from moe_ops import checks
from moe_ops.activation import MoEActivation
from moe_ops.scheme import FusedMoEQuantConfig, Quant


def check_quantized(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    kind: MoEActivation,
    config: FusedMoEQuantConfig,
) -> None:
    """The weights are stored as the scheme says, and its tensors are there and fit.

    Raises:
        TypeError, ValueError: naming the tensor, the rule and what came.
    """
    quant, scheme = config.scheme.weight, config.scheme
    checks.tensor("hidden_states", hidden_states, 2, checks.FLOATS)
    if quant is None:
        raise ValueError(f"quant_config must have quantized weights, got scheme {scheme.name}")
    config.check_complete()
    packed = 2 if quant.element.bits == 4 else 1
    hidden, intermediate = hidden_states.shape[1], w2.shape[2] * packed
    rows = 2 * intermediate if kind.is_gated else intermediate
    sizes = {"w1": (w1, rows, hidden), "w2": (w2, hidden, intermediate)}
    for name, (w, n, k) in sizes.items():
        checks.tensor(name, w, 3, (quant.dtype,))
        checks.same_device(name, w, "hidden_states", hidden_states)
        checks.one_unit_stride(name, w)
        checks.size(f"{name}.shape[0]", w.shape[0], "w1.shape[0]", w1.shape[0])
        checks.size(f"{name}.shape[1]", w.shape[1], "the rows that the sizes ask for", n)
        checks.size(f"{name}.shape[2]", w.shape[2] * packed, "the columns (unpacked)", k)
        scale = getattr(config, f"{name}_scale")
        if scale is not None:
            _check_scale(f"quant_config.{name}_scale", scale, quant, (w.shape[0], n, k), name)
            checks.same_device(f"quant_config.{name}_scale", scale, "hidden_states", hidden_states)
    for name in ("a1_scale", "a2_scale"):
        scale = getattr(config, name)
        if scale is not None:
            checks.size(f"quant_config.{name}.numel()", scale.numel(), "one a tensor", 1)
            checks.same_device(f"quant_config.{name}", scale, "hidden_states", hidden_states)


def _check_scale(
    name: str, scale: Tensor, quant: Quant, weight: tuple[int, int, int], which: str
) -> None:
    """Of the shape that the scheme says, or one of those that mean the same."""
    shape = quant.weight_scale_shape(*weight)
    allowed = [shape]
    if quant.per_tensor and which == "w1":
        allowed.append((*shape, 2))
    if shape[-1] == 1:
        allowed.append(shape[:-1])
    # Size by size: `in` on tuples of symbolic sizes is False where they are equal.
    if not any(
        len(shape) == scale.dim() and all(map(operator.eq, scale.shape, shape)) for shape in allowed
    ):
        raise ValueError(
            f"{name} must have a shape of {allowed} for this scheme, got {tuple(scale.shape)}"
        )
