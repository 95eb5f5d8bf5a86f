"""vLLM's descriptions of quantized layers, and its modular kernel, for this library's experts."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

from moe_ops.integrations.vllm._choice import Place
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


def mx_config(place: Place, call: Arguments) -> Any:
    """Describe MXFP4 or MXFP8 weights, under 16-bit activations or fp8 with a scale per token."""
    weight, rows = place.scheme.weight, place.scheme.activation
    names = ("w1_scale", "w2_scale", "w1_bias", "w2_bias", "gemm1_alpha", "gemm1_beta")
    return FusedMoEQuantConfig.make(
        quant_dtype=None if rows is None else rows.dtype,
        per_act_token_quant=rows is not None,
        weight_dtype=f"mx{weight.element.name}",  # type: ignore[union-attr]
        gemm1_clamp_limit=call["swiglu_limit"],
        **{name: call[name] for name in names},
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
