"""One call on its way through a modular kernel, with any prepare-finalize and any experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.gradients import refuse
from moe_ops.pipeline.calls import (
    Call,
    Decision,
    Pending,
    chunk_of,
    num_experts_of,
    routed,
    without_history,
)
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat
from moe_ops.pipeline.kernel_checks import check_prepared
from moe_ops.tensors import Routing, Rows

STANDARD = FusedMoEActivationFormat.Standard


class KernelCall:
    """One call on its way through a kernel: the `Exchange` of its `forward`.

    Args:
        kernel: the kernel.
        call: its arguments.
        decision: what is decided about the call.
        pending: the prepare that was started, after which `send_back` returns rows; None: start it.
    """

    def __init__(
        self, kernel: Any, call: Call, decision: Decision, pending: Pending | None = None
    ) -> None:
        self.kernel, self.call, self.decision, self.pending = kernel, call, decision, pending
        self.ends_with_rows = pending is not None

    def send(
        self, x: Tensor, routing: Routing
    ) -> tuple[Tensor, Tensor | None, ExpertTokensMetadata | None, Routing]:
        """Prepare, and wait for the rows."""
        kernel, started = self.kernel, self.pending
        self.pending = None
        prepared = (kernel.start(self.call, self.decision) if started is None else started).wait()
        if kernel.checks_prepared:
            check_prepared(kernel.prepare_finalize, self.call, prepared)
        self.call = plain = routed(self.call, prepared)
        if self.decision.reason is not None:
            plain = without_history(plain)
        standard = kernel.fused_experts.activation_format() is STANDARD
        after = Routing(plain.topk_weights, plain.topk_ids, plain.expert_map if standard else None)
        return prepared.a1q, prepared.a1q_scale, prepared.expert_tokens_meta, after

    def through(
        self, held: list[Rows], meta: ExpertTokensMetadata | None, routing: Routing
    ) -> Tensor:
        """Run experts of any class, in chunks if the kernel's ``chunk_size`` is set."""
        call, size = self.call, self.kernel.chunk_size
        if self.decision.reason is not None:
            call = without_history(call)
        num_tokens = call.topk_ids.shape[0]
        if size is None or num_tokens <= size:
            return self._experts(call, held, meta, routing.expert_map)
        weighted = self.kernel.weighted_by_prepare(call, self.decision)
        rows_per_token = call.topk_ids.shape[1] if weighted else 1
        quant = self.kernel.fused_experts.quant_config.scheme.activation
        scales_have_rows = quant is not None and not quant.per_tensor
        rows, parts = held.pop(), []
        for i in range(cdiv(num_tokens, size)):
            tokens = slice(i * size, (i + 1) * size)
            chunk, part, counts = chunk_of(
                call, rows, meta, tokens, rows_per_token, scales_have_rows
            )
            parts.append(self._experts(chunk, [part], counts, routing.expert_map))
        return torch.cat(parts)

    def _experts(
        self,
        call: Call,
        held: list[Rows],
        meta: ExpertTokensMetadata | None,
        expert_map: Tensor | None,
    ) -> Tensor:
        """Run the experts; ``held`` has the only reference to the rows, so they can be freed."""
        experts: Any = self.kernel.fused_experts
        rows = [*held.pop()][::-1]
        if self.decision.recorded:
            routing = Routing(call.topk_weights, call.topk_ids, expert_map)
            beside = () if call.lora is None else (call.lora,)
            return experts.differentiable_apply(
                rows.pop(),
                call.w1,
                call.w2,
                routing,
                call.activation,
                meta,
                call.apply_router_weight_on_input,
                *beside,
            )
        return experts.apply(
            rows.pop(),
            call.w1,
            call.w2,
            call.topk_weights,
            call.topk_ids,
            call.activation,
            num_experts_of(call),
            expert_map,
            rows.pop(),
            meta,
            call.apply_router_weight_on_input,
        )

    def send_back(self, rows: Tensor) -> Any:
        """Start finalize, unless prepare was started by the caller, who also finalizes."""
        decision = self.decision
        if decision.reason is not None:
            rows = refuse(rows, decision.inputs, "FusedMoEKernel.apply", decision.reason)
        return rows if self.ends_with_rows else self.kernel.start_finalize(self.call, rows)
