"""Experts whose gate is a Python function, with the gates that the library has itself."""

import pytest
import torch

import moe_ops
from moe_ops.pipeline.gated_experts import gated_experts
from moe_ops.testing import (
    Problem,
    Roundings,
    assert_layer_matches,
    make_inputs,
    oracle,
    quantize_inputs,
    reference_experts,
)

SIZES = (9, 6, 3, 64, 40, torch.bfloat16)


def run(problem, device, gate=None, **changes):
    """The layer by its gate, or by another one; and the problem as it is stored."""
    stored = quantize_inputs(problem, make_inputs(problem, device))
    x, w1, w2, weights, ids, expert_map, *_ = stored.inputs
    gated = moe_ops.MoEActivation.from_str(problem.activation).is_gated
    if gate is None:

        def gate(rows):
            return moe_ops.apply_moe_activation(problem.activation, rows)

    out = gated_experts(
        x, w1, w2, weights, ids, gate, is_gated=gated, expert_map=expert_map,
        quant_config=stored.config, **changes,
    )  # fmt: skip
    return out, stored


@pytest.mark.kernel
@pytest.mark.parametrize("activation", ["silu", "gelu_no_mul"])
@pytest.mark.parametrize("scheme", ["unquantized", "fp8_tensor_static", "int8_channel"])
def test_gates_of_the_library(scheme, activation, device):
    """With one half of the rows or two, scales of both GEMMs' rows, and experts elsewhere."""
    problem = Problem(*SIZES, activation, has_bias=True, num_local_experts=4, scheme=scheme)
    actual, stored = run(problem, device)
    roundings = Roundings(before_activation=True)
    expected = reference_experts(problem, stored.inputs, stored.config, roundings)
    assert_layer_matches(actual.cpu(), oracle(problem, stored.exact), expected.cpu())


def test_static_scales_are_each_gemms_own(device):
    """The second GEMM's rows are divided by their own scale: a thousandth of the first one's."""
    problem = Problem(*SIZES, "relu2_no_mul", scheme="fp8_tensor_static")
    small, stored = run(problem, device, lambda rows: 1e-3 * rows.abs())
    given = dict(zip(moe_ops.scheme.TENSORS, stored.config.tensors, strict=True))
    given["a2_scale"] = 1e-3 * stored.config.a1_scale
    x, w1, w2, weights, ids, *_ = stored.inputs
    config = moe_ops.FusedMoEQuantConfig("fp8_tensor_static", **given)
    fine = gated_experts(
        x, w1, w2, weights, ids, lambda rows: 1e-3 * rows.abs(), is_gated=False, quant_config=config
    )
    assert not torch.equal(small, fine)


def test_a_gate_of_another_width(device):
    problem = Problem(*SIZES, "silu_no_mul")
    for gate in (lambda rows: rows[:, :20], lambda rows: rows.repeat(1, 2)):
        with pytest.raises(ValueError, match=r"gate\(rows\).shape\[1\] must be the columns of w2"):
            run(problem, device, gate)
    with pytest.raises(ValueError, match=r"gate\(rows\) must have 2 axes"):
        run(problem, device, lambda rows: rows[0])
