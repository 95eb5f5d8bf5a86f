"""The plan of an expert GEMM: its kernel, tiles and scratch memory, chosen in one decision.

`plan_gemm` is a pure function of values. Launchers run a plan, `explain` prints it, warm-up
compares plans, the workspace adds up their scratch memory, and the pipeline reads from them whether
the kernel quantizes rows. A kernel for another architecture is a file in ``kernels/`` and a rule in
`RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, cast

from moe_ops.dispatch import tuned
from moe_ops.dispatch.blackwell import TILES_FROM, block_scaled_tiles, is_block_scaled
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.hopper import (
    TOKEN,
    HopperTiles,
    KernelTiles,
    packed_rows,
    takes,
    token_tiles,
)
from moe_ops.dispatch.hopper_decode import (
    DECODE_FEW,
    OF_JOBS,
    decode_slot_tiles,
    decode_sum_tiles,
    decode_unfit,
    decodes_weights,
)
from moe_ops.dispatch.portable import (
    ScaleGroups,
    gemm_tiles,
    scale_groups,
    scaled_gemm_tiles,
    scaled_slot_tiles,
    weight_only_tiles,
)
from moe_ops.dispatch.problem import EACH, STORED, GemmProblem, without_sum
from moe_ops.dispatch.tiles import (
    ROW_TILES,
    TALL_ROW_TILE,
    Gemm,
    TileConfig,
    is_direct,
    one_row_tile,
    own_plan,
    plan_sizes,
    with_own_plan,
)
from moe_ops.dispatch.tuned import DEFAULT, Choice
from moe_ops.dispatch.tuned_file import scaled_group
from moe_ops.scheme import WHOLE, Scheme, get_scheme

DENSE, SCALED, SLOT = "dense", "scaled", "scaled_slot"
DEQUANTIZE, BLOCK_SCALED = "dequantize", "block_scaled"
TOKEN_SUM = f"{TOKEN}_sum"
"""Names of the kernels that `dispatch.hopper` does not name."""
PIPELINE_LIMIT = 64
"""Row tile from which Triton 3.6 cannot pipeline a Blackwell product with a computed operand."""


PORTABLE_TALL = one_row_tile(ROW_TILES[-1])
"""Row tile of the portable kernels where Hopper's kernels take 192 rows."""


class BufferSpec(NamedTuple):
    """Scratch memory that an operator frees again before it returns."""

    name: str
    nbytes: int


class GemmPlan(NamedTuple):
    """How an expert GEMM is computed."""

    kernel: str
    """Key of the launchers' table of kernels."""
    config: KernelTiles
    quantizes_rows: bool
    """Whether the kernel, or the pass that packs its rows, quantizes rows that are not stored."""
    packed_rows: int
    """Rows allocated for packing in the order of the plan; 0: rows are not packed."""
    scratch: tuple[BufferSpec, ...]
    source: str
    """Where the tiles come from and, if a tuned file exists but is not used, why not."""


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
    return _plan(problem, device, config, tuned.TABLES)


@lru_cache(maxsize=8192)
def _plan(
    problem: GemmProblem, device: Device, config: KernelTiles | None, tables: tuned.Tables
) -> GemmPlan:
    choice = choose_tiles(problem, device, tables)
    if problem.summed:
        if config is not None:
            raise ValueError(f"config must be None for a GEMM with the weighted sum, got {config}")
        at_once = _token(problem, choice, device) or _decode_sum(problem, device)
        return at_once or _apart(problem, device, tables)
    if config is not None:
        if not _cuts(config, problem.sizes.row_tile):
            raise ValueError(
                f"config must have tiles that cut up the plan's row tile of "
                f"{problem.sizes.row_tile}, got {config}"
            )
        if _decodes(problem, device):
            _check_decoding(config, problem, device)
            choice = Choice(choice.plain, "given", cast(HopperTiles, config))
        elif not isinstance(config, HopperTiles):
            choice = Choice(config, "given")
        elif is_hoppers(problem, device):
            choice = Choice(choice.plain, "given", config)
    for rule in RULES if config is None else (_hopper, _decode, _portable):
        plan = rule(problem, choice, device)
        if plan is not None and config in (None, plan.config):
            return plan
    raise ValueError(f"config must be tiles of a kernel that takes this GEMM, got {config}")


