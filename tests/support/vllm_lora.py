"""Stand-ins of what the plug-in uses of vLLM's LoRA: factors in stacks, and ids in a buffer.

Factors lie as in ``FusedMoEWithLoRA`` (gate and up apart) and ``FusedMoE3DWithLoRA`` (together).
`test_vllm_interface.py` compares `FIELDS` with vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from merged_adapters import R
from vllm_signatures import LAYERS

from moe_ops.activation import MoEActivation
from moe_ops.pipeline.adapters import Adapters, LowRank

MIXIN, CONTEXT = f"{LAYERS}.experts.lora_experts_mixin", f"{LAYERS}.experts.lora_context"
MAX_TOKENS = 64
"""The length of the buffer of ids."""


@dataclass
class LoRAConfig:
    max_loras: int = 3
    lora_dtype: Any = torch.float32
    fully_sharded_loras: bool = False


@dataclass
class MoELoRAContext:
    w13_lora_a_stacked: tuple[torch.Tensor, ...]
    w13_lora_b_stacked: tuple[torch.Tensor, ...]
    w2_lora_a_stacked: tuple[torch.Tensor, ...]
    w2_lora_b_stacked: tuple[torch.Tensor, ...]
    w13_num_slices: int
    punica_wrapper: Any
    enable_moe_shared_loras: bool = False


@dataclass
class LoRAKernelMeta:
    no_lora_flag_cpu: torch.Tensor


class LoRAExpertsMixin:
    _lora_context = None

    def set_lora_context(self, ctx):
        self._lora_context = ctx

    @staticmethod
    def supports_lora():
        return True


class Wrapper:
    """vLLM's wrapper of a batch's ids; on a GPU it says whether a step has adapters at all."""

    def __init__(self, on_gpu=True):
        self._token_lora_indices = torch.full((MAX_TOKENS,), 2**40, dtype=torch.long)
        if on_gpu:
            self.token_mapping_meta = LoRAKernelMeta(torch.tensor([False]))

    def update(self, ids):
        """Begin a step: what lies behind the ids in the buffer is that of earlier steps."""
        self._token_lora_indices[: len(ids)].copy_(ids)
        if hasattr(self, "token_mapping_meta"):
            self.token_mapping_meta.no_lora_flag_cpu[0] = bool((ids == -1).all())


class Stacks:
    """A layer with adapters: factors in stacks of zeros, which adapters are copied into.

    Args:
        config: the layer's ``FusedMoEConfig``.
        slices: 2, gate and up apart; 1, together.
        shared: whether all experts share A of the first weight and B of the second.
        count: places for adapters.
        rank: the largest rank.
    """

    def __init__(self, config, slices=2, shared=False, count=3, rank=R + 3):
        experts, h = config.num_local_experts, config.hidden_dim
        width, dtype = config.intermediate_size_per_partition, config.in_dtype
        gated = MoEActivation.from_str(config.activation.value).is_gated
        self.config, self.rank, self.shared = config, rank, shared
        self.slices = slices if gated else 1
        n, common = width * (1 + gated) // self.slices, 1 if shared else experts

        def stack(*shape):
            return torch.zeros(count, *shape, dtype=dtype)

        self.w13_a = tuple(stack(common, rank, h) for _ in range(self.slices))
        self.w13_b = tuple(stack(experts, n, rank) for _ in range(self.slices))
        self.w2_a, self.w2_b = (stack(experts, rank, width),), (stack(common, h, rank),)

    def set(self, index, adapters, source=0):
        """Load an adapter of `merged_adapters.factors` into a place; its rank may be smaller."""
        self.reset(index)
        rank = adapters.second.a.shape[2]
        for low, a, b in zip(adapters.first, self.w13_a, self.w13_b, strict=True):
            a[index, :, :rank] = low.a[source].to(a.dtype)
            b[index, :, :, :rank] = low.b[source].to(b.dtype)
        self.w2_a[0][index, :, :rank] = adapters.second.a[source].to(self.w2_a[0].dtype)
        self.w2_b[0][index, :, :, :rank] = adapters.second.b[source].to(self.w2_b[0].dtype)

    def reset(self, index):
        """Take an adapter out of its place."""
        for stack in (*self.w13_a, *self.w13_b, *self.w2_a, *self.w2_b):
            stack[index] = 0

    def context(self, wrapper):
        """What vLLM gives its experts."""
        return MoELoRAContext(
            self.w13_a, self.w13_b, self.w2_a, self.w2_b, self.slices, wrapper, self.shared
        )

    def adapters(self, ids):
        """What the stacks hold now, for the oracle; ``ids``: each token's place."""
        width = self.config.intermediate_size_per_partition
        kind = MoEActivation.from_str(self.config.activation.value)
        rows = [slice(None)]
        if self.slices == 2:
            halves = [slice(None, width), slice(width, None)]
            rows = [slice(0, None, 2), slice(1, None, 2)] if kind.is_interleaved else halves
        first = tuple(LowRank(*x) for x in zip(self.w13_a, self.w13_b, rows, strict=True))
        return Adapters(first, LowRank(self.w2_a[0], self.w2_b[0]), ids)


FIELDS = {
    CONTEXT: (MoELoRAContext,),
    "vllm.config.lora": (LoRAConfig,),
    "vllm.lora.ops.triton_ops.lora_kernel_metadata": (LoRAKernelMeta,),
}
"""Classes whose fields vLLM's have, too, by module."""
MODULES = {
    MIXIN: {"LoRAExpertsMixin": LoRAExpertsMixin},
    CONTEXT: {"MoELoRAContext": MoELoRAContext},
}
"""What the stand-ins of vLLM's modules contain."""
