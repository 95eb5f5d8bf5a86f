"""gpt-oss with MXFP4 experts, adapted: from checkpoints' blocks and triton_kernels' layouts."""

import copy
import importlib.util
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

import moe_ops  # noqa: E402
import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.pipeline import forms  # noqa: E402
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


class Block(nn.Module):
    """``Mxfp4GptOssMLP`` of transformers 5.21, which calls neither its router nor its experts."""

    def __init__(self, router, experts):
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, hidden_states):
        raise AssertionError("triton_kernels")


def of_a_class(mlp, experts):
    """A block as transformers 5.21 and later load it."""
    return getattr(mxfp4, "Mxfp4GptOssMLP", Block)(mlp.router, experts)


def with_a_forward(mlp, experts):
    """A block as earlier transformers load it."""
    mlp.experts = experts
    mlp.forward = MethodType(mxfp4.mlp_forward, mlp)
    return mlp


KINDS = [of_a_class, with_a_forward if hasattr(mxfp4, "mlp_forward") else of_a_class]
"""How each layer is loaded: in both ways that the installed transformers knows, or nearly."""


def models(store):
    """A model as transformers loads MXFP4 (its forward needs a GPU), and one dequantized by it."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES)
    plain = transformers.GptOssForCausalLM(config).eval()
    quantized = copy.deepcopy(plain)
    for seed, (layer, own) in enumerate(zip(quantized.model.layers, blocks(plain), strict=True)):
        tensors = checkpoint(config, seed)
        experts = Mxfp4GptOssExperts(config)
        store(experts, tensors)
        layer.mlp = KINDS[seed](layer.mlp, experts)
        for name in PROJECTIONS:
            bias = nn.Parameter(tensors[f"{name}_bias"], False)
            setattr(experts, f"{name}_bias", bias)
            setattr(own.experts, f"{name}_bias", bias)
            stored = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
            weight = mxfp4.convert_moe_packed_tensors(*stored, dtype=torch.float32)
            setattr(own.experts, name, nn.Parameter(weight, False))
    return quantized, plain


def blocks(model):
    return [layer.mlp for layer in model.model.layers]


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
    monkeypatch.setattr(forms, "known_arch", lambda device: 90)
    integration.adapt(model)
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


def hooked(module):
    module._is_hooked = True


def with_own_forward(module):
    module.forward = lambda *_: None


def cut(experts):
    experts.down_proj_scales = nn.Parameter(experts.down_proj_scales[:, :, :2], False)


def without_a_bias(experts):
    experts.gate_up_proj_bias = nn.Parameter(experts.gate_up_proj_bias[:, 1:], False)


def without_a_layout(experts):
    experts.down_proj.storage.layout = None


SIZE = r"mlp.experts.down_proj_scales.shape\[2\] must be the module's size = 3"
FAILURES = [
    (lambda block: hooked(block), in_blocks, NotImplementedError, "mlp must hold all its experts"),
    (lambda block: hooked(block.experts), in_triton_kernels, NotImplementedError,
     "mlp must hold all its experts .*, got model.layers.1.mlp.experts under"),
    (lambda block: hooked(block.router), in_blocks, NotImplementedError, "must hold all its exp"),
    (with_own_forward, in_blocks, ValueError, "mlp must not have a forward of its own"),
    (lambda block: with_own_forward(block.experts), in_triton_kernels, ValueError,
     "mlp.experts must not have a forward of its own"),
    (lambda block: cut(block.experts), in_blocks, ValueError, SIZE),
    (lambda block: without_a_bias(block.experts), in_triton_kernels, ValueError, "bias.shape"),
    (lambda block: without_a_layout(block.experts), in_triton_kernels, AttributeError, "unswizz"),
    (lambda block: setattr(block.experts, "limit", None), in_blocks, TypeError, "experts.limit"),
    (lambda block: setattr(block.experts, "limit", -1.0), in_blocks, ValueError, "clamp_limit"),
    (lambda block: with_own_forward(block.router), in_blocks, TypeError, "unpack"),
]  # fmt: skip


def state(model):
    """All that `adapt` may change."""
    modules = dict(model.named_modules())
    keys = {name: {*m.__dict__, *m._parameters} for name, m in modules.items()}
    forwards = {name: m.__dict__.get("forward") for name, m in modules.items()}
    held = [id(x) for m in modules.values() for x in vars(m).values()]
    return keys, forwards, held, {name: x.data_ptr() for name, x in model.named_parameters()}


def test_what_cannot_be_adapted_leaves_the_model_as_it_was():
    """A later layer fails, in every way: the layer before it is not converted either."""
    for break_, store, error, match in FAILURES:
        model, _ = models(store)
        break_(blocks(model)[1])
        before = state(model)
        with pytest.raises(error, match=match):
            integration.adapt(model)
        assert state(model) == before
        assert len(integration.check(model)) == 2


def test_experts_that_transformers_has_split_over_ranks(tmp_path):
    """transformers' own code splits them, over one rank; it hooks other modules since 5.21."""
    model, _ = models(in_blocks)
    plan = {f"model.{name}": style for name, style in model.config.base_model_ep_plan.items()}
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        if importlib.util.find_spec("transformers.distributed.expert_parallel"):
            parallel = importlib.import_module("transformers.distributed.expert_parallel")
            layers = {k.replace("*", str(i)): style for k, style in plan.items() for i in range(2)}
            parallel.apply_expert_parallelism(model, mesh, mesh, layers)
        else:
            parallel = importlib.import_module("transformers.distributed.tensor_parallel")
            model._tp_plan = plan
            parallel.apply_tensor_parallelism(model, mesh)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(NotImplementedError, match="model.layers.0.mlp must hold all its experts"):
        integration.adapt(model)


def test_a_block_that_runs_another_forward_is_named():
    """As after transformers' kernels have replaced it."""
    model, _ = models(in_blocks)
    integration.adapt(model)
    del blocks(model)[1].forward
    assert [f.name for f in integration.check(model)] == ["model.layers.1.mlp.experts"]


@torch.no_grad()
def test_experts_in_host_memory():
    """Adapted blocks run slots; blocks that are not adapted are refused."""
    model, _ = models(in_blocks)
    model.set_experts_implementation("moe_ops")
    with pytest.raises(NotImplementedError, match=r"call adapt\(model\) first"):
        moe_ops.offload_(model, resident=2, progress=False)
    integration.adapt(model)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = model(ids).logits
    other = moe_ops.offload_(copy.deepcopy(model), resident=2, progress=False)
    assert torch.equal(other(ids).logits, expected)
    assert moe_ops.offload_stats(other).misses == 8
    assert all(torch.equal(x, other.state_dict()[n]) for n, x in model.state_dict().items())
