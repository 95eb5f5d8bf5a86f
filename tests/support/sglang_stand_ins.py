"""Stand-ins of what the plug-in uses of SGLang 0.5.23, with SGLang's names, fields and parameters.

They were written from the sources of the release. `install` puts them into ``sys.modules``.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOE = "sglang.srt.layers.moe"
RUNNERS = f"{MOE}.moe_runner"
METHODS = "sglang.srt.layers.quantization"


class StandardTopKOutput(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


class StandardDispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_output: Any
    hidden_states_pre_quant: tuple | None = None


class StandardCombineInput(NamedTuple):
    hidden_states: Tensor


@dataclass
class TritonMoeQuantInfo:
    w13_weight: Tensor
    w2_weight: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    use_mxfp8: bool = False
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_zp: Tensor | None = None
    w2_zp: Tensor | None = None
    a13_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    block_shape: list[int] | None = None
    fuse_swiglu_interleaved: bool = False


@dataclass
class MoeRunnerConfig:
    num_experts: int | None = None
    num_local_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size_per_partition: int | None = None
    layer_id: int | None = None
    top_k: int | None = None
    num_fused_shared_experts: int | None = None
    params_dtype: torch.dtype | None = None
    routing_method_type: Any = None
    runner_backend: Any = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    no_combine_keep_router_weight: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    layer: Any = None
    use_tp_all_gather_activation: bool = False
    silu_mul_keep_fp32: bool = False


@dataclass
class LoRAInfo:
    gate_up_lora_a_weights: Tensor
    gate_up_lora_b_weights: Tensor
    down_lora_a_weights: Tensor
    down_lora_b_weights: Tensor
    seg_indptr: Tensor
    req_to_lora: Tensor
    lora_ranks: Tensor
    adapter_enabled: Tensor
    token_lora_mapping: Tensor
    max_lora_rank: int
    num_experts: int
    has_active_lora: bool = True
    experts_shared_outer_loras: bool = False
    cg_buffers: dict | None = None
    lora_use_virtual_experts: bool = False


class Backend(str):
    """A name of a runner backend, which has SGLang's ``value``."""

    @property
    def value(self):
        return str(self)

    def is_triton(self):
        return self == "triton"

    def is_auto(self):
        return self == "auto"

    def is_none(self):
        return self == "none"


class DispatchMoeRunnerCore(ABC):
    def __init__(self, config):
        self.config = config

    @property
    @abstractmethod
    def runner_backend(self): ...

    @abstractmethod
    def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None): ...


class HookType(Enum):
    AROUND = "around"


def fused_experts_none_to_triton(dispatch_output, quant_info, runner_config):
    """Return SGLang's result, which here is nothing but a sign that it ran."""
    return StandardCombineInput("SGLang's")


class Context:
    """Server arguments and facts of ranks that somebody may publish."""

    def override_server_args(self, **fields):
        return SimpleNamespace(install=lambda: None)

    def override_permanently(self, **values):
        """Take facts of ranks."""


def get_config_dtype_str(
    dtype,
    use_int8_w8a16=False,
    use_int4_w4a16=False,
    use_fp8_w8a8=False,
    use_int8_w8a8=False,
):
    """Return the name of a quantization in the names of SGLang's files of tiles."""
    return "fp8_w8a8" if use_fp8_w8a8 else "int4_w4a16" if use_int4_w4a16 else None


def get_moe_configs(E, N, dtype, block_n=0, block_k=0, per_channel_quant=False, down_moe=False):  # noqa: N803
    """Return tiles for layers with blocks of scales, as if SGLang had no others."""
    return {1: {}} if (dtype, block_n, block_k) == ("fp8_w8a8", 128, 128) else None


def hook_registry():
    """A registry without hooks."""

    class HookRegistry:
        hooks = []

        @classmethod
        def register(cls, target, hook, hook_type=HookType.AROUND, *, source=None):
            cls.hooks.append((target, hook, hook_type))

        @classmethod
        def apply_hooks(cls):
            """Wrap a class method, as SGLang does after all plug-ins have registered."""
            for target, hook, _ in cls.hooks:
                module, owner, name = target.rsplit(".", 2)
                owner = getattr(sys.modules[module], owner)
                made = vars(owner).get(name, getattr(owner, name))  # or that of a base class
                original = getattr(made, "__func__", made)

                def wrapped(*args, f=original, h=hook, **named):
                    return h(f, *args, **named)

                setattr(owner, name, wrapped if made is original else classmethod(wrapped))

    return HookRegistry


