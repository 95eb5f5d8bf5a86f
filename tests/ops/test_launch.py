"""Launches past Triton's launcher give its C function what the launcher would."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import INTERPRETED
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
import aot  # noqa: E402
import aot_launches  # noqa: E402
import triton  # noqa: E402
from triton.backends.nvidia import driver  # noqa: E402
from triton.backends.nvidia.driver import CudaLauncher  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

import moe_ops  # noqa: E402
from moe_ops.kernels._hopper import boxes, memory
from moe_ops.kernels._runtime import launch  # noqa: E402
from moe_ops.kernels._runtime.launch import Binary  # noqa: E402
from moe_ops.ops import STAGES  # noqa: E402


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
    if by_pointer:
        start(1, 2, 3, 7, *settings, "a", 5)
        run(1, 2, 3, 7, 11, (4, 1, 0), None, None, None, "a", 5)
        assert calls[0] == calls[1]
    else:
        assert start is run and settings == (11, (4, 1, 0), None, None, None)
    assert binary.start is binary.start, "found once"


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="how Triton 3.6 launches")
def test_descriptors_in_parts_are_what_triton_makes_of_them(monkeypatch):
    """And made once for each descriptor."""
    calls, made, box = [], [], {"swizzle": 3}

    def take_apart(descriptor, metadata):
        made.append((descriptor.name, metadata))
        return [f"map of {descriptor.name}", 5, 6]

    monkeypatch.setattr(driver, "make_tensordesc_arg", take_apart)
    monkeypatch.setattr(launch, "make_tensordesc_arg", take_apart)
    signature = {0: "*bf16", 1: "tensordesc<bf16[1]>", 2: "i32", 3: "tensordesc<bf16[1]>", 4: "i32"}
    wrapped = driver.wrap_handle_tensordesc(lambda *a: calls.append(a), signature, [box, box])
    run = CudaLauncher.__new__(CudaLauncher)
    run.launch, run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = wrapped, 1, False, True
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 16
    binary = Binary(SimpleNamespace(run=run, function=11, packed_metadata=(4, 1, 0)))
    start, settings, by_pointer = binary.start
    one, two = SimpleNamespace(name="one"), SimpleNamespace(name="two")
    values = [4096, one, 7, two, 8]
    assert by_pointer and binary.boxes == [box, box]
    start(1, 2, 3, 7, *settings, *binary.parts(values, [1, 3]))
    run(1, 2, 3, 7, 11, (4, 1, 0), None, None, None, *values)
    assert calls[0] == calls[1] and len(made) == 4
    binary.parts(values, [1, 3])
    assert len(made) == 4


@pytest.mark.parametrize("by_pointer", (False, True))
def test_a_launch_passes_tensors_or_their_addresses(by_pointer, monkeypatch):
    """Remembered by device, dtypes, alignment and values; a number of things is no value."""

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
    there = SimpleNamespace(data_ptr=x.data_ptr, dtype=x.dtype, get_device=lambda: 1)
    run((2,), there, there, 3, 5)
    assert len(first) == 5, "each device has a binary"
    run((2, 5), x, x, 3, 2**20)
    given = (x.data_ptr(), x.data_ptr()) if by_pointer else (x, x)
    for grid, numbers, call in zip(
        ((2, 1, 1), (2, 5, 1)), ((3, 6), (3, 2**20)), calls, strict=True
    ):
        assert call[:5] == (*grid, 7, "settings") and call[7:] == (*numbers, 16)
        assert all(a is b or a == b for a, b in zip(call[5:7], given, strict=True))


def fake_layer(scheme, tokens):
    """A call of `fused_experts` on fake CUDA tensors: 128 experts as large as a small model's."""
    experts, hidden, width, k = 128, 2048, 768, 8
    options, config = {"device": "cuda", "dtype": torch.bfloat16}, None
    w1, w2 = (torch.empty(experts, *s, **options) for s in ((2 * width, hidden), (hidden, width)))
    if scheme != "unquantized":
        w1, w2 = w1.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
        weight = moe_ops.get_scheme(scheme).weight
        shapes = (weight.weight_scale_shape(*w.shape) for w in (w1, w2))
        scales = [torch.empty(shape, device="cuda") for shape in shapes]
        config = moe_ops.FusedMoEQuantConfig(scheme, w1_scale=scales[0], w2_scale=scales[1])
    x, weights = torch.empty(tokens, hidden, **options), torch.empty(tokens, k, device="cuda")
    ids = torch.empty(tokens, k, device="cuda", dtype=torch.int32)
    return lambda: moe_ops.fused_experts(x, w1, w2, weights, ids, quant_config=config)


