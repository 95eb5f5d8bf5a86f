"""Which gates are fused: those whose function was seen to be ours, and no other."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

transformers = pytest.importorskip("transformers")

import tiny_transformers as tiny  # noqa: E402
from sample_gates import (  # noqa: E402
    SoftcappedInside,
    SoftcappedSwiGLU,
    WithAParameter,
    above_a_thousand,
    default,
    half_more,
    interleaved,
    limited,
    limited_below,
    limited_below_too,
    limited_far_out,
    limited_in_code,
    limited_product,
    lost_far_out,
    of_a_buffer,
    of_gate_and_up,
    of_the_config,
    step,
    swapped,
    zero_near_zero,
)
from tiny_transformers import Config, E, Experts, H, I, routed, with_gate  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

from moe_ops import ops  # noqa: E402
from moe_ops.integrations import _gates  # noqa: E402
from moe_ops.integrations._experts import weights_of  # noqa: E402
from moe_ops.pipeline.gated_experts import gated_experts  # noqa: E402

MODULE_OF = {name: module for module, name in tiny.decorated_classes()}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def experts_of(name, device="cpu"):
    if name not in MODULE_OF:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    return tiny.experts_of(tiny.build(MODULE_OF[name], name, device)[0])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Qwen3MoeExperts", "silu"),
        ("Gemma4TextExperts", "gelu_tanh"),
        ("Lfm2MoeExperts", "silu"),
        ("NemotronHExperts", "relu2_no_mul"),
        ("GptOssExperts", "swigluoai(clamp_limit={limit},alpha=1.702,beta=1.0)"),
        ("OpenAIPrivacyFilterExperts", "silu(clamp_limit={limit},alpha=1.702,beta=1.0)"),
        ("MiniMaxM3VLExperts", "silu(clamp_limit={limit},alpha=1.702,beta=1.0)"),
        ("DeepseekV4Experts", "silu(clamp_limit={limit},alpha=1.0,beta=0.0)"),
        ("Glm5NextTextExperts", "silu(clamp_limit={limit},alpha=1.0,beta=0.0)"),
        ("HYV4Experts", "silu(clamp_limit={limit},alpha=1.0,beta=0.0)"),
        ("BeamExperts", "silu"),
        ("Inkling2Experts", "situ(beta={gate},linear_beta={up})"),
        ("Inkling2LoopExperts", "situ(beta={gate},linear_beta={up})"),
    ],
)
def test_what_architectures_are_recognised_as(name, key):
    experts = experts_of(name)[0]
    found = _gates.activation_of(experts)
    numbers = {"limit": getattr(experts, "swiglu_limit", getattr(experts, "limit", None))}
    if key.startswith("situ"):
        caps = experts.act_fn.gate_softcap, experts.act_fn.up_softcap
        numbers = {name: float(cap.softcap) for name, cap in zip(("gate", "up"), caps, strict=True)}
    assert found.key == key.format(**numbers)


@pytest.mark.parametrize("name", ACT2FN)
def test_activation_modules(name):
    """Every activation of transformers that has a name here is that function."""
    function = ACT2FN[name]
    kind = _gates.kind_of(function)
    same = {"silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "relu2"}
    assert (kind is not None) == (name in same | {"gelu_python_tanh"})
    if kind is not None:
        x = torch.linspace(-8, 8, 1001)[None]
        actual = ops.activation(x, kind.without_mul().value)
        torch.testing.assert_close(actual, function(x), rtol=1e-6, atol=1e-6)


def expected_of(experts, x, ids, weights):
    """In float64, an expert at a time."""
    out = x.double().new_zeros(x.shape)
    experts = experts.double()
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            h = experts._apply_gate((experts.gate_up_proj[e] @ x[t].double())[None])[0]
            out[t] += weights[t, j].double() * (experts.down_proj[e] @ h)
    experts.float()
    return out


GATES = [
    (default, {}, "silu"),
    (default, {"act_fn": nn.Mish()}, None),
    (default, {"act_fn": ACT2FN["gelu"]}, "gelu"),
    (default, {"act_fn": nn.GELU(approximate="tanh")}, None),
    (limited, {"limit": 2.5}, "silu(clamp_limit=2.5,alpha=1.0,beta=0.0)"),
    (limited, {"limit": 7}, "silu(clamp_limit=7.0,alpha=1.0,beta=0.0)"),
    (limited, {"limit": 1e4}, "silu(clamp_limit=10000.0,alpha=1.0,beta=0.0)"),
    (limited, {"limit": float("inf")}, "silu"),
    (limited, {"limit": torch.tensor(2.5)}, None),
    (step, {"limit": 2.5}, "swiglustep(clamp_limit=2.5)"),
    (limited_below_too, {"limit": 2.5}, None),
    (limited_in_code, {}, None),
    (limited_in_code, {"act_fn": ACT2FN["gelu"]}, None),
    (limited_far_out, {}, None),
    (lost_far_out, {}, None),
    (limited_below, {}, None),
    (limited_product, {}, None),
    (zero_near_zero, {}, None),
    (half_more, {}, None),
    (swapped, {}, None),
    (interleaved, {}, None),
    (above_a_thousand, {"limit": 6.0}, None),
    (of_the_config, {"alpha": 1.5}, None),
    (of_a_buffer, {"scale": torch.tensor(2.0)}, None),
    (of_gate_and_up, {"act_fn": SoftcappedSwiGLU(4.0, 25.0)}, "situ(beta=4.0,linear_beta=25.0)"),
    (of_gate_and_up, {"act_fn": SoftcappedSwiGLU(3, 3)}, "situ(beta=3.0,linear_beta=3.0)"),
    (of_gate_and_up, {"act_fn": SoftcappedInside(4.0, 25.0)}, None),
    (of_gate_and_up, {"act_fn": WithAParameter(4.0, 25.0)}, None),
]
IDS = [f"{g.__name__}-{'-'.join(map(str, a.values()))}".replace(" ", "") for g, a, _ in GATES]


@pytest.mark.parametrize(("gate", "attributes", "key"), GATES, ids=IDS)
@torch.no_grad()
def test_a_gate_is_fused_only_when_it_is_ours(gate, attributes, key, monkeypatch, device):
    """And either way the module computes what its gate says."""
    monkeypatch.setattr(Config, "alpha", 1.5, raising=False)
    attributes = {k: v.to(device) if torch.is_tensor(v) else v for k, v in attributes.items()}
    experts = with_gate(gate, **attributes).to(device)
    found = _gates.activation_of(experts)
    assert (found and found.key) == key
    x, ids, weights = routed(9, device)
    expected = expected_of(experts, x, ids, weights)
    error = (experts(x, ids, weights) - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("own", ["hook", "pre-hook", "forward", "hook inside", "forward inside"])
@torch.no_grad()
def test_an_activation_that_does_more_than_its_class_runs(own):
    """Also a module inside."""
    if "inside" in own:
        experts = with_gate(of_gate_and_up, act_fn=SoftcappedSwiGLU(4.0, 25.0))
        act_fn = experts.act_fn.up
    else:
        experts = Experts(Config)
        experts.act_fn = act_fn = nn.SiLU()
    if own == "pre-hook":
        act_fn.register_forward_pre_hook(lambda _, args: 2 * args[0])
    elif "hook" in own:
        act_fn.register_forward_hook(lambda *_: 2 * _[2])
    else:
        act_fn.forward = lambda x: 2 * nn.functional.silu(x)
    x, ids, weights = routed(5)
    expected = expected_of(experts, x, ids, weights)
    torch.testing.assert_close(experts(x, ids, weights).double(), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_gate_of_the_instance_runs():
    experts = Experts(Config)
    experts._apply_gate = lambda rows: rows[:, :I]
    x, ids, weights = routed(5)
    expected = expected_of(experts, x, ids, weights)
    torch.testing.assert_close(experts(x, ids, weights).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("gate", "attributes"),
    [
        (default, {}),
        (limited, {"limit": 2.5}),
        (half_more, {}),
        (default, {"act_fn": nn.Mish()}),
        (of_gate_and_up, {"act_fn": SoftcappedSwiGLU(4.0, 25.0)}),
    ],
    ids=["default", "limited", "custom", "unknown act_fn", "act_fn with modules"],
)
@torch.no_grad()
def test_equal_layers_share_one_compilation(gate, attributes, monkeypatch):
    """Also when the first run is the compiler's: what is recognised does not depend on history."""
    _gates._recognised.cache_clear()
    _gates._attributes_read.cache_clear()
    cls = type("Gated", (Experts,), {"_apply_gate": gate})
    layers = [cls(Config, **copy.deepcopy(attributes)) for _ in range(2)]
    reads_floats = gate in (limited, of_gate_and_up)  # AOTAutograd then starts a second time
    frames = {}
    for implementation in ("grouped_mm", "moe_ops"):
        monkeypatch.setattr(Config, "_experts_implementation", implementation)
        torch._dynamo.reset()
        backend = CompileCounterWithBackend("aot_eager" if reads_floats else "eager")
        compiled = torch.compile(
            lambda layer, *routing: layer(*routing), fullgraph=True, dynamic=True, backend=backend
        )
        compiled(layers[0], *routed(7))
        with torch.compiler.set_stance("fail_on_recompile"):
            results = [(compiled(x, *routed(t)), x, t) for x in layers for t in (7, 5, 64)]
        frames[implementation] = backend.frame_count
    assert all(torch.equal(actual, layer(*routed(t))) for actual, layer, t in results)
    assert frames["moe_ops"] == max(frames["grouped_mm"], 1 + reads_floats)


