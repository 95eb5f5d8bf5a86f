"""Functional collectives among the ranks of a layer, which trace and can be captured."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.parallel.agreement import process_group
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

    @classmethod
    def resolve(cls, group: Any) -> RankGroup:
        """Make the value from any form of a group, with its true size.

        Args:
            group: a `torch.distributed` process group, the name of one, a 1-D `DeviceMesh`, None
                (all processes), or a `RankGroup`, which is taken as it is.

        Raises:
            TypeError: none of these.
            ValueError: a name that no group has, a group that this process is not in, a mesh of
                several dimensions, or None before `torch.distributed` is initialized.
        """
        if isinstance(group, cls):
            return group
        ranks = process_group(group)
        return cls.of(ranks.size(), ranks)

    def check_size(self, name: str) -> None:
        """Raise ValueError if the group named ``name`` exists and has another number of ranks."""
        if not dist.is_initialized():
            return
        ranks = RankGroup.resolve(self.name).size
        if ranks != self.size:
            raise ValueError(f"{name} must have {self.size} ranks, got {ranks}")

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
        return self.wait(self.start_all_gather(x))

    def start_all_gather(self, x: Tensor) -> Tensor:
        """Start `all_gather`; the result may be read after `wait`."""
        if self.size == 1:
            return x
        functional = torch.ops._c10d_functional
        return functional.all_gather_into_tensor(x.contiguous(), self.size, self._name())

    def start_exchange(self, x: Tensor) -> Tensor:
        """Start to send block r of ``(size * T, ..)`` to rank r, whose block comes back.

        The result may be read after `wait`.
        """
        if self.size == 1:
            return x
        blocks = [x.shape[0] // self.size] * self.size
        functional = torch.ops._c10d_functional
        return functional.all_to_all_single(x.contiguous(), blocks, blocks, self._name())

    def wait(self, x: Tensor) -> Tensor:
        """Let the current stream (on a CPU: the caller) wait for a collective, and return it."""
        return x if self.size == 1 else torch.ops._c10d_functional.wait_tensor(x)

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
