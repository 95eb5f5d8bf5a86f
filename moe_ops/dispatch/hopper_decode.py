"""Rules for Hopper's kernels that dequantize packed weights: the GEMMs they take, and their tiles.

Host arithmetic, which runs inside operators, where sizes are numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.hopper import LEAST_STAGES, HopperTiles
from moe_ops.dispatch.tiles import Gemm, cdiv, is_direct
from moe_ops.scheme import Quant, Scheme
from moe_ops.scheme.packed import CHUNK, widens_rows
from moe_ops.scheme.values import SCALE_BITS

DECODE_FEW, DECODE_MANY = "hopper_decode_few", "hopper_decode_many"
"""The kernel for few rows, which gathers them itself, and the kernel for many, gathered rows."""
DECODE_SLOT, DECODE_SUM = "hopper_decode_slot", "hopper_decode_sum"
"""The kernel for few slots, one a program, and the kernel for GEMM 2 and the weighted sum of one
token."""
STAGE_K = 128
"""Numbers along K of a stage."""
JOB_WARPS, STRIP_ROWS = 8, 16
"""Warps of the kernels for few slots, and weight rows that a warp multiplies at once."""
JOB_CTAS = 4
"""CTAs per SM for which they have registers."""
SLOT_STRIPS = {1: ((1, 4), (2, 4)), 2: ((2, 3), (4, 2), (2, 4))}
"""Strips that a program of a slot may have, by halves (with a gate, half of them are up rows), and
how many such programs an SM may have: the first that is enough is taken. Four strips take more
registers; with fewer than four programs there is room for one of GEMM 2, which begins early."""
JOB_REGISTERS = {1: 64, 2: 64, 4: 96}
"""Registers of a thread of the kernels for few slots, by strips: one with the weighted sum."""
SUM_SLOTS = 16
"""The most slots that the kernel with the weighted sum serves."""
ROUND_BITS = 16
"""Bits for each weight row that a warp multiplies in a round, over its strips and chunks."""
LEAST_BUFFERS = 2
"""Rounds for which a program needs room."""
SUM_BYTES = 4 * JOB_WARPS * STRIP_ROWS
"""Bytes of the sums of a strip, of all jobs of a pass."""
RESERVED_BYTES = 1024
"""Bytes of shared memory of each CTA that the system reserves."""
PREFERRING_BYTES = 48 * 1024 + 16
"""Bytes of a CTA with which Triton's launcher has the driver prefer shared memory to L1."""
TMA_ALIGNMENT = 128
"""Bytes to whose multiples in shared memory TMA copies."""
FEW_CTAS = {
    16: {5: 0.97, 4: 1.0, 3: 1.04, 2: 1.1},
    32: {4: 0.97, 3: 1.0, 2: 1.1},
    64: {2: 1.0},
}
"""CTAs per SM that the kernel for few rows may have, by its row tiles, with the time for the same
work if every SM is full (measured on an H200: fewer CTAs hide less)."""
ONE_CTA = (64,)
"""Row tiles with which that kernel may also have one CTA per SM, if set or tuned: with fewer rows
it spills registers then."""
FEW_WEIGHT_ROWS, MANY_WEIGHT_ROWS = 128, 256
"""Weight rows of a tile of the kernel for few rows, and of the kernel for many."""
MANY_ROW_TILES = (64, 128)
"""Row tiles of the kernel for many rows."""
FEW_STAGES, MANY_STAGES = 6, 4
"""The most stages: more bring nothing, or do not fit."""
CTA_BYTES = RESERVED_BYTES + 512
"""Bytes of a CTA beside its stages and its epilogue: reserved ones, and barriers."""
MANY_BYTES = 20 * 1024
"""CTA_BYTES in the kernel for many rows, with the buffers of its epilogue."""


def dequantizes(scheme: Scheme, dtype: torch.dtype) -> bool:
    """Whether the kernels dequantize weights for a result of a dtype.

    Rows have that dtype, or bf16 if they are dequantized too. Scales of groups multiply the weights
    in the dtype of the rows, which must hold them: scales in that dtype, or one-byte scales in
    bf16.
    """
    quant = scheme.weight
    if quant is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    if scheme.activation is not None:
        dtype = torch.bfloat16
    if not (quant.local or quant.zero_point):
        return True
    return quant.scale == "input" or (SCALE_BITS[quant.scale] == 8 and dtype == torch.bfloat16)


def decodes_to_fp8(kernel: str, scheme: Scheme) -> bool:
    """Whether a kernel decodes weights to fp8, in which integers of 4 bits are exact.

    Products with fp8 rows then take half as long as in bf16. Scales multiply the sums of a stage,
    so each must be that of a whole stage, or of several. Few rows wait for the weights, however
    they are multiplied.
    """
    quant = cast(Quant, scheme.weight)
    whole = quant.scale == "e4m3" and (quant.shared_cols or 1) % STAGE_K == 0
    integers = quant.element.name == "int4" and not quant.zero_point
    return kernel == DECODE_MANY and widens_rows(scheme) and integers and whole


