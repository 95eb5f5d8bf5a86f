"""Compiling and loading every kernel before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.routing import fused_topk
from moe_ops.tiles import plan_variant


def warmup(
    w1: Tensor,
    w2: Tensor,
    top_k: int,
    num_tokens: int | Iterable[int],
    *,
    topk_weights_dtype: torch.dtype = torch.float32,
    topk_ids_dtype: torch.dtype = torch.int32,
    scoring_func: str = "softmax",
    router_logits_dtype: torch.dtype | None = None,
    **experts: Any,
) -> list[int]:
    """Run a layer once with every kernel that it will use, on random tokens.

    Afterwards no call with these weights and settings compiles or loads a kernel: not the first
    request, and not a CUDA graph's capture (where compiling is an error). On a machine without a
    GPU this runs the references, which need no warming.

    Args:
        w1: the layer's weights, as in `fused_experts`; they are read, not copied.
        w2: see `fused_experts`.
        top_k: k.
        num_tokens: the token counts to come; a single number means all from 1 up to it, of which
            those are run that differ in a kernel.
        topk_weights_dtype: dtype of the weights that calls will pass.
        topk_ids_dtype: dtype of the ids that calls will pass.
        scoring_func: of `fused_topk`, which is warmed too.
        router_logits_dtype: of `fused_topk`; None means that of ``w1``.
        **experts: keywords of `fused_experts` (activation, expert_map, biases, ..).

    Returns:
        The token counts that were run.
    """
    expert_map = experts.get("expert_map")
    num_experts = w1.shape[0] if expert_map is None else expert_map.shape[0]

    def run(tokens: int) -> None:
        x = torch.randn(tokens, w1.shape[2], device=w1.device, dtype=w1.dtype)
        logits = torch.randn(tokens, num_experts, device=w1.device)
        logits = logits.to(router_logits_dtype or w1.dtype)
        weights, ids = fused_topk(x, logits, top_k, True, scoring_func=scoring_func)
        weights, ids = weights.to(topk_weights_dtype), ids.to(topk_ids_dtype)
        fused_experts(x, w1, w2, weights, ids, **experts)

    return run_variants(run, num_tokens, w1, w2, top_k)


@torch.no_grad()
def run_variants(
    run: Callable[[int], Any], num_tokens: int | Iterable[int], w1: Tensor, w2: Tensor, top_k: int
) -> list[int]:
    """Call ``run`` with the token counts that differ in a kernel, and wait for the device."""
    counts = range(1, num_tokens + 1) if isinstance(num_tokens, int) else num_tokens
    chosen: dict[Any, int] = {}
    for tokens in counts:
        chosen.setdefault(plan_variant(tokens * top_k, w1, w2), tokens)
    for tokens in chosen.values():
        run(tokens)
    if w1.is_cuda:
        torch.cuda.synchronize(w1.device)
    return list(chosen.values())
