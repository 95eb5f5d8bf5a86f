"""One set of bits: a forward pass gives the same result with gradients and without them."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from hypothesis import given
from modular import EXPERTS, setup
from pairwise import cover
from strategies import layers
from table_items import an_item_a_kernel, every_row

import moe_ops
from moe_ops.pipeline.row_spaces import depends_on_batch
from moe_ops.scheme import SCHEMES
from moe_ops.testing import Problem, call, make_inputs, quantize_inputs
from moe_ops.training import ExpertLora

KINDS = [k for k in EXPERTS if not k.is_monolithic() and k.has_gradients()]
TOKENS = (1, 9) if INTERPRETED else (1, 2, 7, 40, 300)
FACTORS = {
    "scheme": [*SCHEMES],
    "tokens": TOKENS,
    "activation": ("silu", "swigluoai", "gelu_no_mul"),
    "on_input": (False, True),
    "has_bias": (False, True),
    "routing": ("uniform", "holes"),
    "invariant": (False, True),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
}
RULES = [
    (
        ("scheme", "invariant"),
        lambda scheme, invariant: not invariant or not depends_on_batch(SCHEMES[scheme].activation),
    ),
]


def both(problem, device, **more):
    """The results of `fused_experts` without gradients, and of all that may be trained."""
    inputs, config, _ = quantize_inputs(problem, make_inputs(problem, device))
    return both_of(problem, inputs, config, **more)


def both_of(problem, inputs, config, **more):
    """`both` with inputs that exist."""
    more = {"quant_config": config, **more}
    plain = call(moe_ops.fused_experts, problem, inputs, **more)
    x, weights = inputs.hidden_states.clone(), inputs.topk_weights.clone()
    trained = inputs._replace(
        hidden_states=x.requires_grad_(), topk_weights=weights.requires_grad_()
    )
    if problem.scheme == "unquantized":
        trained = trained._replace(
            w1=inputs.w1.clone().requires_grad_(), w2=inputs.w2.clone().requires_grad_()
        )
    out = call(moe_ops.fused_experts, problem, trained, **more)
    assert out.requires_grad
    return plain, out.detach()


def differ(problem, device, **more):
    """The number of entries that differ."""
    plain, trained = both(problem, device, **more)
    return int((plain.view(torch.uint8) != trained.view(torch.uint8)).sum())


CASES = cover(FACTORS, RULES)[:: 3 if INTERPRETED else 1]
WIDTHS = (48, 40) if INTERPRETED else (160, 136)


@pytest.mark.kernel
@an_item_a_kernel("case", CASES)
def test_experts(case, device):
    """Every scheme, activation, load and flag, in pairs."""
    case = dict(case)
    tokens, dtype, invariant = case.pop("tokens"), case.pop("dtype"), case.pop("invariant")
    problem = Problem(tokens, 6, 2, *WIDTHS, dtype, **case)
    assert not differ(problem, device, batch_invariant=invariant)


@pytest.mark.kernel
@given(problem=layers())
def test_any_sizes(problem, device):
    assert not differ(problem, device)


REAL = ((64, 8, 2048, 1024), (8, 2, 2880, 1408))
BLOCKS = ("fp8_block128", "int4_w4a16_g128")
OTHERS = ("unquantized", "fp8_channel", "int8_channel", "mxfp4_w4a16")


@pytest.mark.skipif(not HAS_CUDA, reason="kernels for real sizes")
@pytest.mark.kernel
@pytest.mark.parametrize(
    ("scheme", "sizes"), [*((s, REAL[0]) for s in BLOCKS), *((s, z) for s in OTHERS for z in REAL)]
)
def test_real_sizes(scheme, sizes, device):
    """Loads at which each family of kernels is chosen; gigabytes of weights are made once."""
    most = Problem(4096, *sizes, torch.bfloat16, scheme=scheme)
    inputs, config, _ = quantize_inputs(most, make_inputs(most, device))
    wrong = []
    for tokens, activation in itertools.product((1, 8, 64, 512, 4096), ("silu", "swigluoai")):
        problem = replace(most, num_tokens=tokens, activation=activation)
        few = inputs._replace(
            hidden_states=inputs.hidden_states[:tokens],
            topk_weights=inputs.topk_weights[:tokens],
            topk_ids=inputs.topk_ids[:tokens],
        )
        plain, trained = both_of(problem, few, config)
        if not torch.equal(plain, trained):
            wrong.append((tokens, activation))
    assert not wrong


FEW = {
    "num_tokens": TOKENS[:4],
    "scheme": ("unquantized", "fp8_channel", "int8_w8a16", "mxfp8"),
    "has_bias": (False, True),
}


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@every_row("case", cover(FEW, []))
def test_modular_kernels(kind, case, device):
    """Experts of both formats, with the activation in the first GEMM or apart."""
    problem = Problem(1, 6, 2, 64, 48, torch.bfloat16, routing="holes").with_(**case)
    s = setup(problem, kind, device)
    plain = s.apply()
    x = s.inputs.hidden_states.clone().requires_grad_()
    trained = s._replace(inputs=s.inputs._replace(hidden_states=x)).apply()
    assert trained.requires_grad
    assert torch.equal(plain, trained.detach())


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", ["unquantized", "fp8_block128", "mxfp4_w4a16"])
def test_layers(scheme, device):
    """Train and eval, frozen and not, with a shared expert; recomputed, compiled."""
    plain = moe_ops.FusedMoE(6, 2, 128, 128, n_shared_experts=1, device=device)
    g = torch.Generator().manual_seed(0)
    for p in plain.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) / 11)
    plain.to(torch.bfloat16)
    layer = plain
    if scheme != "unquantized":
        layer = moe_ops.quantize_(plain, scheme, progress=False)
        layer.unpack_()
    x, logits = (
        torch.randn(TOKENS[1], n, generator=g).to(device, torch.bfloat16) for n in (128, 6)
    )
    with torch.no_grad():
        expected = layer.eval()(x, logits)
    again = {"use_reentrant": False}
    results = {
        "logits": layer(x, logits.clone().requires_grad_()),
        "tokens": layer.train()(x.requires_grad_(), logits),
        "recomputed": torch.utils.checkpoint.checkpoint(layer, x, logits, **again),
    }
    if not INTERPRETED:
        results["compiled"] = torch.compile(layer, fullgraph=True)(x, logits)
    results["frozen"] = layer.requires_grad_(False)(x, logits)
    wrong = [name for name, out in results.items() if not torch.equal(expected, out.detach())]
    assert not wrong


@pytest.mark.kernel
@every_row("beside", ("w1", "w2"))
@every_row("scheme", ("unquantized", "int4_w4a16_g32", "fp8_channel"))
def test_adapters(scheme, beside, device):
    """Adapters are added to rounded products, whether or not they are trained."""
    problem = Problem(TOKENS[1], 6, 2, 64, 32, torch.bfloat16, scheme=scheme)
    inputs, config, _ = quantize_inputs(problem, make_inputs(problem, device))
    shapes = {"w1": ((4, 64), (64, 4)), "w2": ((4, 32), (64, 4))}[beside]
    pair = [torch.randn(1, 6, *s, device=device) / 8 for s in shapes]
    ids = torch.arange(TOKENS[1], device=device) % 2 - 1
    scaling = torch.ones(1, device=device)
    results = []
    for trained in (False, True):
        mine = tuple(t.clone().requires_grad_(trained) for t in pair)
        one, two = (mine, None) if beside == "w1" else (None, mine)
        lora = ExpertLora(one, two, ids, scaling)
        results.append(call(moe_ops.fused_experts, problem, inputs, quant_config=config, lora=lora))
    assert results[1].requires_grad and torch.equal(results[0], results[1].detach())


@pytest.mark.kernel
def test_a_token_has_the_same_bits_beside_others(device):
    """Batch-invariant: a token alone without gradients, and among others with them."""
    problem = Problem(TOKENS[-1], 6, 2, 64, 48, torch.bfloat16)
    inputs = make_inputs(problem, device)
    x = inputs.hidden_states.clone().requires_grad_()
    trained = call(
        moe_ops.fused_experts, problem, inputs._replace(hidden_states=x), batch_invariant=True
    )
    one = replace(problem, num_tokens=1)
    for token in (0, problem.num_tokens // 2, problem.num_tokens - 1):
        names = ("hidden_states", "topk_weights", "topk_ids")
        mine = {n: getattr(inputs, n)[token : token + 1].contiguous() for n in names}
        alone = call(moe_ops.fused_experts, one, inputs._replace(**mine), batch_invariant=True)
        assert torch.equal(alone[0], trained[token].detach()), token
