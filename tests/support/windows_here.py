"""Windows of ranks that all run in this process, one after another, and calls with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.pipeline.exchange.memory import allocate_here
from moe_ops.windows import MOST_PROGRAMS, WindowLayout, Windows

UNTOUCHED = 0xA5
"""What `Ranks.clear` fills rows, scales and sums with."""
DONE = 2**20
"""Steps that no program of a test reaches."""


class Ranks(NamedTuple):
    """Ranks whose kernels never wait for each other, because flags say that all have written."""

    windows: list[Windows]

    @classmethod
    def of(cls, ranks: int, device: Any, *sizes: int) -> Ranks:
        """Allocate windows; ``sizes`` are the fields of `WindowLayout` after ``ranks``."""
        return cls(allocate_here(WindowLayout(ranks, *sizes), torch.device(device), 5.0))

    @property
    def layout(self) -> WindowLayout:
        return self.windows[0].layout

    def clear(self, rows_per_rank: int) -> None:
        """Fill rows, scales and sums with `UNTOUCHED`."""
        at = self.layout.parts
        for window in self.windows:
            window.own[at.scales : at.end] = UNTOUCHED
            self._part(window, at.sizes).fill_(rows_per_rank)

    def send(self, rank: int, *arguments: Any) -> tuple[Tensor, ...]:
        """`symmetric_send`; the arguments without those of the windows."""
        self._all_have_written()
        window, (*tensors, rows, experts, on_input, quant) = self.windows[rank], arguments
        own = (window.peers, window.state, rows, experts, on_input, quant)
        return ops.symmetric_send(*tensors, *own)

    def send_batched(self, rank: int, *arguments: Any) -> tuple[Tensor, ...]:
        """`symmetric_send_batched`; the arguments without those of the windows."""
        self._all_have_written()
        window, (*tensors, rows, on_input, quant) = self.windows[rank], arguments
        own = (window.peers, window.state, rows, on_input, quant)
        return ops.symmetric_send_batched(*tensors, *own)

    def send_back(self, rank: int, sums: Tensor, expert_ranks: Any, top_k: int) -> Tensor:
        """`symmetric_return`."""
        self._all_have_written()
        window = self.windows[rank]
        return ops.symmetric_return(sums, expert_ranks, window.peers, window.state, top_k)

    def _all_have_written(self) -> None:
        at = self.layout.parts
        for window in self.windows:
            for flags in (at.sent, at.returned):
                self._part(window, flags, MOST_PROGRAMS).fill_(DONE)

    def _part(self, window: Windows, offset: int, *more: int) -> Tensor:
        return window.part(offset, torch.int32, self.layout.ranks, *more)


def alone(device: Any) -> Ranks:
    """One rank with room for 8 tokens of 32 float32 and 2 slots."""
    return Ranks.of(1, device, 8, 32, 2, 4)
