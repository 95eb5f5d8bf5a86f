"""Grouped LoRA in a layer: what layers take it, and the adapters of their calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops import checks
from moe_ops.gradients import wanted
from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.routing import flat_tokens
from moe_ops.pipeline.exchange.gradients import Copied
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.lora import ExpertLora, check_lora


def check_takes_lora(layer: ExpertLayer) -> None:
    """Check that a layer can add low-rank products to its experts' products.

    A layer with a kernel leaves to that kernel what its parts take.

    Raises:
        NotImplementedError: experts that move; weights in act-order: loaders sort their rows, and
            adapters are in the order of the checkpoint; ranks that hold parts of some experts.
    """
    parallel = layer.moe_parallel_config
    obstacles = {
        "enable_eplb, which moves experts but not their adapters": layer.enable_eplb,
        "weights in act-order": layer.w13_input_order is not None,
        f"both ep_size ({parallel.ep_size}) and tp_size ({parallel.tp_size})": (
            parallel.ep_size > 1 and parallel.tp_size > 1
        ),
    }
    for what, present in obstacles.items():
        if present:
            raise NotImplementedError(f"lora must be None in a layer with {what}, got adapters")


def adapters_of(
    layer: ExpertLayer, lora: ExpertLora, hidden_states: Tensor, tokens: Tensor
) -> ExpertLora:
    """The adapters of a call, with one id for each of the flat tokens ``(T, H)``.

    Where the ranks' results are added before `FusedMoE.forward` returns (``reduce_results``, or an
    exchange of tokens), so are the ranks' gradients of what all ranks pass: ``scaling``, and if
    ranks cut experts along I, A of the first weight and B of the second.

    Raises:
        TypeError, ValueError: as `fused_experts` for its ``lora``.
        NotImplementedError: see `check_takes_lora`.
    """
    checks.instance("lora", lora, ExpertLora)
    check_takes_lora(layer)
    ids = lora.lora_ids
    if ids is not None:
        ids = flat_tokens("lora.lora_ids", ids, hidden_states, tokens, checks.INDICES)
        lora = lora._replace(lora_ids=ids)
    if layer.rank_group.size == 1:
        return lora
    exchange = layer.state.exchange
    if not layer.reduce_results and (exchange is None or not exchange.output_is_reduced()):
        return lora
    check_lora(lora, tokens, layer.w13_weight, layer.w2_weight, layer.scheme)
    return _copied(lora, layer.rank_group, layer.moe_parallel_config.tp_size > 1)


def _copied(lora: ExpertLora, group: RankGroup, cut: bool) -> ExpertLora:
    """The adapters, with gradients summed over ranks of the tensors that all ranks have.

    Args:
        lora: the adapters of a rank.
        group: the ranks.
        cut: whether each rank has a part of every expert, along I.
    """
    shared = [lora.scaling] if isinstance(lora.scaling, Tensor) else []
    if cut:
        shared += [] if lora.w1 is None else [lora.w1[0]]
        shared += [] if lora.w2 is None else [lora.w2[1]]
    asked = wanted(*shared)
    if not asked:
        return lora
    summed = Copied.apply(group, *asked)

    def of(x: Any) -> Any:
        for tensor, copy in zip(asked, summed, strict=True):
            if tensor is x:
                return copy
        return x

    w1, w2 = lora.w1, lora.w2
    w1 = None if w1 is None else (of(w1[0]), w1[1])
    w2 = None if w2 is None else (w2[0], of(w2[1]))
    return ExpertLora(w1, w2, lora.lora_ids, of(lora.scaling))
