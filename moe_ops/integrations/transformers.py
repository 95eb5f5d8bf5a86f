"""Hugging Face transformers: importing this module registers the experts implementation "moe_ops".

    import moe_ops.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_ops")

or ``model.set_experts_implementation("moe_ops")`` on a loaded model. Then `check` names the expert
modules that still run transformers' code, and `adapt` brings in Llama 4 and the MXFP4 experts of
gpt-oss. Experts whose activation this library has can be trained; a backward pass through others
raises. To train those, go back to an implementation of transformers with
``model.set_experts_implementation("grouped_mm")``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

try:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(
        "moe_ops.integrations.transformers needs transformers 5.17 or later: "
        f'pip install "transformers>=5.17" ({error})'
    ) from error

from moe_ops import ops
from moe_ops.gradients import inference_only
from moe_ops.integrations import _fp8, _llama4, _mxfp4, _peft, _quantized  # noqa: F401 (targets)
from moe_ops.integrations._experts import Weights, map_for_few_experts, weights_of
from moe_ops.integrations._gates import activation_of
from moe_ops.integrations._layers import NAME
from moe_ops.integrations._reach import Unreached, unreached
from moe_ops.integrations._saving import from_pretrained
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.pipeline.gated_experts import gated_experts
from moe_ops.tensors import Routing

__all__ = [
    "NAME",
    "Unreached",
    "adapt",
    "check",
    "from_pretrained",
    "moe_ops_experts",
    "moe_ops_fp8_experts",
]


def moe_ops_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts forward of transformers by `fused_experts` or `gated_experts`.

    If the gate is an activation of this library, it is fused into the first GEMM. Any other
    ``_apply_gate`` runs between the GEMMs on all ``T * k`` rows, in slot order. It must treat each
    row by itself, as transformers' own implementations require; rows of skipped slots are
    undefined.

    Args:
        self: an experts module of any layout that ``use_experts_implementation`` describes:
            default, transposed, with interleaved gate and up, with biases, without a gate. Weights
            may be torchao tensors: ``Float8Tensor`` in rows or blocks, ``MXTensor`` of fp4,
            ``NVFP4Tensor``.
        hidden_states: ``(T, H)``.
        top_k_index: ``(T, k)`` int64; ids >= E (expert parallelism's sentinels) are skipped.
        top_k_weights: ``(T, k)``, applied after the down projection.

    Returns:
        ``(T, H)``, dtype of ``hidden_states``.

    Raises:
        NotImplementedError: a norm after each expert; quantized weights of another kind; a backward
            pass through experts with an activation that this library does not have.
    """
    return _run(self, weights_of(self), hidden_states, top_k_index, top_k_weights)


def moe_ops_fp8_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the forward of transformers' ``FP8Experts``: `moe_ops_experts` on quantized weights.

    Weights have block scales (any powers of two from 16 on, float32 or e8m0), one scale per expert
    (or one each for gate and up), or are packed fp4. Activations are quantized

    * in groups along a row, if weights have block scales,
    * with one scale per row, if weights have one scale per expert,
    * with each expert's own scales, if those are given (``activation_scheme="static"``),
    * not at all, with fp4 weights.

    Args:
        self: an ``FP8Experts`` module, whose weights may also be dequantized.
        hidden_states: ``(T, H)`` bf16, fp16 or fp32.
        top_k_index: as in `moe_ops_experts`.
        top_k_weights: as in `moe_ops_experts`.

    Returns:
        ``(T, H)``, dtype of ``hidden_states``.

    Raises:
        NotImplementedError: block sizes or dtypes that are not supported; a backward pass through
            experts with static scales, or as in `moe_ops_experts`.

    Source:
        transformers ``FP8Experts``, whose kernels take one scale per expert only without a gate,
        and static scales only with blocks.
    """
    if not _fp8.is_quantized(self):
        return moe_ops_experts(self, hidden_states, top_k_index, top_k_weights)
    weights = _fp8.weights_of(self)
    if self.activation_scheme != "static" or weights.quant_config is None:
        return _run(self, weights, hidden_states, top_k_index, top_k_weights)
    activation = activation_of(self)
    gate = self._apply_gate if self.has_gate else self.act_fn
    if activation is not None:
        gate = partial(ops.activation, activation=activation.key)
    expert_map = map_for_few_experts(top_k_index, weights.w1.shape[0])
    return _fp8.static_experts(
        hidden_states, weights.w1, weights.w2, weights.quant_config, _fp8.static_scales(self),
        Routing(top_k_weights, top_k_index, expert_map), gate,
    )  # fmt: skip


def _run(
    experts: Any,
    weights: Weights,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Run the experts with the gate fused, if it is an activation of this library, or unfused."""
    w1, w2, w1_bias, w2_bias, config = weights
    activation = activation_of(experts)
    expert_map = map_for_few_experts(top_k_index, w1.shape[0])
    x = hidden_states if config is not None else hidden_states.to(w1.dtype)
    if activation is None:
        routing = Routing(top_k_weights, top_k_index, expert_map)
        return unfused_experts(experts, weights, x, routing).to(hidden_states.dtype)
    out = fused_experts(
        x, w1, w2, top_k_weights, top_k_index, activation=activation, expert_map=expert_map,
        w1_bias=w1_bias, w2_bias=w2_bias, quant_config=config,
    )  # fmt: skip
    return out.to(hidden_states.dtype)


