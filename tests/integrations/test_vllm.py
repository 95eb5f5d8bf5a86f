"""The plug-in of vLLM on stand-ins of vLLM's classes; `make test-vllm` serves with vLLM itself."""

import logging
import subprocess
import sys
from enum import Enum

import pytest
import torch
import vllm_stand_ins as vllm
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moe_ops import FusedMoEQuantConfig, fused_experts, pack_weight, quantize_weight
from moe_ops.integrations import _engines
from moe_ops.integrations.vllm import register
from moe_ops.ops import batched_dispatch, moe_quantize
from moe_ops.scheme import get_scheme

SILU = vllm.MoEActivation.SILU
FP8, INT8 = torch.float8_e4m3fn, torch.int8
STANDARD = vllm.FusedMoEActivationFormat.Standard
BATCHED = vllm.FusedMoEActivationFormat.BatchedExperts


def key(dtype, shape, static=True, scale=torch.float32):
    return vllm.QuantKey(dtype, vllm.ScaleDesc(scale, static, shape))


MXFP4 = key(torch.uint8, (1, 32), scale=torch.uint8)
KEYS = {
    "unquantized": (None, None),
    "fp8_block128": (key(FP8, (128, 128)), key(FP8, (1, 128), static=False)),
    "fp8_block32": (key(FP8, (32, 32)), key(FP8, (1, 128), static=False)),
    "fp8_channel": (key(FP8, (-1, 1)), key(FP8, (1, -1), static=False)),
    "fp8_tensor": (key(FP8, (-1, -1)), key(FP8, (-1, -1), static=False)),
    "fp8_tensor_static": (key(FP8, (-1, -1)), key(FP8, (-1, -1))),
    "int8_channel": (key(INT8, (-1, 1)), key(INT8, (1, -1), static=False)),
    "mxfp4_w4a16": (MXFP4, None),
}
"""vLLM's keys of each scheme that the plug-in serves."""
OTHER_KEYS = {
    "rows without weights": (None, key(FP8, (1, -1), static=False)),
    "int4": (key(torch.int32, (1, 32), scale=torch.float16), None),
    "fp8 weights alone": (key(FP8, (-1, 1)), None),
    "mxfp8": (key(FP8, (1, 32), scale=torch.uint8), key(FP8, (1, 32), False, torch.uint8)),
    "e8m0 blocks": (key(FP8, (128, 128), scale=torch.float8_e8m0fnu), KEYS["fp8_block128"][1]),
    "mxfp4 rows": (MXFP4, key(torch.uint8, (1, 32), False, torch.uint8)),
    "zero points": (KEYS["int8_channel"][0]._replace(symmetric=False), KEYS["int8_channel"][1]),
    "two scales": (KEYS["int8_channel"][0]._replace(scale2=0), KEYS["int8_channel"][1]),
    "int8 tensor": (key(INT8, (-1, -1)), key(INT8, (-1, -1), static=False)),
    "mixed": (KEYS["fp8_channel"][0], KEYS["int8_channel"][1]),
    "static rows": (KEYS["fp8_channel"][0], key(FP8, (1, -1))),
    "dynamic weights": (key(FP8, (-1, 1), static=False), KEYS["fp8_channel"][1]),
}


@pytest.fixture
def engine(monkeypatch):
    """The plug-in on stand-ins, its log empty."""
    _engines.say_once.cache_clear()
    monkeypatch.delenv("MOE_OPS_VLLM", raising=False)
    return vllm.install(monkeypatch)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="vllm.moe_ops")
    return caplog


def layer(num_experts=4, k=2, hidden=64, width=64, activation=SILU, local=None, **more):
    local = num_experts if local is None else local
    return vllm.FusedMoEConfig(num_experts, k, hidden, width, local, activation, **more)


def classes(engine, name, backend):
    module = engine.oracles[name]
    return module.backend_to_kernel_cls(getattr(module, vllm.BACKENDS[name][0])[backend])


def test_without_vllm_nothing_happens(log, monkeypatch):
    _engines.say_once.cache_clear()
    monkeypatch.setitem(sys.modules, "vllm", None)
    register()
    assert len(log.records) == 1 and "vllm" in log.text


