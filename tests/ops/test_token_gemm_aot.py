"""The kernels of one token on Hopper, compiled as their launchers choose them."""

from unittest import mock

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from pairwise import cover, every  # noqa: E402
from sum_calls import SumCall  # noqa: E402
from table_items import every_row  # noqa: E402
from token_layers import Layer, promised  # noqa: E402

from moe_ops.dispatch.hopper import LEAST_TOKEN_STAGES  # noqa: E402
from moe_ops.kernels import expert_product, weight_and_reduce
from moe_ops.kernels._hopper import one_token as hopper_token
from moe_ops.kernels._hopper import one_token_gemm as token_gemm
from moe_ops.kernels._hopper import one_token_sizes as token_sizes
from moe_ops.kernels._hopper import stream as hopper_stream
from moe_ops.kernels._runtime import launch

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = {
    "qwen3-30b": (128, 2048, 768, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
    "mixtral": (8, 4096, 14336, 2),
    "qwen3-next": (512, 2048, 512, 10),
    "llama4-scout": (16, 5120, 8192, 1),
    "gpt-oss": (128, 2880, 2880, 4),
    "odd": (40, 1408, 704, 5),
    "shard": (80, 2048, 384, 10),
    "odder": (32, 272, 144, 3),
}
"""Experts, hidden size, intermediate size, experts of a token."""
SCHEMES = [
    ("unquantized", BF16),
    ("unquantized", F16),
    ("fp8_channel", BF16),
    ("fp8_block128", BF16),
    ("int8_channel", BF16),
    ("int8_block128", BF16),
]
SETTINGS = [("silu", False), ("swigluoai", True), ("relu2_no_mul", False)]
"""Activations, and whether there is a bias."""
ROWS, SUM = "hopper_token_kernel", "hopper_token_sum_kernel"
LONG_ROWS = {("mixtral", "unquantized"): "_expert_gemm_kernel"}
"""Of GEMM 2: as vectors they do not leave room for weights."""
HALF = 228 * 1024 // 2 - 1024
"""Shared memory of a program of which two fit a processor, in bytes; each takes 1 KiB more."""


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(expert_product, hopper_stream, hopper_token, weight_and_reduce)


def names(kernels):
    return [kernel.metadata.name for kernel in kernels]


def sizes_of(constants):
    return next(c for c in constants.values() if isinstance(c, token_sizes.TokenSizes))


def calls_of(run):
    """Names of kernels, and their constants; nothing is compiled."""
    return [(name, sizes_of(options)) for name, _, options in aot.launched(90, run)]


def check(kernel):
    """One of each GEMM fits a processor, nothing waits for registers, and zeros are zeros.

    Those of a piece without numbers: see `TokenSizes.PAIRED`.
    """
    used = aot.resources(kernel, 90)
    most = token_gemm.REGISTERS[kernel.metadata.name == SUM]
    assert used["shared"] <= HALF and used["registers"] <= most, used
    assert used["spilled"] <= 64 and used["serialized"] == 0, used
    assert "wgmma.mma_async" in kernel.asm["ptx"] and not aot.packs_garbage(kernel)
    assert sizes_of(kernel.src.constants).STAGES >= LEAST_TOKEN_STAGES


def fits(shape, scheme):
    """Blocks of 128 that divide the rows between the GEMMs."""
    return "block" not in scheme[0] or SHAPES[shape][2] % 128 == 0


def bf16_or_some(shape, scheme):
    """fp16 differs from bf16 in one constant: three shapes are enough for it."""
    return scheme[1] is BF16 or shape in ("qwen3-30b", "odd", "odder")


def cases(**more):
    """Every shape with every scheme and setting; `make test` compiles all pairs of bf16."""
    factors = {"shape": list(SHAPES), "scheme": SCHEMES, **more}
    rules = [(("shape", "scheme"), fits)]
    pairs = cover(factors, [*rules, (("shape", "scheme"), bf16_or_some)])
    return [
        pytest.param(*row.values(), marks=[pytest.mark.exhaustive] * (row not in pairs))
        for row in every(factors, rules)
    ]


@pytest.mark.parametrize(("shape", "scheme", "setting"), cases(setting=SETTINGS), ids=str)
def test_first_gemm(shape, scheme, setting):
    (kernel,) = aot.compile_launch(
        90, lambda empty: Layer(empty, SHAPES[shape], *scheme).rows(*setting)
    )
    assert kernel.metadata.name == ROWS
    check(kernel)
    # Only the second GEMM's own kernel is let in before the first one's last weights.
    assert (sizes_of(kernel.src.constants).LEAD > 0) == ((shape, scheme[0]) not in LONG_ROWS)


@pytest.mark.parametrize("top_k", [6, pytest.param(8, marks=pytest.mark.exhaustive), 10])
@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block128"])
@pytest.mark.parametrize("width", [96, 272])
def test_pieces_without_numbers(width, scheme, top_k):
    """The last of an odd number is there for the engine only; see `TokenSizes.PAIRED`."""
    shape = (10 * top_k, 144, width, top_k)
    (kernel,) = aot.compile_launch(90, lambda empty: Layer(empty, shape, scheme).sum())
    assert kernel.metadata.name == SUM
    check(kernel)


@triton.jit
def _masked_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    value, scale = tl.load(x + at, mask=at < 0, other=0.0), tl.load(x)
    tl.store(out + at, tl.fma(value * scale, scale, value).to(tl.float8e4nv))


@triton.jit
def _spread_kernel(x, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), (tl.zeros((N,), tl.float32) + tl.load(x)).to(tl.float8e4nv))


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="that of Triton 3.6 does it")
def test_what_packs_garbage():
    """Zeros by their masks, not whatever else is equal."""

    def run(empty):
        for kernel in (_masked_kernel, _spread_kernel):
            kernel[(1,)](empty(4096, dtype=F32), empty(4096, dtype=torch.float8_e4m3fn), N=4096)

    assert [aot.packs_garbage(kernel) for kernel in aot.compile_launch(90, run)] == [True, False]


