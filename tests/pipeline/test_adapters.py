"""Adapters as serving engines stack them, beside both GEMMs of a call without gradients."""

import pytest
import torch
from conftest import INTERPRETED
from differentiable_layers import in_dtype, layer
from hypothesis import given
from hypothesis import strategies as st
from merged_adapters import (
    LAYOUTS,
    L,
    R,
    assert_merged,
    converted,
    exact_layer,
    factors,
    pairs_of,
)
from modular import setup
from strategies import DTYPES

import moe_ops
from moe_ops.pipeline import BatchedTritonExperts, GroupedGemmExperts, TritonExperts
from moe_ops.pipeline.adapters import Adapters
from moe_ops.pipeline.forward import forward
from moe_ops.tensors import Routing
from moe_ops.testing import Problem, call
from moe_ops.training import ExpertLora

E, H, I = 4, 32, 48  # noqa: E741


def lora_ids_of(tokens, device="cpu", dtype=torch.int64):
    """Every adapter, none, and numbers of no adapter: the first tokens' differ."""
    numbers = torch.tensor([2, -1, 0, 1, L, 2**31 - 1], device=device, dtype=dtype)
    return numbers.repeat(tokens // len(numbers) + 1)[:tokens]


def run(s, adapters, out=None, **changes):
    """Run the experts of a `Setup`, without its prepare and finalize."""
    given = s.arguments(**changes)
    weights = given["w1"], given["w2"], given["activation"]
    step = s.kernel.fused_experts.step(*weights, given["apply_router_weight_on_input"])
    routing = Routing(given["topk_weights"], given["topk_ids"], given["expert_map"])
    x = given["hidden_states"]
    return forward(adapters.beside(step, x, routing), x, routing, out=out)


@pytest.mark.kernel
@given(
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(("silu", "swigluoai", "gelu_no_mul")),
    layout=st.sampled_from(LAYOUTS),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    tokens=st.sampled_from((1, 7) if INTERPRETED else (1, 7, 40)),
    scheme=st.sampled_from(("unquantized", "int8_w8a16")),
)
def test_adapters_in_the_weights(dtype, activation, layout, flags, tokens, scheme, device):
    """Tokens get what a layer computes whose weights contain their adapter."""
    has_bias, on_input, mapped = flags
    problem = Problem(
        tokens, E, 2, H, I, dtype, activation=activation, has_bias=has_bias, on_input=on_input,
        num_local_experts=3 if mapped else None, routing="holes" if tokens > 1 else "uniform",
        scheme=scheme,
    )  # fmt: skip
    s = setup(problem, TritonExperts, device)
    adapters = converted(factors(len(s.inputs.w1), H, I, activation, layout), device, dtype)
    adapters = adapters._replace(lora_ids=lora_ids_of(tokens, device))
    adapters.check(len(s.inputs.w1), s.exact.w1.shape[1], H, I)
    out = torch.empty_like(s.inputs.hidden_states)
    assert run(s, adapters, out=out) is out
    assert_merged(out, problem, s.exact, adapters, dtype)


@pytest.mark.parametrize("ids", ["each token", "one"])
@pytest.mark.parametrize("scheme", ["unquantized", "int8_w8a16", "fp8_channel", "fp8_tensor"])
def test_bits_of_expert_lora(scheme, ids, device):
    """One pair of factors for each expert: the forward pass of training, bit for bit."""
    problem = Problem(9, E, 2, H, I, torch.bfloat16, scheme=scheme, routing="holes")
    s = setup(problem, TritonExperts, device)
    adapters = converted(factors(E, H, I), device, torch.bfloat16)
    if ids == "each token":
        adapters = adapters._replace(lora_ids=lora_ids_of(9, device))
    w1, w2 = tuple(adapters.first[0][:2]), tuple(adapters.second[:2])
    lora = ExpertLora(w1, w2, adapters.lora_ids)
    near = call(moe_ops.fused_experts, problem, s.inputs, quant_config=s.config, lora=lora)
    assert torch.equal(run(s, adapters), near)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_without_an_adapter(layout, device):
    """They have the bits that they have beside factors of zeros, whatever else is in the batch."""
    problem = Problem(8, E, 2, H, I, torch.bfloat16)
    s = setup(problem, TritonExperts, device)
    adapters = converted(factors(E, H, I, "silu", layout), device, torch.bfloat16)
    zeros = [low._replace(b=low.b * 0) for low in (*adapters.first, adapters.second)]
    zeros = Adapters(tuple(zeros[:-1]), zeros[-1])
    ids = torch.tensor([0, -1, 1, -7, 2, L, 0, 99], device=device)
    mixed = run(s, adapters._replace(lora_ids=ids))
    plain = run(s, zeros._replace(lora_ids=ids))
    none = (ids < 0) | (ids >= L)
    assert torch.equal(mixed[none], plain[none])
    assert (mixed[~none] != plain[~none]).any(1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_invariant(layout, device):
    """A token's bits depend on its own adapter alone."""
    problem = Problem(40, E, 2, 128, I, torch.float32)
    s = setup(problem, TritonExperts, device)
    config = s.kernel.fused_experts.moe_config
    object.__setattr__(config, "batch_invariant", True)
    adapters = converted(factors(E, 128, I, "silu", layout), device, torch.float32)
    ids = lora_ids_of(40, device)
    whole = run(s, adapters._replace(lora_ids=ids))
    x, _, _, weights, topk_ids, *_ = s.inputs
    for t in range(0, 40, 5):
        alone = run(
            s, adapters._replace(lora_ids=ids[t : t + 1]), hidden_states=x[t : t + 1],
            topk_weights=weights[t : t + 1], topk_ids=topk_ids[t : t + 1],
        )  # fmt: skip
        assert torch.equal(alone[0], whole[t])


def test_no_factor_is_copied(device):
    """What a step allocates does not grow with the number of adapters."""
    adapters = converted(factors(E, H, I, "silu", "apart and shared"), device, torch.float32)
    s = setup(Problem(3, E, 2, H, I, torch.float32), TritonExperts, device)
    arguments = adapters._replace(lora_ids=lora_ids_of(3, device))
    step = s.kernel.fused_experts.step(*s.inputs[1:3], "silu", on_input=False)
    routing = Routing(s.inputs.topk_weights, s.inputs.topk_ids)
    between = arguments.beside(step, s.inputs.hidden_states, routing).between
    made = [*between.first, between.second]
    for low, product in zip((*adapters.first, adapters.second), made, strict=True):
        assert (product.a.data_ptr(), product.b.data_ptr()) == (low.a.data_ptr(), low.b.data_ptr())


def test_one_graph(device):
    """One graph for any number of tokens, with ids in a buffer that is longer than a batch."""
    torch._dynamo.reset()
    problem = Problem(4, E, 2, H, I, torch.float32, activation="swigluoai")
    s = setup(problem, TritonExperts, device)
    adapters = converted(factors(E, H, I, "swigluoai", "apart"), device, torch.float32)
    buffer = lora_ids_of(128, device)

    def step(x, weights, ids):
        given = adapters._replace(lora_ids=buffer[: x.shape[0]])
        return run(s, given, hidden_states=x, topk_weights=weights, topk_ids=ids)

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        for number, tokens in enumerate((7, 5, 100)):
            its = setup(problem.with_(num_tokens=tokens), TritonExperts, device).inputs
            given = (its.hidden_states, its.topk_weights, its.topk_ids)
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                assert torch.equal(compiled(*given), step(*given))
            buffer.copy_(buffer.flip(0))


def test_what_is_refused(device):
    good = converted(factors(E, H, I, "silu", "apart"), device, torch.float32)
    gate, up = good.first

    def refused(text, kind=ValueError, **changes):
        with pytest.raises(kind, match=text):
            good._replace(**changes).check(E, 2 * I, H, I)

    refused(r"first.a must be \(3, 4, 4, 32\) or \(3, 1, 4, 32\), got shape \(3, 2", first=(
        gate._replace(a=gate.a[:, :2]), up))  # fmt: skip
    refused("second.b must be", second=good.second._replace(b=good.second.b[:, :, :3]))
    refused("first.b must be", first=(gate._replace(rows=slice(None)), up))
    refused("first's L must be L of second = 3", first=tuple(
        low._replace(a=low.a[:2], b=low.b[:2]) for low in (gate, up)))  # fmt: skip
    refused("first.b must have the dtype of a", TypeError, first=(gate._replace(b=gate.b.half()),))
    refused("second.a must be", TypeError, second=good.second._replace(a=None))
    many = torch.zeros(1, 1, R, I, device=device).expand(4097, -1, -1, -1)
    with pytest.raises(ValueError, match="second's L . El must be"):
        Adapters((), good.second._replace(a=many, b=many.mT)).check(1, 2 * I, H, I)
    for kind in (GroupedGemmExperts, BatchedTritonExperts):
        other = setup(Problem(4, E, 2, H, I, torch.float32), kind, device)
        with pytest.raises(NotImplementedError, match="rows in slot order"):
            run(other, good)


def test_the_oracle_is_of_two_minds():
    """Merged weights and low-rank pairs agree in float64; they are not the layer without."""
    problem = Problem(7, E, 2, H, I, torch.float32, activation="swigluoai")
    exact = in_dtype(setup(problem, TritonExperts).exact, torch.float64)
    adapters = converted(factors(E, H, I, "swigluoai", "apart and shared"), "cpu", torch.float64)
    adapters = adapters._replace(lora_ids=lora_ids_of(7))
    first, pairs = exact_layer(problem, exact, adapters), pairs_of(adapters, E, 2 * I)
    second = layer(problem, exact, torch.float64, None, (pairs, adapters.lora_ids))
    torch.testing.assert_close(first, second)
    assert not torch.allclose(first, layer(problem, exact, torch.float64), rtol=0.01)
