"""Both GEMMs of schemes of a caller's own compiled for GPUs, without one."""

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import given_plan, stored  # noqa: E402
from own_schemes import OWN  # noqa: E402
from pairwise import half_exhaustive  # noqa: E402
from plans import row_tile  # noqa: E402
from products import scaled_product, stored_product  # noqa: E402

from moe_ops import fake_impls  # noqa: E402
from moe_ops.kernels import expert_product, quantize  # noqa: E402
from moe_ops.kernels._gemm import scaled, weight_only  # noqa: E402
from moe_ops.scheme import min_capability  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
BF16, EXPERTS = torch.bfloat16, 4


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(quantize, scaled, weight_only)


def launch_layer(scheme, tile, hidden=2048, width=768):
    rows_quant, weight_quant = scheme.activation, scheme.weight

    def launch(empty):
        slots = tile * EXPERTS // 2
        ids = empty(slots, 1, dtype=torch.int32)
        with row_tile(tile):
            sizes = (given_plan(ids, EXPERTS, scheme.key), 1, scheme.key)
            for gemm in ((2 * width, hidden, "silu"), (hidden, width, "")):
                launch_gemm(empty, ids, sizes, *gemm)

    def launch_gemm(empty, ids, sizes, n, k, activation):
        slots = ids.shape[0]
        x, w = empty(slots, k, dtype=BF16), stored(empty, scheme.key, EXPERTS, n, k, BF16)
        if rows_quant is None:
            stored_product(expert_product, x, *w, None, None, *sizes, activation)
            return
        one = empty(1) if rows_quant.static or rows_quant.global_scale else None
        quantized = quantize if activation else fake_impls.quantize  # the same for GEMM 2
        rows = quantized.moe_quantize(x, one, None, ids, None, EXPERTS, rows_quant.key)
        factor = empty(EXPERTS, n) if weight_quant.channel_scale else w.global_scale
        scaled_product(
            expert_product, *rows, w.data, w.scale, factor, None, *sizes, BF16, activation
        )

    return launch


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("scheme", "tile"), half_exhaustive(OWN, [16, 128]))
def test_both_gemms(scheme, tile, arch, one_of_two):
    """In turns of two schemes, which have both tiles, unless everything is compiled."""
    nth, scheme = one_of_two([*OWN].index(scheme) // 2), OWN[scheme]
    assert arch >= min_capability(scheme.activation)
    kernels = aot.compile_launch(arch, launch_layer(scheme, tile), nth=nth)
    gemms = [k for k in kernels if "gemm" in k.metadata.name]
    assert len(gemms) == (2 if nth is None else 1)
    for kernel in gemms:
        used = aot.resources(kernel, arch)
        assert used["shared"] <= aot.SHARED_MEMORY[arch] and used["serialized"] == 0, used
        assert not aot.rewrites_operands(kernel)
