"""gpt-oss in MXFP4 in the plug-in of SGLang: weights that stay as the checkpoint has them."""

import logging
import sys
from types import SimpleNamespace

import pytest
import sglang_stand_ins as sglang
import torch

from moe_ops import FusedMoEQuantConfig, fused_experts, pack_weight, quantize_weight
from moe_ops.activation import Activation, MoEActivation
from moe_ops.integrations import _engines
from moe_ops.integrations.sglang import register
from moe_ops.pipeline import forms

SCHEME = "mxfp4_w4a16"
E, H, WIDTH = 4, 64, 96
PACKING = 128, 64
"""H and I, of which whole chunks are packed."""
OF_GPT_OSS = {
    "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "inplace": False,
    "params_dtype": torch.bfloat16,
}  # fmt: skip


@pytest.fixture
def engine(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="sglang.moe_ops")
    _engines.say_once.cache_clear()
    monkeypatch.delenv("MOE_OPS_SGLANG", raising=False)
    engine = sglang.install(monkeypatch)
    register()
    engine.hooks.apply_hooks()
    return engine


def loaded(sizes=(H, WIDTH), **numbers):
    """A layer after SGLang has read its tensors, its configuration and the quantized weights."""
    torch.manual_seed(0)
    hidden, width = sizes
    shapes = (2 * width, hidden), (hidden, width)
    q = [quantize_weight(torch.randn(E, *shape) / 8, SCHEME) for shape in shapes]
    layer = SimpleNamespace(moe_runner_config=sglang.MoeRunnerConfig(**OF_GPT_OSS | numbers))
    for name, weight, (rows, _) in zip(("w13", "w2"), q, shapes, strict=True):
        setattr(layer, f"{name}_weight", weight.data.clone())
        setattr(layer, f"{name}_weight_scale", weight.scale.clone())
        setattr(layer, f"{name}_weight_bias", torch.randn(E, rows).bfloat16())
    return layer, q


def tokens(count=7, hidden=H):
    x, logits = torch.randn(count, hidden).bfloat16(), torch.randn(count, E)
    chosen = logits.softmax(-1).topk(2)
    ids = chosen.indices.to(torch.int32)
    ids[0, 0] = -1
    routed = sglang.StandardTopKOutput(chosen.values, ids, logits)
    return sglang.StandardDispatchOutput(x, None, routed)


@pytest.mark.parametrize("packs", [False, True])
def test_weights_stay_in_mxfp4(engine, caplog, monkeypatch, packs):
    """Bit for bit the library's layer, in both forms, in the checkpoint's own memory."""
    monkeypatch.setattr(forms, "known_arch", lambda device: 90 if packs else None)
    layer, q = loaded(PACKING)
    before = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
    method = engine.mxfp4(layer.moe_runner_config)
    method.process_weights_after_loading(layer)
    held = [pack_weight(x, SCHEME) for x in q] if packs else q
    assert (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()) == before
    assert torch.equal(layer.w13_weight, held[0].data)
    assert torch.equal(layer.w2_weight_scale, held[1].scale)
    dispatched = tokens(hidden=PACKING[0])
    x, (weights, ids, _) = dispatched.hidden_states, dispatched.topk_output
    want = fused_experts(
        x, q[0].data, q[1].data, weights, ids,
        quant_config=FusedMoEQuantConfig.from_weights(SCHEME, *q),
        w1_bias=layer.w13_weight_bias, w2_bias=layer.w2_weight_bias,
        activation=Activation(MoEActivation.SWIGLUOAI, clamp_limit=7.0, alpha=1.702, beta=1.0).key,
    )  # fmt: skip
    assert torch.equal(method.apply(layer, dispatched).hidden_states, want)
    assert [r.message for r in caplog.records if "runs the experts: mxfp4_w4a16" in r.message]


