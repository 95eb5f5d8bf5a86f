"""Experts in host memory in forms that only kernels for Hopper read: bits of the layer without."""

import copy

import pytest
import torch
from legs import ON_HOPPER
from packed_weights import PACKABLE
from quantized_layers import WIDE, quantized
from table_items import every_row

import moe_ops

pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs kernels for Hopper")
E, K = 9, 4


@torch.no_grad()
def assert_same(layer, other, device):
    for tokens in (0, 1, 3, 17):
        x = torch.randn(tokens, WIDE, device=device).bfloat16()
        logits = torch.randn(tokens, E, device=device).bfloat16()
        assert torch.equal(other(x, logits), layer(x, logits)), tokens


@every_row("scheme", PACKABLE)
def test_one_token_of_few_experts(scheme, device):
    """Its slots have a plan, but the kernel with the weighted sum reads ids."""
    layer = quantized(scheme, E, K, form="packed").to(device)
    other = moe_ops.offload_(copy.deepcopy(layer), resident=7, progress=False)
    assert_same(layer, other, device)


@every_row("scheme", ["int8_w8a16", "mxfp4_w4a8"])
def test_another_number_of_slots_keeps_the_form(scheme, device):
    """Plain experts stay plain, though their parameters lie on the host by then."""
    layer = quantized(scheme, E, K).to(device)
    other = moe_ops.offload_(copy.deepcopy(layer), resident=7, progress=False)
    for resident in (5, E):
        moe_ops.offload_(other, resident=resident, progress=False)
        assert other.w13_weight.dtype == layer.w13_weight.dtype
        assert other.w13_weight.shape == layer.w13_weight.shape
        assert_same(layer, other, device)
