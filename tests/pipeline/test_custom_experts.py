"""A user's experts and a user's sum plug into the modular kernel; the example shows how."""

import re
import sys
from pathlib import Path

import pytest
import torch
from differentiable_layers import assert_gradients, gradients, leaves
from processes import python

import moe_ops
from moe_ops.pipeline import MoEPrepareAndFinalizeNoEP
from moe_ops.testing import (
    Problem,
    assert_matches_reference,
    bounded_oracle,
    make_inputs,
    reference_experts,
)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from custom_experts import DenseExperts, MeanOverSlots  # noqa: E402


def layer(activation="silu", **changes):
    method = moe_ops.RoutingMethodType.Default
    return moe_ops.FusedMoEConfig(
        8, 2, 64, 48, 8, activation, "cpu", method, in_dtype=torch.float32, **changes
    )


class Trainable(DenseExperts):
    """The example's experts with gradients."""

    def differentiable_apply(self, rows, w1, w2, routing, *_):
        """Autograd differentiates what `apply` does."""
        return self.apply(rows, w1, w2, *routing[:2])


UNQUANTIZED = moe_ops.FusedMoEQuantConfig("unquantized")
TRAINED = Problem(9, 8, 2, 64, 48, torch.float32)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_own_experts_are_trained(chunk_size):
    """The library sums their rows, and has the gradients of that sum."""
    inputs = leaves(make_inputs(TRAINED, "cpu", 0))
    part, experts = MoEPrepareAndFinalizeNoEP(), Trainable(layer(), UNQUANTIZED)
    kernel = moe_ops.FusedMoEKernel(part, experts, chunk_size=chunk_size)
    grad = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    found = gradients(kernel.apply(*inputs[:5]), inputs, grad)
    assert_gradients(TRAINED, inputs, found, grad)


def test_own_experts_without_gradients_are_named():
    inputs = leaves(make_inputs(TRAINED, "cpu", 0))
    kernel = moe_ops.FusedMoEKernel(MoEPrepareAndFinalizeNoEP(), DenseExperts(layer(), UNQUANTIZED))
    with pytest.raises(NotImplementedError, match="must have gradients, got DenseExperts"):
        kernel.apply(*inputs[:5]).sum().backward()


def test_the_example_runs_and_is_short():
    script = ROOT / "examples" / "custom_experts.py"
    assert len(script.read_text().splitlines()) < 65
    run = python(script.read_text())
    assert run.returncode == 0, run.stderr
    printed = re.findall(r"^(\w+): ([\d.]+)% from TritonExperts$", run.stdout, re.MULTILINE)
    assert [name for name, _ in printed] == ["TopKWeightAndReduceContiguous", "MeanOverSlots"]
    assert all(0 < float(percent) < 2 for _, percent in printed)  # bf16, rounded in other places


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("reduction", [None, MeanOverSlots()])
def test_custom_experts_compute_the_layer(reduction, chunk_size):
    problem = Problem(num_tokens=5, top_k=2)
    inputs = make_inputs(problem, "cpu", 0)
    experts = DenseExperts(layer(), moe_ops.FusedMoEQuantConfig("unquantized"))
    if reduction is not None:
        experts.reduction = reduction
        inputs = inputs._replace(topk_weights=torch.full_like(inputs.topk_weights, 0.5))
    part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
    kernel = moe_ops.FusedMoEKernel(part, experts, chunk_size=chunk_size)
    actual = kernel.apply(*inputs[:5])
    expected = reference_experts(problem, inputs)
    assert_matches_reference(actual, bounded_oracle(problem, inputs), expected)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_custom_experts_get_a_row_per_slot_with_weights_on_the_input(chunk_size):
    problem = Problem(num_tokens=5, top_k=2, on_input=True)
    inputs, part = make_inputs(problem, "cpu", 0), MoEPrepareAndFinalizeNoEP()
    experts = DenseExperts(layer(), UNQUANTIZED)
    kernel = moe_ops.FusedMoEKernel(part, experts, chunk_size=chunk_size)
    actual = kernel.apply(*inputs[:5], apply_router_weight_on_input=True)
    expected = reference_experts(problem, inputs)
    assert_matches_reference(actual, bounded_oracle(problem, inputs), expected)


def test_a_call_has_an_activation_of_its_experts():
    inputs = make_inputs(TRAINED, "cpu", 0)[:5]
    part = MoEPrepareAndFinalizeNoEP()
    mine = moe_ops.FusedMoEKernel(part, DenseExperts(layer(), UNQUANTIZED))
    with pytest.raises(ValueError, match=r"the experts support, \['silu'\], got gelu"):
        mine.apply(*inputs, activation="gelu")
    gelu = moe_ops.select_kernel(layer("gelu"), "unquantized")
    for named in ({}, {"activation": "silu"}):
        with pytest.raises(ValueError, match="activation must be gelu, as in moe_config.* silu"):
            gelu.apply(*inputs, **named)
    silu = moe_ops.select_kernel(layer(), "unquantized")
    expected = silu.apply(*inputs, activation="gelu")
    assert torch.equal(gelu.apply(*inputs, activation="gelu"), expected)


