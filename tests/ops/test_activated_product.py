"""The first GEMM of a forward pass that is followed by a backward pass: two results of one sum."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from pairwise import cover
from table_items import every_row

from moe_ops import ops, quantize_weight
from moe_ops.scheme import SCHEMES
from moe_ops.tensors import Tiles
from moe_ops.testing import Problem, make_inputs

FACTORS = {
    "scheme": [*SCHEMES],
    "tokens": (1, 40) if not HAS_CUDA else (1, 16, 150, 2000),
    "activation": ("silu", "swigluoai", "relu2_no_mul"),
    "has_bias": (False, True),
    "weighted": (False, True),
    "expert_order": (False, True),
    "holes": (False, True),
}
RULES = [
    (
        ("scheme", "weighted"),
        lambda scheme, weighted: not weighted or SCHEMES[scheme].activation is None,
    ),
    (("scheme", "expert_order"), lambda scheme, order: not order or scheme == "unquantized"),
]
SIZES = (64, 48) if INTERPRETED else (512, 384) if HAS_CUDA else (160, 136)


@pytest.mark.kernel
@every_row("case", cover(FACTORS, RULES)[:: 2 if INTERPRETED else 1])
def test_both_results(case, device):
    """The activated rows have the bits of `expert_product`; the product is near that without f."""
    scheme, tokens, activation = (case[name] for name in ("scheme", "tokens", "activation"))
    problem = Problem(
        tokens, 8, 2, *SIZES, torch.bfloat16, activation=activation, has_bias=case["has_bias"],
        routing="holes" if case["holes"] else "uniform",
    )  # fmt: skip
    x, w, _, weights, ids, expert_map, bias, _ = make_inputs(problem, device)
    quantized = [w, bias]
    if scheme != "unquantized":
        q = quantize_weight(w, scheme)
        quantized = [q.data, bias, q.scale, q.zero_point, q.global_scale]
    quant = SCHEMES[scheme].activation
    static = None
    if quant is not None and (quant.static or quant.global_scale):
        static = x.new_full((1,), 0.02, dtype=torch.float32)
    rows = (x, static)
    if quant is not None and SCHEMES[scheme].dequantizes_both:
        rows = ops.moe_quantize(x, static, None, ids, expert_map, len(w), quant.key)
    plan = ops.plan_slots(ids, expert_map, len(w), scheme, torch.bfloat16)
    tiles = [*Tiles(plan, ids, expert_map)]
    weights = weights if case["weighted"] else None
    call = (*rows, quantized, weights, tiles, 2, scheme, torch.bfloat16)
    h, product = ops.activated_product(*call, activation, case["expert_order"])
    expected = ops.expert_product(*call, activation, case["expert_order"])
    mine = _real(ids, len(w))
    used = slice(int(mine.sum())) if case["expert_order"] and tokens > 1 else mine
    assert torch.equal(h[used], expected[used])
    near = ops.expert_product(*call)
    torch.testing.assert_close(product[mine], near[mine], rtol=2**-7, atol=2**-7)
    if not HAS_CUDA:
        assert torch.equal(product[mine], near[mine])


def _real(ids, num_experts):
    return ((ids >= 0) & (ids < num_experts)).flatten()
