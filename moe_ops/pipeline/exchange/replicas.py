"""Ranks that have the same tokens: each of them exchanges a share, so that a token goes once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.pipeline.exchange.base import TokenExchange
from moe_ops.pipeline.exchange.records import Arrived, Outgoing
from moe_ops.pipeline.prepare_finalize import Receiver


class ReplicaExchange(TokenExchange):
    """An exchange among all ranks of a layer, in which n adjacent ranks have the same tokens.

    These ranks are a replica: the tensor-parallel ranks of a model with data parallelism. Rank i of
    a replica passes tokens i, i + n, i + 2n, ... to the exchange, as tokens of its own. The
    finished results then go to the other ranks of the replica, so that all have the results of all
    tokens. What travels for a token is what the exchange sends, and n - 1 finished rows.

    The ranks of a replica must pass the same tokens and routing. Replicas may have different
    numbers of tokens, if the exchange takes different numbers.

    Args:
        exchange: an exchange among all ranks.
        rank: the rank of this process in the exchange's group.
        replica_size: n; replica r has the ranks from ``r * n`` on.
        max_num_tokens: the largest number of tokens of a replica; None: no limit.
    """

    def __init__(
        self,
        exchange: TokenExchange,
        rank: int,
        replica_size: int,
        max_num_tokens: int | None = None,
    ) -> None:
        super().__init__(exchange.group, max_num_tokens)
        self.exchange, self.replica_size = exchange, replica_size
        self.index = rank % replica_size
        self.first = rank - self.index

    def supports_async(self) -> bool:
        """Value of the exchange."""
        return self.exchange.supports_async()

    def send(self, tokens: Outgoing) -> Callable[[], Arrived]:
        """Send this rank's share of the tokens."""
        adapters = tokens.lora_ids
        share = tokens._replace(
            a1=self._share(tokens.a1),
            topk_weights=self._share(tokens.topk_weights),
            topk_ids=self._share(tokens.topk_ids, -1),
            lora_ids=None if adapters is None else self._share(adapters),
        )
        return self.exchange.send(share)

    def send_back(self, sums: Tensor, topk_ids: Tensor) -> Receiver:
        """Send sums back; the receiver gathers the shares: the first T rows are the T tokens."""
        receive = self.exchange.send_back(sums, topk_ids)
        return lambda: self._gathered(receive())

    def num_arriving(self, num_tokens: int) -> int:
        """Value of the exchange for this rank's share."""
        return self.exchange.num_arriving(cdiv(num_tokens, self.replica_size))

    def has_gradients(self) -> bool:
        """Value of the exchange."""
        return self.exchange.has_gradients()

    def takes_lora(self) -> bool:
        """Value of the exchange."""
        return self.exchange.takes_lora()

    def send_again(self, rows: Tensor, topk_ids: Tensor) -> Receiver:
        """Send this rank's share of the rows, which all ranks of the replica must have."""
        return self.exchange.send_again(self._share(rows), topk_ids)

    def send_gradients_back(
        self, rows: Tensor | None, topk_weights: Tensor | None, topk_ids: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send gradients back, and gather the shares."""
        shares = self.exchange.send_gradients_back(rows, topk_weights, topk_ids)
        dx, dweights = (None if share is None else self._gathered(share) for share in shares)
        return dx, dweights

    def kept(self, arrived: Arrived) -> Arrived:
        """Value of the exchange."""
        return self.exchange.kept(arrived)

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
