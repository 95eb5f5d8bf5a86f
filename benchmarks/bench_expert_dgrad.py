"""Time the gradients of rows through quantized experts, also from packed weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import ops
from moe_ops.scheme import pack_weight, packs, quantize_weight


def cases(layer: Layer) -> Iterator[Case]:
    x, _, ids, _ = layer.inputs
    experts, width = layer.problem.num_experts, 2 * layer.problem.intermediate_size
    like = {"dtype": x.dtype, "device": x.device}
    dy = torch.randn((ids.numel(), width), **like)
    for scheme in ("int4_w4a16_g128", "mxfp4_w4a16", "fp8_block128"):
        q = quantize_weight(torch.randn((experts, width, x.shape[1]), **like) / 16, scheme)
        plan = ops.plan_slots(ids, None, experts, scheme, x.dtype)
        forms = {scheme: q}
        if packs(scheme, width, x.shape[1]):
            forms[f"{scheme}:packed"] = pack_weight(q, scheme)
        for name, form in forms.items():
            yield Case(
                f"expert_dgrad:{name}",
                lambda form=form, plan=plan, scheme=scheme: ops.expert_dgrad(
                    dy, *form, [plan, ids, None], 1, scheme
                ),
                nbytes(dy, q.data, q.scale) + ids.numel() * x.shape[1] * x.itemsize,
            )


if __name__ == "__main__":
    main("expert_dgrad", cases)