@pytest.mark.parametrize(
    "name",
    [
        "GptOssExperts", "OpenAIPrivacyFilterExperts", "NemotronHExperts", "DeepseekV4Experts",
        "MiniMaxM3VLExperts", "Inkling2Experts",
    ],
)  # fmt: skip
@torch.no_grad()
def test_every_layout_compiles_whole(name, device):
    experts = experts_of(name, device)[0]
    experts.config._experts_implementation = "moe_ops"
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]

    def arguments(tokens):
        _, ids, weights = routed(tokens, device)
        return torch.randn(tokens, hidden, device=device), ids, weights

    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(*arguments(7))
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (5, 64):
            routing = arguments(tokens)
            assert torch.equal(compiled(*routing), experts(*routing))


@pytest.mark.parametrize(
    "name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts", "Inkling2Experts"]
)
@torch.no_grad()
def test_bfloat16_is_no_further_from_float64_than_eager(name, device):
    experts = experts_of(name, device)[0].bfloat16()
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    _, ids, weights = routed(64, device)
    x = torch.randn(64, hidden, generator=torch.Generator().manual_seed(0)).to(device).bfloat16()
    experts.config._experts_implementation = "moe_ops"
    ours = experts(x, ids, weights.bfloat16())
    assert ours.dtype == torch.bfloat16
    experts.config._experts_implementation = "eager"
    theirs = experts(x, ids, weights.bfloat16())
    oracle = experts.double()(x.double(), ids, weights.bfloat16().double())
    assert (ours - oracle).norm() <= 1.05 * (theirs - oracle).norm()


