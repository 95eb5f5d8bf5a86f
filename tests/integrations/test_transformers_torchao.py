"""Experts whose weights torchao quantized, through "moe_ops": taken apart into what they store."""

import pytest
import torch
from compilations import Compilations
from torch import nn

transformers = pytest.importorskip("transformers")

from tiny_transformers import Config, E, H, K, use_experts_implementation  # noqa: E402

import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops import fused_experts  # noqa: E402
from moe_ops.integrations._experts import weights_of  # noqa: E402
from moe_ops.scheme import FusedMoEQuantConfig, get_scheme, quantize_weight  # noqa: E402

WIDE_H, WIDE_I = 4 * H, 64
"""Sizes of which 32 is a divisor."""


class Stored(torch.Tensor):
    """A tensor subclass that looks like a float32 weight and holds its parts, as torchao's do."""

    @staticmethod
    def __new__(cls, qdata, scale, shape, **rest):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, qdata, scale, shape, **rest):
        self.qdata, self.scale = qdata, scale
        self.rest = {"act_quant_kwargs": None, "is_swizzled_scales": False, **rest}
        self.__dict__.update(self.rest)

    def __tensor_flatten__(self):
        """Every tensor by its name: torch 2.14 takes none beside them."""
        tensors = [name for name, value in self.rest.items() if isinstance(value, torch.Tensor)]
        rest = {name: value for name, value in self.rest.items() if name not in tensors}
        return ["qdata", "scale", *tensors], rest

    @classmethod
    def __tensor_unflatten__(cls, inner, rest, size, stride):
        return cls(**inner, shape=size, **rest)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            x = args[0]
            return cls(x.qdata, x.scale, x.shape, **x.rest)
        raise NotImplementedError(f"{func} of {cls.__name__}: it was not taken apart")


class Float8Tensor(Stored):
    pass


class MXTensor(Stored):
    pass


class NVFP4Tensor(Stored):
    pass


@use_experts_implementation
class Plain(nn.Module):
    def __init__(self, config, w1, w2):
        super().__init__()
        self.num_experts, self.act_fn = E, nn.SiLU()
        self.gate_up_proj = nn.Parameter(w1, requires_grad=False)
        self.down_proj = nn.Parameter(w2, requires_grad=False)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("eager")


def plain_weights():
    g = torch.Generator().manual_seed(0)
    w1 = torch.randn(E, 2 * WIDE_I, WIDE_H, generator=g) / 8
    return w1, torch.randn(E, WIDE_H, WIDE_I, generator=g) / 8


def float8(q, scheme, w):
    weight, only = get_scheme(scheme).weight, get_scheme(scheme).activation is None
    rows, cols = weight.group
    block = [1, rows, w.shape[2] if cols == -1 else cols]
    asks = None if only else {"granularity": "as the weight's"}
    return Float8Tensor(q.data, q.scale, w.shape, block_size=block, act_quant_kwargs=asks)


def mx(q, scheme, w):
    scale = q.scale.view(torch.float8_e8m0fnu)
    element = torch.float4_e2m1fn_x2
    return MXTensor(q.data, scale, w.shape, block_size=32, elem_dtype=element)


def nvfp4(q, scheme, w):
    """torchao has one global scale for all experts."""
    whole = q.global_scale[:1].view(1, 1, 1)
    return NVFP4Tensor(q.data, q.scale, w.shape, block_size=16, per_tensor_scale=whole)


SCHEMES = {
    "fp8_w8a16": float8, "fp8_channel": float8, "fp8_block32": float8, "fp8_block64x32": float8,
    "fp8_w8a16_block32": float8, "mxfp4_w4a16": mx, "nvfp4_w4a16": nvfp4,
}  # fmt: skip


def quantized(scheme):
    """A module, and what `fused_experts` takes for the same weights."""
    make, weights = SCHEMES[scheme], plain_weights()
    stored = [quantize_weight(w, scheme) for w in weights]
    if make is nvfp4:
        stored = [q._replace(global_scale=q.global_scale[:1].expand(E)) for q in stored]
    module = Plain(Config, *(make(q, scheme, w) for q, w in zip(stored, weights, strict=True)))
    config = FusedMoEQuantConfig.from_weights(scheme, *stored)
    return module, (stored[0].data, stored[1].data, config)


def routed(tokens):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, WIDE_H, generator=g).bfloat16()
    ids = torch.rand(tokens, E, generator=g).topk(K).indices
    return x, ids, torch.rand(tokens, K, generator=g)


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_taken_apart(scheme):
    module, (w1, w2, config) = quantized(scheme)
    assert integration.check(nn.ModuleDict({"experts": module})) == []
    x, ids, weights = routed(9)
    expected = fused_experts(x, w1, w2, weights, ids, quant_config=config)
    assert torch.equal(module(x, ids, weights), expected)
    assert weights_of(module).w1.data_ptr() == w1.data_ptr()


