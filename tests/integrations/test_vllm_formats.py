"""Layers of quantized weights in vLLM: its methods are played, on stand-ins of its functions."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import vllm_stand_ins as vllm
from vllm_formats import (
    AutoAWQConfig,
    AutoGPTQConfig,
    QuantizationArgs,
    awq,
    bits_of,
    described,
    rows_first,
)
from vllm_layers import AG, BATCH, FP8, exchange, expected, key, layer, problem, served

from moe_ops.dispatch.device import NO_GPU, assumed
from moe_ops.integrations import _engines
from moe_ops.pipeline import forms
from moe_ops.scheme import get_scheme, is_packed, pack_weight

MXFP8 = "|fp8:1x32:e8m0"
GROUPS = {
    "int4_w4a16_g32": (QuantizationArgs, rows_first),
    "int4_w4a16_g64_zp": (QuantizationArgs, rows_first),
    "int8_w8a16_g32": (QuantizationArgs, rows_first),
    "int8_w8a16_g64_zp": (QuantizationArgs, rows_first),
    "int4_w4a16_g64": (AutoGPTQConfig, rows_first),
    "int4_w4a16_g32_zp": (AutoAWQConfig, awq),
}
"""A scheme of integers -> who describes it to vLLM, and how words are ordered."""
SCHEMES = [*GROUPS, "int4_w4a8_g128", "nvfp4_w4a16", "mxfp4_w4a16", "mxfp4_w4a8_token", MXFP8]


@pytest.fixture
def engine(monkeypatch):
    _engines.say_once.cache_clear()
    monkeypatch.delenv("MOE_OPS_VLLM", raising=False)
    made = vllm.install(monkeypatch)
    made.plugin.register()
    return made


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="vllm.moe_ops")
    return caplog


class Method:
    """A method of vLLM: `kept` is the backend that it was given, `experts_cls` the class."""

    def __init__(self, engine, config, name):
        self.functions, self.config, self.name = engine.method, config, name
        self.memory, self.layer = set(), None
        self.kept, self.experts_cls = self.select()

    def call(self, function, **given):
        tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
        self.memory |= {x.untyped_storage().data_ptr() for x in tensors}
        return getattr(self.functions, function)(**given)

    def kernel(self, function, quant_config, backend="backend", **more):
        made = self.call(
            function, moe_quant_config=quant_config, moe_config=self.config,
            experts_cls=self.experts_cls, **{backend: self.kept}, **more,
        )  # fmt: skip
        return made.fused_experts

    def made(self, qs, biases):
        """The experts, and both weights as vLLM's layer holds them."""
        kind = self.name.partition("_")[0] if self.name != MXFP8 else "mxfp8"
        return getattr(self, "int4_fp8" if self.name == "int4_w4a8_g128" else kind)(qs, biases)

    def select(self):
        config = {"config": self.config}
        if self.name in GROUPS:
            kind = GROUPS[self.name][0]
            return self.call(
                "select_wna16_moe_backend", **config, weight_key=None, may_have_bias=False,
                quant_config=described(kind, self.name), may_have_zp=self.name.endswith("zp"),
            )  # fmt: skip
        if self.name == "mxfp4_w4a8_token":
            asked = key(FP8, (1, 128), False)
            return self.call("select_mxfp4_moe_backend", **config, activation_key=asked)
        if self.name == "nvfp4_w4a16":
            config |= {"weight_key": None, "activation_key": None}
        return self.call({
            "int4_w4a8_g128": "select_w4a8_moe_backend",
            "nvfp4_w4a16": "select_nvfp4_moe_backend",
            "mxfp4_w4a16": "select_deepseek_v4_mxfp4_moe_backend",
            MXFP8: "select_mxfp8_moe_backend",
        }[self.name], **config)  # fmt: skip

    def int4(self, qs, biases):
        kind, order = GROUPS[self.name]
        first, second = (order(q, bits_of(self.name)) for q in qs)
        w13, w2, scale13, scale2, zero13, zero2, _, _, *biases = self.call(
            "convert_to_wna16_moe_kernel_format", backend=self.kept, layer=None,
            quant_config=described(kind, self.name), input_dtype=None, w13=first.weight,
            w2=second.weight, w13_scale=first.scale, w2_scale=second.scale,
            w13_qzeros=first.zeros, w2_qzeros=second.zeros, w13_bias=biases[0], w2_bias=biases[1],
        )  # fmt: skip
        config = vllm.FusedMoEQuantConfig(
            "int4" if bits_of(self.name) == 4 else torch.int8, None,
            [0, get_scheme(self.name).weight.group.cols], w1_scale=scale13, w2_scale=scale2,
            w1_zp=zero13, w2_zp=zero2, w1_bias=biases[0], w2_bias=biases[1],
        )  # fmt: skip
        return self.kernel("make_wna16_moe_kernel", config), w13, w2

    int8 = int4

    def int4_fp8(self, qs, biases):
        scales = [q.scale.float() * q.global_scale[..., None] for q in qs]
        first, second = (rows_first(q, 4) for q in qs)
        w13, w2, scale13, scale2, *alphas, _, _ = self.call(
            "convert_to_w4a8_moe_kernel_format", backend=self.kept, layer=None, group_size=128,
            w13_weight=first.weight, w2_weight=second.weight, w13_weight_scale=scales[0],
            w2_weight_scale=scales[1],
        )  # fmt: skip
        config = vllm.FusedMoEQuantConfig(
            "int4", FP8, None, True, scale13, scale2, g1_alphas=alphas[0], g2_alphas=alphas[1]
        )
        more = {"b_strides1": None, "b_strides2": None, "group_size": 128}
        return self.kernel("make_w4a8_moe_kernel", config, **more), w13, w2

    def nvfp4(self, qs, biases):
        first, second = qs
        w13, scale13, factor13, a13, w2, scale2, factor2, a2 = self.call(
            "convert_to_nvfp4_moe_kernel_format", nvfp4_backend=self.kept, layer=self.layer,
            w13=first.data, w13_scale=first.scale, w13_scale_2=first.global_scale,
            a13_scale=torch.ones(1), w2=second.data, w2_scale=second.scale,
            w2_scale_2=second.global_scale, a2_scale=torch.ones(1), is_act_and_mul=True,
        )  # fmt: skip
        config = self.call(
            "make_nvfp4_moe_quant_config", backend=self.kept, w13_scale=scale13, w2_scale=scale2,
            w13_scale_2=factor13, w2_scale_2=factor2, a13_scale=a13, a2_scale=a2,
        )  # fmt: skip
        return self.kernel("make_nvfp4_moe_kernel", config), w13, w2

    def mxfp4(self, qs, biases):
        token = self.name == "mxfp4_w4a8_token"
        convert = "convert_gpt_oss" if token else "convert"
        w13, w2, scale13, scale2, *biases = self.call(
            f"{convert}_weight_to_mxfp4_moe_kernel_format", mxfp4_backend=self.kept, layer=None,
            w13_weight=qs[0].data, w2_weight=qs[1].data, w13_weight_scale=qs[0].scale,
            w2_weight_scale=qs[1].scale, w13_bias=biases[0], w2_bias=biases[1],
        )  # fmt: skip
        config = self.call(
            "make_mxfp4_moe_quant_config", mxfp4_backend=self.kept, w1_scale=scale13,
            w2_scale=scale2, w1_bias=biases[0], w2_bias=biases[1],
        )  # fmt: skip
        return self.kernel("make_mxfp4_moe_kernel", config, "mxfp4_backend"), w13, w2

    def mxfp8(self, qs, biases):
        w13, w2, scale13, scale2 = self.call(
            "convert_to_fp8_moe_kernel_format", fp8_backend=self.kept, layer=None, w13=qs[0].data,
            w2=qs[1].data, w13_scale=qs[0].scale, w2_scale=qs[1].scale, w13_input_scale=None,
            w2_input_scale=None,
        )  # fmt: skip
        config = self.call(
            "make_fp8_moe_quant_config", fp8_backend=self.kept, w1_scale=scale13, w2_scale=scale2,
            a1_scale=None, a2_scale=None,
        )  # fmt: skip
        return self.kernel("make_fp8_moe_kernel", config, "fp8_backend"), w13, w2