def test_experts_without_a_map_refuse_one():
    inputs = make_inputs(TRAINED, "cpu", 0)
    kernel = moe_ops.FusedMoEKernel(MoEPrepareAndFinalizeNoEP(), DenseExperts(layer(), UNQUANTIZED))
    with pytest.raises(ValueError, match="expert_map must be None unless .*and DenseExperts"):
        kernel.apply(*inputs[:5], expert_map=torch.arange(8, dtype=torch.int32).flip(0))


def test_biases_that_the_configuration_asks_for():
    inputs = make_inputs(TRAINED, "cpu", 0)[:5]
    experts = DenseExperts(layer(has_bias=True), UNQUANTIZED)
    kernel = moe_ops.FusedMoEKernel(MoEPrepareAndFinalizeNoEP(), experts)
    with pytest.raises(ValueError, match="must have w1_bias or w2_bias when moe_config.has_bias"):
        kernel.apply(*inputs)


class Returning(MoEPrepareAndFinalizeNoEP):
    """An exchange of a user's, whose ``prepare`` returns what it was given."""

    def __init__(self, change):
        self.change = change

    def prepare(self, *arguments, **named):
        """The library's result, changed."""
        return self.change(super().prepare(*arguments, **named))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (tuple, TypeError, "a PrepareResult, got tuple"),
        (lambda r: None, TypeError, "a PrepareResult, got NoneType"),
        (lambda r: r._replace(a1q=r.a1q.half()), TypeError, "torch.float32, got torch.float16"),
        (lambda r: r._replace(a1q=r.a1q[:3]), ValueError, r"got \(3, 64\)"),
        (lambda r: r._replace(a1q=r.a1q.t()), ValueError, r"got \(64, 9\)"),
        (
            lambda r: r._replace(topk_ids=torch.zeros(9, 2, dtype=torch.int16)),
            TypeError,
            "topk_ids, which must have a dtype of .*got torch.int16",
        ),
        (lambda r: r._replace(a1q=None), TypeError, "rows, which must be a Tensor, got NoneType"),
        (lambda r: r._replace(topk_ids=[[0, 1]] * 9), TypeError, "topk_ids, which .*got list"),
        (
            lambda r: r._replace(topk_ids=torch.zeros(9, dtype=torch.int32)),
            ValueError,
            r"topk_ids, which must have 2 axes, got shape \(9,\)",
        ),
        (
            lambda r: r._replace(topk_weights=torch.ones(9, 2, dtype=torch.int32)),
            TypeError,
            "topk_weights, which must have a dtype of .*got torch.int32",
        ),
        (
            lambda r: r._replace(topk_ids=torch.zeros(7, 2, dtype=torch.int32)),
            ValueError,
            r"topk_ids and topk_weights of one shape, got \(7, 2\) and \(9, 2\)",
        ),
        (
            lambda r: r._replace(topk_ids=torch.zeros(9, 2, dtype=torch.int32, device="meta")),
            ValueError,
            "topk_ids, which must be on the device of hidden_states, cpu, got meta",
        ),
        (
            lambda r: r._replace(expert_tokens_meta=torch.zeros(8, dtype=torch.int32)),
            TypeError,
            "expert_tokens_meta, which must be a ExpertTokensMetadata, got Tensor",
        ),
    ],
)
def test_what_an_own_prepare_returns_is_checked(change, error, text):
    inputs = make_inputs(TRAINED, "cpu", 0)[:5]
    experts = moe_ops.pipeline.TritonExperts(layer(), UNQUANTIZED)
    kernel = moe_ops.FusedMoEKernel(Returning(change), experts)
    with pytest.raises(error, match=f"prepare of Returning must return .*{text}"):
        kernel.apply(*inputs)
    same = moe_ops.FusedMoEKernel(Returning(lambda r: r), experts)
    kernel.prepare_finalize.change = lambda r: r._replace(a1q=r.a1q.clone())
    assert torch.equal(kernel.apply(*inputs), same.apply(*inputs))
    same.prepare_finalize.finalize = lambda *_: None
    with pytest.raises(TypeError, match="finalize of Returning must return a Tensor, got NoneT"):
        same.apply(*inputs)