@pytest.mark.parametrize(("shape", "scheme", "early"), cases(early=[False, True]), ids=str)
def test_second_gemm(shape, scheme, early):
    """With the sum; it reads early only if its caller says that it may."""

    def run(empty):
        Layer(empty, SHAPES[shape], *scheme).sum(has_bias=shape == "gpt-oss", early=early)

    kernels = aot.compile_launch(90, run)
    other = LONG_ROWS.get((shape, scheme[0]))
    if other is not None:
        assert names(kernels) == [other, "_mul_sum_kernel"]
        return
    assert names(kernels) == [SUM] and sizes_of(kernels[0].src.constants).EARLY is early
    check(kernels[0])


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block128", "fp8_block128_ue8m0"])
def test_rows_that_are_quantized_already(scheme):
    """Nothing is left to do for the same kernels; what is left is in other tests but for e8m0."""

    def run(empty):
        for stored in (False, True):
            layer = Layer(empty, SHAPES["qwen3-30b"], scheme, stored=stored)
            layer.rows(), layer.sum()

    assert [(name, sizes.QUANT is None) for name, sizes in calls_of(run)] == [
        (name, stored) for stored in (False, True) for name in (ROWS, SUM)
    ]
    for kernel in aot.compile_launch(90, run, nth=None if scheme.endswith("ue8m0") else 1):
        check(kernel)


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel"])
@pytest.mark.parametrize(
    ("ids", "mapped", "weighted"), [(torch.int64, True, True), (torch.int32, True, False)]
)
def test_routings(scheme, ids, mapped, weighted):
    """Ids of both widths, with a map; weights that were applied before."""

    def run(empty):
        layer = Layer(empty, SHAPES["qwen3-next"], scheme, ids=ids, mapped=mapped)
        layer.rows(), layer.sum(weighted=weighted)

    kernels = aot.compile_launch(90, run)
    assert names(kernels) == [ROWS, SUM] and sizes_of(kernels[1].src.constants).WEIGHTED is weighted
    for kernel in kernels:
        check(kernel)


def launch_both(shape, scheme, dtype=BF16, **changes):
    def run(empty):
        layer = Layer(empty, SHAPES[shape], scheme, dtype, **changes)
        layer.rows(), layer.sum()

    return run


def other_kernels(arch, run):
    """What is launched, none of it for one token."""
    found = aot.launched_names(arch, run)
    assert found and not {ROWS, SUM} & set(found)
    return found


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel"])
@pytest.mark.parametrize("arch", [80, 100, 120])
def test_only_on_hopper(arch, scheme):
    scheme = "unquantized" if arch == 80 else scheme
    found = other_kernels(arch, launch_both("qwen3-30b", scheme))
    assert found[-1] == "_mul_sum_kernel"


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        ("unquantized", {"batch_invariant": True}),
        ("fp8_channel", {"batch_invariant": True}),
        ("unquantized", {"tokens": 2}),
        ("fp8_block128", {"tokens": 2}),
        ("fp8_tensor", {}),
        ("int8_tensor", {}),
        ("unquantized", {"dtype": F32}),
    ],
)
def test_what_other_kernels_serve(scheme, changes):
    """Batch-invariant: the same sums at every load. No program knows a scale of all rows."""
    found = other_kernels(90, launch_both("qwen3-30b", scheme, **changes))
    assert found[-1] == "_mul_sum_kernel"


def test_many_slots_of_few_experts():
    """They have a plan."""
    found = other_kernels(90, lambda empty: Layer(empty, (16, 2048, 768, 4), "unquantized").sum())
    assert found[-2:] == ["_expert_gemm_kernel", "_mul_sum_kernel"]


def test_it_begins_early_only_where_it_is_told_to():
    """After the first GEMM too: a kernel of PyTorch's may write the ids between two calls."""

    def run(empty):
        layer = Layer(empty, SHAPES["odder"], "unquantized")
        with mock.patch.object(launch, "_current_stream", lambda device: 0):
            layer.rows(), layer.sum(), layer.rows(), layer.sum(early=True)

    called = calls_of(run)
    assert [name for name, _ in called] == [ROWS, SUM, ROWS, SUM]
    assert [sizes.EARLY for name, sizes in called if name == SUM] == [False, True]


@every_row(("name",), [("w_scale",), ("topk_ids",), ("expert_map",)])
def test_it_does_not_read_copies_early(name):
    """They are made between the two GEMMs."""

    def run(empty):
        def copy(*vectors):  # what a build without CUDA cannot do
            return [None if x is None else empty(*x.shape, dtype=x.dtype) for x in vectors]

        layer = Layer(empty, SHAPES["odd"], "fp8_block128", mapped=True)
        given = SumCall(*layer.sum_arguments())
        plan, ids, expert_map = given.tiles
        copied = {"w_scale": given.weight.scale, "topk_ids": ids, "expert_map": expert_map}
        x = copied[name]
        copied[name] = empty(*x.shape, 2, dtype=x.dtype).select(-1, 0)
        tiles = [plan, copied["topk_ids"], copied["expert_map"]]
        weight = given.weight._replace(scale=copied["w_scale"])
        with mock.patch.object(token_gemm, "dense_vectors", copy), promised(True):
            expert_product.expert_product_sum(*given._replace(weight=weight, tiles=tiles))

    ((name, sizes),) = calls_of(run)
    assert name == SUM and not sizes.EARLY
