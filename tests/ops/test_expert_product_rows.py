"""Expert products of a weight in host memory, with slots for some experts, wave by wave."""

import pytest
import torch
from conftest import INTERPRETED
from pairwise import cover
from products import weight_of
from residencies import residency_of_weights, whole_weights
from table_items import every_row

from moe_ops import ops
from moe_ops.dispatch.operands import operands_of
from moe_ops.scheme import SCHEMES as SCHEMES_IN_FULL
from moe_ops.scheme import get_scheme, pack_weight, packs, quantize_weight
from moe_ops.tensors import ExpertWeight

E, K, H, N = 6, 2, 64, 64
SCHEMES = (
    "unquantized", "fp8_channel", "int8_channel", "fp8_block32", "fp8_tensor", "int4_w4a16_g32_zp",
    "mxfp4_w4a16", "mxfp8", "int8_w8a16",
)  # fmt: skip
CALLS = {"scheme": SCHEMES, "tokens": (1, 40), "mapped": (False, True)}
WAVES = cover(CALLS, [], 2 if INTERPRETED else len(CALLS))


@pytest.mark.kernel
@every_row(tuple(CALLS), [[row[name] for name in CALLS] for row in WAVES])
def test_waves_have_the_bits_of_the_whole(scheme, tokens, mapped, device):
    """Each wave writes the rows of its experts, and leaves the others as they are."""
    g, quants = torch.Generator().manual_seed(tokens), get_scheme(scheme)
    x = torch.randn(tokens, H, generator=g).to(device, torch.bfloat16)
    w, bias = torch.randn(E, N, H, generator=g).to(device) / 8, torch.randn(E, N, generator=g)
    weight = ExpertWeight(w.bfloat16(), bias.to(device))
    if quants.weight is not None:
        weight = weight_of(quantize_weight(w, scheme), bias.to(device))
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].to(device, torch.int32)
    expert_map = None
    if mapped:
        expert_map = torch.tensor([2, 0, -1, 5, 3, 1, 4, -1], dtype=torch.int32, device=device)
        ids[0, 0] = 2  # an expert of another rank
    plan = ops.plan_slots(ids, expert_map, E, scheme, x.dtype)
    tiles, rest = [plan, ids, expert_map], (K, scheme, x.dtype, "silu")
    rows, scale = x, None
    if quants.activation is not None:
        rows, scale = ops.moe_quantize(x, None, None, ids, expert_map, E, quants.activation.key)
    local = ids.long() if expert_map is None else expert_map.long()[ids.long()]
    mine = local.flatten() >= 0
    whole = ops.expert_product(rows, scale, [*weight], None, tiles, *rest)[mine]
    owner = residency_of_weights(weight, weight, 2)
    for each in whole_weights(owner):
        out = ops.expert_product(rows, scale, each, None, tiles, *rest)
        assert torch.equal(out[mine], whole)


@pytest.mark.kernel
def test_permuted_rows(device):
    """Rows between two GEMMs keep their places, whichever wave they belong to."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, H, generator=g).to(device)
    w1, w2 = (torch.randn(E, *s, generator=g).to(device) / 8 for s in ((2 * N, H), (H, N)))
    ids = torch.rand(40, E, generator=g).argsort(1)[:, :K].to(device, torch.int32)
    tiles = [ops.plan_slots(ids, None, E, "unquantized", x.dtype), ids, None]
    first, second = (K, "unquantized", x.dtype, "silu", True), (1, "unquantized", x.dtype, "", True)
    owner = residency_of_weights(ExpertWeight(w1), ExpertWeight(w2), 3)
    results = []
    for one, two in (([w1], [w2]), whole_weights(owner)):
        h = ops.expert_product(x, None, one, None, tiles, *first)
        results.append((h, ops.expert_product(h, None, two, None, tiles, *second)))
    for whole, waves in zip(*results, strict=True):
        assert torch.equal(whole, waves)


@pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
def test_plans_are_those_of_all_experts():
    """In every scheme and form, with room for half of the experts."""
    ids = torch.zeros(16, K, dtype=torch.int32)
    for scheme in SCHEMES_IN_FULL:
        known = get_scheme(scheme)
        w = torch.ones(E, 128, 128)
        forms = [ExpertWeight(w.bfloat16())]
        if known.weight is not None:
            q = quantize_weight(w, scheme)
            forms = [weight_of(q)]
            forms += [weight_of(pack_weight(q, scheme))] if packs(scheme, 128, 128) else []
        for whole in forms:
            part = whole_weights(residency_of_weights(whole, whole, 3))[0]
            rest = {
                "a": torch.zeros(16, 128, dtype=torch.bfloat16), "tiles": [None, ids, None],
                "top_k": K, "scheme": scheme, "out_dtype": torch.bfloat16,
            }  # fmt: skip
            first, second = (operands_of("expert_product", {**rest, "weight": x})
                             for x in (whole, part))  # fmt: skip
            assert first == second, scheme
