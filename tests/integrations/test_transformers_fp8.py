"""transformers' fp8 experts through "moe_ops": as exact as the model's own path, compiled whole."""

import copy
import re

import pytest
import torch
from compilations import Compilations
from conftest import INTERPRETED
from pairwise import half_exhaustive
from torch import nn

transformers = pytest.importorskip("transformers")

import fp8_transformers as fp8  # noqa: E402
import tiny_transformers  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _forwards, _fp8  # noqa: E402
from moe_ops.testing.compare import assert_layer_matches  # noqa: E402


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    fp8.install(monkeypatch)


BLOCKS = {
    "128": {"block_size": (128, 128)},
    "64x32": {"block_size": [64, 32]},
    "ue8m0": {"block_size": (128, 128), "scale_fmt": "ue8m0"},
    "tensor": {"block_size": None},
    "tensor ue8m0": {"block_size": None, "scale_fmt": "ue8m0"},
    "static": {"block_size": (64, 64), "activation_scheme": "static"},
    "static ue8m0": {"block_size": (64, 64), "activation_scheme": "static", "scale_fmt": "ue8m0"},
}


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("block", "has_gate", "dtype"),
    half_exhaustive(BLOCKS, [True, False], [torch.bfloat16, torch.float32], where=INTERPRETED),
    ids=str,
)
def test_as_exact_as_the_models_own_path(block, has_gate, dtype, device):
    module = fp8.experts(has_gate=has_gate, **BLOCKS[block]).to(device)
    routed = [tensor.to(device) for tensor in fp8.routed(33, dtype=dtype)]
    ours, theirs = fp8.outputs(module, *routed)
    assert_layer_matches(ours, fp8.oracle(module, *routed), theirs)


GATES = {
    "limit": {"swiglu_limit": 1.5},
    "alpha": {"swiglu_limit": 1.5, "swiglu_alpha": 1.702},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "mish": {"hidden_act": "mish"},
}


