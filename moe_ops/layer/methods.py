"""How a layer's weights are stored and multiplied: unquantized, or in any scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_ops import ops
from moe_ops.gradients import refuse, wanted
from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.forms import in_forms_for_device
from moe_ops.layer.host_memory import reason_against
from moe_ops.layer.initial import warn_if_empty
from moe_ops.layer.main_grads import Weights, with_main_grads
from moe_ops.layer.parameters import PARAMETER_NAMES, Held, parameter_specs, stored_config
from moe_ops.layer.partition import LayerSizes
from moe_ops.layer.replicas import trained_together
from moe_ops.layer.set_kernel import check_is_current, with_kernel
from moe_ops.layer.stage import Stage
from moe_ops.layer.state import Made
from moe_ops.pipeline.backward import TRAINS_NOT
from moe_ops.pipeline.calls import Call
from moe_ops.pipeline.experts import BatchedTritonExperts, FusedMoEExperts, TritonExperts
from moe_ops.pipeline.formats import FusedMoEActivationFormat
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.pipeline.lora import ExpertLora
from moe_ops.pipeline.modular_kernel import FusedMoEKernel
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalize
from moe_ops.scheme import UNQUANTIZED, FusedMoEQuantConfig


class FusedMoEMethodBase(ABC):
    """Creates a layer's parameters, finishes them after loading, and runs the experts.

    A method holds settings. Parameters, and what is made of them, belong to the layer.

    Source:
        vLLM ``FusedMoEMethodBase``.
    """

    def __init__(self) -> None:
        self.exchange: FusedMoEPrepareAndFinalize | None = None
        """What sends tokens to other ranks' experts; set by a layer whose ranks exchange tokens."""
        self._has_global_scales = False

    def create_weights(
        self, layer: nn.Module, sizes: LayerSizes, device: torch.device | str | None = None
    ) -> None:
        """Register the parameters that `parameter_specs` lists, replacing earlier ones.

        They hold zeros (static scales: NaN), and require grad unless the scheme quantizes weights.
        """
        specs, trainable = parameter_specs(sizes), sizes.scheme.weight is None
        for name in PARAMETER_NAMES:
            spec, value = specs.get(name), None
            if spec is not None:
                filled = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
                value = nn.Parameter(filled.fill_(spec.fill) if spec.fill else filled, trainable)
            layer.register_parameter(name, value)
        self._has_global_scales = any(spec.kind == "global_scale" for spec in specs.values())

    def process_weights_after_loading(self, layer: ExpertLayer) -> None:
        """Finish the parameters once they are filled, by whatever loader; may be called again.

        Raises:
            ValueError: a number that cannot be used, with its expert.
        """
        layer.take(self.finished(layer.stage()))
        layer.renew_slots()

    def finished(self, stage: Stage) -> Stage:
        """Return a stage that was filled, with its parameters as experts run with them."""
        return stage

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: ExpertLayer) -> FusedMoEQuantConfig | None:
        """Return the layer's scheme and scales as kernels take them; None: not quantized."""

    def apply(
        self,
        layer: ExpertLayer,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts_input: Tensor | None = None,
        lora: ExpertLora | None = None,
    ) -> Any:
        """Run this rank's experts on routed tokens: ``(T, H)`` to ``(T, H)``.

        Weights in act-order read the tokens' columns in the order ``layer.w13_input_order``.
        ``shared_experts_input`` may be given only for a layer with a kernel and shared experts: the
        kernel runs the shared experts too, and the result is ``(shared, routed)``. ``lora`` may be
        given only for a layer that `check_takes_lora`.

        Raises:
            NotImplementedError: act-order that differs between experts, in a layer with a kernel.
        """
        state, order_EH = layer.state, layer.w13_input_order
        kernel = state.kernel
        if kernel is not None:
            check_is_current(state, layer._parameters)
        elif layer.exchanges_tokens:
            kernel = self.kernel_of(layer)
        if order_EH is not None:
            is_shared_out = kernel is not None and state.placement.is_shared_out
            if order_EH.shape[0] > 1 or is_shared_out:
                return self._ordered_by_slot(layer, x, topk_weights, topk_ids)
            x, lora = x.index_select(1, order_EH[0]), None
        if kernel is None:
            return self._experts(layer, x, topk_weights, topk_ids, lora)
        if state.host_experts is not None:
            raise NotImplementedError(reason_against(state))
        w13, w2 = layer.w13_weight, layer.w2_weight
        if layer.enable_eplb or layer.fuse_wgrad_accumulation:
            w13, w2, *biases = _joined_weights(layer)
            if state.kernel is None and len(wanted(*biases)) > 0:
                kernel = self.kernel_of(layer, biases)
        call = Call(
            x,
            w13,
            w2,
            topk_weights,
            topk_ids,
            layer.activation,
            layer.global_num_experts,
            layer.expert_map,
            layer.apply_router_weight_on_input,
            shared_experts_input,
            lora,
        )
        return kernel.run(call, None if shared_experts_input is None else shared_experts_of(layer))

    def _ordered_by_slot(
        self, layer: ExpertLayer, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> Tensor:
        """Run experts in act-order of their own. S are the slots of all tokens, T * K."""
        if layer.state.exchange is not None:
            raise NotImplementedError(
                "layer.kernel must be None if the act-order of w13 differs between experts, got a "
                "kernel"
            )
        expert_map, on_input = layer.expert_map, layer.apply_router_weight_on_input
        x_SH = ops.order_columns(x_TH, cast(Tensor, layer.w13_input_order), ids_TK, expert_map)
        weights_S1 = (weights_TK if on_input else torch.ones_like(weights_TK)).reshape(-1, 1)
        y_SH = self._experts(layer, x_SH, weights_S1, ids_TK.reshape(-1, 1))
        y_TKH, local = y_SH.view(*ids_TK.shape, y_SH.shape[1]), layer.w13_weight.shape[0]
        on_output = None if on_input else weights_TK
        return ops.moe_fused_mul_sum(y_TKH, on_output, ids_TK, expert_map, None, local)

    def _experts(
        self,
        layer: ExpertLayer,
        x_TH: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        lora: ExpertLora | None = None,
    ) -> Tensor:
        """Run experts without a kernel, on the device or in host memory."""
        host = layer.state.host_experts
        if layer.enable_eplb or layer.fuse_wgrad_accumulation:
            own = _joined_weights(layer)
        else:
            own = layer.w13_weight, layer.w2_weight, layer.w13_bias, layer.w2_bias
        config = self.get_fused_moe_quant_config(layer) if host is None else host.quant_config
        w1, w2, w1_bias, w2_bias = own if host is None else host[1:5]
        out_TH = fused_experts(
            x_TH,
            w1,
            w2,
            weights_TK,
            ids_TK,
            activation=layer.activation,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            w1_bias=w1_bias,
            w2_bias=w2_bias,
            quant_config=config,
            batch_invariant=layer.state.batch_invariant,
            lora=lora,
        )
        if host is None or not torch.is_grad_enabled():
            return out_TH
        trained = wanted(layer.w13_weight, layer.w2_weight, layer.w13_bias, layer.w2_bias)
        return refuse(out_TH, trained, "FusedMoE", TRAINS_NOT)

    def uses_weight_scale_2_pattern(self) -> bool:
        """Whether the scheme's weights have a global scale, whose name is ``weight_scale_2``."""
        return self._has_global_scales

    def maybe_make_prepare_finalize(self) -> FusedMoEPrepareAndFinalize | None:
        """Return what sends tokens to other ranks' experts; None: nothing does."""
        return self.exchange

    def kernel_of(self, layer: ExpertLayer, biases: Sequence[Tensor | None] = ()) -> FusedMoEKernel:
        """Return the kernel around the layer's exchange of tokens, for the current parameters.

        It is made when the layer's state or parameters change, in calls that are compiled, and with
        ``biases`` of both weights in place of the layer's own.
        """
        own, once = layer._parameters, torch.compiler.is_compiling() or len(biases) > 0
        made = None if once else layer.state.made.get("kernel")
        if made is not None and made.held.are_of(own):
            return cast(FusedMoEKernel, made.value)
        part = layer.state.exchange
        if part is None:
            raise NotImplementedError(
                "quant_method.maybe_make_prepare_finalize must return what exchanges tokens with "
                f"{layer.moe_parallel_config}, got None"
            )
        experts = self.select_gemm_impl(part, layer)
        if biases:
            w1_bias, w2_bias = biases
            config = replace(experts.quant_config, w1_bias=w1_bias, w2_bias=w2_bias)
            experts.quant_config = config
        kernel = FusedMoEKernel(
            part,
            experts,
            moe_parallel_config=layer.moe_parallel_config,
            chunk_size=layer.chunk_size,
        )
        if not once:
            layer.state.made["kernel"] = Made(kernel, Held(own))
        return kernel

    def init_prepare_finalize(self, layer: ExpertLayer) -> None:
        """Build the layer's kernel around `maybe_make_prepare_finalize`, unless that is None."""
        prepare_finalize = self.maybe_make_prepare_finalize()
        if prepare_finalize is not None:
            experts = self.select_gemm_impl(prepare_finalize, layer)
            layer.state = with_kernel(layer, FusedMoEKernel(prepare_finalize, experts))

    def select_gemm_impl(
        self, prepare_finalize: FusedMoEPrepareAndFinalize, layer: ExpertLayer
    ) -> FusedMoEExperts:
        """Build experts for the format that ``prepare_finalize`` produces.

        They hold the layer's current parameters: call this after loading and moving.
        """
        config = self.get_fused_moe_quant_config(layer)
        config = stored_config(UNQUANTIZED, layer._parameters) if config is None else config
        if prepare_finalize.activation_format is FusedMoEActivationFormat.Standard:
            return TritonExperts(layer.moe_config, config)
        max_num_tokens = prepare_finalize.max_num_tokens_per_rank()
        return BatchedTritonExperts(
            layer.moe_config, config, max_num_tokens, prepare_finalize.num_dispatchers()
        )


def shared_experts_of(layer: ExpertLayer) -> Callable[[Tensor], Tensor] | None:
    """Return the shared experts of the layer or of its kernel; each token goes to them once.

    Raises:
        ValueError: the layer and its kernel have different ones.
    """
    own, kernel = layer.shared_experts, layer.state.kernel
    beside = None if kernel is None else kernel.shared_experts
    if own is None:
        return beside
    if beside is not None and beside is not own:
        raise ValueError(
            "layer.kernel.shared_experts must be None or the layer's own shared_experts, got "
            f"{type(beside).__name__}"
        )
    return own


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """Weights ``(El, 2I, H)`` and ``(El, H, I)`` in the tokens' dtype, and optional biases."""

    def get_fused_moe_quant_config(self, layer: ExpertLayer) -> None:
        """Return None."""


class QuantizedFusedMoEMethod(FusedMoEMethodBase):
    """Weights of any scheme, with its scales, zero points and global scales."""

    def __init__(self) -> None:
        super().__init__()
        self._warned = False

    def finished(self, stage: Stage) -> Stage:
        """Check that global and static scales are positive and finite, and share the static scale.

        A static scale is one number for the input of all experts: the largest of theirs. The scales
        of other ranks' experts count if a loader passed them on, which loaders of all experts do.
        Weights are packed where kernels read the packed form fast, and MXFP4 is held as fp8 where
        that is exact and fast: see `FusedMoE.pack_` and `FusedMoE.as_fp8_`.
        """
        for name, spec in parameter_specs(stage.state.sizes).items():
            if spec.kind not in ("global_scale", "input_scale"):
                continue
            scale = stage.parameters[name].data
            good = (scale.isfinite() & (scale > 0)).view(len(scale), -1).all(1)
            if not good.all():
                expert = int((~good).nonzero()[0])
                raise ValueError(
                    f"{name} must be positive and finite, got {scale[expert].tolist()} for local "
                    f"expert {expert}"
                )
            if spec.kind == "input_scale":
                scale.fill_(scale.amax().clamp(min=stage.state.given_scales.largest(name)))
        stage.state.given_scales.clear()
        return in_forms_for_device(stage)

    def get_fused_moe_quant_config(self, layer: ExpertLayer) -> FusedMoEQuantConfig:
        """Return the same object as long as the layer has the same parameters.

        The first eager call warns if nothing was loaded into the layer.
        """
        if torch.compiler.is_compiling():  # the compiler traces how it is made
            return stored_config(layer.state.sizes.scheme, layer._parameters)
        made, own = layer.state.made.get("config"), layer._parameters
        if made is not None and made.held.are_of(own):
            return cast(FusedMoEQuantConfig, made.value)
        config = stored_config(layer.state.sizes.scheme, own)
        layer.state.made["config"] = Made(config, Held(own))
        if layer.state.initial_seed is not None:  # else zeros were loaded, as ranks of padding have
            self._warned = self._warned or warn_if_empty((config.w1_scale, config.w2_scale))
        return config


def _joined_weights(layer: ExpertLayer) -> Weights:
    """Weights and biases whose gradients go to main gradients, or are summed over replicas."""
    return with_main_grads(layer) if layer.fuse_wgrad_accumulation else trained_together(layer)
