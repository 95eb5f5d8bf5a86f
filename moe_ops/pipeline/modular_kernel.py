"""The modular kernel: a prepare-finalize combined with experts of the same format.

``prepare -> experts -> finalize``, with optional shared experts. Every step consists of functional
operators, so the whole kernel can be traced, exported and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation
from moe_ops.dispatch.tiles import cdiv
from moe_ops.gradients import inference_only, wanted
from moe_ops.parallel import FusedMoEParallelConfig
from moe_ops.pipeline.autocast import autocast_dtype, under_autocast
from moe_ops.pipeline.calls import Call, Decision, Pending, num_experts_of, without_history
from moe_ops.pipeline.experts import FusedMoEExperts, OperatorExperts
from moe_ops.pipeline.forward import Pass, forward
from moe_ops.pipeline.kernel_call import STANDARD, KernelCall
from moe_ops.pipeline.kernel_checks import (
    check_adapters,
    check_call,
    check_formats,
    check_monolithic_call,
    check_options,
    check_parts,
    check_tokens_to_send,
    lacks_gradients,
    needless_input,
    needless_map,
    not_tokens,
)
from moe_ops.pipeline.lora import ExpertLora
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalize
from moe_ops.tensors import Routing

OWN = OperatorExperts.apply
"""What `forward` does itself."""


class FusedMoEKernel:
    """Prepare, experts and finalize as one layer.

    Args:
        prepare_finalize: sends tokens to experts and combines the results.
        fused_experts: computes the experts; of the same format as ``prepare_finalize``, and
            monolithic if and only if that is.
        shared_experts: a callable on tokens whose result is returned beside the routed one.
        moe_parallel_config: how the layer is spread over ranks; stored for the caller.
        inplace: write the result to ``hidden_states`` and return that tensor.
        chunk_size: the most tokens that the experts process at a time, which bounds the memory
            between the GEMMs (Standard format); compiled, there is one graph per number of chunks.

    Raises:
        TypeError: a part of the wrong type.
        ValueError: parts that do not match; ``inplace`` with shared experts or monolithic parts; a
            ``chunk_size`` that is not positive or cannot be used.

    Source:
        vLLM ``FusedMoEModularKernel`` / ``FusedMoEKernel``.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize,
        fused_experts: FusedMoEExperts,
        shared_experts: Callable[[Tensor], Tensor] | None = None,
        moe_parallel_config: FusedMoEParallelConfig | None = None,
        inplace: bool = False,
        *,
        chunk_size: int | None = None,
    ) -> None:
        check_parts(prepare_finalize, fused_experts)
        check_options(fused_experts, shared_experts, inplace, chunk_size)
        if moe_parallel_config is not None:
            checks.instance("moe_parallel_config", moe_parallel_config, FusedMoEParallelConfig)
        prepare_finalize.post_init_setup(fused_experts)
        check_formats(prepare_finalize, fused_experts)
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts
        self.shared_experts, self.moe_parallel_config = shared_experts, moe_parallel_config
        self.inplace, self.chunk_size = inplace, chunk_size
        self.is_monolithic = fused_experts.is_monolithic()
        """Whether the experts route themselves: `apply_monolithic` instead of `apply`."""
        standard = fused_experts.activation_format() is STANDARD
        kind: Any = type(prepare_finalize)
        self.checks_prepared = not kind.prepare.__module__.startswith("moe_ops.")
        """Whether results of ``prepare`` are checked: it is not this library's."""
        self.refuses_expert_map = standard and not fused_experts.supports_expert_map()
        """Whether a call must have no ``expert_map``; in the Batched format prepare takes it."""

    def supports_expert_map(self) -> bool:
        """Whether the experts take an ``expert_map``; in the Batched format prepare takes it."""
        return self.fused_experts.supports_expert_map()

    def output_is_reduced(self) -> bool:
        """Whether results are already summed over ranks, so that no all-reduce is needed."""
        return self.prepare_finalize.output_is_reduced()

    def apply(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation | Activation | str = MoEActivation.SILU,
        global_num_experts: int = -1,
        expert_map: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        shared_experts_input: Tensor | None = None,
        lora: ExpertLora | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the layer on tokens whose routing is known.

        If prepare takes at most ``max_num_tokens`` tokens (the Batched format), more tokens are run
        in parts of that size, one after another. A compiled or exported call passes them to
        prepare, which raises for more tokens, as each of this library does. So does a prepare with
        several dispatchers, which must all call it equally often.

        Args:
            hidden_states: ``(T, H)`` bf16, fp16 or fp32; also T = 0.
            w1: ``(El, 2I, H)`` or ``(El, I, H)``, stored as the experts' scheme says.
            w2: ``(El, H, I)``.
            topk_weights: ``(T, k)``.
            topk_ids: ``(T, k)`` int32 or int64, global experts. In the Batched format the ids of a
                token must be distinct, or there must be room for every slot.
            activation: kind, name or `Activation`. The default raises if ``moe_config`` of the
                experts has another activation: pass that.
            global_num_experts: E; -1: the length of ``expert_map``, or El without one.
            expert_map: ``(E,)`` or None.
            apply_router_weight_on_input: scale each slot's row before the first GEMM, for any k.
            shared_experts_input: input of the shared experts; None: ``hidden_states``.
            lora: adapters of the El experts, as in `fused_experts`; both parts must have
                ``takes_lora()``. If prepare sends tokens to other ranks, their ``lora_ids`` go with
                them: all ranks pass ids, or none does.

        Returns:
            ``(T, H)``, or ``(shared experts' result, (T, H))`` with shared experts.

        Raises:
            TypeError, ValueError, NotImplementedError: as `fused_experts`. NotImplementedError also
                for a backward pass through the routed result if a part has no gradients (see
                ``has_gradients``) or ``inplace``, and for adapters that a part does not take or
                activations that the experts cannot quantize; ValueError also for a monolithic
                kernel, too many tokens, or ``shared_experts_input`` without shared experts.
        """
        call = Call(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            expert_map,
            apply_router_weight_on_input,
            shared_experts_input,
            lora,
        )
        return self.run(call, self.shared_experts)

    def run(
        self, call: Call, shared_experts: Callable[[Tensor], Tensor] | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`apply` with the given shared experts (None: without any) instead of the kernel's."""
        original = call
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            call = self._autocast(call)
        decision, part = self._enter(call), self.prepare_finalize
        size, tokens = decision.most, call.hidden_states.shape[0]
        whole = size is None or torch.compiler.is_compiling() or tokens <= size
        # With several dispatchers the other ranks must make the same number of calls.
        if size is None or whole or part.num_dispatchers() > 1:
            finalized = self._forward(KernelCall(self, call, decision))
        else:
            parts = []
            for i in range(cdiv(tokens, size)):
                tokens_of_part = call.tokens(slice(i * size, (i + 1) * size))
                parts.append(self._forward(KernelCall(self, tokens_of_part, decision)).wait())
            finalized = Pending(None, lambda: torch.cat(parts))
        return self._finish(original, finalized, shared_experts)

    def _autocast(self, call: Call) -> Call:
        """The call with tokens and weights in the dtype of `torch.autocast`, if it is on."""
        x, w1, w2 = under_autocast(*call[:3], self.fused_experts.quant_config)
        return call._replace(hidden_states=x, w1=w1, w2=w2)

    def _enter(self, call: Call) -> Decision:
        """Check the arguments, and decide what gradients the call has."""
        experts = self.fused_experts
        if self.is_monolithic:
            raise ValueError("apply needs modular parts: call apply_monolithic with router_logits")
        if self.refuses_expert_map and call.expert_map is not None:
            raise needless_map(experts)
        check_call(experts, call)
        if call.lora is not None:
            check_adapters(self, call, call.lora)
        dtype = self.prepare_finalize.topk_indices_dtype()
        if dtype is not None and call.topk_ids.dtype != dtype:
            raise TypeError(f"topk_ids must have dtype {dtype}, got {call.topk_ids.dtype}")
        inputs: list[Tensor] = []
        if torch.is_grad_enabled():
            inputs = wanted(*call[:4], call.lora, experts.quant_config)
        reason = lacks_gradients(self, call) if len(inputs) > 0 else None
        trained = len(inputs) > 0 and reason is None
        most = self.prepare_finalize.max_num_tokens_per_rank()
        return Decision(most, inputs, reason, trained or call.lora is not None)

    def start_prepare(self, call: Call) -> Pending:
        """Check the arguments and start prepare; returns a pending `PrepareResult`."""
        call = self._autocast(call)
        return self.start(call, self._enter(call))

    def start(self, call: Call, decision: Decision) -> Pending:
        """`start_prepare` of a call that is checked already."""
        part: Any = self.prepare_finalize
        experts = self.fused_experts
        if decision.most is not None:
            check_tokens_to_send(part, call, decision.most)
        plain = call if decision.reason is None else without_history(call)
        is_async = part.supports_async()
        start = part.prepare_async if is_async else part.prepare
        ids = None if call.lora is None else call.lora.lora_ids
        prepared = start(
            plain.hidden_states,
            plain.topk_weights,
            plain.topk_ids,
            num_experts_of(call),
            call.expert_map,
            self.weighted_by_prepare(call, decision),
            experts.quant_config,
            decision.recorded or experts.expects_unquantized_inputs,
            **({} if ids is None else {"lora_ids": ids}),
        )
        return Pending.of(prepared, decision, is_async=is_async)

    def run_experts(self, call: Call, pending: Pending) -> tuple[Call, Tensor]:
        """Wait for prepare and run the experts on its result, in chunks if ``chunk_size`` is set.

        Returns:
            The call with the routing after prepare, and the experts' rows. A backward pass through
            the rows raises if a part of the kernel has no gradients.
        """
        call = self._autocast(call)
        decision = self._enter(call) if pending.decision is None else pending.decision
        running = KernelCall(self, call, decision, pending)
        del pending
        rows: Tensor = self._forward(running)
        return running.call, rows

    def _forward(self, running: KernelCall) -> Any:
        """`forward` of a call: a pending ``(T, H)``, or rows if prepare was started before."""
        call, experts = running.call, self.fused_experts
        step = Pass(exchange=running, through=running.through)
        # A subclass, or a caller, may have replaced the method.
        is_own = getattr(experts.apply, "__func__", None) is OWN
        plain = self.chunk_size is None and not running.decision.recorded
        if is_own and plain and isinstance(experts, OperatorExperts):
            on_input = call.apply_router_weight_on_input
            step = experts.step(call.w1, call.w2, call.activation, on_input)
            step = step._replace(exchange=running)
        return forward(step, call.hidden_states, Routing(call.topk_weights, call.topk_ids))

    def weighted_by_prepare(self, call: Call, decision: Decision) -> bool:
        """Whether prepare multiplies rows by router weights.

        In the Standard format with gradients or adapters the experts do.
        """
        experts = self.fused_experts
        if not call.apply_router_weight_on_input or experts.applies_router_weight_on_input:
            return False
        return not (decision.recorded and experts.activation_format() is STANDARD)

    def start_finalize(self, call: Call, rows: Tensor) -> Pending:
        """Start finalize; returns a pending ``(T, H)``."""
        part: Any = self.prepare_finalize
        experts: Any = self.fused_experts
        is_async = part.supports_async()
        finalize = part.finalize_async if is_async else part.finalize
        output = finalize(
            rows,
            call.topk_weights,
            call.topk_ids,
            call.apply_router_weight_on_input,
            experts.finalize_weight_and_reduce_impl(),
        )
        pending = Pending.of(output, is_async=is_async)
        if part.num_dispatchers() == 1:
            return pending
        tokens = call.hidden_states.shape[0]  # prepare may have padded them
        return Pending(pending.hook, lambda: pending.receiver()[:tokens])

    def finish(self, call: Call, finalized: Pending) -> Tensor | tuple[Tensor, Tensor]:
        """Run the shared experts while rows are being sent back, then wait for the rows."""
        return self._finish(call, finalized, self.shared_experts)

    def _finish(
        self, call: Call, finalized: Pending, shared_experts: Callable[[Tensor], Tensor] | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        shared, shared_input = None, call.shared_experts_input
        if shared_experts is None and shared_input is not None:
            raise needless_input()
        if shared_experts is not None:
            shared = shared_experts(call.hidden_states if shared_input is None else shared_input)
            if shared is None:
                raise ValueError("shared_experts must return a Tensor, got None")
        output = finalized.wait()
        x = call.hidden_states
        # Sizes are symbols while compiling.
        if (
            not isinstance(output, Tensor)
            or not (torch.compiler.is_compiling() or output.shape == x.shape)
            or (output.dtype != x.dtype and output.dtype != autocast_dtype(x))
        ):
            raise not_tokens(self, call, output)
        if self.inplace:
            output = x.copy_(output)
        return output if shared is None else (shared, output)

    @inference_only
    def apply_monolithic(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        router_logits: Tensor,
        activation: MoEActivation | Activation | str,
        global_num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        num_expert_group: int | None = None,
        e_score_correction_bias: Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
    ) -> Tensor:
        """Route by ``router_logits`` ``(T, E)`` and run the experts: ``(T, H)``.

        Args (arguments not listed here: see `apply`):
            router_logits: ``(T, E)`` bf16, fp16 or fp32; a tuple of two, as in vLLM, raises a
                TypeError.
            num_expert_group: groups of experts; None: no groups.
            e_score_correction_bias: float32 ``(E,)``, added to scores for the choice only.
            routed_scaling_factor: factor of the weights; None: 1.
            topk_group: groups that a token may choose from.

        Raises:
            TypeError, ValueError, NotImplementedError: as `apply`; ValueError also for a modular
                kernel.
        """
        if not self.is_monolithic:
            raise ValueError("apply_monolithic needs monolithic parts: route, then call apply")
        experts: Any = self.fused_experts
        part: Any = self.prepare_finalize
        if self.refuses_expert_map and expert_map is not None:
            raise needless_map(experts)
        checks.flags(apply_router_weight_on_input=apply_router_weight_on_input)
        hidden_states, w1, w2 = under_autocast(hidden_states, w1, w2, experts.quant_config)
        check_monolithic_call(
            experts,
            hidden_states,
            w1,
            w2,
            router_logits,
            activation,
            global_num_experts,
            expert_map,
        )
        rows, scale, logits = part.prepare(
            hidden_states, router_logits, experts.quant_config, experts.expects_unquantized_inputs
        )
        num_experts = router_logits.shape[1] if global_num_experts == -1 else global_num_experts
        tokens = experts.apply(
            rows,
            w1,
            w2,
            logits,
            activation,
            num_experts,
            expert_map,
            scale,
            apply_router_weight_on_input,
            num_expert_group,
            e_score_correction_bias,
            routed_scaling_factor,
            topk_group,
        )
        return part.finalize(tokens)
