"""Stand-ins of what the plug-in uses of vLLM 0.32 and 0.33, with vLLM's names and signatures.

`install` puts them into ``sys.modules``. `test_vllm_served.py` compares `SIGNATURES` with vLLM.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import vllm_lora as lora
from vllm_signatures import LAYERS, record

from moe_ops.activation import MoEActivation as Named

MoEActivation = Enum("MoEActivation", {kind.name: kind.value for kind in Named})


class Platform:
    device_name = "stand-in"
    kind = "cpu"

    def is_cuda(self):
        return self.kind == "cuda"

    def is_cpu(self):
        return self.kind == "cpu"

    def is_xpu(self):
        return self.kind == "xpu"


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


class ScaleDesc(NamedTuple):
    dtype: torch.dtype
    static: bool
    group_shape: tuple[int, int]


class QuantKey(NamedTuple):
    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


@dataclass
class FusedMoEParallelConfig:
    """The configuration whose properties of these names vLLM computes from an exchange's name."""

    use_all2all_kernels: bool = False
    use_ag_rs_all2all_kernels: bool = False
    use_deepep_ht_kernels: bool = False
    use_batched_activation_format: bool = False
    use_passthrough_all2all: bool = False
    enable_eplb: bool = False
    tp_size: int = 1
    dp_size: int = 1


@dataclass
class FusedMoEConfig:
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int
    activation: Any
    in_dtype: torch.dtype = torch.float32
    device: str = "cpu"
    moe_parallel_config: Any = field(default_factory=FusedMoEParallelConfig)
    has_bias: bool = False
    is_lora_enabled: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    moe_backend: str = "auto"

    @property
    def is_act_and_mul(self):
        return not self.activation.value.endswith("_no_mul")


@dataclass
class FusedMoEQuantConfig:
    """vLLM computes the first four from descriptions of the operands."""

    weight_quant_dtype: Any = None
    quant_dtype: Any = None
    block_shape: list[int] | None = None
    per_act_token_quant: bool = False
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    a1_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    w1_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    w1_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    g1_alphas: torch.Tensor | None = None
    g2_alphas: torch.Tensor | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor
    expert_num_tokens_cpu: torch.Tensor | None = None


class FusedMoEExperts(ABC):
    post_gemm2_hook = None  # in 0.33

    def __init__(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None):
        self.moe_config, self.quant_config = moe_config, quant_config
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers

    def process_weights_after_loading(self, layer):
        self.processed = layer

    @property
    def expects_unquantized_inputs(self):
        return False

    @staticmethod
    @abstractmethod
    def activation_format():
        raise NotImplementedError

    @staticmethod
    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format):
        rules = (
            (cls._supports_current_device(), "current device"),
            (moe_config.is_act_and_mul or cls._supports_no_act_and_mul(), "no act_and_mul"),
            (cls._supports_activation(moe_config.activation), f"{moe_config.activation}"),
            (cls._supports_quant_scheme(weight_key, activation_key), "quantization scheme"),
            (cls._supports_parallel_config(moe_config.moe_parallel_config), "parallel config"),
            (activation_format == cls.activation_format(), "activation format"),
            (not ENVS.VLLM_BATCH_INVARIANT or cls._supports_batch_invariance(), "invariance"),
            (not moe_config.is_lora_enabled or cls.supports_lora(), "LoRA"),
        )
        reasons = [f"kernel does not support {text}" for holds, text in rules if not holds]
        return not reasons, reasons[0] if reasons else None

    @staticmethod
    @abstractmethod
    def _supports_current_device():
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul():
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key, activation_key):
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def _supports_activation(activation):
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config):
        raise NotImplementedError

    _supports_batch_invariance = supports_lora = staticmethod(lambda: False)


class FusedMoEExpertsModular(FusedMoEExperts):
    @abstractmethod
    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        raise NotImplementedError

    @abstractmethod
    def finalize_weight_and_reduce_impl(self):
        raise NotImplementedError

    @abstractmethod
    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
        global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
        expert_tokens_meta, apply_router_weight_on_input,
    ):  # fmt: skip
        raise NotImplementedError


class FusedMoEKernel:
    def __init__(self, prepare_finalize, fused_experts):
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts


class Prepare:
    """What vLLM makes for tokens of one rank, or of two that send to rows of experts."""

    def __init__(self, moe, **given):
        self.given, self.batched = given, moe.moe_parallel_config.use_batched_activation_format

    @property
    def activation_format(self):
        formats = FusedMoEActivationFormat
        return formats.BatchedExperts if self.batched else formats.Standard

    def max_num_tokens_per_rank(self):
        return 3

    def num_dispatchers(self):
        return 2


