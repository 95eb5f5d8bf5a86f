"""Saved transformers models: parts that were quantized, records that do not fit, broken files."""

import copy
import json
import pickle

import pytest
import torch

import moe_ops

transformers = pytest.importorskip("transformers")

from tiny_transformers import (  # noqa: E402
    build,
    decorated_classes,
    fill,
    llama4_blocks,
    tiny_llama4,
    tiny_qwen3,
)

import moe_ops.integrations.transformers as integration  # noqa: E402

PREFIX = "model.layers.0.mlp.experts"


def ids():
    return torch.arange(26).view(2, 13)


@torch.no_grad()
def test_an_adapted_model_is_pickled():
    model, x = tiny_llama4(), torch.randn(5, 32)
    integration.adapt(model)
    copied = pickle.loads(pickle.dumps(model))
    assert integration.check(copied) == [] == integration.adapt(copied)
    first, second = (llama4_blocks(each)[0] for each in (model, copied))
    assert all(map(torch.equal, first(x), second(x)))


def quantized_model():
    return moe_ops.quantize_(tiny_qwen3("cpu"), "fp8_channel", progress=False)


@torch.no_grad()
@pytest.mark.parametrize(
    "part", ["model", "model.layers", "model.layers.1", "model.layers.1.mlp.experts"]
)
def test_a_model_of_which_a_part_was_quantized(part, tmp_path):
    """The model around the part is saved as one that was passed whole."""
    model = tiny_qwen3("cpu")
    moe_ops.quantize_(model.get_submodule(part), "fp8_channel", progress=False)
    model.save_pretrained(tmp_path)
    read, report = integration.from_pretrained(
        tmp_path, dtype=model.dtype, output_loading_info=True
    )
    assert not any(report.values()), report
    assert torch.equal(read(ids()).logits, model(ids()).logits)
    record = json.loads((tmp_path / "config.json").read_text())["moe_ops"]
    assert list(record) == [n for n, m in model.named_modules() if hasattr(m, "moe_ops_layer")]


def test_models_without_quantized_experts_have_no_quantizer():
    model = tiny_qwen3("cpu")
    assert not hasattr(model, "hf_quantizer")
    moe_ops.quantize_(model.model.layers[1], "fp8_channel", progress=False)
    assert model.hf_quantizer.is_serializable()


def records(record):
    """Records of the experts that do not fit the model or its files, and what the error names."""
    first, second = record
    entry = record[first]
    yield {second: record[second]}, f"none for {first} "
    yield record | {"model.layers.9.mlp.experts": entry}, "got 'model.layers.9.mlp.experts'"
    yield record | {"model.layers.0.mlp.gate": entry}, "got 'model.layers.0.mlp.gate'"
    yield record | {second: entry}, f"none for {second} "
    yield record | {first: {"checkpoint": first}}, f"a scheme and a checkpoint for {first}, got"
    yield record | {first: 3}, f"a scheme and a checkpoint for {first}, got 3"


def test_records_that_do_not_fit(tmp_path):
    """Experts that a record lacks would be read as plain weights, without their scales."""
    quantized_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for record, match in records(config["moe_ops"]):
        (tmp_path / "config.json").write_text(json.dumps(config | {"moe_ops": record}))
        with pytest.raises(ValueError, match=f"config.moe_ops must .*{match}"):
            integration.from_pretrained(tmp_path)