WITH_BIASES = {*GROUPS, "mxfp4_w4a16", "mxfp4_w4a8_token"}


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_layers_are_fused_experts(engine, monkeypatch, name, packs):
    """Bit for bit, in both forms; packed weights take the memory of those that vLLM loaded."""
    place = engine.choice.Place
    monkeypatch.setattr(forms, "reads_packed", lambda *_, **__: packs)
    monkeypatch.setattr(engine.weights, "TOGETHER", 1 if packs else 2**24)  # bytes of AWQ's words
    x, weights, ids, *qs, biases = problem(name, hidden=128, width=128)
    if name == "int4_w4a8_g128":  # scales that vLLM's conversion restores
        qs = [q._replace(scale=(q.scale.float() * 0 + 56).to(FP8)) for q in qs]
    if name not in WITH_BIASES:
        biases = (None, None)
    want = expected(name, x, *(q.data for q in qs), weights, ids, qs, biases)
    copies = [type(q)(*(None if t is None else t.clone() for t in q)) for q in qs]
    method = Method(engine, layer(hidden=128, width=128), name)
    assert isinstance(method.kept, place) and method.kept.scheme.key == get_scheme(name).key
    made, w13, w2 = method.made(copies, biases)
    assert is_packed(w13) == is_packed(w2) == packs
    if packs:
        assert torch.equal(w13, pack_weight(qs[0], name).data)
        assert {w.untyped_storage().data_ptr() for w in (w13, w2)} <= method.memory
    out = served(made, x, w13, w2, weights, ids)
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["int4_w4a16_g32", "mxfp4_w4a8_token"])
def test_rows_of_two_ranks(engine, name):
    """The Batched class is chosen and made where vLLM sends tokens to their experts."""
    method = Method(engine, layer(moe_parallel_config=BATCH), name)
    assert method.experts_cls is engine.experts.BatchedMoeOpsExperts
    _, _, _, *qs, biases = problem(name)
    made, *_ = method.made(qs, biases)
    assert (made.max_num_tokens, made.num_dispatchers) == (3, 2)
    assert not made.expects_unquantized_inputs


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("stored", ["w13_weight_scale_2", "w13_weight_global_scale"])
def test_factors_of_gate_and_up(engine, monkeypatch, stored, packs):
    """NVFP4's factors may differ; equal ones keep their shape, and the bits of one per expert."""
    monkeypatch.setattr(forms, "reads_packed", lambda *_, **__: packs)
    x, weights, ids, q1, q2, _ = problem("nvfp4_w4a16", hidden=128, width=128)
    for columns in ([1.0, 3.0], [1.0, 1.0], [1.0]):
        pairs = q1.global_scale[:, None] * torch.tensor(columns)
        method = Method(engine, layer(hidden=128, width=128), "nvfp4_w4a16")
        method.layer = SimpleNamespace(**{stored: pairs if stored[-1] == "2" else 1 / pairs})
        both, near = (q1._replace(global_scale=pairs), 1e-5) if 3 in columns else (q1, 0)
        copies = [q._replace(data=q.data.clone()) for q in (q1, q2)]
        want = expected(method.name, x, q1[0], q2[0], weights, ids, (both, q2), [None] * 2)
        made, *ws = method.made(copies, [None] * 2)
        assert made.quant_config.g1_alphas.shape == (4, 2)[: len(columns)]
        torch.testing.assert_close(served(made, x, *ws, weights, ids), want, rtol=near, atol=near)


