"""Other implementations of the same layer, which importing this package adds to `moe_ops.bench`."""

from __future__ import annotations

import warnings
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_ops.bench.peers import PEERS, Peer
from moe_ops.bench.problems import Call, Experts, Inputs, Problem, read_scheme
from peers import humming, sglang, vllm, vllm_methods
from peers.installed import lacks, package, reason

# transformers

MOST_COPIED = 8 * 2**30
"""Most bytes of weights that `hf-batched_mm` is let copy: it copies an expert for every slot."""


class TransformersExperts(torch.nn.Module):
    """The attributes of a model's experts module that transformers' experts functions use."""

    has_gate = True
    has_bias = False
    is_transposed = False
    is_concatenated = True
    has_post_expert_norm = False
    _is_expert_parallel = False

    def __init__(self, experts: Experts, implementation: str) -> None:
        super().__init__()
        self.num_experts = experts.w1.shape[0]
        self.gate_up_proj = torch.nn.Parameter(experts.w1, requires_grad=False)
        self.down_proj = torch.nn.Parameter(experts.w2, requires_grad=False)
        self.act_fn = torch.nn.SiLU()
        self.config = SimpleNamespace(hidden_act="silu")
        moe = import_module("transformers.integrations.moe")
        self.run = moe.ALL_EXPERTS_FUNCTIONS[implementation]

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``(T, H)``: the experts function of the implementation."""
        return self.run(self, hidden_states, top_k_index, top_k_weights)


def transformers_arguments(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as a model passes them: int64 ids, and weights in the dtype of the tokens."""
    return inputs.x, inputs.topk_ids.long(), inputs.topk_weights.to(inputs.x.dtype)


def hf(implementation: str, experts: Experts, inputs: Inputs) -> Call:
    """An experts implementation of transformers, eager."""
    layer = TransformersExperts(experts, implementation)
    arguments = transformers_arguments(inputs)
    return lambda: layer(*arguments)


def hf_grouped_mm_compiled(experts: Experts, inputs: Inputs) -> Call:
    """``grouped_mm`` under torch.compile, compiled for these sizes: its best case."""
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    torch.compiler.reset()
    layer = torch.compile(TransformersExperts(experts, "grouped_mm"), dynamic=False)
    arguments = transformers_arguments(inputs)
    return lambda: layer(*arguments)


def copies_fit(scheme: str, problem: Problem, tokens: int) -> bool:
    """Whether a copy of an expert's weights for every slot takes at most `MOST_COPIED` bytes."""
    del scheme
    rows = problem.w1_rows + problem.intermediate_size
    return tokens * problem.top_k * rows * problem.hidden_size * 2 <= MOST_COPIED


@cache
def hub_kernel(name: str) -> str | None:
    """What is missing for kernels that transformers takes from the hub."""
    for needed in ("transformers", "kernels"):
        if package(needed):
            return package(needed)
    module = import_module(f"transformers.integrations.{name}")
    return reason(getattr(module, f"load_{name}_kernel"))


# vLLM and Humming


def whole_groups(scheme: str, problem: Problem, tokens: int) -> bool:
    """Whether groups and square blocks that share a scale divide the weights' sizes."""
    del tokens
    quant = read_scheme(scheme).weight
    columns = 1 if quant is None else max(1, quant.group.cols)
    return not (problem.hidden_size % columns or problem.intermediate_size % columns)


def marlin_tiles(scheme: str, problem: Problem, tokens: int) -> bool:
    """Whether Marlin has a tile of 128 x 64 or 64 x 128 for both weights, and whole groups."""
    hidden, inner = problem.hidden_size, problem.intermediate_size
    return whole_groups(scheme, problem, tokens) and not (hidden % 128 or inner % 128)


# OpenAI's triton_kernels

_PARTS = tuple(
    f"triton_kernels.{part}"
    for part in ("matmul_ogs", "routing", "swiglu", "tensor", "tensor_details.layout")
)
"""Modules of triton_kernels that are called; it has ``matmul_ogs`` and ``routing`` up to 3.5."""
_NO_LIMIT = 1e30


def power_of_two(scheme: str, problem: Problem, tokens: int) -> bool:
    """Whether the routing of triton_kernels compiles: it sorts a power of two of slots."""
    del scheme, tokens
    return problem.top_k & (problem.top_k - 1) == 0


def triton_kernels(experts: Experts, inputs: Inputs) -> Call:
    """``matmul_ogs`` twice, the first one with a fused activation, and the library's own routing.

    Its activation is ``gate * sigmoid(gate) * (up + 1)`` on alternating rows. Rows are rearranged
    beforehand, and a bias of -1 on the rows of ``up`` makes it gated SiLU. The routing takes the
    ids as given; its weights are a softmax of the logarithms of the given ones.
    """
    ogs, routing, swiglu, *_ = map(import_module, _PARTS)
    w1, first = _ogs_weight(experts, 0)
    w2, second = _ogs_weight(experts, 1)
    bias = up_bias(experts)
    activation = ogs.FusedActivation(
        ogs.FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit")), (1.0, _NO_LIMIT), 2
    )
    top_k, ids = inputs.topk_ids.shape[1], inputs.topk_ids  # int16 overflows in its bit masks
    logits = inputs.topk_weights.new_zeros(len(inputs.x), experts.w1.shape[0])
    logits.scatter_(1, inputs.topk_ids.long(), inputs.topk_weights.log())

    def call() -> Tensor:
        told, gather, scatter = routing.routing(logits, top_k, expt_indx=ids)
        h = ogs.matmul_ogs(
            inputs.x,
            w1,
            bias,
            told,
            gather_indx=gather,
            precision_config=first,
            fused_activation=activation,
        )
        return ogs.matmul_ogs(
            h, w2, None, told, scatter_indx=scatter, precision_config=second, gammas=told.gate_scal
        )

    return call


