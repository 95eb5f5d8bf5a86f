"""Fused shared experts whose results a sigmoid gate weights, token by token."""

import copy
import importlib
import pickle

import pytest
import torch
from checkpoints import Experts, numbers, per_expert
from conftest import INTERPRETED
from small_layers import E, H, K, T, batch, make
from torch.autograd import grad

import moe_ops
from moe_ops.testing import (
    Inputs,
    Problem,
    assert_layer_matches,
    assert_matches_reference,
    bounded_oracle,
    reference_experts,
)

I = 128  # noqa: E741
GATE = "shared_expert_gate_weight"
GATED = {"n_shared_experts": 2, "shared_expert_gate": True}


def source_of(shared=2, scheme=None, seed=0):
    """A checkpoint of E experts, and of shared ones side by side, with a gate."""
    experts, wide = Experts.random(E, H, I), Experts.random(1, H, shared * I, seed=seed + 1)
    if scheme is not None:
        experts, wide = experts.quantized(scheme), wide.quantized(scheme)
    source = per_expert(experts)
    for name, x in per_expert(wide).items():
        source[name.replace("experts.0", "shared_expert")] = x
    g = torch.Generator().manual_seed(2)
    return source | {"shared_expert_gate.weight": torch.randn(1, H, generator=g) * 0.4}


def loaded(scheme=None, source=None, **options):
    layer = moe_ops.FusedMoE(E, K, H, I, scheme=scheme, **{**GATED, **options})
    moe_ops.load_checkpoint(layer, source or source_of(scheme=scheme), progress=False)
    return layer


def block_of(package, name, dtype, width, seed=0):
    """A block of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    config = getattr(transformers, name.replace("SparseMoeBlock", "Config"))(
        hidden_size=H, moe_intermediate_size=I, shared_expert_intermediate_size=width,
        num_experts=E, num_experts_per_tok=K, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block, g = getattr(module, name)(config), torch.Generator().manual_seed(seed)
    for p in block.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return block.to(dtype)


def gradients(block, x, upstream):
    """A block's result; gradients of tokens, experts, shared experts and their gate."""
    x = x.to(block.gate.weight.dtype).requires_grad_()
    out = block(x[None])
    out = (out[0] if isinstance(out, tuple) else out)[0]
    shared = block.shared_expert
    projections = [shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight]
    params = [*block.experts.parameters(), *projections, block.shared_expert_gate.weight]
    return [out, *grad(out, [x, *params], upstream.to(out.dtype))]


def as_stored(found, count):
    """A block's gradients in the shapes of a layer's: result, tokens, w13, w2, gate."""
    out, x, w13, w2, gate, up, down, of_gate = found
    more = [torch.cat(pair, 0) for pair in zip(*(w.chunk(count) for w in (gate, up)), strict=True)]
    w13 = torch.cat((w13, torch.stack(more)))
    return [out, x, w13, torch.cat((w2, torch.stack(down.chunk(count, 1)))), of_gate]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("package", "name", "count"),
    [
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock", 1),
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock", 4),
        ("qwen3_next", "Qwen3NextSparseMoeBlock", 2),
    ],
)
def test_block_with_gradients(package, name, count, dtype):
    """Transformers' block in float64 is the oracle, and in the layer's dtype the reference."""
    block = block_of(package, name, dtype, count * I)
    layer = moe_ops.FusedMoE(
        E, K, H, I, n_shared_experts=count, shared_expert_gate=True, params_dtype=dtype
    )
    prefix = "model.layers.3.mlp."
    state = {prefix + n: x for n, x in block.state_dict().items()}
    assert moe_ops.load_checkpoint(layer, state, prefix=prefix, progress=False).is_complete
    layer.requires_grad_()
    x, upstream = (rows.to(dtype) for rows in batch(logits=H))
    near = gradients(block, x, upstream)
    exact = gradients(copy.deepcopy(block).double(), x, upstream)
    given = x.clone().requires_grad_()
    logits = given @ block.gate.weight.detach().t()
    out = layer(given, logits)
    params = [layer.w13_weight, layer.w2_weight, getattr(layer, GATE)]
    mine = [out, *grad(out, [given, *params], upstream)]
    for actual, a, b in zip(mine, as_stored(exact, count), as_stored(near, count), strict=True):
        rows = (-1, H) if actual.shape == x.shape else (1, -1)
        assert_matches_reference(*(y.reshape(rows) for y in (actual, a, b)))
    with torch.no_grad():
        weights = layer.route(x, logits.detach()).topk_weights
    assert torch.equal(layer.route(given, logits).topk_weights, weights)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "scheme", [None, "fp8_channel", "fp8_block128", "int8_channel", "int4_w4a16_g32"]
)
def test_schemes(scheme, device):
    """The gate's weights against float64, and with these the layer against its oracle."""
    source = source_of(scheme=scheme)
    layer = loaded(scheme, source).to(device)
    x, logits = (rows.to(device) for rows in batch())
    weights, ids, _ = layer.route(x, logits)
    exact = (x.cpu().double() @ source["shared_expert_gate.weight"].double().t()).sigmoid()
    torch.testing.assert_close(weights[:, K:].cpu(), exact.float().expand(T, 2))
    assert torch.equal(ids[:, K:].cpu(), torch.tensor([E, E + 1], dtype=ids.dtype).expand(T, 2))
    problem = Problem(T, E + 2, K + 2, H, I, scheme=layer.scheme.name)
    given = (weights, ids, None, None, None)
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    exact = bounded_oracle(problem, Inputs(x, *numbers(layer), *given), config)
    stored = Inputs(x, layer.w13_weight, layer.w2_weight, *given)
    assert_layer_matches(layer(x, logits), exact, reference_experts(problem, stored, config))


