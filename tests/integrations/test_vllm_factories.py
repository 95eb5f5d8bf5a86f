"""vLLM's factory of layers, with what newer models pass to it: `make test-vllm`.

vLLM's runner and routers carry these arguments out around the experts. Each layer is compared with
its formula, in which `fused_experts` stands for the experts.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from moe_ops import fused_experts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
T, E, K, H, I = 7, 8, 2, 64, 32  # noqa: E741


@pytest.fixture(autouse=True, scope="module")
def config(tmp_path_factory):
    """vLLM with the plug-in, one rank, a workspace, and its current configuration."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker import workspace

    from moe_ops.integrations.vllm import register

    register()
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))
    meeting = f"file://{tmp_path_factory.mktemp('ranks')}/one"
    made = VllmConfig()
    with set_current_vllm_config(made):
        distributed.init_distributed_environment(1, 0, meeting, 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        yield made
    distributed.destroy_model_parallel()
    distributed.destroy_distributed_environment()


class Map(nn.Module):
    """A linear map with random weights."""

    def __init__(self, rows, columns, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(rows, columns, generator=generator) / columns**0.5
        self.weight = nn.Parameter(w, requires_grad=False)

    def forward(self, x):
        return functional.linear(x, self.weight)


def softmax(logits, bias=0.0):
    """Weights and ids of the best experts by softmax, chosen with a bias."""
    scores = logits.softmax(-1)
    ids = (scores + bias).topk(K).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(1, keepdim=True), ids


def router_object(calls):
    """A router as an object, which takes the worst experts and notes its calls."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    class Worst(FusedTopKRouter):
        def _select_experts(self, hidden_states, router_logits, *rest, **named):
            calls.append(len(hidden_states))
            weights, ids = softmax(-router_logits)
            return weights, ids.to(torch.int32)

    return Worst(top_k=K, global_num_experts=E, renormalize=True)


def run(config, width=H, **arguments):
    """A layer's output, with its inputs and experts."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    name = f"layer{len(config.compilation_config.static_forward_context)}"
    layer = FusedMoEFactory(
        num_experts=E, top_k=K, hidden_size=width, intermediate_size=I,
        params_dtype=torch.float32, prefix=name, **arguments,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    x, logits = torch.randn(T, H, generator=generator), torch.randn(T, E, generator=generator)
    experts = layer.routed_experts
    for weight in (experts.w13_weight, experts.w2_weight):
        weight.data.normal_(generator=generator).div_(weight.shape[2] ** 0.5)
    w1, w2 = experts.w13_weight.data.clone(), experts.w2_weight.data.clone()
    experts.quant_method.process_weights_after_loading(experts)
    named = type(experts.quant_method.moe_kernel.fused_experts).__name__
    assert named == "MoeOpsExperts"
    with set_forward_context(None, config, num_tokens=T), torch.no_grad():
        out = layer(x, logits, input_ids=arguments.get("ids"))
    return out, x, logits, (w1, w2)


def test_a_routed_scale_on_the_output(config):
    out, x, logits, w = run(config, routed_scaling_factor=2.5, apply_routed_scale_to_output=True)
    torch.testing.assert_close(out, 2.5 * fused_experts(x, *w, *softmax(logits)))


def test_transforms_around_routed_experts(config):
    """Experts of a latent size; shared experts read the tokens as they were."""
    into, out_of, shared = Map(32, H, 1), Map(H, 32, 2), Map(H, H, 3)
    out, x, logits, w = run(
        config, 32, routed_input_transform=into, routed_output_transform=out_of,
        shared_experts=shared,
    )  # fmt: skip
    routed = fused_experts(into(x), *w, *softmax(logits))
    torch.testing.assert_close(out, shared(x) + out_of(routed))


def test_a_router_as_an_object(config):
    calls = []
    out, x, logits, w = run(config, router=router_object(calls))
    torch.testing.assert_close(out, fused_experts(x, *w, *softmax(-logits)))
    assert calls == [T]