def test_fp8_rows_for_the_weights_of_deepseek_v4(engine):
    """That selection does not know the activations: the conversion does."""
    method = Method(engine, layer(), "mxfp4_w4a16")
    *_, q1, q2, biases = problem("mxfp4_w4a16")
    given = {
        "mxfp4_backend": method.kept, "layer": None, "w13_weight": q1.data, "w2_weight": q2.data,
        "w13_weight_scale": q1.scale, "w2_weight_scale": q2.scale,
    }  # fmt: skip
    for asked, scheme in (
        (key(FP8, (-1, -1)), "mxfp4_w4a16"),
        (key(torch.uint8, (1, 32), False, torch.uint8), "mxfp4_w4a16"),
        (key(FP8, (1, 32), False, torch.uint8), "mxfp4_w4a8_token"),
    ):
        method.call("convert_weight_to_mxfp4_moe_kernel_format", **given, activation_key=asked)
        assert method.kept.scheme.name == scheme


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("module", vllm.METHODS)
def test_methods_that_choose_marlin(engine, monkeypatch, module, packs):
    """They are wrapped as a whole: where they choose other experts, nothing changes."""
    monkeypatch.setattr(forms, "reads_packed", lambda *_, **__: packs)
    made = engine.modules[f"vllm.model_executor.layers.quantization.{module}"]
    method = getattr(made, vllm.METHODS[module])
    x, weights, ids, q1, q2, _ = problem("mxfp4_w4a16", hidden=128, width=128)
    want = expected("mxfp4_w4a16", x, q1.data.clone(), q2.data.clone(), weights, ids, (q1, q2),
                    (None, None))  # fmt: skip
    module = torch.nn.Module()
    module._expert_routing_tables = lambda: None
    for which, q in (("w13", q1), ("w2", q2)):
        for name, x_ in ((f"{which}_weight_packed", q.data), (f"{which}_weight_scale", q.scale)):
            module.register_parameter(name, torch.nn.Parameter(x_, requires_grad=False))
    ours = method(layer(hidden=128, width=128))
    assert isinstance(ours.mxfp4_backend, engine.choice.Place)
    ours.process_weights_after_loading(module)
    assert is_packed(module.w13_weight) == packs and not hasattr(module, "w2_weight_packed")
    experts = ours.moe_kernel.fused_experts
    out = served(experts, x, module.w13_weight, module.w2_weight, weights, ids)
    assert torch.equal(out, want)
    theirs = method(layer(is_lora_enabled=True))
    theirs.process_weights_after_loading(module)
    assert theirs.experts_cls is vllm.MarlinExperts and theirs.repacked is module


