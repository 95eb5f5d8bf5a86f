"""Ranks that have the same tokens: each of them exchanges a share, so that a token goes once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.formats import FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    Hook,
    Receiver,
)
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce
from moe_ops.scheme import FusedMoEQuantConfig


class ReplicaExchange(FusedMoEPrepareAndFinalizeModular):
    """An exchange among all ranks of a layer, in which n adjacent ranks have the same tokens.

    These ranks are a replica: the tensor-parallel ranks of a model with data parallelism. Rank i of
    a replica passes tokens i, i + n, i + 2n, ... to the exchange, as tokens of its own. The
    finished results then go to the other ranks of the replica, so that all have the results of all
    tokens. What travels for a token is what the exchange sends, and n - 1 finished rows.

    The ranks of a replica must pass the same tokens and routing. Replicas may have different
    numbers of tokens, if the exchange takes different numbers.

    Args:
        exchange: an exchange among all ranks.
        group: these ranks.
        rank: the rank of this process in the group.
        replica_size: n; replica r has the ranks from ``r * n`` on.
        max_num_tokens: the largest number of tokens of a replica; None: no limit.
    """

    def __init__(
        self,
        exchange: FusedMoEPrepareAndFinalizeModular,
        group: RankGroup,
        rank: int,
        replica_size: int,
        max_num_tokens: int | None = None,
    ) -> None:
        self.exchange, self.group, self.max_num_tokens = exchange, group, max_num_tokens
        self.replica_size, self.index = replica_size, rank % replica_size
        self.first = rank - self.index

    def post_init_setup(self, fused_experts: Any) -> None:
        """Pass the experts on to the exchange."""
        self.exchange.post_init_setup(fused_experts)

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """The format of the exchange."""
        return self.exchange.activation_format

    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype that the exchange needs."""
        return self.exchange.topk_indices_dtype()

    def max_num_tokens_per_rank(self) -> int | None:
        """The given ``max_num_tokens``."""
        return self.max_num_tokens

    def num_dispatchers(self) -> int:
        """Number of ranks of all replicas."""
        return self.exchange.num_dispatchers()

    def output_is_reduced(self) -> bool:
        """That of the exchange."""
        return self.exchange.output_is_reduced()

    def supports_async(self) -> bool:
        """That of the exchange."""
        return self.exchange.supports_async()

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResult:
        """Send this rank's share of the tokens to their experts."""
        return self.exchange.prepare(
            self._share(a1),
            self._share(topk_weights),
            self._share(topk_ids, -1),
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )

    def finalize(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Tensor:
        """Finish this rank's share, and gather the shares: the first T rows are the T tokens."""
        own = self.exchange.finalize(
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        return self._gathered(own)

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> Receiver | tuple[Hook, Receiver]:
        """Start `prepare`."""
        return self.exchange.prepare_async(
            self._share(a1),
            self._share(topk_weights),
            self._share(topk_ids, -1),
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )

    def finalize_async(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Receiver | tuple[Hook, Receiver]:
        """Start the exchange's `finalize`; the receiver waits, and gathers the shares."""
        started = self.exchange.finalize_async(
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        if isinstance(started, tuple):
            hook, receiver = started
            return hook, lambda: self._gathered(receiver())
        return lambda: self._gathered(started())

    def _share(self, x: Tensor, fill: int = 0) -> Tensor:
        """Every n-th row of ``(T, m)``: ``(ceil(T / n), m)``, the last row ``fill`` if T ends."""
        count = self.replica_size
        rows = cdiv(x.shape[0], count)
        if torch.compiler.is_compiling() or x.shape[0] % count:
            x = torch.cat([x, x.new_full((rows * count - x.shape[0], x.shape[1]), fill)])
        # Not a strided view made contiguous: the compiler would ask whether it has 0 or 1 rows.
        return x.index_select(0, torch.arange(rows, device=x.device) * count + self.index)

    def _gathered(self, own: Tensor) -> Tensor:
        """The shares ``(P, H)`` of the replica's ranks as ``(P * n, H)``, in order of tokens."""
        peers = range(self.first, self.first + self.replica_size)
        shares = self.group.gather_among(own, peers)
        each = shares.view(self.replica_size, *own.shape)
        return torch.stack(each.unbind(0), 1).flatten(0, 1)
