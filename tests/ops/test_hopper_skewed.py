"""Hopper's kernel of many rows where experts have few rows, many, or none, in every way of it.

Whatever its tiles and how programs come to them, sums along K are added up in one order: results
are bit by bit those of tiles of 64 rows that are dealt out.
"""

from dataclasses import replace

import launches
import pytest
import torch
from gemm_rows import activated, exact_rows, exact_scaled_rows, numbers
from hopper_cases import SCHEMES
from plans import ids_of

from moe_ops import ops
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import device_facts
from moe_ops.dispatch.hopper import PACKED, HopperTiles, most_stages, widths
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import get_scheme, quantize_weight
from moe_ops.testing import assert_matches_reference

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
COUNTS = (0, 1, 63, 64, 65, 128, 129, 191, 192, 193, 400, 0)
PLAIN = (64, 128, False)
"""Rows and columns of a tile, and whether it is taken on demand: all others give the same."""
WAYS = [PLAIN, (64, 256, False), (128, 128, True)] + [
    (rows, 256, on_demand) for rows in (128, 192) for on_demand in (False, True)
]


@pytest.fixture
def launched(monkeypatch):
    return launches.launched_hopper_kernels(monkeypatch)


def ways(scheme):
    """Those that there are of a scheme's operands."""
    size = 2 if scheme == "unquantized" else 1
    return [way for way in WAYS if way[1] in widths(PACKED, way[0], size)]


@pytest.fixture
def choose(monkeypatch):
    """A function that makes Hopper's kernel of many rows take its tiles in a way."""

    def chosen(way, group_m=3):
        rows, columns, on_demand = way

        def tiles_of(gemm, device):
            tiles = HopperTiles(PACKED, rows, columns, group_m, 2, on_demand)
            return replace(tiles, num_stages=most_stages(tiles, device))

        monkeypatch.setattr(tuned, "TABLES", tuned.tables([]))  # with plans of their own
        monkeypatch.setattr(tuned, "hopper_tiles", tiles_of)

    return chosen


class Skewed:
    """Both GEMMs of a layer, of a routing that was made by hand."""

    def __init__(self, scheme, counts=COUNTS, hidden=400, width=384, top_k=2, local=None):
        self.top_k, self.scheme, self.experts = top_k, scheme, len(counts)
        self.ids, self.expert_map = ids_of(counts, top_k, DEVICE), None
        if local is not None:  # every second expert is elsewhere
            here = torch.arange(len(counts)) % 2 == local
            place = torch.where(here, here.cumsum(0) - 1, -1)
            self.expert_map, self.experts = place.int().to(DEVICE), int(here.sum())
        g, slots, experts = torch.Generator().manual_seed(0), self.ids.numel(), self.experts

        def made(*shape, by=1.0):
            return (torch.randn(shape, generator=g) * by).bfloat16().to(DEVICE)

        rows = made(len(self.ids), hidden), made(slots, width)
        weights = (
            made(experts, 2 * width, hidden, by=hidden**-0.5),
            made(experts, hidden, width, by=width**-0.5),
        )
        self.biases = made(experts, 2 * width), made(experts, hidden)
        self.weights = torch.rand(len(self.ids), top_k, generator=g).to(DEVICE)
        self.operands = [(x, w) for x, w in zip(rows, weights, strict=True)]
        quant = get_scheme(scheme).activation
        if quant is not None:
            given = torch.tensor([0.02], device=DEVICE) if quant.static else None
            self.operands = [
                (
                    *ops.moe_quantize(x, given, None, None, None, 1, quant.key),
                    *quantize_weight(w, scheme)[:2],
                )
                for x, w in self.operands
            ]

    @property
    def real(self):
        """The slots that are not skipped."""
        return local_experts(self.ids, self.expert_map, self.experts) >= 0

    def run(self, tiles, activation, weights=None, biased=True):
        """The first GEMM with its activation, or the second one: all slots, skipped ones too."""
        bias = self.biases[activation is None] if biased else None
        operands = self.operands[activation is None]
        made = ops.plan_slots(self.ids, self.expert_map, tiles, self.experts)
        plan = (made, self.ids, self.expert_map, tiles, self.top_k if activation else 1)
        if self.scheme != "unquantized":
            rest = (*plan, self.scheme, torch.bfloat16)
            return ops.scaled_matmul(*operands, None, bias, *rest, activation or "")
        return ops.expert_matmul(*operands, bias, weights, *plan, activation or "")

    def check(self, actual, activation, weights=None, biased=True):
        """Against float64, and the kernel for all GPUs (a plan of one row tile is its own)."""
        top_k, real = self.top_k if activation else 1, self.real.cpu()
        bias = self.biases[activation is None].cpu() if biased else None
        expert = local_experts(self.ids, self.expert_map, self.experts).cpu()
        if self.scheme == "unquantized":
            rows, w = (t.cpu() for t in self.operands[activation is None])
            given, names = None if weights is None else weights.cpu(), expert.view(self.ids.shape)
            exact = exact_rows(rows, w, bias, given, names, top_k)
        else:
            q, scale, w, w_scale = (t.cpu() for t in self.operands[activation is None])
            rows = numbers(q, scale, self.scheme, top_k)
            exact = exact_scaled_rows(rows, w, w_scale, bias, expert, self.scheme)
        exact = activated(exact, activation) if activation else exact
        plain = self.run((64,), activation, weights, biased)
        assert_matches_reference(actual.cpu(), exact.value[real], plain.cpu()[real])


