"""GEMMs that quantize their rows, compiled for every architecture without a GPU."""

import re

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from products import scaled_product  # noqa: E402

from moe_ops.dispatch.device import Device  # noqa: E402
from moe_ops.kernels import expert_product
from moe_ops.kernels._gemm import scaled_slot
from moe_ops.scheme import get_scheme  # noqa: E402
from moe_ops.support import ARCHITECTURES, min_capability  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
SCHEMES = ("fp8_channel", "fp8_tensor_static", "int8_channel")
SHAPES = {"small": (128, 8, 2048, 768), "wide": (256, 8, 7168, 2048), "tails": (64, 4, 2880, 2880)}
CASES = [
    (arch, scheme)
    for arch in ARCHITECTURES
    for scheme in SCHEMES
    if arch >= min_capability(get_scheme(scheme).activation)
]


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(expert_product, scaled_slot)


def launch_layer(name, shape, dtype):
    """Both GEMMs of one token."""
    experts, top_k, hidden, width = SHAPES[shape]
    weight, given = get_scheme(name).weight, get_scheme(name).activation.static

    def launch(empty):
        tiles = [empty(0, dtype=torch.int32), empty(1, top_k, dtype=torch.int32), None]
        scale = empty(1, dtype=torch.float32) if given else None

        def operands(rows, n, k):
            w = empty(experts, n, k, dtype=weight.dtype)
            scales = empty(*weight.weight_scale_shape(experts, n, k), dtype=torch.float32)
            how = (tiles, top_k // rows, name, dtype)
            return (empty(rows, k, dtype=dtype), scale, w, scales, None, None, *how)

        scaled_product(expert_product, *operands(1, 2 * width, hidden), "silu")
        scaled_product(expert_product, *operands(top_k, hidden, width))

    return launch


def check(arch, name, shape, nth, dtype=torch.bfloat16):
    """Two kernels, or one of them, without spills: weights are on the way as rows are quantized.

    As for weights of which Hopper cannot make boxes, or two tokens.
    """
    facts = Device(arch, aot.SHARED_MEMORY[arch], 132, portable_only=True)
    kernels = aot.compile_launch(facts, launch_layer(name, shape, dtype), nth=nth)
    count = 2 if nth is None else 1
    assert [k.metadata.name for k in kernels] == ["scaled_gemm_slot_kernel"] * count
    for kernel in kernels:
        used = aot.resources(kernel, arch)
        assert used["shared"] <= aot.SHARED_MEMORY[arch] // 2 and used["spilled"] == 0, used
        assert used["registers"] <= 128, used
        loop = kernel.asm["ttgir"].split("scf.for")[-1]
        assert re.search(r"async_wait .*num = [1-9]", loop), "weights are not loaded ahead"


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_one_token(arch, name, one_of_two):
    check(arch, name, "small", one_of_two(SCHEMES.index(name)))


@pytest.mark.parametrize("shape", ["wide", "tails"])
@pytest.mark.parametrize("name", SCHEMES)
def test_other_sizes(name, shape, one_of_two):
    check(90, name, shape, one_of_two([*SHAPES].index(shape)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["fp8_channel", "int8_channel"])
def test_rows_of_other_dtypes(name, dtype, one_of_two):
    check(90, name, "wide", one_of_two(0), dtype)