@pytest.mark.parametrize(
    ("mode", "numbers", "reason"),
    [
        ({"runner": "marlin"}, {}, None),
        ({"exchange": "deepep"}, {}, None),
        ({"cpu": True}, {}, None),
        ({}, {"activation": "tanh"}, "'tanh'"),
        ({}, {"no_combine": True}, "not summed"),
        ({}, {"apply_router_weight_on_input": True}, "with biases"),
    ],
)
def test_what_sglang_dequantizes(engine, caplog, mode, numbers, reason):
    """Other runners keep their own forms, and what this library does not serve is said."""
    vars(engine.mode).update(mode)
    layer, _ = loaded(**numbers)
    method = engine.mxfp4(layer.moe_runner_config)
    method.process_weights_after_loading(layer)
    assert layer.w13_weight == "dequantized"
    assert method.apply(layer, tokens()).hidden_states == "SGLang's"
    said = [r.message for r in caplog.records if "SGLang's own kernels run" in r.message]
    assert len(said) == (reason is not None) and (reason or "") in "".join(said)


@pytest.mark.parametrize(
    ("sizes", "invariant", "alternating", "packed"),
    [
        (PACKING, True, True, [0, 1]),
        ((H, WIDTH), False, True, [0]),
        ((H, WIDTH), False, False, []),
    ],
)
def test_which_weights_are_packed(engine, monkeypatch, sizes, invariant, alternating, packed):
    """Also in batch-invariant mode; gate and up must be whole chunks.

    Rows of gate and up that alternate share the chunks.
    """
    monkeypatch.setattr(forms, "known_arch", lambda device: 90)
    engine.mode.batch_invariant = invariant
    layer, q = loaded(sizes, gate_up_interleaved=alternating)
    engine.mxfp4(layer.moe_runner_config).process_weights_after_loading(layer)
    held = [pack_weight(x, SCHEME) if i in packed else x for i, x in enumerate(q)]
    assert torch.equal(layer.w13_weight, held[0].data)
    assert torch.equal(layer.w2_weight, held[1].data)


def test_sglangs_own_choice_is_its_triton_runner(engine):
    engine.mode.runner = "auto"
    layer, q = loaded()
    engine.mxfp4(layer.moe_runner_config).process_weights_after_loading(layer)
    assert torch.equal(layer.w13_weight, q[0].data)


def test_tokens_of_another_form_raise(engine):
    """SGLang's own kernels cannot run on these weights."""
    layer, _ = loaded()
    method = engine.mxfp4(layer.moe_runner_config)
    method.process_weights_after_loading(layer)
    other, config = tokens()._replace(hidden_states_pre_quant=()), layer.moe_runner_config
    with pytest.raises(NotImplementedError, match="quantized already"):
        method.apply(layer, other)
    with pytest.raises(NotImplementedError, match="quantized already"):
        engine.runners("triton", config).run(other, layer._moe_ops_mxfp4)


@pytest.mark.parametrize(
    ("name", "hooks"), [("Mxfp4MoEMethod.apply", 5), ("is_cpu", 2), ("get_moe_a2a_backend", 2)]
)
def test_another_interface_leaves_it_alone(monkeypatch, caplog, name, hooks):
    """Without what gpt-oss needs of SGLang, all other layers are served, and nothing is said."""
    engine = sglang.install(monkeypatch)
    formats = engine.interface.formats
    assert set(formats().values()) == {None} and "gpt-oss in MXFP4" in formats()
    module = {"is_cpu": "sglang.srt.utils", "get_moe_a2a_backend": f"{sglang.MOE}.utils"}
    owner = engine.modules.get(module.get(name), engine.mxfp4)
    monkeypatch.delattr(owner, name.rpartition(".")[2])
    monkeypatch.delitem(sys.modules, "moe_ops.integrations.sglang._mxfp4")
    assert formats()["gpt-oss in MXFP4"].endswith(f".{name}")
    register()
    assert len(engine.hooks.hooks) == hooks and list(engine.factories) == ["moe_ops"]
    assert not caplog.records
