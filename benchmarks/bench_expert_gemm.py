"""Time the expert GEMMs, beside two speeds of light.

``dense_mm`` is one matrix product of the same flops that ignores the experts: the bound where a
batch is large. ``even_bmm`` spreads the rows evenly over the experts that are hit: the bound where
the weights' bytes count. Both read rows that already lie in order. The layer's operator is
``expert_matmul``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv


def cases(layer: Layer) -> Iterator[Case]:
    yield from layer.cases("expert_gemm")
    slots, active = layer.inputs.topk_ids.numel(), layer.inputs.num_active
    yield from _baselines("w1", layer.experts.w1, slots, active)
    yield from _baselines("w2", layer.experts.w2, slots, active)


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
    main("expert_gemm", cases)