def eight(way):
    """Row tiles of which Hopper's kernel takes the plan."""
    return (way[0],) * 8


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("activation", "biased"), [("silu", False), ("swigluoai", True), (None, True)]
)
@pytest.mark.parametrize("local", [None, 0, 1])
def test_all_ways_give_the_same(scheme, activation, biased, local, choose, launched):
    """Also where experts are elsewhere: theirs are holes in the routing."""
    layer = Skewed(scheme, local=local)
    choose(PLAIN)
    expected = layer.run(eight(PLAIN), activation, biased=biased)[layer.real]
    layer.check(expected, activation, biased=biased)
    assert launched == ["packed"] and expected.isfinite().all()
    for way in ways(scheme):
        choose(way)
        actual = layer.run(eight(way), activation, biased=biased)[layer.real]
        assert torch.equal(actual, expected), way
    choose(way, group_m=16)
    actual = layer.run(eight(way), activation, biased=biased)[layer.real]
    assert torch.equal(actual, expected)
    assert launched == ["packed"] * (2 + len(ways(scheme)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "biased"), [("silu", True), (None, False)])
def test_routing_weights(dtype, activation, biased, choose, launched):
    """Of either dtype, before the bias; padding has none, nor has a slot of no expert."""
    layer = Skewed("unquantized", counts=(*COUNTS[:-1], 7))
    weights = layer.weights.to(dtype)
    choose(PLAIN)
    expected = layer.run(eight(PLAIN), activation, weights, biased)[layer.real]
    layer.check(expected, activation, weights, biased)
    assert launched == ["packed"]
    for way in ways("unquantized"):
        choose(way)
        actual = layer.run(eight(way), activation, weights, biased)[layer.real]
        assert torch.equal(actual, expected), way
    assert launched == ["packed"] * (1 + len(ways("unquantized")))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("way", ways("unquantized"), ids=str)
def test_expert_order(way, weighted, choose, launched):
    """Tiles begin and end between others' rows, which nobody reads for good nor overwrites."""
    layer = Skewed("unquantized", local=1)
    choose(way)
    tiles, ids, ((x, w1), (_, w2)), (b1, b2) = eight(way), layer.ids, layer.operands, layer.biases
    weights = layer.weights if weighted else None
    made = ops.plan_slots(ids, layer.expert_map, tiles, layer.experts)
    plan = (made, ids, layer.expert_map, tiles)
    expert = local_experts(ids, layer.expert_map, layer.experts)
    slots = (expert >= 0).nonzero().flatten()
    slots = slots[expert[slots].argsort(stable=True)]
    first = (x, w1, b1, weights, *plan, layer.top_k, "silu")
    by_slot = ops.expert_matmul(*first)
    by_expert = ops.expert_matmul(*first, True)
    assert torch.equal(by_slot[slots], by_expert[: len(slots)])
    by_expert[len(slots) :] = torch.nan
    second = (w2, b2, weights, *plan, 1, "")
    wanted = ops.expert_matmul(by_slot, *second)[slots]
    actual = ops.expert_matmul(by_expert, *second, True)[slots]
    assert wanted.isfinite().all() and torch.equal(wanted, actual)
    assert launched == ["packed"] * 4


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel", "fp8_block128"])
def test_replay(scheme, choose, launched):
    """Captured, and replayed with other routings: no replay goes on with a count of another."""
    shapes = [COUNTS, COUNTS[::-1], (*[0] * 11, sum(COUNTS)), (118,) * 11 + (128,)]
    routings = [ids_of(counts, 2, DEVICE) for counts in shapes]
    for way in ways(scheme):
        choose(way)
        layer = Skewed(scheme)
        layer.ids = routings[0].clone()
        layer.run(eight(way), "silu", biased=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.run(eight(way), "silu", biased=False)
        for ids in (*routings, routings[0], routings[0]):
            layer.ids.copy_(ids)
            out.fill_(torch.nan)
            graph.replay()
            real = layer.real
            expected = layer.run(eight(way), "silu", biased=False)
            assert out[real].isfinite().all() and torch.equal(out[real], expected[real]), way
    assert set(launched) == {"packed"}


def test_more_programs_than_tiles(choose, launched):
    """And exactly as many, and one less: the count begins after the first tile of each."""
    programs = device_facts(torch.device(DEVICE)).processors
    for tiles in (17, programs - 1, programs, programs + 1, 2 * programs + 1):
        layer = Skewed("unquantized", (100,) * tiles, hidden=128, width=128, top_k=1)
        choose(PLAIN)
        expected = layer.run(eight(PLAIN), "silu", biased=False)
        for way in ((128, 256, True), (192, 256, True)):  # a tile an expert
            choose(way)
            assert torch.equal(layer.run(eight(way), "silu", biased=False), expected), (tiles, way)
    assert set(launched) == {"packed"}
