"""The expert GEMMs of two quantized operands: every group of scales, forms of scales, epilogues."""

import pytest
import torch
from conftest import INTERPRETED
from gemm_rows import activated, exact_scaled_rows, numbers
from hypothesis import given
from hypothesis import strategies as st
from operator_samples import symbolic_tokens
from pairwise import half_exhaustive
from plans import bias_of, on, planned, row_tile, whole_numbers
from products import scaled_product
from strategies import ACTIVATIONS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moe_ops import ops
from moe_ops.dispatch.tiles import ROW_TILES
from moe_ops.reference import expert_product as reference
from moe_ops.reference import quantize
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import SCHEMES, get_scheme, quantize_weight
from moe_ops.testing import Problem, assert_matches_reference, make_inputs

pytestmark = pytest.mark.kernel
NAMED = tuple(s.name for s in SCHEMES.values() if s.activation and not s.dequantizes_both)
GROUPED = (
    "fp8_block128",
    "fp8_block16x64_ue8m0",
    "fp8_block32x16",
    "int8_block128",
    "int8_block16",
)
WIDE = ("fp8_block64x256", "int8_block256")
"""Groups that span several K blocks, and more columns than a tile has."""


def rows_in(scheme, x):
    """Rows as a scheme stores them, and their scales."""
    quant = get_scheme(scheme).activation
    given = torch.tensor([0.02]) if quant.static else None
    return quantize.moe_quantize(x, given, None, None, None, 1, quant.key)


class Case:
    """Operands of one call, on the CPU and where the operators run."""

    def __init__(self, scheme, device, tile=None, transposed=False, **sizes):
        defaults = {"activation": "silu_no_mul", "dtype": torch.bfloat16}
        self.problem = Problem(**(defaults | sizes))
        x, w, _, _, self.ids, _, self.bias, _ = make_inputs(self.problem)
        self.x, self.scheme, self.top_k = x, scheme, self.problem.top_k
        self.w, self.w_scale, *_ = quantize_weight(w, scheme)
        if transposed:
            self.w = self.w.transpose(1, 2).contiguous().transpose(1, 2)
        self.q, self.scale = rows_in(scheme, x)
        self.expert = local_experts(self.ids, None, len(w))
        self.mine = self.expert >= 0
        self.device, self.tile = device, tile
        with self.row_tile():
            self.plan = planned(self.ids.to(device), None, len(w), scheme)

    def row_tile(self):
        """The row tile of the case; without one the load's, and any kernel."""
        return row_tile(self.tile, portable_only=self.tile is not None)

    def run(self, activation="", dtype=torch.bfloat16, **changes):
        """The operator where it runs, with operands changed by name."""
        with self.row_tile():
            return scaled_product(ops, *self.arguments(self.device, dtype, changes), activation)

    def expected(self, activation="", dtype=torch.bfloat16, **changes):
        """The reference on the CPU."""
        with self.row_tile():
            return scaled_product(reference, *self.arguments("cpu", dtype, changes), activation)

    def arguments(self, device, dtype, changes):
        operands = {"a": self.q, "a_scale": self.scale, "w": self.w, "w_scale": self.w_scale}
        operands |= {"w_global_scale": None, "bias": self.bias} | changes
        moved = (None if t is None else t.to(device) for t in operands.values())
        return (*moved, [*on(self.plan, device)], self.top_k, self.scheme, dtype)

    def exact(self):
        rows = numbers(self.q, self.scale, self.scheme, self.top_k)
        return exact_scaled_rows(rows, self.w, self.w_scale, self.bias, self.expert, self.scheme)

    def compare(self, actual, exact, expected):
        """Rows of skipped slots are unspecified: left out."""
        exact = exact.rounded(actual.dtype)
        assert_matches_reference(actual.cpu()[self.mine], exact[self.mine], expected[self.mine])


