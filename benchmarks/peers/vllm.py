"""The layer benchmark's calls of vLLM: its kernels, and its modular kernel with two experts."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.bench.problems import Call, Experts, Inputs
from peers.installed import lacks, named

LAYERS = "vllm.model_executor.layers.fused_moe"
UTILS = "vllm.model_executor.layers.quantization.utils"
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_block128": ("fp8_w8a8_moe_quant_config", {"block_shape": [128, 128]}),
    "fp8_channel": ("fp8_w8a8_moe_quant_config", {"per_act_token_quant": True}),
    "int8_channel": (
        "int8_w8a8_moe_quant_config",
        {"a1_scale": None, "a2_scale": None, "per_act_token_quant": True},
    ),
    "int8_w8a16": ("int8_w8a16_moe_quant_config", {}),
}
"""Scheme of vLLM's Triton kernels -> vLLM's function that makes its configuration, and further
arguments."""
MXFP4: dict[str, tuple[str, dict[str, Any]]] = {"mxfp4_w4a16": ("mxfp4_w4a16_moe_quant_config", {})}
SERVED = ("bf16", *CONFIGS, *MXFP4)
"""Schemes in which vLLM runs this library's experts."""

# A module of `LAYERS`, and operators that vLLM compiles
TRITON = ("fused_moe", ("_moe_C.moe_align_block_size", "_moe_C.moe_sum", "_C.silu_and_mul"))
CUTLASS = ("experts.cutlass_moe", ("_C.cutlass_moe_mm", "_C.get_cutlass_moe_mm_data"))
MARLIN = (
    "experts.marlin_moe",
    ("_moe_C.moe_align_block_size", "_moe_C.moe_wna16_marlin_gemm", "_C.gptq_marlin_repack",
     "_C.silu_and_mul"),
)  # fmt: skip
DEEPGEMM = ("experts.deep_gemm_moe", TRITON[1])
HUMMING = ("experts.fused_humming_moe", ())
OURS = ("modular_kernel", ())
MARLIN_ELEMENTS = {
    "int4_w4a16_g128": "uint4b8",
    "int8_w8a16": "uint8b128",
    "mxfp4_w4a16": "float4_e2m1f",
}
"""Scheme of Marlin's kernels -> vLLM's name of the weights' elements."""


def missing(module: str, operators: tuple[str, ...]) -> str | None:
    """What is missing of vLLM: the package, what it imports, or operators that it compiles."""
    fault = lacks("vllm", f"{LAYERS}.{module}")
    if fault:
        return fault
    absent = [name for name in operators if not _has_operator(*name.split("."))]
    return f"compiled operators of vllm: {', '.join(absent)}" if absent else None


def missing_deepgemm() -> str | None:
    """What is missing of vLLM for its DeepGEMM experts."""
    fault = missing(*DEEPGEMM)
    if fault is None and not import_module("vllm.utils.deep_gemm").is_deep_gemm_supported():
        return "a GPU and a build of vllm that have DeepGEMM"
    return fault


def _has_operator(namespace: str, name: str) -> bool:
    return hasattr(getattr(torch.ops, namespace), name)


def triton(experts: Experts, inputs: Inputs) -> Call:
    """The Triton ``fused_experts`` of vLLM."""
    run = import_module(f"{LAYERS}.fused_moe").fused_experts
    options = {} if experts.scheme.weight is None else {"quant_config": quant_config(experts)}
    w1, w2 = experts.w1, experts.w2
    return lambda: run(inputs.x, w1, w2, inputs.topk_weights, inputs.topk_ids, **options)


def quant_config(experts: Experts, **changes: Any) -> Any:
    """The weights' ``FusedMoEQuantConfig`` of vLLM, with further arguments."""
    module = import_module(f"{LAYERS}.config")
    if experts.scheme.weight is None:
        return module.FusedMoEQuantConfig.make()
    name, more = (CONFIGS | MXFP4)[experts.scheme.name]
    scales = {f"w{i}_scale": weight.scale for i, weight in enumerate(experts.stored, 1)}
    return getattr(module, name)(**scales, **more, **changes)


def marlin(experts: Experts, inputs: Inputs) -> Call:
    """The ``fused_marlin_moe`` of vLLM, on weights in Marlin's layout."""
    run = import_module(f"{LAYERS}.experts.marlin_moe").fused_marlin_moe
    types = import_module("vllm.scalar_type").scalar_types
    element = getattr(types, MARLIN_ELEMENTS[experts.scheme.name]).id
    weights, scales = zip(*map(_marlin_weight, experts.stored), strict=True)
    routing = (inputs.topk_weights, inputs.topk_ids, element)
    return lambda: run(inputs.x, *weights, None, None, *scales, *routing)


