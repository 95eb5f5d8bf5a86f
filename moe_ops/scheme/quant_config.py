"""`FusedMoEQuantConfig`: a scheme with its scales, zero points and biases, for a layer call."""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree

from moe_ops.brief import brief
from moe_ops.scheme.named import Scheme, as_scheme
from moe_ops.tensors import ExpertWeights, QTensor


@dataclass(frozen=True, eq=False, repr=False)
class FusedMoEQuantConfig:
    """How a layer is quantized: its scheme and, for each GEMM, scales, zero points and biases.

    Frozen, and a pytree whose leaves are the tensors: it can be an argument of a compiled or
    exported function. ``1`` belongs to ``w1`` and its input, ``2`` to ``w2`` and its input.

    Args:
        scheme: a name or key that `get_scheme` knows, or a `Scheme`, which may be one's own.
        w1_scale: scales of ``w1``, shaped as `Quant.weight_scale_shape` says. Per-tensor scales may
            be ``(El,)`` or ``(El, 2)`` (gate, up), and in place of per-row scales ``(El, 1, 1)`` or
            ``(El, 2, 1)``; two are for rows in halves, not for rows that alternate or have no gate.
            If activations are quantized, powers of two may be uint8 (e8m0). If ``w1`` is packed, as
            `pack_weight` returns them.
        w2_scale: scales of ``w2``.
        a1_scale: static scale of the input of GEMM 1, one element, for static schemes only.
        a2_scale: static scale of the input of GEMM 2.
        w1_zp: zero points of ``w1``, for schemes that have them.
        w2_zp: zero points of ``w2``.
        a1_gscale: global scale of the input of GEMM 1 (NVFP4), one element: a factor like every
            scale here, ``amax / (448 * 6)``; vLLM passes its reciprocal.
        a2_gscale: global scale of the input of GEMM 2.
        w1_gscale: global scales of ``w1``, ``(El,)`` or ``(El, 2)``, as above.
        w2_gscale: global scales of ``w2``, ``(El,)``.
        g1_alphas: factors on the result of GEMM 1, for schemes that have them (int4 weights with
            fp8 activations): one per row of ``w1``, ``(El, 2I)``.
        g2_alphas: factors on the result of GEMM 2, ``(El, H)``.
        w1_bias: ``(El, 2I)`` or ``(El, I)``, added in float32 after the scales.
        w2_bias: ``(El, H)``.

    Raises:
        ValueError: an unknown scheme; a tensor that the scheme does not take. (A missing tensor
            raises when a layer runs: a configuration may exist before its weights.)
        NotImplementedError: a `Scheme` that operators cannot compute.
    """

    scheme: Scheme
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    w1_zp: Tensor | None = None
    w2_zp: Tensor | None = None
    a1_gscale: Tensor | None = None
    a2_gscale: Tensor | None = None
    w1_gscale: Tensor | None = None
    w2_gscale: Tensor | None = None
    g1_alphas: Tensor | None = None
    g2_alphas: Tensor | None = None
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    on_host: ClassVar[ExpertWeights | None] = None
    """Weights to multiply in place of a call's arguments, if these stand for experts in host
    memory: see `moe_ops.pipeline.host_experts`."""

    __repr__ = brief

    def __init__(self, scheme: str | Scheme, **tensors: Tensor | None) -> None:
        object.__setattr__(self, "scheme", as_scheme(scheme))
        unknown = set(tensors) - set(TENSORS)
        if unknown:
            raise TypeError(f"FusedMoEQuantConfig takes {list(TENSORS)}, got {sorted(unknown)}")
        for name in TENSORS:
            object.__setattr__(self, name, tensors.get(name))
        taken = (*_needed(self.scheme), "w1_bias", "w2_bias")
        for name in TENSORS:
            if getattr(self, name) is not None and name not in taken:
                raise ValueError(f"{name} must be None for scheme {self.scheme.name}, got a Tensor")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the scheme's key, so that ``torch.export.load`` can read it."""
        return _unflatten, _flatten(self)

    def check_complete(self) -> None:
        """Raise ValueError if a tensor that the scheme needs is None."""
        for name in _needed(self.scheme):
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a Tensor for scheme {self.scheme.name}, got None")

    @classmethod
    def from_weights(
        cls, scheme: str | Scheme, w1: QTensor, w2: QTensor, **rest: Tensor | None
    ) -> FusedMoEQuantConfig:
        """The configuration of two quantized weights (whose ``data`` is passed to the layer).

        Args:
            scheme: the scheme of the weights.
            w1: from `quantize_weight`.
            w2: from `quantize_weight`.
            **rest: tensors that do not come from the weights: biases, and the scales of static
                activations: ``a1_scale``, ``a2_scale`` for ``fp8_tensor_static`` and ``mxfp4_w4a8``
                (``amax / 448`` of a GEMM's input), ``a1_gscale``, ``a2_gscale`` for ``nvfp4``
                (``amax / (448 * 6)``).

        Raises:
            TypeError: weights that are not from `quantize_weight`, such as plain tensors.
            ValueError: see `FusedMoEQuantConfig`.
        """
        for name, q in (("w1", w1), ("w2", w2)):
            if not isinstance(q, QTensor):
                raise TypeError(
                    f"{name} must be a QTensor, as quantize_weight({name}, scheme) returns it, got "
                    f"{type(q).__name__}"
                )
        weight = as_scheme(scheme).weight
        of_rows = weight is not None and weight.channel_scale
        names = FIELDS["channel_scale" if of_rows else "global_scale"]
        factors = dict(zip(names, (w1.global_scale, w2.global_scale), strict=True))
        return cls(
            scheme,
            w1_scale=w1.scale,
            w2_scale=w2.scale,
            w1_zp=w1.zero_point,
            w2_zp=w2.zero_point,
            **{**factors, **rest},
        )

    def weights(self, w1: Tensor, w2: Tensor) -> tuple[QTensor, QTensor]:
        """The weights with their scales and zero points: the inverse of `from_weights`."""
        g1 = self.g1_alphas if self.w1_gscale is None else self.w1_gscale
        g2 = self.g2_alphas if self.w2_gscale is None else self.w2_gscale
        return (
            QTensor(w1, self.w1_scale, self.w1_zp, g1),
            QTensor(w2, self.w2_scale, self.w2_zp, g2),
        )

    def biases(
        self, w1_bias: Tensor | None, w2_bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The given biases; the configuration's biases in place of None."""
        first = self.w1_bias if w1_bias is None else w1_bias
        return first, self.w2_bias if w2_bias is None else w2_bias

    @property
    def input_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """The given (static or global) scales of the inputs of both GEMMs, or None."""
        quant = self.scheme.activation
        if quant is not None and quant.global_scale:
            return self.a1_gscale, self.a2_gscale
        return self.a1_scale, self.a2_scale

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors or Nones, in the order of the fields."""
        return tuple([getattr(self, name) for name in TENSORS])  # faster than a generator

    @property
    def quant_dtype(self) -> torch.dtype | None:
        """Dtype of quantized activations; None if activations are not quantized."""
        return None if self.scheme.activation is None else self.scheme.activation.dtype

    @property
    def weight_quant_dtype(self) -> torch.dtype | None:
        """Dtype of stored weights; None if weights are not quantized."""
        return None if self.scheme.weight is None else self.scheme.weight.dtype

    @property
    def block_shape(self) -> list[int] | None:
        """``[rows, cols]`` of a weight's scale block, or None."""
        return self.scheme.block_shape

    @property
    def per_act_token_quant(self) -> bool:
        """Whether every row of the activations has one scale."""
        quant = self.scheme.activation
        return quant is not None and quant.per_row

    @property
    def per_out_ch_quant(self) -> bool:
        """Whether every row of a weight has one scale."""
        quant = self.scheme.weight
        return quant is not None and quant.per_row


TENSORS = tuple(f.name for f in fields(FusedMoEQuantConfig) if f.name != "scheme")
_KEYWORDS = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in TENSORS]
FusedMoEQuantConfig.__signature__ = Signature(  # type: ignore[attr-defined]
    [Parameter("scheme", Parameter.POSITIONAL_OR_KEYWORD), *_KEYWORDS]
)


