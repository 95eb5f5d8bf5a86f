"""The Standard-format pipeline with a backward pass: each of its stages is an operator.

Forward keeps the product of the first GEMM, from which the backward pass computes the activation
again. It keeps no other tensor with a row per slot: with ``g[s] = grad[t] @ w2[e]``, the gradient
of a router weight is ``<g[s], h[s]>`` for the activated row ``h[s]``, so that experts' outputs are
not needed.

Source:
    SonicMoE (arXiv 2512.14080) for the gradient of router weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from moe_ops import ops
from moe_ops.gradients import once, wanted
from moe_ops.pipeline.adapters import Beside, Product
from moe_ops.pipeline.forward import Pass, forward
from moe_ops.pipeline.gathering import Settings
from moe_ops.pipeline.lora import (
    ExpertLora,
    Factors,
    adapter_rows,
    add_product,
    grouped_gemm,
    grouped_wgrad,
    pairs_of,
)
from moe_ops.pipeline.main_grads import main_grad_of
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.tensors import ExpertWeight, ExpertWeights, Routing

TRAINS_NOT = "experts in host memory are for inference, train without resident_experts"
"""Why experts in host memory have no gradients, nor have their inputs."""


class Operands(NamedTuple):
    """The tensors of a call: differentiable ones first."""

    x: Any
    w1: Any
    w2: Any
    topk_weights: Any
    b1: Any
    b2: Any
    lora1_a: Any
    """``(L * E, r, H)``; see `lora.Factors`. None: no adapter, as for the other three."""
    lora1_b: Any
    lora2_a: Any
    lora2_b: Any
    topk_ids: Any
    expert_map: Any
    lora_ids: Any
    """``(T, k)``: see `lora.pairs_of`."""
    w1_scale: Any
    w1_zero_point: Any
    w1_factor: Any
    w2_scale: Any
    w2_zero_point: Any
    w2_factor: Any
    a1_scale: Any
    a2_scale: Any
    w1_global_scale: Any
    """Global scale of the first weight, if ``w1_factor`` contains that of its rows as well; None:
    ``w1_factor`` is it."""
    w2_global_scale: Any
    w1_host: Any
    """See `ExpertWeight.host`."""
    w2_host: Any

    def weights(self) -> ExpertWeights:
        """Both weights, for the GEMMs of the forward pass."""
        w1 = ExpertWeight(self.w1, self.b1, self.w1_scale, self.w1_zero_point, self.w1_factor)
        w2 = ExpertWeight(self.w2, self.b2, self.w2_scale, self.w2_zero_point, self.w2_factor)
        w1, w2 = w1._replace(host=self.w1_host), w2._replace(host=self.w2_host)
        return ExpertWeights(w1, w2, self.a1_scale, self.a2_scale)

    def scales(self) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """Scales, zero points and global scales of both weights as they are stored."""
        first = self.w1_factor if self.w1_global_scale is None else self.w1_global_scale
        second = self.w2_factor if self.w2_global_scale is None else self.w2_global_scale
        return (
            (self.w1_scale, self.w1_zero_point, first),
            (self.w2_scale, self.w2_zero_point, second),
        )

    @property
    def routing(self) -> Routing:
        """The tokens' routing."""
        return Routing(self.topk_weights, self.topk_ids, self.expert_map)

    def space(self, settings: Settings, plan: Tensor | None) -> SlotRows:
        """The row space of the call's routing."""
        experts, invariant = self.w1.shape[0], settings.batch_invariant
        return SlotRows.of(self.routing, experts, settings.scheme, self.x.dtype, invariant, plan)

    def adapters(self, settings: Settings, plan: Tensor | None) -> SlotRows | None:
        """The row space of the adapters' GEMMs; None without adapters."""
        if self.lora_ids is None:
            return None
        first = self.lora2_a if self.lora1_a is None else self.lora1_a
        dtype, invariant = self.x.dtype, settings.batch_invariant
        return adapter_rows(self.lora_ids, first.shape[0], dtype, invariant, plan)

    def beside(self, settings: Settings, space: SlotRows) -> Beside:
        """The adapters' products of the forward pass, in their row space."""
        k, on_input = self.topk_ids.shape[1], self.topk_weights if settings.on_input else None
        first = Product(self.lora1_a, self.lora1_b, space, space, top_k=k)
        second = Product(self.lora2_a, self.lora2_b, space, space)
        return Beside(
            self.x,
            on_input,
            () if self.lora1_a is None else (first,),
            None if self.lora2_a is None else second,
            [],
        )


