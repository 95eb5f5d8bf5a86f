"""Expert GEMMs that quantize their rows themselves: bit by bit what two steps make."""

import launches
import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from modular import setup
from operator_samples import symbolic_tokens
from plans import planned, the_plain_kernel
from products import scaled_product
from strategies import DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import moe_ops
from moe_ops import ops
from moe_ops.dispatch import GemmProblem, tuned
from moe_ops.dispatch.device import assumed, device_facts
from moe_ops.dispatch.families.portable import SLOT
from moe_ops.dispatch.portable import LONGEST_SLOT
from moe_ops.dispatch.problem import EACH
from moe_ops.dispatch.row_tiles import EIGHT_BIT, INVARIANT
from moe_ops.dispatch.tiles import Gemm, is_direct
from moe_ops.inspect.devices import TARGETS
from moe_ops.pipeline.gemms import quantized
from moe_ops.pipeline.row_spaces import SlotRows, depends_on_batch
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import SCHEMES, get_scheme, quantize_weight
from moe_ops.tensors import ExpertWeight, Tiles
from moe_ops.testing import Problem

pytestmark = pytest.mark.kernel
RUNS_KERNELS = INTERPRETED or HAS_CUDA
HOPPER = HAS_CUDA and torch.cuda.get_device_capability() == (9, 0)
E = 128
ONE_SCALE = ("fp8_channel", "fp8_tensor_static", "int8_channel")
"""A row has one, which is given or its own."""
NAMED = tuple(s.name for s in SCHEMES.values() if s.activation and not s.dequantizes_both)
BEFORE = (*(n for n in NAMED if n not in ONE_SCALE), "fp8_block16x64_ue8m0", "int8_block32")
"""Rows are quantized before: with a scale that all rows decide, or with groups."""
FUSED = "scaled_gemm_slot_kernel"


@pytest.fixture
def launched(monkeypatch):
    return launches.launched_kernels(monkeypatch)


class Case:
    """A GEMM of a routing of few slots over a random weight."""

    def __init__(self, name, ids, n, k, device, dtype=torch.bfloat16, activation=None, **more):
        g = torch.Generator().manual_seed(0)
        self.scheme, self.activation, self.dtype = get_scheme(name), activation, dtype
        experts, bias, transposed, expert_map = (
            more.get(key) for key in ("experts", "bias", "transposed", "expert_map")
        )
        experts = experts or E
        q = quantize_weight(torch.randn(experts, n, k, generator=g).bfloat16(), self.scheme)
        w = q.data.transpose(1, 2).contiguous().transpose(1, 2) if transposed else q.data
        self.ids = torch.tensor(ids, device=device).view(-1, len(ids[0]) if ids else 2)
        self.expert_map = expert_map and torch.tensor(expert_map, device=device)
        self.mine = local_experts(self.ids, self.expert_map, experts) >= 0
        x = torch.randn(len(self.ids), k, generator=g) * torch.rand(len(self.ids), 1, generator=g)
        self.x = x.to(device, dtype)
        self.scale = None
        if self.scheme.activation.static:
            self.scale = torch.full((1,), 0.013, device=device)
        b = torch.randn(experts, n, generator=g).to(device) if bias else None
        self.batch_invariant = more.get("batch_invariant", False)
        self.slots = (self.ids, self.expert_map, experts)
        plan = ops.plan_slots(*self.slots, name, dtype, self.batch_invariant)
        self.tiles = [plan, self.ids, self.expert_map]
        self.weight = (w.to(device), q.scale.to(device), None, b)

    def run(self, rows, scale):
        """The GEMM of rows; of slots that are not skipped."""
        how = (self.ids.shape[1], self.scheme.name, self.dtype, self.activation or "")
        tiles = (self.tiles, *how, self.batch_invariant)
        return scaled_product(ops, rows, scale, *self.weight, *tiles)[self.mine]

    def in_steps(self):
        """Quantize, then multiply."""
        key = self.scheme.activation.key
        rows = ops.moe_quantize(self.x, self.scale, None, *self.slots, key)
        with the_plain_kernel():
            return self.run(*rows)

    def check(self):
        mine = self.mine.view(self.ids.shape).any(1, keepdim=True)
        x = torch.where(mine, self.x, torch.nan)  # rows of tokens without experts are not read
        with the_plain_kernel():  # where there are more slots
            actual = self.run(x, self.scale)
        assert actual.dtype == self.dtype and actual.isfinite().all()
        assert torch.equal(actual, self.in_steps())


EXPERT = st.sampled_from((0, 1, 2, 77, E - 1, -1, E, 2**31 - 1))


@given(
    name=st.sampled_from(ONE_SCALE),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from((None, "silu", "swigluoai", "gelu_no_mul")),
    ids=st.integers(1, 4).flatmap(
        lambda k: st.lists(st.lists(EXPERT, min_size=k, max_size=k), min_size=0, max_size=4)
    ),
    n=st.sampled_from((16, 48, 140)),
    k=st.sampled_from((16, 40, 130, 260)),
    bias=st.booleans(),
    transposed=st.booleans(),
)
def test_bits(name, dtype, activation, ids, n, k, bias, transposed, device):
    Case(name, ids, n, k, device, dtype, activation, bias=bias, transposed=transposed).check()