def _cuts(config: KernelTiles, row_tile: int) -> bool:
    """Whether tiles divide the plan's row tile; only portable kernels may have smaller tiles."""
    whole = config.block_m == row_tile
    return whole or (isinstance(config, TileConfig) and row_tile % config.block_m == 0)


def _check_decoding(config: KernelTiles, problem: GemmProblem, device: Device) -> None:
    """Check given tiles of a GEMM whose packed weight Hopper's kernels decode.

    Raises:
        ValueError: no such kernel runs with these tiles.
    """
    rule, quant = "tiles of a kernel that decodes packed weights", get_scheme(problem.scheme).weight
    if quant is None or not isinstance(config, HopperTiles) or not decodes_weights(config):
        raise ValueError(f"config must be {rule}, got {config}")
    why = decode_unfit(config, problem.sizes, quant, device)
    if why is not None:
        raise ValueError(f"config must be {rule} and takes this GEMM, got {config}, which {why}")


def _apart(problem: GemmProblem, device: Device, tables: tuned.Tables) -> GemmPlan:
    """Plan of a GEMM whose weighted sum runs in a separate kernel."""
    plan = _plan(without_sum(problem), device, None, tables)
    nbytes = problem.sizes.num_slots * problem.sizes.n * problem.out_itemsize
    return plan._replace(scratch=(BufferSpec("product", nbytes), *plan.scratch))


def _token(problem: GemmProblem, choice: Choice, device: Device) -> GemmPlan | None:
    """Plan of an M = 1 decode kernel: GEMM 1 with activation, or GEMM 2 with the weighted sum."""
    sizes, scheme = problem.sizes, get_scheme(problem.scheme)
    fused = problem.summed or problem.activation != ""
    follows_load = not sizes.rule.batch_invariant
    if not (fused and problem.one_token and follows_load and problem.boxes) or device.portable_only:
        return None
    tiles = token_tiles(
        problem.weight, problem.operand_itemsize, sizes.num_slots, problem.rule, scheme, device,
        summed=problem.summed,
    )  # fmt: skip
    if tiles is None:
        return None
    kernel = TOKEN_SUM if problem.summed else TOKEN
    return GemmPlan(kernel, tiles, problem.rows != STORED, 0, (), DEFAULT)


def _few_slots(problem: GemmProblem, choice: Choice, device: Device) -> GemmPlan | None:
    """Plan of the kernel with one slot per tile whose programs quantize the slot's row."""
    if problem.rows != EACH or problem.num_tokens is None or problem.quant is None:
        return None
    tiles = scaled_slot_tiles(problem.sizes, problem.quant)
    return None if tiles is None else GemmPlan(SLOT, tiles, True, 0, (), DEFAULT)


def _hopper(problem: GemmProblem, choice: Choice, device: Device) -> GemmPlan | None:
    """Plan of a warp-specialised Hopper kernel, which loads with TMA."""
    tiles = choice.hopper
    if tiles is None or problem.packed or not problem.boxes or problem.expert_scales:
        return None
    on_the_way = problem.rows == EACH and tiles.packed
    num_slots, num_experts = problem.sizes.num_slots, problem.sizes.num_experts
    rows, scratch = 0, _quantized(problem) if problem.rows != STORED and not on_the_way else ()
    if tiles.packed:
        scratch += (BufferSpec("next tile", 4),) if tiles.on_demand else ()
        if problem.permuted != "a":
            rows = packed_rows(num_slots, num_experts, tiles.block_m)
            scratch += _rows_of(problem, rows, "packed rows")
    return GemmPlan(tiles.kernel, tiles, on_the_way, rows, scratch, choice.source)


def _decodes(problem: GemmProblem, device: Device) -> bool:
    """Whether Hopper's kernels decode the weight in registers."""
    return problem.packed and problem.boxes and _has_decoders(problem, device)


def _has_decoders(problem: GemmProblem, device: Device) -> bool:
    """Whether there are kernels for packed weights: on Hopper, but none that is batch-invariant."""
    served = device.arch == 90 and not device.portable_only
    return served and not problem.sizes.rule.batch_invariant


