"""Products of bf16 rows by oneDNN, beside the reference.

The reference runs in batch-invariant mode, in which each row is multiplied by itself, in float32.
"""

import pytest
import torch
from gemm_rows import activated, compare, exact_rows
from hypothesis import given
from hypothesis import strategies as st
from plans import planned
from products import plain_product

import moe_ops
from moe_ops.reference import expert_product as reference
from moe_ops.reference import onednn
from moe_ops.testing import Problem, call, make_inputs, quantize_inputs

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not onednn.multiplies(torch.empty(1, dtype=BF16), False), reason="no bf16 of oneDNN"
)


@given(
    tokens=st.sampled_from((0, 1, 5, 40)),
    k=st.integers(1, 3),
    n=st.sampled_from((8, 48, 130)),
    kk=st.sampled_from((1, 16, 130, 704)),
    activation=st.sampled_from(("", "silu", "relu2_no_mul")),
    has_bias=st.booleans(),
    weighted=st.booleans(),
    turned=st.booleans(),
    routing=st.sampled_from(("uniform", "skewed", "holes")),
)
def test_beside_the_reference(tokens, k, n, kk, activation, has_bias, weighted, turned, routing):
    """Both are within the bounds of exact numbers; a second call has the same bits."""
    problem = Problem(tokens, 5, k, kk, n, BF16, "silu_no_mul", has_bias, routing=routing)
    x, w, _, weights, ids, _, bias, _ = make_inputs(problem)
    w = w.mT.contiguous().mT if turned else w
    weights = weights if weighted else None

    def run(invariant):
        tiles = planned(ids, None, 5, batch_invariant=invariant)
        return plain_product(reference, x, w, bias, weights, tiles, k, activation, False, invariant)

    exact = exact_rows(x, w, bias, weights, ids, k)
    exact = activated(exact, activation) if activation else exact
    actual = run(False)
    compare(actual, exact, run(True), ids, 5)
    assert actual.dtype == BF16 and torch.equal(actual, run(False))


def test_what_it_multiplies(monkeypatch):
    """Rows of bf16 that are not quantized, if nothing follows, and not in batch-invariant mode."""
    products = []

    def product_of(*args):
        products.append(args[4])
        return reference_product(*args)

    reference_product = reference.product_of
    monkeypatch.setattr(reference, "product_of", product_of)
    for dtype, scheme, invariant in (
        (BF16, "unquantized", False),
        (BF16, "unquantized", True),
        (BF16, "int8_w8a16", False),
        (torch.float16, "unquantized", False),
        (torch.float32, "unquantized", False),
    ):
        problem = Problem(4, 5, 2, 16, 8, dtype, scheme=scheme)
        inputs, config, _ = quantize_inputs(problem, make_inputs(problem))
        call(moe_ops.fused_experts, problem, inputs, quant_config=config, batch_invariant=invariant)
    assert products == [torch.float32, BF16, *[torch.float32] * 8]  # the first call's second GEMM
