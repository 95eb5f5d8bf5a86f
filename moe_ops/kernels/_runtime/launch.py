"""Launching without Triton's per-call argument analysis.

Triton inspects every argument of every launch (about 20 microseconds for a GEMM kernel) to find
the binary that fits. Here binaries are cached by what that inspection looks at: dtypes, devices,
16-byte alignment and the values of specialised integers. Only the first launch of a combination
goes through Triton. Later launches pass the arguments straight to the binary, and skip the launch
hooks unless somebody (a profiler) has added one. Kernels are launched with programmatic dependent
launch: see `dependent`, which also says how to turn it off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.kernels._runtime.cache_keys import compute_cache_key
from moe_ops.kernels._runtime.dependent import launch_options


class Binary:
    """A compiled kernel and its launch function."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.boxes: list[Any] = []
        """What the launch function says of each TMA descriptor, where it takes them in parts."""

    @cached_property
    def start(self) -> tuple[Any, tuple[Any, ...], bool]:
        """The launch function, its leading arguments, and whether it takes addresses for tensors.

        Triton 3.6's CUDA launcher computes at every launch how much scratch memory to allocate. A
        kernel that needs none skips this launcher and calls the C function behind it. Given
        addresses instead of tensors, the C function does not query the driver about each. And
        given TMA descriptors in parts, nobody takes them apart at every launch.
        """
        run = self.compiled.run
        function, metadata = self.compiled.function, self.compiled.packed_metadata
        no_hooks = (None, None, None)
        is_direct = triton.__version__.startswith("3.6.") and type(run).__name__ == "CudaLauncher"
        if not is_direct or run.global_scratch_size or run.profile_scratch_size:
            return run, (function, metadata, *no_hooks), False
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        launch, self.boxes = _unwrapped(run.launch)
        return launch, (function, *flags, None, None, metadata, *no_hooks), True

    def parts(self, values: list[Any], places: list[int]) -> list[Any]:
        """``values`` with the descriptors at ``places`` in parts, as the launch function wants."""
        flat, at = [], 0
        for place, box in zip(places, self.boxes, strict=True):
            descriptor = values[place]
            pieces = descriptor.__dict__.get("parts")
            if pieces is None:
                pieces = descriptor.__dict__["parts"] = make_tensordesc_arg(descriptor, box)
            flat += values[at:place]
            flat += pieces
            at = place + 1
        return flat + values[at:]


def _unwrapped(launch: Any) -> tuple[Any, list[Any]]:
    """The C function behind one that takes TMA descriptors apart, and what it knows of each."""
    names = launch.__code__.co_freevars if hasattr(launch, "__code__") else ()
    if not {"launcher", "tensordesc_meta"} <= set(names):
        return launch, []
    closed = dict(zip(names, launch.__closure__, strict=True))
    boxes = closed["tensordesc_meta"].cell_contents
    return (launch, []) if None in boxes else (closed["launcher"].cell_contents, boxes)


COMPILED: dict[tuple, Binary] = {}
"""The binary of each combination of arguments. Never evicted: CUDA graphs refer to its code."""

RUNTIME = triton.knobs.runtime
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The current stream, as Triton's driver finds it. None in a build without CUDA, which can only
compile kernels."""
_INT32 = 2**31 - 1
_COMPILE_ONLY: ContextVar[bool] = ContextVar("compile_only", default=False)


@contextmanager
def compile_only() -> Iterator[None]:
    """Context manager: launches only compile their kernel, into Triton's cache on disk.

    Tensors may be fake ones. For processes that launch nothing: a kernel that was launched before
    is launched again.
    """
    token = _COMPILE_ONLY.set(True)
    try:
        yield
    finally:
        _COMPILE_ONLY.reset(token)


class Launch:
    """A kernel with its constexpr arguments bound: call it with a grid and the other arguments.

    Made once for each set of constants (by a cached function), called often.

    Args:
        kernel: a ``triton.jit`` function whose constexpr parameters come last.
        **constants: every constexpr parameter, and Triton's launch options.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel, self.constants = kernel, constants
        self.interpreted = not isinstance(kernel, triton.runtime.JITFunction)
        if not self.interpreted:
            if not RUNTIME.interpret:  # else a Gluon kernel, which the interpreter cannot run
                compute_cache_key(kernel)
            self.counted = [p.do_not_specialize for p in kernel.params if not p.is_constexpr]
            # A binary's argument list has the constants too, at the places of their parameters.
            self.tail = [constants[p.name] for p in kernel.params if p.is_constexpr]

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch with tensors, TMA descriptors, integers or None in order, the first a tensor.

        Tensors are on the device of the first, or in host memory that it reads.
        """
        if self.interpreted:
            self.kernel[grid](*arguments, **self.constants)
            return
        device = arguments[0].get_device()
        seen: list[Any] = [self, device]
        values: list[Any] = []
        boxes: list[int] = []
        for argument, counted in zip(arguments, self.counted):  # noqa: B905 (strict is slower)
            kind = type(argument)
            if kind is int:
                seen.append(argument > _INT32 if counted else argument)
                values.append(argument)
            elif argument is None:
                seen.append(None)
                values.append(None)
            elif kind is TensorDescriptor:  # the binary does not depend on its sizes
                seen.append(argument.base.dtype)
                boxes.append(len(values))
                values.append(argument)
            else:
                pointer = argument.data_ptr()
                seen += (argument.dtype, pointer & 15)
                values.append(pointer)
        key = tuple(seen)
        binary = COMPILED.get(key)
        if binary is None:
            self._compile(key, grid, arguments)
            return
        x, y, z = (*grid, 1, 1)[:3]
        if RUNTIME.launch_enter_hook.calls or RUNTIME.launch_exit_hook.calls:
            binary.compiled[(x, y, z)](*arguments, *self.tail)
            return
        start, settings, by_pointer = binary.start
        operands = values if by_pointer else arguments
        stream = _current_stream(device)
        if by_pointer and binary.boxes:
            operands = binary.parts(values, boxes)
        start(x, y, z, stream, *settings, *operands, *self.tail)

    def _compile(self, key: tuple, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """The first launch of a combination of arguments, which goes through Triton."""
        options = launch_options() | self.constants
        if _COMPILE_ONLY.get():
            self.kernel.warmup(*arguments, grid=grid, **options)
            return
        COMPILED[key] = Binary(self.kernel[grid](*arguments, **options))
