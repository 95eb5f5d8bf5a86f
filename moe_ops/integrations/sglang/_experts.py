"""Layers of SGLang as calls of this library: their schemes, activations and operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation
from moe_ops.dispatch.device import device_facts
from moe_ops.integrations._engines import block_name, say_once, say_that_it_serves, weight_scales
from moe_ops.integrations.sglang._lora import call_adapters
from moe_ops.pipeline.forward import Pass, forward
from moe_ops.pipeline.gathering import Settings
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.pipeline.row_spaces import check_batch_invariant
from moe_ops.scheme import (
    SCHEMES,
    UNQUANTIZED,
    FusedMoEQuantConfig,
    Scheme,
    get_scheme,
    is_packed,
    min_capability,
)
from moe_ops.scheme.packed import PACKED_DTYPES
from moe_ops.tensors import Routing

ENGINE = "sglang"
UNLIMITED = torch.finfo(torch.float32).max
"""A limit that changes no finite number."""


def say_that_sglang_runs(error: Exception) -> None:
    """Write to SGLang's log why this library does not serve a layer, once per reason."""
    say_once(ENGINE, f"SGLang's own kernels run: {error}")


class KeptWeights:
    """Weights without kernels of SGLang: a base for subclasses of its ``TritonMoeQuantInfo``."""

    scheme_name: str


def is_kept(info: Any) -> bool:
    """Whether SGLang's kernels cannot read the weights of a ``TritonMoeQuantInfo``."""
    weights = (info.w13_weight, info.w2_weight)
    return isinstance(info, KeptWeights) or any(map(is_packed, weights))


def run(
    dispatch_output: Any,
    quant_info: Any,
    runner_config: Any,
    *,
    batch_invariant: bool,
    lora_info: Any = None,
) -> Tensor:
    """Run a layer of SGLang; returns ``(T, H)``, the input's memory if SGLang wants it ``inplace``.

    Args:
        dispatch_output: SGLang's ``StandardDispatchOutput``; slots with id -1 are skipped.
        quant_info: SGLang's ``TritonMoeQuantInfo``.
        runner_config: SGLang's ``MoeRunnerConfig``.
        batch_invariant: whether a token's result may not depend on other tokens.
        lora_info: SGLang's ``LoRAInfo``; None: no adapters.

    Raises:
        NotImplementedError, TypeError, ValueError: something that this library does not serve.
            Raised before anything is computed.
    """
    _check_token_form(dispatch_output)
    x, routed = dispatch_output.hidden_states, dispatch_output.topk_output
    topk_weights, topk_ids = routed.topk_weights, routed.topk_ids
    scheme, activation = served_layer(quant_info, runner_config)
    _check_weight_form(x, quant_info, scheme)
    if batch_invariant:
        check_batch_invariant(scheme)
    on_input, factor = runner_config.apply_router_weight_on_input, _result_factor(runner_config)
    if factor != 1:
        topk_weights = topk_weights * factor
    w1, w2 = quant_info.w13_weight, quant_info.w2_weight
    config = library_config(quant_info, scheme)
    settings = Settings(scheme, activation.key, on_input, batch_invariant, x.dtype)
    step, routing = Pass(expert_weights(w1, w2, config), settings), Routing(topk_weights, topk_ids)
    if lora_info is not None:
        if on_input:
            raise NotImplementedError("router weights on the input with adapters are not supported")
        adapters = call_adapters(lora_info, x, quant_info, activation)
        if adapters is not None:
            step = adapters.beside(step, x, routing)
            say_once(ENGINE, "runs the experts' adapters")
    out: Tensor = forward(step, x, routing, out=x if runner_config.inplace else None)
    say_that_it_serves(ENGINE, scheme, activation.key)
    return out


def served_layer(info: Any, config: Any) -> tuple[Scheme, Activation]:
    """Return the scheme and the activation of a layer.

    Args:
        info: SGLang's ``TritonMoeQuantInfo``.
        config: SGLang's ``MoeRunnerConfig``.

    Raises:
        NotImplementedError, ValueError: a layer that this library does not compute.
    """
    on_input = config.apply_router_weight_on_input
    _refuse_any(
        {
            "mxfp8 weights": info.use_mxfp8,
            "results that are not summed": config.no_combine,
            "FP32 intermediates": config.silu_mul_keep_fp32,
            "router weights on the input with biases": on_input and info.b13 is not None,
            "router weights on the input with a factor": on_input and _result_factor(config) != 1,
        }
    )
    scheme, device = runner_scheme(info), info.w13_weight.device
    if device.type == "cuda":
        if torch.version.hip or device_facts(device).arch < min_capability(scheme.activation):
            raise NotImplementedError(f"no kernel of {scheme.name} for {device}")
    elif device.type != "cpu":
        raise NotImplementedError(f"device must be cuda or cpu, got {device}")
    return scheme, runner_activation(config, info)


def runner_scheme(info: Any) -> Scheme:
    """Return the scheme of a ``TritonMoeQuantInfo``.

    Raises:
        NotImplementedError, ValueError: a quantization that this plug-in does not know.
    """
    if isinstance(info, KeptWeights):
        return get_scheme(info.scheme_name)
    block = None if info.block_shape is None else tuple(info.block_shape)
    if info.use_int4_w4a16 or info.use_int8_w8a16:
        element = "int4_w4a16" if info.use_int4_w4a16 else "int8_w8a16"
        if block is None or block[0] != 0:
            raise NotImplementedError(f"block_shape of {element} must be [0, group], got {block}")
        return get_scheme(f"{element}_g{block[1]}" + ("" if info.w13_zp is None else "_zp"))
    if not (info.use_fp8_w8a8 or info.use_int8_w8a8):
        return UNQUANTIZED
    element = "fp8" if info.use_fp8_w8a8 else "int8"
    if block is None and not info.per_channel_quant:
        if info.use_int8_w8a8:
            raise NotImplementedError("int8 weights with one scale per expert are not supported")
        return SCHEMES["fp8_tensor" if info.a13_scale is None else "fp8_tensor_static"]
    return get_scheme(f"{element}_channel" if block is None else block_name(element, block))


