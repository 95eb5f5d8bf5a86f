"""The kernel of block-scaled instructions, in the interpreter, or where a GPU compiles it.

Nobody has run it on a GPU with such instructions. Triton decodes the operands of `tl.dot_scaled` on
others, of all formats but nvfp4, and the interpreter's `tl.dot_scaled` is exact: all around that
product runs as it is.
"""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from decoded_gemms import check_decoded, check_one_scale_for_each_expert, quantized_rows
from gemm_rows import gemm_problem
from hypothesis import given
from hypothesis import strategies as st
from launches import blocks
from plans import planned, row_tile
from products import scaled_product
from selections import STANDARD, layer_inputs
from strategies import ACTIVATIONS, DTYPES

import moe_ops
from moe_ops import get_scheme, ops, quantize_weight
from moe_ops.activation import formula
from moe_ops.dispatch.blackwell import BLOCK_SCALED, WEIGHT_ROWS, block_scaled_tiles
from moe_ops.dispatch.device import assumed, device_facts
from moe_ops.dispatch.row_tiles import PORTABLE
from moe_ops.dispatch.tiles import ROW_TILES, Gemm
from moe_ops.inspect.devices import TARGETS

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not (HAS_CUDA or INTERPRETED), reason="no kernel runs"),
]
BLACKWELL = TARGETS["sm_100"].facts
HERE = device_facts(torch.device("cuda")).arch if HAS_CUDA else 100
SCHEMES = sorted(BLOCK_SCALED[100] if HERE in (100, 103) else BLOCK_SCALED[100] - {"nvfp4"})


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Launchers take the device for a Blackwell GPU; what they launch lands in the list."""
    from moe_ops.kernels._runtime.launch import Launch

    launch, seen = Launch.__call__, []

    def record(self, *arguments):
        if "GROUP_M" in self.constants:
            seen.append(self)
        launch(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", record)
    with assumed(BLACKWELL):
        yield seen
    assert {launch.kernel.fn.__name__ for launch in seen} <= {"block_scaled_gemm_kernel"}


@given(
    scheme=st.sampled_from(SCHEMES),
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    n=st.sampled_from((8, 49, 130)),
    kk=st.sampled_from((16, 40, 130, 258)),
    dtype=st.sampled_from(DTYPES),
    tile=st.sampled_from(ROW_TILES),
    has_bias=st.booleans(),
    local=st.sampled_from((None, 3)),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
)
def test_gemm(scheme, tokens, k, n, kk, dtype, tile, has_bias, local, routing, device):
    """Within the budget of the reference, as the kernel that decodes operands is."""
    more = dict(has_bias=has_bias, num_local_experts=local, routing=routing)
    check_decoded(gemm_problem(tokens, k, kk, n, dtype, **more), scheme, device, tile=tile)


@given(
    scheme=st.sampled_from(SCHEMES),
    activation=st.sampled_from(ACTIVATIONS),
    tokens=st.sampled_from((1, 5, 40)),
    width=st.sampled_from((8, 49, 130)),
    kk=st.sampled_from((16, 40, 130)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    halves=st.booleans(),
)
def test_gemm_act(scheme, activation, tokens, width, kk, dtype, has_bias, halves, device):
    """A gate and an up row have global scales of their own, or share one."""
    rule = formula(activation)
    n = 2 * width if rule.gated else width
    problem = gemm_problem(tokens, 2, kk, n, dtype, has_bias=has_bias)
    check_decoded(problem, scheme, device, activation, halves and rule.gated)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tile", ROW_TILES)
def test_every_scheme(scheme, tile, device, launches):
    check_decoded(gemm_problem(20, 2, 290, 72, torch.bfloat16), scheme, device, tile=tile)
    assert len(launches) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", [None, "swigluoai"])
def test_hidden_size_2880(scheme, activation, device):
    """gpt-oss: no step along K divides it, and an mxfp4 row has 90 scales (10 where fewer do)."""
    hidden_size = 2880 if HAS_CUDA else 320
    problem = gemm_problem(3, 2, hidden_size, 136, torch.bfloat16, has_bias=True)
    check_decoded(problem, scheme, device, activation, tile=16)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_more_than_a_tile_of_columns(scheme, activation, device):
    """Three tiles of columns, of gate and up as of one of them; the last is partial."""
    n = 2 * WEIGHT_ROWS + 38
    problem = gemm_problem(9, 1, 64, n, torch.float32)
    check_decoded(problem, scheme, device, activation, tile=16)


def run(scheme, x, w, ids, device, change=lambda rows, scale, weight: (rows, scale, weight)):
    """The product of quantized rows and weights, either changed before."""
    q = quantize_weight(w, scheme)
    rows, scale, _ = quantized_rows(x.to(device), get_scheme(scheme).activation)
    rows, scale, weight = change(rows, scale, q.data.to(device))
    rest = (None if t is None else t.to(device) for t in (q.scale, q.global_scale, None))
    with row_tile(16, portable_only=False):
        plan = planned(ids.to(device), None, w.shape[0], scheme)
        return scaled_product(ops, rows, scale, weight, *rest, [*plan], 1, scheme, x.dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_may_be_transposed(scheme, device):
    x, w, ids = torch.randn(6, 96), torch.randn(3, 40, 96), torch.randint(0, 3, (6, 1)).int()
    plain = run(scheme, x, w, ids, device)

    def transposed(rows, scale, weight):
        return rows, scale, weight.mT.contiguous().mT

    assert torch.equal(plain, run(scheme, x, w, ids, device, transposed))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_skipped_rows_are_not_read(scheme, device):
    """Bytes that are NaN, or stand for the largest number, in the rows of skipped slots."""
    x, w = torch.randn(6, 96), torch.randn(3, 40, 96)
    ids = torch.tensor([0, -1, 2, 7, 1, -1], dtype=torch.int32)[:, None]
    used = (ids[:, 0] >= 0) & (ids[:, 0] < 3)
    plain = run(scheme, x, w, ids, device)[used]

    def poisoned(rows, scale, weight):
        rows, scale = rows.clone(), scale.clone()
        rows.view(torch.uint8)[~used] = 0x7F
        if len(scale) == len(rows):
            scale.view(torch.uint8)[~used] = 0xFF
        return rows, scale, weight

    assert plain.isfinite().all()
    assert torch.equal(plain, run(scheme, x, w, ids, device, poisoned)[used])


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize("tokens, experts", [(6, 8), (40, 2)])
def test_a_layer_runs_on_the_tiles_that_are_explained(
    activation, tokens, experts, device, launches
):
    scheme, sizes = "mxfp4_mxfp8", {"num_experts": experts, "num_local_experts": experts}
    config = replace(STANDARD, device=device, activation=activation, **sizes)
    arguments, quant = layer_inputs(config, scheme, device, tokens)
    actual = moe_ops.select_kernel(config, quant).apply(*arguments, activation)
    (cost,) = moe_ops.explain(config, quant, device="sm_100", num_tokens=(tokens,)).costs
    assert [blocks(tiles) for tiles in (cost.gemm1, cost.gemm2)] == [
        {name: launch.constants[name] for name in blocks(cost.gemm1)} for launch in launches
    ]
    assert actual.isfinite().all()


@given(
    scheme=st.sampled_from(sorted(BLOCK_SCALED[100])),
    target=st.sampled_from(("sm_100", "sm_120")),
    slots=st.integers(1, 10**6),
    experts=st.integers(1, 512),
    n=st.integers(8, 10**5),
    halves=st.sampled_from((1, 2)),
)
def test_tiles(scheme, target, slots, experts, n, halves):
    """Such as the instructions take; two blocks fit on a processor wherever there are stages."""
    device = TARGETS[target].facts
    tiles = block_scaled_tiles(Gemm(slots, experts, n, 2048, 1, halves, PORTABLE), scheme, device)
    assert tiles.block_n * halves == WEIGHT_ROWS and tiles.block_m in ROW_TILES
    stage = 128 * (tiles.block_m + WEIGHT_ROWS)
    assert tiles.num_stages >= 2 and 2 * (tiles.num_stages - 1) * stage <= device.shared_memory


def test_one_scale_for_each_expert(device):
    check_one_scale_for_each_expert(device)
