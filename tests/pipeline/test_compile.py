"""torch.compile over the library's own pipeline: whole, dynamic, once, and bitwise equal."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops.testing import Problem, call, make_inputs

TOKENS = (7, 5, 64, 1, 2, 0, 1024)
E, K, H = 8, 2, 32
BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def weights(dtype, device, **changes):
    problem = Problem(4, E, K, H, 48, dtype, **changes)
    return problem, make_inputs(problem, device)


def batch(tokens, dtype, device):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=g).to(dtype).to(device)
    return x, torch.randn(tokens, E, generator=g).to(device)


def pipeline(w1, w2):
    """Routing, alignment, experts and sum."""

    def layer(x, logits):
        topk_weights, topk_ids = moe_ops.fused_topk(x, logits, K, True)
        return moe_ops.fused_experts(x, w1, w2, topk_weights, topk_ids)

    return layer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_compilation_for_every_token_count(backend, dtype, device):
    """With backed_size_oblivious even 1 and 0 tokens compile nothing new."""
    _, inputs = weights(dtype, device)
    layer = pipeline(inputs.w1, inputs.w2)
    counter = CompileCounterWithBackend(backend)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        first = batch(TOKENS[0], dtype, device)
        assert torch.equal(compiled(*first), layer(*first))
        with torch.compiler.set_stance("fail_on_recompile"):
            for tokens in TOKENS[1:]:
                arguments = batch(tokens, dtype, device)
                assert torch.equal(compiled(*arguments), layer(*arguments))
    assert counter.frame_count == 1


@pytest.mark.parametrize("first", [7, 1])
def test_unbacked_token_counts(first, device):
    """mark_unbacked does the same, also when the first call has one token."""
    _, inputs = weights(torch.float32, device)
    layer = pipeline(inputs.w1, inputs.w2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (first, *TOKENS):
        x, logits = batch(tokens, torch.float32, device)
        for t in (x, logits):
            torch._dynamo.decorators.mark_unbacked(t, 0, shape_id="tokens")
        assert torch.equal(compiled(x, logits), layer(x, logits))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"has_bias": True, "activation": "gelu_tanh"},
        {"num_local_experts": 3, "routing": "holes"},
        {"on_input": True, "activation": "silu(clamp_limit=7.0)"},
        {"activation": "relu2_no_mul"},
    ],
    ids=lambda c: "-".join(c),
)
def test_every_setting_compiles(changes, device):
    problem, inputs = weights(torch.float32, device, **changes)

    def layer(inputs):
        return call(moe_ops.fused_experts, problem, inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(inputs), layer(inputs))


def test_activation_values_compile(device):
    _, inputs = weights(torch.float32, device)
    x, w1, w2, w, ids = inputs[:5]
    for activation in (
        moe_ops.MoEActivation.GELU,
        moe_ops.Activation("silu", clamp_limit=1.0),
        "swish",
    ):

        def layer(x, activation=activation):
            return moe_ops.fused_experts(x, w1, w2, w, ids, activation=activation)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))


def test_the_graph_shows_every_stage(device):
    _, inputs = weights(torch.float32, device)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    torch.compile(pipeline(inputs.w1, inputs.w2), fullgraph=True, backend=keep)(
        *batch(7, torch.float32, device)
    )
    called = [str(n.target) for n in graphs[0].graph.nodes if "moe_ops" in str(n.target)]
    assert called == [
        f"moe_ops.{name}.default"
        for name in (
            "fused_topk",
            "plan_slots",
            "expert_product",
            "expert_product",
            "moe_fused_mul_sum",
        )
    ]


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_layer_module_compiles(num_tokens, device):
    layer = moe_ops.FusedMoE(E, K, H, 48, device=device, has_bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.2)
    x, logits = batch(num_tokens, torch.float32, device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, logits), layer(x, logits))
