"""Programmatic dependent launch: a kernel is launched while the one before it still runs.

On NVIDIA GPUs from Hopper on the blocks of the next kernel of a stream (or CUDA graph) may be put
in place before this one ends, which hides most of a launch. Every kernel of the library takes
part: it calls `take_turn` before it touches global memory, and is launched with `launch_options`.

Why that is safe:

* `take_turn` waits until the grids before this one are complete and their writes visible. Every
  program of every kernel waits, also one with nothing to do, so that a grid completes after the
  one before it and waiting for one is waiting for all. A kernel launched with the option that
  does not wait would break the chain: what follows it could begin before what precedes it ends.
* Only then does it let the next grid in. So a grid that has not waited yet runs beside its one
  predecessor: waiting grids do not pile up, and a kernel of somebody else that reads older results
  before it waits is right, too.
* Other kernels (PyTorch's), and ours that are launched without the option, begin when the ones
  before are complete, as ever.

One kernel reads before it waits: that of GEMM 2 of one token, experts' weights and ids, where the
kernel before it is GEMM 1 of the same routing (`token_gemm`). That one lets it in late, having
waited for the ids itself.

``MOE_OPS_NO_PDL=1``, set before this module is imported, launches kernels one after the other; the
instructions in them then do nothing.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

FEW = tl.constexpr(264)
"""Programs: two for each processor of an H200."""
ENABLED = os.environ.get("MOE_OPS_NO_PDL", "0") in ("", "0")


@triton.constexpr_function
def served():
    """Whether the GPU that kernels are now compiled for has it."""
    interpreted = triton.knobs.runtime.interpret
    return not interpreted and tl.target_info.cuda_capability_geq(9)


@triton.jit
def take_turn(LONG: tl.constexpr = False):
    """Wait for the grids before this one, then let the next one in.

    One of many programs, or a LONG one, lets it in as its programs end: they fill the GPU, and
    programs of the next kernel would be put, unevenly, where there is room beside them.
    """
    if served():
        tl.extra.cuda.gdc_wait()
        if not LONG and tl.num_programs(0) * tl.num_programs(1) <= FEW:
            tl.extra.cuda.gdc_launch_dependents()


def launch_options() -> dict[str, bool]:
    """The option of a launch on the current GPU, where that knows it."""
    return {"launch_pdl": True} if ENABLED and served() else {}
