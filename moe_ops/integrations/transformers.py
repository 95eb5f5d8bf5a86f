"""Hugging Face transformers: importing this module registers the experts implementation "moe_ops".

    import moe_ops.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_ops")

or ``model.set_experts_implementation("moe_ops")`` on a loaded model. Then `check` names the expert
modules that still run transformers' code, and `adapt` brings in Llama 4. Inference only: call the
model under ``torch.no_grad()`` (as ``generate`` does).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_ops.integrations import _llama4
from moe_ops.integrations._experts import map_for_few_experts, weights_of
from moe_ops.integrations._gates import activation_of
from moe_ops.integrations._reach import Unreached, unreached
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.pipeline.gated_experts import gated_experts

__all__ = ["NAME", "Unreached", "adapt", "check", "moe_ops_experts"]

NAME = "moe_ops"


def moe_ops_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts forward of transformers, by `fused_experts` or `gated_experts`.

    The gate is fused into the first GEMM when it is an activation of this library. Any other
    ``_apply_gate`` runs between the GEMMs on all ``T * k`` rows, in slot order; it must treat each
    row by itself, as transformers' own implementations ask too. Rows of skipped slots hold
    anything.

    Args:
        self: an experts module of any layout that ``use_experts_implementation`` describes:
            default, transposed, with interleaved gate and up, with biases, without a gate.
        hidden_states: ``(T, H)``.
        top_k_index: ``(T, k)`` int64; ids >= E (expert parallelism's sentinels) are skipped.
        top_k_weights: ``(T, k)``, applied after the down projection.

    Returns:
        ``(T, H)``, dtype of ``hidden_states``.

    Raises:
        NotImplementedError: a norm after each expert; an input that requires grad in grad mode.
    """
    w1, w2, w1_bias, w2_bias = weights_of(self)
    activation = activation_of(self)
    expert_map = map_for_few_experts(top_k_index, w1.shape[0])
    x = hidden_states.to(w1.dtype)
    if activation is not None:
        out = fused_experts(
            x, w1, w2, top_k_weights, top_k_index, activation=activation, expert_map=expert_map,
            w1_bias=w1_bias, w2_bias=w2_bias,
        )  # fmt: skip
    else:
        gate = self._apply_gate if self.has_gate else self.act_fn
        out = gated_experts(
            x, w1, w2, top_k_weights, top_k_index, gate, is_gated=self.has_gate,
            expert_map=expert_map, w1_bias=w1_bias, w2_bias=w2_bias,
        )  # fmt: skip
    return out.to(hidden_states.dtype)


def check(model: nn.Module) -> list[Unreached]:
    """Expert modules of a model that do not run this library, with the reason; empty when all do.

    What transformers dispatches is certain. The rest is found by its looks: a class named
    ``...Experts`` (``Shared`` excepted: every token runs through those), a class with ``expert`` or
    ``moe`` in its name that holds 3-D parameters, a ``ModuleList`` or ``ModuleDict`` called
    ``experts``, and a class named ``...MoE`` with none of these inside. Experts that are named and
    built otherwise are not seen.
    """
    return list(unreached(model, NAME))


def adapt(model: nn.Module) -> list[str]:
    """Run this library in expert modules that transformers does not dispatch: those of Llama 4.

    The instances get a forward of their own, and classes stay as they are: ``del module.forward``
    takes it back. Modules that are adapted already are left alone.

    Returns:
        The names of the modules that were adapted.

    Raises:
        NotImplementedError: an activation that this library does not have.
        ValueError: a module has a forward of its own already.
    """
    names = []
    for name, module in model.named_modules():
        if _llama4.is_block(module) and not _llama4.is_adapted(module):
            _llama4.adapt_block(name, module)
            names.append(name)
    return names


def _no_fp8(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError(
        f'experts_implementation="moe_ops" must have unquantized experts in this version, '
        f"got {type(self).__name__}"
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, moe_ops_experts)
# transformers accepts a name that stands in either mapping and fails later with a KeyError.
ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, _no_fp8)
