"""What the plug-in needs of vLLM: names and parameters, all of which are looked up before use."""

from __future__ import annotations

from inspect import signature

from moe_ops.integrations._engines import found

LAYERS = "vllm.model_executor.layers.fused_moe"
ORACLES = f"{LAYERS}.oracle"
NAMES = {
    f"{ORACLES}.unquantized": ("backend_to_kernel_cls", "UnquantizedMoeBackend.TRITON"),
    f"{ORACLES}.fp8": ("backend_to_kernel_cls", "Fp8MoeBackend.TRITON"),
    f"{ORACLES}.int8": ("backend_to_kernel_cls", "Int8MoeBackend.TRITON"),
    f"{ORACLES}.mxfp4": (
        "backend_to_kernel_cls",
        "_get_priority_backends_for_gpt_oss",
        "Mxfp4MoeBackend.TRITON",
        "Mxfp4MoeBackend.XPU",
    ),
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
PARAMETERS = {
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
}  # fmt: skip
"""Parameters of functions that this plug-in overrides, by module and name."""


def missing() -> str | None:
    """Return the first name that vLLM lacks, or whose parameters are others; None: no such name."""
    for module, names in NAMES.items():
        for name in names:
            if found(module, name) is None:
                return f"{module}.{name}"
    for module, functions in PARAMETERS.items():
        for name, parameters in functions.items():
            function = found(module, name)
            if function is None or tuple(signature(function).parameters) != parameters:
                return f"{module}.{name}"
    return None