def python_calls(function):
    """How many functions of the library one call of ``function`` enters."""
    calls, previous = 0, sys.getprofile()

    def count(frame, event, _):
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and ("/moe_ops/" in name or "/fake_impls/" in name)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return calls


@pytest.mark.skipif(INTERPRETED, reason="what Triton does on a GPU")
@pytest.mark.filterwarnings("ignore")  # of addresses of fake tensors
@pytest.mark.parametrize(
    ("scheme", "tokens", "launches", "most_calls"),
    [
        ("unquantized", 1, 2, 64),
        ("unquantized", 64, 4, 104),
        ("fp8_block128", 64, 6, 190),
        ("fp8_channel", 64, 6, 190),
        ("unquantized", 4096, 5, 170),
        ("fp8_block128", 4096, 7, 255),
    ],
)
def test_a_layer_that_ran_before_asks_triton_nothing(
    scheme, tokens, launches, most_calls, monkeypatch
):
    """Triton looks at every argument of a launch, boxes of Hopper's kernels too, for 50 us each.

    Between launches Python calls are host time: 0.2 us each.
    """
    by_triton, started = [], []
    ran = mock.patch.object(
        triton.runtime.JITFunction, "run", lambda self, *a, **k: by_triton.append(self.__name__)
    )
    with aot.compiling(90, "NVIDIA H200"), ran, FakeTensorMode(), aot.OnKernels():
        monkeypatch.setattr(launch, "COMPILED", {})
        monkeypatch.setattr(launch, "_current_stream", lambda device: 7)
        monkeypatch.setattr(Binary, "start", (lambda *a: started.append(a), (), True))
        layer = fake_layer(scheme, tokens)
        layer()
        assert len(by_triton) == launches
        by_triton.clear()
        calls = python_calls(layer)
        assert not by_triton and len(started) == launches
    assert calls <= most_calls


def test_descriptors_are_remembered_by_place_and_sizes(monkeypatch):
    """What lies at an address may change; sizes, strides and dtypes there make another one."""
    made = []

    def make(x):
        made.append(x)
        return len(made)

    known, x = boxes.Boxes(make), torch.zeros(8, 4)
    others = (x[:4], x.view(4, 8), x.t(), x.view(torch.int32), x[1:])
    assert [known.of(y) for y in (x, *others, x, *others)] == [*range(1, 7)] * 2
    monkeypatch.setattr(boxes, "MOST", 6)
    assert known.of(x[2:]) == 7 and known.of(x) == 8, "full: it began anew"


def test_shared_memory_is_reinterpreted_by_the_name_that_gluon_has():
    """Kernels from Triton's cache do not show it: what Triton calls is no part of their keys."""
    assert hasattr(gl.shared_memory_descriptor, memory.METHOD)
    shared = SimpleNamespace(**{memory.METHOD: lambda *given, _semantic: given})
    assert memory.reinterpret(shared, "f4", [2], None, _semantic=object()) == ("f4", [2], None)


@pytest.mark.skipif(INTERPRETED, reason="what Triton does on a GPU")
@pytest.mark.filterwarnings("ignore")
def test_an_absent_operand_is_none():
    """A kernel without a scale, a routing weight or a counter gets None, not another operand."""
    wrong = set()
    of_operators = aot_launches.launch_samples(STAGES)
    for run in (of_operators, aot_launches.launch_more, aot_launches.launch_early):
        for name, arguments, _ in aot.launched(90, run):
            operands = [id(x) for x in arguments if x is not None and type(x) is not int]
            if len(set(operands)) < len(operands):
                wrong.add(name)
    assert not wrong
