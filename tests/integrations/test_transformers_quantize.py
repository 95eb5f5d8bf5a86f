"""`quantize_` on transformers models: they run, refuse other implementations, and are saved."""

import copy
import json
import pickle
import weakref

import pytest
import torch
from compilations import Compilations
from torch import nn

import moe_ops
from moe_ops.demo import MODEL
from moe_ops.loading.compressed import format_of
from moe_ops.scheme import SCHEMES, get_scheme

transformers = pytest.importorskip("transformers")

from tiny_transformers import (  # noqa: E402
    QWEN3,
    build,
    decorated_classes,
    experts_of,
    routed,
    tiny_qwen3,
    with_gate,
)

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _quantized  # noqa: E402
from moe_ops.integrations._experts import weights_of  # noqa: E402

QUANTIZED = [name for name in SCHEMES if name != "unquantized"]
PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def demo(**config):
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, **config)


def tokens(length=13, vocabulary=64):
    g = torch.Generator().manual_seed(length)
    return torch.randint(0, vocabulary, (2, length), generator=g)


def quantized(model, scheme, vocabulary=64, **how):
    run = None
    if get_scheme(scheme).input_scale_names:
        run = lambda m: m(tokens(40, vocabulary))  # noqa: E731
    return moe_ops.quantize_(model, scheme, **{"calibrate": run, "progress": False, **how})


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


def bits(model):
    return {n: x.contiguous().view(torch.uint8) for n, x in model.state_dict().items()}


def same(one, other):
    mine, others = bits(one), bits(other)
    return mine.keys() == others.keys() and all(torch.equal(x, others[n]) for n, x in mine.items())


def layer_of(model, index=0):
    return model.model.layers[index].mlp.experts.moe_ops_layer


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_every_scheme_of_the_demo_model(scheme, tmp_path):
    """Near the plain model; weights as `load_checkpoint` quantizes and reads them; saved and read.

    transformers reads the saved folder into the same bits, and so does `load_checkpoint`.
    """
    ids, model = tokens(24, 2048), demo(num_hidden_layers=1)
    expected = logits(model, ids).double().log_softmax(-1)
    assert quantized(model, scheme, 2048) is model and not integration.check(model)
    found = logits(model, ids)
    divergence = (expected.exp() * (expected - found.double().log_softmax(-1))).sum(-1).mean()
    assert 0 < divergence < 0.15
    layer = layer_of(model)
    options = {"quant_config": scheme, "params_dtype": torch.bfloat16, "prefix": PREFIX}
    if not SCHEMES[scheme].input_scale_names:
        loaded = moe_ops.FusedMoE(16, 4, 128, 128, **options)
        moe_ops.load_checkpoint(loaded, MODEL, quantize=True, progress=False)
        assert same(layer, loaded)
    model.save_pretrained(tmp_path)
    loaded = moe_ops.FusedMoE(16, 4, 128, 128, **options)
    assert moe_ops.load_checkpoint(loaded, tmp_path, progress=False).is_complete
    assert same(layer, loaded)
    read, report = integration.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    assert same(read, model) and torch.equal(logits(read, ids), found)
    read.save_pretrained(tmp_path / "again")
    first, second = ((p / "config.json").read_text() for p in (tmp_path, tmp_path / "again"))
    assert first == second
    method = json.loads(first)["quantization_config"]["quant_method"]
    own = format_of(SCHEMES[scheme]) is None
    assert method == ("moe_ops" if own else "compressed-tensors")


OWN = ["mxfp6_e2m3", "mxfp6_e3m2", "int4_w4a8_g128"]


def test_only_these_schemes_have_a_form_of_our_own():
    assert [name for name in QUANTIZED if format_of(SCHEMES[name]) is None] == OWN


