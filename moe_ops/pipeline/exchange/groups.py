"""Functional collectives among the ranks of a layer, which trace and can be captured."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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
        if group is None:
            if not dist.is_initialized():
                raise ValueError(
                    "group must be given, or torch.distributed initialized, got neither"
                )
            group = dist.group.WORLD
        elif isinstance(group, str):
            group = _group_of_name(group)
        elif isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a DeviceMesh of 1 dimension, got {group.ndim}")
            group = group.get_group()
        elif group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group must be one that this process is in, got NON_GROUP_MEMBER")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "group must be a ProcessGroup, its name, a DeviceMesh or a RankGroup, got "
                f"{type(group).__name__}"
            )
        return cls.of(group.size(), group)

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
        started = functional.all_gather_into_tensor(x.contiguous(), self.size, self._name())
        return self._one_at_a_time(started)

    def start_exchange(
        self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> Tensor:
        """Start to send block r of the rows of ``x`` to rank r, whose block comes back.

        The result may be read after `wait`.

        Args:
            x: ``(rows, ..)``, the blocks of rank 0, 1, ..
            sent: rows of each block; None: ``rows / size`` each.
            received: rows that each rank sends to this one; None: as ``sent``.
        """
        if self.size == 1:
            return x
        sent = sent or [x.shape[0] // self.size] * self.size
        functional = torch.ops._c10d_functional
        given = (received or sent, sent, self._name())
        return self._one_at_a_time(functional.all_to_all_single(x.contiguous(), *given))

    def _one_at_a_time(self, started: Tensor) -> Tensor:
        """Wait at once on a CPU: two collectives that end together may crash the process.

        Both worker threads of gloo write the name of what they finished without a lock (PyTorch
        2.13, ``ProcessGroupGloo::runLoop``).
        """
        return self.wait(started) if started.device.type == "cpu" else started

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

    def process_group(self) -> Any:
        """Return the process group, which must exist."""
        return dist.group.WORLD if self.name is None else _group_of_name(self.name)

    def _name(self) -> str:
        if self.name is not None:
            return self.name
        if dist.group.WORLD is None:
            raise ValueError(
                f"tp_group must be given or torch.distributed initialized to sum over {self.size} "
                "ranks, got neither"
            )
        return dist.group.WORLD.group_name


def _group_of_name(name: Any) -> Any:
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(f"group must be the name of a process group, got {name!r}") from error
