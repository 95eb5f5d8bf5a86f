"""Checkpoints in act-order: the columns of a weight belong to scale groups in a permuted order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from checkpoint_formats import words
from checkpoints import NAMES, Experts

import moe_ops
from moe_ops.scheme.formats import split_nibbles

E, H, I = 4, 128, 256  # noqa: E741


def rows(x, order):
    """The rows of each expert, permuted by the expert's order."""
    return torch.stack([w[p] for w, p in zip(x, order, strict=True)])


def columns(x, order):
    """The columns of each expert, permuted by the expert's order."""
    return torch.stack([w[:, p] for w, p in zip(x, order, strict=True)])


class Ordered(NamedTuple):
    """Quantized projections with columns in their original order, their values, and the order."""

    codes: Experts
    scales: Experts
    zeros: Experts
    g_idx: Experts
    dense: Experts
    order: Experts

    def sorted(self):
        """The weights as a layer stores them: columns sorted, rows of gate and up like down's."""
        gate, up, down = map(columns, self.dense, self.order)
        return Experts(*(rows(x, self.order.down) for x in (gate, up)), down)


def act_ordered(scheme, seed=0, num_experts=E, width=I, hidden=H, same=False, halves=True):
    """Random projections quantized in act-order, with a random order of columns.

    The order is shared by gate and up of an expert (``halves``), or of all experts (``same``).
    """
    g = torch.Generator().manual_seed(seed)
    dense = Experts.random(num_experts, hidden, width, seed=seed)
    group = int(scheme.split("_g")[1].split("_")[0])
    orders = [[torch.randperm(w.shape[2], generator=g) for _ in w] for w in dense]
    if halves:
        orders[1] = orders[0]
    if same:
        orders[0] = orders[1] = [orders[0][0]] * num_experts
    found = []
    for w, order in zip(dense, orders, strict=True):
        back = [p.argsort() for p in order]
        q = moe_ops.quantize_weight(columns(w, order), scheme)
        values = moe_ops.dequantize_weight(q, scheme)
        codes = split_nibbles(q.data, 2) if "int4" in scheme else q.data
        zero = None if q.zero_point is None else split_nibbles(q.zero_point, 1)
        g_idx = [torch.arange(w.shape[2])[p] // group for p in back]
        in_order = [i.argsort(stable=True) for i in g_idx]
        found.append((columns(codes, back), q, zero, g_idx, columns(values, back), in_order))
    return Ordered(*(Experts(*x) for x in zip(*found, strict=True)))


def gptq(x, bits=4):
    """Checkpoint tensors as AutoGPTQ and GPTQModel (version 1) write them, weights last."""
    out = {}
    for field, name in NAMES.items():
        codes, q, zeros, g_idx, *_ = (getattr(part, field) for part in x)
        for e in range(len(codes)):
            zero = torch.full(q.scale.shape[1:], 2 ** (bits - 1)) if zeros is None else zeros[e]
            out |= {
                f"experts.{e}.{name}.g_idx": g_idx[e].int(),
                f"experts.{e}.{name}.scales": q.scale[e].t(),
                f"experts.{e}.{name}.qzeros": words(zero.t() - 1 & 2**bits - 1, bits),
                f"experts.{e}.{name}.qweight": words(codes[e], bits).t(),
            }
    return out


def compressed(x, bits=4):
    """Checkpoint tensors as llm-compressor writes them with ``actorder="group"``, weights first."""
    out = {}
    for field, name in NAMES.items():
        codes, q, zeros, g_idx, *_ = (getattr(part, field) for part in x)
        for e in range(len(codes)):
            out |= {
                f"experts.{e}.{name}.weight_packed": words(codes[e], bits),
                f"experts.{e}.{name}.weight_scale": q.scale[e],
                f"experts.{e}.{name}.weight_shape": torch.tensor(codes[e].shape),
                f"experts.{e}.{name}.weight_g_idx": g_idx[e].int(),
            }
            if zeros is not None:
                out[f"experts.{e}.{name}.weight_zero_point"] = words(zeros[e].t(), bits).t()
    return out
