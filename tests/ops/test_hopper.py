"""Hopper's own kernels against the kernels for all GPUs, and the packing of their rows."""

import launches
import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from gemm_rows import activated, exact_rows, exact_scaled_rows, numbers
from hopper_cases import CASES, SCHEMES
from pairwise import half_exhaustive
from plans import planned, row_tile
from products import plain_product, scaled_product
from sanitize import copied

import moe_ops
from moe_ops import ops
from moe_ops.dispatch.hopper import FETCH, PACKED, STREAM, HopperTiles, gathered_rows
from moe_ops.dispatch.tile_plan import unpack_plan
from moe_ops.dispatch.tiles import one_row_tile
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import get_scheme, quantize_weight
from moe_ops.testing import (
    Problem,
    assert_layer_matches,
    assert_matches_reference,
    bounded_oracle,
    call,
    make_inputs,
    quantize_inputs,
    reference_experts,
)

pytest.importorskip("triton")

from moe_ops.kernels import expert_product  # noqa: E402

SHARING = pytest.mark.parametrize("groups", [None, "one", 1, 3])


@pytest.mark.kernel
@pytest.mark.skipif(not (INTERPRETED or HAS_CUDA), reason="a kernel without an operator")
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(40, torch.bfloat16), (5000, torch.float8_e4m3fn), (304, torch.int8)],
)
@SHARING
def test_pack(width, dtype, groups, device):
    from moe_ops.kernels._hopper.pack import pack_rows

    problem = Problem(21, 5, 2, width, 16, torch.bfloat16, routing="holes")
    x, *_, ids, _, _, _ = make_inputs(problem, device)
    x = torch.cat([x, x], 1)[:, :width].to(dtype)  # a stride of its own
    scale = None
    if groups is not None:
        shape = (1,) if groups == "one" else (21, groups)
        scale = torch.rand(shape, device=device)
    with row_tile(64):
        plan, _, _ = planned(ids, None, 5)
    rows, scales = pack_rows(x, scale, plan, ids.numel(), gathered_rows(ids.numel(), 5, 64), 2)
    sorted_slots, _, used = unpack_plan(plan, ids.numel(), 5, one_row_tile(64))
    used = int(used)
    slot = sorted_slots[:used].long()
    real = slot < ids.numel()
    source = slot[real] // 2
    assert torch.equal(rows[:used][real].float(), x[source].float())
    assert (scales is None) == (groups is None)
    if scales is not None:
        each = scale.expand(21, 1) if groups == "one" else scale
        assert torch.equal(scales[:, :used].t()[real], each[source])
        assert scales.stride(0) % 4 == 0


@pytest.mark.kernel
@pytest.mark.skipif(not (INTERPRETED or HAS_CUDA), reason="a kernel without an operator")
@pytest.mark.parametrize(
    ("scheme", "dtype", "width"),
    half_exhaustive(
        ["fp8_tensor_static", "fp8_channel", "fp8_block128", "int8_channel", "int8_block128"],
        [torch.bfloat16, torch.float32],
        [48, 1100, 1536],  # 1536 columns are read in parts
        where=INTERPRETED,
    ),
)
def test_quantize_packed(scheme, dtype, width, device):
    """Bitwise as quantized, then packed; riffled columns are those of both halves of each 16."""
    from moe_ops.kernels._hopper.pack import RIFFLED, pack_rows, quantize_rows

    quant = get_scheme(scheme).activation
    x, *_, ids, _, _, _ = make_inputs(Problem(21, 5, 2, 1100, 16, dtype, routing="holes"), device)
    x = torch.cat([x, x], 1)[:, :width]
    x[3] = 0
    given = torch.tensor([0.03], device=device) if quant.static else None
    with row_tile(64):
        plan, _, _ = planned(ids, None, 5)
    sizes = (plan, ids.numel(), gathered_rows(ids.numel(), 5, 64), 2)
    sorted_slots, _, used = unpack_plan(plan, ids.numel(), 5, one_row_tile(64))
    real = sorted_slots[: int(used)] < ids.numel()
    q, scale = ops.moe_quantize(x, given, None, None, None, 1, quant.key)
    expected, found = pack_rows(q, scale, *sizes), quantize_rows(x, given, quant, *sizes)
    for want, got in zip(expected, found, strict=True):
        assert want.dtype == got.dtype and want.shape == got.shape
    used = int(used)
    assert torch.equal(found[0][:used][real].float(), expected[0][:used][real].float())
    assert torch.equal(found[1][:, :used][:, real], expected[1][:, :used][:, real])
    if width % 16 == 0:
        for rows, scales in (
            pack_rows(q, scale, *sizes, RIFFLED),
            quantize_rows(x, given, quant, *sizes, RIFFLED),
        ):
            rows = rows.float().unflatten(1, (-1, 8, 2)).transpose(2, 3).flatten(1)
            assert torch.equal(rows[:used][real], expected[0][:used][real].float())
            assert torch.equal(scales[:, :used][:, real], expected[1][:, :used][:, real])


