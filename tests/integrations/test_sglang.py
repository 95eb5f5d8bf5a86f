"""The plug-in of SGLang on stand-ins of SGLang's classes."""

import logging
import sys

import pytest
import sglang_stand_ins as sglang
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_layers import FLAGS, STATIC, problem
from torch.nn import functional

from moe_ops import FusedMoEQuantConfig, fused_experts
from moe_ops.integrations import _engines
from moe_ops.integrations.sglang import register
from moe_ops.scheme import dequantize_weight, get_scheme

PLACE = ("none", "triton")


@pytest.fixture
def engine(monkeypatch):
    _engines.say_once.cache_clear()
    monkeypatch.delenv("MOE_OPS_SGLANG", raising=False)
    return sglang.install(monkeypatch)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="sglang.moe_ops")
    return caplog


def registered(engine):
    """SGLang's choice of a fused function after it has loaded the plug-in."""
    register()
    engine.hooks.apply_hooks()
    return engine.pool.get_fused_func(*PLACE)


def expected(name, dispatched, info, q, **more):
    x, (weights, ids, _) = dispatched.hidden_states, dispatched.topk_output
    config = None
    if q is not None:
        config = FusedMoEQuantConfig.from_weights(name, *q, **(STATIC if "static" in name else {}))
    return fused_experts(
        x, info.w13_weight, info.w2_weight, weights, ids, quant_config=config, w1_bias=info.b13,
        w2_bias=info.b2, **more,
    )  # fmt: skip


def test_without_sglang_nothing_happens(log, monkeypatch):
    _engines.say_once.cache_clear()
    monkeypatch.setitem(sys.modules, "sglang", None)
    register()
    assert len(log.records) == 1 and "0.5.23" in log.text


@pytest.mark.parametrize("failure", [TypeError("no"), SystemExit("no"), OSError("no")])
def test_what_fails_is_one_line(engine, log, monkeypatch, failure):
    """SGLang goes on with its own kernels, and its log says why."""

    def fail():
        raise failure

    runner = sys.modules["moe_ops.integrations.sglang._runner"]
    monkeypatch.setattr(runner, "install", fail)
    register()
    assert [f"kernels run: {type(failure).__name__}: no" in r.message for r in log.records] == [
        True
    ]


def test_registered_once(engine, log):
    register()
    function = registered(engine)
    assert function.__wrapped__ is sglang.fused_experts_none_to_triton
    assert len(engine.hooks.hooks) == 7 and list(engine.factories) == ["moe_ops"]
    for other in (("deepep", "triton"), ("none", "marlin")):
        assert engine.pool.get_fused_func(*other) is sglang.fused_experts_none_to_triton
    assert engine.pool.get_fused_func("none", "unknown") is None
    assert engine.pool.get_fused_func(*PLACE) is function and not log.records


def test_switched_off(engine, monkeypatch):
    monkeypatch.setenv("MOE_OPS_SGLANG", "0")
    assert registered(engine) is sglang.fused_experts_none_to_triton


def interface():
    from moe_ops.integrations.sglang._interface import NAMES, PARTS

    names = [(module, name) for module, known in NAMES.items() for name in known]
    return [*names, *PARTS]


@pytest.mark.parametrize(("module", "name"), interface())
def test_another_interface(engine, log, monkeypatch, module, name):
    """Whatever is missing: one line that names it, and nothing is changed."""
    owner = engine.modules[module]
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if last == "AROUND":
        monkeypatch.setattr(engine.modules[module], "HookType", object)
    else:
        monkeypatch.delattr(owner, last)
    register()
    (record,) = log.records
    assert f"{module}.{name}" in record.message
    assert not engine.hooks.hooks and not engine.factories


def test_a_new_field_is_another_interface(engine, log, monkeypatch):
    """A field that the plug-in does not read could change what a layer computes."""

    @sglang.dataclass
    class Info(sglang.TritonMoeQuantInfo):
        use_nvfp4: bool = False

    triton = engine.modules[f"{sglang.RUNNERS}.triton"]
    monkeypatch.setattr(triton, "TritonMoeQuantInfo", Info)
    assert registered(engine) is sglang.fused_experts_none_to_triton
    assert "TritonMoeQuantInfo" in log.text


