"""Kernels that test a sanitizer: one has a bug, one is correct but may be reported.

python tests/support/sanitizer_canary.py out_of_bounds | handed_over
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moe_ops.kernels._hopper.memory import wait_for_group

COUNT, ROUNDS = gl.constexpr(128), gl.constexpr(4)


@triton.jit
def out_of_bounds_kernel(x, COUNT: tl.constexpr):
    """Write past the end of COUNT numbers, which a working sanitizer must report."""
    tl.store(x + COUNT + tl.arange(0, COUNT), 1.0)


@gluon.jit
def _write(words, full, empty):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    for i in range(ROUNDS):
        mbarrier.wait(empty, (i + 1) & 1)
        words.store(gl.arange(0, COUNT, layout=layout) + i)
        wait_for_group()
        mbarrier.arrive(full)


@gluon.jit
def _read(out, words, full, empty):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.full([COUNT], 0, gl.int32, layout)
    for i in range(ROUNDS):
        mbarrier.wait(full, i & 1)
        total += words.load(layout)
        wait_for_group()
        mbarrier.arrive(empty)
    gl.store(out + gl.arange(0, COUNT, layout=layout), total)


@gluon.jit
def handed_over_kernel(out):
    """One warp writes shared memory, four warps read it, in turn, synchronized by mbarriers."""
    words = gl.allocate_shared_memory(gl.int32, [COUNT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [(_read, (out, words, full, empty)), (_write, (words, full, empty))], [1], [24]
    )


def main(name: str) -> None:
    """Launch one of them."""
    if name == "out_of_bounds":
        out_of_bounds_kernel[(1,)](torch.zeros(128, device="cuda"), 128)
    else:
        out = torch.zeros(128, dtype=torch.int32, device="cuda")
        handed_over_kernel[(1,)](out, num_warps=4)
        assert out.tolist() == [4 * i + 6 for i in range(128)]
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