@given(
    scheme=st.sampled_from(NAMED + GROUPED + WIDE),
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    n=st.sampled_from((8, 48, 130)),
    kk=st.sampled_from((16, 40, 130, 520)),
    tile=st.sampled_from(ROW_TILES),
    has_bias=st.booleans(),
    transposed=st.booleans(),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
)
def test_gemm(scheme, tokens, k, n, kk, tile, has_bias, transposed, routing, device):
    sizes = {"num_tokens": tokens, "num_experts": 5, "top_k": k, "hidden_size": kk}
    sizes |= {"intermediate_size": n, "has_bias": has_bias, "routing": routing}
    case = Case(scheme, device, tile, transposed, **sizes)
    exact = case.exact()
    if not get_scheme(scheme).activation.per_tensor:  # rows of tokens without experts are not read
        alone = ~case.mine.view(tokens, k).any(1)
        case.scale = torch.where(alone[:, None], torch.nan, case.scale)
    actual = case.run()
    assert actual.shape == (tokens * k, n)
    case.compare(actual, exact, case.expected())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", ["int8_tensor", "int8_channel", "int8_block16"])
def test_sums_of_integers_are_exact(scheme, dtype, device):
    """What float32 output shows: int8 products lose nothing before their scales."""
    case = Case(scheme, device, num_tokens=9, num_experts=3, hidden_size=300)
    expected = case.expected(dtype=dtype)
    case.compare(case.run(dtype=dtype), case.exact(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "scheme", ["int8_channel", "fp8_channel", "fp8_block16x32", "int8_block16", "fp8_tensor"]
)
def test_whole_numbers_are_rounded_once(scheme, dtype, device):
    """Values are integers and scales powers of two, all of them different from their neighbours':
    sums are exact, so every bit is known, whoever adds.
    """
    case = Case(scheme, device, num_experts=3, hidden_size=96, intermediate_size=40)
    case.q = whole_numbers(*case.q.shape, most=8).to(case.q.dtype)
    case.w = whole_numbers(*case.w.shape, most=8, seed=1).to(case.w.dtype)
    case.scale = 2.0 ** whole_numbers(*case.scale.shape, most=2, seed=2)
    case.w_scale = 2.0 ** whole_numbers(*case.w_scale.shape, most=2, seed=3)
    case.bias = bias_of(3, 40)
    actual = case.run(dtype=dtype).cpu()
    assert torch.equal(actual[case.mine], case.exact().value[case.mine].float().to(dtype))
    if scheme == "fp8_block16x32":  # which may be stored as e8m0
        as_bytes = (case.w_scale.log2() + 127).to(torch.uint8)
        again = case.run(dtype=dtype, w_scale=as_bytes).cpu()
        assert torch.equal(again[case.mine], actual[case.mine])
    if get_scheme(scheme).activation.per_tensor:  # and a scale for each expert
        factor = torch.tensor([1.0, 4.0, 0.5])
        actual = case.run(a_scale=case.scale * factor, bias=None, dtype=dtype)
        case.bias = None
        exact = case.exact().value * factor[case.expert.clamp(min=0), None].double()
        assert torch.equal(actual.cpu()[case.mine], exact[case.mine].float().to(dtype))


@pytest.mark.parametrize("scheme", ["fp8_tensor_static", "fp8_channel", "int8_block16"])
def test_rows_may_be_left_to_the_operator(scheme, device):
    """Those that are not quantized are so first, by the given scale where there is one."""
    case = Case(scheme, device, num_experts=3, num_tokens=5)
    static = get_scheme(scheme).activation.static
    if static:
        case.q, case.scale = rows_in(scheme, 4 * case.x)  # by 0.02, of which some rows are past
        case.x = 4 * case.x
    left = case.run(a=case.x, a_scale=torch.tensor([0.02]) if static else None)
    assert torch.equal(left[case.mine], case.run()[case.mine])


def test_long_sums_of_integers_are_exact(device):
    """More than 2**24: no float32 on the way may hold them."""
    case = Case("int8_tensor", device, num_experts=2, hidden_size=4000, intermediate_size=16)
    case.q, case.w = (
        (127 - whole_numbers(*x.shape, most=20).abs()).to(torch.int8) for x in (case.q, case.w)
    )
    case.scale, case.w_scale = torch.ones_like(case.scale), torch.ones_like(case.w_scale)
    actual = case.run(dtype=torch.float32).cpu()
    assert torch.equal(actual[case.mine], case.exact().value[case.mine].float())


@pytest.mark.parametrize(
    ("activation", "scheme"),
    half_exhaustive(
        ACTIVATIONS,
        ["fp8_tensor", "int8_channel", "fp8_block32", "fp8_block128"],
        where=INTERPRETED,
    ),
)
def test_fused_activation(activation, scheme, device):
    """Rows of w1 whose halves share blocks, or none; 70 columns a half."""
    sizes = {"num_experts": 4, "hidden_size": 72, "intermediate_size": 70, "has_bias": True}
    case = Case(scheme, device, activation=activation, **sizes)
    fused = case.run(activation)
    expected = case.expected(activation)
    case.compare(fused, activated(case.exact(), activation), expected)


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "silu_no_mul"])
@pytest.mark.parametrize("scheme", ["fp8_tensor", "int8_tensor", "fp8_channel"])
def test_other_forms_of_scales(activation, scheme, device):
    """One scale for each half of w1; scales of channels without the axis of groups."""
    case = Case(scheme, device, num_experts=4, activation=activation, intermediate_size=136)
    if scheme.endswith("tensor"):
        case.w_scale = torch.stack((case.w_scale, 2.5 * case.w_scale), 1)
    else:
        case.w_scale = case.w_scale.flatten(1)
    expected = case.expected(activation)
    actual = case.run(activation)
    case.compare(actual, activated(case.exact(), activation), expected)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "int8_tensor"])
