"""check() names what "moe_ops" does not reach; adapt() brings in Llama 4."""

import copy
import importlib
import logging
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

transformers = pytest.importorskip("transformers")

import peft_stand_ins as stand_ins  # noqa: E402
import tiny_transformers as tiny  # noqa: E402
from processes import python  # noqa: E402
from tiny_transformers import llama4_blocks, tiny_llama4  # noqa: E402
from transformers.models.step3p7 import configuration_step3p7, modeling_step3p7  # noqa: E402

import moe_ops  # noqa: E402
import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _engines, _llama4  # noqa: E402

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 24, "pad_token_id": 0,
}  # fmt: skip
ENCODER_DECODER = {"vocab_size": 64, "d_model": 32, "num_experts": 4, "pad_token_id": 0}
UNDISPATCHED = "not dispatched by transformers"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def tiny_qwen():
    return tiny.build("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts")[0]


def of(model, config, **sizes):
    """``transformers.<model>`` made from ``transformers.<config>``."""
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()


def jetmoe():
    return of("JetMoeModel", "JetMoeConfig", **SMALL, kv_channels=8, num_local_experts=4)


def dbrx():
    ffn = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}
    attention = transformers.models.dbrx.configuration_dbrx.DbrxAttentionConfig(kv_n_heads=4)
    attention.rope_theta = 1e4
    config = transformers.DbrxConfig(
        vocab_size=64, d_model=32, n_heads=4, n_layers=1, max_seq_len=64, ffn_config=ffn,
        attn_config=attention,
    )  # fmt: skip
    return transformers.DbrxModel(config)


def longcat(**sizes):
    sizes = {
        **SMALL, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 24, "n_routed_experts": 4,
        "zero_expert_num": 2, "moe_topk": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "num_layers": 1,
        **sizes,
    }  # fmt: skip
    sizes["num_hidden_layers"] = 2 * sizes["num_layers"]
    torch.manual_seed(0)
    model = of("LongcatFlashModel", "LongcatFlashConfig", **sizes)
    for experts in longcat_experts(model):
        nn.init.normal_(experts.gate_up_proj, std=0.3)
        nn.init.normal_(experts.down_proj, std=0.3)
    return model


def longcat_experts(model):
    return [m for m in model.modules() if type(m).__name__ == "LongcatFlashExperts"]


def doge():
    return of("DogeModel", "DogeConfig", **SMALL, is_moe=True, num_experts=16)


def nllb():
    return of(
        "NllbMoeModel", "NllbMoeConfig", **ENCODER_DECODER, encoder_layers=2, decoder_layers=2,
        encoder_sparse_step=2, decoder_sparse_step=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24,
    )  # fmt: skip


def switch():
    return of(
        "SwitchTransformersModel", "SwitchTransformersConfig", **ENCODER_DECODER, num_layers=2,
        num_decoder_layers=2, num_heads=4, d_kv=8, d_ff=24, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    )  # fmt: skip


def vitpose():
    return of(
        "VitPoseBackbone", "VitPoseBackboneConfig", hidden_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_experts=4, part_features=8, image_size=(32, 32),
        patch_size=(16, 16), mlp_ratio=1,
    )  # fmt: skip