class TopKWeightAndReduceNoOP:
    pass


class TopKWeightAndReduceDelegate:
    pass


class Theirs:
    """Experts of vLLM."""


def replace_parameter(layer, param_name, new_tensor):
    setattr(layer, param_name, torch.nn.Parameter(new_tensor, requires_grad=False))


ENVS = ModuleType("vllm.envs")
CONFIG = ModuleType("vllm.config")
SIGNATURES = {
    f"{LAYERS}.modular_kernel": (FusedMoEExperts, FusedMoEExpertsModular, FusedMoEKernel),
    "vllm.model_executor.utils": (replace_parameter,),
}
"""Classes and functions whose parameters are vLLM's, by module."""
FIELDS = {
    f"{LAYERS}.config": (FusedMoEConfig, FusedMoEQuantConfig, FusedMoEParallelConfig),
    f"{LAYERS}.modular_kernel": (ExpertTokensMetadata,),
    "vllm.model_executor.layers.quantization.utils.quant_utils": (QuantKey, ScaleDesc),
    **lora.FIELDS,
}
"""Classes whose fields vLLM's have, too, by module."""
BACKENDS = {
    "unquantized": ("UnquantizedMoeBackend", ("TRITON", "BATCHED_TRITON", "CPU", "XPU")),
    "fp8": ("Fp8MoeBackend", ("TRITON", "BATCHED_TRITON", "CPU", "MARLIN")),
    "int8": ("Int8MoeBackend", ("TRITON", "HUMMING", "CPU")),
    "int_wna16": ("WNA16MoEBackend", ("MARLIN", "HUMMING", "TRITON", "FLASHINFER_TRTLLM")),
    "w4a8": ("W4A8MoeBackend", ("CUTLASS", "HUMMING")),
    "nvfp4": ("NvFp4MoeBackend", ("MARLIN", "HUMMING", "FLASHINFER_TRTLLM")),
    "mxfp4": ("Mxfp4MoeBackend", ("MARLIN", "HUMMING", "TRITON", "DEEPGEMM_MXFP4")),
    "mxfp8": ("Fp8MoeBackend", ("MARLIN", "HUMMING", "DEEPGEMM")),
}
"""Enumeration of each oracle, and some of its backends, vLLM's first choice first."""
VERSION = max(record(), key=lambda name: [int(x) for x in name.split(".")])
"""Version of vLLM whose signatures the functions of oracles have."""


def recorded_signature(name):
    """The signature of a function of vLLM."""
    return inspect.Signature([
        inspect.Parameter(
            x.rstrip("="), inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if x.endswith("=") else inspect.Parameter.empty,
        )
        for x in record()[VERSION][name]
    ])  # fmt: skip