def test_one_row_scale_for_each_expert(scheme, device):
    """As batched rows have it."""
    case = Case(scheme, device, num_experts=4, num_tokens=12)
    scales = case.scale * torch.tensor([0.5, 1.0, 2.0, 3.0])
    factor = scales[case.expert.clamp(min=0)] / case.scale
    exact = case.exact().times(factor[:, None])
    per_expert = scales.view(4, 1, 1)
    expected = case.expected(a_scale=per_expert)
    case.compare(case.run(a_scale=per_expert), exact, expected)


def test_a_scheme_without_scales(device):
    case = Case("fp8_channel", device)
    for case.scheme, rule in (
        ("unquantized", "w_scale must be None for scheme unquantized"),
        ("fp8_w8a16", "a_scale must be None for scheme fp8_w8a16"),
    ):
        with pytest.raises(ValueError, match=rule):
            case.run()


@pytest.mark.parametrize("unbacked", [False, True])
def test_fakes_add_no_guard_on_the_tokens(unbacked):
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    tokens = symbolic_tokens(mode, env, unbacked)
    with mode:
        x, scale = torch.empty(tokens, 64, dtype=torch.int8), torch.empty(tokens, 2)
        w1, w2 = torch.empty(4, 96, 64, dtype=torch.int8), torch.empty(4, 64, 48, dtype=torch.int8)
        ids = torch.empty(tokens, 3, dtype=torch.int32)
        plan = [ops.plan_slots(ids, None, 4, "int8_block32", torch.float16), ids, None]
        first, second = ((plan, k, "int8_block32", torch.float16) for k in (3, 1))
        rows = (x, scale, w1, torch.empty(4, 3, 2), None, None, *first)
        h = scaled_product(ops, *rows, "silu")
        quant = get_scheme("int8_block32").activation
        q, q_scale = ops.moe_quantize(h, None, None, None, None, 4, quant.key)
        y = scaled_product(ops, q, q_scale, w2, torch.empty(4, 2, 2), None, None, *second)
    assert not env.guards
    assert h.shape[1:] == q.shape[1:] == (48,) and q_scale.shape[1:] == (2,)
    assert y.view(tokens, 3, 64).dtype == h.dtype == torch.float16
