"""Time the gradients of expert weights, biases and router weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import ops


def cases(layer: Layer) -> Iterator[Case]:
    x, weights, ids, _ = layer.inputs
    experts, width = layer.problem.num_experts, 2 * layer.problem.intermediate_size
    like = {"dtype": x.dtype, "device": x.device}
    dy, bias = torch.randn((ids.numel(), width), **like), torch.randn((experts, x.shape[1]), **like)
    plan = ops.plan_slots(ids, None, experts, "unquantized", x.dtype)
    moved = nbytes(dy, x, ids) + experts * width * x.shape[1] * x.itemsize

    yield Case(
        "expert_wgrad",
        lambda: ops.expert_wgrad(dy, x, None, [plan, ids, None], experts, "unquantized", x.dtype),
        moved,
    )
    yield Case(
        "expert_bias_grad",
        lambda: ops.expert_bias_grad(dy, None, [plan, ids, None], experts, "unquantized"),
        nbytes(dy, ids),
    )
    yield Case(
        "slot_products",
        lambda: ops.slot_products(x, bias, ids, None, experts, True),
        nbytes(x, ids, weights),
    )


if __name__ == "__main__":
    main("expert_wgrad", cases)
