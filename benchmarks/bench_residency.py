"""Time which experts are on the device, the copy of those that are missing, and the products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import ops
from moe_ops.pipeline.host_experts import store
from moe_ops.residency import Residency
from moe_ops.tensors import ExpertWeight, ExpertWeights


def cases(layer: Layer) -> Iterator[Case]:
    ids, experts = layer.inputs.topk_ids, layer.problem.num_experts
    slots, device = max(ids.shape[1], experts // 2), ids.device
    # A quarter of the experts' rows: the copy's rate is the same, and pinning takes seconds.
    hidden, width = layer.problem.hidden_size, -(-layer.problem.intermediate_size // 4)
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    w1, w2 = (torch.zeros(s, dtype=torch.bfloat16) for s in shapes)
    weights = ExpertWeights(ExpertWeight(w1), ExpertWeight(w2))
    held = store(weights, pinned=device.type == "cuda")
    owner = Residency(held.weights, slots, device, "unquantized", held.memory)
    sizes = (experts, slots)
    yield Case(
        "make_resident",
        lambda: ops.make_resident(ids, None, owner.state, *sizes),
        nbytes(ids, owner.state, owner.state),
    )
    yield Case(
        "copy_experts:none",
        lambda: ops.copy_experts(owner.table, owner.state, *sizes, 2**20, False),
        nbytes(owner.state),
    )
    everything = torch.arange(slots, device=device).view(1, -1)

    def refill() -> None:
        owner.empty_()
        ops.make_resident(everything, None, owner.state, *sizes)
        ops.copy_experts(owner.table, owner.state, *sizes, 0, True)

    yield Case("copy_experts:all", refill, slots * owner.expert_bytes)
    yield from _products(layer, owner, width)


def _products(layer: Layer, owner: Residency, width: int) -> Iterator[Case]:
    """Both products of a batch, with the copies that it needs."""
    inputs, hidden = layer.inputs, layer.problem.hidden_size
    x, ids = inputs.x.bfloat16(), inputs.topk_ids
    plan = ops.plan_slots(ids, None, owner.num_experts, "unquantized", x.dtype)
    tiles, (first, second) = [plan, ids, None], owner.tables
    h = torch.randn((ids.numel(), width), dtype=x.dtype, device=x.device)
    flops = 2 * ids.numel() * width * hidden
    yield Case(
        "host_product:w1",
        lambda: ops.host_product(
            x, None, first, owner.state, None, tiles, ids.shape[1], 2 * width, x.dtype, "silu"
        ),
        inputs.num_active * 2 * width * hidden * 2,
        2 * flops,
    )
    yield Case(
        "host_product_sum",
        lambda: ops.host_product_sum(
            h, None, second, owner.state, inputs.topk_weights, tiles, hidden, x.dtype
        ),
        inputs.num_active * width * hidden * 2,
        flops,
    )


if __name__ == "__main__":
    main("residency", cases)
