"""The MXFP4 experts of gpt-oss, which transformers runs with triton_kernels.

transformers replaces the forward of MoE blocks by one that routes with triton_kernels, and keeps
the weights in triton_kernels' layouts. An adapted block runs the forward of its class, whose router
is plain PyTorch, and its experts run `fused_experts` on the checkpoint's layout, which is also that
of this library: two numbers per byte, the even k in the low nibble.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation
from moe_ops.integrations._experts import map_for_few_experts
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.pipeline.packing import reads_packed
from moe_ops.scheme import SCHEMES, FusedMoEQuantConfig, pack_weight
from moe_ops.tensors import QTensor

SCHEME = SCHEMES["mxfp4_w4a16"]
NAMES = ("gate_up_proj", "down_proj")
NO_ADAPTERS = (
    "PEFT's adapters of MXFP4 experts (load the model with Mxfp4Config(dequantize=True), call "
    "moe_ops.quantize_(model, 'mxfp4_w4a16'), then get_peft_model and adapt)"
)
"""What adapted experts do not run, and what to do instead."""


def is_experts(module: Any) -> bool:
    """Whether a module is transformers' ``Mxfp4GptOssExperts``."""
    return isinstance(module, Mxfp4GptOssExperts)


def is_block(module: Any) -> bool:
    """Whether a module is a MoE block with ``Mxfp4GptOssExperts``."""
    return is_experts(getattr(module, "experts", None))


def is_adapted(module: nn.Module) -> bool:
    """Whether `adapt_block` was applied."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is experts_forward


def experts_forward(
    self: Any, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor
) -> Tensor:
    """Run as ``GptOssExperts.forward``, on the weights that `adapt_block` stored.

    Raises:
        NotImplementedError: weights that PEFT adds adapters to.
    """
    if "parametrizations" in self._modules:
        raise NotImplementedError(f"experts must have no adapters, got {NO_ADAPTERS}")
    config = FusedMoEQuantConfig(
        SCHEME,
        w1_scale=self.gate_up_proj_scales,
        w2_scale=self.down_proj_scales,
        w1_bias=self.gate_up_proj_bias,
        w2_bias=self.down_proj_bias,
    )
    return fused_experts(
        hidden_states,
        self.gate_up_proj,
        self.down_proj,
        routing_weights,
        router_indices,
        activation=self.activation,
        expert_map=map_for_few_experts(router_indices, self.gate_up_proj.shape[0]),
        quant_config=config,
    )


def adapt_block(name: str, block: Any) -> None:
    """Convert one block's weights from triton_kernels' layout, and give its experts a forward.

    On a GPU with kernels that read the packed form (see `pack_weight`) weights are packed.

    Weights may also be parameters in the layout of checkpoints, ``(E, N, K / 32, 16)`` with
    ``*_scales`` ``(E, N, K / 32)`` beside them.

    Raises:
        NotImplementedError: expert parallelism, whose ranks route in triton_kernels.
        ValueError: weights of other sizes than the module's.
    """
    experts = block.experts
    if hasattr(block, "_is_hooked"):
        raise NotImplementedError(
            f"{name} must hold all its experts, got a block of transformers' expert parallelism "
            "(Mxfp4Config(dequantize=True) works with it)"
        )
    hidden, width = experts.hidden_size, experts.intermediate_size
    sizes = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    stored = {key: _stored(f"{name}.experts", experts, key, *sizes[key]) for key in NAMES}
    for key in NAMES:
        data, scales = _fastest(*stored.pop(key))
        experts.__dict__.pop(key, None)
        experts.__dict__.pop(f"{key}_precision_config", None)
        setattr(experts, key, nn.Parameter(data, requires_grad=False))
        setattr(experts, f"{key}_scales", nn.Parameter(scales, requires_grad=False))
    # Made once: Dynamo reads its key; floats of the module would become inputs of the graph.
    experts.activation = Activation(MoEActivation.SWIGLUOAI, experts.limit, experts.alpha, 1.0)
    experts.forward = MethodType(experts_forward, experts)
    block.__dict__.pop("forward", None)  # the one of transformers, which routes in triton_kernels


def _stored(name: str, experts: Any, key: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return one weight as ``(E, N, K / 2)`` bytes, and its scales ``(E, N, K / 32)``."""
    weight = getattr(experts, key)
    if isinstance(weight, Tensor):
        data, scales = weight.flatten(2), getattr(experts, f"{key}_scales")
    else:
        data = _plain(weight)
        scales = _plain(getattr(experts, f"{key}_precision_config").weight_scale)
    checks.tensor(f"{name}.{key}", data, 3, (torch.uint8,))
    checks.tensor(f"{name}.{key}_scales", scales, 3, (torch.uint8,))
    for axis, expected in enumerate((experts.num_experts, n, k // 2)):
        checks.size(f"{name}.{key}.shape[{axis}]", data.shape[axis], "the module's size", expected)
    for axis, expected in enumerate((experts.num_experts, n, k // 32)):
        actual = scales.shape[axis]
        checks.size(f"{name}.{key}_scales.shape[{axis}]", actual, "the module's size", expected)
    return data.contiguous(), scales.contiguous()


def _fastest(data: Tensor, scales: Any) -> tuple[Tensor, Any]:
    """Return one weight in the form that kernels of its GPU read fastest, for bf16 tokens."""
    if reads_packed(data, SCHEME, torch.bfloat16):
        data, scales, *_ = pack_weight(QTensor(data, scales), SCHEME)
    return data, scales


def _plain(swizzled: Any) -> Tensor:
    """Return a triton_kernels tensor, which is ``(E, K, N)``, as ``(E, N, K)``."""
    storage = swizzled.storage
    return storage.layout.unswizzle_data(storage.data).transpose(1, 2)
