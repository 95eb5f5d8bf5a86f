"""Folders whose experts are loaded into host memory one after the other: peaks of memory, bits."""

import json

import pytest
import torch
from live_memory import LiveBytes
from table_items import every_row

import moe_ops

transformers = pytest.importorskip("transformers")

from tiny_transformers import build, fill, tiny_qwen3  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _by_expert  # noqa: E402
from moe_ops.offload.targets import FINDERS  # noqa: E402
from moe_ops.quantization.chosen import found_in  # noqa: E402
from moe_ops.residency import host  # noqa: E402

E, SLOTS = 32, 3
IDS = torch.arange(22).view(2, 11) * 7 % 64
SIZES = {"num_experts": E, "hidden_size": 64, "moe_intermediate_size": 64}
GPT_OSS = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "num_local_experts": E,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


def qwen3():
    return tiny_qwen3("cpu", **SIZES)


def gpt_oss():
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**GPT_OSS)).eval()
    fill(model)
    return model


def saved(make, form, folder):
    """A model, and a folder that it was saved to."""
    model = make()
    model.set_experts_implementation("moe_ops")
    if form is not None:
        moe_ops.quantize_(model, form, progress=False)
    model.save_pretrained(folder)
    return model, folder


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@every_row("form", [None, "int4_w4a16_g32", "fp8_channel"])
@every_row("make", [qwen3, gpt_oss])
def test_no_expert_is_twice_on_the_host(make, form, tmp_path_factory, on_cpu):
    model, folder = saved(make, form, tmp_path_factory.mktemp("model"))
    expected = logits(model)
    with LiveBytes() as memory:
        loaded = integration.from_pretrained(folder, resident_experts=SLOTS)
    assert torch.equal(logits(loaded), expected)
    residencies = [t.host_experts().residency for t in found_in(loaded, FINDERS)]
    assert [r.num_slots for r in residencies] == [SLOTS] * 2
    one = residencies[0].expert_bytes
    inside = {p.data_ptr() for r in residencies for p in r.memory_of()}
    rest = sum(p.nbytes for p in loaded.parameters() if p.data_ptr() not in inside)
    held = 2 * (E + SLOTS) * one + rest
    assert memory.peak <= held + 4 * one, (memory.peak - held) / one


@pytest.fixture
def held(monkeypatch):
    """Names of the modules that were loaded expert by expert."""
    names, own = [], _by_expert._hold

    def noted(target, *rest):
        names.append(target.name)
        own(target, *rest)

    monkeypatch.setattr(_by_expert, "_hold", noted)
    return names


def assert_same_state(model, loaded):
    own = loaded.state_dict()
    assert own.keys() == model.state_dict().keys()
    for name, x in model.state_dict().items():
        assert torch.equal(x, own[name]), name


@every_row("module", ["mixtral", "granitemoe", "nemotron_h", "inkling", "ernie4_5_vl_moe"])
def test_families_with_conversions_of_their_own(module, tmp_path_factory, on_cpu, held):
    """Names, orders and layouts of checkpoints that transformers converts."""
    classes = {"mixtral": "MixtralExperts", "granitemoe": "GraniteMoeExperts",
               "nemotron_h": "NemotronHExperts", "inkling": "InklingExperts",
               "ernie4_5_vl_moe": "Ernie4_5_VLMoeMoeExperts"}  # fmt: skip
    held.clear()
    model, _ = build(f"transformers.models.{module}.modeling_{module}", classes[module])
    folder = tmp_path_factory.mktemp(module)
    model.save_pretrained(folder)
    loaded = integration.from_pretrained(folder, resident_experts=4, auto_class=type(model))
    assert held == [target.name for target in found_in(loaded, FINDERS)]
    assert_same_state(model, loaded)
    loaded.save_pretrained(folder / "again")
    again = integration.from_pretrained(
        folder / "again", resident_experts=0.5, auto_class=type(model)
    )
    assert_same_state(model, again)