@pytest.mark.parametrize("name", FLAGS)
@given(data=st.data())
def test_layers_are_fused_experts(name, data):
    """Bit for bit; ids of -1, as SGLang marks other ranks' experts, are skipped."""
    with pytest.MonkeyPatch.context() as patch:
        engine = sglang.install(patch)
        function = registered(engine)
        num_experts = data.draw(st.integers(1, 5), label="E")
        sizes = {"tokens": data.draw(st.integers(1, 9), label="T"), "num_experts": num_experts}
        sizes["k"] = data.draw(st.integers(1, num_experts), label="k")
        biases, inplace = data.draw(st.booleans()), data.draw(st.booleans(), label="inplace")
        dispatched, info, q = problem(name, data.draw(st.integers(0, 99)), biases=biases, **sizes)
        ids = dispatched.topk_output.topk_ids
        ids[torch.rand(ids.shape) < 0.2] = -1
        want = expected(name, dispatched, info, q)
        config = sglang.MoeRunnerConfig(num_experts=8, inplace=inplace)
        out = function(dispatched, info, config).hidden_states
        assert torch.equal(out, want)
        assert (out is dispatched.hidden_states) == inplace


def test_the_log_says_what_runs(engine, log):
    """One line for each kind of layer, as vLLM's log has it."""
    function, config = registered(engine), sglang.MoeRunnerConfig(inplace=False)
    for name in ("unquantized", "fp8_channel", "unquantized"):
        dispatched, info, _ = problem(name)
        function(dispatched, info, config)
    said = [record.getMessage() for record in log.records]
    kinds = ("unquantized, silu", "fp8_channel, silu")
    assert said == [f"moe_ops: runs the experts: {kind}" for kind in kinds]


@pytest.mark.parametrize("name", ["int4_w4a16_g32", "int4_w4a16_g32_zp", "int8_w8a16_g32"])
def test_grouped_weights_are_those_of_sglangs_kernel(name):
    """Codes minus zero point (or half the range), times the group's scale; even columns low."""
    _, info, (q, _) = problem(name)
    codes = info.w13_weight.int()
    if info.use_int4_w4a16:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    zero = torch.tensor(8 if info.use_int4_w4a16 else 128)
    if info.w13_zp is not None:
        pairs = info.w13_zp.int()
        zero = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1, 2).repeat_interleave(32, 2)
    exact = (codes - zero) * info.w13_scale.repeat_interleave(32, 2)
    assert torch.equal(exact, dequantize_weight(q, name))


def gates(h, config, info):
    """The activations of SGLang's Triton runner, from its source."""
    gate, up = (h[:, ::2], h[:, 1::2]) if info.fuse_swiglu_interleaved else h.chunk(2, -1)
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if not config.is_gated:
        relu2 = lambda x: functional.relu(x).square()  # noqa: E731
        known = {"silu": functional.silu, "gelu": functional.gelu, "relu2": relu2}
        return known[config.activation](h)
    if config.activation == "situ":
        gate = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate)
        return gate * (up if limit is None else limit * torch.tanh(up / limit))
    if config.activation.startswith("gelu"):
        tanh = "tanh" if config.activation == "gelu_tanh" else "none"
        return functional.gelu(gate, approximate=tanh) * up
    if alpha is not None:
        if config.gate_up_interleaved:
            gate, up = h[:, ::2], h[:, 1::2]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * alpha) * (up + 1)
    if limit is not None:
        return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if config.swiglu_limit is not None:
        gate = gate.clamp(max=config.swiglu_limit)
        up = up.clamp(-config.swiglu_limit, config.swiglu_limit)
    return functional.silu(gate) * up


@pytest.mark.parametrize(
    ("numbers", "interleaved"),
    [
        ({}, False),
        ({}, True),
        ({"swiglu_limit": 0.5}, False),
        ({"gemm1_clamp_limit": 0.5}, False),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5}, False),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5, "gate_up_interleaved": False}, False),
        ({"activation": "gelu"}, False),
        ({"activation": "gelu_tanh"}, False),
        ({"activation": "situ", "gemm1_alpha": 2.0}, False),
        ({"activation": "situ", "gemm1_alpha": 2.0, "gemm1_clamp_limit": 3.0}, False),
        ({"activation": "silu", "is_gated": False}, False),
        ({"activation": "gelu", "is_gated": False}, False),
        ({"activation": "relu2", "is_gated": False}, False),
    ],
)
def test_activations_are_those_of_sglangs_runner(engine, numbers, interleaved):
    dispatched, info, _ = problem("unquantized", biases=False)
    info.fuse_swiglu_interleaved = interleaved
    config = sglang.MoeRunnerConfig(inplace=False, **numbers)
    if not config.is_gated:
        info.w13_weight = info.w13_weight[:, : info.w2_weight.shape[2]].contiguous()
    out = registered(engine)(dispatched, info, config).hidden_states
    x, (weights, ids, _) = dispatched.hidden_states, dispatched.topk_output
    want = torch.zeros_like(x)
    for j in range(2):
        for t, e in enumerate(ids[:, j].tolist()):
            h = gates(x[t : t + 1] @ info.w13_weight[e].t(), config, info)
            want[t] += weights[t, j] * (h @ info.w2_weight[e].t())[0]
    torch.testing.assert_close(out, want)


