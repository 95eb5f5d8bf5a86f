"""Row spaces: the layout of rows between the GEMMs, with its activation and quantization operators.

The expert GEMMs follow a tile plan and do not depend on the format. Slots in token order, padded
rows per expert, and permuted rows differ in the plan and in which rows are undefined.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.dispatch.tiles import direct_slots
from moe_ops.scheme import Quant, Scheme
from moe_ops.tensors import Permutation, Routing, Rows, Tiles


def depends_on_batch(quant: Quant | None) -> bool:
    """Whether activations have one scale that is computed from the rows of all tokens."""
    return quant is not None and quant.of_all_rows


def check_batch_invariant(scheme: Scheme) -> None:
    """Raise NotImplementedError for a scheme in which a token's result depends on other tokens."""
    if depends_on_batch(scheme.activation):
        raise NotImplementedError(
            f"batch_invariant must be False for scheme {scheme.name}, whose activations share a "
            "scale computed from all tokens, got True; use a scheme with static scales or with "
            "scales per row or group (fp8_tensor_static, fp8_channel, fp8_block128, ..)"
        )


def always(condition) -> bool:
    """Whether a condition holds for all values of its symbols; adds no guard."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    return torch.fx.experimental.symbolic_shapes.statically_known_true(condition)


def sure(tokens: int) -> int:
    """Lower bound on the token count, for comparisons with `always`.

    Export traces a dynamic T >= 1 as if it were at least 2.
    """
    return tokens - 1 if torch.compiler.is_exporting() else tokens


class SlotRows(NamedTuple):
    """Rows in slot order: row ``t * k + j`` is slot j of token t; undefined for skipped slots."""

    tiles: Tiles
    num_local_experts: int
    batch_invariant: bool = False
    """Whether the plan has one row tile at every load."""
    expert_order: bool = False
    """Whether rows between the GEMMs are permuted (in the order of the plan) instead."""

    @staticmethod
    def of(
        routing: Routing,
        num_local_experts: int,
        scheme: Scheme,
        dtype: torch.dtype,
        batch_invariant: bool = False,
        plan: Tensor | None = None,
        *,
        expert_order: bool = False,
    ) -> SlotRows:
        """The row space of a routing; slots of other ranks' experts are skipped.

        Args:
            routing: the tokens' routing.
            num_local_experts: El.
            scheme: the layer's scheme.
            dtype: dtype of the tokens.
            batch_invariant: whether the plan has one row tile at every load.
            plan: the plan of an earlier call with this routing; None: make a plan here, unless
                slots are so few that no GEMM reads one.
            expert_order: see `SlotRows`.
        """
        _, ids, expert_map = routing
        slots = ids.shape[0] * ids.shape[1]
        if plan is None and not always(slots <= direct_slots(num_local_experts)):
            plan = ops.plan_slots(
                ids, expert_map, num_local_experts, scheme.key, dtype, batch_invariant
            )
        tiles = Tiles(plan, ids, expert_map)
        return SlotRows(tiles, num_local_experts, batch_invariant, expert_order)

    def quantize(self, x: Tensor, scale: Tensor | None, quant: Quant) -> Rows:
        """Quantize the rows of slots that are not skipped; all other rows become zeros."""
        slots = (*self.tiles[1:], self.num_local_experts)
        return Rows(*ops.moe_quantize(x, scale, None, *slots, quant.key))

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Activate every row."""
        return ops.activation(x, activation)

    def activate_quantize(
        self, x: Tensor, scale: Tensor | None, activation: str, quant: Quant
    ) -> Rows:
        """Activated, rounded to the dtype of ``x``, quantized."""
        slots = (*self.tiles[1:], self.num_local_experts)
        return Rows(*ops.activation_quantize(x, scale, *slots, activation, quant.key))

    def combine(self, y_RH: Tensor, topk_weights: Tensor | None, out: Tensor | None) -> Tensor:
        """Sum each token's rows, times router weights, into ``out`` or a new ``(T, H)``."""
        _, ids, expert_map = self.tiles
        num_experts = self.num_local_experts
        if out is None:
            return ops.moe_fused_mul_sum(y_RH, topk_weights, ids, expert_map, None, num_experts)
        ops.moe_fused_mul_sum_out(y_RH, topk_weights, ids, expert_map, None, num_experts, out=out)
        return out


class BatchedRows(NamedTuple):
    """Rows by expert: row ``e * M + i`` is row i of expert e; undefined past the expert's count.

    Permuted rows are the rows of one expert for every operator but the GEMMs.
    """

    tiles: Tiles
    expert_num_tokens: Tensor
    max_num_tokens: int
    batch_invariant: bool = False
    """Whether the plan has one row tile at every load."""
    order: Permutation | None = None
    """The order of permuted rows; None: rows are padded for each expert."""

    @property
    def expert_order(self) -> bool:
        """True: these rows are grouped by expert anyway."""
        return True

    @staticmethod
    def of(
        expert_num_tokens: Tensor, max_num_tokens: int, scheme: Scheme, batch_invariant: bool
    ) -> BatchedRows:
        """The row space of ``(El, M, ..)`` tensors, with its plan."""
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

    def combine(self, y_RH: Tensor, topk_weights: Tensor | None, out: Tensor | None) -> Tensor:
        """Unpermute and sum to ``(T, H)``; without an order ``(El, M, H)``, which finalize sums."""
        if self.order is None:
            y = self._batched(y_RH)
        else:
            offset_E, row_of_slot, _ = self.order
            y = ops.moe_unpermute(y_RH, topk_weights, row_of_slot, offset_E)
        return y if out is None else out.copy_(y)


def permuted_rows(
    order: Permutation, num_rows: int, scheme: Scheme, batch_invariant: bool
) -> BatchedRows:
    """The row space of permuted rows; rows in use come first and are quantized as one expert's."""
    expert_first_token_offset, layer = order[0], (scheme.key, batch_invariant)
    plan = ops.plan_permuted(expert_first_token_offset, num_rows, *layer)
    # amax returns the last offset: torch 2.11's Inductor cannot slice a symbolic number of offsets.
    used = expert_first_token_offset.amax(0, keepdim=True).to(torch.int32)
    return BatchedRows(Tiles(plan), used, num_rows, batch_invariant, order)


def _flat(quantized: tuple[Tensor, Tensor]) -> Rows:
    """Flatten ``(E, M, ..)`` to rows; one scale per expert becomes ``(E, 1)``."""
    data, scale = quantized
    return Rows(data.flatten(0, 1), scale.flatten(0, 1))
