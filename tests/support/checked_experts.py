"""`fused_experts`, checked against the oracle."""

import torch

import moe_ops
from moe_ops.testing import (
    Problem,
    assert_matches_reference,
    bounded_oracle,
    call,
    make_inputs,
    reference_experts,
)


def check_experts(problem: Problem, device: str, seed: int = 0) -> torch.Tensor:
    inputs = make_inputs(problem, device, seed)
    actual = call(moe_ops.fused_experts, problem, inputs)
    assert_matches_reference(
        actual.cpu(), bounded_oracle(problem, inputs), reference_experts(problem, inputs)
    )
    return actual