def step3p7():
    config = configuration_step3p7.Step3p7TextConfig(
        **SMALL, mlp_layer_types=["sparse"] * 2, num_local_experts=4, moe_intermediate_size=24,
        num_experts_per_tok=2, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    return modeling_step3p7.Step3p7TextModel(config)


def list_of_mlps():
    """What remote code made of Mixtral."""
    model = nn.Module()
    model.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    return model


@pytest.mark.parametrize(
    ("make", "class_name", "count"),
    [
        (dbrx, "DbrxExperts", 1),
        (doge, "DogeCDMoE", 2),
        (jetmoe, "JetMoeParallelExperts", 8),
        (list_of_mlps, "ModuleList", 1),
        (tiny_llama4, "Llama4TextExperts", 2),
        (longcat, "LongcatFlashExperts", 1),
        (nllb, "NllbMoeExperts", 2),
        (step3p7, "Step3p7Experts", 2),
        (switch, "SwitchTransformersExperts", 2),
        (vitpose, "VitPoseNaiveMoe", 1),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_experts_that_are_not_dispatched_are_named(make, class_name, count):
    model = make()
    found = integration.check(model)
    assert {f.class_name for f in found} == {class_name}
    assert len(found) == count
    for name, _, reason in found:
        assert type(model.get_submodule(name)).__name__ == class_name
        assert UNDISPATCHED in reason


@pytest.mark.parametrize("name", ["Llama", "Bert", "Gemma2"])
def test_dense_models_have_nothing_to_name(name):
    assert integration.check(of(f"{name}Model", f"{name}Config", **SMALL)) == []


def test_shared_experts_are_not_experts():
    """Every token runs through Inkling's, which are 3-D parameters too."""
    module = "transformers.models.inkling.modeling_inkling"
    model, _ = tiny.build(module, "InklingExperts")
    model.set_experts_implementation("moe_ops")
    assert any("SharedExperts" in type(m).__name__ for m in model.modules())
    assert integration.check(model) == []


def test_dispatched_modules_say_what_keeps_them():
    model = tiny_qwen()
    model.set_experts_implementation("eager")
    found = integration.check(model)
    assert [f.name for f in found] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert {f.reason for f in found} == {"its experts_implementation is 'eager', not 'moe_ops'"}

    model.set_experts_implementation("moe_ops")
    assert integration.check(model) == []
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), False)
    assert [f.reason for f in integration.check(model)] == [
        "weights of torch.float8_e4m3fn are not supported"
    ]


@torch.no_grad()
def test_llama4_equals_its_own_code(monkeypatch):
    """Four times its own error against float64, with one call of ours a layer."""
    model, calls = tiny_llama4(), []
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    eager = model(ids).logits
    oracle = copy.deepcopy(model).double()(ids).logits
    budget = 4 * (eager - oracle).abs().max()
    assert 0 < budget < 1e-4

    original = _llama4.fused_experts

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(_llama4, "fused_experts", counted)
    names = integration.adapt(model)
    assert names == ["model.layers.0.feed_forward", "model.layers.1.feed_forward"]
    assert integration.adapt(model) == []
    assert integration.check(model) == []
    assert (model(ids).logits - oracle).abs().max() <= budget
    assert len(calls) == 2

    monkeypatch.setattr(_llama4, "fused_experts", lambda x, *_, **__: torch.zeros_like(x))
    assert (model(ids).logits - oracle).abs().max() > 100 * budget
    for block in llama4_blocks(model):
        del block.forward
    assert torch.equal(model(ids).logits, eager)
    assert len(integration.check(model)) == 2


@torch.no_grad()
def test_llama4_scores_that_vanish():
    """A chosen expert whose score rounds to 0 ties with those not chosen; neither adds anything."""
    model = tiny_llama4()
    block = llama4_blocks(model)[0]
    block.router.weight.data.fill_(-100.0)
    x = torch.rand(5, 32) + 1
    expected = block(x)
    integration.adapt(model)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=0)


@torch.no_grad()
def test_llama4_bfloat16_is_no_further_from_float64():
    model = tiny_llama4()
    block = copy.deepcopy(llama4_blocks(model)[0]).bfloat16()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    oracle = copy.deepcopy(block).double()(x.double())[0]
    theirs = (block(x)[0] - oracle).norm()
    integration.adapt(block)
    assert (block(x)[0] - oracle).norm() <= 1.1 * theirs


