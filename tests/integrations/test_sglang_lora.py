"""LoRA on experts in SGLang's plug-in, on stand-ins of SGLang's classes."""

import dataclasses
import logging

import pytest
import sglang_stand_ins as sglang
import torch
from hypothesis import given
from hypothesis import strategies as st
from merged_adapters import R, assert_merged, factors
from sglang_layers import problem

from moe_ops import dequantize_weight
from moe_ops.integrations import _engines
from moe_ops.integrations.sglang import register
from moe_ops.pipeline.adapters import Adapters, LowRank
from moe_ops.testing import Inputs, Problem

E, H, I = 4, 64, 64  # noqa: E741
RANK = R + 2


@pytest.fixture
def engine(monkeypatch):
    return sglang.install(monkeypatch)


def run(engine, dispatched, info, lora, backend="triton", **config):
    """Run a layer with LoRA through SGLang's runner, after it has loaded the plug-in."""
    if not engine.hooks.hooks:
        register()
        engine.hooks.apply_hooks()
    runner = engine.runners(backend, sglang.MoeRunnerConfig(inplace=False, **config), True)
    return runner.run(dispatched, info, lora_info=lora).hidden_states


def lora_info(ids, shared=False, gated=True, **changes):
    """Three places, the last of which is empty; adapters have a smaller rank than the buffers."""
    common, n = 1 if shared else E, (1 + gated) * I
    buffers = [
        torch.zeros(3, *shape)
        for shape in (
            (common, (1 + gated) * RANK, H), (E, n, RANK), (E, RANK, I), (common, H, RANK),
        )
    ]  # fmt: skip
    layout = "apart and shared" if shared else "apart"
    its = factors(E, H, I, "silu" if gated else "relu2_no_mul", layout)
    for place in (0, 1):
        for i, low in enumerate(its.first):
            buffers[0][place, :, i * RANK : i * RANK + R] = low.a[place]
            buffers[1][place, :, i * I : (i + 1) * I, :R] = low.b[place]
        buffers[2][place, :, :R] = its.second.a[place]
        buffers[3][place, :, :, :R] = its.second.b[place]
    numbers = torch.zeros(3, dtype=torch.int32)
    given = dict(
        zip(sglang.LoRAInfo.__dataclass_fields__, [*buffers, *[numbers] * 4, ids], strict=False)
    )
    return sglang.LoRAInfo(**{**given, "max_lora_rank": RANK, "num_experts": E, **changes})


def adapters_of(info, ids):
    """What the buffers hold, for the oracle."""
    a, b = info.gate_up_lora_a_weights, info.gate_up_lora_b_weights
    first = [LowRank(a, b)]
    if a.shape[2] > RANK:
        first = [
            LowRank(a[:, :, i * RANK : (i + 1) * RANK], b[:, :, rows], rows)
            for i, rows in enumerate((slice(None, I), slice(I, None)))
        ]
    return Adapters(tuple(first), LowRank(info.down_lora_a_weights, info.down_lora_b_weights), ids)


@given(
    tokens=st.integers(1, 9),
    gated=st.booleans(),
    shared=st.booleans(),
    scheme=st.sampled_from(("unquantized", "int8_w8a16_g32")),
    factor=st.sampled_from((None, 2.5)),
)
def test_each_token_has_its_adapter(tokens, gated, shared, scheme, factor):
    """The weights with a token's adapter merged into them; ids behind a batch are padding's."""
    with pytest.MonkeyPatch.context() as patch:
        engine = sglang.install(patch)
        dispatched, info, q = problem(scheme, tokens=tokens, gated=gated)
        ids = torch.tensor([1, -1, 0, 1, 2, 0, -1, 0, 0, 1, 1], dtype=torch.int32)
        lora = lora_info(ids, shared, gated)
        kind = "silu" if gated else "relu2"
        out = run(engine, dispatched, info, lora, activation=kind, is_gated=gated,
                  routed_scaling_factor=factor)  # fmt: skip
        w1, w2 = (
            (info.w13_weight, info.w2_weight) if q is None
            else (dequantize_weight(x, scheme) for x in q)
        )  # fmt: skip
        x, (weights, topk_ids, _) = dispatched.hidden_states, dispatched.topk_output
        weights = weights * (factor or 1)
        inputs = Inputs(x, w1, w2, weights, topk_ids, None, info.b13, info.b2)
        name = "silu" if gated else "relu2_no_mul"
        described = Problem(tokens, E, 2, H, I, torch.float32, name, has_bias=True)
        held = adapters_of(lora, ids[:tokens])
        assert_merged(out, described, inputs, held, torch.float32)


