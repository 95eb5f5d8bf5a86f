"""Grouped LoRA in a layer: what layers take it, and the adapters of their calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.gradients import wanted
from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.routing import flat_tokens
from moe_ops.pipeline.exchange.gradients import Copied
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.lora import ExpertLora, check_lora

_RANK_GROUP = "_moe_ops_rank_group"
"""Attribute of a parameter of one rank's adapters: a tuple, which can be set in a compiled call."""


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
    check_lora(lora, tokens, layer.w13_weight, layer.w2_weight, layer.scheme)
    own, shared = _factors(lora, layer.moe_parallel_config.tp_size > 1)
    if torch.is_grad_enabled():
        mark_rank_adapters(layer, (leaf for x in own for leaf in parameters_in(x)))
    exchange = layer.state.exchange
    if not layer.reduce_results and (exchange is None or not exchange.output_is_reduced()):
        return lora
    return _copied(lora, layer.rank_group, shared)


def mark_rank_adapters(layer: ExpertLayer, parameters: Iterable[Tensor]) -> None:
    """Mark parameters as adapters of one rank: `clip_grad_norm_` counts them over all ranks.

    A layer over several ranks marks, in every call, the parameters that it gets as factors, or
    that make up a factor as a whole (views, stacks). It does not see the parameters that
    `fully_shard` has made DTensors nor, in a compiled call, the parameters of which factors are
    made: call this for them. A parameter of which a factor is a part is left to the caller, too,
    since all ranks may have it.

    Args:
        layer: the layer that the adapters belong to.
        parameters: of this rank alone. `ExpertLora` says which factors all ranks have.
    """
    for x in parameters:
        setattr(x, _RANK_GROUP, tuple(layer.rank_group))


def ranks_of_adapters(parameter: Tensor) -> RankGroup | None:
    """Return the ranks that each have their own numbers in such a parameter; None: unmarked."""
    group = getattr(parameter, _RANK_GROUP, None)
    return None if group is None else RankGroup._make(group)


def _factors(lora: ExpertLora, cut: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the factors that only this rank has, and the tensors that all ranks have.

    Args:
        lora: the adapters of a rank.
        cut: whether each rank has a part of every expert, along I.
    """
    shared = [lora.scaling] if isinstance(lora.scaling, Tensor) else []
    first, second = list(lora.w1 or ()), list(lora.w2 or ())
    if cut:
        return first[1:] + second[:1], shared + first[:1] + second[1:]
    return first + second, shared


def parameters_in(factor: Tensor) -> list[Tensor]:
    """Return the parameters that make up a factor, such as single experts that were stacked.

    The list is empty if they have more numbers than the factor: then all ranks may have them, and
    use a part. It has no DTensors, which all ranks have.
    """
    if factor.is_leaf:
        return [factor] if factor.requires_grad else []
    if torch.compiler.is_compiling():
        return []
    leaves, nodes, seen = [], [factor.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not hasattr(leaf, "placements"):
            leaves.append(leaf)
        nodes += [after for after, _ in node.next_functions]
    return leaves if sum(x.numel() for x in leaves) == factor.numel() else []


def _copied(lora: ExpertLora, group: RankGroup, shared: Sequence[Tensor]) -> ExpertLora:
    """The adapters, with gradients summed over ranks of the ``shared`` tensors."""
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
