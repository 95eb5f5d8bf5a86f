"""Windows of processes on one host: what happens without room for them, and what is left behind."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import spawn, started

from moe_ops import FusedMoEQuantConfig
from moe_ops.pipeline import SymmetricPrepareAndFinalize
from moe_ops.pipeline.exchange import memory
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.windows import WindowLayout

CPU = torch.device("cpu")
NAMED, EMPTY = 2, 4
"""Meetings of `memory._gathered` before which files have names, and before which they get room."""


def allocate(ranks, num_tokens=512):
    layout = WindowLayout(ranks, num_tokens, 64, 2, 4)
    return layout, memory.allocate(layout, RankGroup(ranks), CPU, 5.0)


def check_allocated(rank, ranks, folder):
    """An error on all ranks, with bytes and folder; then windows of zeros that ranks share."""
    memory.FOLDER = folder
    dist.barrier()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for broken in range(ranks):
        if rank == broken:  # as on a full file system
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limit[1]))
        size = WindowLayout(ranks, 512, 64, 2, 4).parts.end
        message = rf"{folder} must have room for a window of {size} bytes for each of {ranks} ranks"
        with pytest.raises(RuntimeError, match=rf"{message}.*on rank {broken}"):
            allocate(ranks)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert not os.listdir(folder)
        dist.barrier()
    gathered = memory._gathered
    if rank == 1:  # as on another host
        memory._gathered = lambda group, value: [
            f"{x}?" if isinstance(x, str) and "moe_ops_window" in x and r != rank else x
            for r, x in enumerate(gathered(group, value))
        ]
    with pytest.raises(RuntimeError, match=r"must share files in .*No such file.*on rank 1"):
        allocate(ranks)
    memory._gathered = gathered
    dist.barrier()
    layout, windows = allocate(ranks)
    assert not os.listdir(folder) and len(windows.keep) == ranks
    assert windows.own is windows.keep[rank] and not any(x.any() for x in windows.keep)
    dist.barrier()
    windows.own[0] = windows.own[-1] = rank + 1
    dist.barrier()
    assert [(int(x[0]), int(x[-1])) for x in windows.keep] == [(r + 1, r + 1) for r in range(ranks)]
    assert layout.parts.end == len(windows.own)
    dist.barrier()


def test_windows_have_room_or_raise_on_all_ranks(tmp_path):
    spawn(check_allocated, 3, str(tmp_path))


def shared(ranks, name="a"):
    layout = WindowLayout(ranks, 4, 64, 2, 4)
    return memory.allocate_shared(name, layout, RankGroup(ranks), CPU, 5.0)


def check_shared(rank, ranks):
    """Windows that one rank has freed, or replaced, are allocated anew on all ranks."""
    first, other = shared(ranks), shared(ranks, "b")
    assert shared(ranks) is first is not other
    old = first if rank == 0 else None  # as an error keeps a layer
    del first
    new = shared(ranks)
    assert new is not old and shared(ranks) is new and shared(ranks, "b") is other
    names = [None] * ranks
    dist.all_gather_object(names, (new.generation, other.generation))
    assert len({*names}) == 1 and new.generation != other.generation
    if rank == 1:
        memory._SHARED.clear()
        kept = memory.allocate_here(new.layout, CPU, 5.0)[rank]
        kept.generation = "another"
        memory._SHARED.update(dict.fromkeys([("a", new.layout, RankGroup(ranks), CPU, 5.0)], kept))
    assert shared(ranks) is not new


def test_ranks_decide_together_who_shares_windows():
    spawn(check_shared, 2)


def check_inference(rank, ranks):
    """Windows that are allocated in inference mode serve calls outside of it."""
    part = SymmetricPrepareAndFinalize(None, 4, 64, 2)
    x, weights = torch.randn(4, 64), torch.rand(4, 2)
    ids = torch.arange(8, dtype=torch.int32).view(4, 2)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            config = FusedMoEQuantConfig("unquantized")
            there = part.prepare(x, weights, ids, 8, None, False, config)
            assert torch.equal(there.a1q[4 * rank : 4 * rank + 4], x)
            del there


def test_windows_of_inference_mode():
    spawn(check_inference, 2)


def check_killed(rank, ranks, folder, meeting, killed):
    """Some ranks are killed before they meet for the nth time; the others raise."""
    memory.FOLDER = folder
    dist.barrier()
    gathered, meetings = memory._gathered, []

    def meet(group, value):
        meetings.append(value)
        if rank in killed and len(meetings) == meeting:
            os.kill(os.getpid(), signal.SIGKILL)
        return gathered(group, value)

    memory._gathered = meet
    with pytest.raises(RuntimeError):  # gloo's
        allocate(ranks)
    os._exit(7)


@pytest.mark.parametrize(("meeting", "killed"), [(NAMED, (1,)), (NAMED + 1, (0,)), (EMPTY, (0, 1))])
def test_ranks_that_are_killed_leave_no_files(meeting, killed, tmp_path):
    with started(check_killed, 2, str(tmp_path), meeting, killed) as context:
        for process in context.processes:
            process.join(60)
    codes = [-signal.SIGKILL if rank in killed else 7 for rank in range(2)]
    assert [process.exitcode for process in context.processes] == codes
    assert not list(Path(tmp_path).iterdir())