@torch.no_grad()
def test_export_of_a_recognised_gate():
    _gates._recognised.cache_clear()
    _gates._attributes_read.cache_clear()
    experts = with_gate(limited, limit=2.5)
    for strict in (False, True):
        program = torch.export.export(experts, routed(7), strict=strict)
        assert torch.equal(program.module()(*routed(7)), experts(*routed(7)))


@torch.no_grad()
def test_rows_of_skipped_slots_reach_nothing():
    """What the gate makes of them may be NaN."""
    experts = Experts(Config)
    x, ids, weights = routed(6)
    ids[0, 1], ids[3] = E, -1
    skipped = ((ids < 0) | (ids >= E)).flatten()

    def gate(rows):
        return half_more(None, rows).masked_fill(skipped[:, None], torch.nan)

    w1, w2 = experts.gate_up_proj, experts.down_proj
    out = gated_experts(x, w1, w2, weights, ids, gate)
    assert out.isfinite().all()
    assert (out[3] == 0).all()
    assert (out[[0, 1, 2, 4, 5]] != 0).any(1).all()


def test_arguments_are_checked():
    experts = Experts(Config)
    w1, w2 = experts.gate_up_proj.detach(), experts.down_proj.detach()
    x, ids, weights = routed(3)
    with pytest.raises(ValueError, match=r"gate\(rows\).shape\[1\] must be the columns of w2 = 24"):
        gated_experts(x, w1, w2, weights, ids, lambda rows: rows)
    with pytest.raises(ValueError, match="w1.shape"):
        gated_experts(x, w1, w2, weights, ids, lambda rows: rows, is_gated=False)
    out = gated_experts(x, experts.gate_up_proj, w2, weights, ids, lambda rows: rows[:, :I])
    with pytest.raises(NotImplementedError, match="gradients of gated_experts are not implemented"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_no_tokens(dtype):
    experts = with_gate(half_more).to(dtype)
    x, ids, weights = routed(0)
    out = experts(x.to(dtype), ids, weights)
    assert out.shape == (0, H)
    assert out.dtype == dtype


@torch.no_grad()
def test_weights_of_another_dtype_than_the_tokens():
    """As transformers' own implementations: computed in the weights' dtype, returned in ours."""
    experts = Experts(Config).bfloat16()
    x, ids, weights = routed(5)
    out = experts(x, ids, weights)
    assert out.dtype == torch.float32
    assert torch.equal(out, experts(x.bfloat16(), ids, weights).float())


def test_views_are_passed(monkeypatch):
    """Transposed weights are not copied."""
    experts = experts_of("GptOssExperts")[0]
    weights = weights_of(experts)
    assert weights.w1.data_ptr() == experts.gate_up_proj.data_ptr()
    assert weights.w2.data_ptr() == experts.down_proj.data_ptr()
    assert weights.w1.shape[:2] == (tiny.EXPERTS, 48)
