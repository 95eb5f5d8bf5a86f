"""State of a modular-kernel call: its arguments, its pending steps, its chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moe_ops.activation import Activation, MoEActivation
from moe_ops.functional.align import count_expert_num_tokens
from moe_ops.pipeline.formats import ExpertTokensMetadata, PrepareResult
from moe_ops.pipeline.lora import ExpertLora, attached_lora_ids
from moe_ops.pipeline.prepare_finalize import Hook, Receiver
from moe_ops.tensors import Rows


class Call(NamedTuple):
    """The arguments of one `FusedMoEKernel.apply`."""

    hidden_states: Tensor
    w1: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    activation: MoEActivation | Activation | str = MoEActivation.SILU
    global_num_experts: int = -1
    expert_map: Tensor | None = None
    apply_router_weight_on_input: bool = False
    shared_experts_input: Tensor | None = None
    lora: ExpertLora | None = None

    def tokens(self, part: slice) -> Call:
        """The call for a slice of the tokens."""
        return self._replace(
            hidden_states=self.hidden_states[part],
            topk_weights=self.topk_weights[part],
            topk_ids=self.topk_ids[part],
            lora=None if self.lora is None else self.lora.tokens(part),
        )


class Decision(NamedTuple):
    """What is decided about a call before anything runs."""

    most: int | None
    """The most tokens that prepare may send at once; None: any number."""

    inputs: list[Tensor]
    """The tensors that require grad, in grad mode."""
    reason: str | None
    """Why there are no gradients although there are ``inputs``; None: there are."""
    recorded: bool
    """Whether the experts run as with gradients: with gradients, or with adapters."""


class Pending(NamedTuple):
    """A step that has been started."""

    hook: Hook | None
    receiver: Receiver
    decision: Decision | None = None
    """What was decided about the call; None: the step is not the first one."""

    @staticmethod
    def of(started: Any, decision: Decision | None = None, *, is_async: bool = True) -> Pending:
        """The pending step for the return value of a method, which may be asynchronous.

        Raises:
            TypeError: an asynchronous method that returned its result, not a receiver.
        """
        if not is_async:
            return Pending(None, lambda: started, decision)
        pair = isinstance(started, tuple) and len(started) == 2
        hook, receiver = started if pair else (None, started)
        if not callable(receiver):
            raise TypeError(
                "prepare_async and finalize_async must return a receiver, or (hook, receiver), got "
                f"{type(receiver).__name__}"
            )
        return Pending(hook, receiver, decision)

    def wait(self) -> Any:
        """Call the hook, then the receiver; returns the result."""
        if self.hook is not None:
            self.hook()
        return self.receiver()


def routed(call: Call, prepared: PrepareResult) -> Call:
    """The call with the weights and ids that prepare returned, if any, and its tokens' adapters.

    Raises:
        ValueError: prepare returned other tokens and did not say what adapters they have.
    """
    weights, ids, lora = prepared.topk_weights, prepared.topk_ids, call.lora
    if lora is not None and ids is not None and lora.lora_ids is not None:
        lora_ids = attached_lora_ids(ids)
        if lora_ids is None:
            raise ValueError(
                "topk_ids of prepare must have lora_ids attached (attach_lora_ids) if it is given "
                "lora_ids, got none"
            )
        lora = lora._replace(lora_ids=lora_ids)
    return call._replace(
        topk_weights=call.topk_weights if weights is None else weights,
        topk_ids=call.topk_ids if ids is None else ids,
        lora=lora,
    )


def without_history(call: Call) -> Call:
    """The call with detached tensors, except for the shared experts' input."""
    x, w1, w2, weights = (tensor.detach() for tensor in call[:4])
    lora = None if call.lora is None else call.lora.detach()
    return call._replace(hidden_states=x, w1=w1, w2=w2, topk_weights=weights, lora=lora)


def num_experts_of(call: Call) -> int:
    """The number of global experts, E."""
    if call.global_num_experts != -1:
        return call.global_num_experts
    return call.w1.shape[0] if call.expert_map is None else call.expert_map.shape[0]


def chunk_of(
    call: Call,
    rows: Rows,
    meta: ExpertTokensMetadata | None,
    tokens: slice,
    rows_per_token: int,
    scales_have_rows: bool,
) -> tuple[Call, Rows, ExpertTokensMetadata | None]:
    """The part of a routed call for a slice of tokens, with recomputed row counts per expert."""
    ids, scale = call.topk_ids[tokens], rows.scale
    part = slice(tokens.start * rows_per_token, tokens.stop * rows_per_token)
    if scale is not None and scales_have_rows:
        scale = scale[part]
    if meta is not None:
        counts = count_expert_num_tokens(ids, call.w1.shape[0], call.expert_map)
        on_cpu = None if meta.expert_num_tokens_cpu is None else counts.cpu()  # waits for the GPU
        meta = ExpertTokensMetadata(counts, on_cpu)
    lora = None if call.lora is None else call.lora.tokens(tokens)
    call = call._replace(topk_ids=ids, topk_weights=call.topk_weights[tokens], lora=lora)
    return call, Rows(rows.data[part], scale), meta
