"""Tensors of more than 2**31 elements: weights, routed rows, tokens."""

import pytest
import torch
from plans import planned, row_tile
from products import scaled_product

import moe_ops
from moe_ops import ops
from moe_ops.testing import assert_matches_reference

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def experts_of(tokens, x, w1, w2, weights, ids):
    """The layer for some tokens, expert by expert, in float64 and in the kernels' roundings."""
    exact, rounded = [], []
    for t in tokens:
        for dtype, into in ((torch.float64, exact), (torch.float32, rounded)):
            total = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
            for j in range(ids.shape[1]):
                e = int(ids[t, j])
                g, u = (x[t].to(dtype) @ w1[e].to(dtype).t()).chunk(2)
                h = torch.nn.functional.silu(g) * u
                if dtype == torch.float32:
                    h = h.to(BF16).float()
                y = h @ w2[e].to(dtype).t()
                if dtype == torch.float32:
                    y = y.to(BF16).float()
                total += weights[t, j].to(dtype) * y
            into.append(total)
    return torch.stack(exact), torch.stack(rounded).to(BF16)


def normal(*shape):
    out = torch.empty(shape, device="cuda", dtype=BF16)
    for part in out.flatten().split(2**28):
        part.normal_(0, shape[-1] ** -0.5)
    return out


@pytest.mark.parametrize("tokens", [5, 300])
def test_weights(tokens):
    E, H, I = 34, 8192, 4096  # noqa: E741
    w1, w2 = normal(E, 2 * I, H), normal(E, H, I)
    assert w1.numel() > 2**31
    x = torch.randn(tokens, H, device="cuda").to(BF16)
    ids = torch.randint(E - 4, E, (tokens, 2), device="cuda", dtype=torch.int32)
    ids[0] = E - 1
    weights = torch.rand(tokens, 2, device="cuda")
    out = moe_ops.fused_experts(x, w1, w2, weights, ids)
    some = [0, 1, tokens - 1]
    assert_matches_reference(out[some].contiguous(), *experts_of(some, x, w1, w2, weights, ids))


def test_routed_rows():
    T, k, E, H, I = 280_000, 8, 16, 1024, 1024  # noqa: E741
    x, w1, w2 = normal(T, H), normal(E, 2 * I, H), normal(E, H, I)
    x *= H**0.5
    assert T * k * H > 2**31 and T * k * I > 2**31
    ids = torch.rand(T, E, device="cuda").topk(k).indices.int()
    weights = torch.rand(T, k, device="cuda")
    out = moe_ops.fused_experts(x, w1, w2, weights, ids)
    some = [0, 1, T // 2, T - 2, T - 1]
    assert_matches_reference(out[some].contiguous(), *experts_of(some, x, w1, w2, weights, ids))


def test_tokens_of_every_elementwise_stage():
    T, H = 2_200_000, 1024
    x = normal(T, H)
    assert x.numel() > 2**31
    weights = torch.full((T, 1), 2.0, device="cuda")
    tail = slice(T - 3, T)
    summed = moe_ops.moe_fused_mul_sum(x[:, None], weights)
    assert torch.equal(summed[tail], 2 * x[tail])
    del summed
    half = moe_ops.apply_moe_activation("relu2", x)
    expected = moe_ops.apply_moe_activation("relu2", x[tail].contiguous())
    assert torch.equal(half[tail], expected)
    del half
    ids = torch.zeros(T, 1, dtype=torch.int32, device="cuda")
    ids[-1] = 1
    rows, _, offset, inverse, _ = moe_ops.moe_permute(x, None, ids, 2)
    assert offset.tolist() == [0, T - 1, T]
    assert torch.equal(rows[tail], x[tail])
    back = moe_ops.moe_unpermute(rows, weights, inverse, offset)
    assert torch.equal(back[tail], 2 * x[tail])


def scaled(x, w, ids):
    """The product of int8 rows and weights with scales of one."""
    scales = torch.ones(len(x), 1, device=x.device), torch.ones(w.shape[:2], device=x.device)
    sizes = (ids.shape[1], "int8_channel", BF16)
    with row_tile(16):
        plan = planned(ids, None, len(w), "int8_channel")
        return scaled_product(ops, x, scales[0], w, scales[1], None, None, [*plan], *sizes)


def integers(*shape):
    return torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)


def test_two_quantized_operands():
    """The last experts, and the last slots, give what they give alone."""
    E, N, K = 34, 16384, 8192
    w, x = integers(E, N, K), integers(5, K)
    assert w.numel() > 2**31
    ids = torch.randint(E - 4, E, (5, 2), device="cuda", dtype=torch.int32)
    assert torch.equal(scaled(x, w, ids), scaled(x, w[-4:].clone(), ids - (E - 4)))
    T, k, N, K = 280_000, 8, 1024, 128
    w, x = integers(16, N, K), integers(T, K)
    assert T * k * N > 2**31
    ids = torch.rand(T, 16, device="cuda").topk(k).indices.int()
    assert torch.equal(scaled(x, w, ids)[-3 * k :], scaled(x[-3:], w, ids[-3:]))