def up_bias(experts: Experts) -> Tensor:
    """A bias ``(E, 2I)`` float32 that takes 1 off every row of ``up``, where rows alternate."""
    bias = torch.zeros(experts.w1.shape[:2], dtype=torch.float32, device=experts.w1.device)
    bias[:, 1::2] = -1
    return bias


def alternating(w1: Tensor) -> Tensor:
    """Rows ``(gate, up)`` of each expert in turns: gate 0, up 0, gate 1, ..."""
    gate, up = w1.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def _ogs_weight(experts: Experts, number: int) -> tuple[Any, Any]:
    """A weight as ``(E, K, N)``, and its precision configuration."""
    ogs, _, _, tensor, layouts = map(import_module, _PARTS)
    arranged = alternating if number == 0 else torch.Tensor.contiguous
    weight = experts.stored[number]
    if weight.scale is None:
        return arranged(weight.data).transpose(1, 2), ogs.PrecisionConfig()
    data, scale = (arranged(t).transpose(1, 2) for t in (weight.data, weight.scale))
    layout, options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    w = tensor.convert_layout(tensor.wrap_torch_tensor(data, dtype=tensor.FP4), layout, **options)
    scale = tensor.convert_layout(tensor.wrap_torch_tensor(scale), layouts.StridedLayout)
    return w, ogs.PrecisionConfig(weight_scale=scale)


MODULAR = "vllm-modular"
"""vLLM's modular kernel with its own Triton experts."""
INSIDE = "moe_ops-in-vllm"
"""vLLM's modular kernel with this library's experts."""
IN_SGLANG = "moe_ops-in-sglang"
"""SGLang's runner with the core of this library's plug-in."""
SGLANG_TRITON = "sglang-triton"
"""SGLang's runner with its own Triton kernels."""
_TRITON = ("bf16", *vllm.CONFIGS)
_MODULAR = ("bf16", "fp8_block128", "fp8_channel", "int8_w8a16")
"""Schemes of the modular kernel's Triton experts, which refuse int8 activations."""
PEERS |= {
    "hf-grouped_mm": Peer(partial(package, "transformers"), {"bf16": partial(hf, "grouped_mm")}),
    "hf-grouped_mm-compiled": Peer(
        partial(package, "transformers"), {"bf16": hf_grouped_mm_compiled}
    ),
    "hf-batched_mm": Peer(
        partial(package, "transformers"), {"bf16": partial(hf, "batched_mm")}, copies_fit
    ),
    "hf-deepgemm": Peer(partial(hub_kernel, "deepgemm"), {"bf16": partial(hf, "deepgemm")}),
    "hf-sonicmoe": Peer(partial(hub_kernel, "sonicmoe"), {"bf16": partial(hf, "sonicmoe")}),
    "vllm-triton": Peer(
        partial(vllm.missing, *vllm.TRITON), dict.fromkeys(_TRITON, vllm.triton), whole_groups
    ),
    "vllm-cutlass": Peer(partial(vllm.missing, *vllm.CUTLASS), {"fp8_channel": vllm.cutlass}),
    "vllm-deepgemm": Peer(vllm.missing_deepgemm, {"fp8_block128": vllm.deepgemm}, whole_groups),
    "vllm-marlin": Peer(
        partial(vllm.missing, *vllm.MARLIN),
        dict.fromkeys(vllm.MARLIN_ELEMENTS, vllm.marlin),
        marlin_tiles,
    ),
    "humming": Peer(humming.missing, dict.fromkeys(humming.SCHEMAS, humming.humming), whole_groups),
    MODULAR: Peer(
        partial(vllm.missing, *vllm.TRITON), dict.fromkeys(_MODULAR, vllm.modular), whole_groups
    ),
    INSIDE: Peer(
        partial(vllm.missing, *vllm.OURS),
        dict.fromkeys(vllm.SERVED, vllm.served)
        | dict.fromkeys(vllm_methods.SCHEMES, partial(vllm_methods.served, vllm_methods.OURS)),
    ),
    "vllm-method-marlin": Peer(
        partial(vllm.missing, *vllm.MARLIN),
        dict.fromkeys(vllm_methods.SCHEMES, partial(vllm_methods.served, vllm_methods.MARLIN)),
    ),
    "vllm-method-humming": Peer(
        vllm_methods.humming_missing,
        dict.fromkeys(vllm_methods.SCHEMES, partial(vllm_methods.served, vllm_methods.HUMMING)),
    ),
    IN_SGLANG: Peer(
        partial(sglang.missing, sglang.OURS),
        dict.fromkeys((*sglang.FLAGS, *sglang.INFOS), sglang.core),
        whole_groups,
    ),
    SGLANG_TRITON: Peer(
        partial(sglang.missing, sglang.TRITON),
        dict.fromkeys((*sglang.FLAGS, *sglang.HELD), sglang.triton),
        whole_groups,
    ),
    "triton_kernels": Peer(
        partial(lacks, "triton_kernels", *_PARTS),
        dict.fromkeys(("bf16", "mxfp4_w4a16"), triton_kernels),
        power_of_two,
    ),
}
