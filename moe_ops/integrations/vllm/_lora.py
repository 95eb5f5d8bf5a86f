"""LoRA on experts: vLLM's stacked factors and ids of tokens, as this library takes them.

vLLM keeps the factors of all adapters of a layer in a few tensors, which adapters are copied into,
and the adapter of each token in a buffer. Both stay where they are, also when CUDA graphs are
replayed, so that a step reads them and copies nothing. A slot without an adapter has factors of
zeros.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config_or_none

from moe_ops import checks
from moe_ops.activation import MoEActivation
from moe_ops.integrations.vllm import SWITCH
from moe_ops.pipeline.adapters import Adapters, LowRank

IDS = "_token_lora_indices"
"""The buffer of vLLM's wrapper that has the adapter of each token of a step; -1: none."""


def lora_refusal(moe_config: Any) -> str | None:
    """Return why a layer's adapters are not served; None: they are, or the engine has none."""
    if not moe_config.is_lora_enabled:
        return None
    engine = get_current_vllm_config_or_none()
    lora, parallel = getattr(engine, "lora_config", None), moe_config.moe_parallel_config
    if lora is None:
        return "LoRA without a configuration is not supported"
    if parallel.use_all2all_kernels:  # vLLM sends the ids of an earlier step if a rank has none
        return "LoRA where ranks send each other tokens is not supported"
    if lora.fully_sharded_loras and parallel.tp_size > 1:
        return "LoRA with fully_sharded_loras on several ranks is not supported"
    if lora.lora_dtype not in ("auto", moe_config.in_dtype):
        return f"LoRA in {lora.lora_dtype} beside {moe_config.in_dtype} is not supported"
    pairs = lora.max_loras * moe_config.num_local_experts
    if pairs > checks.MAX_EXPERTS:
        return f"max_loras times experts must be at most {checks.MAX_EXPERTS}, got {pairs}"
    return None


def layer_adapters(context: Any, moe_config: Any, activation: MoEActivation) -> Adapters:
    """Return a layer's adapters, on vLLM's memory; ids come with each step.

    Args:
        context: vLLM's ``MoELoRAContext``.
        moe_config: vLLM's ``FusedMoEConfig``.
        activation: the layer's activation.

    Raises:
        NotImplementedError: a wrapper without `IDS`.
        TypeError, ValueError: factors of other dtypes or shapes.
    """
    if not hasattr(context.punica_wrapper, IDS):
        name = type(context.punica_wrapper).__name__
        raise NotImplementedError(
            f"punica_wrapper must have {IDS}, got {name} ({SWITCH}=0 runs vLLM's own experts)"
        )
    width = moe_config.intermediate_size_per_partition
    rows = [slice(None)]
    if context.w13_num_slices == 2:
        halves = [slice(None, width), slice(width, None)]
        rows = [slice(0, None, 2), slice(1, None, 2)] if activation.is_interleaved else halves
    first = zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, rows, strict=True)
    (a,), (b,) = context.w2_lora_a_stacked, context.w2_lora_b_stacked
    adapters = Adapters(tuple(LowRank(*factors) for factors in first), LowRank(a, b))
    n = width * (1 + activation.is_gated)
    adapters.check(moe_config.num_local_experts, n, moe_config.hidden_dim, width)
    return adapters


def any_adapter(wrapper: Any) -> bool:
    """Whether a token of this step may have an adapter; vLLM knows it on a GPU."""
    meta = getattr(wrapper, "token_mapping_meta", None)
    return meta is None or not meta.no_lora_flag_cpu.item()


def ids_of(wrapper: Any, num_tokens: int) -> Tensor:
    """Return the adapter of each token, of padding any number: a view of vLLM's buffer."""
    ids: Tensor = getattr(wrapper, IDS)[:num_tokens]
    return ids
