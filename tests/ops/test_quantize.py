"""Quantization: bit by bit against the definitions, fused and not, in every granularity."""

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantize_oracle import QUANTS, assert_bits, quantize, quants, random_rows, to
from strategies import ACTIVATIONS, DTYPES, topk_ids

import moe_ops
from moe_ops import ops
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import WHOLE, parse_quant

pytestmark = pytest.mark.kernel
reference = importlib.import_module("moe_ops.reference.quantize")

sizes = st.tuples(st.sampled_from((0, 1, 2, 9)), st.sampled_from((16, 40, 130, 352)))


def by_name(quant):
    return quant.key


def plain(x, quant, scale=None):
    return ops.moe_quantize(x, scale, None, None, None, 0, quant.key)


@given(size=sizes, quant=quants, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_to_the_bit(size, quant, dtype, seed, device):
    x = random_rows(seed, *size, dtype)
    q, scale = plain(x.to(device), quant)
    values, scales = quantize(x, quant)
    assert q.dtype == quant.dtype and q.shape == x.shape
    assert torch.equal(q.cpu().float(), values)
    assert_bits(scale, scales)


@pytest.mark.parametrize("quant", QUANTS, ids=by_name)
@pytest.mark.parametrize(("rows", "width"), [(3, 2880), (1, 5000)])
def test_long_rows(quant, rows, width, device):
    x = random_rows(0, rows, width, torch.bfloat16)
    q, scale = plain(x.to(device), quant)
    values, scales = quantize(x, quant)
    assert torch.equal(q.cpu().float(), values)
    assert_bits(scale, scales)


def test_more_rows_than_programs_that_look_for_the_largest(device):
    x = torch.ones(700, 16, device=device)
    x[699, 15] = -448.0
    q, scale = plain(x, parse_quant("fp8:*x*:float32"))
    assert scale.tolist() == [1.0]
    assert q.float()[699, 15] == -448 and (q.float()[:699] == 1).all()


@pytest.mark.parametrize("element", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_given_scales(element, dtype, device):
    """One element, or one a row; what is out of range saturates."""
    x = random_rows(1, 9, 130, dtype)
    whole, per_row = (parse_quant(f"{element}:{g}:float32:static") for g in ("*x*", "1x*"))
    values, _ = quantize(x, whole, 0.03)
    largest = whole.element.largest
    assert values.abs().max() == largest
    one = torch.tensor(0.03)
    per_tensor = ((whole, one), (whole, one.view(1)))
    for quant, given_scale in (*per_tensor, (per_row, one.view(1)), (per_row, one.repeat(9, 1))):
        given_scale = given_scale.to(device)
        q, scale = plain(x.to(device), quant, given_scale)
        assert torch.equal(q.cpu().float(), values)
        assert scale.shape == quant.row_scale_shape(9, 130) and (scale == given_scale.max()).all()
        assert scale.data_ptr() != given_scale.data_ptr()
    scales = torch.arange(1, 10.0, device=device)
    q, scale = plain(x.to(device), per_row, scales)
    assert torch.equal(scale, scales.view(9, 1))
    for row in range(9):
        values, _ = quantize(x[row : row + 1], per_row, row + 1.0)
        assert torch.equal(q[row].cpu().float(), values[0])


def test_nearly_half_of_an_integer_is_none(device):
    """Half away from zero: the number before a half adds up to one with a half, and is not one."""
    x = torch.tensor([[0.5, 0.49999997, -0.49999997, -0.5, 126.49999, 200.0, -200.0, 1.5]])
    quant = parse_quant("int8:*x*:float32:static")
    q, _ = plain(x.to(device), quant, torch.ones(1, device=device))
    assert q.tolist() == [[1, 0, 0, -1, 126, 127, -127, 2]]


def test_what_is_skipped_is_zero_whatever_its_scale(device):
    """0 over a given scale of 0, or of NaN, is not asked for."""
    x, ids = torch.ones(2, 48, device=device), torch.tensor([[-1], [-1]], device=device)
    quant = parse_quant("fp8:*x*:float32:static")
    for given_scale in (0.0, torch.nan):
        scale = torch.tensor([given_scale], device=device)
        q, _ = ops.moe_quantize(x, scale, None, ids, None, 2, quant.key)
        assert (q.float() == 0).all()


def test_given_scales_of_slots(device):
    """A token's scale is that of its slots; a skipped row's scale is 0, and never read."""
    ids, weights = torch.tensor([[1, -1], [5, 9], [0, 1]]), torch.full((3, 2), 0.5)
    x = random_rows(5, 3, 48, torch.bfloat16)
    x[1] = torch.nan
    per_row = torch.tensor([0.25, torch.nan, 0.5])
    for key, scales in (("*x*", torch.tensor([0.25])), ("1x*", per_row)):
        quant = parse_quant(f"int8:{key}:float32:static")
        arguments = to(device, x, scales, weights, ids, None)
        q, scale = ops.moe_quantize(*arguments, 2, quant.key)
        for slot, used in enumerate([True, False, False, False, True, True]):
            own = scales.expand(3)[slot // 2].item()
            values, _ = quantize(x[slot // 2, None].float() * 0.5, quant, own if used else 1.0)
            assert torch.equal(q[slot].cpu().float(), values[0] if used else torch.zeros(48))
            assert quant.per_tensor or scale[slot].item() == (own if used else 0)
        assert not quant.per_tensor or scale.tolist() == [0.25]


@given(
    case=topk_ids(max_tokens=9), quant=quants, of_slots=st.booleans(), weighted=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_slots(case, quant, of_slots, weighted, seed, device):
    """Skipped rows are never read (they are NaN here), and neither are their weights."""
    ids, num_experts = case
    tokens, k = ids.shape
    g = torch.Generator().manual_seed(seed)
    expert_map = torch.randperm(num_experts, generator=g, dtype=torch.int32) - num_experts // 3
    num_local = num_experts - num_experts // 3
    used = (local_experts(ids, expert_map, num_local) >= 0).view(tokens, k)
    x = random_rows(seed, tokens if weighted or not of_slots else tokens * k, 72, torch.bfloat16)
    weights = torch.rand(tokens, k, generator=g) if weighted else None
    rows = x.float()
    if weighted:
        weights[~used] = torch.nan
        rows = rows.repeat_interleave(k, 0) * weights.flatten()[:, None]
        x[~used.any(1)] = torch.nan
    used = used.flatten() if weighted or of_slots else used.any(1)
    if not weighted:
        x[~used] = torch.nan
    q, scale = ops.moe_quantize(
        x.to(device), None, None if weights is None else weights.to(device), ids.to(device),
        expert_map.to(device), num_local, quant.key,
    )  # fmt: skip
    values, scales = quantize(torch.where(used[:, None], rows, 0.0), quant)
    if not quant.per_tensor:
        scales[~used] = 0
    assert torch.equal(q.cpu().float(), values)
    assert_bits(scale, scales)


@given(
    quant=quants, key=st.sampled_from(ACTIVATIONS), dtype=st.sampled_from(DTYPES),
    width=st.sampled_from((16, 44, 130)), seed=st.integers(0, 99), routed=st.booleans(),
)  # fmt: skip
def test_activation_quantize_is_the_pair(quant, key, dtype, width, seed, routed, device):
    """Bit by bit what the activation and then the quantization give, skipped rows included."""
    gated = moe_ops.activation.formula(key).gated
    x = torch.randn(6, width * (2 if gated else 1), generator=torch.Generator().manual_seed(seed))
    x = (x * 3).to(dtype).to(device)
    ids = torch.tensor([[0, 1], [-1, 2], [3, 0]], device=device) if routed else None
    if routed:
        x[2] = x[4] = torch.nan
    fused = ops.activation_quantize(x, None, ids, None, 3, key, quant.key)
    pair = ops.moe_quantize(ops.activation(x, key), None, None, ids, None, 3, quant.key)
    for a, b in zip(fused, pair, strict=True):
        assert_bits(a, b)


@pytest.mark.parametrize("quant", QUANTS, ids=by_name)
def test_within_half_a_step(quant, device):
    """What comes back is off by half a step at most: of the scale (int8), of the exponent (fp8)."""
    x = torch.randn(16, 320, generator=torch.Generator().manual_seed(0))
    q, scale = plain(x.to(device), quant)
    if quant.group.cols != WHOLE:
        scale = scale.repeat_interleave(quant.group.cols, 1)[:, :320]
    back, scale = (q.float() * scale).cpu().double(), scale.cpu().double()
    size = x.double().abs() / scale
    step = torch.ones_like(size) if quant.element.name == "int8" else (
        torch.exp2(torch.floor(torch.log2(size.clamp(min=2.0**-6))) - 3)
    )  # fmt: skip
    assert ((back - x.double()).abs() <= (0.5 + 1e-6) * step * scale).all()


def test_zeros_stay_zeros(device):
    for quant in QUANTS:
        q, scale = plain(torch.zeros(2, 64, device=device), quant)
        assert (q.float() == 0).all()
        assert (scale > 0).all() and torch.isfinite(scale).all()


@pytest.mark.parametrize("quant", QUANTS, ids=by_name)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_nan_is_seen_in_its_group_only(quant, device):
    x = torch.ones(3, 256, device=device)
    x[1, 200] = torch.nan
    _, scale = plain(x, quant)
    rows, groups = scale.shape if scale.dim() == 2 else (1, 1)
    cols = 256 if quant.group.cols == WHOLE else quant.group.cols
    expected = torch.zeros(rows, groups, dtype=torch.bool)
    expected[0 if rows == 1 else 1, 200 // cols] = True
    assert torch.equal(scale.isnan().view(rows, groups).cpu(), expected)


@given(case=topk_ids(max_tokens=9), quant=quants, dtype=st.sampled_from(DTYPES))
def test_equals_the_reference(case, quant, dtype, device):
    """The kernel and the reference, byte by byte, also the sign of a zero."""
    ids, num_experts = case
    x, weights = random_rows(3, len(ids), 130, dtype), torch.rand(ids.shape)
    for arguments in (
        (x, None, None, None, None, num_experts, quant.key),
        (x, None, weights, ids, None, num_experts, quant.key),
    ):
        actual = ops.moe_quantize(*to(device, *arguments))
        for a, b in zip(actual, reference.moe_quantize(*arguments), strict=True):
            assert_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("quant", QUANTS, ids=by_name)
def test_replay_with_other_rows_and_routing(quant):
    """Captured once; replays are bitwise what eager calls give."""
    x, ids = torch.empty(40, 512, device="cuda"), torch.zeros(40, 4, device="cuda").int()
    weights = torch.rand(40, 4, device="cuda")

    def both():
        flat = ops.moe_quantize(x, None, weights, ids, None, 8, quant.key)
        return *flat, *ops.batched_dispatch(x, None, weights, ids, 2, 5, 16, quant.key)

    x.normal_()
    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both()
    for _ in range(3):
        x.normal_()
        ids.random_(-1, 9)
        graph.replay()
        for a, b in zip(out, both(), strict=True):
            assert_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("group", ["*x*", "1x*", "1x128"])
def test_more_than_two_to_the_31_elements(group):
    rows, width = 140_000, 16384
    assert rows * width > 2**31
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.linspace(-3, 448, width, device="cuda")
    quant = parse_quant(f"fp8:{group}:float32")
    q, scale = plain(x, quant)
    last, last_scale = plain(x[-1:], quant)
    assert_bits(q[-1:], last)
    assert_bits(scale[-1:], last_scale)
    assert not q[:-1].view(torch.int64).any()
