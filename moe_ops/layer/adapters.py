"""Grouped LoRA in a layer: what layers take it, and the adapters of their calls."""

from __future__ import annotations

from torch import Tensor

from moe_ops import checks
from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.routing import flat_tokens
from moe_ops.pipeline.lora import ExpertLora


def check_takes_lora(layer: ExpertLayer) -> None:
    """Check that a layer can add low-rank products to those of its experts.

    Raises:
        NotImplementedError: several ranks, a kernel, experts that move, or weights in act-order:
            loaders sort their rows, and adapters are in the order of the checkpoint.
    """
    ranks = layer.moe_parallel_config.layer_size
    found = {
        f"several ranks ({ranks})": ranks > 1,
        "a kernel": layer.kernel is not None,
        "enable_eplb, which moves experts but not their adapters": layer.enable_eplb,
        "weights in act-order": layer.w13_input_order is not None,
    }
    for what, present in found.items():
        if present:
            raise NotImplementedError(f"lora must be None in a layer with {what}, got adapters")


def adapters_of(
    layer: ExpertLayer, lora: ExpertLora, hidden_states: Tensor, tokens: Tensor
) -> ExpertLora:
    """The adapters of a call, with one id for each of the flat tokens ``(T, H)``.

    Raises:
        TypeError, ValueError: as `fused_experts` for its ``lora``.
        NotImplementedError: see `check_takes_lora`.
    """
    checks.instance("lora", lora, ExpertLora)
    check_takes_lora(layer)
    ids = lora.lora_ids
    if ids is None:
        return lora
    ids = flat_tokens("lora.lora_ids", ids, hidden_states, tokens, checks.INDICES)
    return lora._replace(lora_ids=ids)
