"""Simulated routings for benchmarks, each usable as a ``custom_routing_function``.

They do not depend on the logits. The ids of a token are distinct and the weights are 1 / k. Expert
e is drawn with odds ``p[e]``, without replacement: a token's experts have the ``k`` largest values
of ``log p[e] + Gumbel noise``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks


def uniform_random(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw all experts with the same odds.

    Args:
        hidden_states: ``(T, H)``; only its number of tokens matters.
        gating_output: ``(T, E)``; only its shape and device matter.
        topk: k, between 1 and E.
        renormalize: has no effect.
        generator: generator of the noise; None means PyTorch's default.

    Returns:
        ``topk_weights (T, k)`` float32 and ``topk_ids (T, k)`` int32.

    Raises:
        ValueError: k not in 1..E, numbers of tokens that disagree.

    Source:
        vLLM's routing simulator, ``uniform_random``.
    """
    _check_draw(hidden_states, gating_output, topk, renormalize)
    return _draw(gating_output, topk, None, generator)


def normal_routing(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw experts with the odds of a normal distribution over ids: mean (E - 1) / 2, sigma E / 6.

    Arguments, results and errors as `uniform_random`.

    Source:
        vLLM's routing simulator, ``normal_routing``.
    """
    _check_draw(hidden_states, gating_output, topk, renormalize)
    place = _expert_positions(gating_output) - (gating_output.shape[1] - 1) / 2
    deviation = gating_output.shape[1] / 6
    return _draw(gating_output, topk, -0.5 * (place / deviation).square(), generator)


def zipf(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw expert e with odds 1 / (e + 1): few experts get most tokens, as in trained models.

    Arguments, results and errors as `uniform_random`.
    """
    _check_draw(hidden_states, gating_output, topk, renormalize)
    return _draw(gating_output, topk, -(_expert_positions(gating_output) + 1).log(), generator)


STRATEGIES = {"uniform_random": uniform_random, "normal_routing": normal_routing, "zipf": zipf}
"""Every strategy by its name."""


def _check_draw(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> None:
    checks.tensor("hidden_states", hidden_states, 2, None)
    checks.tensor("gating_output", gating_output, 2, None)
    checks.same_tokens("gating_output", gating_output, "hidden_states", hidden_states)
    checks.topk("topk", topk, gating_output.shape[1])
    checks.flags(renormalize=renormalize)


def _expert_positions(gating_output: Tensor) -> Tensor:
    return torch.arange(gating_output.shape[1], dtype=torch.float32, device=gating_output.device)


def _draw(
    gating_output: Tensor,
    topk: int,
    log_odds: Tensor | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    noise = torch.empty(gating_output.shape, dtype=torch.float32, device=gating_output.device)
    keys = -noise.exponential_(generator=generator).log()
    keys = keys if log_odds is None else keys + log_odds
    ids = keys.topk(topk, dim=-1).indices.to(torch.int32)
    return torch.full_like(ids, 1 / topk, dtype=torch.float32), ids
