"""What all exchanges of tokens between ranks share: what travels, and what is done on either side.

An exchange implements two steps. `TokenExchange.send` takes the tokens of this rank to the ranks of
their experts, and `TokenExchange.send_back` takes the sums of this rank's experts to the tokens'
ranks. Quantization before tokens travel, router weights on the input, and the sum over a token's
experts on one rank are here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.gradients import refuse
from moe_ops.pipeline.checking import is_capturing
from moe_ops.pipeline.exchange.gradients import SentBack, with_history
from moe_ops.pipeline.exchange.groups import RankGroup, check_equal_scales
from moe_ops.pipeline.exchange.records import Arrived, Needs, Outgoing
from moe_ops.pipeline.formats import FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.lora import attach_lora_ids
from moe_ops.pipeline.no_ep import MoEPrepareAndFinalizeNoEP
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalizeModular, Receiver
from moe_ops.pipeline.token_rows import quantize_tokens, weighted_rows
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.tensors import Routing


class TokenExchange(FusedMoEPrepareAndFinalizeModular):
    """Base class of exchanges in the Standard format.

    Every rank passes its own tokens, whose ids name global experts, and gets their finished
    results. The ``expert_map`` of a rank says which experts it holds, and each expert is held by
    one rank of the group; or every rank holds a part of each expert, cut along I.

    Rows are quantized before they travel, unless the experts quantize. Rows that router weights
    multiply for k > 1 travel as tokens, and are multiplied and quantized afterwards, because k rows
    for each token would be more bytes. One dynamic scale for all tokens (``fp8_tensor``) is the
    largest of the ranks' scales, which takes a collective of R numbers: it equals the scale of one
    rank with all tokens.

    The sum that a rank's experts return for a token is rounded to the dtype of the activations. The
    R partial sums of a token are added in float32 in the order of ranks, and rounded once: the same
    bits in every run, whatever the exchange and the size of the message.

    Args:
        group: the ranks: a process group, its name, a 1-D `DeviceMesh`, a `RankGroup`, or None for
            all processes.
        max_num_tokens: the largest number of tokens that any rank passes; the same on all ranks.
            None: no limit, if the exchange can do without one.
        equal_num_tokens: whether all ranks pass equally many tokens in every call, as engines do
            that pad batches to the largest one. Then no more rows travel. A rank with another
            number is an error on all ranks.

    Raises:
        TypeError: a ``group``, ``max_num_tokens`` or ``equal_num_tokens`` of another kind.
        ValueError: a group that this process is not in, an unknown name, ``torch.distributed`` not
            initialized, or a ``max_num_tokens`` below 1. In a call: more tokens than
            ``max_num_tokens``.
    """

    takes: ClassVar[frozenset[str]] = frozenset()
    """The fields of `Needs` that are arguments of the class, beside the first two."""
    sends_slots: ClassVar[bool] = False
    """Whether a row travels for each slot of a token, so that it can be multiplied before it does.
    """
    local: FusedMoEPrepareAndFinalizeModular
    """Sums a token's experts on this rank."""

    def __init__(
        self,
        group: Any = None,
        max_num_tokens: int | None = None,
        *,
        equal_num_tokens: bool = False,
    ) -> None:
        self.group = RankGroup.resolve(group)
        if max_num_tokens is not None:
            checks.at_least(1, max_num_tokens=max_num_tokens)
        checks.flags(equal_num_tokens=equal_num_tokens)
        self.max_num_tokens, self.equal_num_tokens = max_num_tokens, equal_num_tokens
        self.local = MoEPrepareAndFinalizeNoEP()

    @classmethod
    def make(cls, needs: Needs) -> TokenExchange:
        """Make the exchange of a layer."""
        settings = {name: getattr(needs, name) for name in cls.takes}
        return cls(needs.group, needs.max_num_tokens, **settings)

    @abstractmethod
    def send(self, tokens: Outgoing) -> Callable[[], Arrived]:
        """Make rows of the tokens and start to send them; the result waits for what arrives."""

    @abstractmethod
    def send_back(self, sums: Tensor, topk_ids: Tensor) -> Receiver:
        """Start to send partial sums to their tokens' ranks; the receiver returns ``(P, H)``.

        Args:
            sums: one row for each token that has arrived.
            topk_ids: the ids of these tokens.
        """

    def send_again(self, rows: Tensor, topk_ids: Tensor) -> Receiver:
        """Start to send ``(P, H)`` to the ranks that `send` sent tokens to: one row for each token.

        It is needed for gradients only; see `has_gradients`.

        Args:
            rows: one row for each of this rank's P rows.
            topk_ids: as for `send_back`, which receives what the other ranks' rows become.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gradients")

    def send_gradients_back(
        self, rows: Tensor | None, topk_weights: Tensor | None, topk_ids: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send gradients of what has arrived to the tokens' ranks, and add them there.

        Args:
            rows: the gradient of the rows; None: it is not asked for.
            topk_weights: the gradient of their router weights, or None.
            topk_ids: as for `send_back`.

        Returns:
            Both sums, ``(P, H)`` and ``(P, k)``; None for None.
        """

        def back(grad: Tensor | None) -> Tensor | None:
            return None if grad is None else self.send_back(grad.contiguous(), topk_ids)()

        return back(rows), back(topk_weights)

    def kept(self, arrived: Arrived) -> Arrived:
        """Return what has arrived in memory that later calls leave as it is: backward reads it."""
        return arrived

    def arranged(self, arrived: Arrived, on_input: bool) -> Arrived:
        """Return the experts' rows of tokens that were `kept`; ``on_input``: times weights."""
        rows = weighted_rows(arrived.rows, arrived.topk_weights) if on_input else arrived.rows
        return arrived._replace(rows=rows)

    def has_gradients(self) -> bool:
        """Whether gradients travel: see `moe_ops.pipeline.exchange.gradients`."""
        return type(self).send_again is not TokenExchange.send_again

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """Standard."""
        return FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        """The given ``max_num_tokens``."""
        return self.max_num_tokens

    def num_dispatchers(self) -> int:
        """Number of ranks."""
        return self.group.size

    def num_arriving(self, num_tokens: int) -> int:
        """P rows from every rank: ``max_num_tokens``, unless ranks have equally many tokens."""
        most = self.max_num_tokens
        rows = num_tokens if most is None or self.equal_num_tokens else most
        return self.group.size * rows

    def output_is_reduced(self) -> bool:
        """True."""
        return True

    def supports_async(self) -> bool:
        """True: rows travel until the receiver is called."""
        return True

    def prepare(self, *arguments: Any, **named: Any) -> PrepareResult:
        """`prepare_async`, and wait: rows, ids and weights of the tokens that have arrived."""
        return self.prepare_async(*arguments, **named)()

    def finalize(self, *arguments: Any, **named: Any) -> Tensor:
        """Sum the ranks' results: ``(P, H)``, of which the first T rows are this rank's tokens."""
        return self.finalize_async(*arguments, **named)()

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
        *,
        lora_ids: Tensor | None = None,
    ) -> Receiver:
        """Quantize and start to send; the receiver waits and returns the tokens that have arrived.

        With router weights on the input there is a row for each of their slots. ``lora_ids`` travel
        as 4 bytes a token; all ranks pass them, or none does.

        Raises:
            NotImplementedError: ``lora_ids`` in an exchange that does not take them.
        """
        adapters = None if lora_ids is None else self.lora_column(lora_ids)
        quant = None if defer_input_quant else quant_config.scheme.activation
        recorded = quant is None and torch.is_grad_enabled() and self.has_gradients()
        weighted = apply_router_weight_on_input and not recorded  # otherwise by `arranged`
        later = weighted and topk_ids.shape[1] > 1 and not self.sends_slots
        everywhere = later and quant is not None and quant.of_all_rows
        before = None if later else quant
        x, router_weights = (a1.detach(), topk_weights.detach()) if recorded else (a1, topk_weights)
        receive = self.send(
            Outgoing(
                x,
                router_weights,
                topk_ids,
                num_experts,
                expert_map,
                weighted and not later,
                quant_config,
                before,
                everywhere,
                adapters,
                recorded,
                None if before is None else quant_config.input_scales[0],
            )
        )

        def receiver() -> PrepareResult:
            arrived = receive()
            if recorded:
                arrived = with_history(self, a1, topk_weights, self.kept(arrived))
                arrived = self.arranged(arrived, apply_router_weight_on_input)
            rows, scale, weights, ids, adapters, meta = arrived
            if later and quant is None:
                rows = weighted_rows(rows, weights)
            elif later:
                routed = Routing(weights, ids, expert_map)
                rows, scale = self._quantized(rows, routed, num_experts, quant_config, True)
            if adapters is not None:
                attach_lora_ids(ids, adapters.view(-1))
            return PrepareResult(rows, scale, meta, ids, weights)

        return receiver

    def lora_column(self, lora_ids: Tensor) -> Tensor:
        """``(T, 1)`` int32, so that ranks send rows of equal width; see `Outgoing`.

        Raises:
            NotImplementedError: an exchange that sends no ids of adapters.
        """
        if not self.takes_lora():
            raise NotImplementedError(
                f"lora_ids must be None, because {type(self).__name__} does not send them, got ids"
            )
        return lora_ids.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)[:, None]

    def finalize_async(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Receiver:
        """Sum this rank's experts and start to send the sums back; the receiver adds the ranks'."""
        sums = self.local.finalize(
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        if not (torch.is_grad_enabled() and sums.requires_grad):
            return self.send_back(sums, topk_ids)
        receive = self.send_back(sums.detach(), topk_ids)
        if not self.has_gradients():
            reason = f"prepare_finalize must have gradients, got {type(self).__name__}"
            return lambda: refuse(receive(), [sums], "FusedMoEKernel.apply", reason)
        return lambda: SentBack.apply(self, sums, receive(), topk_ids)

    def check_room(self, a1: Tensor) -> None:
        """Raise ValueError for more tokens than ``max_num_tokens``."""
        tokens, most = a1.shape[0], self.max_num_tokens
        if most is None or tokens <= most:
            return
        if torch.compiler.is_compiling():  # numbers are symbols, which no text can hold
            raise ValueError("a1 must have at most max_num_tokens tokens, got more")
        raise ValueError(f"a1 must have at most max_num_tokens = {most} tokens, got {tokens}")

    def rows_per_rank(self, outgoing: Outgoing) -> int:
        """Return P, the number of rows of each rank that travel; the same on all ranks.

        With ``equal_num_tokens`` it is the number of tokens, which is compared on the device; else
        ``max_num_tokens`` if that is given. With neither, eager calls agree on the largest number
        of tokens of a rank, for which the host waits, and compare the given scales of rows too.
        Compiled and captured calls cannot wait: they are calls with ``equal_num_tokens``.

        Args:
            outgoing: the tokens of this rank.

        Raises:
            ValueError: more tokens than ``max_num_tokens``; scales that differ between ranks.
        """
        a1, most = outgoing.a1, self.max_num_tokens
        tokens = a1.shape[0]
        if most is not None:
            self.check_room(a1)
        if self.group.size == 1:
            return tokens
        if most is not None and not self.equal_num_tokens:
            return most
        facts = a1.new_full((1,), tokens, dtype=torch.float64)
        if self.equal_num_tokens or torch.compiler.is_compiling() or is_capturing(a1):
            torch._assert_async(
                (self.group.all_gather(facts) == tokens).all(),
                "hidden_states must have the same number of tokens on every rank with "
                "equal_num_tokens, and in compiled and captured calls unless max_num_tokens is "
                "given",
            )
            return tokens
        a1_scale = outgoing.input_scale
        if a1_scale is not None:
            facts = torch.cat([facts, a1_scale.reshape(1).double()])
        of_ranks = self.group.all_gather(facts[None]).tolist()
        if a1_scale is not None:
            check_equal_scales([scale for _, scale in of_ranks])
        return max(1, *[int(row[0]) for row in of_ranks])

    def rows_of(self, tokens: Outgoing) -> tuple[Tensor, Tensor | None]:
        """Rows of the tokens as they travel: multiplied, quantized, both or neither."""
        a1, weights, ids, num_experts, _, on_input, config, quant, *_ = tokens
        if quant is None:
            return (weighted_rows(a1, weights) if on_input else a1), None
        routing = Routing(weights, ids, None)  # scales must not depend on which experts are here
        return self._quantized(a1, routing, num_experts, config, on_input)

    def _quantized(
        self,
        tokens: Tensor,
        routing: Routing,
        num_experts: int,
        quant_config: FusedMoEQuantConfig,
        on_input: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Quantize rows; ranks share one dynamic scale, of the rows that any of them quantizes."""
        quant = quant_config.scheme.activation
        if quant is None or not quant.of_all_rows or self.group.size == 1:
            return quantize_tokens(tokens, quant_config, routing, num_experts, on_input)
        weights, ids, expert_map = routing
        router_weights, slots = weights if on_input else None, (ids, expert_map, num_experts)
        _, own = ops.moe_quantize(tokens, None, router_weights, *slots, quant.key)
        # Scales grow with the largest magnitude, so their maximum is the scale of all tokens. Not a
        # reduction of the backend, which may drop NaN.
        scale = self.group.all_gather(own).amax(0, keepdim=True)
        with_scale = replace(quant, scale="float32", static=True)
        return ops.moe_quantize(tokens, scale, router_weights, *slots, with_scale.key)