def stand_in(name, result):
    """A function of vLLM: it calls ``result`` with the arguments by their names."""
    signature = recorded_signature(name)

    def function(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return result(bound.arguments)

    function.__signature__, function.__name__ = signature, name.rpartition(".")[2]
    return function


class MarlinExperts:
    """Experts of vLLM that some methods choose by themselves."""


class MethodOfMarlin:
    """A method of MXFP4 without a selection, in the module that has the functions of oracles."""

    def __init__(self, moe):
        self.moe, self.mxfp4_backend, self.experts_cls = moe, MethodOfMarlin.backend, MarlinExperts

    def process_weights_after_loading(self, layer):
        self.repacked = layer

    def get_fused_moe_quant_config(self, layer):
        make = sys.modules["vllm.model_executor.layers.quantization.method"]
        return make.make_mxfp4_moe_quant_config(
            mxfp4_backend=self.mxfp4_backend, w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
        )  # fmt: skip


METHODS = {
    "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4":
        "CompressedTensorsW4A4Mxfp4MoEMethod",
    "inc.schemes.inc_mxfp4_moe": "INCMxfp4MoEMethod",
}  # fmt: skip
"""Modules for methods, and a class of each that chooses Marlin."""


def made_config(given):
    """A ``FusedMoEQuantConfig`` of the arguments of vLLM's ``make``."""
    known = {f.name for f in fields(FusedMoEQuantConfig)}
    more = {name: value for name, value in given.items() if name in known}
    return FusedMoEQuantConfig(given["weight_dtype"] or given["quant_dtype"], **more)


FusedMoEQuantConfig.make = staticmethod(
    stand_in(f"{LAYERS}.config.FusedMoEQuantConfig.make", made_config)
)


def oracle(name):
    """A stand-in of one oracle: all backends have one class.

    Selections return ``choice``, or raise it; other functions return their own name.
    """
    module = ModuleType(f"{LAYERS}.oracle.{name}")
    enum, members = BACKENDS[name]
    module.backends = Enum(enum, {member: member for member in members})
    module.choice = module.backends[members[0]]

    def select(given):
        if isinstance(module.choice, Exception):
            raise module.choice
        return module.choice, Theirs

    def backend_to_kernel_cls(backend):
        return [Theirs]

    setattr(module, enum, module.backends)
    module.backend_to_kernel_cls = backend_to_kernel_cls
    for path in record()[VERSION]:
        owner, _, last = path.rpartition(".")
        if owner == module.__name__ and last.startswith(("select_", "convert_", "make_")):
            other = functools.partial(lambda last, given: last, last)
            setattr(module, last, stand_in(path, select if "select" in last else other))
    return module


def modules():
    """Every stand-in by the name of its module."""
    ENVS.VLLM_BATCH_INVARIANT, ENVS.environment_variables = False, {}
    CONFIG.current = None
    CONFIG.get_current_vllm_config_or_none = lambda: CONFIG.current
    contents = {
        "vllm": {"__version__": "0.33.0", "envs": ENVS},
        "vllm.model_executor.utils": {"replace_parameter": replace_parameter},
        "vllm.platforms": {"current_platform": Platform()},
        f"{LAYERS}.activation": {
            "MoEActivation": MoEActivation, "ApplyMoEActivationConfig": object,
        },
        f"{LAYERS}.modular_kernel": {
            c.__name__: c
            for c in (
                FusedMoEActivationFormat, FusedMoEExperts, FusedMoEExpertsModular, FusedMoEKernel,
            )
        },
        f"{LAYERS}.config": {"FusedMoEQuantConfig": FusedMoEQuantConfig},
        f"{LAYERS}.all2all_utils": {"maybe_make_prepare_finalize": stand_in(
            f"{LAYERS}.all2all_utils.maybe_make_prepare_finalize", lambda given: Prepare(**given)
        )},
        f"{LAYERS}.topk_weight_and_reduce": {
            c.__name__: c for c in (TopKWeightAndReduceNoOP, TopKWeightAndReduceDelegate)
        },
    }  # fmt: skip
    warm = "vllm.model_executor.warmup.kernel_warmup"
    contents[warm] = {"kernel_warmup": stand_in(f"{warm}.kernel_warmup", lambda given: given)}
    contents |= lora.MODULES
    made = {ENVS.__name__: ENVS, CONFIG.__name__: CONFIG}
    made |= {(module := oracle(name)).__name__: module for name in BACKENDS}
    method = ModuleType("vllm.model_executor.layers.quantization.method")
    for module in [made[f"{LAYERS}.oracle.{name}"] for name in BACKENDS]:
        vars(method).update({n: f for n, f in vars(module).items() if "_moe_" in n})
    made[method.__name__] = method
    MethodOfMarlin.backend = made[f"{LAYERS}.oracle.mxfp4"].backends.MARLIN
    for name, owner in METHODS.items():
        own = ModuleType(f"vllm.model_executor.layers.quantization.{name}")
        setattr(own, owner, type(owner, (), dict(vars(MethodOfMarlin))))
        made[own.__name__] = own
    for name, values in contents.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(values)
    for name in list(made):
        while "." in (name := name.rpartition(".")[0]) or name:
            made.setdefault(name, ModuleType(name))
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    return made


def install(monkeypatch, package="moe_ops.integrations.vllm"):
    """Import the plug-in's modules anew, on stand-ins; returns a namespace of both."""
    made = modules()
    parts = ("_interface", "_requests", "_schemes", "_lora", "_experts", "_choice", "_weights",
             "_kernels", "_methods", "_factories", "_warmup", "_oracles")  # fmt: skip
    ours = {part: f"{package}.{part}" for part in parts}
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ours.values():
        monkeypatch.setitem(sys.modules, name, None)  # undone: absent, or as it was
        del sys.modules[name]
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    parts = {part.lstrip("_"): importlib.import_module(name) for part, name in ours.items()}
    return SimpleNamespace(
        plugin=importlib.import_module(package),
        platform=made["vllm.platforms"].current_platform,
        modules=made,
        envs=ENVS,
        config=CONFIG,
        method=made["vllm.model_executor.layers.quantization.method"],
        **{**parts, "oracles": {name: made[f"{LAYERS}.oracle.{name}"] for name in BACKENDS}},
    )
