"""vLLM's descriptions of quantized layers, and its modular kernel, for this library's experts."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

from moe_ops.integrations.vllm._place import Place
from moe_ops.integrations.vllm._requests import Arguments


def kernel(place: Place, call: Arguments) -> Any:
    """Make vLLM's modular kernel of this library's experts, as all of its factories do."""
    config, quant = call["moe_config"], call["moe_quant_config"]
    prepare = maybe_make_prepare_finalize(
        moe=config,
        quant_config=quant,
        routing_tables=call["routing_tables"],
        allow_new_interface=True,
        use_monolithic=False,
    )
    sizes = {}
    if prepare.activation_format == mk.FusedMoEActivationFormat.BatchedExperts:
        sizes = {
            "max_num_tokens": prepare.max_num_tokens_per_rank(),
            "num_dispatchers": prepare.num_dispatchers(),
        }
    experts = call["experts_cls"](moe_config=config, quant_config=quant, **sizes)
    return mk.FusedMoEKernel(prepare, experts)


def mxfp4_config(place: Place, call: Arguments) -> Any:
    """Describe MXFP4 weights under 16-bit activations, or under fp8 with a scale per token."""
    fp8 = place.scheme.activation is not None
    return FusedMoEQuantConfig.make(
        quant_dtype=place.scheme.activation.dtype if fp8 else None,  # type: ignore[union-attr]
        per_act_token_quant=fp8,
        weight_dtype="mxfp4",
        gemm1_clamp_limit=call["swiglu_limit"],
        **_subset(call, "w1_scale", "w2_scale", "w1_bias", "w2_bias", "gemm1_alpha", "gemm1_beta"),
    )


def mxfp8_config(place: Place, call: Arguments) -> Any:
    """Describe MXFP8 weights under 16-bit activations."""
    return FusedMoEQuantConfig.make(
        weight_dtype="mxfp8",
        gemm1_clamp_limit=call["swiglu_limit"],
        **_subset(call, "w1_scale", "w2_scale", "w1_bias", "w2_bias", "gemm1_alpha", "gemm1_beta"),
    )


def nvfp4_config(place: Place, call: Arguments) -> Any:
    """Describe NVFP4 weights under 16-bit activations."""
    return FusedMoEQuantConfig.make(
        weight_dtype="nvfp4",
        w1_scale=call["w13_scale"],
        w2_scale=call["w2_scale"],
        g1_alphas=call["w13_scale_2"],
        g2_alphas=call["w2_scale_2"],
        gemm1_alpha=call["swiglu_alpha"],
        gemm1_beta=call["swiglu_beta"],
        gemm1_clamp_limit=call["swiglu_limit"],
    )


def _subset(call: Arguments, *names: str) -> dict[str, Any]:
    return {name: call[name] for name in names}
