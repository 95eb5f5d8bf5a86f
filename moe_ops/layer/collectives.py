"""Collectives among the ranks of a layer: functional ones, which trace and are captured."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.pipeline.checking import may_wait


class RankGroup(NamedTuple):
    """The ranks that share a layer's experts or their rows; a value that can be pickled."""

    size: int = 1
    """Number of ranks; a single rank communicates nothing."""
    name: str | None = None
    """Name of the process group; None: all processes."""

    @classmethod
    def of(cls, size: int, group: Any = None) -> RankGroup:
        """Make the value from a `torch.distributed` process group; None: all processes."""
        return cls(size, None if group is None else group.group_name)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks into a fresh tensor."""
        if self.size == 1:
            return x
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(x, "sum", self._name()))

    def all_gather(self, x: Tensor | None) -> Any:
        """Concatenate ``(T, ..)`` of all ranks to ``(size * T, ..)``; None stays None.

        A bool tensor is sent as uint8, which every backend supports.
        """
        if self.size == 1 or x is None:
            return x
        if x.dtype == torch.bool:
            return self.all_gather(x.to(torch.uint8)).bool()
        functional = torch.ops._c10d_functional
        gathered = functional.all_gather_into_tensor(x, self.size, self._name())
        return functional.wait_tensor(gathered)

    def check_equal_counts(self, tokens: Tensor) -> None:
        """Check that all ranks have the same number of tokens, as `all_gather` needs.

        On a CPU the counts are compared in every eager call, because gloo would abort the process.
        On a GPU a comparison would make every call wait for the device, so it is made within
        `moe_ops.checking` only; elsewhere ranks with different counts deadlock in NCCL.

        Raises:
            ValueError: the counts differ; on every rank.
        """
        if self.size == 1 or not may_wait(tokens):
            return
        counts = self.all_gather(torch.tensor([tokens.shape[0]], device=tokens.device)).tolist()
        if len(set(counts)) > 1:
            raise ValueError(
                "hidden_states must have the same number of tokens on every rank with "
                f"is_sequence_parallel (pad them to the largest number), got {counts}"
            )

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum ``(size * T, ..)`` over the ranks and return this rank's ``T`` rows."""
        if self.size == 1:
            return x
        functional = torch.ops._c10d_functional
        summed = functional.reduce_scatter_tensor(x, "sum", self.size, self._name())
        return functional.wait_tensor(summed)

    def _name(self) -> str:
        if self.name is not None:
            return self.name
        if dist.group.WORLD is None:
            raise ValueError(
                f"tp_group must be given or torch.distributed initialized to sum over {self.size} "
                "ranks, got neither"
            )
        return dist.group.WORLD.group_name
