"""Exchanges of tokens between simulated ranks, and what they must compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from modular import Setup, layer_config
from ranks import config_of, mine
from torch import Tensor

import moe_ops
from moe_ops.pipeline.calls import Pending
from moe_ops.testing import reference_experts, run_ranks


class World:
    """A problem whose experts and tokens are spread over ranks.

    ``expert_ranks[e]`` is the rank of expert e, and rank r has ``counts[r]`` of the tokens.
    """

    def __init__(
        self, s: Setup, expert_ranks: Tensor, counts: Sequence[int], kind: type | None = None
    ) -> None:
        self.s, self.expert_ranks, self.counts = s, expert_ranks.int(), counts
        self.kind = kind or moe_ops.pipeline.TritonExperts
        self.size = len(counts)

    def held(self, rank: int) -> Tensor:
        return (self.expert_ranks == rank).nonzero().flatten()

    def expert_map(self, rank: int) -> Tensor:
        held = self.held(rank)
        found = torch.full_like(self.expert_ranks, -1)
        found[held] = torch.arange(len(held), dtype=torch.int32, device=held.device)
        return found

    def kernel(self, rank: int, part: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        """A rank's kernel around a prepare-finalize, and the arguments for all tokens."""
        held = self.held(rank)
        experts = self.kind(layer_config(self.s.problem), config_of(self.s.config, held))
        kernel = moe_ops.FusedMoEKernel(part, experts, **options)
        weights = {"w1": self.s.inputs.w1[held], "w2": self.s.inputs.w2[held]}
        return kernel, self.s.arguments(**weights, expert_map=self.expert_map(rank))

    def own(self, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments for a rank's tokens."""
        names = ("hidden_states", "topk_weights", "topk_ids")
        tokens = mine(self.counts, rank)
        return {**arguments, **{name: arguments[name][tokens] for name in names}}

    def results(self, exchange: Any) -> list[Tensor]:
        """What simulated ranks get from the exchange that ``exchange(group)`` makes."""

        def run(rank: int, group: Any) -> Tensor:
            kernel, arguments = self.kernel(rank, exchange(group))
            return kernel.apply(**self.own(rank, arguments))

        return run_ranks(self.size, run)

    def expected(self) -> Tensor:
        """Rows quantized from all tokens, and sums of ranks in float32 in their order."""
        total, s = torch.zeros(()), self.s
        for rank in range(self.size):
            part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
            kernel, arguments = self.kernel(rank, part)
            call = moe_ops.pipeline.Call(**arguments)
            experts = kernel.fused_experts
            on_input = s.problem.on_input and not experts.applies_router_weight_on_input
            prepared = part.prepare(
                call.hidden_states, call.topk_weights, call.topk_ids, s.problem.num_experts, None,
                on_input, experts.quant_config, experts.expects_unquantized_inputs,
            )  # fmt: skip
            _, rows = kernel.run_experts(call, Pending(None, lambda p=prepared: p))
            total = total + kernel.start_finalize(call, rows).wait().float()
        return total.to(s.problem.dtype)

    def reference(self, roundings: Any) -> Tensor:
        """`reference_experts` with the roundings of several ranks: their sums are rounded too."""
        total, s = torch.zeros(()), self.s
        for rank in range(self.size):
            held = self.held(rank)
            w1, w2 = s.inputs.w1[held], s.inputs.w2[held]
            own = s.inputs._replace(w1=w1, w2=w2, expert_map=self.expert_map(rank))
            config = config_of(s.config, held)
            total = total + reference_experts(s.problem, own, config, roundings).float()
        return total.to(s.problem.dtype)