@pytest.mark.parametrize("name", ["fp8_channel", "int8_channel"])
def test_rows_longer_than_what_is_read_at_once(name, device, monkeypatch):
    """Their largest magnitude may be in any piece."""
    kernels = pytest.importorskip("moe_ops.kernels._gemm.scaled_slot")
    monkeypatch.setattr(kernels, "BYTES_AT_ONCE", 2)
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([]))  # with launches of their own
    case = Case(name, [[3, 5]], 48, 300, device, activation="silu", bias=True)
    case.x[0, 7] = 9.0
    rows = ops.moe_quantize(case.x, None, None, *case.slots, case.scheme.activation.key)
    with the_plain_kernel():
        assert torch.equal(case.run(case.x, None), case.run(*rows))


@pytest.mark.parametrize("name", ONE_SCALE + BEFORE)
def test_every_scheme(name, launched, device):
    """One launch where a row has one scale of its own or a given one; tails of groups; a map."""
    expert_map = [-1, 5, *range(64), 200, 9]
    width = 2880 if HAS_CUDA else 464
    case = Case(name, [[1, 67], [0, 66], [3, 4]], 96, width, device, torch.float16, "silu",
                expert_map=expert_map)  # fmt: skip
    case.check()
    if RUNS_KERNELS:
        del launched[:]
        with the_plain_kernel():
            case.run(case.x, case.scale)
        shared = depends_on_batch(case.scheme.activation)
        before = ["amax_kernel", "scaled_kernel"] if shared else ["quantize_kernel"]
        assert launched == ([FUSED] if name in ONE_SCALE else [*before, "scaled_gemm_kernel"])


@pytest.mark.parametrize("slots", [1, 16, 17])
@pytest.mark.parametrize("name", ["fp8_tensor_static", "int8_channel"])
def test_numbers_of_slots(name, slots, launched, device):
    """Up to 16, of many experts, in one launch."""
    case = Case(name, [[e] for e in range(slots)], 64, 256, device)
    case.check()
    del launched[:]
    case.run(case.x, case.scale)
    assert (FUSED in launched) == (RUNS_KERNELS and is_direct(slots, E))


@pytest.mark.parametrize("size", [1e-30, 0.0, 1e30])
@pytest.mark.parametrize("name", ["fp8_channel", "fp8_tensor_static", "int8_channel"])
def test_extreme_rows(name, size, device):
    case = Case(name, [[0, 1]], 32, 200, device, torch.float32)
    case.x *= size
    case.check()


def test_a_given_scale_of_zero(device):
    """0 / 0 in the row is not in its padding."""
    case = Case("fp8_tensor_static", [[0, 1]], 32, 200, device)
    case.scale.zero_()
    assert torch.equal(case.run(case.x, case.scale).isnan(), case.in_steps().isnan())


@pytest.mark.parametrize("name", ["fp8_tensor_static", "fp8_channel"])
def test_batch_invariant_mode_keeps_its_kernel(name, launched, device):
    """Sums are those of many tokens."""
    case = Case(name, [[0, 1]], 64, 256, device, batch_invariant=True)
    case.check()
    assert FUSED not in launched


def test_rows_without_a_routing(launched, device):
    """A plan alone: all rows are quantized before."""
    case = Case("fp8_channel", [[0, 1], [2, 2]], 64, 256, device)
    expected = case.in_steps()
    case.tiles = [*planned(case.ids, None, E, "fp8_channel")]
    del launched[:]
    with the_plain_kernel():
        assert torch.equal(case.run(case.x, None), expected)
    assert FUSED not in launched


def test_rows_with_strides(device):
    case = Case("int8_channel", [[0, 1], [5, -1]], 64, 256, device)
    expected = case.in_steps()
    wide = torch.full((2, 300), torch.nan, dtype=case.dtype, device=device)
    wide[:, 7:263] = case.x
    for x in (wide[:, 7:263], case.x.t().contiguous().t()):
        assert torch.equal(case.run(x, None), expected)


def test_quantized_rows_need_scales(device):
    case = Case("int8_channel", [[0, 1]], 64, 256, device)
    with pytest.raises(ValueError, match="a_scale must be given with rows of dtype torch.int8"):
        case.run(case.x.to(torch.int8), None)


@pytest.mark.skipif(not RUNS_KERNELS, reason="counts launches")
@pytest.mark.parametrize(
    ("name", "changes", "kernels"),
    [
        ("fp8_block128", {}, ["quantize_kernel", "scaled_gemm_kernel"] * 2),
        ("int8_channel", {"dtype": torch.float32}, [FUSED, FUSED]),
        ("fp8_tensor_static", {}, [FUSED, FUSED]),
        ("fp8_channel", {"on_input": True}, ["quantize_kernel", "scaled_gemm_kernel", FUSED]),
    ],
)  # fmt: skip
def test_launches_of_a_layer(name, changes, kernels, launched, device):
    """Both products, and the sum."""
    problem = Problem(**({"num_tokens": 1, "num_experts": 64, "top_k": 4, "hidden_size": 128,
                          "intermediate_size": 64, "dtype": torch.bfloat16, "scheme": name}
                         | changes))  # fmt: skip
    s = setup(problem, moe_ops.pipeline.TritonExperts, device)
    with the_plain_kernel():
        moe_ops.fused_experts(
            *s.inputs[:5], quant_config=s.config, apply_router_weight_on_input=problem.on_input
        )
    assert launched[:-1] == kernels and len(launched) == len(kernels) + 1


