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
from plans import ids_of, row_tile
from products import plain_product, scaled_product  # noqa: E402

from moe_ops import ops
from moe_ops.dispatch.device import device_facts
from moe_ops.dispatch.hopper import FETCH, PACKED, HopperTiles, most_stages, tile_widths
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import get_scheme, quantize_weight
from moe_ops.testing import assert_matches_reference

pytest.importorskip("triton")

from moe_ops.kernels import expert_product  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
COUNTS = (0, 1, 63, 64, 65, 128, 129, 191, 192, 193, 400, 0)
PLAIN = (PACKED, 64, 128, False)
"""The kernel, rows and columns of a tile, and whether it is taken on demand: all give the same."""
WAYS = [PLAIN, (PACKED, 64, 256, False), (PACKED, 128, 128, True), (PACKED, 192, 128, True)] + [
    (kernel, rows, 256, on_demand)
    for kernel, rows in ((PACKED, 128), (PACKED, 192), (FETCH, 128))
    for on_demand in (False, True)
]


@pytest.fixture
def launched(monkeypatch):
    return launches.launched_hopper_kernels(monkeypatch)


def ways(scheme):
    """Those that there are of a scheme's operands."""
    size = 2 if scheme == "unquantized" else 1
    return [way for way in WAYS if way[2] in tile_widths(*way[:2], size)]


def names(used):
    """The names under which the kernels of ways are launched."""
    return ["fetched" if way[0] == FETCH else "packed" for way in used]


def config_of(way, group_m=3):
    """The tiles of Hopper's kernel of many rows, with as many stages as fit."""
    kernel, rows, columns, on_demand = way
    tiles = HopperTiles(kernel, rows, columns, group_m, 2, on_demand)
    return replace(tiles, num_stages=most_stages(tiles, device_facts(torch.device(DEVICE))))


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

    def run(self, way, activation, weights=None, biased=True, group_m=3):
        """The first GEMM with its activation, or the second one: all slots, skipped ones too.

        In a way of Hopper's kernel, or by the portable one in tiles of 64 rows.
        """
        bias = self.biases[activation is None] if biased else None
        operands = self.operands[activation is None]
        top_k, config = self.top_k if activation else 1, way and config_of(way, group_m)
        with row_tile(64 if way is None else way[1], portable_only=way is None):
            tiles = self.tiles()
            if self.scheme != "unquantized":
                rest = (None, bias, tiles, top_k, self.scheme, torch.bfloat16, activation or "")
                return scaled_product(expert_product, *operands, *rest, config=config)
            rest = (bias, weights, tiles, top_k, activation or "")
            return plain_product(expert_product, *operands, *rest, config=config)

    def tiles(self):
        layer = (self.experts, self.scheme, torch.bfloat16)
        return [ops.plan_slots(self.ids, self.expert_map, *layer), self.ids, self.expert_map]

    def check(self, actual, activation, weights=None, biased=True):
        """Against float64, and the portable kernel."""
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
        plain = self.run(None, activation, weights, biased)
        assert_matches_reference(actual.cpu(), exact.value[real], plain.cpu()[real])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("activation", "biased"), [("silu", False), ("swigluoai", True), (None, True)]
)
@pytest.mark.parametrize("local", [None, 0, 1])
def test_all_ways_give_the_same(scheme, activation, biased, local, launched):
    """Also where experts are elsewhere: theirs are holes in the routing."""
    layer = Skewed(scheme, local=local)
    expected = layer.run(PLAIN, activation, biased=biased)[layer.real]
    layer.check(expected, activation, biased=biased)
    assert launched == ["packed"] and expected.isfinite().all()
    for way in ways(scheme):
        actual = layer.run(way, activation, biased=biased)[layer.real]
        assert torch.equal(actual, expected), way
    actual = layer.run(way, activation, biased=biased, group_m=16)[layer.real]
    assert torch.equal(actual, expected)
    assert launched == ["packed", *names(ways(scheme)), *names(ways(scheme)[-1:])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "biased"), [("silu", True), (None, False)])
def test_routing_weights(dtype, activation, biased, launched):
    """Of either dtype, before the bias; padding has none, nor has a slot of no expert."""
    layer = Skewed("unquantized", counts=(*COUNTS[:-1], 7))
    weights = layer.weights.to(dtype)
    expected = layer.run(PLAIN, activation, weights, biased)[layer.real]
    layer.check(expected, activation, weights, biased)
    assert launched == ["packed"]
    for way in ways("unquantized"):
        actual = layer.run(way, activation, weights, biased)[layer.real]
        assert torch.equal(actual, expected), way
    assert launched == ["packed", *names(ways("unquantized"))]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("way", ways("unquantized"), ids=str)
def test_expert_order(way, weighted, launched):
    """Tiles begin and end between others' rows, which nobody reads for good nor overwrites."""
    layer = Skewed("unquantized", local=1)
    ((x, w1), (_, w2)), (b1, b2), config = layer.operands, layer.biases, config_of(way)
    weights = layer.weights if weighted else None
    expert = local_experts(layer.ids, layer.expert_map, layer.experts)
    slots = (expert >= 0).nonzero().flatten()
    slots = slots[expert[slots].argsort(stable=True)]

    def gemm(*arguments, config=config):
        with row_tile(way[1], portable_only=False):
            return plain_product(expert_product, *arguments, config=config)

    with row_tile(way[1], portable_only=False):
        tiles = layer.tiles()
    first = (x, w1, b1, weights, tiles, layer.top_k, "silu")
    by_slot, by_expert = gemm(*first), gemm(*first, True)
    assert torch.equal(by_slot[slots], by_expert[: len(slots)])
    by_expert[len(slots) :] = torch.nan
    second = (w2, b2, weights, tiles, 1, "")
    wanted = gemm(by_slot, *second)[slots]
    gathering = config_of((PACKED, *way[1:]))  # reads permuted rows
    actual = gemm(by_expert, *second, True, config=gathering)[slots]
    assert wanted.isfinite().all() and torch.equal(wanted, actual)
    assert launched == names([way] * 3) + ["packed"]


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel", "fp8_block128"])
def test_replay(scheme, launched):
    """Captured, and replayed with other routings: no replay goes on with a count of another."""
    shapes = [COUNTS, COUNTS[::-1], (*[0] * 11, sum(COUNTS)), (118,) * 11 + (128,)]
    routings = [ids_of(counts, 2, DEVICE) for counts in shapes]
    for way in ways(scheme):
        layer = Skewed(scheme)
        layer.ids = routings[0].clone()
        layer.run(way, "silu", biased=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.run(way, "silu", biased=False)
        for ids in (*routings, routings[0], routings[0]):
            layer.ids.copy_(ids)
            out.fill_(torch.nan)
            graph.replay()
            real = layer.real
            expected = layer.run(way, "silu", biased=False)
            assert out[real].isfinite().all() and torch.equal(out[real], expected[real]), way
    assert set(launched) == {"packed", "fetched"}


def test_more_programs_than_tiles(launched):
    """And exactly as many, and one less: the count begins after the first tile of each."""
    programs = device_facts(torch.device(DEVICE)).processors
    for tiles in (17, programs - 1, programs, programs + 1, 2 * programs + 1):
        layer = Skewed("unquantized", (100,) * tiles, hidden=128, width=128, top_k=1)
        expected = layer.run(PLAIN, "silu", biased=False)
        for way in ((PACKED, 128, 256, True), (PACKED, 192, 256, True), (FETCH, 128, 256, True)):
            assert torch.equal(layer.run(way, "silu", biased=False), expected), (tiles, way)
    assert set(launched) == {"packed", "fetched"}