def _marlin_weight(weight: Any) -> tuple[Tensor, Tensor]:
    """A weight and its scales in Marlin's layout."""
    utils = import_module(f"{UTILS}.marlin_utils")
    words, by_group = gptq_layout(weight)
    bits = 4 if weight.data.dtype == torch.uint8 else 8
    sizes = (32 // bits * words.shape[1], words.shape[2])
    group = sizes[0] // by_group.shape[1]
    scales = utils.marlin_moe_permute_scales(by_group, *sizes, group)
    if weight.scale.dtype == torch.uint8:
        process = import_module(f"{UTILS}.marlin_utils_fp4").mxfp4_marlin_process_scales
        scales = torch.stack([process(of_expert) for of_expert in scales])
    repack = import_module("vllm._custom_ops").gptq_marlin_moe_repack
    if "perm" in signature(repack).parameters:  # until vLLM 0.25: no columns are permuted
        no_order = words.new_empty((len(words), 0))
        return repack(words, no_order, *sizes, bits), scales
    return repack(words, *sizes, bits), scales


def gptq_layout(weight: Any) -> tuple[Tensor, Tensor]:
    """Codes as words ``(E, K / n, N)`` int32, the first of n k lowest; scales ``(E, G, N)`` bf16.

    See `codes_and_scales` for the codes.

    Args:
        weight: a `moe_ops.scheme.QTensor`.
    """
    codes, scale = codes_and_scales(weight)
    scale = scale.reshape(*codes.shape[:2], -1).to(torch.bfloat16)
    words = codes.view(torch.int32)  # two 4-bit codes a byte, the even k lower
    return words.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()


def codes_and_scales(weight: Any) -> tuple[Tensor, Tensor]:
    """The bytes of a weight with integers offset by half of their range, and its scales.

    Floats are their bits. Bytes that are e8m0 scales get that dtype.

    Args:
        weight: a `moe_ops.scheme.QTensor`.
    """
    codes, scale = weight.data.contiguous().view(torch.uint8), weight.scale
    if weight.data.dtype == torch.int8:
        codes = codes ^ 128
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return codes, scale


# The modular kernel


def modular(experts: Experts, inputs: Inputs) -> Call:
    """The modular kernel with vLLM's Triton experts."""
    return _kernel(f"{LAYERS}.experts.triton_moe.TritonExperts", experts, inputs)


def cutlass(experts: Experts, inputs: Inputs) -> Call:
    """The modular kernel with vLLM's CUTLASS experts."""
    of_rows = {"per_out_ch_quant": True}  # else one scale for a whole weight
    return _kernel(f"{LAYERS}.experts.cutlass_moe.CutlassExpertsFp8", experts, inputs, **of_rows)


def deepgemm(experts: Experts, inputs: Inputs) -> Call:
    """The modular kernel with vLLM's DeepGEMM experts."""
    return _kernel(f"{LAYERS}.experts.deep_gemm_moe.DeepGemmExperts", experts, inputs)


def served(experts: Experts, inputs: Inputs) -> Call:
    """The modular kernel with this library's experts, as the plug-in installs them."""
    return _kernel("moe_ops.integrations.vllm._experts.MoeOpsExperts", experts, inputs)


def _kernel(path: str, experts: Experts, inputs: Inputs, **changes: Any) -> Call:
    """The modular kernel of one rank; weights are processed as after loading a model.

    Args:
        path: of the class of experts.
        experts: weights.
        inputs: tokens with their routing.
        changes: further arguments of vLLM's configuration of the weights.
    """
    workspace(inputs.x.device)
    layer, config = _layer(experts), moe_config(experts, inputs)
    quantized = quant_config(experts, **changes)
    prepare = named(f"{LAYERS}.all2all_utils.maybe_make_prepare_finalize")(
        moe=config, quant_config=quantized, allow_new_interface=True
    )
    run = named(path)(moe_config=config, quant_config=quantized)
    run.process_weights_after_loading(layer)
    kernel = named(f"{LAYERS}.modular_kernel.FusedMoEKernel")(prepare, run)
    return call_of(kernel, config, layer, inputs)


def call_of(kernel: Any, config: Any, layer: nn.Module, inputs: Inputs) -> Call:
    """A call of a modular kernel, with the weights of a layer and its ``FusedMoEConfig``."""
    options = {
        "activation": config.activation,
        "global_num_experts": config.num_experts,
        "expert_map": None,
        "apply_router_weight_on_input": False,
    }
    routing = (inputs.topk_weights, inputs.topk_ids)
    return lambda: kernel.apply(inputs.x, layer.w13_weight, layer.w2_weight, *routing, **options)


def _layer(experts: Experts) -> nn.Module:
    """Weights and scales under the names of vLLM's layers."""
    layer = nn.Module()
    tensors: dict[str, Tensor] = {"w13_weight": experts.w1, "w2_weight": experts.w2}
    for name, weight in zip(("w13", "w2"), experts.stored, strict=True):
        if weight.scale is not None:
            tensors[f"{name}_weight_scale"] = weight.scale
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return layer


def workspace(device: torch.device) -> None:
    """Make the workspace that vLLM's kernels share, once."""
    module = import_module("vllm.v1.worker.workspace")
    if not module.is_workspace_manager_initialized():
        module.init_workspace_manager(device)


def moe_config(experts: Experts, inputs: Inputs, **more: Any) -> Any:
    """A ``FusedMoEConfig`` of vLLM for one rank, with further fields."""
    module = import_module(f"{LAYERS}.config")
    activation = import_module(f"{LAYERS}.activation").MoEActivation
    count = experts.w1.shape[0]
    intermediate = experts.w1.shape[1] // 2
    return module.FusedMoEConfig(
        num_experts=count,
        num_local_experts=count,
        num_logical_experts=count,
        experts_per_token=inputs.topk_ids.shape[1],
        hidden_dim=inputs.x.shape[1],
        intermediate_size=intermediate,
        activation=activation(experts.activation),
        device=inputs.x.device.type,
        routing_method=module.RoutingMethodType.Renormalize,
        moe_parallel_config=module.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=inputs.x.dtype,
        max_num_tokens=max(1, len(inputs.x)),  # CUTLASS experts have memory for so many
        **more,
    )
