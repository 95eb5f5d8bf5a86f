"""Several ranks, Standard format: every rank gets all tokens and computes its own experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops.pipeline.exchange.base import Arrived, Outgoing, TokenExchange, sum_of_ranks
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

    def send(self, tokens: Outgoing) -> Callable[[], Arrived]:
        """Gather rows, ids and weights of ``R * P`` tokens, in the order of ranks."""
        quant = tokens.quant
        given = None if quant is None else tokens.quant_config.input_scales[0]
        size = self._rows_per_rank(tokens.a1, given)
        rows, scale = self.rows_of(tokens)
        beside = [tokens.topk_weights, tokens.topk_ids]
        if scale is not None and quant is not None and not quant.per_tensor:
            beside.append(scale)
        travelling = self.group.start_all_gather(_padded(_bytes_of_fp8(rows), size))
        facts = self.group.start_all_gather(_packed(beside, size))
        dtype = rows.dtype

        def receive() -> Arrived:
            weights, ids, *scales = _unpacked(self.group.wait(facts), beside)
            gathered = self.group.wait(travelling).view(dtype)
            return Arrived(gathered, scales[0] if scales else scale, weights, ids)

        return receive

    def send_back(self, sums: Tensor, topk_ids: Tensor) -> Receiver:
        """Exchange equal blocks of the partial sums."""
        travelling = self.group.start_exchange(sums)
        return lambda: sum_of_ranks(self.group.wait(travelling), self.group.size)

    def _rows_per_rank(self, a1: Tensor, given: Tensor | None) -> int:
        """P, the same on all ranks. Ranks that agree on it compare their ``given`` scales too."""
        tokens, most = a1.shape[0], self.max_num_tokens
        self.check_room(a1)
        if self.group.size == 1:
            return tokens
        if most is not None and not self.equal_num_tokens:
            return most
        facts = a1.new_full((1,), tokens, dtype=torch.float64)
        if self.equal_num_tokens or torch.compiler.is_compiling() or _is_capturing(a1):
            torch._assert_async(
                (self.group.all_gather(facts) == tokens).all(),
                "hidden_states must have the same number of tokens on every rank with "
                "equal_num_tokens, and in compiled and captured calls unless max_num_tokens is "
                "given",
            )
            return tokens
        if given is not None:
            facts = torch.cat([facts, given.reshape(1).double()])
        of_ranks = self.group.all_gather(facts[None]).tolist()
        if given is not None and len({scale for _, scale in of_ranks}) > 1:
            raise ValueError(
                "a1_scale (or a1_gscale) must be the same number on every rank, got "
                f"{[scale for _, scale in of_ranks]}"
            )
        return max(1, *(int(row[0]) for row in of_ranks))


def _bytes_of_fp8(rows: Tensor) -> Tensor:
    """8-bit floats as uint8, which every backend sends."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


def _padded(x: Tensor, size: int, fill: int = 0) -> Tensor:
    """``(T, n)`` to ``(size, n)``."""
    if not torch.compiler.is_compiling() and x.shape[0] == size:
        return x
    return torch.cat([x, x.new_full((size - x.shape[0], x.shape[1]), fill)])


def _packed(parts: list[Tensor], size: int) -> Tensor:
    """Rows of several tensors side by side as bytes: ``(size, bytes)``.

    The second tensor is ids, which are -1 in padding; the other tensors are zeros there.
    """
    padded = [_padded(_bytes_of_fp8(p), size, -1 if i == 1 else 0) for i, p in enumerate(parts)]
    return torch.cat([part.contiguous().view(torch.uint8) for part in padded], 1)


def _unpacked(packed: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """The tensors of `_packed`, with as many rows as there are now."""
    widths = [part.shape[1] * part.dtype.itemsize for part in parts]
    pieces = packed.split(widths, 1)
    return [piece.contiguous().view(part.dtype) for piece, part in zip(pieces, parts, strict=True)]


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
