"""Launches past Triton's launcher give its C function what the launcher would."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from triton.backends.nvidia.driver import CudaLauncher

from moe_ops.kernels.launch import Binary


@pytest.mark.parametrize("scratch", (0, 128))
def test_the_c_function_gets_what_the_launcher_gives_it(scratch, monkeypatch):
    run = CudaLauncher.__new__(CudaLauncher)
    calls = []
    run.launch = lambda *arguments: calls.append(arguments)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
    run.global_scratch_size, run.profile_scratch_size = scratch, 0
    run.global_scratch_align = run.profile_scratch_align = 16
    monkeypatch.setattr(
        "triton.runtime._allocation._allocator",
        SimpleNamespace(get=lambda: lambda size, align, stream: ("memory", size, align, stream)),
    )
    binary = Binary(SimpleNamespace(run=run, function=11, packed_metadata=(4, 1, 0)))
    start, settings = binary.start
    start(1, 2, 3, 7, *settings, "a", 5)
    run(1, 2, 3, 7, 11, (4, 1, 0), None, None, None, "a", 5)
    assert calls[0] == calls[1]
    assert binary.start is binary.start, "found once"
