"""Hopper's kernel of weight gradients on the CPU, in the tests' own interpreter.

Numbers are integers, so that sums are exact and every bit is known. On a GPU `test_expert_wgrad`
runs the kernel.
"""

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("runs kernels in the interpreter", allow_module_level=True)

from gluon_interpreter import interpreted  # noqa: E402
from kernel_cases import check_all, poisoned, whole  # noqa: E402
from pairwise import cover  # noqa: E402
from plans import ids_of, partly_full, planned, row_tile  # noqa: E402
from table_items import every_row  # noqa: E402

from moe_ops.dispatch.device import NO_GPU  # noqa: E402
from moe_ops.dispatch.hopper import takes_wgrad  # noqa: E402
from moe_ops.kernels.expert_wgrad import launch_on_hopper  # noqa: E402
from moe_ops.reference import expert_wgrad as reference  # noqa: E402
from moe_ops.reference.slots import local_experts  # noqa: E402
from moe_ops.tensors import TensorSpec  # noqa: E402

pytestmark = pytest.mark.kernel
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def check(ids, experts, n, k, tile, dtype=BF16, out_dtype=BF16, by_token="x"):
    """Every bit is the reference's. Rows that no slot of an expert reads are NaN."""
    mine = local_experts(ids, None, experts) >= 0
    rows = []
    for name, width in (("dy", n), ("x", k)):
        count = len(ids) if name in by_token else ids.numel()
        used = mine.view(count, -1).any(1)
        rows.append(poisoned(whole(count, width, seed=width).to(dtype), used))
    out = torch.full((experts, n, k), torch.nan, dtype=out_dtype)
    with row_tile(tile):
        plan = planned(ids, None, experts).plan
        with interpreted(3):
            launch_on_hopper(out, *rows, plan, ids.numel(), tile, adds=False)
        tiles = [plan, ids, None]
        expected = reference.expert_wgrad(*rows, None, tiles, experts, "unquantized", out_dtype)
        assert torch.equal(out, expected)
        if out_dtype == F32:
            check_added(expected, rows, tiles, tile)


def check_added(sums, rows, tiles, tile):
    """Sums are added to what is there; experts without rows keep their bits."""
    plan, ids, _ = tiles
    counts = torch.bincount(local_experts(ids, None, len(sums)) + 1, minlength=len(sums) + 1)
    total, empty = whole(*sums.shape, seed=3), counts[1:] == 0
    expected = total + sums
    for start in (total, expected):
        start[empty] = -0.0
        start[empty, :, ::2] = torch.nan
    with interpreted(3):
        launch_on_hopper(total, *rows, plan, ids.numel(), tile, adds=True)
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("tile", [64, 128, 192])
def test_parts_of_tiles(tile):
    """Experts without rows, with one, with each part of two tiles, and with turns of the ring."""
    counts = [0, 700, *partly_full(tile), 0]
    check(ids_of(counts, 2), len(counts), 128, 256, tile)


def case(n, k, top_k, tile, dtype, out_dtype, by_token):
    ids = ids_of([70, 0, 9, 200], top_k)
    ids[0, 0], ids[-1, -1] = 2**31 - 1, 4
    check(ids, 4, n, k, tile, dtype, out_dtype, by_token)


def test_sizes_and_dtypes():
    """Several tiles each way, the last of them with 8 rows or columns."""
    factors = {"n": (128, 136, 264), "k": (256, 264, 520), "top_k": (1, 2), "tile": (64, 128, 192)}
    factors |= {"dtype": (BF16, F16), "out_dtype": (BF16, F32), "by_token": ("", "dy", "x", "dyx")}
    check_all(cover(factors, ()), case)


def test_bands():
    """More rows of tiles than a band has, and a last band that is lower."""
    check(ids_of([3, 65], 1), 2, 17 * 128 + 8, 520, 64)


def test_any_plan():
    """Whatever a plan holds, nothing outside of the tensors is read: interpreters check that."""
    ids = ids_of([70, 0, 9, 200], 2)
    rows = whole(len(ids), 128).to(BF16), whole(ids.numel(), 256).to(BF16)
    with row_tile(64):
        plan = planned(ids, None, 4).plan
    g = torch.Generator().manual_seed(0)
    values = torch.tensor([0, 1, 3, 4, 70, ids.numel(), -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    for header in (False, True):
        hostile = values[torch.randint(len(values), plan.shape, generator=g)]
        if header:
            hostile[:4] = plan[:4]
        with interpreted(3):
            launch_on_hopper(torch.empty(4, 128, 256), *rows, hostile, ids.numel(), 64, adds=header)


@every_row(
    ("takes", "change"),
    [
        (True, {}),
        (True, {"dtype": F16, "other": F16}),
        (True, {"tile": 192}),
        (False, {"dtype": F32, "other": F32}),
        (False, {"other": F32}),
        (False, {"other": F16}),
        (False, {"tile": 32}),
        (False, {"tile": 96}),
        (False, {"n": 120}),
        (False, {"k": 248}),
        (False, {"n": 132}),
        (False, {"k": 260}),
        (False, {"address": 2}),
        (False, {"facts": NO_GPU._replace(arch=100)}),
        (False, {"facts": NO_GPU._replace(portable_only=True)}),
    ],
)
def test_what_the_kernel_takes(takes, change):
    """Many aligned 16-bit rows on Hopper."""
    of = {"n": 128, "k": 256, "dtype": BF16, "other": BF16, "tile": 64, "address": 0} | change
    dy, x = (
        TensorSpec.contiguous(of[key], 512, of[w]) for key, w in (("dtype", "n"), ("other", "k"))
    )
    for rows in ((dy._replace(address=of["address"]), x), (dy, x._replace(address=of["address"]))):
        assert takes_wgrad(*rows, of["tile"], of.get("facts", NO_GPU)) == takes
