"""The modular kernel compiled, exported and captured: whole, once, bit by bit."""

import pytest
import torch
from conftest import HAS_CUDA
from modular import EXPERTS, SEPARATE, router_logits, setup, twice
from pairwise import half_exhaustive
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops import checks
from moe_ops.testing import Problem

TOKENS = (7, 64, 1, 2, 0, 300)  # 7: no other size, or Dynamo takes them for one
E, K, H, I = 3, 2, 160, 136  # noqa: E741
MODULAR = tuple(e for e in EXPERTS if not e.is_monolithic())
SCHEMES = ("unquantized", "fp8_tensor_static", "int8_channel", "fp8_block128", "int4_w4a16_g32")
SETTINGS = (
    {},
    {"num_local_experts": 2, "on_input": True, "has_bias": True},
    {"activation": "relu2_no_mul", "top_k": 1},
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def kernel_of(experts, scheme, device, options=None, **changes):
    """A kernel whose Batched format has room for every token count."""
    problem = Problem(max(TOKENS), E, K, H, I, torch.bfloat16, scheme=scheme).with_(**changes)
    return setup(problem, experts, device, **(options or {}))


def batch(s, tokens):
    x, _, _, weights, ids, *_ = s.inputs
    return x[:tokens].clone(), weights[:tokens].clone(), ids[:tokens].clone()


def layer_of(s):
    """``(x, weights, ids) -> tokens``."""
    constant = s.arguments()
    for name in ("hidden_states", "topk_weights", "topk_ids"):
        del constant[name]

    def layer(x, weights, ids):
        return s.kernel.apply(x, topk_weights=weights, topk_ids=ids, **constant)

    return layer


def same(actual, expected):
    actual, expected = (t if isinstance(t, tuple) else (t,) for t in (actual, expected))
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def check_one_compilation(layer, batches, backend="aot_eager"):
    """The first batch compiles, and no other does."""
    counter = CompileCounterWithBackend(backend)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        assert same(compiled(*batches[0]), layer(*batches[0]))
        with torch.compiler.set_stance("fail_on_recompile"):
            for arguments in batches[1:]:
                assert same(compiled(*arguments), layer(*arguments))
    assert counter.frame_count == 1


def backend_of(experts, choice, choices):
    """ "aot_eager" at least once for each choice; elsewhere Dynamo's graph runs as it is.

    Dynamo finds breaks and guards on the number of tokens; AOTAutograd takes twice as long again.
    """
    number = MODULAR.index(experts) - choices.index(choice)
    return "eager" if number % len(choices) else "aot_eager"


@pytest.mark.parametrize(("experts", "scheme"), half_exhaustive(MODULAR, SCHEMES))
def test_one_compilation_for_every_token_count(experts, scheme, device):
    changes = SETTINGS[(MODULAR.index(experts) + SCHEMES.index(scheme)) % len(SETTINGS)]
    s = kernel_of(experts, scheme, device, **changes)
    backend = backend_of(experts, scheme, SCHEMES)
    check_one_compilation(layer_of(s), [batch(s, t) for t in TOKENS], backend)


OPTIONS = [
    {"asynchronous": True},
    {"shared_experts": twice},
    {"shared_experts": twice, "asynchronous": True},
]


@pytest.mark.parametrize(
    ("experts", "options"),
    half_exhaustive(MODULAR, OPTIONS),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_every_option_compiles_once(experts, options, device):
    s = kernel_of(experts, "fp8_channel", device, options)
    backend = backend_of(experts, options, OPTIONS)
    check_one_compilation(layer_of(s), [batch(s, t) for t in TOKENS], backend)


@pytest.mark.parametrize("experts", MODULAR)
def test_inplace_compiles_once(experts, device):
    s = kernel_of(experts, "int8_channel", device, {"inplace": True})
    layer = layer_of(s)

    def on_a_copy(x, weights, ids):
        mine = x.clone()
        result = layer(mine, weights, ids)
        return result, mine

    backend = "aot_eager" if experts in MODULAR[::3] else "eager"
    check_one_compilation(on_a_copy, [batch(s, t) for t in TOKENS], backend)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_monolithic_compiles_once(scheme, device):
    s = kernel_of(moe_ops.pipeline.MonolithicExperts, scheme, device)
    logits = router_logits(s.problem, device)
    _, w1, w2, *_ = s.inputs

    def layer(x, logits):
        return s.kernel.apply_monolithic(x, w1, w2, logits, "silu", -1, None, False)

    x, backend = s.inputs.hidden_states, "aot_eager" if scheme in SCHEMES[::3] else "eager"
    batches = [(x[:t].clone(), logits[:t].clone()) for t in TOKENS]
    check_one_compilation(layer, batches, backend)


@pytest.mark.parametrize("experts", MODULAR[:2])
def test_chunks_compile_once_for_each_number_of_chunks(experts, device):
    if not setup(Problem(), experts).kernel.fused_experts.supports_chunking():
        return
    s = kernel_of(experts, "fp8_block128", device, {"chunk_size": 32})
    layer, counter = layer_of(s), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens, compilations in ((20, 1), (31, 1), (32, 1), (40, 2), (63, 2), (70, 3), (95, 3)):
        arguments = batch(s, tokens)
        assert same(compiled(*arguments), layer(*arguments))
        assert counter.frame_count == compilations, tokens
    assert same(compiled(*batch(s, 25)), layer(*batch(s, 25))) and counter.frame_count == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "scheme"),
    half_exhaustive(
        (moe_ops.pipeline.TritonExperts, moe_ops.pipeline.BatchedTritonExperts, SEPARATE[0]),
        ("fp8_block128", "int4_w4a16_g32"),
        where=not HAS_CUDA,
    ),
)
def test_inductor_compiles_once(experts, scheme, device):
    s = kernel_of(experts, scheme, device)
    layer = layer_of(s)
    check_one_compilation(layer, [batch(s, t) for t in TOKENS[:3]], "inductor")


