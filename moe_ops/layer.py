"""The Mixture-of-Experts layer as a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.pipeline.warmup import run_variants
from moe_ops.routing import SCORING_FUNCS, fused_topk

CustomRouting = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]


class FusedMoE(nn.Module):
    """Routed experts of one layer; the router's linear layer stays the caller's.

    Parameters: ``w13_weight (E, 2I, H)`` (gate rows, then up rows; ``(E, I, H)`` without a gate),
    ``w2_weight (E, H, I)`` and, with ``has_bias``, ``w13_bias`` and ``w2_bias``. They are created
    empty and without grad: load them with ``load_state_dict``.

    Args:
        num_experts: E.
        top_k: k, experts of a token.
        hidden_size: H.
        intermediate_size: I, of one expert.
        params_dtype: of the parameters; default: torch's default dtype.
        renormalize: whether a token's weights are divided by their sum.
        scoring_func: ``softmax`` or ``sigmoid``.
        routed_scaling_factor: multiplier of the weights, applied by the router, once.
        e_score_correction_bias: ``(E,)`` float32, added to the scores for the choice only.
        custom_routing_function: ``f(hidden_states, router_logits, k, renormalize) ->
            (weights, ids)``, used instead of all of these.
        apply_router_weight_on_input: scale the tokens instead of the experts' rows, for any k.
        activation: a `MoEActivation`, its name, or an `Activation` with numbers.
        has_bias: whether both products have a bias.
        device: of the parameters.

    Raises:
        ValueError: k not in 1..E, an unknown name.
    """

    w13_weight: Tensor
    w2_weight: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        params_dtype: torch.dtype | None = None,
        renormalize: bool = True,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1,
        e_score_correction_bias: Tensor | None = None,
        custom_routing_function: CustomRouting | None = None,
        apply_router_weight_on_input: bool = False,
        activation: MoEActivation | Activation | str = "silu",
        has_bias: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        checks.topk("top_k", top_k, num_experts)
        checks.one_of("scoring_func", scoring_func, SCORING_FUNCS)
        kind, self.activation = kind_and_key(activation)
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.renormalize, self.scoring_func = renormalize, scoring_func
        self.routed_scaling_factor = routed_scaling_factor
        self.custom_routing_function = custom_routing_function
        self.apply_router_weight_on_input = apply_router_weight_on_input
        rows = intermediate_size * (2 if kind.is_gated else 1)
        shapes = {
            "w13_weight": (num_experts, rows, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size),
            "w13_bias": (num_experts, rows) if has_bias else None,
            "w2_bias": (num_experts, hidden_size) if has_bias else None,
        }
        for name, shape in shapes.items():
            self.register_parameter(name, _parameter(shape, params_dtype, device))
        self.register_buffer("e_score_correction_bias", e_score_correction_bias)

    def _apply(self, fn: Any, recurse: bool = True) -> FusedMoE:  # noqa: FBT001 (torch's signature)
        """As in `nn.Module`, but the correction bias stays float32: rounding it changes experts."""
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if bias is not None and self.e_score_correction_bias is not None:
            moved = self.e_score_correction_bias
            self.e_score_correction_bias = moved.float() if bias.is_meta else bias.to(moved.device)
        return self

    def route(self, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """``(topk_weights, topk_ids)``, each ``(T, k)``."""
        if self.custom_routing_function is not None:
            weights, ids = self.custom_routing_function(
                hidden_states, router_logits, self.top_k, self.renormalize
            )
            return weights.float(), ids
        return fused_topk(
            hidden_states,
            router_logits,
            self.top_k,
            self.renormalize,
            scoring_func=self.scoring_func,
            e_score_correction_bias=self.e_score_correction_bias,
            routed_scaling_factor=self.routed_scaling_factor,
        )

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """``(T, H)`` tokens and ``(T, E)`` logits to ``(T, H)``; leading axes may be more."""
        tokens = hidden_states.reshape(-1, self.hidden_size)
        weights, ids = self.route(tokens, router_logits.reshape(-1, self.num_experts))
        out = fused_experts(
            tokens,
            self.w13_weight,
            self.w2_weight,
            weights,
            ids,
            activation=self.activation,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
            w1_bias=self.w13_bias,
            w2_bias=self.w2_bias,
        )
        return out.view(hidden_states.shape)

    def warmup(self, num_tokens: int | Iterable[int], router_logits_dtype: Any = None) -> list[int]:
        """Run the layer with every kernel that ``num_tokens`` tokens need; see `moe_ops.warmup`.

        Args:
            num_tokens: the token counts to come, or one number for all up to it.
            router_logits_dtype: dtype of the logits; None means that of the weights.
        """
        w1, w2 = self.w13_weight, self.w2_weight

        def run(tokens: int) -> None:
            x = torch.randn(tokens, self.hidden_size, device=w1.device, dtype=w1.dtype)
            logits = torch.randn(tokens, self.num_experts, device=w1.device)
            self(x, logits.to(router_logits_dtype or w1.dtype))

        return run_variants(run, num_tokens, w1, w2, self.top_k)

    def extra_repr(self) -> str:
        """Sizes and routing."""
        return (
            f"num_experts={self.num_experts}, top_k={self.top_k}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation}, "
            f"scoring_func={self.scoring_func}, renormalize={self.renormalize}"
        )


def _parameter(
    shape: tuple[int, ...] | None, dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Parameter | None:
    if shape is None:
        return None
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