@pytest.mark.parametrize("arguments", [BLOCKS["128"], BLOCKS["static"]], ids=["128", "static"])
@pytest.mark.parametrize("changes", GATES.values(), ids=GATES)
@torch.no_grad()
def test_gates(changes, arguments, monkeypatch):
    """Those of the configuration are fused; an activation that is not ours runs between."""
    calls = []
    for name in ("fused_experts", "gated_experts"):
        original = getattr(_forwards, name)

        def counted(*args, original=original, name=name, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(_forwards, name, counted)
    module = fp8.experts(fp8.Config(**changes), **arguments)
    x, ids, weights = fp8.routed(20)
    ours, theirs = fp8.outputs(module, x, ids, weights)
    exact = fp8.oracle(module, x, ids, weights)
    assert_layer_matches(ours, exact, theirs)
    fused = "gated_experts" if "mish" in changes.values() else "fused_experts"
    assert calls == ([] if "activation_scheme" in arguments else [fused])
    if changes.get("swiglu_limit"):
        module.swiglu_limit = module.limit = 100.0
        assert not torch.equal(module(x, ids, weights), ours)


def test_a_gate_of_its_own_runs_between_the_gemms():
    cls = fp8.decorated()
    cls._apply_gate = fp8.unrecognised
    module = fp8.experts(cls=cls, block_size=(128, 128))
    x, ids, weights = fp8.routed(20)
    ours, theirs = fp8.outputs(module, x, ids, weights)
    assert_layer_matches(ours, fp8.oracle(module, x, ids, weights), theirs)


@pytest.mark.parametrize("width", [16, 48, 64, 192])
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_gate_rows_that_do_not_fill_their_last_block(width, scale_fmt):
    """Scales of gate and up are counted apart: as if the gate rows were padded to whole blocks."""
    arguments = {"block_size": (128, 128), "scale_fmt": scale_fmt}
    module = fp8.experts(fp8.Config(moe_intermediate_size=width), **arguments)
    blocks = -(-width // 128)
    scale = module.gate_up_proj_scale_inv
    halves = (
        torch.ones(4, 2 * blocks, scale.shape[2])
        * 2.0 ** torch.arange(-9, -9 + 2 * blocks)[:, None]
    )
    module.gate_up_proj_scale_inv = nn.Parameter(halves.to(scale.dtype))
    x, ids, weights = fp8.routed(20)

    padded = fp8.experts(fp8.Config(moe_intermediate_size=128 * blocks), **arguments)
    w1 = torch.zeros(4, 2, 128 * blocks, 160)
    w1[:, :, :width] = module.gate_up_proj.float().view(4, 2, width, 160)
    w2 = torch.zeros(4, 160, 128 * blocks)
    w2[:, :, :width] = module.down_proj.float()
    with torch.no_grad():
        padded.gate_up_proj.copy_(w1.flatten(1, 2))
        padded.down_proj.copy_(w2)
        padded.gate_up_proj_scale_inv.copy_(halves)
        padded.down_proj_scale_inv.copy_(module.down_proj_scale_inv.float())
        assert torch.equal(module(x, ids, weights), padded(x, ids, weights))


@torch.no_grad()
def test_packed_fp4():
    """Weights alone are quantized: the error is that of bf16 roundings."""
    module = fp8.experts(**FP4, block_size=(128, 128), scale_fmt="ue8m0")
    x, ids, weights = fp8.routed(20)
    exact = fp8.oracle(module, x, ids, weights)
    plain = copy.deepcopy(module)
    for name in ("gate_up_proj", "down_proj"):
        setattr(plain, name, nn.Parameter(fp8.weight(module, name).to(torch.bfloat16)))
    assert_layer_matches(module(x, ids, weights), exact, fp8.outputs(plain, x, ids, weights)[1])


@torch.no_grad()
def test_sentinels_are_not_read():
    module = fp8.experts(block_size=(128, 128))
    x, ids, weights = fp8.routed(6, sentinels=False)
    ids[0] = 4
    x[0] = torch.nan
    for scheme in ("dynamic", "static"):
        if scheme == "static":
            module = fp8.experts(block_size=(128, 128), activation_scheme="static")
        out = module(x, ids, weights)
        assert (out[0] == 0).all()
        assert out.isfinite().all()


@torch.no_grad()
def test_each_expert_has_input_scales_of_its_own():
    """Some of which cut off what others hold: as in the model's own path, number for number."""
    module = fp8.experts(**BLOCKS["static"])
    scales = torch.tensor([1e-3, 0.03, 3e-3, 0.01])
    module.gate_up_proj_activation_scale.copy_(scales)
    module.down_proj_activation_scale.copy_(scales.flip(0))
    ours, theirs = fp8.outputs(module, *fp8.routed(20, dtype=torch.float32))
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@torch.no_grad()
def test_a_rank_with_fewer_experts_than_slots():
    for arguments in BLOCKS.values():
        module = fp8.experts(fp8.Config(num_experts=1), **arguments)
        x, _, weights = fp8.routed(4, dtype=torch.float32)
        ids = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 7]])
        out = module(x, ids, weights)
        alone = module(x[:2], ids.new_zeros(2, 1), weights[[0, 1], [1, 0]][:, None])
        assert torch.equal(out[:2], alone)
        assert (out[2:] == 0).all()


@pytest.mark.parametrize("arguments", BLOCKS.values(), ids=BLOCKS)
@torch.no_grad()
def test_no_tokens(arguments):
    out = fp8.experts(**arguments)(*fp8.routed(0))
    assert out.shape == (0, 160)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("arguments", BLOCKS.values(), ids=BLOCKS)
def test_nothing_is_copied(arguments):
    module = fp8.experts(**arguments)
    w1, w2, _, _, config = _fp8.fp8_weights(module)
    for ours, name in (
        (w1, "gate_up_proj"), (config.w1_scale, "gate_up_proj_scale_inv"),
        (w2, "down_proj"), (config.w2_scale, "down_proj_scale_inv"),
    ):  # fmt: skip
        assert ours.data_ptr() == getattr(module, name).data_ptr()