@pytest.mark.parametrize("scheme", half_exhaustive(moe_ops.SCHEMES))
def test_the_configuration_is_an_input(scheme, device):
    """Other scales of the same scheme compile nothing new; another scheme does."""
    s = kernel_of(moe_ops.pipeline.TritonExperts, scheme, device, has_bias=True)
    _, w1, w2, *_ = s.inputs

    def layer(x, weights, ids, config):
        return moe_ops.fused_experts(x, w1, w2, weights, ids, quant_config=config)

    other = kernel_of(moe_ops.pipeline.TritonExperts, scheme, device, has_bias=True).config
    scaled = torch.utils._pytree.tree_map(lambda t: t + t if t.dtype in checks.FLOATS else t, other)
    batches = [(*batch(s, t), c) for t in TOKENS[:4] for c in (s.config, scaled)]
    check_one_compilation(layer, batches, "aot_eager" if scheme in SCHEMES else "eager")


class Experts(nn.Module):
    """A kernel with its weights as buffers."""

    def __init__(self, s):
        super().__init__()
        self.s = s
        self.register_buffer("w1", s.inputs.w1)
        self.register_buffer("w2", s.inputs.w2)

    def forward(self, x, weights, ids):
        return self.s.kernel.apply(x, self.w1, self.w2, weights, ids)


@pytest.mark.parametrize(
    ("experts", "scheme"), half_exhaustive(MODULAR, ("fp8_block128", "int4_w4a16_g128_zp"))
)
def test_export_with_the_configuration_closed_over(experts, scheme, device):
    s = kernel_of(experts, scheme, device)
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    module = Experts(s)
    shapes = ({0: tokens}, {0: tokens}, {0: tokens})
    program = torch.export.export(module, batch(s, 7), dynamic_shapes=shapes).module()
    for count in TOKENS[:4]:
        assert same(program(*batch(s, count)), module(*batch(s, count)))


class WithConfig(nn.Module):
    def forward(self, x, w1, w2, weights, ids, config):
        return moe_ops.fused_experts(x, w1, w2, weights, ids, quant_config=config)


def exported(s, arguments):
    """`fused_experts` for any number of tokens, with the configuration as an input."""
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    leaves, _ = torch.utils._pytree.tree_flatten(s.config)
    shapes = ({0: tokens}, None, None, {0: tokens}, {0: tokens}, [None] * len(leaves))
    return torch.export.export(WithConfig(), arguments, dynamic_shapes=shapes)


FIRST, *REST = moe_ops.SCHEMES


@pytest.mark.parametrize("scheme", half_exhaustive([*REST, FIRST]))  # the half left out above
def test_export_with_the_configuration_as_input(scheme, device, tmp_path):
    """Saved and loaded: the configuration is a pytree with a name."""
    s = kernel_of(moe_ops.pipeline.TritonExperts, scheme, device, has_bias=True)
    _, w1, w2, *_ = s.inputs

    def arguments(count):
        x, weights, ids = batch(s, count)
        return x, w1, w2, weights, ids, s.config

    torch.export.save(exported(s, arguments(7)), tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for count in TOKENS[:4]:
        assert same(loaded(*arguments(count)), WithConfig()(*arguments(count)))


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_tensor_static", "fp8_channel"])
def test_an_export_for_any_tokens_has_the_operators_of_one(scheme, device):
    """One token has kernels of its own, which quantize: nothing is decided for two or more."""
    s = kernel_of(moe_ops.pipeline.TritonExperts, scheme, device)
    _, w1, w2, *_ = s.inputs
    x, weights, ids = batch(s, 7)
    program = exported(s, (x, w1, w2, weights, ids, s.config))
    operators = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert "moe_ops.expert_product_sum.default" in operators
    assert "moe_ops.moe_quantize.default" not in operators
