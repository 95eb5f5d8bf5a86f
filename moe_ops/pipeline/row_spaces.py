"""Where the rows between two GEMMs lie, and how they are activated and quantized there.

The expert GEMMs follow a tile plan and know nothing of formats: slots in token order, the padded
rows of each expert, and permuted rows differ in the plan, and in which rows hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.dispatch.tiles import direct_slots
from moe_ops.scheme import Quant, Scheme
from moe_ops.tensors import Routing, Rows, Tiles


def depends_on_batch(quant: Quant | None) -> bool:
    """Whether activations have one scale that comes from the rows of all tokens."""
    return quant is not None and quant.of_all_rows


def check_batch_invariant(scheme: Scheme) -> None:
    """NotImplementedError for a scheme in which tokens depend on each other."""
    if depends_on_batch(scheme.activation):
        raise NotImplementedError(
            f"batch_invariant must be False for scheme {scheme.name}, whose activations share a "
            "scale that all tokens decide, got True; a scheme with static scales or with scales of "
            "rows or groups (fp8_tensor_static, fp8_channel, fp8_block128, int8_channel, ..) can"
        )


def always(condition) -> bool:
    """Whether a condition holds for all values of its symbols, without a guard on them."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    return torch.fx.experimental.symbolic_shapes.statically_known_true(condition)


def sure(tokens: int) -> int:
    """Lower bound on the token count, for comparisons with `always`.

    A program that is exported for one token or more is traced as if there were two.
    """
    return tokens - 1 if torch.compiler.is_exporting() else tokens


def may_be_one(tokens: int) -> bool:
    """Whether there may be a single token; a compiler may not know."""
    if torch.compiler.is_compiling():
        return not always(sure(tokens) > 1)
    return not tokens > 1


class SlotRows(NamedTuple):
    """Row ``t * k + j`` is slot j of token t; the rows of skipped slots hold anything."""

    tiles: Tiles
    num_local_experts: int
    batch_invariant: bool = False
    """Whether the plan has one row tile at every load."""
    expert_order: bool = False
    """Whether rows between the GEMMs lie in the order of the plan instead, for these to read."""

    @staticmethod
    def of(
        routing: Routing,
        num_local_experts: int,
        scheme: Scheme,
        dtype: torch.dtype,
        batch_invariant: bool = False,
        plan: Tensor | None = None,
    ) -> SlotRows:
        """The space of a routing, for local experts only.

        Args:
            routing: of the tokens.
            num_local_experts: El.
            scheme: of the layer.
            dtype: of the tokens.
            batch_invariant: whether the plan has one row tile at every load.
            plan: what `topk_plan` has made for the same layer; None: a plan is made here, unless
                slots are so few that nobody would read it.
        """
        _, ids, expert_map = routing
        slots = ids.shape[0] * ids.shape[1]
        if plan is None and not always(slots <= direct_slots(num_local_experts)):
            layer = (num_local_experts, scheme.key, dtype, batch_invariant)
            plan = ops.plan_slots(ids, expert_map, *layer)
        return SlotRows(Tiles(plan, ids, expert_map), num_local_experts, batch_invariant)

    def quantize(self, x: Tensor, scale: Tensor | None, quant: Quant) -> Rows:
        """The rows of slots that are not skipped; the others become zeros."""
        slots = (*self.tiles[1:], self.num_local_experts)
        return Rows(*ops.moe_quantize(x, scale, None, *slots, quant.key))

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Every row."""
        return ops.activation(x, activation)

    def activate_quantize(
        self, x: Tensor, scale: Tensor | None, activation: str, quant: Quant
    ) -> Rows:
        """Activated, rounded to the dtype of ``x``, quantized."""
        slots = (*self.tiles[1:], self.num_local_experts)
        return Rows(*ops.activation_quantize(x, scale, *slots, activation, quant.key))


class BatchedRows(NamedTuple):
    """Row ``e * M + i`` is the i-th of expert e; those past its count hold anything."""

    tiles: Tiles
    expert_num_tokens: Tensor
    max_num_tokens: int
    batch_invariant: bool = False
    """Whether the plan has one row tile at every load."""

    @property
    def expert_order(self) -> bool:
        """They lie by expert anyway."""
        return True

    @staticmethod
    def of(
        expert_num_tokens: Tensor, max_num_tokens: int, scheme: Scheme, batch_invariant: bool
    ) -> BatchedRows:
        """The space of ``(El, M, ..)`` tensors, with its plan."""
        layer = (scheme.key, batch_invariant)
        plan = ops.plan_batched(expert_num_tokens, max_num_tokens, *layer)
        return BatchedRows(Tiles(plan), expert_num_tokens, max_num_tokens, batch_invariant)

    def _batched(self, x: Tensor) -> Tensor:
        return x.view(self.expert_num_tokens.shape[0], self.max_num_tokens, x.shape[-1])

    def quantize(self, x: Tensor, scale: Tensor | None, quant: Quant) -> Rows:
        """The rows in use; padding becomes zeros."""
        count = self.expert_num_tokens
        return _flat(ops.batched_quantize(self._batched(x), scale, count, quant.key))

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """The rows in use; padding becomes zeros."""
        return ops.batched_activation(self._batched(x), self.expert_num_tokens, activation).flatten(
            0, 1
        )

    def activate_quantize(
        self, x: Tensor, scale: Tensor | None, activation: str, quant: Quant
    ) -> Rows:
        """Activated, rounded to the dtype of ``x``, quantized."""
        count, x = self.expert_num_tokens, self._batched(x)
        return _flat(ops.batched_activation_quantize(x, scale, count, activation, quant.key))


def permuted_rows(
    expert_first_token_offset: Tensor, num_rows: int, scheme: Scheme, batch_invariant: bool
) -> BatchedRows:
    """The space of permuted rows: those in use come first, so it is one expert's to quantize."""
    layer = (scheme.key, batch_invariant)
    plan = ops.plan_permuted(expert_first_token_offset, num_rows, *layer)
    # The last offset, as the largest: torch 2.11's Inductor cannot slice a symbolic number of them.
    used = expert_first_token_offset.amax(0, keepdim=True).to(torch.int32)
    return BatchedRows(Tiles(plan), used, num_rows, batch_invariant)


def _flat(quantized: tuple[Tensor, Tensor]) -> Rows:
    """``(E, M, ..)`` as rows; one scale an expert stays ``(E, 1)``."""
    data, scale = quantized
    return Rows(data.flatten(0, 1), scale.flatten(0, 1))
