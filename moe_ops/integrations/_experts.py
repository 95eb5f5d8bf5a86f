"""The weights of transformers' experts modules, as `fused_experts` takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.integrations import _torchao
from moe_ops.integrations._layers import quantized_layer
from moe_ops.pipeline.fused_experts import NOT_QUANTIZED
from moe_ops.scheme import SCHEMES, FusedMoEQuantConfig, Scheme, get_scheme

HOST = "moe_ops_host"
"""The attribute of an experts module whose experts are in host memory: `HostExperts`."""


class Weights(NamedTuple):
    """Views of an experts module's parameters."""

    w1: Tensor
    """``(E, 2I, H)``, or ``(E, I, H)`` without a gate."""
    w2: Tensor
    """``(E, H, I)``."""
    w1_bias: Tensor | None
    w2_bias: Tensor | None
    quant_config: FusedMoEQuantConfig
    """Scheme and scales. There is no default, since Dynamo of torch 2.11 could not wrap it."""


def weights_of(experts: Any) -> Weights:
    """Return what runs for a module with ``use_experts_implementation``, of any layout.

    These are its weights, or the views that stand for experts in host memory.

    Raises:
        NotImplementedError: quantized weights of a kind that is not supported.
    """
    layer = quantized_layer(experts)
    host = experts.__dict__.get(HOST) if layer is None else layer.host_experts
    if host is not None:
        if layer is None and "parametrizations" in experts._modules:
            raise NotImplementedError(
                "experts in host memory must have adapters of PEFT that "
                "moe_ops.integrations.transformers.adapt(model) has seen, and no other "
                f"parametrizations, got those of {list(experts.parametrizations)}"
            )
        return Weights(*host[1:])
    if layer is not None:
        config = layer.quant_method.get_fused_moe_quant_config(layer)
        return Weights(layer.w13_weight, layer.w2_weight, layer.w13_bias, layer.w2_bias, config)
    return own_weights(experts)


def own_weights(experts: Any) -> Weights:
    """Return the weights of a module that are its own parameters.

    Raises:
        NotImplementedError: quantized weights of a kind that is not supported.
    """
    has_gate = experts.has_gate
    w1, w2 = experts.gate_up_proj if has_gate else experts.up_proj, experts.down_proj
    w1_bias = w2_bias = None
    if experts.has_bias:
        w1_bias = experts.gate_up_proj_bias if has_gate else experts.up_proj_bias
        w2_bias = experts.down_proj_bias
    axes = axes_of(experts)
    if not _torchao.is_torchao_tensor(w1) and not _torchao.is_torchao_tensor(w2):
        if experts.is_transposed:
            w1, w2 = w1.permute(axes), w2.permute(axes)
        return Weights(w1, w2, w1_bias, w2_bias, NOT_QUANTIZED)
    reason = _torchao.unsupported_pair(w1, w2, axes)
    if reason:
        raise NotImplementedError(
            f'experts_implementation="moe_ops" must have supported weights, got '
            f"{type(experts).__name__} with {reason}"
        )
    first, second = _torchao.stored(w1, axes), _torchao.stored(w2, axes)
    scheme = scheme_named(_torchao.torchao_scheme(w1, axes))
    config = FusedMoEQuantConfig.from_weights(scheme, first, second)
    return Weights(first.data, second.data, w1_bias, w2_bias, config)


def axes_of(experts: Any) -> tuple[int, int, int]:
    """Return which axes of a module's weights are ``(E, N, K)``."""
    return (0, 2, 1) if experts.is_transposed else (0, 1, 2)


def scheme_named(name: str) -> Scheme:
    """Call `get_scheme`, without letting Dynamo trace how it parses names."""
    return _SCHEMES[_ensure_scheme(name)]


@torch.compiler.assume_constant_result
def _ensure_scheme(name: str) -> str:
    """Ensure that `_SCHEMES` has ``name``, since Dynamo cannot make a scheme itself."""
    _SCHEMES.setdefault(name, get_scheme(name))
    return name


_SCHEMES = dict(SCHEMES)


def map_for_few_experts(topk_ids: Tensor, num_experts: int) -> Tensor | None:
    """Return an expert map if a rank has fewer experts than a token has slots, else None.

    `fused_experts` rejects k > E. Here it is sound, because ids of other ranks are sentinels >= E.
    """
    k = topk_ids.shape[1]
    if k <= num_experts:
        return None
    ids = torch.arange(k, device=topk_ids.device)
    return torch.where(ids < num_experts, ids, -1)
