"""How activations lie when experts get them, and what travels with them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class FusedMoEActivationFormat(Enum):
    """The layouts that experts consume and produce.

    Source:
        vLLM ``FusedMoEActivationFormat``, values included (tuples of one name).
    """

    Standard = ("standard",)
    """``(T, H)``: one row a token (or a slot, where the router weight is already in it)."""
    BatchedExperts = ("batched_experts",)
    """``(El, M, H)``: one row a slot, in slot order, ``expert_num_tokens[e]`` of them in use."""


@dataclass(frozen=True)
class ExpertTokensMetadata:
    """How many rows each local expert has.

    Args:
        expert_num_tokens: int32 ``(El,)`` on the device.
        expert_num_tokens_cpu: the same on the CPU, where somebody knows it without waiting.
        num_dropped: int32 ``(1,)`` on the device: rows that did not fit; None where all do.
    """

    expert_num_tokens: Tensor
    expert_num_tokens_cpu: Tensor | None = None
    num_dropped: Tensor | None = None

    @staticmethod
    def make_from_list(
        expert_num_tokens_list: list[int], device: torch.device | str
    ) -> ExpertTokensMetadata:
        """From counts that the host knows; the copy to the device is not waited for."""
        on_cpu = torch.tensor(expert_num_tokens_list, dtype=torch.int32, device="cpu")
        return ExpertTokensMetadata(on_cpu.to(device, non_blocking=True), on_cpu)


class PrepareResult(NamedTuple):
    """What prepare hands to the experts."""

    a1q: Tensor
    """``(T, H)``, ``(T * k, H)`` (rows with their router weight in them) or ``(El, M, H)``."""
    a1q_scale: Tensor | None
    """Of quantized rows, as `Quant.row_scale_shape` or `Quant.batched_scale_shape` says."""
    expert_tokens_meta: ExpertTokensMetadata | None
    topk_ids: Tensor | None
    """Ids in place of the caller's; None: unchanged."""
    topk_weights: Tensor | None
    """Weights in place of the caller's; None: unchanged."""