def test_a_gpu_without_fp8(engine, monkeypatch, log):
    """Weights alone are quantized then, and the log does not say that vLLM's experts run."""

    def refusal(experts, config, scheme):
        return None if scheme.activation is None else "no fp8"

    monkeypatch.setattr(engine.choice, "layer_refusal", refusal)
    assert Method(engine, layer(), "mxfp4_w4a8_token").kept.scheme.name == "mxfp4_w4a16"
    assert [record.message for record in log.records] == ["moe_ops: mxfp4_w4a16 goes before MARLIN"]


def test_a_gpu_before_hopper(engine, log):
    """Marlin stays there, unless this library is asked for; Triton's experts do not."""
    oracle, kept = engine.oracles["int_wna16"], []
    with assumed(NO_GPU._replace(arch=80)):
        for backend, asked in (("MARLIN", "auto"), ("MARLIN", "triton"), ("TRITON", "auto")):
            oracle.choice = oracle.backends[backend]
            kept.append(Method(engine, layer(moe_backend=asked), "int4_w4a16_g32").kept)
    assert kept[0] is oracle.backends["MARLIN"]
    assert [place.scheme.name for place in kept[1:]] == ["int4_w4a16_g32"] * 2
    assert "vLLM chooses MARLIN on a GPU before Hopper" in log.records[0].message


def test_without_a_place_vllms_functions_run(engine):
    """Arguments and results are vLLM's."""
    backends = engine.oracles["nvfp4"].backends
    given = dict.fromkeys(vllm.recorded_signature(
        f"{vllm.LAYERS}.oracle.nvfp4.convert_to_nvfp4_moe_kernel_format"
    ).parameters)  # fmt: skip
    given["nvfp4_backend"] = backends.MARLIN
    convert = engine.method.convert_to_nvfp4_moe_kernel_format
    assert convert(**given) == "convert_to_nvfp4_moe_kernel_format"
    assert convert(*given.values()) == "convert_to_nvfp4_moe_kernel_format"


