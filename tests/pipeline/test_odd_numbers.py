"""Layouts that no kernel reads and numbers out of reach: named in an error before anything runs."""

import pytest
import torch
from good_arguments import GOOD, LOGITS, WEIGHTS, E, H, K, T, X
from table_items import every_row

import moe_ops


def other_layouts(x):
    """The same numbers as tensors that no kernel can read."""
    yield torch.nested.nested_tensor([x])
    if x.dim():
        yield x.to_sparse()
        yield torch.nested.nested_tensor([x], layout=torch.jagged)
    if x.dim() == 2:
        yield x.to_sparse_csr()
    if x.dtype == torch.float32:
        yield x.to_mkldnn()
        yield torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)


TENSORS = [(f, name) for f, given in GOOD.items() for name in given if torch.is_tensor(given[name])]


@pytest.mark.filterwarnings("ignore")
@every_row(("function", "name"), TENSORS)
def test_another_layout_is_named(function, name):
    for x in other_layouts(GOOD[function][name]):
        with pytest.raises((TypeError, ValueError), match=f"{name}.* must"):
            function(**{**GOOD[function], name: x})


FACTORS = ("routed_scaling_factor", "shared_expert_weight")
NUMBERS_OF_ANY_SIZE = [
    (function, name)
    for function, given in GOOD.items()
    for name, value in given.items()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "N"
]


@every_row(("function", "name"), NUMBERS_OF_ANY_SIZE)
def test_a_number_out_of_reach_is_named(function, name):
    """Too large for a machine word, too small, no whole number, no number."""
    wrong = ["4", None, 2 + 3j, 1.5, float("nan"), -(2**70), 2**70, 2**40]
    if name in FACTORS:
        wrong = ["4", None, 2 + 3j, float("nan"), float("inf"), 1e300, 10**400]
    if function is moe_ops.FusedMoE:
        wrong.remove(None)  # the default of every option
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=rf"{name}.* must|must.*\b{name}\b"):
            function(**{**GOOD[function], name: value})


@every_row("shape", [(0, 8, 16), (2, 0, 16), (2, 8, 0)])
@every_row("scheme", ["unquantized", "fp8_tensor", "int4_w4a16_g32", "nvfp4"])
def test_a_weight_without_numbers(shape, scheme):
    with pytest.raises(ValueError, match="w must have no size of 0"):
        moe_ops.quantize_weight(torch.zeros(shape), scheme)


@every_row("scale", [torch.ones(4), torch.ones(12), torch.ones(6, 7), torch.ones(0)])
def test_static_scales_of_other_rows(scale):
    with pytest.raises(ValueError, match="A_scale must have the 6 tokens of A"):
        moe_ops.moe_kernel_quantize_input(X, scale, torch.int8, True)


@every_row("cols", [32.5, "32", True, 2**70])
def test_columns_of_blocks(cols):
    with pytest.raises((TypeError, ValueError), match=r"block_shape\[1\] must be"):
        moe_ops.moe_kernel_quantize_input(X, None, torch.int8, False, [128, cols])


@every_row("jitter", ["0.01", True, float("nan")])
def test_jitter(jitter):
    with pytest.raises((TypeError, ValueError), match="jitter_eps must be"):
        moe_ops.routing.sparsemixer(X, LOGITS, jitter_eps=jitter)


def test_replicas_that_are_no_number():
    for most in (2.0, "2", True):
        with pytest.raises(TypeError, match="max_replicas must be an int"):
            moe_ops.parallel.compute_logical_maps(torch.tensor([0, 1]), 2, most)
    placed = moe_ops.parallel.compute_logical_maps(torch.zeros(2, 0, dtype=torch.int64), 3)
    assert placed.logical_replica_count.tolist() == [[0, 0, 0]] * 2


def test_offsets_of_no_expert():
    rows, inverse = torch.ones(4, 8), torch.zeros(2, 2, dtype=torch.int32)
    for entries in (0, 1):
        offset = torch.zeros(entries, dtype=torch.int64)
        with pytest.raises(ValueError, match="expert_first_token_offset must have at least 2"):
            moe_ops.moe_unpermute(rows, None, inverse, offset)


@every_row("strides", [(0, 1), (H // 2, 1), (1, T), (2 * H, 2)])
def test_outputs_whose_rows_share_memory(strides):
    outputs = torch.zeros(2 * T * H).as_strided((T, H), strides)
    with pytest.raises(ValueError, match="outputs must have contiguous rows that lie apart"):
        moe_ops.moe_fused_mul_sum(torch.zeros(T, K, H), WEIGHTS, outputs)
    with pytest.raises(ValueError, match="out must have contiguous rows that lie apart"):
        none = (None, None, None, E)
        moe_ops.ops.moe_fused_mul_sum_out(torch.zeros(T, K, H), WEIGHTS, *none, out=outputs)
