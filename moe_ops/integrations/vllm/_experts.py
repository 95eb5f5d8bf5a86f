"""Experts classes of vLLM that run this library, and what they decline."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from moe_ops.activation import Activation, MoEActivation
from moe_ops.integrations._engines import say_once, say_that_it_serves
from moe_ops.integrations.vllm import SWITCH
from moe_ops.integrations.vllm._interface import unknown_setting
from moe_ops.integrations.vllm._lora import any_adapter, ids_of, layer_adapters, lora_refusal
from moe_ops.integrations.vllm._schemes import library_config, scheme_of_keys
from moe_ops.pipeline import BatchedTritonExperts, ExpertTokensMetadata, TritonExperts
from moe_ops.pipeline.adapters import Adapters
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.forms import form_of_gpu
from moe_ops.pipeline.forward import forward
from moe_ops.routing import RoutingMethodType
from moe_ops.scheme import Scheme
from moe_ops.tensors import QTensor, Routing

ENGINE = "vllm"
GIVEN = {
    MoEActivation.SILU: ("clamp_limit",),
    MoEActivation.SWIGLUOAI: ("clamp_limit", "alpha", "beta"),
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: ("clamp_limit", "alpha", "beta"),
}
"""Numbers of an activation that come from the model. vLLM ignores others, except for situ."""


def layer_activation(moe_config: Any, quant_config: Any = None) -> Activation:
    """Return the activation of a layer of vLLM, with its numbers.

    Args:
        moe_config: vLLM's ``FusedMoEConfig``.
        quant_config: vLLM's ``FusedMoEQuantConfig``, whose numbers come first, or None.

    Raises:
        ValueError: an activation that this library does not have; a number that is missing.
    """
    kind = MoEActivation.from_str(moe_config.activation.value)
    if kind is MoEActivation.SITU:
        beta, linear = moe_config.activation_situ_beta, moe_config.activation_situ_linear_beta
        return Activation(kind, beta=beta, linear_beta=linear if linear and linear > 0 else None)
    numbers = {}
    for name, of_model in (("clamp_limit", "limit"), ("alpha", "alpha"), ("beta", "beta")):
        number = getattr(quant_config, f"gemm1_{name}", None)
        numbers[name] = getattr(moe_config, f"swiglu_{of_model}") if number is None else number
    return Activation(kind, **{name: numbers[name] for name in GIVEN.get(kind, ())})


def library_layer(moe_config: Any, activation: Activation) -> FusedMoEConfig:
    """Return a layer of vLLM as this library describes it.

    Raises:
        TypeError, ValueError: a dtype or sizes that the library does not take.
    """
    return FusedMoEConfig(
        num_experts=max(moe_config.num_experts, moe_config.num_local_experts),  # shared ones too
        experts_per_token=moe_config.experts_per_token,
        hidden_dim=moe_config.hidden_dim,
        intermediate_size=moe_config.intermediate_size_per_partition,
        num_local_experts=moe_config.num_local_experts,
        activation=activation,
        device=moe_config.device,
        routing_method=RoutingMethodType.Unspecified,
        in_dtype=moe_config.in_dtype,
        has_bias=moe_config.has_bias,
        is_act_and_mul=activation.kind.is_gated,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )


def weight_of_layer(which: str, q: QTensor, scheme: Scheme, moe_config: Any) -> QTensor:
    """Return ``w13`` or ``w2`` in the form that kernels of its GPU read; see `form_of_gpu`."""
    return form_of_gpu(
        q,
        scheme,
        moe_config.in_dtype,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        activation=layer_activation(moe_config).key if which == "w13" else "",
    )


class MoeOpsExpertsBase(mk.FusedMoEExpertsModular):
    """What the experts of both formats share.

    Args:
        moe_config: vLLM's ``FusedMoEConfig``.
        quant_config: vLLM's ``FusedMoEQuantConfig``.
        max_num_tokens: rows per expert for each dispatcher; Batched format only.
        num_dispatchers: ranks that send tokens; Batched format only.
    """

    EXPERTS: ClassVar[Any]
    """Class of the experts of this library that run."""

    def __init__(
        self,
        moe_config: Any,
        quant_config: Any,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self.library_activation = layer_activation(moe_config, quant_config)
        self.experts: Any = self.EXPERTS(
            library_layer(moe_config, self.library_activation),
            library_config(quant_config, moe_config.num_local_experts),
            self.max_num_tokens,
            self.num_dispatchers,
        )
        scheme = self.experts.quant_config.scheme
        say_that_it_serves(ENGINE, scheme, self.library_activation.key)

    @property
    def post_gemm2_hook(self) -> None:
        """None: vLLM's hook on the unweighted rows of GEMM 2, which this library sums itself.

        Raises:
            NotImplementedError: a model sets the hook; the layer would ignore it.
        """
        return None

    @post_gemm2_hook.setter
    def post_gemm2_hook(self, hook: Any) -> None:
        if hook is not None:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise NotImplementedError(
                f"post_gemm2_hook must be None for experts of moe_ops, got {name} "
                f"({SWITCH}=0 runs vLLM's own experts)"
            )

    @property
    def expects_unquantized_inputs(self) -> bool:
        """True, unless vLLM sends tokens to other ranks: it then sends quantized rows."""
        return not self.moe_config.moe_parallel_config.use_all2all_kernels

    @staticmethod
    def is_supported_config(
        cls: type[MoeOpsExpertsBase],
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: Any,
    ) -> tuple[bool, str | None]:
        """Whether vLLM's rules and this library's allow a layer, and if not, the first reason.

        The reason is written to the log, unless it is the format, since vLLM asks both classes.
        """
        supported, reason = mk.FusedMoEExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if supported:
            reason = layer_refusal(
                cls.EXPERTS, moe_config, scheme_of_keys(weight_key, activation_key)
            )
        if reason is not None and activation_format == cls.activation_format():
            say_once(ENGINE, f"vLLM's own experts run: {reason}")
        return reason is None, reason

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() or current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return scheme_of_keys(weight_key, activation_key) is not None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value in {kind.value for kind in MoEActivation}

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of two workspaces (none: operators allocate their results) and of the output.

        The output of the Batched format, where ``max_num_tokens`` is set, has all padded rows.
        """
        if self.max_num_tokens is None:
            return (0,), (0,), (M, K)
        return (0,), (0,), (local_num_experts, self.max_num_tokens * self.num_dispatchers, K)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack int8 weights with a scale per row, which vLLM brings here in the plain form.

        Other formats are packed when vLLM converts them, see `_weights`.
        """
        config = self.experts.quant_config
        if config.scheme.name != "int8_w8a16":
            return
        for which, scale in (("w13", config.w1_scale), ("w2", config.w2_scale)):
            weight = getattr(layer, f"{which}_weight")
            q = QTensor(weight.data, scale.data)
            q = weight_of_layer(which, q, config.scheme, self.moe_config)
            if q.data.dtype != weight.dtype:
                replace_parameter(layer, f"{which}_weight", q.data)


class MoeOpsExperts(LoRAExpertsMixin, MoeOpsExpertsBase):
    """Experts of the Standard format, which sum the rows of each token; they take adapters."""

    EXPERTS: ClassVar[Any] = TritonExperts
    adapters: Adapters | None = None

    def set_lora_context(self, ctx: Any) -> None:
        """Take a layer's adapters, which vLLM then loads and unloads in place.

        Raises:
            NotImplementedError, TypeError, ValueError: see `layer_adapters`.
        """
        super().set_lora_context(ctx)
        self.adapters = layer_adapters(ctx, self.moe_config, self.library_activation.kind)
        say_once(ENGINE, "runs the experts' adapters")

    @staticmethod
    def activation_format() -> Any:
        """Standard."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        config = moe_parallel_config
        gathers = config.use_ag_rs_all2all_kernels or config.use_deepep_ht_kernels
        return not config.use_passthrough_all2all and (gathers or not config.use_all2all_kernels)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """No operation: `apply` sums."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write ``(T, H)`` to ``output``.

        vLLM's prepare has applied router weights that multiply the input.
        """
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        if self.adapters is not None and self._adapts():
            ids = ids_of(self._lora_context.punica_wrapper, len(hidden_states))
            routing = Routing(topk_weights, topk_ids, expert_map)
            step = self.experts.step(w1, w2, self.library_activation, on_input=False)
            step = self.adapters._replace(lora_ids=ids).beside(step, hidden_states, routing)
            forward(step, hidden_states, routing, out=output)
            return
        scale = None if a1q_scale is None else a1q_scale.contiguous()
        self.experts.apply(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            self.library_activation,
            global_num_experts,
            expert_map,
            scale,
            None,
            False,
            out=output,
        )

    def _adapts(self) -> bool:
        """Whether this step runs adapters, which a batch-invariant layer always does."""
        invariant = self.experts.moe_config.batch_invariant
        return invariant or any_adapter(self._lora_context.punica_wrapper)


