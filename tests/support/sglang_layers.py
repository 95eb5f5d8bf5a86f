"""Layers of SGLang on stand-ins: operands as its quantization methods pass them."""

from __future__ import annotations

import sglang_stand_ins as sglang
import torch
from peers.sglang import flags_by_scheme

from moe_ops import quantize_weight

FLAGS = {"unquantized": {}, **flags_by_scheme(32), "fp8_tensor_static": {"use_fp8_w8a8": True}}
"""What SGLang's quantization methods say of each scheme that the plug-in serves."""
STATIC = {"a1_scale": torch.tensor([0.01]), "a2_scale": torch.tensor([0.02])}


def problem(
    name, seed=0, tokens=5, num_experts=4, k=2, hidden=64, width=64, biases=True, gated=True
):
    """Operands of a layer: what SGLang passes, and the quantized weights."""
    torch.manual_seed(seed)
    x, logits = torch.randn(tokens, hidden), torch.randn(tokens, num_experts)
    found = logits.softmax(-1).topk(k)
    ids = found.indices.to(torch.int32)
    rows = (1 + gated) * width
    w1 = torch.randn(num_experts, rows, hidden) / 8
    w2 = torch.randn(num_experts, hidden, width) / 8
    b13, b2 = torch.randn(num_experts, rows), torch.randn(num_experts, hidden)
    given = {"b13": b13, "b2": b2} if biases else {}
    q = None
    if name != "unquantized":
        q = [quantize_weight(w, name) for w in (w1, w2)]
        w1, w2 = (one.data for one in q)
        given |= {
            "w13_scale": q[0].scale, "w2_scale": q[1].scale, "w13_zp": q[0].zero_point,
            "w2_zp": q[1].zero_point,
        }  # fmt: skip
    if "static" in name:
        given |= {"a13_scale": torch.tensor(0.01), "a2_scale": STATIC["a2_scale"]}
    info = sglang.TritonMoeQuantInfo(w1, w2, **FLAGS[name], **given)
    routed = sglang.StandardTopKOutput(found.values, ids, logits)
    return sglang.StandardDispatchOutput(x, None, routed), info, q
