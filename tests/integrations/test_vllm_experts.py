"""The numbers of the experts that vLLM runs, on stand-ins of its classes."""

import pytest
import torch
import vllm_stand_ins as vllm
from hypothesis import given
from hypothesis import strategies as st
from table_items import every_row
from torch import nn
from vllm_layers import AG, BATCH, FP8, KEYS, SILU, expected, layer, of_engine, problem, served

from moe_ops import pack_weight
from moe_ops.ops import batched_dispatch, moe_quantize
from moe_ops.pipeline import forms
from moe_ops.scheme import get_scheme


@pytest.fixture
def engine(monkeypatch):
    return vllm.install(monkeypatch)


@pytest.mark.parametrize("name", [*KEYS, "int8_w8a16"])
@given(data=st.data())
def test_apply_is_fused_experts(name, data):
    """Bit for bit, with any expert map; written to ``output``."""
    with pytest.MonkeyPatch.context() as patch:
        engine = vllm.install(patch)
        tokens = data.draw(st.integers(1, 9), label="T")
        num_experts = data.draw(st.integers(2, 6), label="E")
        k = data.draw(st.integers(1, num_experts), label="k")
        local = data.draw(st.integers(1, num_experts), label="El")
        sizes = {"tokens": tokens, "num_experts": num_experts, "k": k}
        x, weights, ids, q1, q2, biases = problem(name, data.draw(st.integers(0, 99)), **sizes)
        held = torch.randperm(num_experts)[:local]
        expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
        expert_map[held] = torch.arange(local, dtype=torch.int32)
        q1, q2 = (_part(q, held) for q in (q1, q2))
        biases = tuple(bias[held] for bias in biases)
        config = layer(num_experts, k, local=local)
        made = engine.experts.MoeOpsExperts(config, of_engine(name, q1, q2, biases))
        out = served(made, x, q1.data, q2.data, weights, ids, expert_map)
        want = expected(
            name, x, q1.data, q2.data, weights, ids, (q1, q2), biases, expert_map=expert_map
        )
        assert torch.equal(out, want)


def _part(q, held):
    """The held experts of a weight."""
    if not isinstance(q, tuple):
        return type("Plain", (), {"data": q.data[held]})
    return type(q)(*(None if t is None else t[held] for t in q))


def test_one_scale_per_expert_for_rows_of_tokens(engine):
    """vLLM pairs per-tensor weights with rows quantized per token if batches must not matter."""
    x, weights, ids, q1, q2, biases = problem("fp8_tensor")
    config = vllm.FusedMoEQuantConfig(FP8, FP8, None, True, q1.scale, q2.scale)
    made = engine.experts.MoeOpsExperts(layer(), config)
    rows = [q._replace(scale=q.scale[:, None, None]) for q in (q1, q2)]
    want = expected("fp8_channel", x, q1.data, q2.data, weights, ids, rows, (None, None))
    assert torch.equal(served(made, x, q1.data, q2.data, weights, ids), want)


def test_scales_of_gate_and_up(engine):
    """Two scales per expert, as checkpoints have them, are one for each half of the rows."""
    x, weights, ids, q1, q2, biases = problem("fp8_tensor")
    halves = q1._replace(scale=torch.stack((q1.scale, 2 * q1.scale), 1))
    made = engine.experts.MoeOpsExperts(layer(), of_engine("fp8_tensor", halves, q2, biases))
    out = served(made, x, q1.data, q2.data, weights, ids)
    want = expected("fp8_tensor", x, q1.data, q2.data, weights, ids, (halves, q2), biases)
    assert torch.equal(out, want)


def test_router_weights_on_the_input(engine):
    """vLLM's prepare has multiplied the rows; the experts must not do it again."""
    x, weights, ids, q1, q2, _ = problem("unquantized", k=1)
    made = engine.experts.MoeOpsExperts(layer(k=1), vllm.FusedMoEQuantConfig())
    out = served(
        made, x * weights, q1.data, q2.data, weights, ids, apply_router_weight_on_input=True
    )
    want = expected("unquantized", x * weights, q1.data, q2.data, torch.ones_like(weights), ids,
                    None, (None, None))  # fmt: skip
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_block32", "int8_channel"])
def test_rows_that_were_sent_quantized(engine, name):
    """Where tokens are exchanged, vLLM quantizes before it sends."""
    x, weights, ids, q1, q2, biases = problem(name)
    config = layer(moe_parallel_config=AG)
    made = engine.experts.MoeOpsExperts(config, of_engine(name, q1, q2, biases))
    assert not made.expects_unquantized_inputs
    assert engine.experts.MoeOpsExperts(
        layer(), of_engine(name, q1, q2, biases)
    ).expects_unquantized_inputs
    rows, scale = moe_quantize(x, None, None, None, None, 4, get_scheme(name).activation.key)
    transposed = scale.t().contiguous().t()  # vLLM may store block scales by columns
    out = served(made, rows, q1.data, q2.data, weights, ids, a1q_scale=transposed)
    want = expected(name, x, q1.data, q2.data, weights, ids, (q1, q2), biases)
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["unquantized", "fp8_channel", "fp8_block32", "int8_channel"])
def test_batched(engine, name):
    x, weights, ids, q1, q2, biases = problem(name)
    room = 6
    config = layer(moe_parallel_config=BATCH)
    made = engine.experts.BatchedMoeOpsExperts(
        config, of_engine(name, q1, q2, biases), max_num_tokens=room // 2, num_dispatchers=2
    )
    quant = get_scheme(name).activation
    sent = batched_dispatch(
        x, None, None, ids, 0, 4, room, "" if quant is None else quant.key
    )  # fmt: skip
    scale = None if quant is None else sent[1]
    meta = vllm.ExpertTokensMetadata(sent[2])
    out = served(made, sent[0], q1.data, q2.data, weights, ids, a1q_scale=scale,
                 expert_tokens_meta=meta)  # fmt: skip
    assert out.shape == (4, room, x.shape[1])
    seen, total = [0] * 4, torch.zeros_like(x)
    for t, j in ((t, j) for t in range(len(x)) for j in range(2)):
        expert = int(ids[t, j])
        total[t] += weights[t, j] * out[expert, seen[expert]]
        seen[expert] += 1
    want = expected(name, x, q1.data, q2.data, weights, ids, (q1, q2), biases)
    torch.testing.assert_close(total, want)
    assert isinstance(made.finalize_weight_and_reduce_impl(), vllm.TopKWeightAndReduceDelegate)


