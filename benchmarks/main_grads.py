"""This library's layer with gradients of weights added to float32 main gradients, in two ways."""

from __future__ import annotations

from functools import partial

import torch
from peers.trained import Differentiable, TrainedPeer
from torch import Tensor

import moe_ops
from moe_ops.bench.problems import Experts, Inputs
from moe_ops.training import with_main_grad

WEIGHTS = ("w1", "w2")


def trained(experts: Experts, inputs: Inputs, *, fused: bool) -> Differentiable:
    """Add in the kernels of the gradients, or the finished gradients in launches of their own."""
    tensors = {"w1": experts.w1, "w2": experts.w2, **inputs._asdict()}
    leaves = {n: tensors[n].detach().requires_grad_() for n in ("x", "topk_weights", *WEIGHTS)}
    tensors.update(leaves)
    mains = {n: torch.zeros_like(leaves[n], dtype=torch.float32) for n in WEIGHTS}

    def forward() -> Tensor:
        w1, w2 = (with_main_grad(tensors[n], mains[n]) if fused else tensors[n] for n in WEIGHTS)
        return moe_ops.fused_experts(tensors["x"], w1, w2, tensors["topk_weights"], inputs.topk_ids)

    asked = {n: x for n, x in leaves.items() if not (fused and n in WEIGHTS)}
    return Differentiable(forward, asked, mains)


MAIN_GRADS = {
    "moe_ops-main": TrainedPeer(lambda: None, partial(trained, fused=True)),
    "moe_ops-added": TrainedPeer(lambda: None, partial(trained, fused=False)),
}
"""``--main-grads``: fused, and ``main_grad += grad`` after the backward pass."""
