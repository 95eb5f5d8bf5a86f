"""What the plug-in needs of SGLang: names, fields and parameters, looked up before use.

Fields must be exactly those that this plug-in knows: one that it does not read could change what a
layer computes.
"""

from __future__ import annotations

from moe_ops.integrations._engines import first_missing, split_name

MOE = "sglang.srt.layers.moe"
RUNNERS = f"{MOE}.moe_runner"
HOOKS = "sglang.srt.plugins.hook_registry"
NAMES = {
    HOOKS: ("HookRegistry.register", "HookType.AROUND"),
    f"{RUNNERS}.runner": ("register_moe_runner_core", "_CUSTOM_RUNNER_CORE_FACTORIES"),
    f"{RUNNERS}.base": ("DispatchMoeRunnerCore",),
    f"{MOE}.token_dispatcher.standard": ("StandardCombineInput",),
    f"{MOE}.utils": ("resolve_moe_runner_backend",),
    "sglang.srt.batch_invariant_ops": ("is_batch_invariant_mode_enabled",),
}
"""Names by module."""
PARTS = {
    (f"{RUNNERS}.runner", "MoeRunner.run"): (
        "self", "dispatch_output", "quant_info", "lora_info",
    ),
    (f"{RUNNERS}.base", "FusedOpPool.get_fused_func"): ("dispatch_name", "runner_name"),
    (f"{RUNNERS}.triton", "fused_experts_none_to_triton"): (
        "dispatch_output", "quant_info", "runner_config",
    ),
    (f"{RUNNERS}.triton", "TritonMoeQuantInfo"): (
        "w13_weight", "w2_weight", "b13", "b2", "use_mxfp8", "use_fp8_w8a8", "use_int8_w8a8",
        "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant", "w13_scale", "w2_scale",
        "w13_zp", "w2_zp", "a13_scale", "a2_scale", "block_shape", "fuse_swiglu_interleaved",
    ),
    (f"{MOE}.token_dispatcher.standard", "StandardDispatchOutput"): (
        "hidden_states", "hidden_states_scale", "topk_output", "hidden_states_pre_quant",
    ),
    (f"{RUNNERS}.base", "MoeRunnerConfig"): (
        "num_experts", "num_local_experts", "hidden_size", "intermediate_size_per_partition",
        "layer_id", "top_k", "num_fused_shared_experts", "params_dtype", "routing_method_type",
        "runner_backend", "activation", "is_gated", "apply_router_weight_on_input", "inplace",
        "no_combine", "no_combine_keep_router_weight", "routed_scaling_factor", "gemm1_alpha",
        "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit", "gate_up_interleaved", "layer",
        "use_tp_all_gather_activation", "silu_mul_keep_fp32",
    ),
}  # fmt: skip
"""Fields of classes and parameters of functions, by module and name."""


METHODS = "sglang.srt.layers.quantization"
MXFP4 = f"{METHODS}.mxfp4.Mxfp4MoEMethod"
"""SGLang's quantization method of gpt-oss."""
WNA16 = f"{METHODS}.moe_wna16.MoeWNA16Method"
"""SGLang's method of AWQ and GPTQ for the Triton runner."""
COMPRESSED = (
    f"{METHODS}.compressed_tensors.schemes.compressed_tensors_wNa16_moe"
    ".CompressedTensorsWNA16TritonMoE"
)
"""SGLang's method of int4 of compressed-tensors for the Triton runner."""
TRITON = "layers of the Triton runner"
GPT_OSS, GROUPS = "gpt-oss in MXFP4", "int4 and int8 in the packed form"
MODULES = {GPT_OSS: "_mxfp4", GROUPS: "_weights"}
"""The module of the plug-in for each kind of weights that is hooked as SGLang loads it."""
LOADED_NAMES = {
    f"{MOE}.utils": ("get_moe_runner_backend", "get_moe_a2a_backend"),
    "sglang.srt.utils": ("is_cpu",),
    "sglang.srt.runtime_context": ("get_exec",),
}
"""Names for weights that are kept or packed when SGLang has loaded them."""
LOADED_PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    GPT_OSS: {
        f"{MXFP4}.process_weights_after_loading": ("self", "layer"),
        f"{MXFP4}.apply": ("self", "layer", "dispatch_output"),
    },
    GROUPS: {
        f"{WNA16}.process_weights_after_loading": ("self", "layer"),
        f"{WNA16}.restore_weights_before_loading": ("self", "layer"),
        f"{WNA16}.get_triton_quant_info": ("self", "layer"),
        f"{COMPRESSED}.process_weights_after_loading": ("self", "layer"),
        f"{COMPRESSED}.get_triton_quant_info": ("self", "layer"),
    },
}
"""Parameters of methods, for each kind of such weights."""


def formats() -> dict[str, str | None]:
    """Return what the plug-in serves, each with the first name that SGLang lacks for it.

    A name is lacking if it is not there, or if its fields or parameters are others.
    """
    lacks = first_missing(NAMES, PARTS)
    kinds = {TRITON: lacks}
    for kind, methods in LOADED_PARTS.items():
        parts = {split_name(name): parameters for name, parameters in methods.items()}
        kinds[kind] = lacks or first_missing(LOADED_NAMES, parts)
    return kinds
