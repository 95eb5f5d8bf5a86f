"""Several ranks, Standard format: every rank gets all tokens and computes its own experts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe_ops.pipeline.exchange.base import TokenExchange
from moe_ops.pipeline.exchange.messages import (
    bytes_of_fp8,
    message_of,
    padded,
    parts_of,
    sum_of_ranks,
)
from moe_ops.pipeline.exchange.records import Arrived, Outgoing
from moe_ops.pipeline.prepare_finalize import Receiver


class AllGatherPrepareAndFinalize(TokenExchange):
    """Gather the tokens of all ranks, and send partial sums back to the tokens' ranks.

    See `TokenExchange` for what all exchanges share.

    **Prepare.** P rows of each of the R ranks travel in one collective, and their scales, ids and
    weights, packed as bytes, in another one. A static or global scale must be the same on all
    ranks: calls that agree on P (see below) compare it.

    **Finalize.** Each rank gets the R partial sums of its own tokens in an all-to-all of equal
    blocks: the bytes of a reduce-scatter in the activations' dtype, half the bytes of a
    reduce-scatter in float32, and only one rounding, but memory for R x P received rows.

    **Token counts.** Ranks may have different numbers of tokens, also 0. Rows are padded to P for
    each rank; padding has ids of -1, so experts skip it.

    * With ``max_num_tokens``, P is that number in every call: nothing waits for the device, and
      eager, compiled and captured ranks can work together.
    * With ``equal_num_tokens``, P is the number of tokens of the call. The ranks' numbers are
      compared on the device before rows travel, and other numbers make all ranks fail
      (`torch._assert_async`). A graph that is replayed repeats the comparison.
    * With neither, P is the largest number of tokens that a rank has. Eager calls agree on it, for
      which the host waits for one collective. Compiled and captured calls cannot wait: they are
      calls with ``equal_num_tokens``.

    All ranks of the group must call this equally often and in the same order, all eager or all
    compiled unless ``max_num_tokens`` is given. An error that one rank raises for its own arguments
    leaves the others waiting in their collective until the timeout of the process group.

    Raises:
        ValueError: in a call without ``max_num_tokens``, on all ranks: scales that differ between
            ranks.

    Source:
        vLLM ``allgather_reducescatter`` and ``naive`` all-to-all, which gather rows before they are
        quantized, and sum in the activations' dtype.
    """

    takes = frozenset({"equal_num_tokens"})

    def takes_lora(self) -> bool:
        """True."""
        return True

    def send(self, tokens: Outgoing) -> Callable[[], Arrived]:
        """Gather rows, ids and weights of ``R * P`` tokens, in the order of ranks."""
        size = self.rows_per_rank(tokens)
        rows, scale = self.rows_of(tokens)
        beside = [padded(tokens.topk_weights, size), padded(tokens.topk_ids, size, -1)]
        if scale is not None and scale.dim() > 1:  # of each row
            beside.append(padded(scale, size))
        has_adapters = tokens.lora_ids is not None
        if tokens.lora_ids is not None:
            beside.append(padded(tokens.lora_ids, size))
        travelling = self.group.start_all_gather(bytes_of_fp8(padded(rows, size)))
        facts = self.group.start_all_gather(message_of(beside))
        dtype = rows.dtype

        def receive() -> Arrived:
            weights, ids, *scales = parts_of(self.group.wait(facts), beside)
            gathered = self.group.wait(travelling).view(dtype)
            adapters = scales[-1] if has_adapters else None
            own = scales[0] if len(scales) > has_adapters else scale
            return Arrived(gathered, own, weights, ids, adapters)

        return receive

    def send_back(self, sums: Tensor, topk_ids: Tensor) -> Receiver:
        """Exchange equal blocks of the partial sums."""
        travelling = self.group.start_exchange(sums)
        return lambda: sum_of_ranks(self.group.wait(travelling), self.group.size)

    def send_again(self, rows: Tensor, topk_ids: Tensor) -> Receiver:
        """Gather the rows of all ranks."""
        travelling = self.group.start_all_gather(rows)
        return lambda: self.group.wait(travelling)