REFUSED = {
    "another backend": ("nvfp4_w4a16", {}, "FLASHINFER_TRTLLM", "vLLM chooses FLASHINFER_TRTLLM"),
    "a user's choice": ("nvfp4_w4a16", {"moe_backend": "marlin"}, "MARLIN", "moe_backend is"),
    "LoRA": ("int4_w4a16_g32", {"is_lora_enabled": True}, "MARLIN", "LoRA"),
    "moving experts": (
        "int4_w4a16_g32",
        {"moe_parallel_config": vllm.FusedMoEParallelConfig(enable_eplb=True)},
        "MARLIN",
        "move between ranks",
    ),
    "sizes": ("int4_w4a16_g64", {"width": 96}, "MARLIN", "multiples of"),
    "an exchange": (
        "mxfp4_w4a16",
        {"moe_parallel_config": exchange()},
        "MARLIN",
        "parallel config",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served(engine, log, case):
    """vLLM's choice stays, and one line of the log says why."""
    name, change, chosen, reason = REFUSED[case]
    (oracle,) = (o for o in ("nvfp4", "int_wna16", "mxfp4") if o[:4] in (name[:4], name[:3] + "_"))
    module = engine.oracles[oracle]
    module.choice = module.backends[chosen]
    for _ in range(2):
        method = Method(engine, layer(**change), name)
        assert (method.kept, method.experts_cls) == (module.choice, vllm.Theirs)
    assert [reason in record.message for record in log.records] == [True], log.text


ORDERS = {
    "act-order of GPTQ": (AutoGPTQConfig, {"desc_act": True}, False, "order of activations"),
    "act-order of compressed-tensors": (
        QuantizationArgs, {"actorder": "group"}, False, "order of activations",
    ),
    "zero points of GPTQ": (AutoGPTQConfig, {}, True, "zero points of GPTQ"),
    "3 bits": (QuantizationArgs, {"num_bits": 3}, False, "weights of 3 bits"),
    "rows": (QuantizationArgs, {"group_size": None}, False, "one scale per row"),
    "odd groups": (QuantizationArgs, {"group_size": 48}, False, "powers of two"),
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERS)
def test_integers_that_are_not_served(engine, log, case):
    kind, change, zero_point, reason = ORDERS[case]
    given = described(kind, "int4_w4a16_g32")
    vars(given).update(change)
    select = engine.method.select_wna16_moe_backend
    backend, theirs = select(layer(hidden=96, width=96), None, given, zero_point, False)
    assert (backend.value, theirs) == ("MARLIN", vllm.Theirs)
    assert reason in log.text


def test_groups_that_vllm_halves(engine):
    """Its method for AWQ and GPTQ on other devices halves groups until they fit the sizes."""
    kind = type("MoeWNA16Config", (AutoGPTQConfig,), {})
    given = described(kind, "int4_w4a16_g128")
    config = layer(hidden=128, width=192)
    place, _ = engine.method.select_wna16_moe_backend(config, None, given, True, False)
    assert place.scheme.name == "int4_w4a16_g64_zp"


def test_rows_of_gptq(engine):
    """Without groups: one scale per row."""
    given = described(AutoGPTQConfig, "int4_w4a16_g32")
    given.group_size = -1
    place, _ = engine.method.select_wna16_moe_backend(layer(), None, given, False, True)
    assert place.scheme.name == "int4_w4a16_channel"


@pytest.mark.parametrize("error", [NotImplementedError("none"), ValueError("none")])
def test_where_vllm_has_no_experts(engine, log, error):
    """Layers for which vLLM has none are served; if they are not, its error stays."""
    engine.oracles["int_wna16"].choice = error
    assert Method(engine, layer(), "int4_w4a16_g32").kept.value == "MOE_OPS"
    with pytest.raises(type(error), match="none"):
        Method(engine, layer(is_lora_enabled=True), "int4_w4a16_g32")


def test_a_conflict_with_the_users_activations_is_vllms(engine):
    """vLLM raises ValueError for MXFP4 if the checkpoint and the user differ."""
    engine.oracles["mxfp4"].choice = ValueError("checkpoint declares")
    with pytest.raises(ValueError, match="checkpoint declares"):
        Method(engine, layer(), "mxfp4_w4a16")


def test_a_fault_of_the_plug_in_leaves_the_layer_to_vllm(engine, monkeypatch, log):
    def broken(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(engine.experts, "layer_refusal", broken)
    assert Method(engine, layer(), "nvfp4_w4a16").experts_cls is vllm.Theirs
    assert "no such thing" in log.text


def test_every_loaded_module_is_reached_once(engine):
    """Also those that took a function of an oracle by its name before the plug-in came."""
    engine.plugin.register()
    for name in engine.factories._WRAPPERS:
        module, last = name.rsplit(".", 1)
        function = getattr(engine.modules[module], last)
        assert not hasattr(function.__wrapped__, "__wrapped__")
        assert getattr(engine.method, last) is function or "fp8.make" in name


def test_modules_that_looking_imports(monkeypatch):
    """Looking up a method imports modules, which may take functions of oracles by their names."""
    engine = vllm.install(monkeypatch)
    nvfp4, late = engine.oracles["nvfp4"], ModuleType("vllm.late")
    late.make_nvfp4_moe_kernel = nvfp4.make_nvfp4_moe_kernel

    def missing_of(format):
        if format == "MXFP8":
            monkeypatch.setitem(sys.modules, "vllm.late", late)

    monkeypatch.setattr(engine.factories, "missing_of", missing_of)
    engine.plugin.register()
    assert late.make_nvfp4_moe_kernel is nvfp4.make_nvfp4_moe_kernel
    assert hasattr(late.make_nvfp4_moe_kernel, "__wrapped__")


def test_another_interface_of_one_format(monkeypatch, log):
    """That format is left alone, one line says so, and the others are reached."""
    _engines.say_once.cache_clear()
    engine = vllm.install(monkeypatch)
    nvfp4 = engine.oracles["nvfp4"]
    kept = nvfp4.make_nvfp4_moe_kernel = lambda moe_quant_config: None
    engine.plugin.register()
    (record,) = log.records
    assert "in NVFP4: it has no" in record.message and "make_nvfp4_moe_kernel" in record.message
    assert nvfp4.make_nvfp4_moe_kernel is kept and not hasattr(
        nvfp4.select_nvfp4_moe_backend, "__wrapped__"
    )
    assert hasattr(engine.oracles["mxfp4"].select_mxfp4_moe_backend, "__wrapped__")


def test_rows_of_other_ranks_may_be_in_16_bits(engine):
    """Weights alone are quantized: vLLM sends rows as they are."""
    assert Method(engine, layer(moe_parallel_config=AG), "int4_w4a16_g32").kept.value == "MOE_OPS"
