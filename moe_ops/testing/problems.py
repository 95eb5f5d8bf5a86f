"""Problems (sizes and settings), and random inputs for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.activation import kind_and_key
from moe_ops.scheme import Scheme


@dataclass(frozen=True)
class Problem:
    """Sizes and settings of one call; with ``num_local_experts`` there is an expert_map."""

    num_tokens: int = 33
    num_experts: int = 8
    top_k: int = 2
    hidden_size: int = 64
    intermediate_size: int = 48
    dtype: torch.dtype = torch.float32
    activation: str = "silu"
    has_bias: bool = False
    on_input: bool = False
    num_local_experts: int | None = None
    routing: str = "uniform"
    scheme: str | Scheme = "unquantized"

    def with_(self, **changes: object) -> Problem:
        """This problem with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


class Inputs(NamedTuple):
    """The arguments of `moe_ops.fused_experts` for a problem."""

    hidden_states: Tensor
    w1: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None
    w1_bias: Tensor | None
    w2_bias: Tensor | None

    def cpu(self) -> Inputs:
        """These inputs on the CPU."""
        return Inputs(*(None if t is None else t.detach().cpu() for t in self))  # type: ignore[arg-type]


ROUTINGS = ("uniform", "skewed", "one_expert", "duplicates", "holes")
"""Kinds of routing: uniform; half of the experts empty; all tokens on experts 0 .. k - 1; the same
expert k times; with ids that are negative or too large."""


def make_routing(problem: Problem, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights ``(T, k)`` float32 and ids ``(T, k)`` int32, on the CPU.

    Returns:
        Weights ``(T, k)`` float32 and ids ``(T, k)`` int32.

    Raises:
        ValueError: an unknown routing.
    """
    checks.one_of("routing", problem.routing, ROUTINGS)
    T, E, k = problem.num_tokens, problem.num_experts, problem.top_k
    uniform = partial(torch.rand, generator=generator, dtype=torch.float32, device="cpu")
    score = uniform(T, E)
    if problem.routing == "skewed":
        score[:, : E // 2] += 1
    ids = score.topk(k, dim=-1).indices if k <= E else score.new_zeros(T, k, dtype=torch.int64)
    if problem.routing == "one_expert":
        ids = torch.arange(k, device="cpu").expand(T, k).clone()
    if problem.routing == "duplicates" and T:
        ids[:, 1:] = ids[:, :1]
    if problem.routing == "holes":
        hole = uniform(T, k)
        ids[hole < 0.2] = -1
        ids[(hole >= 0.2) & (hole < 0.3)] = E
        ids[(hole >= 0.3) & (hole < 0.35)] = 2**31 - 1
        if T:
            ids[0] = -1  # a token without any expert
    return uniform(T, k) + 0.1, ids.to(torch.int32)


def make_inputs(problem: Problem, device: str = "cpu", seed: int = 0) -> Inputs:
    """Random normal tokens and weights (weights over the square root of the fan-in), a routing.

    Returns:
        The tensors on ``device``, with weights of El experts; biases if the problem has them.

    Raises:
        ValueError: an unknown activation or routing.
    """
    g = torch.Generator().manual_seed(seed)
    kind, _ = kind_and_key(problem.activation)
    E, H, I = problem.num_experts, problem.hidden_size, problem.intermediate_size  # noqa: E741
    local = E if problem.num_local_experts is None else problem.num_local_experts
    rows = 2 * I if kind.is_gated else I

    def normal(*shape: int, fan_in: int = 1) -> Tensor:
        x = torch.randn(*shape, generator=g, dtype=torch.float32, device="cpu")
        x = x / max(fan_in, 1) ** 0.5
        return x.to(problem.dtype).to(device)

    expert_map = None
    if problem.num_local_experts is not None:
        expert_map = torch.full((E,), -1, dtype=torch.int32, device="cpu")
        chosen = torch.randperm(E, generator=g, device="cpu")[:local]
        expert_map[chosen] = torch.arange(local, dtype=torch.int32, device="cpu")
        expert_map = expert_map.to(device)
    weights, ids = make_routing(problem, g)
    return Inputs(
        hidden_states=normal(problem.num_tokens, H),
        w1=normal(local, rows, H, fan_in=H),
        w2=normal(local, H, I, fan_in=I),
        topk_weights=weights.to(device),
        topk_ids=ids.to(device),
        expert_map=expert_map,
        w1_bias=normal(local, rows) if problem.has_bias else None,
        w2_bias=normal(local, H) if problem.has_bias else None,
    )


def call(function, problem: Problem, inputs: Inputs, **more):
    """Call ``function`` with the arguments of `moe_ops.fused_experts` for a problem.

    Returns:
        What ``function`` returns.
    """
    return function(
        inputs.hidden_states,
        inputs.w1,
        inputs.w2,
        inputs.topk_weights,
        inputs.topk_ids,
        activation=problem.activation,
        expert_map=inputs.expert_map,
        apply_router_weight_on_input=problem.on_input,
        w1_bias=inputs.w1_bias,
        w2_bias=inputs.w2_bias,
        **more,
    )