class Twins:
    """A GEMM by both kernels: the portable one is `run` with ``portable_only``."""

    def __init__(self, scheme, tile, **sizes):
        self.problem = Problem(**({"dtype": torch.bfloat16} | sizes))
        p = self.problem
        x, w, _, _, self.ids, _, self.bias, _ = make_inputs(p, "cuda")
        self.tile, self.scheme, quant = tile, scheme, get_scheme(scheme).activation
        self.scaled = quant is not None
        self.rows = self.plain_rows = (x,)
        if self.scaled:
            given = torch.tensor([0.02], device="cuda") if quant.static else None
            self.plain_rows = (x, given)
            self.rows = ops.moe_quantize(x, given, None, None, None, 1, quant.key)
            w, scale, *_ = quantize_weight(w, scheme)
            self.weight = (w, scale)
        else:
            self.weight = (w,)

    def run(self, activation, top_k, portable_only=False, config=None):
        """By the kernel of the plan, or by that of ``config``."""
        operands, dtype = (*self.rows, *self.weight), self.problem.dtype
        with row_tile(self.tile, portable_only=portable_only):
            layer = (self.problem.num_experts, self.scheme, dtype)
            tiles = [ops.plan_slots(self.ids, None, *layer), self.ids, None]
            if self.scaled:
                rest = (None, self.bias, tiles, top_k, self.scheme, dtype, activation or "")
                return scaled_product(expert_product, *operands, *rest, config=config)
            rest = (self.bias, None, tiles, top_k, activation or "")
            return plain_product(expert_product, *operands, *rest, config=config)

    def exact(self, activation, top_k):
        """In float64, on the CPU; without a bound: the reference is a kernel too, of fewer bits."""
        w, *scale = (t.cpu() for t in self.weight)
        rows = [t.cpu() for t in self.rows]
        ids = self.ids.cpu()
        bias = None if self.bias is None else self.bias.cpu()
        if self.scaled:
            expert = local_experts(ids, None, self.problem.num_experts)
            rows = numbers(*rows, self.scheme, top_k)
            product = exact_scaled_rows(rows, w, *scale, bias, expert, self.scheme)
        else:
            product = exact_rows(*rows, w, bias, None, ids, top_k)
        return (activated(product, activation) if activation else product).value


@pytest.fixture
def launched(monkeypatch):
    return launches.launched_hopper_kernels(monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}{c[1]}-{c[2].get('routing', '')}")
