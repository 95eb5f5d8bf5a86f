"""PEFT's adapters over quantized experts that were saved and loaded; placeholders of weights."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

transformers = pytest.importorskip("transformers")

import fp8_transformers  # noqa: E402
from peft_stand_ins import (  # noqa: E402
    KINDS,
    ParamWrapper,
    RealPeft,
    experts_of,
    kind_of,
    model_with_adapters,
    own_parameters,
    wrappers,
)
from tiny_transformers import tiny_qwen3  # noqa: E402

import moe_ops  # noqa: E402
import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _saving  # noqa: E402

SCHEME = "int4_w4a16_g32"
ADVICE = r"quantize_ has quantized: call moe_ops.*adapt\(model\) after PEFT has added adapters"


@pytest.fixture(params=KINDS)
def kind(request):
    return kind_of(request.param)


@pytest.fixture
def folder(tmp_path):
    """A quantized model, saved without adapters."""
    model = moe_ops.quantize_(tiny_qwen3("cpu"), SCHEME, progress=False)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def base(folder):
    return integration.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logits(model):
    return model(torch.arange(3, 14)[None]).logits


def test_adapters_are_trained_over_a_loaded_base_and_loaded_over_another(kind, folder, tmp_path):
    expected = logits(base(folder))
    model = model_with_adapters(kind, "cpu", base(folder))
    reasons = {found.reason for found in integration.check(model)}
    assert len(reasons) == 1 and "adapt(model) runs them" in reasons.pop()
    assert len(integration.adapt(model)) == 2 and not integration.check(model)
    with kind.disabled(model):
        assert torch.equal(logits(model), expected)
    factors = [w.lora_A["a"].weight for w in wrappers(model)]
    factors += [w.lora_B["a"].weight for w in wrappers(model)]
    optimizer = torch.optim.AdamW([p.requires_grad_() for p in factors], 1e-2)
    ids, losses = torch.arange(3, 14)[None], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    trained = logits(model)
    assert not torch.equal(trained, expected)
    kind.save(model, tmp_path)
    loaded = kind.load(base(folder), tmp_path)
    integration.adapt(loaded)
    for each in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(logits(each), trained)
    unloaded = kind.unload(loaded)
    unloaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(base(tmp_path / "again")), expected)


def test_a_model_with_modules_of_peft_is_not_saved(kind, folder, tmp_path):
    model = model_with_adapters(kind, "cpu", base(folder))
    found = next(m for m in model.modules() if isinstance(m, transformers.PreTrainedModel))
    for _ in range(2):
        with pytest.raises(ValueError, match="on a quantized model without mod.*Param"):
            found.save_pretrained(tmp_path / "new")
        integration.adapt(model)
    found = base(folder)
    found.lm_head.original_module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="without modules of PEFT .* got Linear 'lm_head'"):
        found.save_pretrained(tmp_path / "new")


def test_transformers_own_adapters_are_saved_alone(folder):
    """``model.add_adapter`` makes ``save_pretrained`` save adapters: the rest stays as it is."""
    model = base(folder)
    record = copy.deepcopy(model.config.moe_ops)
    model._hf_peft_config_loaded = True
    model.model.layers[0].mlp.experts = ParamWrapper(experts_of(model)[0], "down_proj")
    assert _saving.MoeOpsQuantizer.get_state_dict_and_metadata(None, model) == (None, {})
    assert model.config.moe_ops == record


def test_without_adapt(kind, folder):
    """What PEFT's own forward and merge do with the weights says what to do instead."""
    experts = experts_of(base(folder))[0]

    class Sum(nn.Module):
        def forward(self, w):
            return torch.baddbmm(w, w.mT, w)

    with pytest.raises(NotImplementedError, match=f"down_proj of experts must .*{ADVICE}"):
        parametrize.register_parametrization(experts, "down_proj", Sum())
    with pytest.raises(NotImplementedError, match=f"gate_up_proj of experts must .*{ADVICE}"):
        experts.gate_up_proj.data += 1
    model = model_with_adapters(kind, "cpu", base(folder))
    with pytest.raises(NotImplementedError, match=ADVICE):
        kind.merge(model)
    if isinstance(kind, RealPeft):
        with pytest.raises(NotImplementedError, match=ADVICE):
            logits(model)


