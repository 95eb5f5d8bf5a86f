"""Routers against those of transformers' models: the same experts, the same weights."""

import functools
import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

transformers = pytest.importorskip("transformers")

from moe_ops import fused_experts, routing  # noqa: E402
from moe_ops.routing import select_experts  # noqa: E402

E, K, H, TOKENS = 16, 4, 32, 40


class Gate(NamedTuple):
    """A router class, what its configuration has besides the sizes, and how it is named here."""

    model: str
    name: str
    config: dict[str, Any] = {}
    options: dict[str, Any] = {}
    k: int = K
    renormalize: bool = True


SOFTMAX = {"scoring_func": "softmax"}
SIGMOID = {"scoring_func": "sigmoid"}
GROUPS = {"n_group": 4, "topk_group": 2}
GROUPED = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
NOAUX = {**SIGMOID, **GROUPED, "routed_scaling_factor": 2.5}
GATES = [
    Gate("mixtral", "MixtralTopKRouter"),
    Gate("qwen2_moe", "Qwen2MoeTopKRouter", {"norm_topk_prob": False}, renormalize=False),
    Gate("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}),
    Gate("qwen3_next", "Qwen3NextTopKRouter", {"norm_topk_prob": True}),
    Gate("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": False}, renormalize=False),
    Gate("deepseek_v2", "DeepseekV2TopkRouter",
         {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, **GROUPS},
         {**GROUPED, "routed_scaling_factor": 16.0}, renormalize=False),
    Gate("deepseek_v2", "DeepseekV2TopkRouter",
         {"topk_method": "greedy", "routed_scaling_factor": 1.0, **GROUPS}, renormalize=False),
    *(
        Gate(model, name, {"routed_scaling_factor": 2.5, "norm_topk_prob": True, **GROUPS}, NOAUX)
        for model, name in (
            ("deepseek_v3", "DeepseekV3TopkRouter"), ("glm4_moe", "Glm4MoeTopkRouter"),
            ("nemotron_h", "NemotronHTopkRouter"), ("dots1", "Dots1TopkRouter"),
        )
    ),
    Gate("deepseek_v4", "DeepseekV4TopKRouter",
         {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
         {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5}),
    Gate("minimax_m2", "MiniMaxM2TopKRouter", {}, SIGMOID),
    Gate("hy_v3", "HYV3TopKRouter", {"router_scaling_factor": 2.8},
         {**SIGMOID, "routed_scaling_factor": 2.8}),
    Gate("gpt_oss", "GptOssTopKRouter", {}, {"custom_routing_function": routing.topk_softmax}),
    Gate("phimoe", "PhimoeTopKRouter", {"router_jitter_noise": 0.2, "input_jitter_noise": 0.0},
         {"custom_routing_function": functools.partial(routing.sparsemixer, jitter_eps=0.2)}, 2,
         renormalize=False),
    Gate("longcat_flash", "LongcatFlashTopkRouter",
         {"routed_scaling_factor": 6.0, "zero_expert_num": 8},
         {**SOFTMAX, "routed_scaling_factor": 6.0}, renormalize=False),
    Gate("llama4", "Llama4Router", {},
         {"custom_routing_function": routing.llama4_routing}, 1, renormalize=False),
    Gate("gemma4", "Gemma4TextRouter"),
]  # fmt: skip


def build(gate: Gate) -> torch.nn.Module:
    """The router with random weights and, where it has one, a random bias."""
    path = f"transformers.models.{gate.model}.modeling_{gate.model}"
    cls = getattr(importlib.import_module(path), gate.name, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    config = type("Config", (), {
        "hidden_size": H, "num_experts": E, "num_local_experts": E, "n_routed_experts": E,
        "num_experts_per_tok": gate.k, "top_k_experts": gate.k, "rms_norm_eps": 1e-6,
        "vocab_size": 11, **gate.config,
    })  # fmt: skip
    router = cls(config).eval()
    g = torch.Generator().manual_seed(len(gate.name))
    with torch.no_grad():
        for x in (*router.parameters(), *router.buffers()):
            if x.is_floating_point():
                x.copy_(torch.randn(x.shape, generator=g) / 4)
    return router


def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(1))


def dense(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """``(T, E)`` weights, NaN where a token does not go: their order in a token does not matter."""
    out = torch.full((ids.shape[0], experts), torch.nan)
    return out.scatter(-1, ids.long(), weights.float())


def theirs(gate: Gate, router: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logits, weights and ids of transformers."""
    bias = torch.linspace(-0.1, 0.1, E)
    if gate.model == "longcat_flash":
        *_, weights, ids = router(x)  # of transformers 5.24 after logits
        return functional.linear(x, router.classifier.weight), weights, ids
    if gate.model == "llama4":
        scores, logits = router(x)
        values, ids = scores.topk(gate.k)
        return logits, values, ids
    if gate.model == "gemma4":
        probabilities, weights, ids = router(x)
        return probabilities.log(), weights, ids  # a softmax undoes the logarithm
    return router(x, bias) if gate.model in ("minimax_m2", "hy_v3") else router(x)


def ours(gate: Gate, router: torch.nn.Module, x: torch.Tensor, logits: torch.Tensor):
    options = dict(gate.options)
    bias = getattr(router, "e_score_correction_bias", None)
    if gate.model in ("minimax_m2", "hy_v3"):
        bias = torch.linspace(-0.1, 0.1, E)
    if gate.model == "gemma4":
        options["custom_routing_function"] = functools.partial(
            routing.gemma4_routing, per_expert_scale=router.per_expert_scale
        )
    grouped = options.pop("use_grouped_topk", False)
    return select_experts(
        x, logits, gate.k, grouped, gate.renormalize, e_score_correction_bias=bias, **options
    )


@pytest.mark.parametrize("gate", GATES, ids=lambda g: f"{g.name}-{len(g.config)}")
@torch.no_grad()
def test_experts_and_weights_are_those_of_transformers(gate):
    router, x = build(gate), tokens()
    logits, *expected = theirs(gate, router, x)
    weights, ids, _ = ours(gate, router, x, logits)
    assert ids.shape == (TOKENS, gate.k)
    torch.testing.assert_close(
        dense(weights, ids, logits.shape[1]), dense(*expected, logits.shape[1]), equal_nan=True
    )


@torch.no_grad()
def test_the_table_of_deepseek_v4():
    gate = Gate("deepseek_v4", "DeepseekV4HashRouter",
                {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5})  # fmt: skip
    router, x = build(gate), tokens()
    g = torch.Generator().manual_seed(0)
    for row in router.tid2eid:
        row.copy_(torch.randperm(E, generator=g)[:K])
    words = torch.randint(0, 11, (TOKENS,), generator=g)
    logits, weights, ids = router(x, words)
    actual = routing.hash_topk(
        x, logits, words, router.tid2eid, True, routed_scaling_factor=1.5
    )  # fmt: skip
    assert torch.equal(actual[1], ids.int())
    torch.testing.assert_close(actual[0], weights)


@torch.no_grad()
def test_identity_experts_of_longcat():
    """The whole layer of the model, whose experts module adds the identity experts itself."""
    path = "transformers.models.longcat_flash.modeling_longcat_flash"
    module = importlib.import_module(path)
    config = transformers.LongcatFlashConfig(
        hidden_size=H, expert_ffn_hidden_size=24, n_routed_experts=E, zero_expert_num=8,
        moe_topk=K, num_experts_per_tok=K, routed_scaling_factor=6.0,
    )  # fmt: skip
    layer, g = module.LongcatFlashMoE(config).eval(), torch.Generator().manual_seed(0)
    for parameter in (*layer.parameters(), *layer.buffers()):
        parameter.copy_(torch.randn(parameter.shape, generator=g) / 6)
    x = tokens()
    logits = functional.linear(x, layer.router.classifier.weight)
    weights, ids, identity = select_experts(
        x, logits, K, False, False, routed_scaling_factor=6.0, zero_expert_num=8,
        e_score_correction_bias=layer.router.e_score_correction_bias, zero_expert_type="identity",
    )  # fmt: skip
    w1, w2 = layer.experts.gate_up_proj, layer.experts.down_proj
    assert identity.count_nonzero()
    ours = fused_experts(x, w1[:E], w2[:E], weights, ids) + identity
    torch.testing.assert_close(ours, layer(x[None])[0])
