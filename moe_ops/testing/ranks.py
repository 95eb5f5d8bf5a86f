"""Many ranks in one process, to test exchanges of tokens at sizes that no machine has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.pipeline.exchange.groups import RankGroup

Result = TypeVar("Result")


class SimulatedGroup(RankGroup):
    """The group that one simulated rank passes to an exchange; see `run_ranks`."""

    rank: int
    meeting: Meeting

    def size_and_rank(self) -> tuple[int, int]:
        """As `RankGroup.size_and_rank`."""
        return self.meeting.size, self.rank

    def gather_texts(self, text: str, device: torch.device) -> list[str]:
        """As `RankGroup.gather_texts`."""
        return self.meeting.collect(self.rank, "gather_texts", text)

    def process_group(self) -> Any:
        """Raise NotImplementedError: simulated ranks have neither processes nor windows."""
        raise NotImplementedError(
            "group must be a process group for windows (all2all_backend 'symmetric') and for "
            "rebalance_, got a SimulatedGroup"
        )

    def __deepcopy__(self, memo: Any) -> SimulatedGroup:
        """Return the group itself, as a copy of a layer has the same ranks."""
        return self

    def all_reduce(self, x: Tensor) -> Tensor:
        """As `RankGroup.all_reduce`; adds in the order of ranks."""
        return torch.stack(self.meeting.collect(self.rank, "all_reduce", x)).sum(0).to(x.dtype)

    def start_all_gather(self, x: Tensor) -> Tensor:
        """As `RankGroup.start_all_gather`, complete at once."""
        return torch.cat(self.meeting.collect(self.rank, "all_gather", x))

    def start_exchange(
        self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> Tensor:
        """As `RankGroup.start_exchange`, complete at once.

        Raises:
            ValueError: blocks that are not all rows of ``x``, or of which a rank expects another
                number of rows.
        """
        sent = sent or [x.shape[0] // self.size] * self.size
        if sum(sent) != x.shape[0]:
            raise ValueError(f"sent must sum to the rows of x = {x.shape[0]}, got {sent}")
        of_ranks = self.meeting.collect(self.rank, "all_to_all", x.split(sent))
        blocks = [blocks[self.rank] for blocks in of_ranks]
        rows = [block.shape[0] for block in blocks]
        if rows != (received or sent):
            raise ValueError(f"received must be the rows that ranks send, {rows}, got {received}")
        return torch.cat(blocks)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """As `RankGroup.reduce_scatter`; adds in the order of ranks."""
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def gather_among(self, x: Tensor, peers: range) -> Tensor:
        """As `RankGroup.gather_among`."""
        of_ranks = self.meeting.collect(self.rank, "gather_among", x)
        return torch.cat([of_ranks[peer] for peer in peers])

    def wait(self, x: Tensor) -> Tensor:
        """Return ``x``, which is complete."""
        return x


class Meeting:
    """Where ranks, each in a thread, exchange values; only one thread runs at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.brought: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.turn = threading.Lock()
        self.arrivals, self.ended = 0, False

    def collect(self, rank: int, collective: str, value: Any) -> list[Any]:
        """Bring a rank's value to a collective and return the values of all ranks.

        Raises:
            RuntimeError: ranks that have come to different collectives.
        """
        self.brought[rank] = (collective, value)
        self._meet()
        brought = list(self.brought)
        self._meet()  # nobody brings the next value before all have taken this one
        names = [name for name, _ in brought]
        if len(set(names)) > 1:
            raise RuntimeError(f"ranks must call the same collective, got {names}")
        return [value for _, value in brought]

    def end(self) -> None:
        """Let a rank end; if others wait for it, they fail."""
        self.ended = True
        if self.arrivals % self.size:
            self.barrier.abort()

    def _meet(self) -> None:
        if self.ended:
            raise threading.BrokenBarrierError
        self.arrivals += 1
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


def run_ranks(size: int, run: Callable[[int, SimulatedGroup], Result]) -> list[Result]:
    """Run ``run(rank, group)`` for each of ``size`` ranks in one process; returns their results.

    Every rank is a thread, and ``group`` stands for a process group wherever one is taken, as the
    ``group`` of an exchange or the ``tp_group`` of a layer is. Collectives are exact and complete
    at once. Ranks run one at a time, so a run is as deterministic as its ranks, and a GPU's stream
    is shared. Ranks see the caller's grad mode and context (`moe_ops.checking`). Compiled calls are
    not supported.

    Args:
        size: R.
        run: what a rank does.

    Returns:
        The results, by rank.

    Raises:
        ValueError: ``size`` below 1.
        RuntimeError: ranks that call different collectives, or of which one ends while others
            wait for it.
        Exception: the first error that a rank raises, by rank; the other ranks stop.
    """
    checks.at_least(1, size=size)
    meeting, grad = Meeting(size), torch.is_grad_enabled()
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def work(rank: int) -> None:
        group = SimulatedGroup(size)
        group.rank, group.meeting = rank, meeting
        with meeting.turn, torch.set_grad_enabled(grad):
            try:
                results[rank] = run(rank, group)
                meeting.end()
            except BaseException as error:
                errors[rank] = error
                meeting.barrier.abort()

    threads = [
        threading.Thread(target=copy_context().run, args=(work, rank), daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [error for error in errors if error is not None]
    for error in failures:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if failures:
        raise RuntimeError(
            f"ranks must call collectives equally often, got {len(failures)} waiting"
        )
    return results