def test_fp8_experts_keep_their_blocks(tmp_path, monkeypatch, held):
    """As on a machine with a GPU, where transformers does not dequantize fp8."""
    quantizer = transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = qwen3().bfloat16()
    model.save_pretrained(tmp_path)
    safetensors = pytest.importorskip("safetensors.torch")
    state, plain = {}, safetensors.load_file(tmp_path / "model.safetensors")
    for name, x in plain.items():
        state[name] = x
        if ".experts." in name:
            q = moe_ops.quantize_weight(x[None], "fp8_block32")
            state[name] = q.data[0].contiguous()
            state[name.replace(".weight", ".weight_scale_inv")] = q.scale[0].contiguous()
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moe_ops"
    )
    with LiveBytes() as memory:
        loaded = integration.from_pretrained(tmp_path, resident_experts=SLOTS)
    assert len(held) == 2
    routed = torch.randn(5, 64).bfloat16(), torch.arange(10).view(5, 2), torch.full((5, 2), 0.5)
    for given, own in zip(plain.model.layers, loaded.model.layers, strict=True):
        assert given.mlp.experts.gate_up_proj.dtype == torch.float8_e4m3fn
        with torch.no_grad():
            expected = given.mlp.experts(*routed)
            assert expected.any() and torch.equal(own.mlp.experts(*routed), expected)
    one = loaded.model.layers[0].mlp.experts.moe_ops_host.residency.expert_bytes
    rest = sum(p.nbytes for name, p in loaded.named_parameters() if ".experts." not in name)
    assert memory.peak <= 2 * (E + SLOTS) * one + rest + 4 * one


def test_mxfp4_of_gpt_oss_stays_mxfp4(tmp_path, on_cpu):
    """With the bits of the model that transformers dequantizes, in a quarter of its memory."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = gpt_oss().bfloat16()
    model.set_experts_implementation("moe_ops")
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if name.endswith("_proj") and ".experts." in name]:
        q = moe_ops.quantize_weight(state.pop(name).mT.contiguous(), "mxfp4_w4a16")
        state[f"{name}_blocks"] = q.data.unflatten(2, (-1, 16)).contiguous()
        state[f"{name}_scales"] = q.scale
        model.get_parameter(name).data.copy_(moe_ops.dequantize_weight(q, "mxfp4_w4a16").mT)
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model.save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", experts_implementation="moe_ops"
    )
    with LiveBytes() as memory:
        loaded = integration.from_pretrained(tmp_path, resident_experts=SLOTS)
    assert torch.equal(logits(loaded), logits(plain))
    layers = [t.module for t in found_in(loaded, FINDERS)]
    assert {layer.scheme.name for layer in layers} == {"mxfp4_w4a16"}
    one = layers[0].host_experts.residency.expert_bytes
    rest = sum(p.nbytes for name, p in loaded.named_parameters() if ".experts." not in name)
    assert memory.peak <= 2 * (E + SLOTS) * one + rest + 4 * one
    loaded.save_pretrained(tmp_path / "again")
    again = integration.from_pretrained(tmp_path / "again", resident_experts=0.5)
    assert torch.equal(logits(again), logits(plain))


def test_what_cannot_be_loaded_expert_by_expert_is_loaded_whole(
    tmp_path, on_cpu, held, monkeypatch
):
    """As if transformers made something else of one expert's tensors."""
    model, folder = saved(qwen3, None, tmp_path)
    monkeypatch.setattr(_by_expert._Part, "of", lambda *_: {})
    loaded = integration.from_pretrained(folder, resident_experts=SLOTS)
    assert held == [] and torch.equal(logits(loaded), logits(model))
    assert moe_ops.offload_stats(loaded).misses > 0


def test_errors_come_before_anything_is_loaded(tmp_path, on_cpu, held, monkeypatch):
    _, folder = saved(qwen3, None, tmp_path / "plain")
    _, quantized = saved(qwen3, "int4_w4a16_g32", tmp_path / "int4")
    for path in (folder, quantized):
        with pytest.raises(ValueError, match="resident_experts must be an int from top_k = 2 to"):
            integration.from_pretrained(path, resident_experts=1)
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    size = 2 * E * 3 * 64 * 64 * 4
    with pytest.raises(RuntimeError, match=f"{size} bytes, got 1000 bytes available"):
        integration.from_pretrained(folder, resident_experts=3)
    with pytest.raises(RuntimeError, match=r"all experts, \d+ bytes, got 1000 bytes"):
        integration.from_pretrained(quantized, resident_experts=3)
    assert not held
    monkeypatch.setattr(host, "available_bytes", lambda: None)
    everything = integration.from_pretrained(folder, resident_experts=1.0)
    assert not held and all(t.host_experts() is None for t in found_in(everything, FINDERS))
