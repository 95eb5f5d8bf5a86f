"""Checkpoints with known weights, in the formats of common model families."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import moe_ops
from moe_ops.scheme import get_scheme
from moe_ops.tensors import QTensor

NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
FIELDS = {
    "scale": "weight_scale",
    "zero_point": "weight_zero_point",
    "global_scale": "weight_scale_2",
}
CHANNEL = "weight_chan_scale"
RANKS = [{}, *({"tp_size": 2, "tp_rank": r} for r in range(2)), {"tp_size": 4, "tp_rank": 3},
         {"ep_size": 2, "ep_rank": 1}, {"ep_size": 4, "ep_rank": 2},
         {"ep_size": 2, "ep_rank": 1, "expert_placement_strategy": "round_robin"}]  # fmt: skip
"""Name of a per-row global scale."""


class Experts(NamedTuple):
    """The separate projections of one layer: ``(E, I, H)``, ``(E, I, H)``, ``(E, H, I)``."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def random(cls, num_experts, hidden, width, dtype=torch.float32, seed=0):
        g = torch.Generator().manual_seed(seed)
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        return cls(
            *((torch.randn(num_experts, n, k, generator=g) / k**0.5).to(dtype) for n, k in shapes)
        )

    def quantized(self, scheme):
        """Each expert's projections quantized separately, as in a checkpoint."""
        return Experts(*(moe_ops.quantize_weight(w, scheme) for w in self))


def per_expert(experts, names=NAMES, prefix="", fields=FIELDS, input_scale=None):
    """Tensors named ``experts.3.gate_proj.weight`` etc., from tensors or `QTensor` values."""
    out = {}
    for field, weights in experts._asdict().items():
        q = weights if isinstance(weights, QTensor) else QTensor(weights)
        for e in range(len(q.data)):
            name = f"{prefix}experts.{e}.{names[field]}."
            out[name + "weight"] = q.data[e]
            for part, suffix in fields.items():
                value = getattr(q, part)
                if value is not None:
                    channel = part == "global_scale" and value.dim() == 2
                    out[name + (CHANNEL if channel else suffix)] = value[e]
            if input_scale is not None:
                out[name + "input_scale"] = torch.tensor(input_scale + e / 64)
    return out


def fused(experts, *, transposed=False, interleaved=False, prefix="experts."):
    """Fused tensors ``gate_up_proj`` and ``down_proj`` of all experts."""
    gate, up, down = experts
    both = torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
    if transposed:
        both, down = both.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return {f"{prefix}gate_up_proj": both, f"{prefix}down_proj": down}


def numbers(layer):
    """The dequantized parameters of a layer: ``w13``, ``w2`` in float32."""
    out = []
    for w in ("w13", "w2"):
        fields = ("weight", *FIELDS.values())
        q = QTensor(*(getattr(layer, f"{w}_{name}", None) for name in fields))
        if q.global_scale is None:
            q = q._replace(global_scale=getattr(layer, f"{w}_{CHANNEL}", None))
        out.append(moe_ops.dequantize_weight(q, layer.scheme))
    return out


@lru_cache(maxsize=1)  # found by identity: ranks of a test share their experts
def dequantized(experts, scheme):
    """Each projection in float32."""
    weights = (q if isinstance(q, QTensor) else QTensor(q) for q in experts)
    return [moe_ops.dequantize_weight(q, scheme) for q in weights]


def expected(experts, scheme, layer, held):
    """The expected result of `numbers` on a rank: experts ``held``, its rows, then zeros."""
    gate, up, down = (w[held] for w in dequantized(experts, get_scheme(scheme)))
    each, rank = layer.sizes.intermediate_size, layer.moe_parallel_config.tp_rank
    mine = slice(rank * each, (rank + 1) * each)

    def padded(x, axis):
        out = x.new_zeros(*(each if i == axis else n for i, n in enumerate(x.shape)))
        out.narrow(axis, 0, x.shape[axis]).copy_(x)
        return out

    gate, up = (padded(x[:, mine], 1) for x in (gate, up))
    rows = (gate, up)
    if layer.sizes.interleaved:
        return torch.stack(rows, 2).flatten(1, 2), padded(down[:, :, mine], 2)
    return torch.cat(rows, 1), padded(down[:, :, mine], 2)


def held(layer):
    """The logical expert of each row."""
    return layer.state.held_placement().experts