def library_config(info: Any, scheme: Scheme) -> FusedMoEQuantConfig:
    """Return the configuration of this library for a ``TritonMoeQuantInfo``, on the same memory."""
    tensors = {"w1_bias": info.b13, "w2_bias": info.b2, "w1_zp": info.w13_zp, "w2_zp": info.w2_zp}
    if scheme.weight is not None:
        for name, scale in (("w1_scale", info.w13_scale), ("w2_scale", info.w2_scale)):
            tensors[name] = weight_scales(scale, info.w13_weight.shape[0], scheme)
    if scheme.activation is not None and scheme.activation.static:
        tensors |= {"a1_scale": info.a13_scale.reshape(1), "a2_scale": info.a2_scale.reshape(1)}
    return FusedMoEQuantConfig(scheme, **tensors)


def runner_activation(config: Any, info: Any) -> Activation:
    """Return the activation that SGLang's Triton runner would compute.

    Raises:
        NotImplementedError: an activation that this library does not have.
    """
    name, alpha, limit = config.activation, config.gemm1_alpha, config.gemm1_clamp_limit
    if info.fuse_swiglu_interleaved:
        is_plain = (alpha, limit, config.swiglu_limit) == (None, None, None)
        others = not (name == "silu" and config.is_gated and is_plain)
        _refuse_any({"interleaved rows of gates other than plain SiLU": others})
        return Activation(MoEActivation.SWIGLUOAI, clamp_limit=UNLIMITED, alpha=1.0, beta=0.0)
    if not config.is_gated:
        if name in ("silu", "gelu", "relu2"):
            return Activation(MoEActivation.from_str(name).without_mul())
    elif name == "silu":
        return _gated_silu(config)
    elif name in ("gelu", "gelu_tanh"):
        _refuse_any({"gemm1_alpha and gemm1_clamp_limit of gelu": (alpha, limit) != (None, None)})
        return Activation(MoEActivation.from_str(name))
    elif name == "situ":
        beta = 4.0 if alpha is None else alpha
        return Activation(MoEActivation.SITU, beta=beta, linear_beta=limit)
    raise NotImplementedError(f"activation must be one of this library, got {name!r}")


def _gated_silu(config: Any) -> Activation:
    """SiLU of the gate times up, in one of the forms that numbers of the model choose."""
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if alpha is not None:
        _refuse_any({"gates with gemm1_alpha but no gemm1_clamp_limit": limit is None})
        alternating = config.gate_up_interleaved
        kinds = (MoEActivation.SWIGLUOAI_UNINTERLEAVE, MoEActivation.SWIGLUOAI)
        return Activation(kinds[bool(alternating)], clamp_limit=limit, alpha=alpha, beta=1.0)
    if limit is not None:  # SGLang limits the gate after SiLU
        return Activation(MoEActivation.SWIGLUSTEP, clamp_limit=limit)
    return Activation(MoEActivation.SILU, clamp_limit=config.swiglu_limit)


def _result_factor(config: Any) -> float:
    """Return the factor of the result."""
    return 1.0 if config.routed_scaling_factor is None else config.routed_scaling_factor


def _check_token_form(dispatch_output: Any) -> None:
    """Raise NotImplementedError for tokens of another form."""
    quantized = (dispatch_output.hidden_states_pre_quant, dispatch_output.hidden_states_scale)
    _refuse_any(
        {
            "routings without topk_ids": not hasattr(dispatch_output.topk_output, "topk_ids"),
            "rows that are quantized already": any(part is not None for part in quantized),
        }
    )


def _refuse_any(rules: dict[str, bool]) -> None:
    """Raise NotImplementedError for the first of some things that is present."""
    for text, present in rules.items():
        if present:
            raise NotImplementedError(f"{text} are not supported")


def _check_weight_form(x: Tensor, info: Any, scheme: Scheme) -> None:
    """Raise NotImplementedError for weights of another form."""
    w1, w2, quant = info.w13_weight, info.w2_weight, scheme.weight
    dtypes = (x.dtype,) if quant is None else (quant.dtype, *PACKED_DTYPES)
    if not {w1.dtype, w2.dtype} <= {*dtypes} or x.dtype not in checks.FLOATS:
        raise NotImplementedError(f"weights must be {dtypes[0]} for {scheme.name}, got {w1.dtype}")
    columns = w1.shape[2] * scheme.numbers_per_entry(w1.dtype)
    if columns != x.shape[1]:
        raise NotImplementedError(f"w13 must have {x.shape[1]} columns, got {columns}")
    block = scheme.block_shape
    if block is not None and w2.shape[2] % block[0]:
        raise NotImplementedError(f"I must be a multiple of {block[0]}, got {w2.shape[2]}")
    if quant is not None and quant.scale == "float32" and info.w13_scale.dtype != torch.float32:
        raise NotImplementedError(f"w13_scale must be float32, got {info.w13_scale.dtype}")
    static = scheme.activation is not None and scheme.activation.static
    numbers = [0 if scale is None else scale.numel() for scale in (info.a13_scale, info.a2_scale)]
    if numbers != [static, static]:
        must = f"a13_scale and a2_scale must have {int(static)} elements each for {scheme.name}"
        raise NotImplementedError(f"{must}, got {numbers}")
