"""int4 and int8 with groups in the plug-in of SGLang: packed in memory, where a GPU reads that."""

import logging
import sys

import pytest
import sglang_stand_ins as sglang
import torch
from sglang_layers import problem
from torch import nn

from moe_ops import FusedMoEQuantConfig, fused_experts, pack_weight
from moe_ops.integrations import _engines
from moe_ops.integrations.sglang import register
from moe_ops.pipeline import forms

H, I = 128, 64  # noqa: E741
BF16 = torch.bfloat16
WNA16, COMPRESSED = "MoeWNA16Method", "CompressedTensorsWNA16TritonMoE"
METHODS = [
    (WNA16, "int4_w4a16_g32"),
    (WNA16, "int4_w4a16_g32_zp"),
    (WNA16, "int8_w8a16_g32"),
    (COMPRESSED, "int4_w4a16_g32"),
]
"""Methods of SGLang, and schemes of the weights that they bring."""


@pytest.fixture
def engine(monkeypatch, caplog):
    """SGLang with the plug-in, whose weights count as those of a Hopper GPU."""
    caplog.set_level(logging.INFO, logger="sglang.moe_ops")
    _engines.say_once.cache_clear()
    monkeypatch.delenv("MOE_OPS_SGLANG", raising=False)
    monkeypatch.setattr(forms, "known_arch", lambda device: 90)
    engine = sglang.install(monkeypatch)
    register()
    engine.hooks.apply_hooks()
    return engine


class Loaded:
    """A layer with its method before SGLang processes its weights, and a call of it."""

    def __init__(self, engine, kind=WNA16, scheme="int4_w4a16_g32", width=I, **numbers):
        self.call, info, self.q = problem(scheme, hidden=H, width=width, biases=False)
        self.call = self.call._replace(hidden_states=self.call.hidden_states.to(BF16))
        self.q = [q._replace(scale=q.scale.to(BF16)) for q in self.q]
        self.layer, self.scheme, self.info = nn.Module(), scheme, info
        module = next(x for x in engine.modules.values() if hasattr(x, kind))
        if kind == WNA16:
            self.method = module.MoeWNA16Method(4 if info.use_int4_w4a16 else 8, "_zp" in scheme)
            self.names, self.layer.group_size = ("qweight", "scales", "qzeros"), 32
        else:
            self.method = module.CompressedTensorsWNA16TritonMoE(32)
            self.names = ("weight_packed", "weight_scale")
        self.fill(kind == WNA16)
        config = sglang.MoeRunnerConfig(params_dtype=BF16, inplace=False, **numbers)
        self.method.create_moe_runner(self.layer, config)

    def fill(self, rows_first=True):
        """Set the parameters, as SGLang's loader does."""
        for which, q in zip(("w13", "w2"), self.q, strict=True):
            for name, x in zip(self.names, q, strict=False):
                if x is not None and not rows_first:
                    x = x.view(torch.int32) if name == "weight_packed" else x
                    x = x.transpose(1, 2).contiguous()
                if x is not None:
                    setattr(self.layer, f"{which}_{name}", nn.Parameter(x.clone(), False))

    def process(self):
        self.method.process_weights_after_loading(self.layer)
        return self.held

    @property
    def held(self):
        """Parameters of both weights."""
        return [
            [getattr(self.layer, f"{which}_{name}", None) for name in self.names]
            for which in ("w13", "w2")
        ]

    def holds(self, qs):
        """Whether the layer holds these weights, bit for bit."""
        return all(
            y is None or (x.dtype == y.dtype and torch.equal(x, y))
            for held, q in zip(self.held, qs, strict=True)
            for x, y in zip(held, q, strict=False)
        )

    @property
    def packed(self):
        return [pack_weight(q, self.scheme) for q in self.q]

    def run(self, **changes):
        call = self.call._replace(**changes)
        return self.method.apply(self.layer, call).hidden_states

    def expected(self):
        x, (weights, ids, _) = self.call.hidden_states, self.call.topk_output
        config = FusedMoEQuantConfig.from_weights(self.scheme, *self.q)
        return fused_experts(x, *(q.data for q in self.q), weights, ids, quant_config=config)


def addresses(held):
    return [x.data_ptr() for parameters in held for x in parameters if x is not None]


@pytest.mark.parametrize(("kind", "scheme"), METHODS)
def test_packed_in_their_own_memory(engine, caplog, kind, scheme):
    """The bits of the plain form; loading again unpacks them, and packs what was loaded."""
    loaded = Loaded(engine, kind, scheme)
    before = addresses(loaded.held)
    held = loaded.process()
    if kind == WNA16:  # SGLang's method of compressed-tensors copies
        assert addresses(held) == before
    assert loaded.holds(loaded.packed) and torch.equal(loaded.run(), loaded.expected())
    assert [f"runs the experts: {scheme}" in r.message for r in caplog.records] == [True]
    loaded.process()  # once more
    assert loaded.holds(loaded.packed)
    if kind == WNA16:
        restore = loaded.method.restore_weights_before_loading
        for _ in range(2):  # once more
            restore(loaded.layer)
            assert loaded.holds(loaded.q) and addresses(loaded.held) == before
        loaded.process()
        assert loaded.holds(loaded.packed) and addresses(loaded.held) == before


@pytest.mark.parametrize(
    ("mode", "numbers", "served"),
    [
        ({}, {"width": 96}, True),  # gate and up must be whole chunks
        ({"runner": "lora_triton"}, {}, True),
        ({"exchange": "deepep"}, {}, True),
        ({"cpu": True}, {}, True),
        ({}, {"activation": "tanh"}, False),
    ],
)
def test_weights_that_stay_plain(engine, caplog, mode, numbers, served):
    vars(engine.mode).update(mode)
    loaded = Loaded(engine, **numbers)
    loaded.process()
    assert loaded.holds(loaded.q) and not caplog.records
    if served:
        assert torch.equal(loaded.run(), loaded.expected())
    else:
        assert loaded.run() == "SGLang's" and "'tanh'" in caplog.text


def test_packed_weights_never_reach_sglangs_kernels(engine, caplog):
    """What is not served raises: as a call, with adapters, and where SGLang asks no function."""
    loaded = Loaded(engine)
    loaded.process()
    with pytest.raises(NotImplementedError, match="quantized already"):
        loaded.run(hidden_states_pre_quant=())
    info = loaded.method.get_triton_quant_info(loaded.layer)
    runner = engine.runners("triton", loaded.method.moe_runner_config, lora_enabled=True)
    out = runner.run(loaded.call, info).hidden_states
    assert torch.equal(out, loaded.expected())
    lora = sglang.LoRAInfo(*[torch.zeros(1, 1, 2, 2)] * 8, loaded.q[0].data, 1, 4)
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        runner.run(loaded.call, info, lora_info=lora)
    assert "SGLang's own kernels run" not in caplog.text


@pytest.mark.parametrize("name", ["restore_weights_before_loading", "get_triton_quant_info"])
def test_another_interface_leaves_them_plain(monkeypatch, name):
    engine = sglang.install(monkeypatch)
    module = engine.modules[f"{sglang.METHODS}.moe_wna16"]
    monkeypatch.setattr(module.MoeWNA16Method, name, lambda self: None)
    monkeypatch.delitem(sys.modules, "moe_ops.integrations.sglang._weights")
    monkeypatch.delitem(sys.modules, "moe_ops.integrations.sglang._mxfp4")
    kinds = engine.interface.formats()
    assert kinds.pop("int4 and int8 in the packed form").endswith(f".{name}")
    assert list(kinds.values()) == [None, None]
    register()
    assert len(engine.hooks.hooks) == 4