def _decode_sum(problem: GemmProblem, device: Device) -> GemmPlan | None:
    """Plan of a Hopper kernel that decodes packed weights, with the weighted sum of one token."""
    quant = get_scheme(problem.scheme).weight
    if quant is None or not (problem.one_token and _decodes(problem, device)):
        return None
    return _in_jobs(problem, decode_sum_tiles(problem.sizes, quant, device))


def _decode_slot(problem: GemmProblem, choice: Choice, device: Device) -> GemmPlan | None:
    """Plan of a Hopper kernel that decodes packed weights, for few slots whose ids are known."""
    sizes, quant = problem.sizes, get_scheme(problem.scheme).weight
    direct = problem.num_tokens is not None and is_direct(sizes.num_slots, sizes.num_experts)
    if quant is None or not (direct and _decodes(problem, device)):
        return None
    return _in_jobs(problem, decode_slot_tiles(sizes, quant, device))


def _in_jobs(problem: GemmProblem, tiles: HopperTiles | None) -> GemmPlan | None:
    """Plan of a kernel with jobs: see `hopper_decode.Jobs`."""
    if tiles is None:
        return None
    quantizes = problem.rows == EACH
    return GemmPlan(tiles.kernel, tiles, quantizes, 0, _widened(problem), DEFAULT)


def _decode(problem: GemmProblem, choice: Choice, device: Device) -> GemmPlan | None:
    """Plan of a Hopper kernel that decodes packed weights in registers."""
    sizes, tiles = problem.sizes, choice.hopper
    if tiles is None or not _decodes(problem, device):
        return None
    quantizes = problem.rows == EACH
    if tiles.kernel == DECODE_FEW:
        return GemmPlan(tiles.kernel, tiles, quantizes, 0, _widened(problem), choice.source)
    rows = packed_rows(sizes.num_slots, sizes.num_experts, tiles.block_m)
    scratch = _rows_of(problem, rows, "packed rows")
    if tiles.on_demand:
        scratch = BufferSpec("next tile", 4), *scratch
    if get_scheme(problem.scheme).activation is not None:
        scratch += (BufferSpec("scales of packed rows", 4 * rows),)
    return GemmPlan(tiles.kernel, tiles, quantizes, rows, scratch, choice.source)


def _widened(problem: GemmProblem) -> tuple[BufferSpec, ...]:
    """Buffers for decoded rows in bf16 and, if the operator quantizes them, for their scales."""
    if get_scheme(problem.scheme).activation is None:
        return ()
    rows = problem.sizes.num_slots // problem.top_k
    scales = (BufferSpec("scales of rows", 4 * rows),) if problem.rows == EACH else ()
    return (*_rows_of(problem, rows, "rows in bf16"), *scales)


def _portable(problem: GemmProblem, choice: Choice, device: Device) -> GemmPlan | None:
    """Plan of a portable kernel.

    Raises:
        NotImplementedError: the weight is in the packed form.
    """
    scheme = get_scheme(problem.scheme)
    if problem.unread and _has_decoders(problem, device):
        raise NotImplementedError(f"{problem.unread} (unpack_weight gives the plain form)")
    if problem.packed:
        invariant = " batch-invariant" if problem.sizes.rule.batch_invariant else ""
        raise NotImplementedError(
            f"w must be in the plain form (see unpack_weight) for this{invariant} GEMM on "
            f"sm_{device.arch}, got {scheme.name} in the packed form"
        )
    kernel = DENSE if scheme.weight is None else DEQUANTIZE
    if problem.quant is not None:
        kernel = SCALED
    elif _is_block_scaled(scheme, device):
        kernel = BLOCK_SCALED
    scratch = _quantized(problem) if problem.rows != STORED else ()
    if own_plan(problem.sizes, choice.plain):
        own = with_own_plan(problem.sizes, choice.plain)
        entries = plan_sizes(own.num_slots, own.num_experts, own.rule).entries
        scratch = (*scratch, BufferSpec("plan", 4 * entries))
    return GemmPlan(kernel, choice.plain, False, 0, scratch, choice.source)


RULES: tuple[Callable[[GemmProblem, Choice, Device], GemmPlan | None], ...] = (
    _token, _few_slots, _hopper, _decode_slot, _decode, _portable,
)  # fmt: skip
"""Rules in order: the first that returns a plan decides."""
FIXED = (TOKEN, TOKEN_SUM, SLOT, *OF_JOBS)
"""Kernels whose tiles follow from the sizes: no tuned file sets them."""


