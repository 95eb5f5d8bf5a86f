"""`MonolithicExperts` routes as its configuration says."""

import dataclasses

import pytest
import torch
from modular import router_logits, setup

import moe_ops
from moe_ops import RoutingMethodType as Method
from moe_ops.routing import llama4_routing, topk_softmax
from moe_ops.testing import Problem

P = Problem(num_experts=16, top_k=3)
BIAS, GROUPS = {"e_score_correction_bias": torch.linspace(0, 0.5, 16)}, (4, 2)


def scored(scoring_func, renormalize, **options):
    return lambda x, logits: moe_ops.fused_topk(
        x, logits, 3, renormalize, scoring_func=scoring_func, **options
    )


def grouped(x, logits):
    bias = BIAS["e_score_correction_bias"].to(x.device)
    return moe_ops.grouped_topk(x, logits, 3, True, *GROUPS, "sigmoid", 2.5, bias)


CASES = {
    Method.Default: (scored("softmax", False), {}),
    Method.Renormalize: (lambda x, logits: topk_softmax(x, logits, 3, True), {}),
    Method.DeepSeekV3: (
        grouped,
        BIAS | {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    Method.Llama4: (lambda x, logits: llama4_routing(x, logits, 3, False), {}),
    Method.RenormalizeNaive: (scored("softmax", True), {}),
    Method.SigmoidRenorm: (scored("sigmoid", True), {}),
    Method.MiniMax2: (scored("sigmoid", True, **BIAS), BIAS),
    Method.Sigmoid: (scored("sigmoid", False), {}),
    Method.Unspecified: (scored("sqrtsoftplus", False), {}),
    Method.DeepseekV4: (
        scored("sqrtsoftplus", True, routed_scaling_factor=1.5), {"routed_scaling_factor": 1.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", Method)
def test_every_method_is_routed_or_refused(method):
    s = setup(P, moe_ops.pipeline.MonolithicExperts)
    config = dataclasses.replace(
        s.kernel.fused_experts.moe_config,
        routing_method=method,
        scoring_func="sqrtsoftplus",  # read for Unspecified, as is the next
        renormalize=False,
        max_num_tokens=None,
    )
    kind = moe_ops.pipeline.MonolithicExperts
    supported, _ = kind.is_supported_config(kind, config, None, None, kind.activation_format())
    assert supported is (method in CASES)
    if not supported:
        return
    x, w1, w2, *_ = s.inputs
    logits = router_logits(P, "cpu")
    route, options = CASES[method]
    weights, ids = route(x, logits)
    expected = moe_ops.fused_experts(x, w1, w2, weights, ids)
    kernel = moe_ops.select_kernel(config, "unquantized", experts=kind)
    out = kernel.apply_monolithic(x, w1, w2, logits, "silu", -1, None, False, **options)
    assert torch.equal(out, expected)
