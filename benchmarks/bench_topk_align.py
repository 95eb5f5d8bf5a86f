"""Time routing with alignment, in one operator and in two."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, recorded

import moe_ops
from moe_ops import ops
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.tensors import Routing


def cases(layer: Layer) -> Iterator[Case]:
    x, k, experts = layer.inputs.x, layer.problem.top_k, layer.experts
    num_experts = layer.problem.num_experts
    logits = torch.randn((len(x), num_experts), dtype=x.dtype, device=x.device)

    def fused() -> object:
        return moe_ops.fused_moe(x, experts.w1, experts.w2, logits, k)

    def apart() -> SlotRows:
        weights, ids = ops.fused_topk(logits, None, k, True, "softmax", 1.0)
        return SlotRows.of(Routing(weights, ids), num_experts, experts.scheme, x.dtype)

    (one,) = layer.cases("topk_align", fused)
    yield one
    if recorded("align", apart):  # few slots need no plan
        yield Case("fused_topk + plan_slots", apart, one.nbytes)


if __name__ == "__main__":
    main("topk_align", cases)