def runner_class(factories, pool):
    """A class of runners with registered cores, fused functions, and LoRA, which hooks change."""

    class MoeRunner:
        def __init__(self, runner_backend, config, lora_enabled=False):
            self.runner_backend, self.config = Backend(runner_backend), config
            made = factories.get(self.runner_backend.value)
            self.runner_core = None if made is None else made(config)
            self.fused_func = None
            if not lora_enabled:
                self.fused_func = pool.get_fused_func("none", self.runner_backend.value)

        def run(self, dispatch_output, quant_info, lora_info=None):
            """Run a function or a core, or return a sign that SGLang's own kernels ran."""
            layer = (dispatch_output, quant_info, self.config)
            if self.fused_func is not None:
                return self.fused_func(*layer)
            if self.runner_core is not None:
                return self.runner_core.run_from_dispatch(*layer)
            return fused_experts_none_to_triton(*layer)

    return MoeRunner


def mxfp4_method():
    """A class of methods of gpt-oss, which hooks change."""

    class Mxfp4MoEMethod:
        def __init__(self, config):
            self.moe_runner_config = config

        def process_weights_after_loading(self, layer):
            """Leave a sign that SGLang dequantized the weights."""
            layer.w13_weight = layer.w2_weight = "dequantized"

        def apply(self, layer, dispatch_output):
            """Return a sign that SGLang's own kernels ran."""
            return StandardCombineInput("SGLang's")

    return Mxfp4MoEMethod


def grouped_info(tensors, bits, group):
    """int4 or int8 with groups, as the Triton runner gets them."""
    return TritonMoeQuantInfo(
        use_int4_w4a16=bits == 4, use_int8_w8a16=bits == 8, block_shape=[0, group], **tensors
    )


def rows_first(layer):
    """Turn words ``(E, K / 8, N)`` and scales ``(E, G, N)`` of compressed-tensors."""
    for which in ("w13", "w2"):
        for name in (f"{which}_weight_packed", f"{which}_weight_scale"):
            x = getattr(layer, name).data.transpose(1, 2).contiguous()
            x = x.view(torch.uint8) if name.endswith("packed") else x
            setattr(layer, name, torch.nn.Parameter(x, requires_grad=False))


class QuantizeMethodBase:
    def process_weights_after_loading(self, layer):
        """Leave the weights as they are."""

    def restore_weights_before_loading(self, layer):
        """Leave the weights as they are."""


def methods_of_groups(runners):
    """Classes of SGLang's methods of int4 and int8 with groups, which hooks change."""

    class Triton(QuantizeMethodBase):
        def create_moe_runner(self, layer, moe_runner_config):
            self.moe_runner_config = moe_runner_config
            self.runner = runners("triton", moe_runner_config)

        def apply(self, layer, dispatch_output):
            return self.runner.run(dispatch_output, self.get_triton_quant_info(layer))

    class MoeWNA16Method(Triton):
        def __init__(self, weight_bits, has_zp):
            self.weight_bits, self.has_zp = weight_bits, has_zp

        def get_triton_quant_info(self, layer):
            tensors = {
                "w13_weight": layer.w13_qweight, "w2_weight": layer.w2_qweight,
                "w13_scale": layer.w13_scales, "w2_scale": layer.w2_scales,
            }  # fmt: skip
            if self.has_zp:
                tensors |= {"w13_zp": layer.w13_qzeros, "w2_zp": layer.w2_qzeros}
            return grouped_info(tensors, self.weight_bits, layer.group_size)

    class CompressedTensorsWNA16TritonMoE(Triton):
        def __init__(self, group_size):
            self.group_size = group_size

        def process_weights_after_loading(self, layer):
            if not getattr(layer, "is_triton_converted", False):
                rows_first(layer)
                layer.is_triton_converted = True

        def get_triton_quant_info(self, layer):
            tensors = {
                "w13_weight": layer.w13_weight_packed, "w2_weight": layer.w2_weight_packed,
                "w13_scale": layer.w13_weight_scale, "w2_scale": layer.w2_weight_scale,
            }  # fmt: skip
            return grouped_info(tensors, 4, self.group_size)

    return MoeWNA16Method, CompressedTensorsWNA16TritonMoE


