"""Launching without Triton's per-call argument analysis.

Triton inspects every argument of every launch (about 20 microseconds for a GEMM kernel) to find
the binary that fits. Here the binary is remembered under what that inspection looks at: dtypes,
devices, 16-byte alignment and the values of specialised integers. Only the first launch of a
combination goes through Triton; later ones hand the same arguments to its binary, past the launch
hooks where nobody (a profiler) has added one. A kernel may be launched before the one before it
ends: see `dependent`, which also tells how to turn that off.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.kernels._runtime.cache_keys import compute_cache_key
from moe_ops.kernels._runtime.dependent import launch_options


class Binary:
    """A compiled kernel, and how it is started."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    @cached_property
    def start(self) -> tuple[Any, tuple[Any, ...], bool]:
        """What starts it, what that takes before the kernel's arguments, whether it takes pointers.

        Triton 3.6's launcher for CUDA first asks, at every launch, how much scratch memory to
        allocate: that of a kernel without any is passed by, for the C function behind it. That one
        takes addresses for tensors, and then does not ask the driver about each.
        """
        run = self.compiled.run
        function, metadata = self.compiled.function, self.compiled.packed_metadata
        no_hooks = (None, None, None)
        known = triton.__version__.startswith("3.6.") and type(run).__name__ == "CudaLauncher"
        if not known or run.global_scratch_size or run.profile_scratch_size:
            return run, (function, metadata, *no_hooks), False
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (function, *flags, None, None, metadata, *no_hooks), True


COMPILED: dict[tuple, Binary] = {}
"""The binary of each combination. Kept for good: CUDA graphs hold its code."""

LAST: dict[int, Any] = {}
"""By stream: the kernel that was launched last by `Launch`."""
RUNTIME = triton.knobs.runtime
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""What Triton's driver asks too. A build without CUDA has none, and only compiles."""
_INT32 = 2**31 - 1


def last_kernel(device: int) -> Any:
    """What `Launch` launched last on the current stream of a device; None: nothing is known."""
    return None if _current_stream is None else LAST.get(_current_stream(device))


class Launch:
    """A kernel with its constants: call it with a grid and the other arguments.

    Made once for each set of constants (by a cached function), called often.

    Args:
        kernel: a ``triton.jit`` function whose constexpr parameters come last.
        **constants: every constexpr parameter, and Triton's launch options.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel, self.constants = kernel, constants
        self.interpreted = not isinstance(kernel, triton.runtime.JITFunction)
        if not self.interpreted:
            if not RUNTIME.interpret:  # a Gluon kernel that nobody will run
                compute_cache_key(kernel)
            self.counted = [p.do_not_specialize for p in kernel.params if not p.is_constexpr]
            # In a binary's argument list constants stand in the places of their parameters.
            self.tail = [constants[p.name] for p in kernel.params if p.is_constexpr]

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch; tensors, their boxes, integers or None in order, the first one a tensor."""
        if self.interpreted:
            self.kernel[grid](*arguments, **self.constants)
            return
        device = arguments[0].get_device()
        seen: list[Any] = [self]
        values: list[Any] = []
        for argument, counted in zip(arguments, self.counted):  # noqa: B905 (strict is slower)
            kind = type(argument)
            if kind is int:
                seen.append(argument > _INT32 if counted else argument)
                values.append(argument)
            elif argument is None:
                seen.append(None)
                values.append(None)
            elif kind is TensorDescriptor:  # its sizes are no part of the binary
                seen.append(argument.base.dtype)
                values.append(argument)
            else:
                pointer = argument.data_ptr()
                seen += (argument.dtype, argument.get_device(), pointer & 15)
                values.append(pointer)
        key = tuple(seen)
        binary = COMPILED.get(key)
        if binary is None:
            options = launch_options() | self.constants
            compiled = self.kernel[grid](*arguments, **options)
            COMPILED[key] = Binary(compiled)
            if _current_stream is not None:
                LAST[_current_stream(device)] = self.kernel
            return
        x, y, z = (*grid, 1, 1)[:3]
        if RUNTIME.launch_enter_hook.calls or RUNTIME.launch_exit_hook.calls:
            binary.compiled[(x, y, z)](*arguments, *self.tail)
            LAST[_current_stream(device)] = self.kernel
            return
        start, settings, by_pointer = binary.start
        given, stream = values if by_pointer else arguments, _current_stream(device)
        start(x, y, z, stream, *settings, *given, *self.tail)
        LAST[stream] = self.kernel