def test_steps_without_adapters(engine):
    """SGLang says that a step has none: the layer runs as without LoRA, unless it is captured."""
    dispatched, info, _ = problem("unquantized")
    ids = torch.zeros(5, dtype=torch.int32)
    plain = run(engine, dispatched, info, lora_info(ids, has_active_lora=False))
    with_them = run(engine, dispatched, info, lora_info(ids))
    assert not torch.equal(plain, with_them)
    engine.mode.captured = True
    captured = run(engine, dispatched, info, lora_info(ids, has_active_lora=False))
    assert torch.equal(captured, with_them)
    nothing = run(engine, dispatched, info, lora_info(ids, max_lora_rank=0))
    assert torch.equal(nothing, plain)


def test_interleaved_rows_have_one_pair(engine):
    """gpt-oss: one A for gate and up, and B in the order of the weight's rows."""
    dispatched, info, _ = problem("unquantized", biases=False)
    ids = torch.tensor([0, 1, -1, 1, 0], dtype=torch.int32)
    lora = lora_info(ids)
    lora.gate_up_lora_a_weights = lora.gate_up_lora_a_weights[:, :, :RANK].contiguous()
    out = run(engine, dispatched, info, lora, gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    x, (weights, topk_ids, _) = dispatched.hidden_states, dispatched.topk_output
    inputs = Inputs(x, info.w13_weight, info.w2_weight, weights, topk_ids, None, None, None)
    described = Problem(5, E, 2, H, I, torch.float32, "swigluoai")
    assert_merged(out, described, inputs, adapters_of(lora, ids), torch.float32)


@dataclasses.dataclass
class Newer(sglang.LoRAInfo):
    more: int = 0


def declined():
    """Changes of a call, with the line that the log gets."""
    ids = torch.zeros(5, dtype=torch.int32)
    fine = lora_info(ids)
    half = fine.down_lora_a_weights[:, :2]
    given = {f.name: getattr(fine, f.name) for f in dataclasses.fields(fine)}
    return (
        (Newer(**given), {}, "LoRAInfo of another version"),
        (fine, {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0}, "beside alternating rows"),
        (fine, {"apply_router_weight_on_input": True}, "weights on the input with adapters"),
        (lora_info(ids[:3]), {}, "3 ids and factors in torch.float32 for 5 tokens"),
        (lora_info(ids, down_lora_a_weights=half), {}, "second.a must be"),
        (lora_info(ids, down_lora_b_weights=fine.down_lora_b_weights.half()), {}, "second.b must"),
        (lora_info(ids, gate_up_lora_a_weights=fine.gate_up_lora_a_weights.half()), {},
         "factors in torch.float16 for 5 tokens in torch.float32"),
    )  # fmt: skip


def test_what_is_declined(engine, caplog):
    """SGLang's own kernels then run, and one line says why."""
    caplog.set_level(logging.INFO, logger="sglang.moe_ops")
    for lora, config, reason in declined():
        _engines.say_once.cache_clear()
        caplog.clear()
        dispatched, info, _ = problem("unquantized", biases=False)
        for _ in range(2):
            assert run(engine, dispatched, info, lora, **config) == "SGLang's"
        assert [reason in record.message for record in caplog.records] == [True]


def test_other_runners_and_calls_without_lora(engine, caplog):
    caplog.set_level(logging.INFO, logger="sglang.moe_ops")
    dispatched, info, _ = problem("unquantized")
    lora = lora_info(torch.zeros(5, dtype=torch.int32))
    assert run(engine, dispatched, info, lora, "marlin") == "SGLang's"
    assert run(engine, dispatched, info, None) == "SGLang's"
    assert run(engine, [*dispatched], info, lora) == "SGLang's"
    assert not caplog.records