HALVES, ALTERNATING = SILU, vllm.MoEActivation("swigluoai")
"""Activations whose gate rows come before up rows, and alternate with them."""


@every_row(
    ("width", "activation", "packed"),
    [
        (64, HALVES, ("w13", "w2")),
        (96, HALVES, ()),
        (96, ALTERNATING, ("w13",)),
    ],
)
def test_packed_weights(engine, monkeypatch, width, activation, packed):
    """On Hopper loading packs int8 rows in their own memory; the numbers stay."""
    name = "int8_w8a16"
    monkeypatch.setattr(forms, "known_arch", lambda device: 90)
    x, weights, ids, q1, q2, biases = problem(name, width=width)
    x, biases = x.bfloat16(), [b.bfloat16() for b in biases]
    config = layer(width=width, activation=activation, in_dtype=x.dtype, swiglu_limit=7.0,
                   swiglu_alpha=1.7, swiglu_beta=1.0)  # fmt: skip
    made = engine.experts.MoeOpsExperts(config, of_engine(name, q1, q2, biases))
    module, formed = nn.Module(), engine.experts.weight_of_layer
    for which, q in (("w13", q1), ("w2", q2)):
        weight = nn.Parameter(q.data.clone(), requires_grad=False)
        module.register_parameter(f"{which}_weight", weight)
    before = [x.data_ptr() for x in module.parameters()]
    call = {"x": x, "topk_weights": weights, "topk_ids": ids}
    want = served(made, w1=q1.data, w2=q2.data, **call)
    made.process_weights_after_loading(module)
    assert [x.data_ptr() for x in module.parameters()] == before
    for which, q in (("w13", q1), ("w2", q2)):
        held = pack_weight(q, name).data if which in packed else q.data
        assert torch.equal(getattr(module, f"{which}_weight"), held)
        assert torch.equal(formed(which, q, get_scheme(name), config).data, held)  # as others
    assert torch.equal(served(made, w1=module.w13_weight, w2=module.w2_weight, **call), want)


def test_other_weights_stay_as_they_are(engine):
    for name in ("unquantized", "fp8_channel"):
        *_, q1, q2, biases = problem(name)
        made = engine.experts.MoeOpsExperts(layer(), of_engine(name, q1, q2, biases))
        made.process_weights_after_loading(nn.Module())  # which has no weights to replace


def test_scales_are_shared_with_the_engine(engine):
    """vLLM rewrites scales in place when it moves experts between ranks."""
    x, weights, ids, q1, q2, biases = problem("fp8_channel")
    made = engine.experts.MoeOpsExperts(layer(), of_engine("fp8_channel", q1, q2, biases))
    before = served(made, x, q1.data, q2.data, weights, ids)
    q2.scale.mul_(2)
    assert not torch.equal(served(made, x, q1.data, q2.data, weights, ids), before)


def test_one_graph(engine):
    """A compiled call has no graph break, and writes its output."""
    x, weights, ids, q1, q2, biases = problem("fp8_channel")
    made = engine.experts.MoeOpsExperts(layer(), of_engine("fp8_channel", q1, q2, biases))

    def call(x, weights, ids):
        output = torch.empty_like(x)
        made.apply(output, x, q1.data, q2.data, weights, ids, SILU, 4, None, None, None, x, x,
                   None, False)  # fmt: skip
        return output

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weights, ids), call(x, weights, ids))


def test_unknown_configurations_raise(engine):
    with pytest.raises(NotImplementedError, match="quant_config must be"):
        engine.experts.MoeOpsExperts(layer(), vllm.FusedMoEQuantConfig("nvfp4", "nvfp4"))
