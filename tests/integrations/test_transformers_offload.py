"""transformers models with experts in host memory: bits, names, moves, saved folders, errors."""

import copy
import pickle

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from table_items import every_row

import moe_ops

transformers = pytest.importorskip("transformers")

import fp8_transformers as fp8  # noqa: E402
from tiny_transformers import tiny_qwen3, with_gate  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations._offloaded import HOST  # noqa: E402

IDS = torch.arange(22).view(2, 11) * 7 % 64
FORMS = (None, "int4_w4a16_g32", "fp8_channel")


def tiny(form=None, **changes):
    model = tiny_qwen3("cpu", **changes).eval()
    model.set_experts_implementation("moe_ops")
    return model if form is None else moe_ops.quantize_(model, form, progress=False)


def on_host(model, resident=3):
    return moe_ops.offload_(copy.deepcopy(model), resident=resident, progress=False)


@torch.no_grad()
def logits(model):
    return model(IDS.to(model.device)).logits


@every_row("form", FORMS)
def test_results_names_and_moves(form):
    model = tiny(form)
    other, expected = on_host(model), logits(model)
    assert torch.equal(logits(other), expected)
    stats = moe_ops.offload_stats(other)
    assert stats.misses == 16 and stats.waves == 6
    state = other.state_dict()
    assert [*state] == [*model.state_dict()]
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    for made in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert torch.equal(logits(made), expected)
    double = {name: x * 2 if x.dtype == torch.float32 else x for name, x in state.items()}
    for module in (model, other):
        module.load_state_dict(double)
    assert torch.equal(logits(other), logits(model))
    assert torch.equal(logits(other.to(torch.bfloat16)), logits(model.to(torch.bfloat16)))
    back = moe_ops.offload_(other, resident=1.0, progress=False)
    assert moe_ops.offload_stats(back) == (0, 0, 0, 0)
    assert torch.equal(logits(back), logits(model))


def test_quantized_in_host_memory():
    """All experts are, and not those in the slots; the module is as one quantized before."""
    model, form = tiny(), "int4_w4a16_g32"
    other = moe_ops.quantize_(on_host(model), form, progress=False)
    expected = logits(moe_ops.quantize_(model, form, progress=False))
    assert torch.equal(logits(other), expected)
    assert moe_ops.offload_stats(other).misses > 0
    assert torch.equal(logits(copy.deepcopy(other)), expected)
    assert torch.equal(logits(other.to(torch.bfloat16)), logits(model.to(torch.bfloat16)))


def test_calibrated_in_host_memory(device):
    """Static scales do not depend on where the experts are: on a GPU the tokens are elsewhere."""
    model = tiny()
    other = on_host(model).to(device)
    for each in (model.to(device), other):
        moe_ops.quantize_(each, "fp8_tensor_static", calibrate=logits, progress=False)
    assert torch.equal(logits(other), logits(model))


def test_parametrizations_are_refused():
    """PEFT's own forward makes them, and what they compute would not be in the slots."""
    model = on_host(tiny())
    experts = model.model.layers[0].mlp.experts
    parametrize.register_parametrization(experts, "down_proj", torch.nn.Identity())
    with pytest.raises(NotImplementedError, match=r"adapt\(model\) has seen.*\['down_proj'\]"):
        logits(model)


def squared(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return torch.tanh(gate) ** 2 * up


def test_modules_with_their_own_weights():
    """A gate that this library does not have, and fp8 in blocks, of tensors, and packed fp4."""
    modules = [with_gate(squared), fp8.experts(block_size=(32, 32)), fp8.experts(block_size=None)]
    for module in modules:
        module.config._experts_implementation = "moe_ops"
        with torch.no_grad():
            for p in module.parameters() if module is modules[0] else ():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / 4)
        other = on_host(module)
        assert HOST in other.__dict__ and type(other).__name__ == type(module).__name__
        experts, width = module.down_proj.shape[0], module.down_proj.shape[1]
        dtype = torch.float32 if module is modules[0] else torch.bfloat16
        x, ids = torch.randn(5, width).to(dtype), torch.arange(10).view(5, 2) % experts
        with torch.no_grad():
            for rows in (1, 5):
                given = (x[:rows], ids[:rows], torch.full((rows, 2), 0.5))
                assert torch.equal(other(*given), module(*given))


def test_generation_and_one_compiled_graph():
    model = tiny()
    other = on_host(model, 2)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(other.generate(IDS, **how), model.generate(IDS, **how))
    torch._dynamo.reset()
    experts, expected = (m.model.layers[0].mlp.experts for m in (other, model))
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(5, experts.down_proj.shape[1])
    ids, weights = torch.arange(10).view(5, 2) % 8, torch.rand(5, 2)
    with torch.no_grad():
        assert torch.equal(compiled(x, ids, weights), expected(x, ids, weights))


@every_row("form", FORMS)
def test_folders_that_transformers_and_this_library_saved(form, tmp_path):
    model = tiny(form)
    folder = tmp_path / str(form)
    model.save_pretrained(folder)
    loaded = integration.from_pretrained(folder, resident_experts=3)
    model.to(loaded.device)
    assert torch.equal(logits(loaded), logits(model))
    assert moe_ops.offload_stats(loaded).misses == 16
    loaded.save_pretrained(tmp_path / f"{form} again")
    again = integration.from_pretrained(tmp_path / f"{form} again", resident_experts=0.5)
    assert torch.equal(logits(again), logits(model))


@every_row(
    ("arguments", "error", "text"),
    [
        ({"resident_experts": 1}, ValueError, "resident_experts must be an int from top_k = 2"),
        ({"resident_experts": "3 MB"}, ValueError, "resident_experts must be an int"),
        ({"resident_experts": 3, "device_map": "auto"}, NotImplementedError, "one device"),
        ({"resident_experts": 3, "tp_plan": "auto"}, NotImplementedError, "tp_plan"),
        ({"resident_experts": 3, "experts_implementation": "eager"}, ValueError, "'moe_ops'"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(arguments, error, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    tiny().save_pretrained(folder)
    with pytest.raises(error, match=text):
        integration.from_pretrained(folder, **arguments)


def test_modules_that_are_refused_before_anything_moves():
    model = tiny()
    model.set_experts_implementation("eager")
    with pytest.raises(NotImplementedError, match="its experts_implementation is 'eager'"):
        on_host(model)
    for form in FORMS:
        with pytest.raises(ValueError, match="resident must be an int from top_k = 2 to 8"):
            on_host(tiny(form), 1)
    static = fp8.experts(block_size=(32, 32), activation_scheme="static")
    with pytest.raises(NotImplementedError, match="static activation scales"):
        on_host(static)
    with pytest.raises(NotImplementedError, match="must not be moved to meta"):
        on_host(tiny()).to("meta")
    engine = type("Engine", (torch.nn.Module,), {"__module__": "vllm.model"})()
    with pytest.raises(NotImplementedError, match="model must not be one of vLLM"):
        moe_ops.offload_(torch.nn.Sequential(engine), resident=3)
