"""The plan of an expert GEMM: its kernel, tiles and scratch memory, chosen in one decision.

`plan_gemm` is a pure function of values. Launchers run a plan, `explain` prints it, warm-up
compares plans, the workspace adds up their scratch memory, and the pipeline reads from them whether
the kernel quantizes rows. What a kernel takes is known to its family alone: a kernel for another
architecture is a file in ``kernels/`` and a family in `moe_ops.dispatch.families`.
"""

from __future__ import annotations

from functools import lru_cache

from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.families import BY_NAME, FAMILIES, FIXED, TUNABLE, serving
from moe_ops.dispatch.families.base import broken
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.plan import BufferSpec, GemmPlan
from moe_ops.dispatch.problem import GemmProblem, without_sum
from moe_ops.dispatch.tiles import TileConfig

__all__ = ["GemmPlan", "PassedOver", "passed_over", "plan_gemm"]
PassedOver = tuple[tuple[str, str], ...]
"""Kernels by name, each with why it is not chosen."""


def plan_gemm(
    problem: GemmProblem, device: Device, *, config: KernelTiles | None = None
) -> GemmPlan:
    """The kernel, the tiles and the scratch memory of an expert GEMM.

    Args:
        problem: sizes, formats and facts of the tensors.
        device: the GPU.
        config: tiles to use instead of tuned or analytic ones.

    Raises:
        ValueError: an unknown scheme or activation; no kernel takes the problem with ``config``.
        NotImplementedError: a packed weight that no kernel for the GPU takes.
    """
    return _cached_plan(problem, device, config, tuned.TABLES)


@lru_cache(maxsize=8192)
def _cached_plan(
    problem: GemmProblem, device: Device, config: KernelTiles | None, tables: tuned.Tables
) -> GemmPlan:
    if config is not None:
        return _plan_with_tiles(problem, device, config, tables)
    for family in FIXED:
        if family.why_not(problem, device) is None:
            return family.plan(problem, family.tiles(problem, device), family.source)
    if problem.summed:
        return _apart(problem, device, tables)
    choice, source = tuned.choose(problem, device, tables)
    if choice is not None:
        family, tiles = choice
        return family.plan(problem, tiles, source)
    for family in TUNABLE:
        why = family.why_another(problem, device)
        if why is None:
            return family.plan(problem, family.tiles(problem, device), source)
    raise NotImplementedError(why)


def _plan_with_tiles(
    problem: GemmProblem, device: Device, config: KernelTiles, tables: tuned.Tables
) -> GemmPlan:
    """The plan with given tiles, which divide the plan's row tile; portable ones may be smaller.

    Raises:
        ValueError: no kernel takes the problem with these tiles.
        NotImplementedError: no kernel takes the problem with any.
    """
    if problem.summed:
        raise ValueError(f"config must be None for a GEMM with the weighted sum, got {config}")
    rows = problem.sizes.row_tile
    whole = config.block_m == rows
    if not (whole or (isinstance(config, TileConfig) and rows % config.block_m == 0)):
        raise ValueError(
            f"config must have tiles that cut up the plan's row tile of {rows}, got {config}"
        )
    family = serving(config, problem, device)
    if isinstance(family, str):
        _cached_plan(problem, device, None, tables)  # raises if no tiles would do
        rule = "config must be tiles of a kernel that takes this GEMM"
        raise ValueError(f"{rule}, got {config}, which {family}")
    return family.plan(problem, config, "given")


def _apart(problem: GemmProblem, device: Device, tables: tuned.Tables) -> GemmPlan:
    """Plan of a GEMM whose weighted sum runs in a separate kernel."""
    plan = _cached_plan(without_sum(problem), device, None, tables)
    nbytes = problem.sizes.num_slots * problem.sizes.n * problem.out_itemsize
    return plan._replace(scratch=(BufferSpec("product", nbytes), *plan.scratch))


def passed_over(problem: GemmProblem, device: Device) -> PassedOver:
    """The kernels for this kind of GEMM that come before the plan's, each with why not.

    Kernels without the weighted sum are asked about the GEMM alone.
    """
    chosen = FAMILIES.index(BY_NAME[plan_gemm(problem, device).kernel])
    reasons, alone = [], without_sum(problem)
    for family in FAMILIES[:chosen]:
        asked = problem if family.sums else alone
        why = family.why_another(asked, device)
        if why is not None and broken(family.kind, asked, device) is None:
            reasons.append((family.kernel, why))
    return tuple(reasons)
