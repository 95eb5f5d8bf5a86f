"""`scale_groups`: the columns that share scales, and the tiles of kernels that rely on it."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe_ops.activation import formula, row_steps
from moe_ops.dispatch.families.base import broken
from moe_ops.dispatch.families.many_rows import CONDITIONS
from moe_ops.dispatch.hopper import KERNELS, PACKED, HopperTiles, tile_widths
from moe_ops.dispatch.portable import EVERY_COLUMN, scale_groups
from moe_ops.dispatch.problem import GemmProblem, WeightRows
from moe_ops.dispatch.row_tiles import HOPPER
from moe_ops.dispatch.tiles import ROW_TILES, Gemm
from moe_ops.inspect.devices import TARGETS
from moe_ops.scheme import get_scheme

pytest.importorskip("triton")

from moe_ops.kernels._hopper import epilogue, gathered  # noqa: E402
from moe_ops.kernels._hopper.gemm import RowFacts, constants  # noqa: E402

HALVES, ALTERNATING, NO_GATE = "silu", "swigluoai", "relu2_no_mul"
ACTIVATIONS = st.sampled_from((HALVES, ALTERNATING, NO_GATE))
GROUP_ROWS = st.sampled_from((1, 16, 32, 64, 128, 256))
ON_CPU = SimpleNamespace(
    minimum=np.minimum, arange=lambda *ends, layout: np.arange(*ends),
    static_range=range, SliceLayout=lambda *layout: None,
)  # fmt: skip
"""What the index computations of Hopper's kernels need of Gluon's language, in NumPy."""


def is_shared(width, n, group_rows, rule):
    """Whether runs of ``width`` columns have one scale of (gate) rows, and one of up rows."""
    step, up = row_steps(rule, n)
    column = np.arange(n)
    for row in (column * step, column * step + up):
        scale = row // group_rows
        if np.any(scale != scale[column // width * width]):
            return False
    return True


@given(st.integers(1, 3000), GROUP_ROWS, ACTIVATIONS)
@example(2880, 128, HALVES)
@example(1440, 128, HALVES)
@example(704, 128, HALVES)
@example(640, 128, HALVES)
def test_the_longest_runs_that_share_scales(n, group_rows, activation):
    rule = formula(activation)
    width = scale_groups(n, 128, group_rows, rule).n
    assert width & (width - 1) == 0 and is_shared(width, n, group_rows, rule)
    assert width == EVERY_COLUMN or not is_shared(2 * width, n, group_rows, rule)


def test_up_rows_that_begin_inside_a_group():
    found = {n: scale_groups(n, 128, 128, formula(HALVES)).n for n in (2880, 1408, 704, 1440, 200)}
    assert found == {2880: 64, 1408: 128, 704: 64, 1440: 32, 200: 8}


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernels' index computations run on NumPy arrays."""
    for module in (epilogue, gathered):
        monkeypatch.setattr(module, "gl", ON_CPU)
    monkeypatch.setattr(epilogue, "RUN", epilogue.RUN.value)


def has_right_scales(c, kernel):
    """Whether every weight row is multiplied by its scale, in every tile of an expert."""
    by_columns = 2 if kernel == PACKED and c.BY_COLUMNS else 1
    share, cols = c.OUT_N // by_columns, c.BLOCK_N // by_columns // c.PARTS
    for first in range(0, c.NUM_N * c.OUT_N, share):
        scales = gathered.find_scales.fn(0, first, SimpleNamespace(weight_scale=0), c)
        assert len(scales) == c.PARTS
        for part, (gate, up) in enumerate(scales):
            row, inside = epilogue.weight_rows.fn(first + part * (share // c.PARTS), cols, None, c)
            of_up = np.arange(cols) // 8 % 2 == 1 if c.GATED else np.zeros(cols, bool)
            used = np.where(of_up, up, gate)
            if np.any((row // c.SCALE_ROWS * c.STEPS != used)[inside]):
                return False
    return True


@given(st.integers(1, 400).map(lambda i: 8 * i), GROUP_ROWS, ACTIVATIONS)
@example(2880, 128, HALVES)
@example(2880, 128, ALTERNATING)
@example(1440, 128, HALVES)
@example(704, 128, HALVES)
def test_hoppers_kernels_take_what_every_tile_of_theirs_scales_right(on_cpu, n, rows, activation):
    scheme, rule = get_scheme("fp8_block128"), formula(activation)
    gemm = Gemm(32768, 64, n, 2880, 1, 2 if rule.gated else 1, HOPPER[1])
    weight = WeightRows.of(rule, n, scheme.weight, rows)
    right = [
        has_right_scales(constants(n, 2880, 4, rule, weight, RowFacts(1), tiles), kernel)
        for kernel in KERNELS
        for block_m in ROW_TILES
        for block_n in tile_widths(kernel, block_m, 1)
        for tiles in [HopperTiles(kernel, block_m, block_n, 1, 2)]
    ]
    problem = GemmProblem(gemm, scheme.key, activation, scale_rows=rows)
    why = broken(CONDITIONS, problem, TARGETS["sm_90"].facts)
    assert why == (None if all(right) else "128 weight rows (64 with a gate) must share scales")
