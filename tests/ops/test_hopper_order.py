"""Hopper's kernel of many rows, with the rows between two GEMMs in expert order."""

import pytest
import torch
from conftest import HAS_CUDA
from gemm_rows import exact_rows
from hopper_cases import CASES
from modular import setup
from plans import row_tile
from products import plain_product

import moe_ops
from moe_ops import ops
from moe_ops.reference.slots import local_experts
from moe_ops.testing import Problem, assert_matches_reference, make_inputs

pytest.importorskip("triton")


@pytest.fixture
def launched(monkeypatch):
    """What Hopper's kernels are asked to do: GEMMs, each before the packing of its rows, if any."""
    if not HAS_CUDA or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from moe_ops.kernels._hopper import gemm as hopper_gemm

    names = []

    def counted(name, function):
        def call(*arguments):
            names.append(name)
            return function(*arguments)

        return call

    gemm = hopper_gemm.HopperGemm
    monkeypatch.setattr(gemm, "__call__", counted("gemm", gemm.__call__))
    monkeypatch.setattr(hopper_gemm, "pack_rows", counted("pack", hopper_gemm.pack_rows))
    return names


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[:4], ids=lambda c: f"{c[1]}-{c[2].get('routing', '')}")
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "gelu_no_mul"])
@pytest.mark.parametrize(("hidden", "width"), [(512, 256), (208, 136)])
def test_expert_order(case, activation, hidden, width, launched):
    """Bit by bit the rows in slot order; at most the tokens are packed. Others' rows may hold NaN.

    Tiles of 128 rows fetch those of so narrow products.
    """
    kernel, tile, sizes = case
    one = ["gemm", "pack"] if kernel == "packed" else ["gemm"]
    sizes = {**sizes, "hidden_size": hidden, "intermediate_size": width, "has_bias": True}
    p = Problem(dtype=torch.bfloat16, activation=activation, **sizes)
    x, w1, w2, _, ids, _, b1, b2 = make_inputs(p, "cuda")
    num_slots = ids.numel()
    with row_tile(tile, portable_only=False):
        layer = (p.num_experts, "unquantized", torch.bfloat16)
        tiles = [ops.plan_slots(ids, None, *layer), ids, None]
    expert = local_experts(ids, None, p.num_experts)
    slots = (expert >= 0).nonzero().flatten()
    slots = slots[expert[slots].argsort(stable=True)]

    def first(ordered):
        with row_tile(tile, portable_only=False):
            rest = (tiles, p.top_k, activation, ordered)
            return plain_product(ops, x, w1, b1, None, *rest)

    def second(rows, ordered):
        with row_tile(tile, portable_only=False):
            return plain_product(ops, rows, w2, b2, None, tiles, 1, "", ordered)[slots]

    by_slot, by_expert = first(False), first(True)
    assert torch.equal(by_slot[slots], by_expert[: len(slots)])
    by_expert[len(slots) :] = torch.nan
    assert launched == one * 2
    wanted, actual = second(by_slot, False), second(by_expert, True)
    assert wanted.isfinite().all() and torch.equal(wanted, actual)
    assert launched == one * 3 + ["gemm"]
    # No box begins there: the other kernel takes these rows.
    aside = by_expert.new_empty(num_slots, width + 1)[:, 1:].copy_(by_expert)
    exact = exact_rows(by_slot.cpu(), w2.cpu(), b2.cpu(), None, ids.cpu(), 1).value
    assert_matches_reference(second(aside, True).cpu(), exact[slots.cpu()], wanted.cpu())
    assert launched == one * 3 + ["gemm"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "experts", [moe_ops.pipeline.TritonExperts, moe_ops.pipeline.GroupedGemmExperts]
)
def test_packings_of_a_layer(experts, launched):
    """With tiles of 128 rows the first GEMM packs tokens if it is wide; nothing else is packed."""
    for width, packs in ((1600, experts is moe_ops.pipeline.TritonExperts), (128, False)):
        launched.clear()
        s = setup(Problem(640, 4, 2, 256, width, torch.bfloat16), experts, device="cuda")
        s.kernel.apply(**s.arguments())
        assert launched == [*(["gemm", "pack"] if packs else ["gemm"]), "gemm"]
