"""Processes that form a group of ranks, and the part of a problem that a rank holds."""

from __future__ import annotations

import faulthandler
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import moe_ops


def spawn(check: Callable[..., None], ranks: int, *arguments: Any, backend: str = "gloo") -> None:
    """Run ``check(rank, ranks, *arguments)`` in a process for each rank, in one group.

    Processes are forked from a server that has imported PyTorch once. With ``nccl`` each has a GPU
    of its own: see `device`. Where kernels are interpreted, they are so here.
    """
    with started(check, ranks, *arguments, backend=backend) as context:
        while not context.join():
            pass


@contextmanager
def started(
    check: Callable[..., None], ranks: int, *arguments: Any, backend: str = "gloo"
) -> Iterator[Any]:
    """The processes of `spawn`, which the caller joins."""
    multiprocessing.set_forkserver_preload(["torch", "moe_ops", "pytest", "ranks", "modular"])
    with tempfile.TemporaryDirectory() as folder:
        given = (check, ranks, backend, f"{folder}/store", arguments)
        yield multiprocessing.start_processes(
            _run, given, nprocs=ranks, join=False, start_method="forkserver"
        )


def _run(
    rank: int, check: Any, ranks: int, backend: str, store: str, arguments: tuple[Any, ...]
) -> None:
    faulthandler.enable()  # a rank that crashes says where
    importlib.import_module("conftest")  # kernels are interpreted here too, where they are
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store, wait = f"file://{store}", timedelta(seconds=60)  # a rank that waits for nobody fails
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store, wait, world_size=ranks, rank=rank)
    check(rank, ranks, *arguments)
    dist.destroy_process_group()


def device() -> torch.device:
    """This rank's device."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def mine(counts: Sequence[int], rank: int) -> slice:
    """The tokens of a rank, of which rank r has ``counts[r]``."""
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def experts_of(rank: int, ranks: int, num_experts: int) -> tuple[slice, Tensor]:
    """The experts that a rank holds, and its ``expert_map``."""
    _, expert_map, _ = moe_ops.determine_expert_map(ranks, rank, num_experts)
    held = (expert_map >= 0).nonzero().flatten()
    return slice(int(held[0]), int(held[-1]) + 1), expert_map


def config_of(config: moe_ops.FusedMoEQuantConfig, held: slice) -> moe_ops.FusedMoEQuantConfig:
    """The quantization of some experts' weights; what belongs to activations is the same."""
    changes = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Tensor) and field.name[0] in "wg":
            changes[field.name] = value[held]
    return replace(config, **changes)


def of_all_ranks(x: Tensor, ranks: int) -> Tensor:
    """Concatenate ``(T, ..)`` of ranks with different T."""
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, x)
    return torch.cat(found)
