"""The experts' step of a modular kernel with a backward pass, in both formats.

Implementations of one format differ in kernels, not in what they compute, so they share it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.activation import kind_and_key
from moe_ops.pipeline.backward import differentiable_experts
from moe_ops.pipeline.experts.base import FusedMoEExpertsModular
from moe_ops.pipeline.formats import ExpertTokensMetadata
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.pipeline.lora import ExpertLora
from moe_ops.pipeline.slot_experts import Settings
from moe_ops.tensors import Routing


def apply_to_tokens(
    self: FusedMoEExpertsModular,
    rows: Tensor,
    w1: Tensor,
    w2: Tensor,
    routing: Routing,
    activation: Any,
    meta: ExpertTokensMetadata | None,
    on_input: bool,
    lora: ExpertLora | None = None,
) -> Tensor:
    """Standard format: tokens ``(T, H)`` to weighted sums ``(T, H)``."""
    config, layer = self.quant_config, self.moe_config
    key = kind_and_key(activation)[1]
    rounds = self.ACTIVATES_IN_GEMM1 is False
    settings = Settings(config.scheme, key, on_input, layer.batch_invariant, rounds_product=rounds)
    weights = expert_weights(w1, w2, config)
    return differentiable_experts(rows, weights, routing, settings, config, lora=lora)


def apply_to_batches(
    self: FusedMoEExpertsModular,
    rows: Tensor,
    w1: Tensor,
    w2: Tensor,
    routing: Routing,
    activation: Any,
    meta: ExpertTokensMetadata | None,
    on_input: bool,
) -> Tensor:
    """Batched format: each row in use is a token of one slot, whose weight is 1.

    Prepare and finalize apply the routing's weights.
    """
    if meta is None:
        raise ValueError("expert_tokens_meta must be given in the Batched format, got None")
    counts, (experts, most, _) = meta.expert_num_tokens, rows.shape
    used = torch.arange(most, device=rows.device) < counts[:, None]
    expert = torch.arange(experts, dtype=torch.int32, device=rows.device)[:, None]
    ids = torch.where(used, expert, -1).view(-1, 1)
    ones = rows.new_ones(ids.shape, dtype=torch.float32)
    each = Routing(ones, ids)
    return apply_to_tokens(
        self, rows.flatten(0, 1), w1, w2, each, activation, meta, on_input=False
    ).view(rows.shape)