@pytest.mark.parametrize("cls", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_placeholders_have_a_shape_and_nothing_else(cls):
    if cls.startswith("Qwen"):
        model = tiny_qwen3("cpu").bfloat16()
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 16, "num_local_experts": 4}
        small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = transformers.GptOssConfig(**sizes, **small, vocab_size=64, head_dim=16)
        model = transformers.GptOssForCausalLM(config)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
    experts = experts_of(model)[0]
    plain, before = type(experts), {n: p for n, p in own_parameters(experts).items() if p.dim() > 2}
    moe_ops.quantize_(model, "fp8_channel", progress=False)
    assert isinstance(experts, plain) and type(experts).__name__ == plain.__name__
    assert own_parameters(experts).keys() == before.keys()
    assert not list(experts.named_parameters(recurse=False))
    layer = [*experts.moe_ops_layer.parameters()]
    assert [*map(id, experts.parameters())] == [*map(id, layer)]
    names = {*model.state_dict(), *dict(model.named_parameters())}
    for name, weight in before.items():
        found = model.get_parameter(f"model.layers.0.mlp.experts.{name}")
        assert (found.shape, found.dtype) == (weight.shape, weight.dtype)
        assert found.device == layer[0].device and not found.requires_grad
        assert f"model.layers.0.mlp.experts.{name}" not in names
        assert name in repr(found)
    model.to("meta")
    assert experts.down_proj.device.type == "meta"


@torch.no_grad()
def test_a_conversion_that_asks_for_a_parameter(tmp_path):
    """Qwen3-VL-MoE: its conversion reads the shape of the model's own parameter."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {
        **sizes, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "vocab_size": 96,
        "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
        "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    moe_ops.quantize_(model, "fp8_channel", progress=False)
    expected = logits(model)
    assert expected.isfinite().all()
    how = {"auto_class": transformers.AutoModelForImageTextToText, "dtype": torch.float32}
    for folder in (tmp_path / "first", tmp_path / "second"):
        model.save_pretrained(folder)
        model = integration.from_pretrained(folder, **how).eval()
        assert torch.equal(logits(model), expected)


def test_fp8_experts_of_transformers():
    """Their merge says that it cannot; without `adapt`, PEFT's sums would leave out the scales."""
    wrapper = ParamWrapper(fp8_transformers.experts(block_size=(32, 32)), "down_proj")
    experts = wrapper.base_layer
    (found,) = integration.check(wrapper)
    assert found.name == "base_layer" and "adapt(model) runs them" in found.reason
    assert integration.adapt(wrapper) == [""] and not integration.check(wrapper)
    for method in (wrapper.merge, wrapper.unmerge):
        with pytest.raises(NotImplementedError, match="must be called with weights that are not q"):
            method()

    class Same(nn.Module):
        def forward(self, w):
            return w

    parametrize.register_parametrization(experts, "down_proj", Same(), unsafe=True)
    x, ids = torch.ones(3, 160), torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(NotImplementedError, match=r"PEFT adds adapters to \(adapt\(model\) runs"):
        integration.moe_ops_fp8_experts(experts, x, ids, torch.ones(3, 1))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"block_size": (32, 32), "activation_scheme": "static"}, "dynamic scales of activations"),
        ({"block_size": (24, 24)}, "must have supported experts, got FP8Experts with weight_block"),
    ],
)
def test_fp8_experts_that_cannot_be_adapted_leave_the_others_as_they_are(arguments, match):
    kinds = ({"block_size": (32, 32)}, arguments)
    experts = [ParamWrapper(fp8_transformers.experts(**kind), "down_proj") for kind in kinds]
    with pytest.raises(NotImplementedError, match=match):
        integration.adapt(nn.ModuleList(experts))
    assert not any({"forward", "merge"} & set(wrapper.__dict__) for wrapper in experts)
