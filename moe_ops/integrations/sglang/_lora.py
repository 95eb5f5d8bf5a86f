"""LoRA on experts: SGLang's stacked factors and ids of tokens, as this library takes them.

SGLang keeps the factors of all adapters of a layer in four tensors, whose places it fills with
zeros before it loads an adapter, and gives each token the place of its adapter; -1: none.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from moe_ops.activation import Activation
from moe_ops.integrations._engines import attribute_of
from moe_ops.pipeline.adapters import Adapters, LowRank

FIELDS = (
    "gate_up_lora_a_weights", "gate_up_lora_b_weights", "down_lora_a_weights",
    "down_lora_b_weights", "seg_indptr", "req_to_lora", "lora_ranks", "adapter_enabled",
    "token_lora_mapping", "max_lora_rank", "num_experts", "has_active_lora",
    "experts_shared_outer_loras", "cg_buffers", "lora_use_virtual_experts",
)  # fmt: skip
"""Fields of SGLang's ``LoRAInfo``, which is not imported before SGLang does so."""
RUNNER = "sglang.srt.model_executor.runner"


def call_adapters(info: Any, x: Tensor, quant_info: Any, activation: Activation) -> Adapters | None:
    """Return the adapters of a call, on SGLang's memory; None: no token has one.

    A step that is captured runs them in any case.

    Args:
        info: SGLang's ``LoRAInfo``.
        x: ``(T, H)``.
        quant_info: SGLang's ``TritonMoeQuantInfo``.
        activation: the layer's activation.

    Raises:
        NotImplementedError, TypeError, ValueError: factors or ids of another form.
    """
    if tuple(field.name for field in fields(info)) != FIELDS:
        raise NotImplementedError("LoRAInfo of another version is not supported")
    captures = attribute_of(RUNNER, "get_is_capture_mode")
    is_captured = captures is None or captures()
    if info.max_lora_rank == 0 or not (info.has_active_lora or is_captured):
        return None
    a, b, rank = info.gate_up_lora_a_weights, info.gate_up_lora_b_weights, info.max_lora_rank
    half, first = b.shape[2] // 2, [LowRank(a, b)]
    if a.shape[2] > rank:  # gate and up apart
        if activation.kind.is_interleaved:
            raise NotImplementedError("factors of gate and up beside alternating rows")
        gate, up = slice(None, half), slice(half, None)
        first = [LowRank(a[:, :, :rank], b[:, :, gate], gate)]
        first += [LowRank(a[:, :, rank:], b[:, :, up], up)]
    second = LowRank(info.down_lora_a_weights, info.down_lora_b_weights)
    ids = info.token_lora_mapping
    if len(ids) < len(x) or a.dtype != x.dtype:
        text = f"{len(ids)} ids and factors in {a.dtype} for {len(x)} tokens in {x.dtype}"
        raise NotImplementedError(text)
    adapters = Adapters(tuple(first), second, ids[: len(x)])
    experts, n, _ = quant_info.w13_weight.shape
    adapters.check(experts, n, x.shape[1], n // 2 if activation.kind.is_gated else n)
    return adapters
