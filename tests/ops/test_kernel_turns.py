"""Two turns of every loop and a remainder, in the kernels of rows, of sorts and of gradients.

Bit by bit what references make, in the interpreter: numbers are integers, so that sums are exact.
"""

from importlib import import_module

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("runs kernels in the interpreter", allow_module_level=True)

from kernel_cases import check_all, same, spaced, whole  # noqa: E402
from pairwise import cover  # noqa: E402
from plans import ids_of, planned, row_tile  # noqa: E402

from moe_ops import ops  # noqa: E402
from moe_ops.dispatch.tiles import SINGLE_LAUNCH_SLOTS  # noqa: E402
from moe_ops.kernels._sort.counting_sort import block_sizes  # noqa: E402
from moe_ops.reference.slots import local_experts  # noqa: E402
from moe_ops.scheme import parse_quant  # noqa: E402
from moe_ops.tensors import Tiles  # noqa: E402

pytestmark = pytest.mark.kernel
I32, BF16, F32 = torch.int32, torch.bfloat16, torch.float32
MAP = torch.tensor([1, -1, 0, 2, 9], dtype=I32)
"""Local experts of five experts, of which one is elsewhere and one is no expert of three."""


def ids_with_holes(tokens, k, experts, seed=0):
    """int32 ids: of a token without experts, of one with an expert in its last slot, of others."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (tokens, k), generator=g, dtype=I32)
    ids[-1, -1] = 2**31 - 1
    ids[0], ids[1, 0], ids[1, -1] = -(2**31), -1, 0
    return ids


def activated(key, width, dtype):
    rows = whole(3, width * (1 if key.endswith("no_mul") else 2), most=6).to(dtype)
    same("activation", spaced(rows), key)


def activated_backward(key, width, dtype, weighted, mapped, kept):
    ids = ids_with_holes(3, 2, 5 if mapped else 3)
    x = whole(6, width * (1 if key.endswith("no_mul") else 2)).to(dtype)
    weights = 2.0 ** whole(3, 2, most=1) if weighted else None
    slots = (ids, MAP if mapped else None, 3)
    grad, skipped = whole(6, width, seed=1).to(dtype), local_experts(*slots) < 0
    same("moe_activation_backward", grad, x, weights, *slots, key, kept, skipped=skipped)


def test_activations():
    """More columns than a program takes at once."""
    sizes = {"width": (1030, 20, 1024, 2050), "dtype": (BF16, F32)}
    sizes |= {"key": ("relu2", "relu2_no_mul")}
    check_all(cover(sizes, ()), activated)
    flags = {name: (False, True) for name in ("weighted", "mapped", "kept")}
    check_all(cover({**sizes, **flags}, ()), activated_backward)


def interleaved(name, width):
    """Alternating gate and up rows give what halves give."""
    halves = whole(4, 2 * width)
    pairs = halves.unflatten(1, (2, width)).mT.flatten(1)
    key = "swigluoai_uninterleave(clamp_limit=7.0,alpha=1.702,beta=1.0)"
    if name == "activation":
        one, two = ops.activation(pairs, "swigluoai"), ops.activation(halves, key)
    else:
        grad, rest = whole(4, width, seed=1), (None, torch.zeros(4, 1, dtype=I32), None, 1)
        one = ops.moe_activation_backward(grad, pairs, *rest, "swigluoai", True)
        two = ops.moe_activation_backward(grad, halves, *rest, key, True)
        assert torch.equal(one[0].unflatten(1, (width, 2)).mT.flatten(1), two[0])
        one, two = torch.cat([one[1], one[2]], 1), torch.cat([two[1], two[2]], 1)
    assert torch.equal(one, two)


def test_interleaved_activations():
    names = ("activation", "moe_activation_backward")
    check_all(cover({"name": names, "width": (20, 1030)}, ()), interleaved)


def summed(width, dtype, skipping, weighted, valid, k):
    x = whole(5, k, width).to(dtype)
    weights = (2.0 ** whole(5, k, most=1)).to(dtype) if weighted else None
    ids = ids_with_holes(5, k, 5 if skipping == "map" else 3) if skipping != "none" else None
    counts = torch.tensor([3], dtype=I32) if valid else None
    rest = (weights, ids, MAP if skipping == "map" else None, counts, 3)
    expected = same("moe_fused_mul_sum", x, *rest)
    out = torch.full((5, 2 * width), 7.0, dtype=dtype)
    ops.moe_fused_mul_sum_out(x, *rest, out=out[:, :width])
    assert torch.equal(out[:, :width], expected) and (out[:, width:] == 7).all()


def test_weighted_sums():
    factors = {"width": (1030, 20, 1024), "dtype": (BF16, F32), "k": (1, 3)}
    factors |= {"skipping": ("none", "ids", "map")}
    factors |= {"weighted": (False, True), "valid": (False, True)}
    check_all(cover(factors, ()), summed)


def copied(width, dtype, k, name):
    x, tokens = whole(4, width, most=100).to(dtype), 4
    rows = tokens * k
    if name == "gather_rows":
        index = torch.arange(rows - 1, -1, -1, dtype=I32)
        index[:3] = torch.tensor([rows, -1, 2**31 - 1])
        same(name, spaced(x), index, torch.tensor([0, 1, rows - 1]), k)
    elif name == "order_columns":
        order = torch.stack([torch.randperm(width).int() for _ in range(3)])
        order[0, :3] = torch.tensor([-1, width, -(2**31)])
        same(name, spaced(x), order, ids_with_holes(tokens, k, 5), MAP)
    else:
        index = torch.arange(rows, dtype=I32).flip(0).view(tokens, k)
        index[0, 0], index[1, 0] = -1, rows
        weights = 2.0 ** whole(tokens, k, most=1)
        for offset in (None, torch.tensor([0, 2, rows - 1])):
            same(name, whole(rows, width).to(dtype), weights, index, offset)
            same(name, whole(rows, width).to(dtype), None, index, offset)


def test_copies_of_rows():
    names = ("gather_rows", "order_columns", "moe_unpermute")
    factors = {"width": (2052, 1030, 20), "dtype": (BF16, F32), "k": (1, 2), "name": names}
    check_all(cover(factors, ()), copied)


def sorted_slots(slots, experts, mapped, name, k):
    """Few slots, those of several blocks, and tables that are read in several steps."""
    ids = ids_with_holes(slots // k, k, experts + 2, seed=slots)
    ids[3 * len(ids) // 4 :] = experts - 1  # blocks with one expert alone
    expert_map = None
    if mapped:
        expert_map = torch.arange(experts + 2, dtype=I32).flip(0) - 1
        if name == "moe_align_block_size":
            expert_map = expert_map.long()
            expert_map[0] = 2**32 + 1  # no name of 32 bits
    if name == "batched_rows":
        same(name, ids, 2, experts - 2, 40)
    elif name == "moe_align_block_size":
        for block in (1, 32):
            same(name, ids, expert_map, block, experts + 2, False, True)
            same(name, ids, expert_map, block, experts + 2, True, False)
    elif name == "adapter_ids":
        same(name, ids, expert_map, torch.arange(len(ids)) % 7 - 2, experts, 3)
    elif name == "plan_slots":
        with row_tile(16):
            same(name, ids, expert_map, experts, "unquantized", BF16)
    else:
        same(name, ids, expert_map, experts)


SORTS = (
    "moe_permutation", "count_expert_num_tokens", "batched_rows", "moe_align_block_size",
    "plan_slots", "adapter_ids",
)  # fmt: skip
"""Operators that sort slots, or say where they go."""


def test_sorts():
    sizes = {"slots": (60, 1000, 4300), "experts": (3, 40, 600), "k": (1, 4)}
    check_all(cover({**sizes, "mapped": (False, True), "name": SORTS}, ()), sorted_slots)


def test_sums_of_counts_fit():
    """16 bits hold the slots of a bucket in the blocks that a thread adds up."""
    for power in range(11, 31):
        for slots in (2**power, 2**power + 1):
            for experts in (1, 2, 60, 512, 4096):
                sizes = block_sizes(slots, experts)
                assert slots <= SINGLE_LAUNCH_SLOTS or sizes.rows * sizes.block < 2**16


def spans(counts, most, tile, batched):
    counts = torch.tensor(counts, dtype=I32)
    with row_tile(tile):
        if batched:
            same("plan_batched", counts, most, "unquantized")
        else:
            offset = torch.cat([counts.new_zeros(1), counts.clamp(min=0).cumsum(0)])
            same("plan_permuted", offset, int(offset[-1]) + 3, "unquantized")


def test_plans_of_rows_that_lie_together():
    """An expert with more rows than are listed at once, and with more tiles than are named."""
    counts = ((300, 0, 17), (5, 2100, 16), (0, 1, 513))
    factors = {"counts": counts, "most": (2200,), "tile": (16, 64), "batched": (False, True)}
    check_all(cover(factors, ()), spans)


def batched(width, quant, weighted, room, tokens, k):
    """Slots of several blocks; rows of several pieces; experts with more slots than room."""
    x = whole(tokens, width, most=90).to(BF16)
    ids = torch.randint(0, 7, (tokens, k), generator=torch.Generator().manual_seed(1), dtype=I32)
    ids[::5] = 3
    weights = 2.0 ** whole(tokens, k, most=1) if weighted else None
    static = "static" in quant
    scale = torch.tensor([0.25]) if static else None
    same("batched_dispatch", spaced(x), scale, weights, ids, 2, 3, room, quant)


def test_batched_dispatch():
    quants = (
        "", "fp8:1x*:float32", "int8:*x*:float32", "fp8:1x128:float32", "int8:*x*:float32:static",
    )  # fmt: skip
    sizes = {"width": (1032, 24), "tokens": (300, 30), "k": (1, 4), "room": (3, 9)}
    check_all(cover({**sizes, "quant": quants, "weighted": (False, True)}, ()), batched)


def quantized(width, rows, quant, source, dtype, holes):
    """Rows, activated rows and rows of experts, whose scale may be given or spread over pieces."""
    gated = source != "rows"
    x = whole(rows, 2 * width if gated else width, most=9, seed=width).to(dtype)
    x[-1, -1], x[0, 0] = 40, -30
    static = "static" in quant
    scale = torch.tensor([0.25]) if static else None
    ids = ids_with_holes(rows, 2, 3) if holes else None
    if source == "rows":
        same("moe_quantize", spaced(x), scale, None, ids, None, 3, quant)
        if static and not parse_quant(quant).per_tensor:
            scale = 2.0 ** whole(rows, 1, most=2, seed=3)
        weights = 2.0 ** whole(rows, 2, most=1)
        same("moe_quantize", spaced(x), scale, weights, ids, None, 3, quant)
    elif source == "activated":
        same("activation_quantize", spaced(x), scale, ids, None, 3, "relu2", quant)
    else:
        counts = torch.tensor([rows, 0, rows // 2 + 1], dtype=I32)
        x = torch.stack([x, 2 * x, 3 * x])
        if static:
            scale = torch.tensor([0.25, 1.0, 2.0]).view(3, 1, 1)
        same("batched_activation_quantize", x, scale, counts, "relu2", quant)
        same("batched_quantize", x, scale, counts, quant)


def test_quantization():
    """Rows of 360 numbers are read in three parts, those of 4100 in two turns or many pieces."""
    quants = (
        "fp8:1x*:float32", "int8:1x*:float32", "int8:*x*:float32", "fp8:1x128:float32",
        "fp4:1x16:e8m0", "fp8:1x32:e8m0", "int8:*x*:float32:static", "fp8:1x*:float32:static",
    )  # fmt: skip
    sizes = {"width": (16, 260, 360, 4100), "rows": (3, 9), "dtype": (BF16, F32)}
    factors = {"quant": quants, "source": ("rows", "activated", "batched"), "holes": (False, True)}
    check_all(cover({**sizes, **factors}, ()), quantized)


def mapped(tokens, k, dtype, counted):
    """More slots than a program maps."""
    ids = ids_with_holes(tokens, k, 6)
    replicas = torch.tensor([[0, 6, 7], [1, -1, 9], [2, 8, 3], [3, 0, 1], [4, 9, 4], [5, 11, 5]])
    counts = torch.tensor([3, 1, 2, 0, 9, 2]).to(dtype)
    limit = torch.tensor(tokens - 2) if counted else None
    rest = (replicas.to(dtype), counts, None, limit, dtype, 5, torch.tensor(3))
    loads = []
    for package in ("kernels", "reference"):
        load = torch.zeros(9, 2, dtype=I32)[:, 0]
        stage = import_module(f"moe_ops.{package}.eplb")
        out = stage.eplb_map_to_physical_and_record(ids, load, *rest)
        loads.append((out, load))
    assert all(map(torch.equal, *loads))


def adjusted(tokens, k, shared, scaled, padded):
    ids, weights = ids_with_holes(tokens, k, 9), whole(tokens, k)
    scale = 2.0 ** whole(9, most=1) if scaled else None
    padding = torch.arange(tokens) % 3 == 0 if padded else None
    same("adjust_routing", weights, ids, scale, padding, 9, shared, 0.5)


def test_what_follows_routing():
    sizes = {"tokens": (3, 200), "k": (1, 4), "dtype": (I32, torch.int64)}
    check_all(cover({**sizes, "counted": (False, True)}, ()), mapped)
    flags = {"scaled": (False, True), "padded": (False, True)}
    check_all(cover({"tokens": (3, 150), "k": (1, 4), "shared": (0, 2), **flags}, ()), adjusted)
    for width in (1030, 20):
        ids = torch.tensor([[0, 4], [5, 7], [4, -1]], dtype=I32)
        same("zero_experts", spaced(whole(3, width)), whole(3, 2, seed=1), ids, 4, 99)


def gradients(top_k, n, k, dtype, by_token, weighted, few):
    """Weights', biases' and router weights' gradients: several tiles of rows and columns."""
    ids = torch.tensor([[3, 1]]).int().view(-1, top_k) if few else ids_of((40, 0, 2, 5), top_k)
    tokens, slots = len(ids), ids.numel()
    dy = whole(tokens if by_token == "dy" else slots, n).to(dtype)
    x = whole(tokens if by_token == "x" else slots, k, seed=1).to(dtype)
    weights = 2.0 ** whole(*ids.shape, most=1) if weighted else None
    with row_tile(16):
        tiles = [*(Tiles(None, ids) if few else Tiles(planned(ids, None, 4).plan, ids))]
        same("expert_wgrad", dy, x, weights, tiles, 4, "unquantized", dtype)
        same("expert_bias_grad", dy, weights, tiles, 4, "unquantized")
    y = whole(slots, k, seed=2).to(dtype)
    if by_token == "x":
        same("slot_products", x, y, ids, None, 4, False)
        same("slot_products", x, y[:4], ids, None, min(4, slots), True)


def test_gradients_of_weights():
    factors = {"top_k": (1, 2), "n": (16, 68, 132), "k": (20, 68, 132), "dtype": (BF16, F32)}
    factors |= {"by_token": ("", "dy", "x"), "weighted": (False, True), "few": (False, True)}
    check_all(cover(factors, ()), gradients)


def test_gradients_of_more_tiles_than_are_read_at_once():
    """513 tiles come before the last experts'."""
    ids = ids_of((8200, 3, 20), 1)
    with row_tile(16):
        tiles = [*Tiles(planned(ids, None, 3).plan, ids)]
        same("expert_bias_grad", whole(len(ids), 16), None, tiles, 3, "unquantized")


def test_products_of_long_rows():
    ids = ids_with_holes(3, 2, 5)
    for width in (1030, 20):
        x, y = whole(3, width).bfloat16(), whole(6, width, seed=1).bfloat16()
        same("slot_products", x, y, ids, MAP, 3, False)
        same("slot_products", x, y[:3], ids, MAP, 3, True)
    assert (local_experts(ids, MAP, 3) >= 0).any()