@inference_only
def unfused_experts(experts: Any, weights: Weights, x: Tensor, routing: Routing) -> Tensor:
    """Run experts whose gate is not an activation of this library, between the GEMMs."""
    w1, w2, w1_bias, w2_bias, config = weights
    gate = experts._apply_gate if experts.has_gate else experts.act_fn
    topk_weights, topk_ids, expert_map = routing
    return gated_experts(
        x, w1, w2, topk_weights, topk_ids, gate, is_gated=experts.has_gate, expert_map=expert_map,
        w1_bias=w1_bias, w2_bias=w2_bias, quant_config=config,
    )  # fmt: skip


def check(model: nn.Module) -> list[Unreached]:
    """Return the expert modules of a model that do not run this library, with the reason.

    What transformers dispatches is certain. Other modules are found by their looks: a class named
    ``...Experts`` (except ``Shared``, through which every token runs), a class with ``expert`` or
    ``moe`` in its name that holds 3-D parameters, a ``ModuleList`` or ``ModuleDict`` called
    ``experts``, and a class named ``...MoE`` with none of these inside. Experts with other names
    and forms are not found.
    """
    return list(unreached(model, NAME))


def adapt(model: nn.Module) -> list[str]:
    """Run this library in expert modules that transformers does not dispatch.

    These are the blocks of Llama 4, whose instances get a forward of their own
    (``del module.forward`` undoes it), and the MXFP4 experts of gpt-oss, whose weights are
    converted from triton_kernels' layout (for good: there may be no memory for a second copy).
    Experts with adapters of PEFT (``target_parameters``) run as grouped LoRA, without merged
    weights: call this after ``get_peft_model``. Classes stay as they are. Adapted modules are
    skipped.

    Returns:
        The names of the modules that were adapted.

    Raises:
        NotImplementedError: an activation that this library does not have; expert parallelism of
            MXFP4 experts.
        ValueError: a module has a forward of its own already; weights of unexpected sizes.
    """
    names = []
    for name, module in model.named_modules():
        if _llama4.is_block(module) and not _llama4.is_adapted(module):
            _llama4.adapt_block(name, module)
            names.append(name)
        if _mxfp4.is_block(module) and not _mxfp4.is_adapted(module.experts):
            _mxfp4.adapt_block(name, module)
            names.append(name)
    inner = {id(m.base_layer) for m in model.modules() if _peft.is_wrapper(m)}
    for name, module in model.named_modules():
        outermost = _peft.is_wrapper(module) and id(module) not in inner
        if outermost and not _peft.is_adapted(module):
            _, experts = _peft.wrappers_of(module)
            if getattr(getattr(experts, "config", None), "_experts_implementation", None) == NAME:
                _peft.adapt_wrappers(name, module)
                names.append(name)
    return names


ALL_EXPERTS_FUNCTIONS.register(NAME, moe_ops_experts)
ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, moe_ops_fp8_experts)