@pytest.mark.parametrize("module, cls", [
    pytest.param(*found, id=found[1]) for found in decorated_classes()
    if found[1] in ("DeepseekV4Experts", "GptOssExperts", "GraniteMoeExperts", "HYV4Experts",
                    "MixtralExperts", "NemotronHExperts", "Qwen3OmniMoeThinkerTextExperts",
                    "Qwen3VLMoeTextExperts", "Gemma4TextExperts")
])  # fmt: skip
@torch.no_grad()
def test_every_layout_is_saved_by_the_names_of_its_checkpoints(module, cls, tmp_path):
    """Transposed, interleaved, with biases, without a gate; with names and blocks of their own."""
    model, arguments = build(module, cls)
    weights = [weights_of(experts)[:2] for experts in experts_of(model)]
    quantized(model, "int8_w8a16")
    for experts, (w1, w2) in zip(experts_of(model), weights, strict=True):
        stored = weights_of(experts)
        parts = zip(stored.quant_config.weights(*stored[:2]), (w1, w2), strict=True)
        for q, w in parts:
            error = (moe_ops.dequantize_weight(q, "int8_w8a16") - w).abs().amax(2)
            assert (error <= w.abs().amax(2) / 254 * 1.01).all()
    found = model(**arguments)[0]
    model.save_pretrained(tmp_path)
    read, report = integration.from_pretrained(
        tmp_path, auto_class=type(model), output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    assert same(read, model)
    torch.testing.assert_close(read(**arguments)[0], found)
    entries = json.loads((tmp_path / "config.json").read_text())["moe_ops"]
    names = {"MixtralExperts": ("block_sparse_moe.experts", "w1"),
             "NemotronHExperts": ("mixer.experts", "up_proj")}  # fmt: skip
    end, first = names.get(cls, (None, None))
    for entry in entries.values():
        assert end is None or (
            entry["checkpoint"].endswith(end) and entry["projections"]["w1"] == first
        )


def test_a_gate_of_its_own_runs_between_quantized_gemms():
    """Rows of an interleaved weight stay as its gate wants them."""

    def gate(self, rows):
        return nn.functional.mish(rows[..., ::2]) * (rows[..., 1::2] + 0.5)

    experts, plain = with_gate(gate), with_gate(gate)
    experts.is_concatenated = False
    moe_ops.quantize_(experts, "int8_w8a16", progress=False)
    stored = weights_of(experts)
    assert experts.moe_ops_layer.sizes.interleaved
    parts = zip(
        ("gate_up_proj", "down_proj"), stored.quant_config.weights(*stored[:2]), strict=True
    )
    for name, q in parts:
        getattr(plain, name).data = moe_ops.dequantize_weight(q, "int8_w8a16")
    arguments = routed(5)
    expected = integration.moe_ops_experts(plain, *arguments)
    torch.testing.assert_close(experts(*arguments), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_other_implementations_raise(implementation):
    model = quantized(tiny_qwen3("cpu"), "fp8_channel")
    model.set_experts_implementation(implementation)
    with pytest.raises(ValueError, match=f'must be "moe_ops" for experts.*got {implementation!r}'):
        logits(model, tokens())
    model.set_experts_implementation("moe_ops")
    assert logits(model, tokens()).isfinite().all()


def test_some_of_the_modules():
    model = quantized(tiny_qwen3("cpu"), "fp8_channel", modules="*.0.mlp.experts")
    assert layer_of(model).scheme.name == "fp8_channel"
    plain = model.model.layers[1].mlp.experts
    assert plain.gate_up_proj.dtype == torch.float32 and not hasattr(plain, "moe_ops_layer")
    quantized(model, "int4_w4a16_g32", modules=[model_name(1)])
    with pytest.raises(ValueError, match="weights are quantized already .fp8_channel"):
        quantized(model, "fp8_channel")
    with pytest.raises(ValueError, match="modules must fit names .*got 'mlp'"):
        quantized(tiny_qwen3("cpu"), "fp8_channel", modules="mlp")


def model_name(index):
    return f"model.layers.{index}.mlp.experts"


@pytest.mark.parametrize("second", [None, "mxfp8", "mxfp6_e2m3"])
def test_two_schemes_in_one_model(second, tmp_path):
    """Each has its group; experts that are plain are ignored; one without a format changes all."""
    model = quantized(tiny_qwen3("cpu"), "fp8_channel", modules=model_name(0))
    if second is not None:
        quantized(model, second, modules=model_name(1))
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    if second == "mxfp6_e2m3":
        assert said == {"quant_method": "moe_ops"}
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    elif second is None:
        assert said["config_groups"]["group_0"]["targets"] == ["Linear"]
        assert r"re:model\.layers\.1\.mlp\.experts\..*" in said["ignore"]
        assert {"lm_head", "model.layers.0.mlp.gate"} < set(said["ignore"])
    else:
        assert said["format"] == "mixed-precision" and len(said["config_groups"]) == 2
        targets = said["config_groups"]["group_1"]["targets"]
        assert targets == [r"re:model\.layers\.1\.mlp\.experts\..*"]
    read = integration.from_pretrained(tmp_path, dtype=torch.float32)
    assert same(read, model) and torch.equal(logits(read, tokens()), logits(model, tokens()))


def test_generate_and_cast_and_copy():
    model = quantized(tiny_qwen3("cpu"), "int4_w4a16_g32")
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    written = model.generate(tokens(6), **how)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(other, model)
        assert torch.equal(other.generate(tokens(6), **how), written)
    stored = bits(layer_of(model))
    model.to(torch.bfloat16)
    assert all(torch.equal(x, stored[name]) for name, x in bits(layer_of(model)).items())
    assert model.generate(tokens(6), **how).shape == written.shape


@pytest.fixture(scope="module")
def compilations_of_plain_model():
    """The number of compilations of the same model with plain weights."""
    torch._dynamo.reset()
    model, backend = tiny_qwen3("cpu", num_hidden_layers=1), Compilations("eager")
    model.set_experts_implementation("moe_ops")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        compiled(input_ids=tokens(33), use_cache=False)
    return backend.count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "backend", "layers"),
    [
        ("fp8_channel", "aot_eager", 1),
        ("int4_w4a16_g32", "eager", 2),
        pytest.param("nvfp4", "eager", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_compiles_whole_once(scheme, backend, layers, compilations_of_plain_model):
    """No graph break, and one compilation for every length and number of layers."""
    torch._dynamo.reset()
    model = quantized(tiny_qwen3("cpu", num_hidden_layers=layers), scheme)
    backend = Compilations(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    counts = []
    for length in (7, 5, 33):
        ids = tokens(length)
        torch._dynamo.mark_dynamic(ids, 1)
        with torch.no_grad():
            found = compiled(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, logits(model, ids), rtol=0, atol=1e-4)
        counts.append(backend.count)
    assert counts == [compilations_of_plain_model] * 3


def test_one_layer_at_a_time(monkeypatch):
    """Plain weights are gone before the next layer is quantized."""
    model = tiny_qwen3("cpu", num_hidden_layers=4)
    plain = [weakref.ref(e.gate_up_proj.untyped_storage()) for e in experts_of(model)]
    params = [weakref.ref(e.down_proj) for e in experts_of(model)]
    alive, original = [], _quantized.fill_quantized

    def counted(*arguments):
        alive.append((sum(r() is not None for r in params), len(plain)))
        original(*arguments)

    monkeypatch.setattr(_quantized, "fill_quantized", counted)
    quantized(model, "fp8_channel")
    assert [count for count, _ in alive] == [4, 3, 2, 1]
    assert not any(r() for r in params)


def test_peaks_are_those_of_the_model():
    """The largest input of the experts, and of the down projection; plain weights stay as is."""
    model, seen = tiny_qwen3("cpu"), []
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(lambda m, args: seen.append(args[0].abs().max()))
    gates = []
    original = type(experts)._apply_gate
    model.set_experts_implementation("eager")
    experts._apply_gate = lambda rows: gates.append(original(experts, rows)) or gates[-1]
    with torch.no_grad():
        for length in (9, 30):
            model.set_experts_implementation("batched_mm")
            model(tokens(length))
    del experts._apply_gate
    peaks = [max(seen), max(g.abs().max() for g in gates)]

    def run(m):
        m(tokens(9))
        m(tokens(30))

    moe_ops.quantize_(model, "mxfp4_w4a8", calibrate=run, progress=False)
    layer = layer_of(model, 1)
    for scale, peak in zip((layer.w13_input_scale, layer.w2_input_scale), peaks, strict=True):
        torch.testing.assert_close(scale, (peak / 448).repeat(8), rtol=1e-4, atol=0)
    assert "forward" not in experts.__dict__


def test_nothing_changes_unless_everything_can():
    model = tiny_qwen3("cpu")
    before = bits(model)
    hooks = [len(e._forward_pre_hooks) for e in experts_of(model)]

    def half(m):
        m.model.layers[0].mlp(torch.randn(1, 3, 32))

    for how, match in (
        ({"scheme": "nvfp4", "calibrate": half}, "positive and finite, got 0.0 for GEMM 1"),
        ({"scheme": "nvfp4", "calibrate": lambda m: 1 / 0}, "division by zero"),
        ({"scheme": "nvfp4", "calibrate": None}, "calibrate must be a function"),
    ):
        with pytest.raises((ValueError, ZeroDivisionError), match=match):
            moe_ops.quantize_(model, progress=False, **how)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 2, 1] = torch.inf
    with pytest.raises(ValueError, match="layers.1.mlp.experts must have finite .* w2 of expert 3"):
        quantized(model, "fp8_channel")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.copy_(
            before[f"{model_name(1)}.down_proj"].view(torch.float32)
        )
    assert bits(model).keys() == before.keys()
    assert all(torch.equal(x, before[name]) for name, x in bits(model).items())
    assert [len(e._forward_pre_hooks) for e in experts_of(model)] == hooks
    assert not hasattr(model, "hf_quantizer")


def test_experts_that_are_not_dispatched(tmp_path):
    config = transformers.Llama4TextConfig(
        hidden_size=32, intermediate_size=24, intermediate_size_mlp=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, vocab_size=64,
        num_local_experts=2, interleave_moe_layer_step=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config)
    with pytest.raises(NotImplementedError, match="Llama4.*not dispatched by transformers"):
        quantized(model, "fp8_channel")
    model = tiny_qwen3("cpu")
    model.hf_quantizer = transformers.quantizers.HfQuantizer.__new__(OtherQuantizer)
    with pytest.raises(ValueError, match="the model is quantized already, by other"):
        quantized(model, "fp8_channel")


class OtherQuantizer(transformers.quantizers.HfQuantizer):
    class quantization_config:  # noqa: N801
        quant_method = "other"

    is_serializable = is_trainable = True


def test_a_plain_folder_is_not_read():
    with pytest.raises(ValueError, match="config must have an entry 'moe_ops'.*got None"):
        integration.from_pretrained(MODEL)


def test_arguments_are_kept_or_refused(tmp_path):
    """What transformers takes and a saved model cannot have; a caller's configuration is copied."""
    model, folder = quantized(tiny_qwen3("cpu"), "fp8_channel"), tmp_path / "inside"
    model.save_pretrained(folder)
    refused = {"experts_implementation": ("grouped_mm", {"": "moe_ops"}, ""), "variant": ["fp16"],
               "quantization_config": [{"load_in_8bit": True}], "gguf_file": ["model.gguf"],
               "state_dict": [{}], "key_mapping": [{}], "tp_plan": ["auto"]}  # fmt: skip
    for name, values in refused.items():
        error = NotImplementedError if name.startswith("tp") else ValueError
        for value in values:
            with pytest.raises(error, match=f"^{name} must be .*, got "):
                integration.from_pretrained(folder, **{name: value})
    config = transformers.AutoConfig.from_pretrained(folder)
    before, how = config.to_dict(), {"dtype": torch.float32, "quantization_config": None}
    named, none = {"experts_implementation": "moe_ops"}, {"experts_implementation": None}
    inside = none | {"subfolder": "inside"}
    for where, more in ((folder, named | {"config": config}), (tmp_path, inside)):
        read = integration.from_pretrained(where, **how, **more)
        assert same(read, model) and read.config._experts_implementation == "moe_ops"
    assert config.to_dict() == before


def test_a_broken_folder_is_not_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    quantized(tiny_qwen3("cpu"), "fp8_channel").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(file)
    del tensors[f"{PREFIX}.3.up_proj.weight_scale"]
    safetensors.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 missing \(w13_weight_scale\[3\].w3\)"):
        integration.from_pretrained(tmp_path)


def test_layers_and_experts_in_one_module():
    """A `FusedMoE` beside experts of transformers; what holds quantized weights is no target."""
    model = nn.ModuleDict({"own": moe_ops.FusedMoE(4, 2, 32, 32), "theirs": tiny_qwen3("cpu")})
    quantized(model, "int8_channel")
    assert model["own"].scheme.name == layer_of(model["theirs"]).scheme.name == "int8_channel"
    with pytest.raises(ValueError, match="FusedMoE 'own': its weights are quantized already"):
        quantized(model, "int8_channel")
    assert model["theirs"].hf_quantizer.is_serializable()
    assert QWEN3["num_hidden_layers"] == sum(hasattr(m, "moe_ops_layer") for m in model.modules())
