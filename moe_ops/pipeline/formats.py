"""The layouts of activations that experts take, and the metadata that goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks


class FusedMoEActivationFormat(Enum):
    """The layouts that experts consume and produce.

    Source:
        vLLM ``FusedMoEActivationFormat``, values included (tuples of one name).
    """

    Standard = ("standard",)
    """``(T, H)``: one row per token, or one per slot if the rows contain the router weight."""
    BatchedExperts = ("batched_experts",)
    """``(El, M, H)``: one row per slot, in slot order; ``expert_num_tokens[e]`` rows are in use."""


@dataclass(frozen=True)
class ExpertTokensMetadata:
    """The number of rows of each local expert.

    Args:
        expert_num_tokens: int32 ``(El,)`` on the device.
        expert_num_tokens_cpu: the same on the CPU, if it is known without waiting for the device.
        num_dropped: int32 on the device, ``(1,)`` or one for each expert: rows that did not fit;
            None: all rows fit.
    """

    expert_num_tokens: Tensor
    expert_num_tokens_cpu: Tensor | None = None
    num_dropped: Tensor | None = None

    @staticmethod
    def make_from_list(
        expert_num_tokens_list: list[int], device: torch.device | str
    ) -> ExpertTokensMetadata:
        """Metadata from counts on the host; does not wait for the copy to the device.

        Raises:
            TypeError, ValueError: no list of counts of at least 0; a wrong device.
        """
        checks.instance("expert_num_tokens_list", expert_num_tokens_list, Sequence)
        for count in expert_num_tokens_list:
            checks.at_least(0, expert_num_tokens_list=count)
        device = checks.device("device", device)
        on_cpu = torch.tensor(expert_num_tokens_list, dtype=torch.int32, device="cpu")
        return ExpertTokensMetadata(on_cpu.to(device, non_blocking=True), on_cpu)


class PrepareResult(NamedTuple):
    """What prepare passes to the experts."""

    a1q: Tensor
    """``(T, H)``, ``(T * k, H)`` (rows multiplied by their router weight) or ``(El, M, H)``."""
    a1q_scale: Tensor | None
    """Scales of quantized rows: see `Quant.row_scale_shape` and `Quant.batched_scale_shape`."""
    expert_tokens_meta: ExpertTokensMetadata | None
    topk_ids: Tensor | None
    """Ids that replace the caller's; None: unchanged."""
    topk_weights: Tensor | None
    """Weights that replace the caller's; None: unchanged."""
