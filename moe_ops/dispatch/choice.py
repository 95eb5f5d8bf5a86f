"""The kernel and the tiles of an expert GEMM, from its sizes, its scheme and the GPU.

Launchers, explanations, warm-up, the workspace and the tuner all ask `tiles_of`.
"""

from __future__ import annotations

from dataclasses import replace

from moe_ops.activation import Formula
from moe_ops.dispatch.blackwell import TILES_FROM, block_scaled_tiles, is_block_scaled
from moe_ops.dispatch.hopper import takes
from moe_ops.dispatch.portable import (
    ScaleGroups,
    gemm_tiles,
    scale_groups,
    scaled_gemm_tiles,
    weight_only_tiles,
)
from moe_ops.dispatch.tiles import Device, Gemm, TileConfig
from moe_ops.dispatch.tuned import Choice, choose
from moe_ops.dispatch.tuned_file import scaled_group
from moe_ops.scheme import WHOLE, Scheme


def tiles_of(
    gemm: Gemm,
    scheme: Scheme,
    rule: Formula | None,
    device: Device,
    weight_rows: int | None = None,
) -> Choice:
    """The tiles of one GEMM: what a file says, else the analytic choice.

    Args:
        gemm: its sizes; ``itemsize`` of its rows before they are quantized, or after.
        scheme: its scheme.
        rule: the activation of its product, if it has one.
        device: the GPU.
        weight_rows: weight rows that share a scale; None: as many as the scheme says.
    """
    if is_block_scaled(scheme.name, device.arch):
        return Choice(block_scaled_tiles(gemm, scheme.name, device), TILES_FROM)
    default = analytic_tiles(gemm, scheme, rule, device, weight_rows)
    own = is_hoppers(gemm, scheme, rule, device, weight_rows)
    gemm, bits = stored_gemm(gemm, scheme)
    found = choose(gemm, scheme.name, bits, device, default, hopper=own)
    if scheme.decoded and device.arch in (100, 103) and found.plain.block_m >= 64:
        # Triton 3.6 cannot pipeline a Blackwell product whose first operand is computed.
        found = found._replace(plain=replace(found.plain, num_stages=1))
    return found


def is_hoppers(
    gemm: Gemm,
    scheme: Scheme,
    rule: Formula | None,
    device: Device,
    weight_rows: int | None = None,
) -> bool:
    """Whether Hopper's own kernels take a GEMM; arguments as in `tiles_of`."""
    gemm, _ = stored_gemm(gemm, scheme)
    quantized = scheme.activation is not None and not scheme.decoded
    groups = _groups(gemm, scheme, rule, weight_rows) if quantized else None
    return takes(gemm, scheme, groups, device)


def analytic_tiles(
    gemm: Gemm,
    scheme: Scheme,
    rule: Formula | None,
    device: Device,
    weight_rows: int | None = None,
) -> TileConfig:
    """The portable kernel's tiles where no file has others, and products are not block-scaled."""
    gemm, bits = stored_gemm(gemm, scheme)
    if scheme.weight is None:
        return gemm_tiles(gemm, device)
    if scheme.activation is None or scheme.decoded:
        return weight_only_tiles(gemm, bits, device)
    return scaled_gemm_tiles(gemm, _groups(gemm, scheme, rule, weight_rows), device)


def _groups(
    gemm: Gemm, scheme: Scheme, rule: Formula | None, weight_rows: int | None
) -> ScaleGroups:
    """How the scales of two quantized operands lie."""
    if weight_rows is None:
        rows = WHOLE if scheme.weight is None else scheme.weight.group.rows
        weight_rows = gemm.halves * gemm.n if rows == WHOLE else rows
    return scale_groups(gemm.n, scaled_group(scheme), weight_rows, rule)


def stored_gemm(gemm: Gemm, scheme: Scheme) -> tuple[Gemm, int]:
    """The GEMM with the bytes that a number of a row takes in it, and the bits of a weight."""
    if scheme.weight is None:
        return gemm, 8 * gemm.itemsize
    if scheme.decoded:
        gemm = gemm._replace(itemsize=2)
    if scheme.activation is None or scheme.decoded:
        return gemm, scheme.weight.element.stored_bits
    return gemm._replace(itemsize=1), 8