FIELDS = {
    "scale": ("w1_scale", "w2_scale"),
    "zero_point": ("w1_zp", "w2_zp"),
    "global_scale": ("w1_gscale", "w2_gscale"),
    "channel_scale": ("g1_alphas", "g2_alphas"),
    "bias": ("w1_bias", "w2_bias"),
}
"""Kind of a weight's tensor (see `Quant.parts`) -> the fields of both weights."""


def _needed(scheme: Scheme) -> tuple[str, ...]:
    """The tensors that a scheme takes; every tensor that it takes is required."""
    return (
        *(name for kind in scheme.weight_parts for name in FIELDS[kind]),
        *scheme.input_scale_names,
    )


def _flatten(config: FusedMoEQuantConfig) -> tuple[list[Any], Any]:
    present = [name for name in TENSORS if getattr(config, name) is not None]
    return [getattr(config, name) for name in present], (config.scheme.key, tuple(present))


def _flatten_with_keys(config: FusedMoEQuantConfig) -> tuple[list[Any], Any]:
    leaves, context = _flatten(config)
    keys = [_pytree.GetAttrKey(name) for name in context[1]]
    return list(zip(keys, leaves, strict=True)), context


def _unflatten(leaves: Any, context: Any) -> FusedMoEQuantConfig:
    """Rebuild without checks, because the leaves of a pytree need not be tensors."""
    config = object.__new__(FusedMoEQuantConfig)
    object.__setattr__(config, "scheme", as_scheme(context[0]))
    tensors = dict(zip(context[1], leaves, strict=True))
    for name in TENSORS:
        object.__setattr__(config, name, tensors.get(name))
    return config


_pytree.register_pytree_node(
    FusedMoEQuantConfig,
    _flatten,
    _unflatten,
    serialized_type_name="moe_ops.FusedMoEQuantConfig",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=lambda context: [context[0], list(context[1])],
    from_dumpable_context=lambda context: (context[0], tuple(context[1])),
)
# An exported program contains its example arguments.
torch.serialization.add_safe_globals([_unflatten])
