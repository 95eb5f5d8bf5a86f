"""The forward of transformers' experts modules, whatever their layout and their quantization."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from moe_ops import ops
from moe_ops.gradients import inference_only
from moe_ops.integrations import _fp8
from moe_ops.integrations._experts import HOST, Weights, map_for_few_experts, weights_of
from moe_ops.integrations._gates import activation_of
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.pipeline.gated_experts import gated_experts
from moe_ops.pipeline.lora import ExpertLora
from moe_ops.pipeline.normed_experts import normed_experts
from moe_ops.tensors import Routing


def moe_ops_experts(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: ExpertLora | None = None,
) -> Tensor:
    """Run the experts forward of transformers by `fused_experts` or `gated_experts`.

    If the gate is an activation of this library, it is fused into the first GEMM. Any other
    ``_apply_gate`` runs between the GEMMs on all ``T * k`` rows, in slot order. It must treat each
    row by itself, as transformers' own implementations require; rows of skipped slots are
    undefined. So must a ``post_expert_norm``, which runs on the experts' rows before the weighted
    sum.

    Args:
        self: an experts module of any layout that ``use_experts_implementation`` describes:
            default, transposed, with interleaved gate and up, with biases, without a gate. Weights
            may be torchao tensors: ``Float8Tensor`` in rows or blocks, ``MXTensor`` of fp4,
            ``NVFP4Tensor``.
        hidden_states: ``(T, H)``.
        top_k_index: ``(T, k)`` int64; ids >= E (expert parallelism's sentinels) are skipped.
        top_k_weights: ``(T, k)``, applied after the down projection.
        lora: adapters beside both products, as in `fused_experts`.

    Returns:
        ``(T, H)``, dtype of ``hidden_states``.

    Raises:
        NotImplementedError: quantized weights of another kind; a backward pass through experts with
            an activation that this library does not have, and adapters of such experts.
    """
    return _run_experts(self, weights_of(self), hidden_states, top_k_index, top_k_weights, lora)


def moe_ops_fp8_experts(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: ExpertLora | None = None,
) -> Tensor:
    """Run the forward of transformers' ``FP8Experts``: `moe_ops_experts` on quantized weights.

    Weights have block scales (any powers of two from 16 on, float32 or e8m0), one scale per expert
    (or one each for gate and up), or are packed fp4. Activations are quantized

    * in groups along a row, if weights have block scales,
    * with one scale per row, if weights have one scale per expert,
    * with each expert's own scales, if those are given (``activation_scheme="static"``),
    * not at all, with fp4 weights.

    Args:
        self: an ``FP8Experts`` module, whose weights may also be dequantized.
        hidden_states: ``(T, H)`` bf16, fp16 or fp32.
        top_k_index: as in `moe_ops_experts`.
        top_k_weights: as in `moe_ops_experts`.
        lora: as in `moe_ops_experts`.

    Returns:
        ``(T, H)``, dtype of ``hidden_states``.

    Raises:
        NotImplementedError: block sizes or dtypes that are not supported; a backward pass through
            experts with static scales, and adapters of such experts, or as in `moe_ops_experts`.

    Source:
        transformers ``FP8Experts``, whose kernels take one scale per expert only without a gate,
        and static scales only with blocks.
    """
    if not _fp8.is_quantized(self):
        return moe_ops_experts(self, hidden_states, top_k_index, top_k_weights, lora)
    host = self.__dict__.get(HOST)
    weights = _fp8.fp8_weights(self) if host is None else Weights(*host[1:])
    if self.activation_scheme != "static":
        return _run_experts(self, weights, hidden_states, top_k_index, top_k_weights, lora)
    _refuse(lora, self, "static scales of activations")
    activation = activation_of(self)
    gate = self._apply_gate if self.has_gate else self.act_fn
    if activation is not None:
        gate = partial(ops.activation, activation=activation.key)
    expert_map = map_for_few_experts(top_k_index, weights.w1.shape[0])
    return _fp8.static_experts(
        hidden_states,
        weights.w1,
        weights.w2,
        weights.quant_config,
        _fp8.static_scales(self),
        Routing(top_k_weights, top_k_index, expert_map),
        gate,
    )


def _run_experts(
    experts: Any,
    weights: Weights,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: ExpertLora | None,
) -> Tensor:
    """Run the experts with the gate fused, if it is an activation of this library, or unfused."""
    w1, w2, w1_bias, w2_bias, config = weights
    activation = activation_of(experts)
    expert_map = map_for_few_experts(top_k_index, w1.shape[0])
    x = hidden_states.to(w1.dtype) if config.scheme.weight is None else hidden_states
    norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
    if activation is None:
        _refuse(lora, experts, "an activation that this library does not have")
        routing = Routing(top_k_weights, top_k_index, expert_map)
        return unfused_experts(experts, weights, x, routing, norm).to(hidden_states.dtype)
    options: dict[str, Any] = {"activation": activation, "quant_config": config, "lora": lora}
    options |= {"w1_bias": w1_bias, "w2_bias": w2_bias}
    if norm is not None:
        routing = Routing(top_k_weights, top_k_index, expert_map)
        return normed_experts(x, w1, w2, routing, norm, **options).to(hidden_states.dtype)
    out = fused_experts(x, w1, w2, top_k_weights, top_k_index, expert_map=expert_map, **options)
    return out.to(hidden_states.dtype)


def _refuse(lora: ExpertLora | None, experts: Any, what: str) -> None:
    if lora is not None:
        raise NotImplementedError(
            f"lora must be None for experts with {what}, got adapters of {type(experts).__name__}"
        )


@inference_only
def unfused_experts(
    experts: Any, weights: Weights, x: Tensor, routing: Routing, norm: Any = None
) -> Tensor:
    """Run experts whose gate is not an activation of this library, between the GEMMs."""
    w1, w2, w1_bias, w2_bias, config = weights
    gate = experts._apply_gate if experts.has_gate else experts.act_fn
    topk_weights, topk_ids, expert_map = routing
    options: dict[str, Any] = {"is_gated": experts.has_gate, "quant_config": config, "norm": norm}
    options |= {"expert_map": expert_map, "w1_bias": w1_bias, "w2_bias": w2_bias}
    return gated_experts(x, w1, w2, topk_weights, topk_ids, gate, **options)