@pytest.mark.parametrize(
    ("hidden", "width", "activation"),
    [
        (512, 256, "silu"),
        (2880, 704, "swigluoai"),
        (208, 136, "gelu"),
        (336, 200, None),
        (128, 72, "relu2_no_mul"),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_twins(scheme, case, hidden, width, activation, has_bias, launched):
    kernel, tile, sizes = case
    sizes = {**sizes, "hidden_size": hidden, "intermediate_size": width, "has_bias": has_bias}
    kind = activation or "silu_no_mul"
    twins = Twins(scheme, tile, activation=kind, **sizes)
    plain = twins.run(activation, sizes["top_k"], portable_only=True)
    assert not launched
    fast = twins.run(activation, sizes["top_k"])
    gated = activation in ("silu", "swigluoai", "gelu")
    boxes = not (scheme == "unquantized" and kernel == "stream") and not (gated and width % 8)
    boxes &= hidden % 16 == 0
    if "block" in scheme:
        boxes &= not gated or activation == "swigluoai" or width % 64 == 0
    assert launched == [kernel] * boxes
    real = (twins.ids.flatten() >= 0) & (twins.ids.flatten() < sizes["num_experts"])
    exact = twins.exact(activation, sizes["top_k"])[real.cpu()]
    assert_matches_reference(fast[real].cpu(), exact, plain[real].cpu())
    assert torch.equal(fast[real], twins.run(activation, sizes["top_k"])[real])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int8_tensor", "int8_channel"])
@pytest.mark.parametrize(("kernel", "tile", "sizes"), CASES)
def test_sums_of_integers_are_the_portable_kernels(scheme, kernel, tile, sizes, launched):
    """Bitwise: the sums are exact, and multiplied by the same product of two scales."""
    twins = Twins(scheme, tile, hidden_size=2880, intermediate_size=200, **sizes)
    plain = twins.run("", sizes["top_k"], portable_only=True)
    fast = twins.run("", sizes["top_k"])
    real = (twins.ids.flatten() >= 0) & (twins.ids.flatten() < sizes["num_experts"])
    assert launched == [kernel] and torch.equal(fast[real], plain[real])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("kernel", "tile", "block_n"),
    [(PACKED, tile, block_n) for tile in (64, 128) for block_n in (128, 256)] + [(FETCH, 128, 256)],
)
@pytest.mark.parametrize(
    ("width", "activation"), [(704, "silu"), (672, "silu"), (640, "gelu"), (328, None)]
)
def test_every_tile_of_many_rows(scheme, kernel, tile, block_n, width, activation, launched):
    """Also those that are not the first choice; the last tile of a row is not whole."""
    kind, sizes = activation or "silu_no_mul", {"hidden_size": 400, "num_experts": 4, "top_k": 2}
    twins = Twins(
        scheme, tile, num_tokens=900, intermediate_size=width, activation=kind,
        routing="holes", has_bias=True, **sizes,
    )  # fmt: skip
    plain = twins.run(activation, 2, portable_only=True)
    config = HopperTiles(kernel, tile, block_n, 3, 3, tile == 128)
    if "block" in scheme and width == 672:  # columns share scales by 32, not by 64
        with pytest.raises(ValueError, match="^config must be tiles of a kernel that takes"):
            twins.run(activation, 2, config=config)
        return
    fast = twins.run(activation, 2, config=config)
    assert launched == ["packed" if kernel == PACKED else "fetched"]
    real = (twins.ids.flatten() >= 0) & (twins.ids.flatten() < 4)
    exact = twins.exact(activation, 2)[real.cpu()]
    assert_matches_reference(fast[real].cpu(), exact, plain[real].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_every_stream_tile_of_64_columns_that_share_scales(tile, block_n, activation, launched):
    """Up rows begin inside a group of 128 rows; the last group along K is not whole."""
    twins = Twins(
        "fp8_block128", tile, num_tokens=40, num_experts=4, top_k=2, hidden_size=2880,
        intermediate_size=704, activation=activation, routing="holes", has_bias=True,
    )  # fmt: skip
    plain = twins.run(activation, 2, portable_only=True)
    fast = twins.run(activation, 2, config=HopperTiles(STREAM, tile, block_n, 1, 4))
    assert launched == ["stream"]
    real = (twins.ids.flatten() >= 0) & (twins.ids.flatten() < 4)
    exact = twins.exact(activation, 2)[real.cpu()]
    assert_matches_reference(fast[real].cpu(), exact, plain[real].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 64, 512, 4096])
@pytest.mark.parametrize(("hidden", "width"), [(2880, 2880), (2880, 1440), (1408, 704), (640, 640)])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_layers_of_partial_groups_of_scales(tokens, hidden, width, activation, launched):
    """Every load, with biases; halves of 1440 rows share scales by 32 and are the portable's."""
    problem = Problem(
        tokens, 8, 2, hidden, width, torch.bfloat16, activation, has_bias=True,
        scheme="fp8_block128",
    )  # fmt: skip
    stored = quantize_inputs(problem, make_inputs(problem))
    inputs, config = copied((stored.inputs, stored.config), "cuda")
    actual = call(moe_ops.fused_experts, problem, inputs, quant_config=config)
    both = (activation, width) != ("silu", 1440)
    first, second = ("packed", "packed") if tokens > 64 else ("stream", "stream")
    if tokens > 64 and width < 768:  # tiles of 128 rows of a narrow product
        first = "fetched"
    assert launched == ([] if tokens == 1 else [first] * both + [second])
    expected = reference_experts(problem, stored.inputs, stored.config)
    exact = bounded_oracle(problem, stored.exact, stored.config)
    assert_layer_matches(actual.cpu(), exact, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("tile", [64, 128])
def test_rows_quantized_as_they_are_packed(scheme, tile, launched):
    """Bitwise as those that were quantized before."""
    sizes = {"hidden_size": 1040, "intermediate_size": 256}
    twins = Twins(scheme, tile, num_tokens=900, num_experts=4, top_k=2, **sizes)
    before = twins.run("silu", 2)
    twins.rows = twins.plain_rows
    now = twins.run("silu", 2)
    kernel = "fetched" if tile == 128 else "packed"
    assert torch.equal(now, before) and launched == [kernel] * 2


@pytest.mark.gpu
def test_replay(launched):
    """Captured, and replayed with other rows."""
    for tokens, tile in ((4, 16), (600, 64)):
        sizes = {"hidden_size": 256, "intermediate_size": 128}
        twins = Twins("fp8_block128", tile, num_tokens=tokens, **sizes)
        twins.run("silu", 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = twins.run("silu", 2)
        twins.ids.copy_(twins.ids.flip(0))
        graph.replay()
        assert torch.equal(out, twins.run("silu", 2))
    assert set(launched) == {"packed", "stream"}
