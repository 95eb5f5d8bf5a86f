"""Functional collectives among the ranks of a layer, which trace and can be captured."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_ops import checks
from moe_ops.parallel import FusedMoEParallelConfig
from moe_ops.parallel.agreement import gather_texts, process_group


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

    @classmethod
    def of_layer(cls, parallel: FusedMoEParallelConfig, group: Any) -> RankGroup:
        """Make the ranks that share a layer from a group, or from a mesh of the model's groups.

        Args:
            parallel: how the ranks share the layer.
            group: as for `resolve`; None: all processes, which need not exist yet. A `DeviceMesh`
                of several named dimensions stands for all its ranks, such as ``("dp", "tp")``.

        Raises:
            TypeError, ValueError: as `resolve`.
        """
        if group is None:
            return cls(parallel.layer_size)
        if isinstance(group, cls):
            return group
        if isinstance(group, DeviceMesh) and group.ndim > 1:
            if group.mesh_dim_names is None:
                raise ValueError("tp_group must have mesh_dim_names as a DeviceMesh, got none")
            group = group._flatten()  # the same group for every layer
        return cls.of(parallel.layer_size, process_group(group, "tp_group"))

    def check(self, name: str, parallel: FusedMoEParallelConfig) -> None:
        """Check that the group named ``name``, if it exists, has the ranks that a layer needs.

        Raises:
            ValueError: another number of ranks, or another rank of this process than the layer's.
        """
        wanted, actual = parallel.layer_size, self.size_and_rank()
        if self.size != wanted:
            raise ValueError(f"{name} must have {wanted} ranks, got {self.size}")
        if actual is None:
            return
        size, rank = actual
        if size != wanted:
            every = " (all processes)" if self.name is None else ""
            raise ValueError(f"{name} must have {wanted} ranks, got {size}{every}")
        if rank != parallel.layer_rank:
            raise ValueError(
                f"{name} must have this process as rank {parallel.layer_rank}, replica by replica, "
                f"got rank {rank}"
            )

    def size_and_rank(self) -> tuple[int, int] | None:
        """Return the group's number of ranks and this process's rank; None: no group exists yet."""
        if not dist.is_initialized():
            return None
        ranks = self.process_group()
        return ranks.size(), ranks.rank()

    def gather_texts(self, text: str, device: torch.device) -> list[str]:
        """Return the texts of all ranks, in the order of ranks; the host waits.

        Args:
            text: this rank's.
            device: where texts travel: the CPU for gloo, this rank's GPU for NCCL.

        Raises:
            ValueError: ``torch.distributed`` is not initialized.
        """
        self._name()  # raises
        return gather_texts(self.process_group(), device, text)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks into a fresh tensor."""
        if self.size == 1:
            return x
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(x, "sum", self._name()))

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate ``(T, ..)`` of all ranks to ``(size * T, ..)``."""
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
        splits = (received or sent, sent, self._name())
        return self._one_at_a_time(functional.all_to_all_single(x.contiguous(), *splits))

    def _one_at_a_time(self, started: Tensor) -> Tensor:
        """Wait at once on a CPU: two collectives that end together may crash the process.

        Both worker threads of gloo write the name of what they finished without a lock (PyTorch
        2.13, ``ProcessGroupGloo::runLoop``).
        """
        return self.wait(started) if started.device.type == "cpu" else started

    def gather_among(self, x: Tensor, peers: range) -> Tensor:
        """Concatenate ``(T, ..)`` of some ranks to ``(len(peers) * T, ..)``.

        All ranks of the group call this, each with the peers that it is one of. Groups of peers
        may have different T.
        """
        if len(peers) == 1:
            return x
        rows = [x.shape[0] if rank in peers else 0 for rank in range(self.size)]
        sent = x.repeat(len(peers), *[1] * (x.dim() - 1))
        functional = torch.ops._c10d_functional
        return self.wait(functional.all_to_all_single(sent, rows, rows, self._name()))

    def wait(self, x: Tensor) -> Tensor:
        """Let the current stream (on a CPU: the caller) wait for a collective, and return it."""
        return x if self.size == 1 else torch.ops._c10d_functional.wait_tensor(x)

    def process_group(self) -> dist.ProcessGroup:
        """Return the process group, which must exist."""
        return process_group(self.name)

    def _name(self) -> str:
        if self.name is not None:
            return self.name
        if dist.group.WORLD is None:
            raise ValueError(
                f"tp_group must be given or torch.distributed initialized to sum over {self.size} "
                "ranks, got neither"
            )
        return dist.group.WORLD.group_name


def check_expert_ranks(expert_ranks: Tensor, ranks: int) -> None:
    """Raise TypeError or ValueError unless these are int32 ``(E,)``, each one of the ranks."""
    checks.tensor("expert_ranks", expert_ranks, 1, (torch.int32,))
    wrong = expert_ranks[(expert_ranks < 0) | (expert_ranks >= ranks)]
    if wrong.numel():
        raise ValueError(f"expert_ranks must be in 0..{ranks - 1}, got {int(wrong[0])}")


def check_equal_scales(of_ranks: list[float]) -> None:
    """Raise ValueError if the ranks have different static scales."""
    if len(set(of_ranks)) > 1:
        raise ValueError(
            f"a1_scale (or a1_gscale) must be the same number on every rank, got {of_ranks}"
        )
