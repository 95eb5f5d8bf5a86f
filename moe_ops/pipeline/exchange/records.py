"""What an exchange of a layer is made from, what it sends, and what arrives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.formats import ExpertTokensMetadata
from moe_ops.scheme import FusedMoEQuantConfig, Quant


class Needs(NamedTuple):
    """What an exchange of a layer is made from: arguments of exchanges, by their names."""

    group: RankGroup
    max_num_tokens: int | None
    """The largest number of tokens that any rank passes; None: not known."""
    expert_ranks: Tensor | None
    """int32 ``(E,)``: the rank that holds each expert; None: not known."""
    hidden_size: int
    """H of the rows."""
    top_k: int
    """Slots of a token."""
    dtype: torch.dtype
    """Dtype of the activations."""
    share: str = "layers"
    """Layers whose exchanges have the same name share memory: see `SymmetricPrepareAndFinalize`."""
    equal_num_tokens: bool = False
    """See `TokenExchange`."""
    capacity_factor: float = 1
    """See `FixedCapacityPrepareAndFinalize`."""
    on_dead_rank: str = "raise"
    """See `SymmetricPrepareAndFinalize`."""


class Outgoing(NamedTuple):
    """The tokens of this rank, and how their rows are made before they travel."""

    a1: Tensor
    """``(T, H)``."""
    topk_weights: Tensor
    """``(T, k)``."""
    topk_ids: Tensor
    """``(T, k)``, global experts."""
    num_experts: int
    expert_map: Tensor | None
    """The experts of this rank."""
    on_input: bool
    """Whether rows are multiplied by their router weight (k = 1) before they travel."""
    quant_config: FusedMoEQuantConfig
    quant: Quant | None
    """How rows are quantized before they travel; None: they are not."""
    everywhere: bool
    """Whether every rank needs all rows, because it computes one scale for them."""
    lora_ids: Tensor | None = None
    """int32 ``(T, 1)``: the tokens' adapters; None: nothing of adapters travels."""
    recorded: bool = False
    """Whether a backward pass may follow: what arrives is then `kept` and `arranged`."""
    input_scale: Tensor | None = None
    """The given scale with which rows are quantized before they travel, if any."""


class Arrived(NamedTuple):
    """The tokens that have arrived, from all ranks."""

    rows: Tensor
    scale: Tensor | None
    topk_weights: Tensor
    topk_ids: Tensor
    lora_ids: Tensor | None = None
    """As in `Outgoing`; rows that are no tokens have no expert, whatever stands here."""
    meta: ExpertTokensMetadata | None = None
    """Counts of the experts' rows, in the Batched format."""
