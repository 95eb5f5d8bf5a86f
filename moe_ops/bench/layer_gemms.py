"""The expert GEMMs of a layer, one by one, with given tiles."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.pipeline.gemms import quantized
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.scheme import Scheme, is_packed
from moe_ops.tensors import ExpertWeight, ExpertWeights, Rows, Tiles


@dataclass(frozen=True)
class LayerGemms:
    """Both GEMMs of a layer."""

    scheme: Scheme
    top_k: int
    activation: str
    weights: ExpertWeights

    def space(self, ids: Tensor) -> SlotRows:
        """The row space of a routing ``(T, k)``."""
        experts = self.weights.w1.data.shape[0]
        plan = ops.plan_slots(ids, None, experts, self.scheme.key, torch.bfloat16)
        return SlotRows(Tiles(plan, ids), experts)

    def rows(self, which: int, x: Tensor, space: SlotRows) -> Rows:
        """Rows of GEMM 1 or 2, quantized unless the scheme keeps them or the GEMM quantizes them.

        Only GEMMs of packed weights are given rows to quantize.
        """
        weight, scale, quant = *self._weight(which), self.scheme.activation
        if quant is None:
            return Rows(x)
        if not is_packed(weight.data):
            return space.quantize(x, scale, quant)
        return quantized(x, scale, weight, space, self.scheme, *self._how(which))

    def product(
        self, which: int, rows: Rows, space: SlotRows, config: KernelTiles | None = None
    ) -> Tensor:
        """Run GEMM 1 or 2 with the tiles of its plan, or the launcher with given ones."""
        top_k, activation = self._how(which)
        arguments = {
            "a": rows.data,
            "a_scale": rows.scale,
            "weight": [*self._weight(which)[0]],
            "topk_weights": None,
            "tiles": [*space.tiles],
            "top_k": top_k,
            "scheme": self.scheme.key,
            "out_dtype": torch.bfloat16,
            "activation": activation,
        }
        if config is None:
            return ops.expert_product(**arguments)
        launchers = import_module("moe_ops.kernels.expert_product")  # needs Triton
        return launchers.expert_product(**arguments, config=config)

    def _weight(self, which: int) -> tuple[ExpertWeight, Tensor | None]:
        """The weight of GEMM 1 or 2, and the given scale of its rows."""
        first, second, scale1, scale2 = self.weights
        return (first, scale1) if which == 1 else (second, scale2)

    def _how(self, which: int) -> tuple[int, str]:
        """Slots per row and the activation of GEMM 1 or 2."""
        return (self.top_k, self.activation) if which == 1 else (1, "")
