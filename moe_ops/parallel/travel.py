"""Moving experts between the ranks of a process group, inside the tensors that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from moe_ops.parallel.rounds import Copy, Round, Spread, plan_rounds

ALIGNMENT = 16
"""Every tensor's part of a row in a buffer begins at a multiple of this many bytes."""


class RowExchange:
    """Moves the rows of each layer's tensors between ranks, as bytes, in rounds.

    A row is one expert of a layer: its part of every tensor of that layer. The buffers hold
    ``2 * limit + 1`` rows of the layer with the largest rows: ``limit`` that are sent, ``limit``
    that are received, and one that is kept aside. Nothing else is allocated. Copies run on the
    current stream.

    Args:
        group: the ranks.
        spread: how rows are numbered over the ranks.
        weights: for every layer its tensors, with ``spread.rows`` rows each, all on one device.
        limit: the most rows that a rank sends, and the most that it receives, at a time.
        device: the device of the tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        spread: Spread,
        weights: Sequence[Sequence[Tensor]],
        limit: int,
        device: torch.device,
    ) -> None:
        self._group, self._spread, self._weights, self._limit = group, spread, weights, limit
        self._rank = group.rank()
        size = max((sum(map(_row_bytes, tensors)) for tensors in weights), default=0)
        buffers = torch.empty(2 * limit + 1, size, dtype=torch.uint8, device=device)
        self._outgoing, self._incoming = buffers[:limit], buffers[limit : 2 * limit]
        self._aside = buffers[2 * limit]

    def move(self, layer: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Turn a layer's placement ``old`` into ``new``; all ranks call this in the same order."""
        tensors = self._weights[layer]
        size = sum(map(_row_bytes, tensors))
        if size == 0:
            return
        rounds = plan_rounds(old, new, self._spread, self._limit)
        with torch.no_grad():
            for round_ in rounds:
                self._run(round_, tensors, size)
        if rounds:
            # Also where all rows stay: a backward pass that comes too late raises on all ranks, so
            # that none waits for the others in its exchange.
            increment_version(tensors)

    def _run(self, round_: Round, tensors: Sequence[Tensor], size: int) -> None:
        """Read all sources of a round, send and receive, then overwrite the targets."""
        if round_.aside is not None and self._is_here(round_.aside):
            self._pack(round_.aside, tensors, self._aside)
        arriving = [copy for copy in round_.copies if self._is_here(copy.target)]
        leaving = [
            copy
            for copy in round_.copies
            if self._is_here(copy.source) and not self._is_here(copy.target)
        ]
        incoming = dict(zip(arriving, self._incoming, strict=False))
        sources = dict.fromkeys(copy.source for copy in leaving)  # one may go to several ranks
        outgoing = dict(zip(sources, self._outgoing, strict=False))
        for source, buffer in outgoing.items():
            self._pack(source, tensors, buffer)
        messages = [self._send(copy, outgoing[copy.source][:size]) for copy in leaving]
        for copy, buffer in incoming.items():
            if self._is_here(copy.source):
                self._pack(copy.source, tensors, buffer)
            else:
                messages.append(self._receive(copy, buffer[:size]))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        for copy, buffer in incoming.items():
            for tensor, part in zip(tensors, _row_views(buffer, tensors), strict=True):
                tensor[copy.target % self._spread.rows].copy_(part)

    def _send(self, copy: Copy, message: Tensor) -> dist.P2POp:
        peer = dist.get_global_rank(self._group, self._spread.rank(copy.target))
        return dist.P2POp(dist.isend, message, peer, self._group, copy.target)

    def _receive(self, copy: Copy, message: Tensor) -> dist.P2POp:
        peer = dist.get_global_rank(self._group, self._spread.rank(copy.source))
        return dist.P2POp(dist.irecv, message, peer, self._group, copy.target)

    def _is_here(self, row: int) -> bool:
        return self._spread.rank(row) == self._rank

    def _pack(self, row: int, tensors: Sequence[Tensor], to: Tensor) -> None:
        """Copy a row of this rank, or the copy that is kept aside, to a buffer."""
        if row < 0:
            to.copy_(self._aside)
            return
        for tensor, part in zip(tensors, _row_views(to, tensors), strict=True):
            part.copy_(tensor[row % self._spread.rows])


def _row_bytes(tensor: Tensor) -> int:
    """Bytes of one row of a tensor in a buffer."""
    size = tensor.itemsize * tensor.shape[1:].numel()
    return -(-size // ALIGNMENT) * ALIGNMENT


def _row_views(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer of bytes, one for a row of each tensor."""
    parts, start = [], 0
    for tensor in tensors:
        shape = tensor.shape[1:]
        size = tensor.itemsize * shape.numel()
        parts.append(buffer[start : start + size].view(tensor.dtype).view(shape))
        start += _row_bytes(tensor)
    return parts