def _quantized(problem: GemmProblem) -> tuple[BufferSpec, ...]:
    """Buffers for rows that the operator quantizes before the GEMM."""
    return _rows_of(problem, problem.sizes.num_slots // problem.top_k, "quantized rows")


def _rows_of(problem: GemmProblem, rows: int, name: str) -> tuple[BufferSpec, ...]:
    """Buffers for rows in the form that the kernel multiplies, and for their scales."""
    quant, k = problem.quant, problem.sizes.k
    if quant is None:
        return (BufferSpec(name, rows * k * problem.sizes.itemsize),)
    groups = 1 if problem.shared_scale else quant.row_scale_shape(1, k)[-1]
    scales = BufferSpec(f"scales of {name}", rows * groups * 4)
    return BufferSpec(name, rows * k * quant.dtype.itemsize), scales


def choose_tiles(
    problem: GemmProblem, device: Device, tables: tuned.Tables | None = None
) -> Choice:
    """Tiles, tuned or analytic, of the portable kernel and of the Hopper kernel, if any.

    The Hopper kernel of a packed weight is one that decodes it.
    """
    scheme = get_scheme(problem.scheme)
    if _is_block_scaled(scheme, device):
        return Choice(block_scaled_tiles(problem.sizes, scheme.key, device), TILES_FROM)
    default = analytic_tiles(problem, device)
    own = is_hoppers(problem, device)
    sizes, bits = stored_gemm(problem.sizes, scheme)
    found = tuned.choose(
        sizes, scheme.key, bits, device, default, hopper=own,
        tables=tuned.TABLES if tables is None else tables,
        decoded=scheme.weight if _decodes(problem, device) else None,
    )  # fmt: skip
    if scheme.decoded and device.arch in (100, 103) and found.plain.block_m >= PIPELINE_LIMIT:
        found = found._replace(plain=replace(found.plain, num_stages=1))
    return found


def _is_block_scaled(scheme: Scheme, device: Device) -> bool:
    return not device.portable_only and is_block_scaled(scheme.key, device.arch)


def is_hoppers(problem: GemmProblem, device: Device) -> bool:
    """Whether a Hopper kernel can compute a GEMM of these sizes and formats."""
    scheme = get_scheme(problem.scheme)
    sizes, _ = stored_gemm(problem.sizes, scheme)
    groups = None if problem.quant is None else _groups(problem, scheme)
    return not device.portable_only and takes(sizes, scheme, groups, device)


def analytic_tiles(problem: GemmProblem, device: Device) -> TileConfig:
    """Analytic tiles of the portable kernels, except the one for block-scaled instructions."""
    scheme = get_scheme(problem.scheme)
    sizes, bits = stored_gemm(problem.sizes, scheme)
    if scheme.weight is None:
        # Only Hopper's kernels take 192 rows. If the routing is known, two launches sort the slots
        # again, and the weight is read from L2 half as often as by tiles of 64 rows.
        sorts = problem.num_tokens is not None and sizes.row_tile == TALL_ROW_TILE
        return gemm_tiles(sizes._replace(rule=PORTABLE_TALL) if sorts else sizes, device)
    if problem.quant is None:
        return weight_only_tiles(sizes, bits, device)
    return scaled_gemm_tiles(sizes, _groups(problem, scheme), device)


def _groups(problem: GemmProblem, scheme: Scheme) -> ScaleGroups:
    """The scale groups of two quantized operands."""
    sizes, weight_rows = problem.sizes, problem.scale_rows
    if weight_rows is None:
        rows = WHOLE if scheme.weight is None else scheme.weight.group.rows
        weight_rows = sizes.halves * sizes.n if rows == WHOLE else rows
    return scale_groups(sizes.n, scaled_group(scheme), weight_rows, problem.rule)


def stored_gemm(gemm: Gemm, scheme: Scheme) -> tuple[Gemm, int]:
    """The GEMM with the item size of the multiplied rows, and the bits of a stored weight."""
    if scheme.weight is None:
        return gemm, 8 * gemm.itemsize
    if scheme.decoded:
        gemm = gemm._replace(itemsize=2)
    if scheme.activation is None or scheme.decoded:
        return gemm, scheme.weight.element.stored_bits
    return gemm._replace(itemsize=1), 8