@torch.no_grad()
def test_llama4_block_compiles_whole():
    block = llama4_blocks(tiny_llama4())[0]
    expected = {tokens: block(torch.ones(tokens, 32)) for tokens in (7, 5, 64)}
    integration.adapt(block)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for tokens, outputs in expected.items():
        for actual, wanted in zip(compiled(torch.ones(tokens, 32)), outputs, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    assert backend.frame_count == 1


def test_llama4_is_left_alone_when_it_cannot_be_adapted():
    """A later block fails: no block gets a forward."""
    failures = [
        ("experts.act_fn", lambda x: x, NotImplementedError, "feed_forward .*, got function"),
        ("forward", lambda x: x, ValueError, "feed_forward must not have a forward"),
        ("experts.forward", lambda x: x, ValueError, "feed_forward.experts must not have a forw"),
        ("experts._is_hooked", True, NotImplementedError, "feed_forward must hold all its"),
    ]
    for path, value, error, match in failures:
        model = tiny_llama4()
        first, second = llama4_blocks(model)
        owner, _, attribute = path.rpartition(".")
        owner = second.get_submodule(owner)
        owner._modules.pop(attribute, None)
        setattr(owner, attribute, value)
        with pytest.raises(error, match=f"model.layers.1.{match}"):
            integration.adapt(model)
        assert "forward" not in first.__dict__
        assert len(integration.check(model)) == 2


def test_longcat_equals_its_own_code():
    """Values and gradients, also where a token has more slots than there are weights."""
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    for sizes in ({"num_layers": 2}, {"n_routed_experts": 1, "moe_topk": 3}):
        models = [longcat(**sizes) for _ in range(3)]
        names = integration.adapt(models[0])
        assert names == [f"layers.{i}.mlp.experts" for i in range(len(names))]
        assert integration.adapt(models[0]) == [] == integration.check(models[0])
        models[2].double()
        found = []
        for model in models:
            out = model(ids).last_hidden_state
            scale = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
            (out * scale).sum().backward()
            experts = [p.grad for m in longcat_experts(model) for p in m.parameters()]
            found.append([out, *experts, model.embed_tokens.weight.grad])
        for ours, theirs, exact in zip(*found, strict=True):
            budget = 4 * (theirs - exact).abs().max()
            assert 0 < budget < 1e-3 * exact.abs().max()
            assert (ours - exact).abs().max() <= budget


def test_longcat_compiles_whole():
    block = longcat().layers[0].mlp
    integration.adapt(block)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for length in (7, 5, 64):
        x = torch.randn(1, length, 32)
        torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(x), block(x))
    assert backend.frame_count == 1


def test_longcat_is_left_alone_when_it_cannot_be_adapted():
    for attribute, value, error, match in (
        ("act_fn", nn.Mish(), NotImplementedError, "must have an activation of this lib.*got Mish"),
        ("forward", print, ValueError, "must not have a forward of its own"),
        ("_is_hooked", True, NotImplementedError, "must hold all its experts"),
    ):
        model = longcat(num_layers=2)
        first, second = longcat_experts(model)
        setattr(second, attribute, value)
        with pytest.raises(error, match=f"layers.1.mlp.experts {match}"):
            integration.adapt(model)
        assert not integration._longcat.is_adapted(first)
        assert len(integration.check(model)) == 2