@pytest.mark.parametrize("size", ["3KB", "1GB"])
def test_files_that_are_cut_off_are_named(size, tmp_path):
    """In the first file, in the last one, and in the index; below a subfolder too."""
    folder = tmp_path / "inside"
    quantized_model().save_pretrained(folder, max_shard_size=size)
    files = sorted(folder.glob("model*"))
    assert len(files) == 1 if size == "1GB" else len(files) > 3
    for file in {files[0], files[len(files) // 2], files[-1]}:
        whole = file.read_bytes()
        header = int.from_bytes(whole[:8], "little")
        for length in (0, 5, min(8 + header // 2, len(whole) // 2), len(whole) - 2):
            file.write_bytes(whole[:length])
            for place in ({"path": folder}, {"path": tmp_path, "subfolder": "inside"}):
                with pytest.raises(ValueError, match=rf"{file.name} must be (a whole|an index)"):
                    integration.from_pretrained(**place)
        file.write_bytes(whole)
    integration.from_pretrained(folder)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["int8_w8a16", "mxfp6_e2m3"])
@pytest.mark.parametrize("cls", ["MixtralExperts", "NemotronHExperts"])
def test_saved_by_the_names_of_modules(cls, scheme, tmp_path):
    """``save_original_format=False``, for models whose plain checkpoints have other names."""
    model, arguments = build(*next(found for found in decorated_classes() if found[1] == cls))
    moe_ops.quantize_(model, scheme, progress=False)
    model.save_pretrained(tmp_path, save_original_format=False)
    read, report = integration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(read(**arguments)[0], model(**arguments)[0])
    for name, experts in model.named_modules():
        stored = getattr(experts, "moe_ops_layer", None)
        if stored is not None:
            layer = copy.deepcopy(stored)
            for parameter in layer.parameters():
                parameter.zero_()
            moe_ops.load_checkpoint(layer, tmp_path, prefix=name, progress=False)
            assert all(map(torch.equal, layer.parameters(), stored.parameters()))
    read.save_pretrained(tmp_path / "again")
    again = integration.from_pretrained(tmp_path / "again")
    assert torch.equal(again(**arguments)[0], model(**arguments)[0])


SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_heads": 2, "depth": 1, "patch_size": 4}


@torch.no_grad()
def test_experts_that_share_a_list_in_the_plain_checkpoint(tmp_path):
    """Ernie 4.5 VL numbers text and vision experts as one; saved are both, each by its own name."""
    found = [each for each in decorated_classes() if each[1] == "Ernie4_5_VLMoeMoeExperts"]
    text = build(*found[0])[0].config
    vision = transformers.models.ernie4_5_vl_moe.Ernie4_5_VLMoeVisionConfig(**SMALL)
    config = transformers.Ernie4_5_VLMoeConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict()
    )
    model = transformers.Ernie4_5_VLMoeForConditionalGeneration(config).eval()
    fill(model)
    moe_ops.quantize_(model, "int8_w8a16", progress=False)
    model.save_pretrained(tmp_path)
    read = integration.from_pretrained(tmp_path, auto_class=type(model))
    assert torch.equal(read(ids() + 3).logits, model(ids() + 3).logits)
    record = json.loads((tmp_path / "config.json").read_text())["moe_ops"]
    assert len({entry["checkpoint"] for entry in record.values()}) == len(record) == 4


def test_the_text_model_inside_of_a_saved_one_is_not_read(tmp_path):
    """transformers makes it for ``AutoModelForCausalLM``, with the part of the config for text."""
    found = next(each for each in decorated_classes() if each[1] == "Qwen3_5MoeExperts")
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
    config = transformers.Qwen3_5MoeConfig(
        text_config=build(*found)[0].config.to_dict(), vision_config=vision
    )
    model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    moe_ops.quantize_(model, "int8_w8a16", progress=False).save_pretrained(tmp_path)
    rule = "auto_class must make the model that was saved, .* got Qwen3_5MoeForCausalLM with"
    with pytest.raises(ValueError, match=rule):
        integration.from_pretrained(tmp_path)
    integration.from_pretrained(tmp_path, auto_class=type(model))


@torch.no_grad()
def test_weights_that_accelerate_moves(tmp_path):
    """Every forward brings them in and takes them out again, also if it raises."""
    accelerate = pytest.importorskip("accelerate")
    model = quantized_model()
    expected = model(ids()).logits
    model.save_pretrained(tmp_path / "model")
    accelerate.cpu_offload(model, execution_device="cpu")
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match='must be "moe_ops"'):
        model(ids())
    model.set_experts_implementation("moe_ops")
    for _ in range(2):
        assert torch.equal(model(ids()).logits, expected)
        assert model.model.layers[0].mlp.experts.moe_ops_layer.w13_weight.is_meta
    parts = ("embed_tokens", "rotary_emb", "layers.0", "norm")
    places = {**{f"model.{x}": "cpu" for x in parts}, "lm_head": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ValueError, match="device_map must .*got model.layers.1.mlp.experts off"):
        integration.from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
        )