@pytest.mark.parametrize("k", [128, LONGEST_SLOT, LONGEST_SLOT + 128])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["fp8_block128", "int8_channel"])
def test_rows_in_a_pipeline(name, tokens, k, device):
    """Few are left to the kernel that takes them, others are quantized before: held once."""
    scheme, ids = get_scheme(name), torch.zeros(tokens, 4, dtype=torch.int32, device=device)
    tiles = Tiles(torch.empty(0, dtype=torch.int32, device=device), ids)
    x = torch.randn(tokens, k, device=device)
    w = ExpertWeight(torch.empty(E, 256, k, dtype=scheme.weight.dtype, device=device))
    rows = quantized(x, None, w, SlotRows(tiles, E), scheme, 4, "silu")
    left = name == "int8_channel" and tokens * 4 <= 16 and k <= LONGEST_SLOT
    hopper = device_facts(x.device).arch == 90  # a CPU plans as an H200 does
    left |= hopper and tokens == 1
    assert (rows.data is x) == (rows.scale is None) == left
    rows = quantized(x, None, w, SlotRows(tiles, E, batch_invariant=True), scheme, 4, "silu")
    assert rows.data.dtype == scheme.activation.dtype


def test_rows_of_a_rank():
    """30 rows an expert, which are not packed, are 120 of a quarter's experts: packed, if all were.

    The pass that packs rows also quantizes those of slots.
    """
    scheme, ids = get_scheme("fp8_channel"), torch.zeros(480, 8, dtype=torch.int32)
    plan, expert_map = torch.empty(0, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    x = torch.randn(480 * 8, 64)
    w = ExpertWeight(torch.empty(32, 256, 64, dtype=scheme.weight.dtype))
    with assumed(TARGETS["sm_90"].facts):
        for given, left in ((None, True), (expert_map, False)):
            rows = quantized(x, None, w, SlotRows(Tiles(plan, ids, given), 32), scheme, 1)
            assert (rows.data is x) == left


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["fp8_block128", "int8_channel"])
def test_numbers_of_tokens_in_a_graph(name, dynamic):
    """Rows are quantized in the graph where slots are known to be many, else in the operator."""
    torch._dynamo.reset()
    scheme = get_scheme(name)

    @torch.compile(fullgraph=True, backend="eager", dynamic=dynamic)
    def dtype_of(x, ids):
        plan, w = torch.empty(0, dtype=torch.int32), ExpertWeight(x)
        rows = quantized(x, None, w, SlotRows(Tiles(plan, ids), E), scheme, 4)
        return rows.data.view(rows.data.dtype)

    for tokens in (3, 40):
        rows = dtype_of(torch.randn(tokens, 128), torch.zeros(tokens, 4, dtype=torch.int32))
        left = dynamic or tokens == 3
        assert rows.dtype == (torch.float32 if left else scheme.activation.dtype)


@pytest.mark.parametrize("unbacked", [False, True])
def test_nobody_asks_for_the_number_of_tokens(unbacked):
    """The operator quantizes the rows of any scheme, and as it packs them where they are many."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    tokens = symbolic_tokens(mode, env, unbacked)
    scheme = get_scheme("fp8_block128")
    with mode:
        x, ids = torch.empty(tokens, 128), torch.empty(tokens, 4, dtype=torch.int32)
        plan = ops.plan_slots(ids, None, E, "fp8_block128", torch.float32)
        w, w_scale = torch.empty(E, 64, 128, dtype=torch.float8_e4m3fn), torch.empty(E, 1, 1)
        space = SlotRows(Tiles(plan, ids), E)
        rows = quantized(x, None, ExpertWeight(w), space, scheme, 4)
        how = ([plan, ids, None], 4, "fp8_block128", torch.float32)
        out = scaled_product(ops, *rows, w, w_scale, None, None, *how)
    assert rows.data is x and rows.scale is None and not env.guards
    assert out.shape[1:] == (64,)


def test_what_is_quantized_before():
    def why_not(slots=4, name="fp8_channel", k=512, rule=EIGHT_BIT):
        gemm = Gemm(slots, E, 256, k, 2, 1, rule)
        problem = GemmProblem(gemm, name, rows=EACH, num_tokens=slots)
        return SLOT.why_not(problem, device_facts(torch.device("cpu")))

    assert why_not() is why_not(16, "int8_channel", 7168) is None
    assert why_not(17) == "slots must be so few that each is a tile, got 17"
    assert why_not(rule=INVARIANT) == "the GEMM must not be batch-invariant"
    assert why_not(k=8192) == "K must be at most 7168, got 8192"
    assert why_not(name="fp8_block128") == "a row must have one scale"