def choices(mode, runners):
    """Stand-ins of how SGLang says what was asked of it, and its quantization methods."""
    wna16, compressed = methods_of_groups(runners)
    return {
        f"{MOE}.utils": {
            "resolve_moe_runner_backend": Backend,
            "get_moe_runner_backend": lambda: Backend(mode.runner),
            "get_moe_a2a_backend": lambda: Backend(mode.exchange),
        },
        "sglang.srt.utils": {"is_cpu": lambda: mode.cpu},
        f"{METHODS}.mxfp4": {"Mxfp4MoEMethod": mxfp4_method()},
        f"{METHODS}.moe_wna16": {"MoeWNA16Method": wna16},
        f"{METHODS}.compressed_tensors.schemes.compressed_tensors_wNa16_moe": {
            "CompressedTensorsWNA16TritonMoE": compressed,
        },
        "sglang.srt.runtime_context": {
            "get_context": Context,
            "get_parallel": Context,
            "get_exec": lambda: SimpleNamespace(
                deterministic=SimpleNamespace(enable_deterministic_inference=mode.batch_invariant)
            ),
        },
    }


def modules():
    """Every stand-in by the name of its module, with state of its own."""

    class FusedOpPool:
        functions = {
            (exchange, runner): fused_experts_none_to_triton
            for exchange, runner in (("none", "triton"), ("none", "marlin"), ("deepep", "triton"))
        }

        @classmethod
        def get_fused_func(cls, dispatch_name, runner_name):
            return cls.functions.get((dispatch_name, runner_name))

    factories: dict[str, Any] = {}

    def register_moe_runner_core(backend_name, factory):
        assert backend_name not in factories
        factories[backend_name] = factory

    runners = runner_class(factories, FusedOpPool)
    mode = SimpleNamespace(batch_invariant=False, captured=False, runner="triton", exchange="none",
                           cpu=False)  # fmt: skip
    contents = {
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": hook_registry(), "HookType": HookType,
        },
        "sglang.srt.batch_invariant_ops": {
            "is_batch_invariant_mode_enabled": lambda: mode.batch_invariant, "mode": mode,
        },
        f"{RUNNERS}.base": {
            "FusedOpPool": FusedOpPool, "MoeRunnerConfig": MoeRunnerConfig,
            "DispatchMoeRunnerCore": DispatchMoeRunnerCore,
        },
        f"{RUNNERS}.runner": {
            "register_moe_runner_core": register_moe_runner_core,
            "_CUSTOM_RUNNER_CORE_FACTORIES": factories, "MoeRunner": runners,
        },
        "sglang.srt.model_executor.runner": {"get_is_capture_mode": lambda: mode.captured},
        f"{RUNNERS}.triton": {
            "TritonMoeQuantInfo": TritonMoeQuantInfo,
            "fused_experts_none_to_triton": fused_experts_none_to_triton,
        },
        f"{MOE}.token_dispatcher.standard": {
            "StandardDispatchOutput": StandardDispatchOutput,
            "StandardCombineInput": StandardCombineInput,
        },
        **choices(mode, runners),
        f"{MOE}.topk": {"StandardTopKOutput": StandardTopKOutput},
        f"{RUNNERS}.triton_utils.fused_moe": {},
        f"{RUNNERS}.triton_utils.fused_moe_triton_config": {
            "get_config_dtype_str": get_config_dtype_str, "get_moe_configs": get_moe_configs,
        },
    }  # fmt: skip
    made = {}
    for name, values in contents.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(values)
    for name in list(made):
        while name := name.rpartition(".")[0]:
            made.setdefault(name, ModuleType(name))
    return made


def install(monkeypatch, package="moe_ops.integrations.sglang"):
    """Import the plug-in's modules anew, on stand-ins; returns a namespace of both."""
    made = modules()
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    parts = ("_interface", "_lora", "_experts", "_runner", "_weights", "_mxfp4")
    ours = [f"{package}.{part}" for part in parts]
    for name in ours:
        monkeypatch.setitem(sys.modules, name, None)  # undone: absent, or as it was
        del sys.modules[name]
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    interface, _, experts, runner, *_ = (importlib.import_module(name) for name in ours)
    return SimpleNamespace(
        interface=interface,
        experts=experts,
        runner=runner,
        modules=made,
        mxfp4=made[f"{METHODS}.mxfp4"].Mxfp4MoEMethod,
        runners=made[f"{RUNNERS}.runner"].MoeRunner,
        pool=made[f"{RUNNERS}.base"].FusedOpPool,
        hooks=made["sglang.srt.plugins.hook_registry"].HookRegistry,
        factories=made[f"{RUNNERS}.runner"]._CUSTOM_RUNNER_CORE_FACTORIES,
        mode=made["sglang.srt.batch_invariant_ops"].mode,
    )
