"""Calls that stream experts from host memory: copies run beside products, and never too late."""

import copy

import pytest
import torch

import moe_ops
from moe_ops import FusedMoE

E, K, HIDDEN, WIDTH, TOKENS = 32, 4, 1024, 512, 512


def routings(steps):
    """Ids that want all experts, a moving half, or mostly one; and padding."""
    g = torch.Generator().manual_seed(0)
    for step in range(steps):
        kind, first = step % 4, 5 * step
        scores = torch.rand(TOKENS, E, generator=g)
        if kind == 1:
            scores[:, [(first + i) % E for i in range(E // 2)]] += 1
        elif kind == 2:
            scores[:, first % E] += 1
        ids = scores.topk(K).indices
        if kind == 3:
            ids[::3] = -1
        yield ids


def poison(owner):
    """Forget the experts in the slots, which hold NaN from now on."""
    owner.empty_()
    for slots in (x for weight in owner.slots for x in weight[:5] if x is not None):
        slots.view(torch.uint8).fill_(0xFF)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["unquantized", "int4_w4a16_g128"])
@pytest.mark.parametrize("resident", [6, 16, 24])
def test_experts_are_there_before_they_are_read(scheme, resident):
    """Eager calls and replays of one graph find NaN in every slot, and have the same bits."""
    layer = FusedMoE(E, K, HIDDEN, WIDTH, params_dtype=torch.bfloat16, device="cuda")
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.1)
    if scheme != "unquantized":
        moe_ops.quantize_(layer, scheme, progress=False)
    other = copy.deepcopy(layer)
    moe_ops.offload_(other, resident=resident, progress=False)
    owner = other.state.host_experts.residency
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    logits = torch.randn(TOKENS, E, device="cuda")
    ids = next(routings(1)).cuda()

    with torch.no_grad():
        other(x, logits, topk_ids=ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = other(x, logits, topk_ids=ids)
        for step, chosen in enumerate(routings(24)):
            ids.copy_(chosen)
            expected = layer(x, logits, topk_ids=ids)
            if step % 3 == 0:
                poison(owner)
            assert torch.equal(other(x, logits, topk_ids=ids), expected), step
            if step % 3 == 1:
                poison(owner)
            graph.replay()
            assert torch.equal(out, expected), step
