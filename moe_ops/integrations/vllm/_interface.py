"""What the plug-in needs of vLLM: names and parameters, all of which are looked up before use."""

from __future__ import annotations

from dataclasses import MISSING, fields
from inspect import signature
from typing import Any

from torch import Tensor

from moe_ops.integrations._engines import attribute_of, first_missing, split_name

LAYERS = "vllm.model_executor.layers.fused_moe"
ORACLES = f"{LAYERS}.oracle"
METHODS = "vllm.model_executor.layers.quantization"
COMPRESSED = f"{METHODS}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
NAMES = {
    f"{ORACLES}.unquantized": ("backend_to_kernel_cls", "UnquantizedMoeBackend.TRITON"),
    f"{ORACLES}.fp8": ("backend_to_kernel_cls", "Fp8MoeBackend.TRITON"),
    f"{ORACLES}.int8": ("backend_to_kernel_cls", "Int8MoeBackend.TRITON"),
    f"{LAYERS}.experts.lora_experts_mixin": ("LoRAExpertsMixin",),
    f"{LAYERS}.experts.lora_context": ("MoELoRAContext",),
    f"{LAYERS}.activation": ("MoEActivation", "ApplyMoEActivationConfig"),
    f"{LAYERS}.topk_weight_and_reduce": (
        "TopKWeightAndReduceNoOP",
        "TopKWeightAndReduceDelegate",
    ),
    "vllm.config": ("get_current_vllm_config_or_none",),
    "vllm.envs": ("VLLM_BATCH_INVARIANT", "environment_variables"),
    "vllm.platforms": ("current_platform.is_cuda", "current_platform.is_cpu"),
}
"""Names by module."""
PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    f"{LAYERS}.modular_kernel": {
        "FusedMoEExpertsModular.__init__": (
            "self", "moe_config", "quant_config", "max_num_tokens", "num_dispatchers",
        ),
        "FusedMoEExpertsModular.is_supported_config": (
            "cls", "moe_config", "weight_key", "activation_key", "activation_format",
        ),
        "FusedMoEExpertsModular.workspace_shapes": (
            "self", "M", "N", "K", "topk", "global_num_experts", "local_num_experts",
            "expert_tokens_meta", "activation",
        ),
        "FusedMoEExpertsModular.apply": (
            "self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids",
            "activation", "global_num_experts", "expert_map", "a1q_scale", "a2_scale",
            "workspace13", "workspace2", "expert_tokens_meta", "apply_router_weight_on_input",
        ),
        "FusedMoEExpertsModular.process_weights_after_loading": ("self", "layer"),
    },
    f"{LAYERS}.experts.lora_experts_mixin": {"LoRAExpertsMixin.set_lora_context": ("self", "ctx")},
    f"{ORACLES}.unquantized": {"select_unquantized_moe_backend": ("moe_config",)},
}  # fmt: skip
"""Parameters of functions that this plug-in overrides, by module and name."""

_KERNEL = ("moe_quant_config", "moe_config", "experts_cls", "routing_tables")
_WEIGHTS = ("layer", "w13", "w2", "w13_scale", "w2_scale")
_MXFP4 = ("layer", "w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias",
          "w2_bias")  # fmt: skip
_METHOD = {"__init__": ("self", "moe"), "process_weights_after_loading": ("self", "layer"),
           "get_fused_moe_quant_config": ("self", "layer")}  # fmt: skip