@pytest.mark.parametrize("arguments", BLOCKS.values(), ids=BLOCKS)
@torch.no_grad()
def test_experts_compile_whole(arguments):
    module = fp8.experts(**arguments)
    backend = Compilations()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (7, 5, 64):
        x, ids, weights = fp8.routed(tokens)
        for tensor in (x, ids, weights):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert torch.equal(compiled(x, ids, weights), module(x, ids, weights))
    assert backend.count == 1


@torch.no_grad()
def test_weights_that_are_floats_again():
    module = fp8.experts(block_size=(128, 128))
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, nn.Parameter(fp8.weight(module, name).to(torch.bfloat16)))
    x, ids, weights = fp8.routed(9)
    ours, theirs = fp8.outputs(module, x, ids, weights)
    exact = fp8.oracle(fp8.experts(block_size=(128, 128)), x, ids, weights)
    assert_layer_matches(ours, exact, theirs)


FP4 = {"expert_dtype": "fp4"}
UNSUPPORTED = {
    "weight_block_size .1, 32. .powers of two from 16 on work": ({"block_size": (1, 32)}, None),
    "weight_block_size .96, 96. .powers of two": ({"block_size": (96, 96)}, None),
    "scales .4, 7, 2. of a weight": (
        BLOCKS["128"], ("gate_up_proj_scale_inv", torch.ones(4, 7, 2)),
    ),
    "weights of torch.int16 .e4m3 and packed fp4 work": (
        BLOCKS["128"], ("gate_up_proj", torch.ones(4, 256, 160).to(torch.int16)),
    ),
    "fp4 weights with scales of torch.float32 .scale_fmt='ue8m0' works": (FP4, None),
    "static activation scales with fp4": (
        {**FP4, "activation_scheme": "static", "scale_fmt": "ue8m0"}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED.items(), ids=UNSUPPORTED)
@torch.no_grad()
def test_what_is_not_supported_is_said(case):
    message, (arguments, change) = case
    module = fp8.experts(**arguments)
    if change is not None:
        setattr(module, change[0], nn.Parameter(change[1], False))
    with pytest.raises(NotImplementedError, match=f"got FP8Experts with {message}"):
        module(*fp8.routed(3))
    model = nn.ModuleDict({"experts": module})
    (found,) = integration.check(model)
    assert found.name == "experts"
    assert re.search(message, found.reason)


def test_check_knows_fp8_experts():
    module = fp8.experts(**BLOCKS["128"])
    model = nn.ModuleDict({"experts": module})
    assert integration.check(model) == []
    module.config._experts_implementation = "grouped_mm"
    (found,) = integration.check(model)
    assert found.reason == "its experts_implementation is 'grouped_mm', not 'moe_ops'"


def test_a_backward_pass():
    """Through frozen weights with dynamic scales; with static ones an error says so."""
    x, ids, weights = fp8.routed(3)
    experts = fp8.experts(**BLOCKS["128"]).requires_grad_(False)
    experts(x.requires_grad_(), ids, weights).sum().backward()
    assert x.grad.any()
    out = fp8.experts(**BLOCKS["128"], activation_scheme="static")(x, ids, weights)
    with pytest.raises(NotImplementedError, match="gradients of static_experts are not"):
        out.sum().backward()


def tiny_model(**arguments):
    """A model with experts as transformers puts them in."""
    model = tiny_transformers.tiny_qwen3("cpu", hidden_size=64, moe_intermediate_size=64)
    for name, module in list(model.named_modules()):
        if name.endswith(".experts"):
            config = fp8.Config(64, 64, 8, _experts_implementation=None)
            model.set_submodule(name, fp8.experts(config, **arguments))
            model.get_submodule(name).config = module.config
    return model


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@torch.no_grad()
def test_a_model(scale_fmt):
    """The model's implementation reaches its fp8 experts, whose result is that of its own path."""
    model = tiny_model(block_size=(64, 64), scale_fmt=scale_fmt)
    ids = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(0))
    model.set_experts_implementation("eager")
    theirs = model(ids).logits
    assert len(integration.check(model)) == 2
    model.set_experts_implementation("moe_ops")
    assert integration.check(model) == []
    ours = model(ids).logits
    difference = (ours - theirs).norm() / theirs.norm()
    assert difference <= 2**-10, difference
    assert model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 10)