class MainGrads(NamedTuple):
    """What the gradients of weights and biases are added to; None: they are returned."""

    w1: Tensor | None
    w2: Tensor | None
    b1: Tensor | None
    b2: Tensor | None


DIFFERENTIABLE = Operands._fields.index("topk_ids")
"""The number of operands at the beginning of `Operands` that may have gradients."""


def lacking(weights: tuple[Tensor, Tensor], config: FusedMoEQuantConfig) -> str | None:
    """Why a call that is asked for gradients has none; None: it has them."""
    if config.on_host is not None:
        return TRAINS_NOT
    if config.scheme.weight is None:
        return None
    constants = [w for w in weights if w.requires_grad]
    biases = (config.w1_bias, config.w2_bias)
    for x in wanted(*config.tensors):
        constants += [] if any(x is bias for bias in biases) else [x]
    return "quantized weights and their scales must not require grad" if constants else None


def differentiable_experts(
    x: Tensor,
    weights: ExpertWeights,
    routing: Routing,
    settings: Settings,
    config: FusedMoEQuantConfig,
    lora: ExpertLora | None = None,
) -> Tensor:
    """`forward` with gradients of ``x``, weights, biases and router weights.

    The backward pass reads the product of the first GEMM, rounded to the dtype of ``x``. With
    adapters the forward pass reads it, too: it is rounded before the activation.

    Args:
        x: ``(T, H)``.
        weights: both weights.
        routing: the tokens' routing.
        settings: all else.
        config: scheme and scales of the weights.
        lora: adapters beside both products.
    """
    w1, b1, *first = weights.w1[:5]
    w2, b2, *second = weights.w2[:5]
    topk_weights, topk_ids, expert_map = routing
    stored = zip(config.weights(w1, w2), (first, second), strict=True)
    global_scales = [_unless_same(factor, q.global_scale) for q, (*_, factor) in stored]
    first_adapter, second_adapter, lora_ids = _lora_operands(lora, routing, w1.shape[0], x.dtype)
    differentiable = (x, w1, w2, topk_weights, b1, b2, *first_adapter, *second_adapter)
    ids = (topk_ids, expert_map, lora_ids)
    on_host = (weights.w1.host, weights.w2.host)
    constants = (*first, *second, *weights[2:], *global_scales, *on_host)
    operands = Operands._make((*differentiable, *ids, *constants))
    if lora_ids is not None:
        settings = settings._replace(rounds_product=True)
    mains = MainGrads(*map(main_grad_of, (w1, w2, b1, b2)))
    return _Experts.apply(settings, mains, *operands)


def _unless_same(other: Tensor | None, x: Tensor | None) -> Tensor | None:
    """Return ``x``; None if it is the other tensor: Dynamo takes no tensor twice."""
    return None if x is other else x


def _lora_operands(
    lora: ExpertLora | None, routing: Routing, num_experts: int, dtype: torch.dtype
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...], Tensor | None]:
    """The `Factors` of both adapters, and `pairs_of` the routing; None for what a call lacks."""
    none = (None, None)
    if lora is None or (used := lora.w1 or lora.w2) is None:
        return none, none, None
    first, second = (
        none if pair is None else Factors.of(*pair, lora.scaling, dtype)
        for pair in (lora.w1, lora.w2)
    )
    return first, second, pairs_of(routing, num_experts, lora.lora_ids, used[0].shape[0])


