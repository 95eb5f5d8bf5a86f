"""gpt-oss with MXFP4 experts, adapted: from checkpoints' blocks and triton_kernels' layouts."""

import copy
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

transformers = pytest.importorskip("transformers")

from peft_stand_ins import StandIn  # noqa: E402
from transformers.integrations import mxfp4  # noqa: E402
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations import _mxfp4  # noqa: E402
from moe_ops.testing.compare import assert_layer_matches  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "swiglu_limit": 7.0,
}  # fmt: skip
PROJECTIONS = ("gate_up_proj", "down_proj")


class Layout:
    """One of triton_kernels' layouts: another order of bytes, which it can take back."""

    @staticmethod
    def unswizzle_data(data):
        return data.flip(1)


def swizzled(x):
    """``(E, N, K)`` as triton_kernels holds it: ``(E, K, N)`` in a layout of its own."""
    storage = SimpleNamespace(data=x.transpose(1, 2).flip(1), layout=Layout)
    return SimpleNamespace(storage=storage)


def checkpoint(config, seed):
    """Blocks, scales and biases of one layer, as checkpoints store them."""
    g = torch.Generator().manual_seed(seed)
    experts, hidden, width = config.num_local_experts, config.hidden_size, config.intermediate_size
    tensors = {}
    for name, n, k in zip(PROJECTIONS, (2 * width, hidden), (hidden, width), strict=True):
        bytes_ = torch.randint(0, 256, (experts, n, k // 32, 16), generator=g)
        tensors[f"{name}_blocks"] = bytes_.to(torch.uint8)
        exponents = torch.randint(122, 127, (experts, n, k // 32), generator=g)
        tensors[f"{name}_scales"] = exponents.to(torch.uint8)
        tensors[f"{name}_bias"] = torch.randn(experts, n, generator=g)
    return tensors


def in_blocks(experts, tensors):
    """Parameters in the checkpoint's layout."""
    for name in PROJECTIONS:
        setattr(experts, name, nn.Parameter(tensors[f"{name}_blocks"], False))
        setattr(experts, f"{name}_scales", nn.Parameter(tensors[f"{name}_scales"], False))


def in_triton_kernels(experts, tensors):
    """As ``Mxfp4Deserialize`` leaves a module: no parameters, tensors of triton_kernels."""
    for name in PROJECTIONS:
        del experts._parameters[name]
        setattr(experts, name, swizzled(tensors[f"{name}_blocks"].flatten(2)))
        scale = swizzled(tensors[f"{name}_scales"])
        setattr(experts, f"{name}_precision_config", SimpleNamespace(weight_scale=scale))


def models(store):
    """A model as transformers loads MXFP4 (its forward needs a GPU), and one dequantized by it."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES)
    plain = transformers.GptOssForCausalLM(config).eval()
    quantized = copy.deepcopy(plain)
    for seed, (mlp, own) in enumerate(zip(blocks(quantized), blocks(plain), strict=True)):
        tensors = checkpoint(config, seed)
        mlp.experts = Mxfp4GptOssExperts(config)
        store(mlp.experts, tensors)
        mlp.forward = MethodType(mxfp4.mlp_forward, mlp)
        for name in PROJECTIONS:
            bias = nn.Parameter(tensors[f"{name}_bias"], False)
            setattr(mlp.experts, f"{name}_bias", bias)
            setattr(own.experts, f"{name}_bias", bias)
            stored = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
            weight = mxfp4.convert_moe_packed_tensors(*stored, dtype=torch.float32)
            setattr(own.experts, name, nn.Parameter(weight, False))
    return quantized, plain


def blocks(model):
    return [m for m in model.modules() if type(m).__name__ == "GptOssMLP"]


STORES = [in_blocks, in_triton_kernels]


def names(store):
    return store.__name__


@pytest.mark.parametrize("store", STORES, ids=names)
@torch.no_grad()
def test_a_model_equals_its_dequantized_self(store):
    """transformers' own dequantization says what blocks and nibbles mean."""
    model, plain = models(store)
    found = integration.check(model)
    assert [f.class_name for f in found] == ["Mxfp4GptOssExperts"] * 2
    assert all("adapt(model) reaches them" in f.reason for f in found)

    assert integration.adapt(model) == [f"model.layers.{i}.mlp" for i in range(2)]
    assert integration.adapt(model) == []
    assert integration.check(model) == []
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    plain.set_experts_implementation("eager")
    eager = plain(ids).logits
    oracle = copy.deepcopy(plain).double()(ids).logits
    budget = 4 * (eager - oracle).abs().max()
    assert 0 < budget < 1e-3 * oracle.abs().max()
    assert (model(ids).logits - oracle).abs().max() <= budget
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 12)

    for mlp in blocks(model):
        mlp.experts.gate_up_proj_scales -= 1
    assert (model(ids).logits - oracle).abs().max() > 100 * budget


@pytest.mark.parametrize("store", STORES, ids=names)
@torch.no_grad()
def test_packed_for_a_gpu_that_reads_the_form(store, monkeypatch):
    """The gate and up projections of 192 rows; the down projection's 96 columns stay plain."""
    model, _ = models(store)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    plain = copy.deepcopy(model)
    integration.adapt(plain)
    seen = []

    def reads(w, scheme, dtype):
        seen.append((scheme.name, dtype))
        return w.shape[1] == 192

    monkeypatch.setattr(_mxfp4, "reads_packed", reads)
    integration.adapt(model)
    assert seen == [("mxfp4_w4a16", torch.bfloat16)] * 4
    for mlp in blocks(model):
        assert mlp.experts.gate_up_proj.dtype == torch.int32
        assert mlp.experts.down_proj.dtype == torch.uint8
    assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("store", STORES, ids=names)
@torch.no_grad()
def test_experts_in_bfloat16_are_no_further_from_float64(store):
    model, plain = models(store)
    integration.adapt(model)
    ours, own = blocks(model)[0].experts, copy.deepcopy(blocks(plain)[0].experts)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(33, SIZES["hidden_size"], generator=g).bfloat16()
    ids = torch.rand(33, 4, generator=g).topk(2).indices
    weights = torch.rand(33, 2, generator=g).bfloat16()
    own.config = copy.copy(own.config)
    own.config._experts_implementation = "eager"
    exact = copy.deepcopy(own).double()(x.double(), ids, weights.double())
    theirs = own.bfloat16()(x, ids, weights)
    assert_layer_matches(ours(x, ids, weights), exact, theirs)


@torch.no_grad()
def test_weights_are_held_once():
    """Nothing of the old layout stays; what came in the checkpoint's is not copied."""
    model, _ = models(in_triton_kernels)
    integration.adapt(model)
    experts = blocks(model)[0].experts
    for name in PROJECTIONS:
        assert isinstance(getattr(experts, name), nn.Parameter)
        assert f"{name}_precision_config" not in experts.__dict__
    model, _ = models(in_blocks)
    experts = blocks(model)[0].experts
    before = experts.gate_up_proj.data_ptr()
    integration.adapt(model)
    assert experts.gate_up_proj.data_ptr() == before


@torch.no_grad()
def test_a_block_compiles_whole():
    model, _ = models(in_blocks)
    integration.adapt(model)
    block = blocks(model)[0]
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (7, 5, 64):
        x = torch.randn(1, tokens, SIZES["hidden_size"])
        torch._dynamo.mark_dynamic(x, 1)
        for actual, expected in zip(compiled(x), block(x), strict=True):
            assert torch.equal(actual, expected)
    assert backend.frame_count == 1


def test_adapters_of_peft_are_refused():
    """PEFT takes the bytes of the weights for numbers."""
    model, _ = models(in_blocks)
    integration.adapt(model)
    model = StandIn().wrapped(model)
    assert integration.adapt(model) == []
    assert all("PEFT's adapters of MXFP4 experts" in f.reason for f in integration.check(model))

    class Same(nn.Module):
        def forward(self, w):
            return w

    experts = blocks(model)[0].experts.base_layer.base_layer
    parametrize.register_parametrization(experts, "down_proj", Same())
    with pytest.raises(NotImplementedError, match=r"no adapters, got PEFT.*\(dequantize=True\)"):
        model(torch.arange(3, 14)[None])


def test_what_cannot_be_adapted_is_said():
    model, _ = models(in_blocks)
    blocks(model)[0]._is_hooked = True
    with pytest.raises(NotImplementedError, match="model.layers.0.mlp must hold all its experts"):
        integration.adapt(model)
    model, _ = models(in_blocks)
    experts = blocks(model)[1].experts
    experts.down_proj_scales = nn.Parameter(experts.down_proj_scales[:, :, :2], False)
    match = r"model.layers.1.mlp.experts.down_proj_scales.shape\[2\] must be the module's size = 3"
    with pytest.raises(ValueError, match=match):
        integration.adapt(model)