@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("adapted_first", [False, True])
def test_llama4_with_adapters(peft, adapted_first):
    """PEFT's sums and gradients, in both orders; as PEFT has it where adapters change."""
    kind = stand_ins.kind_of(stand_ins.KINDS[peft])
    model = tiny_llama4()
    plain, ids = copy.deepcopy(model), torch.arange(3, 14)[None]
    names = integration.adapt(model) if adapted_first else []
    model = stand_ins.model_with_adapters(kind, "cpu", model)
    names += integration.adapt(model)
    assert len(names) == 2 and not integration.check(model)

    def assert_runs(active):
        dense = stand_ins.dense(model, active, "cpu", copy.deepcopy(plain))
        expected = dense(ids, labels=ids)
        factors = [
            factor[name].weight.requires_grad_()
            for wrapper in stand_ins.wrappers(model) for name in active
            for factor in (wrapper.lora_A, wrapper.lora_B)
        ]  # fmt: skip
        found = model(ids, labels=ids)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        if factors:
            ours = torch.autograd.grad(found.loss, factors)
            theirs = torch.autograd.grad(expected.loss, factors)
            for a, b in zip(ours, theirs, strict=True):
                assert b.any()
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)

    for active in (["a"], ["b"], ["a", "b"], ["a"]):
        kind.set_adapters(model, active)
        assert_runs(active)
    with kind.disabled(model):
        assert_runs([])
    with torch.no_grad():
        expected = model(ids).logits
        kind.merge(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        kind.unmerge(model)
        with pytest.raises(NotImplementedError, match="known kind .* Llama4TextMoe .* not disp"):
            moe_ops.quantize_(model, "int8_w8a16", progress=False)
        hook = stand_ins.wrappers(model)[0].register_forward_pre_hook(lambda *_: None)
        with pytest.raises(NotImplementedError, match="adapter_names must be None for adapters"):
            model(ids)
        hook.remove()
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        unloaded = kind.unload(model)
        for _ in range(2):
            expected = plain(ids).logits
            torch.testing.assert_close(unloaded(ids).logits, expected, rtol=1e-4, atol=1e-4)
            for block in llama4_blocks(unloaded):
                block.__dict__.pop("forward", None)


def test_a_class_that_only_has_the_name():
    namesake = type("Llama4TextMoe", (nn.Module,), {})()
    assert integration.adapt(namesake) == []


def test_a_copy_of_an_adapted_model_runs_its_own_weights():
    block = llama4_blocks(tiny_llama4())[0]
    integration.adapt(block)
    twin = copy.deepcopy(block)
    with torch.no_grad():
        twin.experts.down_proj.zero_()
        twin.shared_expert.down_proj.weight.zero_()
        assert (twin(torch.ones(3, 32))[0] == 0).all()


@pytest.mark.parametrize("missing", ["finegrained_fp8", "moe"])
def test_without_transformers_or_with_an_old_one(missing, monkeypatch):
    monkeypatch.delitem(sys.modules, integration.__name__)
    monkeypatch.setitem(sys.modules, f"transformers.integrations.{missing}", None)
    with pytest.raises(ImportError, match='needs transformers 5.17 or .* "transformers>=5.17"'):
        importlib.import_module(integration.__name__)


def test_one_line_says_that_a_model_keeps_transformers_code(caplog, monkeypatch, tmp_path):
    """However it was told to run "moe_ops"; none where everything is reached, or nothing asked."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # other tests ask for less
    _engines.say_once.cache_clear()
    qwen, llama, said = (
        tiny_qwen(),
        tiny_llama4(),
        "Llama4ForCausalLM keeps transformers' code in 2",
    )
    llama.set_experts_implementation("eager")
    qwen.set_experts_implementation("moe_ops")
    qwen.save_pretrained(tmp_path / "qwen")
    llama.save_pretrained(tmp_path / "llama")
    ours, wrong = {"experts_implementation": "moe_ops"}, []
    ways = {
        "reached": lambda: type(qwen).from_pretrained(tmp_path / "qwen", **ours),
        "nothing asked": lambda: type(llama).from_pretrained(tmp_path / "llama"),
        "from_pretrained": lambda: type(llama).from_pretrained(tmp_path / "llama", **ours),
        "from_config": lambda: transformers.AutoModelForCausalLM.from_config(llama.config, **ours),
        "loading info": lambda: type(llama).from_pretrained(
            tmp_path / "llama", output_loading_info=True, **ours
        ),
        "set": lambda: tiny_llama4().set_experts_implementation("moe_ops"),
        "set by a dict": lambda: tiny_llama4().set_experts_implementation({"": "moe_ops"}),
    }
    for way, choose in ways.items():
        for _ in range(2):
            choose()
        seen = {id(record): record for record in caplog.records}  # several handlers may see one
        lines = [r.getMessage() for r in seen.values() if r.name == "transformers.moe_ops"]
        if (len(lines) != 1 or said not in lines[0]) if way not in QUIET else lines:
            wrong.append((way, lines))
        caplog.clear()
        _engines.say_once.cache_clear()
    assert not wrong


QUIET = ("reached", "nothing asked")
FIRST = """
import sys, transformers
import moe_ops
from moe_ops.demo import MODEL
assert "transformers.modeling_utils" not in sys.modules
model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, experts_implementation="moe_ops")
assert moe_ops.integrations.transformers.check(model) == []
"""


@pytest.mark.slow
def test_transformers_may_be_imported_first():
    """The README's example imports it last."""
    run = python(FIRST)
    assert run.returncode == 0, run.stderr
