"""LoRA on experts in SGLang's plug-in, on stand-ins of SGLang's classes."""

import dataclasses
import logging

import pytest
import sglang_stand_ins as sglang
import torch
from adapter_cases import CASES, E, H, I
from merged_adapters import R, factors
from sglang_layers import problem
from table_items import every_row

from moe_ops import dequantize_weight
from moe_ops.activation import MoEActivation
from moe_ops.integrations import _engines
from moe_ops.integrations.sglang import register
from moe_ops.pipeline.adapters import Adapters, LowRank
from moe_ops.testing import Inputs

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


def lora_info(ids, activation="silu", layout="apart", **changes):
    """Three places, the last of which is empty; adapters have a smaller rank than the buffers."""
    its, kind = factors(E, H, I, activation, layout), MoEActivation.from_str(activation)
    common, n = 1 if "shared" in layout else E, (1 + kind.is_gated) * I
    buffers = [
        torch.zeros(3, *shape)
        for shape in (
            (common, len(its.first) * RANK, H), (E, n, RANK), (E, RANK, I), (common, H, RANK),
        )
    ]  # fmt: skip
    for place in (0, 1):
        for i, low in enumerate(its.first):
            buffers[0][place, :, i * RANK : i * RANK + R] = low.a[place]
            buffers[1][place, :, low.rows, :R] = low.b[place]
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


@every_row("factor", [None, 2.5])
@every_row("case", [x for x in CASES if not (x.kind.is_interleaved and "apart" in x.layout)])
def test_each_token_has_its_adapter(engine, case, factor):
    """Ids behind a batch are padding's. gpt-oss has one pair of factors, in its order of rows."""
    scheme = "int8_w8a16_g32" if case.quantized else "unquantized"
    dispatched, info, q = problem(scheme, tokens=case.tokens, gated=case.kind.is_gated)
    numbers = {"activation": case.activation.removesuffix("_no_mul")}
    if case.kind.is_interleaved:
        numbers = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}

    def lora(ids):
        ids = torch.cat([ids, torch.tensor([0, 1])]).int()
        return lora_info(ids, case.activation, case.layout)

    def step(ids):
        return run(engine, dispatched, info, lora(ids), is_gated=case.kind.is_gated,
                   routed_scaling_factor=factor, **numbers)  # fmt: skip

    w1, w2 = info.w13_weight, info.w2_weight
    if q is not None:
        w1, w2 = (dequantize_weight(x, scheme) for x in q)
    x, (weights, topk_ids, _) = dispatched.hidden_states, dispatched.topk_output
    weights = weights * (factor or 1)
    inputs = Inputs(x, w1, w2, weights, topk_ids, None, info.b13, info.b2)
    case.assert_served(inputs, step, lambda ids: adapters_of(lora(ids), ids))


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
