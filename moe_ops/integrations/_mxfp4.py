"""The MXFP4 experts of gpt-oss, which transformers runs with triton_kernels.

transformers routes such MoE blocks with triton_kernels (before 5.21 by another forward, from then
on by another class), and keeps the weights in triton_kernels' layouts. An adapted block calls its
router, which is plain PyTorch, and its experts run `fused_experts` on the checkpoint's layout,
which is also that of this library: two numbers per byte, the even k in the low nibble.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import mxfp4

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation
from moe_ops.integrations._blocks import check_forward, check_whole, runs
from moe_ops.integrations._experts import HOST, Weights, map_for_few_experts
from moe_ops.pipeline.forms import form_of_gpu
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.scheme import SCHEMES, FusedMoEQuantConfig
from moe_ops.tensors import QTensor

SCHEME = SCHEMES["mxfp4_w4a16"]
NAMES = ("gate_up_proj", "down_proj")
NO_ADAPTERS = (
    "PEFT's adapters of MXFP4 experts (load the model with Mxfp4Config(dequantize=True), call "
    "moe_ops.quantize_(model, 'mxfp4_w4a16'), then get_peft_model and adapt)"
)
"""What adapted experts do not run, and what to do instead."""


def is_config(config: Any) -> bool:
    """Whether a configuration is that of a gpt-oss folder whose experts are MXFP4."""
    declared = getattr(config, "quantization_config", None)
    method = declared.get("quant_method") if isinstance(declared, dict) else None
    return bool(config.model_type == "gpt_oss" and method == "mxfp4")


def record_of(config: Any) -> dict[str, Any]:
    """Return the schemes of the experts of such a folder, as this library records its own."""
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(config.num_hidden_layers)]
    return {name: {"scheme": SCHEME.name, "checkpoint": name} for name in names}


def is_experts(module: Any) -> bool:
    """Whether a module is transformers' ``Mxfp4GptOssExperts``."""
    return isinstance(module, mxfp4.Mxfp4GptOssExperts)


def is_block(module: Any) -> bool:
    """Whether a module is a MoE block with ``Mxfp4GptOssExperts``."""
    return is_experts(getattr(module, "experts", None))


def is_adapted(block: nn.Module) -> bool:
    """Whether a block runs `block_forward`."""
    return runs(block, block_forward)


def block_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Run as transformers' block: return the tokens' rows and the router's logits."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    router_logits, routing_weights, router_indices = self.router(rows)
    out = self.experts(rows, router_indices, routing_weights)
    return out.reshape(hidden_states.shape), router_logits


def experts_forward(
    self: Any, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor
) -> Tensor:
    """Run as ``GptOssExperts.forward``, on the weights that `adaptation` stores.

    Raises:
        NotImplementedError: weights that PEFT adds adapters to.
    """
    if "parametrizations" in self._modules:
        raise NotImplementedError(f"experts must have no adapters, got {NO_ADAPTERS}")
    host = self.__dict__.get(HOST)
    w1, w2, b1, b2, config = mxfp4_weights(self) if host is None else Weights(*host[1:])
    return fused_experts(
        hidden_states,
        w1,
        w2,
        routing_weights,
        router_indices,
        activation=self.activation,
        expert_map=map_for_few_experts(router_indices, w1.shape[0]),
        w1_bias=b1,
        w2_bias=b2,
        quant_config=config,
    )


def mxfp4_weights(experts: Any) -> Weights:
    """Return the weights of an adapted module."""
    config = FusedMoEQuantConfig(
        SCHEME, w1_scale=experts.gate_up_proj_scales, w2_scale=experts.down_proj_scales
    )
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias)
    return Weights(experts.gate_up_proj, experts.down_proj, *biases, config)


def adaptation(name: str, block: Any) -> Callable[[], None]:
    """Return what adapts one block: its weights are converted, it and its experts get a forward.

    The conversion is for good, so that all of it is tried here, its result runs on no tokens, and
    is dropped. Nothing of the block changes before the returned function is called.

    Weights are in triton_kernels' layout, or parameters in the layout of checkpoints:
    ``(E, N, K / 32, 16)`` or ``(E, N, K / 2)``, with ``*_scales`` ``(E, N, K / 32)`` beside them.
    On a GPU with kernels that read the packed form (see `pack_weight`) they are packed.

    Raises:
        NotImplementedError: a block of transformers' tensor or expert parallelism.
        ValueError: weights of other sizes than the module's; a forward of the block or of its
            experts that is not transformers'.
    """
    experts = block.experts
    check_whole(name, block)
    check_forward(name, block, getattr(mxfp4, "mlp_forward", None))
    check_forward(f"{name}.experts", experts)
    checks.number(f"{name}.experts.limit", experts.limit)
    # Made once: Dynamo reads its key; floats of the module would become inputs of the graph.
    activation = Activation(MoEActivation.SWIGLUOAI, experts.limit, experts.alpha, 1.0)
    trial = SimpleNamespace(
        **_converted(name, experts, activation),
        activation=activation,
        _modules=experts._modules,
        gate_up_proj_bias=experts.gate_up_proj_bias,
        down_proj_bias=experts.down_proj_bias,
    )
    with torch.no_grad():
        like = {"dtype": block.router.weight.dtype, "device": trial.down_proj.device}
        rows = torch.zeros(0, experts.hidden_size, **like)
        _, routing_weights, router_indices = block.router(rows)
        experts_forward(trial, rows, router_indices, routing_weights)
    return partial(_adapt, name, block, activation)


def _adapt(name: str, block: Any, activation: Activation) -> None:
    experts = block.experts
    for key, x in _converted(name, experts, activation).items():
        experts.__dict__.pop(key, None)
        experts.__dict__.pop(f"{key}_precision_config", None)
        setattr(experts, key, nn.Parameter(x, requires_grad=False))
    experts.activation = activation
    experts.forward = partial(experts_forward, experts)
    block.forward = partial(block_forward, block)


def _converted(name: str, experts: Any, activation: Activation) -> dict[str, Any]:
    """Return the weights and scales that `experts_forward` reads, by attribute."""
    hidden, width = experts.hidden_size, experts.intermediate_size
    sizes = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    tensors: dict[str, Any] = {}
    for key, gate in zip(NAMES, (activation.key, ""), strict=True):
        q = QTensor(*_stored_weight(f"{name}.experts", experts, key, *sizes[key]))
        q = form_of_gpu(q, SCHEME, torch.bfloat16, activation=gate, in_place=False)
        tensors |= {key: q.data, f"{key}_scales": q.scale}
    return tensors


def _stored_weight(name: str, experts: Any, key: str, n: int, k: int) -> tuple[Tensor, Tensor]:
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


def _plain(swizzled: Any) -> Tensor:
    """Return a triton_kernels tensor, which is ``(E, K, N)``, as ``(E, N, K)``."""
    storage = swizzled.storage
    return storage.layout.unswizzle_data(storage.data).transpose(1, 2)