def test_weights_on_the_input_and_factors(engine):
    function = registered(engine)
    dispatched, info, _ = problem("unquantized", biases=False)
    config = sglang.MoeRunnerConfig(inplace=False, apply_router_weight_on_input=True)
    want = expected("unquantized", dispatched, info, None, apply_router_weight_on_input=True)
    assert torch.equal(function(dispatched, info, config).hidden_states, want)
    config = sglang.MoeRunnerConfig(inplace=False, routed_scaling_factor=2.0)
    want = 2 * expected("unquantized", dispatched, info, None)
    assert torch.equal(function(dispatched, info, config).hidden_states, want)


def change(target, **values):
    """A change of one of the three arguments."""
    return target, values


@pytest.mark.parametrize(
    ("scheme", "target", "values", "reason"),
    [
        ("unquantized", "info", {"use_mxfp8": True}, "mxfp8"),
        ("unquantized", "dispatched", {"hidden_states_pre_quant": ()}, "quantized already"),
        ("unquantized", "dispatched", {"topk_output": object()}, "topk_ids"),
        ("unquantized", "config", {"no_combine": True}, "not summed"),
        ("unquantized", "config", {"silu_mul_keep_fp32": True}, "FP32 intermediates"),
        ("unquantized", "config", {"apply_router_weight_on_input": True}, "with biases"),
        ("unquantized", "config", {"activation": "silu_rounded"}, "silu_rounded"),
        ("unquantized", "config", {"activation": "tanh", "is_gated": False}, "tanh"),
        ("unquantized", "config", {"gemm1_alpha": 1.7}, "no gemm1_clamp_limit"),
        ("unquantized", "config", {"activation": "gelu", "gemm1_clamp_limit": 7.0}, "of gelu"),
        ("unquantized", "both", {"swiglu_limit": 10.0}, "interleaved rows"),
        ("unquantized", "both", {"gemm1_clamp_limit": 7.0}, "interleaved rows"),
        ("unquantized", "both", {"activation": "gelu"}, "interleaved rows"),
        ("unquantized", "info", {"use_int8_w8a16": True}, "block_shape"),
        ("unquantized", "info", {"use_int4_w4a16": True, "block_shape": [0, 48]}, "powers of two"),
        ("int8_channel", "info", {"per_channel_quant": False}, "one scale per expert"),
        ("fp8_channel", "info", {"a13_scale": torch.ones(1)}, "elements each"),
        ("fp8_tensor", "info", {"a2_scale": torch.ones(1)}, "elements each"),
        ("unquantized", "info", {"a13_scale": torch.ones(1)}, "elements each"),
        ("fp8_tensor", "info", {"a13_scale": torch.ones(4)}, "elements each"),
        ("fp8_block32", "info", {"w13_scale": torch.ones(1, dtype=torch.uint8)}, "float32"),
        ("fp8_channel", "info", {"use_fp8_w8a8": False, "use_int8_w8a8": True}, "torch.int8"),
        ("fp8_channel", "mode", {"batch_invariant": False}, None),
        ("fp8_tensor", "mode", {"batch_invariant": True}, "batch_invariant"),
    ],
)
def test_what_is_not_served_falls_back(engine, log, scheme, target, values, reason):
    """One line of the log, however many layers there are; the runner core raises instead."""
    function, (dispatched, info, _) = registered(engine), problem(scheme)
    config = sglang.MoeRunnerConfig(inplace=False)
    info.fuse_swiglu_interleaved = target == "both"
    owners = {"info": info, "config": config, "both": config, "mode": engine.mode}
    vars(owners.get(target, config)).update(values if target in owners else {})
    if target == "dispatched":
        dispatched = dispatched._replace(**values)
    results = [function(dispatched, info, config).hidden_states for _ in range(2)]
    core = engine.factories["moe_ops"](config)
    assert core.runner_backend == "moe_ops"
    if reason is None:
        assert isinstance(results[0], torch.Tensor)
        assert [f"runs the experts: {scheme}" in record.message for record in log.records] == [True]
        again = core.run_from_dispatch(dispatched, info, config).hidden_states
        assert torch.equal(again, results[0])
        with pytest.raises(NotImplementedError, match="hooks"):
            core.run_from_dispatch(dispatched, info, config, hooks=object())
        return
    assert results == ["SGLang's"] * 2
    (record,) = log.records
    assert reason in record.message and "SGLang's own kernels run" in record.message
    with pytest.raises((NotImplementedError, ValueError), match=reason):
        core.run_from_dispatch(dispatched, info, config)


def test_schemes_have_names(engine):
    for name in FLAGS:
        _, info, _ = problem(name)
        assert engine.experts.runner_scheme(info).key == get_scheme(name).key
