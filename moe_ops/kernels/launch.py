"""Launching without Triton's per-call argument analysis.

Triton inspects every argument of every launch (about 20 microseconds for a GEMM kernel) to find the
binary that fits. Here the binary is remembered under what that inspection looks at: dtypes, 16-byte
alignment, the values of specialised integers and constants. Only the first launch of a combination
goes through Triton; later ones hand the same arguments to its binary.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
from torch import Tensor

COMPILED: dict[tuple, Any] = {}
"""The binary of each combination. Kept for good: CUDA graphs hold its code."""

_INT32 = 2**31 - 1


@cache
def _parameters(kernel: Any) -> tuple[frozenset[int], tuple[str, ...]]:
    """Which arguments are not specialised on, and the names of the constants."""
    free = frozenset(p.num for p in kernel.params if p.do_not_specialize)
    return free, tuple(p.name for p in kernel.params if p.is_constexpr)


def _seen_as(number: int, argument: Any, free: frozenset[int]) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument > _INT32 if number in free else argument


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)``; the first tensor names the device.

    Args:
        kernel: a ``triton.jit`` function whose constexpr parameters come last.
        grid: programs along up to three axes.
        *arguments: tensors, integers or None, in the kernel's order.
        **constants: every constexpr parameter, and Triton's launch options.
    """
    if not isinstance(kernel, triton.runtime.JITFunction):  # the interpreter
        kernel[grid](*arguments, **constants)
        return
    free, names = _parameters(kernel)
    seen = tuple([_seen_as(n, argument, free) for n, argument in enumerate(arguments)])
    key = (kernel.fn, arguments[0].device.index, seen, *constants.values())
    compiled = COMPILED.get(key)
    if compiled is None:
        COMPILED[key] = kernel[grid](*arguments, **constants)
    else:
        # As Triton's launchers take them: constants stand in the places of their parameters.
        compiled[(*grid, 1, 1)[:3]](*arguments, *[constants[name] for name in names])
