"""Expert products of a weight that holds some experts, in rows of its own, part by part."""

import importlib

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from products import weight_of
from table_items import every_row

from moe_ops import ops
from moe_ops.scheme import get_scheme, quantize_weight
from moe_ops.tensors import ExpertWeight

E, K, H, N = 6, 2, 64, 64
LEG = importlib.import_module(
    f"moe_ops.{'kernels' if HAS_CUDA or INTERPRETED else 'reference'}.expert_product"
)
SCHEMES = (
    "unquantized", "fp8_channel", "int8_channel", "fp8_block32", "fp8_tensor", "int4_w4a16_g32_zp",
    "mxfp4_w4a16", "mxfp8", "int8_w8a16",
)  # fmt: skip
PARTS = ([4, 0], [5, 1, 2], [3])
"""The experts of each part, in the order of their rows."""


def held(weight, experts, device):
    """The rows of a part in the tensors of a weight with room for three experts, else NaN."""
    rows = torch.full((E,), -1, dtype=torch.int32)
    rows[experts] = torch.arange(len(experts), dtype=torch.int32)

    def part(x):
        if x is None:
            return None
        found = x.new_full((3, *x.shape[1:]), 0) if x.dtype.itemsize == 1 else x[:3] * torch.nan
        found[: len(experts)].view(torch.uint8).copy_(x[experts].contiguous().view(torch.uint8))
        return found

    return ExpertWeight(*map(part, weight[:5]), rows.to(device))


@pytest.mark.kernel
@every_row("mapped", [False, True])
@every_row("tokens", [1, 3, 40])
@every_row("scheme", SCHEMES)
def test_parts_have_the_bits_of_the_whole(scheme, tokens, mapped, device):
    """Each part writes the rows of its experts, and leaves the others as they are."""
    g, known = torch.Generator().manual_seed(tokens), get_scheme(scheme)
    x = torch.randn(tokens, H, generator=g).to(device, torch.bfloat16)
    w, bias = torch.randn(E, N, H, generator=g).to(device) / 8, torch.randn(E, N, generator=g)
    weight = ExpertWeight(w.bfloat16(), bias.to(device))
    if known.weight is not None:
        weight = weight_of(quantize_weight(w, scheme), bias.to(device))
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].to(device, torch.int32)
    expert_map = None
    if mapped:
        expert_map = torch.tensor([2, 0, -1, 5, 3, 1, 4, -1], dtype=torch.int32, device=device)
        ids[0, 0] = 2  # an expert of another rank
    plan = ops.plan_slots(ids, expert_map, E, scheme, x.dtype)
    tiles, how = [plan, ids, expert_map], (K, scheme, x.dtype, "silu")
    rows, scale = x, None
    if known.activation is not None:
        slots = (ids, expert_map, E)
        rows, scale = ops.moe_quantize(x, None, None, *slots, known.activation.key)
    whole = LEG.expert_product(rows, scale, weight, None, tiles, *how)
    out = torch.full_like(whole, 77.0)
    for experts in PARTS:
        before = out.clone()
        part = held(weight, experts, device)
        assert LEG.expert_product(rows, scale, part, None, tiles, *how, out=out) is out
        local = ids.long() if expert_map is None else expert_map.long()[ids.long()]
        mine = torch.isin(local.flatten(), torch.tensor(experts, device=device))
        assert torch.equal(out[~mine], before[~mine])
        assert torch.equal(out[mine], whole[mine])


@pytest.mark.kernel
def test_permuted_rows(device):
    """Rows between two GEMMs keep their places, whichever part they belong to."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, H, generator=g).to(device)
    w1, w2 = (torch.randn(E, *s, generator=g).to(device) / 8 for s in ((2 * N, H), (H, N)))
    ids = torch.rand(40, E, generator=g).argsort(1)[:, :K].to(device, torch.int32)
    tiles = [ops.plan_slots(ids, None, E, "unquantized", x.dtype), ids, None]
    first, second = (K, "unquantized", x.dtype, "silu", True), (1, "unquantized", x.dtype, "", True)
    h = LEG.expert_product(x, None, ExpertWeight(w1), None, tiles, *first)
    y = LEG.expert_product(h, None, ExpertWeight(w2), None, tiles, *second)
    parts = [torch.full_like(h, torch.nan), torch.full_like(y, torch.nan)]
    for a, w, how, out in ((x, w1, first, parts[0]), (h, w2, second, parts[1])):
        for experts in PARTS:
            part = held(ExpertWeight(w), experts, device)
            LEG.expert_product(a, None, part, None, tiles, *how, out=out)
    assert torch.equal(parts[0], h) and torch.equal(parts[1], y)
