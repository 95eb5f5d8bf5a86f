"""Time the gradients of expert weights, biases and router weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import ops
from moe_ops.dispatch.device import assumed, device_facts


def portable(call: Callable[[], Any], device: torch.device) -> Any:
    """A call by the kernel for all GPUs."""
    with assumed(device_facts(device)._replace(portable_only=True)):
        return call()


def cases(layer: Layer) -> Iterator[Case]:
    x, weights, ids, _ = layer.inputs
    experts, width = layer.problem.num_experts, 2 * layer.problem.intermediate_size
    like = {"dtype": x.dtype, "device": x.device}
    dy, bias = torch.randn((ids.numel(), width), **like), torch.randn((experts, x.shape[1]), **like)
    plan = ops.plan_slots(ids, None, experts, "unquantized", x.dtype)
    h, tiles = dy[:, : width // 2].contiguous(), [plan, ids, None]

    for name, d, r in (("w1", dy, x), ("w2", x, h)):
        n, k = d.shape[1], r.shape[1]
        call = partial(ops.expert_wgrad, d, r, None, tiles, experts, "unquantized", x.dtype)
        moved = nbytes(d, r, ids) + experts * n * k * x.itemsize
        flops = 2 * ids.numel() * n * k
        yield Case(f"expert_wgrad:{name}", call, moved, flops)
        yield Case(f"expert_wgrad:{name}:portable", partial(portable, call, x.device), moved, flops)
        total = torch.zeros(experts, n, k, device=x.device)
        added = partial(ops.expert_wgrad_out, d, r, None, tiles, experts, out=total)
        yield Case(f"expert_wgrad.out:{name}", added, nbytes(d, r, ids) + 2 * total.nbytes, flops)
    yield Case(
        "expert_bias_grad",
        lambda: ops.expert_bias_grad(dy, None, tiles, experts, "unquantized"),
        nbytes(dy, ids),
    )
    yield Case(
        "slot_products",
        lambda: ops.slot_products(x, bias, ids, None, experts, True),
        nbytes(x, ids, weights),
    )


if __name__ == "__main__":
    main("expert_wgrad", cases)
