"""The sigmoid gate of shared experts, which weights them token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_ops import checks, ops
from moe_ops.gradients import check_transforms, once, wanted


def check_gate(gate: Tensor, hidden_states: Tensor, num_shared_experts: int) -> None:
    """Check a gate ``(1, H)`` of the shared experts of tokens ``(T, H)``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or device; no shared experts.
    """
    name, width = "shared_expert_gate", hidden_states.shape[1]
    checks.tensor(name, gate, 2, checks.FLOATS)
    checks.tensor("hidden_states", hidden_states, 2, checks.FLOATS)
    checks.same_device(name, gate, "hidden_states", hidden_states)
    checks.size(f"{name}.shape[0]", gate.shape[0], "the number of gates", 1)
    checks.size(f"{name}.shape[1]", gate.shape[1], "hidden_states.shape[1]", width)
    if not num_shared_experts:
        raise ValueError(f"{name} must be None without num_fused_shared_experts, got a Tensor")


def gate_shared_experts(
    hidden_states: Tensor,
    gate: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    num_shared_experts: int,
) -> Tensor:
    """Multiply the weights of shared experts by ``sigmoid(<hidden_states[t], gate>)``.

    The product is summed in float32, in an order that depends on H alone, and the sigmoid stays in
    float32. Padding tokens, whose ids are negative, keep weight 0, and their rows are not read.
    Tokens and gate have gradients.

    Args:
        hidden_states: ``(T, H)``.
        gate: ``(1, H)``.
        topk_weights: ``(T, k + n)`` float32, the shared experts' weights at the end.
        topk_ids: ``(T, k + n)``: the shared experts are ``E .. E + n - 1``.
        num_experts: E.
        num_shared_experts: n.

    Returns:
        ``(T, k + n)`` float32.
    """
    routed = topk_ids.shape[1] - num_shared_experts
    slots = topk_ids[:, routed : routed + 1] - num_experts  # 0; negative for a padding token
    if wanted(hidden_states, gate):
        check_transforms("select_experts")
        logits = _GateLogits.apply(hidden_states, gate, slots)
    else:
        logits = _logits(hidden_states, gate, slots)
    if logits.is_cpu:  # where vectors and single numbers of float32 are rounded differently
        logits = logits.double()
    shared = topk_weights[:, routed:] * logits.sigmoid().float()
    return torch.cat((topk_weights[:, :routed], shared), 1)


def _logits(hidden_states: Tensor, gate: Tensor, slots: Tensor) -> Tensor:
    """``<hidden_states[t], gate>`` as float32 ``(T, 1)``; 0 for a negative slot."""
    return ops.slot_products(hidden_states, gate, slots, None, 1, True)


class _GateLogits(Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, gate: Tensor, slots: Tensor) -> Tensor:
        """Multiply tokens by the gate; the arguments are kept."""
        ctx.save_for_backward(hidden_states, gate, slots)
        return _logits(hidden_states, gate, slots)

    @staticmethod
    @once("select_experts")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> Any:
        """``grad[t] * gate`` for tokens, ``sum_t grad[t] * x[t]`` for the gate, in float32."""
        hidden_states, gate, slots = saved
        skipped = slots < 0
        grad = grad.masked_fill(skipped, 0.0)
        of_tokens = of_gate = None
        if ctx.needs_input_grad[0]:
            of_tokens = (grad * gate.float()).to(hidden_states.dtype)
        if ctx.needs_input_grad[1]:
            rows = hidden_states.float().masked_fill(skipped, 0.0)
            of_gate = (grad.t() @ rows).to(gate.dtype)
        return of_tokens, of_gate, None