class BatchedMoeOpsExperts(MoeOpsExpertsBase):
    """Experts of the Batched format, on rows that vLLM has sent to their experts."""

    EXPERTS: ClassVar[Any] = BatchedTritonExperts

    @staticmethod
    def activation_format() -> Any:
        """BatchedExperts."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        config = moe_parallel_config
        is_batched = config.use_batched_activation_format or not config.use_all2all_kernels
        return not config.use_passthrough_all2all and is_batched

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Delegated to vLLM's finalize, which knows where the rows came from."""
        return TopKWeightAndReduceDelegate()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write ``(El, M, H)`` to ``output``; rows past an expert's count are undefined."""
        scale = None if a1q_scale is None else a1q_scale.contiguous()
        meta = ExpertTokensMetadata(expert_tokens_meta.expert_num_tokens)
        rows = self.experts.apply(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            self.library_activation,
            global_num_experts,
            None,
            scale,
            meta,
            apply_router_weight_on_input,
        )
        output.copy_(rows)


def layer_refusal(
    experts: type[TritonExperts] | type[BatchedTritonExperts],
    moe_config: Any,
    scheme: Scheme | None,
) -> str | None:
    """Return why experts of this library do not serve a layer of vLLM; None: they do.

    Args:
        experts: the class.
        moe_config: vLLM's ``FusedMoEConfig``.
        scheme: what `scheme_of_keys` returned for the layer; None: no scheme of this plug-in.
    """
    if scheme is None:
        return "a quantization that this plug-in does not know"
    setting = unknown_setting(moe_config)
    if setting is not None:
        return f"a layer with {setting}, which this plug-in does not know"
    try:
        layer = library_layer(moe_config, layer_activation(moe_config))
    except (TypeError, ValueError) as error:
        return str(error)
    weight, activation = scheme.weight, scheme.activation
    supported, reason = experts.is_supported_config(
        experts, layer, weight, activation, experts.activation_format()
    )
    if not supported:
        return reason
    lora = lora_refusal(moe_config)
    if lora is not None:
        return lora
    sends = moe_config.moe_parallel_config.use_all2all_kernels
    if sends and activation is not None and activation.per_tensor:
        return "one scale for rows of several ranks is not supported"
    block = scheme.block_shape
    if block is not None and layer.intermediate_size % block[0]:
        return (
            f"intermediate_size must be a multiple of {block[0]} rows of a block, "
            f"got {layer.intermediate_size}"
        )
    return None