@pytest.mark.kernel
def test_tokens_do_not_depend_on_each_other(device):
    """Bits do not depend on chunks, padding, other tokens or grad mode; padding has no gradient."""
    layer = loaded(batch_invariant=True).to(device).requires_grad_()
    tokens = 24 if INTERPRETED else 64
    x, logits = (rows.to(device) for rows in batch(tokens))
    with torch.no_grad():
        whole = layer(x, logits)
        for rows in (slice(1), slice(5, 7), slice(3, 20)):
            assert torch.equal(layer(x[rows], logits[rows]), whole[rows])
        weights = layer.route(x, logits).topk_weights
        alone = [layer.route(x[t : t + 1], logits[t : t + 1]).topk_weights for t in range(tokens)]
        assert torch.equal(torch.cat(alone), weights)
        layer.chunk_size = 5
        assert torch.equal(layer(x, logits), whole)
    layer.chunk_size = None
    padding = torch.arange(tokens, device=device) % 3 == 1
    x[padding], logits[padding] = torch.nan, torch.nan
    routed = layer.route(x, logits, is_padding=padding)
    assert not routed.topk_weights[padding].any() and (routed.topk_ids[padding] == -1).all()
    x.requires_grad_()
    out = layer(x, logits, is_padding=padding)
    assert torch.equal(out[~padding], whole[~padding]) and not out[padding].any()
    of_x, of_gate = grad(out.sum(), [x, getattr(layer, GATE)])
    assert not of_x[padding].any() and of_x[~padding].all(1).all() and of_gate.isfinite().all()


@pytest.mark.parametrize("scheme", [None, "fp8_block128"])
def test_copies_keep_the_gate(scheme):
    """State dicts, copies, pickles, casts, `quantize_`, and a layer that was made on meta."""
    layer, (x, logits) = loaded(scheme), batch()
    expected = layer(x, logits)
    gate = getattr(layer, GATE)
    assert layer.state_dict()[GATE].shape == (1, H) and gate.requires_grad is (scheme is None)
    text = "n_shared_experts=2, shared_expert_gate=True"
    assert not hasattr(gate, "weight_loader")
    with pytest.raises(ValueError, match=f"param must belong to experts, got {GATE}"):
        layer.weight_loader(gate, torch.ones(H), "shared_expert_gate.weight", "w1", 0)
    assert text in repr(layer) and "shared_expert" not in repr(make())
    other = moe_ops.FusedMoE(E, K, H, I, scheme=scheme, device="meta", **GATED)
    other.to_empty(device="cpu").reset_parameters()
    assert not getattr(other, GATE).any()
    other.load_state_dict(layer.state_dict())
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x, logits), expected)
    assert getattr(copy.deepcopy(layer).bfloat16(), GATE).dtype == torch.bfloat16
    lacking = {n: t for n, t in layer.state_dict().items() if n != GATE}
    with pytest.raises(RuntimeError, match=f"Missing key.*{GATE}"):
        other.load_state_dict(lacking)
    with pytest.raises(RuntimeError, match=f"Unexpected key.*{GATE}"):
        moe_ops.FusedMoE(E, K, H, I, scheme=scheme, n_shared_experts=2).load_state_dict(
            layer.state_dict()
        )
    if scheme is None:
        moe_ops.quantize_(layer, "int8_channel", progress=False)
        assert torch.equal(getattr(layer, GATE), gate) and not getattr(layer, GATE).requires_grad
        made = moe_ops.FusedMoE(E, K, H, I, scheme="int8_channel", **GATED)
        moe_ops.load_checkpoint(made, source_of(), quantize=True, progress=False)
        assert torch.equal(layer(x, logits), made(x, logits))


def test_compiled():
    """One graph for all numbers of tokens, forward and backward, with the bits of eager calls."""
    torch._dynamo.reset()
    layer = loaded().requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, tokens in enumerate((T, 4)):
        x, logits = batch(tokens)
        padding = torch.arange(tokens) == 1
        found = []
        for run in (compiled, layer):
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                out = run(x, logits, is_padding=padding)
            found.append([out, *grad(out.square().sum(), list(layer.parameters()))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_options_that_a_gate_does_not_fit():
    on_input = {"n_shared_experts": 1, "apply_router_weight_on_input": True}
    for options, name in (({}, "n_shared_experts"), (on_input, "apply_router_weight_on_input")):
        with pytest.raises(ValueError, match=f"shared_expert_gate must be False with(out)? {name}"):
            make(shared_expert_gate=True, **options)
    with pytest.raises(TypeError, match="shared_expert_gate must be a bool"):
        make(shared_expert_gate=1, n_shared_experts=1)


def test_the_function_takes_a_gate():
    """`select_experts` is the layer's routing; what does not fit raises."""
    (x, logits), gate = batch(), torch.randn(1, H)
    given = (x, logits, K, False, True)
    weights, _, _ = moe_ops.select_experts(
        *given, num_fused_shared_experts=1, shared_expert_gate=gate
    )
    torch.testing.assert_close(weights[:, K:], (x @ gate.t()).sigmoid())
    for changes, error, message in (
        ({"num_fused_shared_experts": 0}, ValueError, "shared_expert_gate must be None without"),
        ({"shared_expert_gate": gate[:, 1:]}, ValueError, r"shared_expert_gate.shape\[1\] must be"),
        ({"shared_expert_gate": gate.expand(2, H)}, ValueError, r"shared_expert_gate.shape\[0\]"),
        ({"shared_expert_gate": gate.double()}, TypeError, "shared_expert_gate must have a dtype"),
    ):
        how = {"num_fused_shared_experts": 1, "shared_expert_gate": gate} | changes
        with pytest.raises(error, match=message):
            moe_ops.select_experts(*given, **how)