def few_ctas(block_m: int, tiles: float, device: Device) -> int:
    """CTAs per SM of the kernel for few rows.

    If all tiles are computed at once, there is room for one CTA more, so that the next kernel's can
    begin early. Otherwise the last round of tiles shall be nearly full, as it takes as long as the
    others.
    """
    times = FEW_CTAS.get(block_m, {2: 1.0})
    at_once = math.ceil(tiles / device.processors)
    if at_once < max(times):
        return min(ctas for ctas in times if ctas > at_once)

    def time(ctas: int) -> float:
        return times[ctas] * ctas * math.ceil(tiles / (ctas * device.processors))

    return min(times, key=time)


class UnitBytes(NamedTuple):
    """Bytes of what is copied for a unit of 64 weight rows in a stage."""

    words: int
    scales: int
    """0: scales have no axis for groups."""
    zeros: int


def stage_groups(quant: Quant) -> int:
    """Scales of a weight row in a stage; 0 without an axis for groups."""
    if not (quant.local or quant.zero_point):
        return 0
    return max(1, STAGE_K // (quant.shared_cols or STAGE_K))


def unit_bytes(quant: Quant) -> UnitBytes:
    """Bytes that TMA copies for a unit in a stage."""
    bits, groups = quant.element.stored_bits, CHUNK * stage_groups(quant)
    scales, zeros = groups * SCALE_BITS[quant.scale], groups * bits if quant.zero_point else 0
    return UnitBytes(CHUNK * STAGE_K * bits // 8, scales // 8, zeros // 8)


def places(nbytes: int) -> int:
    """Copies of so many bytes for which shared memory is set aside, as TMA wants them aligned."""
    return max(1, TMA_ALIGNMENT // nbytes) if nbytes else 0


def stage_bytes(tiles: HopperTiles, quant: Quant) -> int:
    """Bytes of weights, scales and zero points that TMA copies for a stage."""
    return tiles.block_n // CHUNK * sum(unit_bytes(quant))


def multiplying_groups(tiles: HopperTiles) -> int:
    """Warp groups of a CTA that multiply.

    Two with 64 rows, of one unit of weight rows each: two CTAs an SM alone hide too little.
    """
    return 2 if tiles.kernel == DECODE_MANY or tiles.block_m == 64 else 1


def most_decode_stages(tiles: HopperTiles, scheme: Scheme, device: Device) -> int:
    """The largest stage count that fits."""
    quant = cast(Quant, scheme.weight)
    boxes = [tiles.block_n // CHUNK * nbytes for nbytes in unit_bytes(quant)]
    rows = tiles.block_m * STAGE_K * (1 if decodes_to_fp8(tiles.kernel, scheme) else 2)
    stage = sum(nbytes * places(nbytes) for nbytes in boxes) + rows
    if tiles.kernel == DECODE_MANY:
        return (device.shared_memory - MANY_BYTES) // stage
    beside = CTA_BYTES + 2 * 64 * min(tiles.block_m, 32) * multiplying_groups(tiles)
    return ((device.shared_memory + RESERVED_BYTES) // tiles.ctas - beside) // stage


def few_tiles(gemm: Gemm, scheme: Scheme, device: Device) -> HopperTiles:
    """Tiles of the kernel for few rows."""
    direct = is_direct(gemm.num_slots, gemm.num_experts)
    experts = gemm.num_slots if direct else uniform_experts(gemm)
    blocks = cdiv(gemm.halves * gemm.n, FEW_WEIGHT_ROWS)
    ctas = few_ctas(gemm.row_tile, experts * blocks, device)
    tiles = HopperTiles(DECODE_FEW, gemm.row_tile, FEW_WEIGHT_ROWS, 1, LEAST_STAGES, ctas=ctas)
    return with_stages(tiles, scheme, device)


def many_tiles(gemm: Gemm, scheme: Scheme, device: Device) -> HopperTiles:
    """Tiles of the kernel for many rows."""
    rows = gemm.row_tile
    tiles = HopperTiles(DECODE_MANY, rows, MANY_WEIGHT_ROWS, 8, LEAST_STAGES, on_demand=True)
    return with_stages(tiles, scheme, device)


def with_stages(tiles: HopperTiles, scheme: Scheme, device: Device) -> HopperTiles:
    """The tiles with as many stages as fit and bring anything."""
    most = FEW_STAGES if tiles.kernel == DECODE_FEW else MANY_STAGES
    return replace(tiles, num_stages=min(most, most_decode_stages(tiles, scheme, device)))


def uniform_experts(gemm: Gemm) -> float:
    """Experts that have rows, on average, if every slot chooses any of them."""
    return gemm.num_experts * (1 - (1 - 1 / gemm.routed_experts) ** gemm.num_slots)


class Jobs(NamedTuple):
    """How the kernels for few slots divide a program's products into jobs of a warp."""

    strips: int
    """Strips of 16 weight rows of a job."""
    parts: int
    """Parts of K of a slot."""
    passes: int
    """Passes of as many jobs as warps."""
    chunks: int
    """Chunks along K."""
    steps: int
    """Chunks of a job."""
    depth: int
    """Chunks of a round."""
    rounds: int
    """Rounds of a pass."""


def round_depth(steps: int, most: int) -> int:
    """Chunks of a round, at most ``most``, of a job with so many steps.

    Each round has a barrier of all warps, and so four are better than two, unless more chunks are
    computed then: the last round is computed whole.
    """
    if most >= 4 and 2 * cdiv(steps, 4) == cdiv(steps, 2):
        return 4
    return max(1, min(2, most, steps))


def divide_jobs(gemm: Gemm, quant: Quant, strips: int, slots: int) -> Jobs:
    """The jobs of a program that computes so many strips of so many slots.

    A slot has as many parts as let the warps be done first; a single one has a part a warp.
    """
    chunks = cdiv(gemm.k, CHUNK)

    def steps(parts: int) -> int:
        return cdiv(slots * parts, JOB_WARPS) * cdiv(chunks, parts)

    parts = JOB_WARPS if slots == 1 else min((1, 2, 4, 8), key=steps)
    steps_of_job = cdiv(chunks, parts)
    depth = round_depth(steps_of_job, ROUND_BITS // quant.element.stored_bits // strips)
    passes, rounds = cdiv(slots * parts, JOB_WARPS), cdiv(steps_of_job, depth)
    return Jobs(strips, parts, passes, chunks, steps_of_job, depth, rounds)


def round_bytes(jobs: Jobs, quant: Quant) -> int:
    """Bytes of shared memory of a round."""
    unit = unit_bytes(quant)  # of 64 rows and two chunks
    groups = max(1, stage_groups(quant) // 2)
    beside = (unit.scales + unit.zeros) // max(1, stage_groups(quant)) * groups
    weights = (unit.words // 2 + beside) * STRIP_ROWS // CHUNK
    return jobs.depth * JOB_WARPS * (jobs.strips * weights + 2 * CHUNK)


def count_sums(jobs: Jobs, buffers: int, quant: Quant) -> int:
    """Places for a strip's sums in a program, with as many more as make it `PREFERRING_BYTES`.

    A program of GEMM 2 comes early to an SM only if what GEMM 1 made the driver set aside as shared
    memory is enough for both: with `PREFERRING_BYTES` that is as much as there is.
    """
    more = cdiv(PREFERRING_BYTES - buffers * round_bytes(jobs, quant), SUM_BYTES)
    return max(jobs.strips * jobs.passes, more)


def job_tiles(
    kernel: str, jobs: Jobs, quant: Quant, programs: int, device: Device
) -> HopperTiles | None:
    """Tiles of a kernel with jobs, whose stages are the buffers of rounds; None: none fit."""
    ctas = max(1, min(JOB_CTAS, cdiv(programs, device.processors)))  # even without slots
    memory = device.shared_memory + RESERVED_BYTES
    room = memory // JOB_CTAS
    if ctas < JOB_CTAS:  # an SM has room for three programs of a slot and one with the sum
        room = memory * 3 // 10 if kernel == DECODE_SUM else memory * 3 // 4 // ctas
    beside = RESERVED_BYTES + SUM_BYTES * jobs.strips * jobs.passes
    buffers = (room - beside) // round_bytes(jobs, quant)
    total = jobs.passes * jobs.rounds
    if buffers < min(total, LEAST_BUFFERS):
        return None
    rows = jobs.strips * STRIP_ROWS
    return HopperTiles(kernel, JOB_WARPS, rows, 1, min(total, buffers), ctas=ctas)


def slot_tiles(gemm: Gemm, quant: Quant, device: Device) -> HopperTiles | None:
    """Tiles of the kernel of a slot; None: it does not take this GEMM.

    All programs fit on the GPU at once: see `SLOT_STRIPS`.
    """
    rows = gemm.halves * gemm.n
    for strips, most in SLOT_STRIPS[gemm.halves]:
        programs = gemm.num_slots * rows // (strips * STRIP_ROWS)
        whole = rows % (strips * STRIP_ROWS) == 0
        if whole and programs <= most * device.processors:
            return job_tiles(
                DECODE_SLOT, divide_jobs(gemm, quant, strips, 1), quant, programs, device
            )
    return None


def sum_tiles(gemm: Gemm, quant: Quant, device: Device) -> HopperTiles | None:
    """Tiles of the kernel with the weighted sum; None: it does not take this GEMM."""
    if gemm.num_slots > SUM_SLOTS:
        return None
    jobs = divide_jobs(gemm, quant, 1, gemm.num_slots)
    return job_tiles(DECODE_SUM, jobs, quant, gemm.n // STRIP_ROWS, device)