class _Experts(Function):
    """The pipeline as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, mains: MainGrads, *tensors: Any) -> Tensor:
        """Run the stages; keep the operands, the plan and the product of the first GEMM."""
        operands, kept = Operands(*tensors), []  # type: ignore[var-annotated]
        adapters = operands.adapters(settings, None)
        between = None if adapters is None else operands.beside(settings, adapters)
        step = Pass(operands.weights(), settings, between=between)
        out: Tensor = forward(step, operands.x, operands.routing, record=kept)
        ctx.settings, ctx.mains = settings, mains
        lora_plan = None if adapters is None else adapters.tiles.plan
        ctx.save_for_backward(*tensors, *kept, lora_plan)
        return out

    @staticmethod
    @once("fused_experts")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> Any:
        """Compute the gradients that are asked for."""
        *tensors, product, plan, lora_plan = saved
        operands, asked = Operands(*tensors), Operands(*ctx.needs_input_grad[2:])
        spaces = operands.space(ctx.settings, plan), operands.adapters(ctx.settings, lora_plan)
        work = _Backward(ctx.settings, operands, asked, *spaces, ctx.mains)
        gradients = work.run(grad.contiguous(), product)
        return (None, None, *gradients, *[None] * (len(tensors) - DIFFERENTIABLE))


class _Backward(NamedTuple):
    """The backward pass of a call."""

    settings: Settings
    operands: Operands
    wanted: Operands
    """Whether the gradient of each operand is asked for."""
    space: SlotRows
    adapters: SlotRows | None
    mains: MainGrads

    def run(self, grad: Tensor, product: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the differentiable operands; None: not asked for.

        Args:
            grad: the gradient of the result, ``(T, H)``, or ``(T * k, H)`` if it is not summed.
            product: the product of the first GEMM, ``(T * k, 2I)``.
        """
        operands, wanted, key = self.operands, self.wanted, self.settings.activation
        mains, on_output = self.mains, self.on_output
        db2 = self._bias_gradient(grad, on_output, operands.b2, mains.b2) if wanted.b2 else None
        if not any(wanted._replace(w2=False, b2=False)):  # none goes through the second weight
            dw2 = None
            if wanted.w2:
                h = ops.activation(product, key)
                dw2 = self._weight_gradient(grad, h, on_output, operands.w2, mains.w2)
            return (None, None, dw2, None, None, db2, *[None] * 4)
        top_k = operands.topk_ids.shape[1] if self.settings.summed else 1
        adapter = (operands.lora2_a, operands.lora2_b)
        _, scales = operands.scales()
        rows, low = self._through(grad, operands.w2, scales, adapter, top_k)
        keeps = wanted.w2 or wanted.lora2_a or wanted.lora2_b
        dp, h, products = ops.moe_activation_backward(
            rows, product, on_output, *self.slots, key, keeps
        )
        del rows
        dw2 = self._weight_gradient(grad, h, None, operands.w2, mains.w2) if wanted.w2 else None
        asked = (wanted.lora2_a, wanted.lora2_b)
        second = self._adapter_gradients(grad, h, low, adapter, asked, None, 1)
        del h, low
        dw1 = None
        if wanted.w1:
            dw1 = self._weight_gradient(dp, operands.x, self.on_input, operands.w1, mains.w1)
        db1 = self._bias_gradient(dp, None, operands.b1, mains.b1) if wanted.b1 else None
        if self.on_input is None and wanted.topk_weights and operands.b2 is not None:
            products = products + ops.slot_products(grad, operands.b2, *self.slots, True)
        dx, weighted, first = self._first_gradients(dp)
        weights = products if self.on_input is None else weighted
        if wanted.topk_weights and weights is not None:
            weights = weights.to(operands.topk_weights.dtype)
        weights = weights if wanted.topk_weights else None
        return (dx, dw1, dw2, weights, db1, db2, *first, *second)

    def _first_gradients(self, dp: Tensor) -> tuple[Any, Any, Any]:
        """Gradients of the tokens, of router weights on the input, and of the first adapter."""
        operands, wanted, weights = self.operands, self.wanted, self.on_input
        adapter, asked = (operands.lora1_a, operands.lora1_b), (wanted.lora1_a, wanted.lora1_b)
        into_weights = wanted.topk_weights and weights is not None
        rows = low = dx = of_weights = None
        if wanted.x or into_weights:
            scales, _ = operands.scales()
            rows, low = self._through(dp, operands.w1, scales, adapter, 1)
        elif wanted.lora1_a and self.adapters is not None:
            low = grouped_gemm(dp, operands.lora1_b.transpose(1, 2), self.adapters, 1)
        top_k = operands.topk_ids.shape[1]
        of_adapter = self._adapter_gradients(dp, operands.x, low, adapter, asked, weights, top_k)
        if into_weights:
            of_weights = ops.slot_products(operands.x, rows, *self.slots, False)
        if wanted.x:
            ids, expert_map, experts = self.slots
            dx = ops.moe_fused_mul_sum(rows, weights, ids, expert_map, None, experts)
        return dx, of_weights, of_adapter

    def _adapter_gradients(
        self,
        dy: Tensor,
        x: Tensor,
        low: Tensor | None,
        adapter: tuple[Any, Any],
        asked: tuple[bool, bool],
        weights: Tensor | None,
        top_k: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of both factors of a weight's adapter.

        Args:
            dy: the gradient of the weight's product; one row per slot or per token.
            x: the rows of the product; one per slot or per token.
            low: ``dy @ B``, one row per slot.
            adapter: both factors, or None.
            asked: whether each of them has a gradient.
            weights: router weights of the rows, or None.
            top_k: slots per row of ``x``.
        """
        da = db = None
        space = self.adapters
        if space is None or adapter[0] is None:
            return None, None
        if asked[0] and low is not None:
            da = grouped_wgrad(low, x, weights, space)
        if asked[1]:
            rows = grouped_gemm(x, adapter[0], space, top_k)
            db = grouped_wgrad(dy, rows, weights, space)
        return da, db

    @property
    def on_input(self) -> Tensor | None:
        """Router weights, if they multiply the rows of the first GEMM."""
        return self.operands.topk_weights if self.settings.on_input else None

    @property
    def on_output(self) -> Tensor | None:
        """Router weights, if they multiply the experts' results."""
        on_output = self.settings.summed and not self.settings.on_input
        return self.operands.topk_weights if on_output else None

    @property
    def slots(self) -> tuple[Tensor, Tensor | None, int]:
        """Ids, expert map and El, which say what slots are skipped."""
        return self.operands.topk_ids, self.operands.expert_map, self.space.num_local_experts

    def _through(
        self,
        rows: Tensor,
        w: Tensor,
        scales: tuple[Tensor | None, ...],
        adapter: tuple[Any, Any],
        top_k: int,
    ) -> tuple[Tensor, Tensor | None]:
        """``rows[s // top_k] @ w[e]`` for every slot s, with dequantized weights and the adapter.

        Returns:
            The product, and ``rows[s // top_k] @ B`` of rank r if there is an adapter.
        """
        scheme, space = self.settings.scheme, self.space
        if scheme.weight is None:
            through = grouped_gemm(rows, w.transpose(1, 2), space, top_k)
        else:
            tiles, invariant = [*space.tiles], space.batch_invariant
            through = ops.expert_dgrad(rows, w, *scales, tiles, top_k, scheme.key, invariant)
        a, b = adapter
        if self.adapters is None or a is None:
            return through, None
        low = grouped_gemm(rows, b.transpose(1, 2), self.adapters, top_k)
        add_product(through, low, a.transpose(1, 2), self.adapters)
        return through, low

    def _weight_gradient(
        self, dy: Tensor, x: Tensor, weights: Tensor | None, w: Tensor, main: Tensor | None
    ) -> Tensor | None:
        """``(weights * dy).T @ x`` over the slots of each expert, laid out as ``w`` is.

        None: it was added to the main gradient.
        """
        space = self.space
        if main is not None:
            tiles, experts = [*space.tiles], space.num_local_experts
            ops.expert_wgrad_out(dy, x, weights, tiles, experts, space.batch_invariant, out=main)
            return None
        if w.stride(-1) != 1 and weights is None:
            return grouped_wgrad(x, dy, None, space).transpose(1, 2)
        return grouped_wgrad(dy, x, weights, space)

    def _bias_gradient(
        self, dy: Tensor, weights: Tensor | None, bias: Tensor, main: Tensor | None
    ) -> Tensor | None:
        """The sum of ``weights * dy`` over the slots of each expert; None: it was added."""
        tiles, experts = [*self.space.tiles], self.space.num_local_experts
        scheme, invariant = self.settings.scheme.key, self.space.batch_invariant
        sums = ops.expert_bias_grad(dy, weights, tiles, experts, scheme, invariant)
        if main is not None:
            main.add_(sums)
            return None
        return sums.to(bias.dtype)