_SWIGLU = ("swiglu_limit", "gemm1_alpha", "gemm1_beta")
FORMATS: dict[str, dict[str, tuple[str, ...]]] = {
    "int4 and int8 in groups": {
        f"{ORACLES}.int_wna16.select_wna16_moe_backend": ("config", "quant_config", "may_have_zp"),
        f"{ORACLES}.int_wna16.convert_to_wna16_moe_kernel_format": (
            "backend", "quant_config", *_WEIGHTS, "w13_qzeros", "w2_qzeros", "w13_bias", "w2_bias",
        ),
        f"{ORACLES}.int_wna16.make_wna16_moe_kernel": ("backend", *_KERNEL),
    },
    "int4 under fp8": {
        f"{ORACLES}.w4a8.select_w4a8_moe_backend": ("config",),
        f"{ORACLES}.w4a8.convert_to_w4a8_moe_kernel_format": (
            "backend", "w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale",
        ),
        f"{ORACLES}.w4a8.make_w4a8_moe_kernel": ("backend", *_KERNEL),
    },
    "NVFP4": {
        f"{ORACLES}.nvfp4.select_nvfp4_moe_backend": ("config",),
        f"{ORACLES}.nvfp4.convert_to_nvfp4_moe_kernel_format": (
            "nvfp4_backend", *_WEIGHTS, "w13_scale_2", "w2_scale_2",
        ),
        f"{ORACLES}.nvfp4.make_nvfp4_moe_quant_config": (
            "backend", "w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2", "swiglu_limit",
            "swiglu_alpha", "swiglu_beta",
        ),
        f"{ORACLES}.nvfp4.make_nvfp4_moe_kernel": ("backend", *_KERNEL),
    },
    "MXFP4": {
        f"{ORACLES}.mxfp4.select_mxfp4_moe_backend": ("config", "activation_key"),
        f"{ORACLES}.mxfp4.select_deepseek_v4_mxfp4_moe_backend": ("config",),
        f"{ORACLES}.mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format": (
            "mxfp4_backend", *_MXFP4,
        ),
        f"{ORACLES}.mxfp4.convert_weight_to_mxfp4_moe_kernel_format": ("mxfp4_backend", *_MXFP4),
        f"{ORACLES}.mxfp4.make_mxfp4_moe_quant_config": (
            "mxfp4_backend", "w1_scale", "w2_scale", "w1_bias", "w2_bias", *_SWIGLU,
        ),
        f"{ORACLES}.mxfp4.make_mxfp4_moe_kernel": ("mxfp4_backend", *_KERNEL),
    },
    "MXFP8": {
        f"{ORACLES}.mxfp8.select_mxfp8_moe_backend": ("config",),
        f"{ORACLES}.fp8.convert_to_fp8_moe_kernel_format": ("fp8_backend", *_WEIGHTS),
        f"{ORACLES}.fp8.make_fp8_moe_quant_config": (
            "fp8_backend", "w1_scale", "w2_scale", "w1_bias", "w2_bias", *_SWIGLU,
        ),
        f"{ORACLES}.fp8.make_fp8_moe_kernel": ("fp8_backend", *_KERNEL),
    },
    "MXFP4 that compressed-tensors calls W4A4": {
        f"{COMPRESSED}_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod.{name}": parameters
        for name, parameters in _METHOD.items()
    },
    "MXFP4 of AutoRound": {
        f"{METHODS}.inc.schemes.inc_mxfp4_moe.INCMxfp4MoEMethod.{name}": parameters
        for name, parameters in _METHOD.items()
    },
}  # fmt: skip
"""Functions that are wrapped or called for each family of formats, with the parameters that are
read or passed."""
UNREAD = {
    "_cache_permute_indices", "a13_scale", "a1_scale", "a2_scale", "activation", "activation_key",
    "allow_tile_padding", "b_strides1", "b_strides2", "block_shape", "group_size", "input_dtype",
    "is_act_and_mul", "layer", "may_have_bias", "per_act_token_quant", "per_out_ch_quant",
    "per_token_activation", "trtllm_hidden_alignment", "use_a16", "use_separated_a4w4",
    "w13_input_scale", "w2_input_scale", "weight_key",
}  # fmt: skip
"""Parameters of these functions that say nothing which the wrappers do not know otherwise."""
MAKERS: dict[str, tuple[str, ...]] = {
    f"{LAYERS}.config.FusedMoEQuantConfig.make": (
        "quant_dtype", "per_act_token_quant", "w1_scale", "w2_scale", "g1_alphas", "g2_alphas",
        "w1_bias", "w2_bias", "weight_dtype", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit",
    ),
    f"{LAYERS}.all2all_utils.maybe_make_prepare_finalize": (
        "moe", "quant_config", "routing_tables", "allow_new_interface", "use_monolithic",
    ),
    f"{LAYERS}.modular_kernel.FusedMoEKernel.__init__": ("prepare_finalize", "fused_experts"),
}  # fmt: skip
"""Functions that the wrappers of all formats call, with the parameters that they pass."""


SETTINGS = {
    "num_experts", "experts_per_token", "hidden_dim", "intermediate_size_per_partition",
    "num_local_experts", "activation", "device", "moe_parallel_config", "in_dtype", "moe_backend",
    "has_bias", "is_lora_enabled", "swiglu_limit", "swiglu_alpha", "swiglu_beta",
    "activation_situ_beta", "activation_situ_linear_beta",
}  # fmt: skip
"""Fields of vLLM's ``FusedMoEConfig`` that the experts read."""
AROUND = {
    "routing_method", "router_logits_dtype", "has_hash_routing", "require_decomposed_backend",
    "num_logical_experts", "shared_expert_prefix", "skip_final_all_reduce", "_defer_moe_finalize",
    "defer_moe_finalize_max_num_tokens", "intermediate_size", "hidden_dim_unpadded",
    "intermediate_size_per_partition_unpadded", "intermediate_pad", "tp_shard_with_padding",
    "max_num_tokens", "elastic_ep_max_dp_size", "max_capture_size", "rocm_aiter_fmoe_enabled",
    "aiter_fmoe_shared_expert_enabled", "use_mxfp4_w4a4_dsv4",
}  # fmt: skip
"""Fields that change nothing of what experts compute: settings of routers and loaders, of vLLM's
steps before the experts and after them, and of another vendor's GPUs."""


def unknown_setting(moe_config: Any) -> str | None:
    """Return a field of a layer's configuration that is set and not known here; None: none is."""
    for field in fields(moe_config):
        value, default = getattr(moe_config, field.name), field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        is_set = value is not default and (isinstance(value, Tensor) or value != default)
        if is_set and field.name not in SETTINGS | AROUND:
            return field.name
    return None


def missing() -> str | None:
    """Return the first name that vLLM lacks, or whose parameters are others; None: no such name."""
    forms = {(m, name): parts for m, own in PARAMETERS.items() for name, parts in own.items()}
    return first_missing(NAMES, forms)


def missing_of(format: str) -> str | None:
    """Return the first function of `FORMATS` or `MAKERS` that vLLM lacks; None: no such function.

    A function counts as missing if it lacks a parameter that wrappers use. So does one of `FORMATS`
    that has a parameter which nobody here knows: wrappers would ignore it, and its result may have
    another form.
    """
    for name, parameters in {**FORMATS[format], **MAKERS}.items():
        function = attribute_of(*split_name(name))
        has = set() if function is None else set(signature(function).parameters)
        unknown = has - {*parameters} - UNREAD if name in FORMATS[format] else None
        if unknown or not has >= {*parameters}:
            return name
    return None


def formats() -> dict[str, str | None]:
    """Return the kinds of layers that the plug-in serves, each with a name that vLLM lacks."""
    plain = "not quantized, fp8, int8 per row"
    lacks = missing()
    if lacks is not None:
        return dict.fromkeys((plain, *FORMATS), lacks)
    return {plain: None, **{format: missing_of(format) for format in FORMATS}}