def test_import_of_the_entry_point_imports_no_engine():
    code = (
        "import sys, moe_ops.integrations.vllm, moe_ops.integrations.sglang;"
        "assert not {'vllm', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_our_classes_go_first_once(engine, log):
    register()
    register()
    ours = [engine.experts.MoeOpsExperts, engine.experts.BatchedMoeOpsExperts]
    first = {
        (name, backend)
        for name, (_, backends) in vllm.BACKENDS.items()
        for backend in backends
        if classes(engine, name, backend) == [*ours, vllm.Theirs]
    }
    assert first == {
        ("unquantized", "TRITON"), ("unquantized", "BATCHED_TRITON"), ("unquantized", "CPU"),
        ("fp8", "TRITON"), ("fp8", "BATCHED_TRITON"), ("int8", "TRITON"), ("mxfp4", "XPU"),
    }  # fmt: skip
    for name, backend in (("fp8", "CPU"), ("int8", "CPU"), ("mxfp4", "TRITON")):
        assert classes(engine, name, backend) == [vllm.Theirs]
    assert not log.records


def test_switched_off(engine, monkeypatch, log):
    monkeypatch.setenv("MOE_OPS_VLLM", "0")
    register()
    assert classes(engine, "fp8", "TRITON") == [vllm.Theirs] and not log.records


def test_with_lora_theirs_run(engine, log):
    register()
    engine.config.current = type("Config", (), {"lora_config": object()})
    assert classes(engine, "unquantized", "TRITON") == [vllm.Theirs]
    assert "LoRA" in log.text
    engine.config.current.lora_config = None
    assert len(classes(engine, "unquantized", "TRITON")) == 3


@pytest.mark.parametrize("kind", ("cpu", "xpu"))
def test_mxfp4_order(engine, kind):
    engine.platform.kind = kind
    register()
    order = [b.value for b in engine.oracles["mxfp4"]._get_priority_backends_for_gpt_oss()]
    theirs = ["MARLIN", "TRITON", "XPU", "CPU"]
    assert order == (theirs if kind == "xpu" else ["MARLIN", "XPU", "TRITON", "CPU"])


def interface():
    from moe_ops.integrations.vllm._interface import NAMES, PARAMETERS

    return sorted(
        (module, name)
        for table in (NAMES, PARAMETERS)
        for module in table
        for name in table[module]
    )


@pytest.mark.parametrize(("module", "name"), interface())
def test_another_interface(engine, log, monkeypatch, module, name):
    """Whatever is missing: one line that names it, and nothing is changed."""
    owner = engine.modules[module]
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if last in ("TRITON", "XPU"):  # members of an enumeration
        others = [member.name for member in owner if member.name != last]
        monkeypatch.setattr(engine.modules[module], outer[0], Enum("Other", others))
    elif outer and isinstance(owner, type):
        monkeypatch.setattr(vllm.FusedMoEExpertsModular, last, lambda self, other: None)
    elif outer:
        monkeypatch.setattr(type(owner), last, property())
    else:
        monkeypatch.delattr(owner, last)
    register()
    (record,) = log.records
    assert f"{module}.{name}" in record.message and "0.33.0" in record.message
    for oracle in engine.oracles.values():
        assert not hasattr(getattr(oracle, "backend_to_kernel_cls", None), "__wrapped__")


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_schemes(engine, name):
    assert engine.schemes.scheme_of_keys(*KEYS[name]).key == get_scheme(name).key


@pytest.mark.parametrize("name", OTHER_KEYS)
def test_other_keys(engine, name):
    assert engine.schemes.scheme_of_keys(*OTHER_KEYS[name]) is None
    ours = engine.experts.MoeOpsExperts
    assert not ours.is_supported_config(ours, layer(), *OTHER_KEYS[name], STANDARD)[0]


def exchange(**flags):
    return vllm.FusedMoEParallelConfig(use_all2all_kernels=True, **flags)


AG, BATCH = exchange(use_ag_rs_all2all_kernels=True), exchange(use_batched_activation_format=True)


@pytest.mark.parametrize(
    ("change", "scheme", "reason"),
    [
        ({}, "fp8_channel", None),
        ({"moe_parallel_config": AG}, "fp8_block32", None),
        ({"moe_parallel_config": AG}, "fp8_tensor", "one scale for rows of several ranks"),
        ({"moe_parallel_config": AG}, "mxfp4_w4a16", "weight-only experts"),
        ({"moe_parallel_config": exchange()}, "unquantized", "parallel config"),
        ({"moe_parallel_config": BATCH}, "unquantized", "parallel config"),
        ({"is_lora_enabled": True}, "unquantized", "LoRA"),
        ({"width": 80}, "fp8_block32", "intermediate_size must be a multiple of 32"),
        ({"in_dtype": torch.float64}, "unquantized", "in_dtype"),
        ({"activation": vllm.MoEActivation.SITU}, "unquantized", "needs beta"),
        ({"activation": vllm.MoEActivation.RELU2_NO_MUL}, "unquantized", None),
    ],
)
def test_support(engine, log, change, scheme, reason):
    """A refusal is one line of the log, however often vLLM asks; an acceptance is none."""
    ours, config = engine.experts.MoeOpsExperts, layer(**change)
    for _ in range(2):
        supported, said = ours.is_supported_config(ours, config, *KEYS[scheme], STANDARD)
        assert supported == (reason is None) and (reason is None or reason in said)
    assert [reason in record.message for record in log.records] == [True] * (reason is not None)


def test_formats(engine, log):
    standard, batched = engine.experts.MoeOpsExperts, engine.experts.BatchedMoeOpsExperts
    for ours, theirs in ((standard, BATCHED), (batched, STANDARD)):
        assert not ours.is_supported_config(ours, layer(), None, None, theirs)[0]
    assert not log.records
    config = layer(moe_parallel_config=BATCH)
    assert batched.is_supported_config(batched, config, *KEYS["fp8_channel"], BATCHED)[0]


def test_batch_invariant_mode(engine):
    engine.envs.VLLM_BATCH_INVARIANT = True
    ours = engine.experts.MoeOpsExperts
    assert ours.is_supported_config(ours, layer(), *KEYS["fp8_channel"], STANDARD)[0]
    supported, reason = ours.is_supported_config(ours, layer(), *KEYS["fp8_tensor"], STANDARD)
    assert not supported and "batch invariance" in reason
    made = ours(layer(), vllm.FusedMoEQuantConfig())
    assert made.experts.moe_config.batch_invariant


@pytest.mark.parametrize(
    ("activation", "model", "quant", "key"),
    [
        ("SILU", {}, {}, "silu"),
        ("SILU", {"swiglu_limit": 7.0, "swiglu_alpha": 2.0}, {}, "silu(clamp_limit=7.0)"),
        ("SILU", {"swiglu_limit": 7.0}, {"gemm1_clamp_limit": 5.0}, "silu(clamp_limit=5.0)"),
        ("SWIGLUOAI", {}, {}, "swigluoai"),
        ("SWIGLUOAI", {}, {"gemm1_alpha": 1.5}, "swigluoai(alpha=1.5)"),
        ("GELU", {"swiglu_limit": 7.0}, {}, "gelu"),
        ("SITU", {"activation_situ_beta": 4.0, "activation_situ_linear_beta": -1.0}, {},
         "situ(beta=4.0)"),
    ],
)  # fmt: skip
def test_numbers_of_activations(engine, activation, model, quant, key):
    config = layer(activation=vllm.MoEActivation[activation], **model)
    made = engine.experts.MoeOpsExperts(config, vllm.FusedMoEQuantConfig(**quant))
    assert made.library_activation.key == key


def of_engine(name, q1, q2, biases):
    """vLLM's configuration for quantized weights, with scales in vLLM's shapes."""
    scheme = get_scheme(name)
    activation, tensors = scheme.activation, {"w1_bias": biases[0], "w2_bias": biases[1]}
    if scheme.weight is None:
        return vllm.FusedMoEQuantConfig(**tensors)
    tensors |= {"w1_scale": q1.scale, "w2_scale": q2.scale}
    if name == "mxfp4_w4a16":  # vLLM's configuration of the backend XPU
        return vllm.FusedMoEQuantConfig("mxfp4", "mxfp4", **tensors)
    dtype = scheme.weight.dtype
    if activation is None:
        return vllm.FusedMoEQuantConfig(dtype, **tensors)
    if activation.static:
        tensors |= {"a1_scale": torch.tensor(0.01), "a2_scale": torch.tensor([0.02])}
    return vllm.FusedMoEQuantConfig(
        dtype, dtype, scheme.block_shape, activation.per_row, **tensors
    )  # fmt: skip


def problem(name, seed=0, tokens=5, num_experts=4, k=2, hidden=64, width=64):
    """A layer's operands: ``(x, topk_weights, topk_ids, q1, q2, biases)``."""
    torch.manual_seed(seed)
    x = torch.randn(tokens, hidden)
    weights = torch.rand(tokens, k)
    ids = torch.rand(tokens, num_experts).topk(k).indices.to(torch.int32)
    w1, w2 = torch.randn(num_experts, 2 * width, hidden) / 8, torch.randn(
        num_experts, hidden, width) / 8  # fmt: skip
    biases = torch.randn(num_experts, 2 * width), torch.randn(num_experts, hidden)
    q = [quantize_weight(w, name) for w in (w1, w2)] if name != "unquantized" else None
    return x, weights, ids, *(q or (type("Plain", (), {"data": w}) for w in (w1, w2))), biases


def served(made, x, w1, w2, topk_weights, topk_ids, expert_map=None, **changed):
    """Call experts as vLLM's modular kernel does; returns ``output``."""
    num_experts = len(w1) if expert_map is None else len(expert_map)
    sizes = (x.shape[-2], w1.shape[1], x.shape[-1], topk_ids.shape[1], num_experts, len(w1))
    first, second, shape = made.workspace_shapes(*sizes, None, made.moe_config.activation)
    output = torch.full(shape, float("nan"), dtype=made.moe_config.in_dtype)
    arguments = {
        "output": output, "hidden_states": x, "w1": w1, "w2": w2, "topk_weights": topk_weights,
        "topk_ids": topk_ids, "activation": made.moe_config.activation,
        "global_num_experts": num_experts, "expert_map": expert_map, "a1q_scale": None,
        "a2_scale": None, "workspace13": torch.empty(first), "workspace2": torch.empty(second),
        "expert_tokens_meta": None, "apply_router_weight_on_input": False, **changed,
    }  # fmt: skip
    assert made.apply(**arguments) is None
    return output


def expected(name, x, w1, w2, topk_weights, topk_ids, q, biases, **more):
    """What `fused_experts` computes on the same operands."""
    config = None
    if name != "unquantized":
        static = {"a1_scale": torch.tensor([0.01]), "a2_scale": torch.tensor([0.02])}
        given = static if "static" in name else {}
        config = FusedMoEQuantConfig.from_weights(name, *q, **given)
    return fused_experts(
        x, w1, w2, topk_weights, topk_ids, quant_config=config, w1_bias=biases[0],
        w2_bias=biases[1], **more,
    )  # fmt: skip


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
    """With an exchange of tokens vLLM quantizes before it sends."""
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
    assert not made.supports_expert_map()


def test_packed_weights(engine, monkeypatch):
    """Where a kernel reads the packed form, loading packs; the numbers stay."""
    name = "mxfp4_w4a16"
    x, weights, ids, q1, q2, biases = problem(name)
    monkeypatch.setattr(engine.experts, "reads_packed", lambda *_, **__: True)
    made = engine.experts.MoeOpsExperts(layer(), of_engine(name, q1, q2, biases))
    module = nn.Module()
    for which, q in (("w13", q1), ("w2", q2)):
        module.register_parameter(f"{which}_weight", nn.Parameter(q.data, requires_grad=False))
        scale = nn.Parameter(q.scale, requires_grad=False)
        module.register_parameter(f"{which}_weight_scale", scale)
    made.process_weights_after_loading(module)
    assert torch.equal(module.w13_weight, pack_weight(q1, name).data)
    assert made.experts.quant_config.w1_scale is module.w13_weight_scale
    out = served(made, x, module.w13_weight, module.w2_weight, weights, ids)
    want = expected(name, x, q1.data, q2.data, weights, ids, (q1, q2), biases)
    assert torch.equal(out, want)


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