@pytest.mark.parametrize("inplace", [False, True])
def test_experts_whose_rows_nobody_sums(inplace):
    """They promise sums by their reduction, and return a row per slot."""
    inputs = make_inputs(TRAINED, "cpu", 0)[:5]
    experts = DenseExperts(layer(), UNQUANTIZED)
    experts.reduction = moe_ops.pipeline.TopKWeightAndReduceNoOP()
    kernel = moe_ops.FusedMoEKernel(MoEPrepareAndFinalizeNoEP(), experts, inplace=inplace)
    text = r"row for each token, \(9, 64\), got shape \(9, 2, 64\) \(TopKWeightAndReduceNoOP of"
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        kernel.apply(*inputs)


def test_experts_whose_rows_have_another_dtype():
    class Half(DenseExperts):
        def apply(self, *arguments):
            return super().apply(*arguments).half()

    inputs = make_inputs(TRAINED, "cpu", 0)[:5]
    kernel = moe_ops.FusedMoEKernel(MoEPrepareAndFinalizeNoEP(), Half(layer(), UNQUANTIZED))
    text = r"dtype of hidden_states, torch.float32, got torch.float16 \(.*Contiguous of Half\)"
    with pytest.raises(TypeError, match=f"finalize of MoEPrepare.* must return the {text}"):
        kernel.apply(*inputs)
    with torch.autocast("cpu", torch.float16):
        assert kernel.apply(*inputs).dtype == torch.float16


def test_who_takes_adapters():
    class Adapted(Trainable):
        TAKES_LORA = True
        differentiable_apply = Trainable.differentiable_apply

    class Without(Adapted):
        TAKES_LORA = False

    class Beside(Trainable):
        TAKES_LORA = True  # its ``differentiable_apply`` is another class's

    assert Adapted.takes_lora() and not Without.takes_lora() and not Beside.takes_lora()


def test_an_asynchronous_exchange_says_what_it_runs():
    class Many(MoEPrepareAndFinalizeNoEP):
        def num_arriving(self, num_tokens):
            return 8 * num_tokens

    beside = moe_ops.pipeline.AsyncPrepareAndFinalize(Many())
    assert beside.num_arriving(4) == 32 and beside.takes_lora()
    beside.inner.takes_lora = lambda: False
    assert not beside.takes_lora()


@pytest.mark.parametrize("step", ["prepare", "finalize"])
def test_an_asynchronous_exchange_returns_what_waits(step):
    class Waits(MoEPrepareAndFinalizeNoEP):
        def supports_async(self):
            return True

        def prepare_async(self, *arguments):
            return self._started("prepare", arguments)

        def finalize_async(self, *arguments):
            return self._started("finalize", arguments)

        def _started(self, name, arguments):
            result = getattr(self, name)(*arguments)
            return result if name == step else lambda: result

    inputs = make_inputs(TRAINED, "cpu", 0)[:5]
    experts = moe_ops.pipeline.TritonExperts(layer(), UNQUANTIZED)
    kind = "PrepareResult" if step == "prepare" else "Tensor"
    with pytest.raises(TypeError, match=rf"return a receiver, or \(hook, receiver\), got {kind}"):
        moe_ops.FusedMoEKernel(Waits(), experts).apply(*inputs)


def test_workspaces_have_their_dtype():
    class Wide(DenseExperts):
        def workspace_dtype(self, act_dtype):
            return torch.float64

    found = moe_ops.explain(layer(), "unquantized", candidates=(Wide,))
    for cost in found.costs:
        assert cost.workspace_bytes == cost.num_tokens * (8 * (8 * 96 + 8 * 48) + 4 * 2 * 64)


def test_experts_are_named_as_a_class():
    with pytest.raises(TypeError, match="experts must be a class, got an instance of DenseExperts"):
        moe_ops.select_kernel(layer(), "unquantized", experts=DenseExperts(layer(), UNQUANTIZED))


def test_custom_experts_are_selected_where_they_serve():
    candidates = (DenseExperts, moe_ops.pipeline.TritonExperts)

    def choice(config, scheme="unquantized"):
        kernel = moe_ops.select_kernel(config, scheme, candidates=candidates)
        return type(kernel.fused_experts)

    assert choice(layer()) is DenseExperts
    assert choice(layer("gelu")) is moe_ops.pipeline.TritonExperts
    assert choice(layer(), "fp8_channel") is moe_ops.pipeline.TritonExperts, (
        "a scheme must be declared"
    )
    split = moe_ops.FusedMoEParallelConfig(ep_size=2, use_ep=True)
    assert choice(layer(moe_parallel_config=split)) is moe_ops.pipeline.TritonExperts


def test_explained_without_tiles():
    """Whose GEMMs are not the library's, but whose memory is declared."""
    found = moe_ops.explain(layer(), "unquantized", device="sm_90", candidates=(DenseExperts,))
    assert found.choice == "DenseExperts"
    for cost in found.costs:
        assert cost.gemm1 is cost.gemm2 is None
        assert cost.workspace_bytes == 4 * cost.num_tokens * (8 * 96 + 8 * 48 + 2 * 64)
    assert "tiles:" not in str(found)
