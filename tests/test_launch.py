"""Launches past Triton's launcher give its C function what the launcher would."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402
from triton.backends.nvidia.driver import CudaLauncher  # noqa: E402

from moe_ops.kernels import launch  # noqa: E402
from moe_ops.kernels.launch import Binary  # noqa: E402


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
    start, settings, by_pointer = binary.start
    assert by_pointer == (scratch == 0 and triton.__version__.startswith("3.6."))
    start(1, 2, 3, 7, *settings, "a", 5)
    run(1, 2, 3, 7, 11, (4, 1, 0), None, None, None, "a", 5)
    assert calls[0] == calls[1]
    assert binary.start is binary.start, "found once"


@pytest.mark.parametrize("by_pointer", (False, True))
def test_a_launch_passes_tensors_or_their_addresses(by_pointer, monkeypatch):
    """Remembered by dtype, device, alignment and value; a number of things is no value."""

    @triton.jit(do_not_specialize=["count"])
    def kernel(x, y, size, count, N: triton.language.constexpr):
        pass

    if not isinstance(kernel, triton.runtime.JITFunction):
        pytest.skip("interpreted")
    calls, first = [], []

    def record(*arguments):
        calls.append(arguments)

    monkeypatch.setattr(launch, "COMPILED", {})
    monkeypatch.setattr(launch, "_current_stream", lambda device: 7)
    monkeypatch.setattr(
        triton.runtime.JITFunction,
        "__getitem__",
        lambda self, grid: lambda *a, **k: first.append(a),
    )
    monkeypatch.setattr(Binary, "start", (record, ("settings",), by_pointer))
    run = launch.Launch(kernel, N=16)
    x = torch.zeros(64)
    for y, size, count in ((x, 3, 5), (x, 3, 6), (None, 3, 5), (x[1:], 3, 5), (x, 4, 5)):
        run((2,), x, y, size, count)
    assert len(first) == 4, "another count needs no other binary"
    run((2, 5), x, x, 3, 2**20)
    given = (x.data_ptr(), x.data_ptr()) if by_pointer else (x, x)
    for grid, numbers, call in zip(
        ((2, 1, 1), (2, 5, 1)), ((3, 6), (3, 2**20)), calls, strict=True
    ):
        assert call[:5] == (*grid, 7, "settings") and call[7:] == (*numbers, 16)
        assert all(a is b or a == b for a, b in zip(call[5:7], given, strict=True))
