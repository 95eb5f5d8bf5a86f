"""Processes that form a group of ranks, and the part of a problem that a rank holds."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from legs import INTERPRETED
from torch import Tensor

import moe_ops

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
BACKENDS = ["gloo", pytest.param("nccl", marks=two_gpus)]
"""Backends of tests with two ranks."""
BACKENDS_OF_FOUR = ["gloo", pytest.param("nccl", marks=four_gpus)]
"""Backends of tests with four ranks."""
GROUPS = [
    (2, "gloo"),
    (4, "gloo"),
    pytest.param(2, "nccl", marks=two_gpus),
    pytest.param(4, "nccl", marks=four_gpus),
]
"""Numbers of ranks and backends of tests with two or four ranks."""
PATIENCE = 60
"""Seconds after which a rank that waits for another one in a collective fails. On busy cores a rank
that compiles has kept others waiting for more than 20."""
PRELOADED = ["torch", "moe_ops", "conftest", "ranks", "modular"]
if not INTERPRETED:  # there nothing is compiled
    PRELOADED += [
        "torch._functorch.aot_autograd", "torch._dynamo.testing", "torch._inductor.pattern_matcher",
        "sympy.tensor.tensor", "tiny_transformers",
    ]  # fmt: skip
"""What the server of forked ranks imports once, so that no rank does. Absent modules do no harm."""


def spawn(check: Callable[..., None], ranks: int, *arguments: Any, backend: str = "gloo") -> None:
    """Run ``check(rank, ranks, *arguments)`` in a process for each rank, in one group.

    Processes on the CPU are forked from a server that has imported `PRELOADED` once. With ``nccl``
    each has a GPU of its own: see `device`. Where kernels are interpreted, they are so here.
    """
    with started(check, ranks, *arguments, backend=backend) as context:
        while not context.join():
            pass


@contextmanager
def started(
    check: Callable[..., None], ranks: int, *arguments: Any, backend: str = "gloo"
) -> Iterator[Any]:
    """The processes of `spawn`, which the caller joins."""
    method = "forkserver" if backend == "gloo" else "spawn"  # CUDA does not work in a fork
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        given = (check, ranks, backend, f"{folder}/store", arguments)
        with pytest.MonkeyPatch.context() as patch:
            # Before Python 3.12.9 and 3.13.3 the server has no other path when it imports.
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            if backend == "gloo":  # Dynamo and transformers use a GPU as soon as they see one
                patch.setenv("CUDA_VISIBLE_DEVICES", "")
            context = multiprocessing.start_processes(
                _run, given, nprocs=ranks, join=False, start_method=method
            )
        yield context


def _run(
    rank: int, check: Any, ranks: int, backend: str, store: str, arguments: tuple[Any, ...]
) -> None:
    faulthandler.enable()  # a rank that crashes says where
    # Kernels are interpreted here too, where they are.
    importlib.import_module("conftest").collect_rarely()
    torch.set_num_threads(1)
    if backend == "gloo":
        dist.Backend.register_backend(backend := "gloo_one_thread", _gloo, devices=["cpu"])
    store, wait = f"file://{store}", timedelta(seconds=PATIENCE)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        os.environ["LOCAL_RANK"] = str(rank)  # by which transformers chooses a GPU
    dist.init_process_group(backend, store, wait, world_size=ranks, rank=rank)
    check(rank, ranks, *arguments)
    dist.destroy_process_group()


def compiled_on(number: int, call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``call`` compiled on one rank, with ``number`` counted around; as it is on the others.

    Graphs of ranks differ in constants, and each takes seconds: ranks take turns. An eager rank
    takes part in the same exchanges.
    """
    here = dist.get_rank() == number % dist.get_world_size()
    return torch.compile(call, fullgraph=True, **options) if here else call


def device() -> torch.device:
    """This rank's device."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def here() -> torch.device:
    """This rank's device; the CPU in a process without ranks."""
    return device() if dist.is_initialized() else torch.device("cpu")


def _gloo(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    """A gloo group with one worker thread, which `init_process_group` has no option for.

    By default there are two. Both write the name of the collective that they finished to the same
    `std::string` without a lock (PyTorch 2.13, `ProcessGroupGloo::runLoop`). If two all-gathers end
    at the same time, both threads free the same memory, and a later malloc crashes: 200 all-gathers
    at a time on 3 ranks end with SIGSEGV or SIGABRT within a minute.
    """
    options = dist.ProcessGroupGloo._Options()
    options._threads, options._timeout = 1, timeout
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    return dist.ProcessGroupGloo(store, rank, ranks, options)


def mine(counts: Sequence[int], rank: int) -> slice:
    """The tokens of a rank, of which rank r has ``counts[r]``."""
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def experts_of(rank: int, ranks: int, num_experts: int) -> tuple[slice, Tensor]:
    """The experts that a rank holds, and its ``expert_map``."""
    _, expert_map, _ = moe_ops.parallel.determine_expert_map(ranks, rank, num_experts)
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
