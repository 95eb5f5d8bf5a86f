"""Other implementations of the same layer, timed in the same run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from moe_ops.bench.problems import Experts, Inputs

Call = Callable[[], Tensor]


class _TransformersExperts(torch.nn.Module):
    """The attributes of a model's experts module that transformers' experts functions use."""

    has_gate = True
    has_bias = False
    is_transposed = False

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.num_experts = experts.w1.shape[0]
        self.gate_up_proj = torch.nn.Parameter(experts.w1, requires_grad=False)
        self.down_proj = torch.nn.Parameter(experts.w2, requires_grad=False)
        self.act_fn = torch.nn.SiLU()
        moe = import_module("transformers.integrations.moe")
        self.run = moe.grouped_mm_experts_forward

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.run(self, hidden_states, top_k_index, top_k_weights)


def _transformers_arguments(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as a model passes them: int64 ids, and weights in the dtype of the tokens."""
    return inputs.x, inputs.topk_ids.long(), inputs.topk_weights.to(inputs.x.dtype)


def hf_grouped_mm(experts: Experts, inputs: Inputs) -> Call:
    """``grouped_mm`` of transformers, eager."""
    layer = _TransformersExperts(experts)
    arguments = _transformers_arguments(inputs)
    return lambda: layer(*arguments)


def hf_grouped_mm_compiled(experts: Experts, inputs: Inputs) -> Call:
    """`hf_grouped_mm` under torch.compile, compiled for these sizes: its best case."""
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    torch.compiler.reset()
    layer = torch.compile(_TransformersExperts(experts), dynamic=False)
    arguments = _transformers_arguments(inputs)
    return lambda: layer(*arguments)


def vllm_triton(experts: Experts, inputs: Inputs) -> Call:
    """The Triton ``fused_experts`` of vLLM."""
    run = import_module("vllm.model_executor.layers.fused_moe.fused_moe").fused_experts
    arguments = (inputs.x, experts.w1, experts.w2, inputs.topk_weights, inputs.topk_ids)
    return lambda: run(*arguments)


PEERS: dict[str, tuple[str, Callable[[Experts, Inputs], Call]]] = {
    "hf-grouped_mm": ("transformers", hf_grouped_mm),
    "hf-grouped_mm-compiled": ("transformers", hf_grouped_mm_compiled),
    "vllm-triton": ("vllm", vllm_triton),
}
"""Name -> required package and factory of the timed call. All take unquantized weights."""


def available() -> list[str]:
    """The peers whose package is installed."""
    return [name for name, (package, _) in PEERS.items() if find_spec(package)]
