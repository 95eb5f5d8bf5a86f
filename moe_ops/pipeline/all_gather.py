"""Several ranks, Standard format: every rank gets all tokens and computes its own experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.pipeline.collectives import RankGroup
from moe_ops.pipeline.formats import FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.no_ep import MoEPrepareAndFinalizeNoEP
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalizeModular, Receiver
from moe_ops.pipeline.token_rows import quantize_tokens, weighted_rows
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce
from moe_ops.scheme import FusedMoEQuantConfig, Quant
from moe_ops.tensors import Routing


class AllGatherPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Gather the tokens of all ranks, and send partial sums back to the tokens' ranks.

    Every rank passes its own tokens, whose ids are those of global experts, and gets their finished
    results. The ``expert_map`` of a rank says which experts it holds, and each expert is held by
    one rank of the group.

    **Prepare.** Rows are quantized before they travel. What travels are P rows of each of the R
    ranks in one collective, and their scales, ids and weights, packed as bytes, in another one.
    Rows that router weights multiply for k > 1 travel as tokens, and are multiplied and quantized
    afterwards, because k rows for each token would be more bytes. One dynamic scale for all tokens
    (``fp8_tensor``) is the largest of the ranks' scales, which takes a third collective of R
    numbers: it equals the scale of one rank with all tokens. A static or global scale must be the
    same on all ranks: calls that agree on P (see below) compare it.

    **Finalize.** The sum that a rank's experts return for a token is rounded to the dtype of the
    activations. Each rank gets the R partial sums of its own tokens, adds them in float32 in the
    order of ranks, and rounds once. So results are the same bits in every run, and do not depend on
    the size of the message. The partial sums travel in an all-to-all of equal blocks: the bytes of
    a reduce-scatter in the activations' dtype, half the bytes of a reduce-scatter in float32, and
    only one rounding, but memory for R x P received rows.

    **Token counts.** Ranks may have different numbers of tokens, also 0. Rows are padded to P for
    each rank; padding has ids of -1, so experts skip it.

    * With ``max_num_tokens``, P is that number in every call: nothing waits for the device, and
      eager, compiled and captured ranks can work together.
    * Without it, P is the largest number of tokens that a rank has. Eager calls agree on it, for
      which the host waits for one collective. Compiled and captured calls cannot wait, so their
      ranks must have equal numbers of tokens: the numbers are compared on the device before rows
      travel, and other numbers make all ranks fail (`torch._assert_async`). A graph that is
      replayed repeats the comparison.

    All ranks of the group must call this equally often and in the same order, all eager or all
    compiled unless ``max_num_tokens`` is given. An error that one rank raises for its own arguments
    leaves the others waiting in their collective until the timeout of the process group.

    Args:
        group: the ranks: a process group, its name, a 1-D `DeviceMesh`, a `RankGroup`, or None for
            all processes.
        max_num_tokens: the largest number of tokens that any rank passes; the same on all ranks.

    Raises:
        TypeError: a ``group`` or ``max_num_tokens`` of another kind.
        ValueError: a group that this process is not in, an unknown name, ``torch.distributed`` not
            initialized, or a ``max_num_tokens`` below 1. In a call: more tokens than
            ``max_num_tokens``; without it, on all ranks: scales that differ between ranks.

    Source:
        vLLM ``allgather_reducescatter`` and ``naive`` all-to-all, which gather rows before they are
        quantized, and sum in the activations' dtype.
    """

    def __init__(self, group: Any = None, max_num_tokens: int | None = None) -> None:
        self.group = RankGroup.resolve(group)
        if max_num_tokens is not None:
            checks.at_least(1, max_num_tokens=max_num_tokens)
        self.max_num_tokens = max_num_tokens
        self.local = MoEPrepareAndFinalizeNoEP()

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """Standard."""
        return FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        """The given ``max_num_tokens``; None: the largest number of a call counts."""
        return self.max_num_tokens

    def num_dispatchers(self) -> int:
        """Number of ranks."""
        return self.group.size

    def output_is_reduced(self) -> bool:
        """True."""
        return True

    def supports_async(self) -> bool:
        """True: rows travel until the receiver is called."""
        return True

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResult:
        """Gather tokens: rows, ids and weights of ``R * P`` tokens, in the order of ranks.

        Rows are ``(R * P, H)``, or ``(R * P * k, H)`` with router weights on the input.
        """
        return self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )()

    def finalize(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Tensor:
        """Sum the ranks' results: ``(P, H)``, of which the first T rows are this rank's tokens."""
        return self.finalize_async(
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )()

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
    ) -> Receiver:
        """Quantize and start to gather; the receiver waits."""
        on_input, top_k = apply_router_weight_on_input, topk_ids.shape[1]
        quant = None if defer_input_quant else quant_config.scheme.activation
        size = self._rows_per_rank(a1, None if quant is None else quant_config.input_scales[0])
        later = on_input and top_k > 1
        rows, scale = a1, None
        if not later and quant is not None:
            routing = Routing(topk_weights, topk_ids, None)  # of all ranks' experts
            rows, scale = self._quantized(a1, quant_config, routing, num_experts, on_input)
        elif not later and on_input:
            rows = weighted_rows(a1, topk_weights)
        beside = [topk_weights, topk_ids]
        if scale is not None and quant is not None and not quant.per_tensor:
            beside.append(scale)
        travelling = self.group.start_all_gather(_padded(_bytes_of_fp8(rows), size))
        facts = self.group.start_all_gather(_packed(beside, size))
        dtype = rows.dtype

        def receiver() -> PrepareResult:
            weights, ids, *scales = _unpacked(self.group.wait(facts), beside)
            gathered = self.group.wait(travelling).view(dtype)
            gathered_scale = scales[0] if scales else scale
            if later:
                gathered, gathered_scale = _weighted(
                    gathered, Routing(weights, ids, expert_map), num_experts, quant_config, quant
                )
            return PrepareResult(gathered, gathered_scale, None, ids, weights)

        return receiver

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
        travelling = self.group.start_exchange(sums)

        def receiver() -> Tensor:
            parts = self.group.wait(travelling)
            return _sum_of_ranks(parts, self.group.size)

        return receiver

    def _rows_per_rank(self, a1: Tensor, given: Tensor | None) -> int:
        """P, the same on all ranks. Ranks that agree on it compare their ``given`` scales too."""
        tokens, most = a1.shape[0], self.max_num_tokens
        if most is not None:
            if tokens > most:
                if torch.compiler.is_compiling():  # numbers are symbols, which no text can hold
                    raise ValueError("a1 must have at most max_num_tokens tokens, got more")
                raise ValueError(
                    f"a1 must have at most max_num_tokens = {most} tokens, got {tokens}"
                )
            return tokens if self.group.size == 1 else most
        if self.group.size == 1:
            return tokens
        facts = a1.new_full((1,), tokens, dtype=torch.float64)
        if torch.compiler.is_compiling() or _is_capturing(a1):
            torch._assert_async(
                (self.group.all_gather(facts) == tokens).all(),
                "hidden_states must have the same number of tokens on every rank in compiled and "
                "captured calls unless max_num_tokens is given",
            )
            return tokens
        if given is not None:
            facts = torch.cat([facts, given.reshape(1).double()])
        of_ranks = self.group.all_gather(facts[None]).tolist()
        if given is not None and len({scale for _, scale in of_ranks}) > 1:
            raise ValueError(
                "a1_scale (or a1_gscale) must be the same number on every rank, got "
                f"{[scale for _, scale in of_ranks]}"
            )
        return max(1, *(int(row[0]) for row in of_ranks))

    def _quantized(
        self,
        a1: Tensor,
        quant_config: FusedMoEQuantConfig,
        routing: Routing,
        num_experts: int,
        on_input: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`quantize_tokens`, with one scale for the tokens of all ranks where tokens share one."""
        quant = quant_config.scheme.activation
        if quant is None or not quant.of_all_rows or self.group.size == 1:
            return quantize_tokens(a1, quant_config, routing, num_experts, on_input)
        weights, slots = routing.topk_weights if on_input else None, (*routing[1:], num_experts)
        _, own = ops.moe_quantize(a1, None, weights, *slots, quant.key)
        # Scales grow with the largest magnitude, so their maximum is the scale of all tokens. Not a
        # reduction of the backend, which may drop NaN.
        scale = self.group.all_gather(own).amax(0, keepdim=True)
        given = replace(quant, scale="float32", static=True)
        return ops.moe_quantize(a1, scale, weights, *slots, given.key)


def _weighted(
    tokens: Tensor,
    routing: Routing,
    num_experts: int,
    quant_config: FusedMoEQuantConfig,
    quant: Quant | None,
) -> tuple[Tensor, Tensor | None]:
    """Gathered tokens as one row for each slot, with its weight, quantized with ``quant``."""
    if quant is None:
        return weighted_rows(tokens, routing.topk_weights), None
    if quant.of_all_rows:  # the scale must not depend on which experts are local
        routing = routing._replace(expert_map=None)
    return quantize_tokens(tokens, quant_config, routing, num_experts, True)


def _bytes_of_fp8(rows: Tensor) -> Tensor:
    """8-bit floats as uint8, which every backend sends."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


def _padded(x: Tensor, size: int, fill: int = 0) -> Tensor:
    """``(T, n)`` to ``(size, n)``."""
    if not torch.compiler.is_compiling() and x.shape[0] == size:
        return x
    return torch.cat([x, x.new_full((size - x.shape[0], x.shape[1]), fill)])


def _packed(parts: list[Tensor], size: int) -> Tensor:
    """Rows of several tensors side by side as bytes: ``(size, bytes)``.

    The second tensor is ids, which are -1 in padding; the other tensors are zeros there.
    """
    padded = [_padded(_bytes_of_fp8(p), size, -1 if i == 1 else 0) for i, p in enumerate(parts)]
    return torch.cat([part.contiguous().view(torch.uint8) for part in padded], 1)


def _unpacked(packed: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """The tensors of `_packed`, with as many rows as there are now."""
    widths = [part.shape[1] * part.dtype.itemsize for part in parts]
    pieces = packed.split(widths, 1)
    return [piece.contiguous().view(part.dtype) for piece, part in zip(pieces, parts, strict=True)]


def _sum_of_ranks(parts: Tensor, ranks: int) -> Tensor:
    """Sum ``(R * P, H)`` to ``(P, H)`` in float32 in the order of ranks; round once."""
    if ranks == 1:
        return parts
    first, *others = parts.view(ranks, parts.shape[0] // ranks, parts.shape[1]).unbind(0)
    total = first.float()
    for part in others:
        total = total + part
    return total.to(parts.dtype)


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
