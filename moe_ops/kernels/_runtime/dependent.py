"""Programmatic dependent launch (PDL): a kernel is launched while the one before it still runs.

On NVIDIA GPUs from Hopper on, CTAs of the next kernel of a stream (or CUDA graph) may become
resident before the kernel before it ends, which hides most of the launch latency. Every kernel of
the library takes part: it calls `take_turn` before it touches global memory, and is launched with
`launch_options`.

Why this is safe:

* `take_turn` waits (``griddepcontrol.wait``) until the previous grid is complete and its writes are
  visible. Every program of every kernel waits, also one without work, so a grid completes only
  after the grid before it, and waiting for the previous grid is waiting for all earlier ones. A
  kernel that is launched with the option and does not wait would break this chain: the grid after
  it could begin before the grid before it ends.
* A program triggers the dependent launch (``griddepcontrol.launch_dependents``) only after its own
  wait. So a grid that has not waited yet overlaps one predecessor only: waiting grids do not pile
  up, and somebody else's kernel that reads older results before it waits is correct too.
* Other kernels (PyTorch's), and ours launched without the option, begin after all kernels before
  them are complete, as usual.

Two kernels may read before they wait: both of GEMM 2 for one token read the ids, the expert map,
and the weight with its scales and zero points, if their caller says so (`GemmOperands.early`). This
is right if all of that was written before the launch of GEMM 1 on the same stream, or before an
event that the stream waited for by then. No kernel that follows GEMM 1 on the stream, whoever
launches it, begins before GEMM 1 has triggered the dependent launch or ended, and GEMM 1 does
neither before it has waited: then all earlier writes are visible. What is written after the launch
of GEMM 1 need not be: a kernel of PyTorch's in between ends without a promise of visibility.

Only the caller of both GEMMs knows what was written between them. The eager pipeline writes new
tensors there and nothing else, so it gives the promise (`moe_ops.dispatch.early`), in CUDA graphs
too. In a compiled graph the compiler decides where kernels run: one that computes a scale of GEMM 2
may come between. So neither compiled graphs nor operators that are called one by one have it.

``MOE_OPS_NO_PDL=1``, set before this module is imported, turns PDL off: kernels run one after the
other, and the PDL instructions in them do nothing.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

FEW = tl.constexpr(264)
"""Largest grid that triggers the dependent launch early: two programs per SM of an H200."""
ENABLED = os.environ.get("MOE_OPS_NO_PDL", "0") in ("", "0")


@triton.constexpr_function
def served():
    """Whether the GPU that kernels are being compiled for has PDL."""
    interpreted = triton.knobs.runtime.interpret
    return not interpreted and tl.target_info.cuda_capability_geq(9)


@triton.jit
def take_turn(LONG: tl.constexpr = False, ROOM: tl.constexpr = False):
    """Wait for the grids before this one, then trigger the dependent launch.

    Large or LONG grids trigger it only when their CTAs exit: they fill the GPU, and early CTAs of
    the next kernel would be placed unevenly, wherever an SM has room beside them. ROOM: every SM
    has, whatever the number of programs.
    """
    if served():
        tl.extra.cuda.gdc_wait()
        if ROOM or (not LONG and tl.num_programs(0) * tl.num_programs(1) <= FEW):
            tl.extra.cuda.gdc_launch_dependents()


def launch_options() -> dict[str, bool]:
    """The launch option for PDL if the current GPU has it, else nothing."""
    return {"launch_pdl": True} if ENABLED and served() else {}
