"""Time the expert GEMMs by scheme, those of bf16 beside two speeds of light.

``expert_product`` is both GEMMs of a layer; where a layer lets it quantize its rows, its time
includes that. ``expert_product_sum`` is the second GEMM with the weighted sum, which a layer that
runs eagerly calls for one token only. ``activated_product`` is the first GEMM where gradients are
asked for: it also stores its product. ``expert_product.out`` adds the product of an adapter's
second factor, of rank 16.

``dense_mm`` is one matrix product of the same flops that ignores the experts: the bound where a
batch is large. ``even_bmm`` spreads the rows evenly over the experts that are hit: the bound where
the weights' bytes count. Both read rows that already lie in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes
from torch import Tensor

from moe_ops import ops
from moe_ops.dispatch.tiles import cdiv

SCHEMES = (
    "bf16",
    "fp8_tensor", "fp8_channel", "fp8_block128", "int8_channel",
    "mxfp8", "mxfp4", "nvfp4", "int4_w4a8_g128",
    "int4_w4a16_g128", "mxfp4_w4a16", "nvfp4_w4a16", "fp8_w8a16_block128", "int8_w8a16",
)  # fmt: skip


def cases(layer: Layer) -> Iterator[Case]:
    yield from layer.cases("expert_product")
    if layer.scheme != "bf16":
        return
    slots, active = layer.inputs.topk_ids.numel(), layer.inputs.num_active
    yield from _baselines("w1", layer.experts.w1, slots, active)
    yield from _baselines("w2", layer.experts.w2, slots, active)
    yield _adapter(layer, layer.experts.w1, slots)
    yield _recorded(layer, layer.experts.w1, slots)


def _recorded(layer: Layer, w: Tensor, slots: int) -> Case:
    experts, n, k = w.shape
    x, ids = layer.inputs.x, layer.inputs.topk_ids
    tiles = [ops.plan_slots(ids, None, experts, "unquantized", w.dtype), ids, None]
    top_k, scheme, written = ids.shape[1], "unquantized", slots * (n + n // 2) * w.itemsize
    return Case(
        "activated_product:w1",
        lambda: ops.activated_product(
            x, None, [w], None, tiles, top_k, scheme, w.dtype, "silu", expert_order=True
        ),
        nbytes(x, w[: layer.inputs.num_active]) + written,
        2 * slots * n * k,
    )


def _adapter(layer: Layer, w: Tensor, slots: int) -> Case:
    experts, n, _ = w.shape
    ids, rank = layer.inputs.topk_ids, 16
    low = torch.randn((slots, rank), dtype=w.dtype, device=w.device)
    b, out = w.new_ones((experts, n, rank)), w.new_zeros((slots, n))
    tiles = [ops.plan_slots(ids, None, experts, "unquantized", w.dtype), ids, None]
    moved = nbytes(low, b[: layer.inputs.num_active]) + 2 * nbytes(out)
    return Case(
        "expert_product.out:w1",
        lambda: ops.expert_product_out(low, [b], None, tiles, 1, out=out),
        moved,
        2 * slots * n * rank,
    )


def _baselines(name: str, w: Tensor, slots: int, active: int) -> Iterator[Case]:
    _, n, k = w.shape
    a = torch.randn((slots, k), dtype=w.dtype, device=w.device)
    dense = w[0].t()
    moved = nbytes(a, dense) + slots * n * w.itemsize
    yield Case(f"dense_mm:{name}", lambda: a @ dense, moved, 2 * slots * n * k)

    rows = cdiv(slots, active)
    even = torch.randn((active, rows, k), dtype=w.dtype, device=w.device)
    some = w[:active].transpose(1, 2)
    moved = nbytes(even, some) + active * rows * n * w.itemsize
    yield Case(f"even_bmm:{name}", lambda: even @ some, moved, 2 * active * rows * n * k)


if __name__ == "__main__":
    main("expert_product", cases, SCHEMES)