@torch.no_grad()
def test_a_transposed_layout():
    """Scales of rows along the contraction, whichever axis that is."""
    module, (w1, w2, config) = quantized("fp8_channel")
    module.is_transposed = True
    for name in ("gate_up_proj", "down_proj"):
        old = getattr(module, name)
        _, n, k = old.shape
        parts = old.qdata.transpose(1, 2).contiguous(), old.scale.transpose(1, 2)
        new = Float8Tensor(*parts, (E, k, n), block_size=[1, k, 1], act_quant_kwargs={"a": 1})
        setattr(module, name, nn.Parameter(new, requires_grad=False))
    x, ids, weights = routed(9)
    expected = fused_experts(x, w1, w2, weights, ids, quant_config=config)
    assert torch.equal(module(x, ids, weights), expected)


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_w8a16"])
@torch.no_grad()
def test_one_scale_an_expert(scheme):
    module, (w1, w2, config) = quantized(scheme)
    scales = {"w1_scale": config.w1_scale, "w2_scale": config.w2_scale}
    for name, key in (("gate_up_proj", "w1_scale"), ("down_proj", "w2_scale")):
        old = getattr(module, name)
        scale = old.scale[:, :1].contiguous()
        rest = old.rest | {"block_size": [1, *old.shape[1:]]}
        new = Float8Tensor(old.qdata, scale, old.shape, **rest)
        setattr(module, name, nn.Parameter(new, requires_grad=False))
        scales[key] = scale.expand(-1, old.shape[1], -1).contiguous()
    x, ids, weights = routed(9)
    config = FusedMoEQuantConfig(scheme, **scales)
    expected = fused_experts(x, w1, w2, weights, ids, quant_config=config)
    assert torch.equal(module(x, ids, weights), expected)


@torch.no_grad()
def test_a_gate_of_its_own_runs_between_the_gemms():
    module, _ = quantized("mxfp4_w4a16")
    x, ids, weights = routed(9)
    fused = module(x, ids, weights)
    module._apply_gate = lambda rows: nn.functional.silu(rows[:, :WIDE_I]) * rows[:, WIDE_I:]
    between = module(x, ids, weights)
    assert not torch.equal(between, fused)  # the product is rounded once more
    assert (between - fused).norm() <= 2**-7 * fused.norm()


@pytest.mark.parametrize("scheme", ["fp8_block32", "nvfp4_w4a16"])
@torch.no_grad()
def test_experts_compile_whole(scheme):
    module, _ = quantized(scheme)
    torch._dynamo.reset()
    backend = Compilations()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (7, 5, 40):
        arguments = routed(tokens)
        for tensor in arguments:
            torch._dynamo.mark_dynamic(tensor, 0)
        assert torch.equal(compiled(*arguments), module(*arguments))
    assert backend.count == 1


UNSUPPORTED = [
    ("mxfp4_w4a16", {"is_swizzled_scales": True}, "MXTensor with swizzled scales .*=False works"),
    ("nvfp4_w4a16", {"is_swizzled_scales": True}, "NVFP4Tensor with swizzled scales"),
    ("mxfp4_w4a16", {"elem_dtype": torch.float8_e4m3fn}, "MXTensor of torch.float8_e4m3fn"),
    ("mxfp4_w4a16", {"block_size": 64}, "MXTensor with block_size 64 .32 works"),
    ("fp8_channel", {"block_size": [1, 2 * WIDE_I, 8]}, "Float8Tensor with block_size"),
    ("fp8_channel", {"block_size": [E, 1, WIDE_H]}, "Float8Tensor with block_size"),
    ("fp8_channel", {"act_quant_kwargs": None}, "weights in fp8_w8a16 and fp8_channel"),
]


@pytest.mark.parametrize(("scheme", "changes", "message"), UNSUPPORTED)
@torch.no_grad()
def test_what_is_not_supported_is_said(scheme, changes, message):
    module, _ = quantized(scheme)
    old = module.gate_up_proj
    new = type(old)(old.qdata, old.scale, old.shape, **old.rest | changes)
    module.gate_up_proj = nn.Parameter(new, requires_grad=False)
    with pytest.raises(NotImplementedError, match=f"got Plain with {message}"):
        module(*routed(3))
    (found,) = integration.check(nn.ModuleDict({"experts": module}))
    assert found.reason.startswith("not supported: ")


@torch.no_grad()
def test_one_weight_alone_is_not_enough():
    module, _ = quantized("fp8_channel")
    module.down_proj = nn.Parameter(plain_weights()[1], requires_grad=False)
    with pytest.raises(NotImplementedError, match="beside one of torch.float32"):
        module(*routed(3))
    (found,) = integration.check(nn.ModuleDict({"experts": module}))
    assert "two of a kind work" in found.reason
