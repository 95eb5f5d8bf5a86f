"""Time the kernel that writes slots' rows into the Batched format, on one rank with all experts.

Rows travel from memory to memory of one GPU. `moe_ops.bench.ranks` times several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from bench_symmetric import SCHEMES, TIMEOUT
from stages import Case, Layer, main, nbytes

from moe_ops import get_scheme, ops
from moe_ops.pipeline.exchange.memory import allocate_here
from moe_ops.windows import WindowLayout

MOST = 128
"""Tokens of a rank in the Batched format."""


def cases(layer: Layer) -> Iterator[Case]:
    x, weights, ids, _ = layer.inputs
    (tokens, width), experts = x.shape, layer.problem.num_experts
    if tokens > MOST:
        return
    layout = WindowLayout(1, tokens, width, ids.shape[1], x.itemsize, experts)
    (window,) = allocate_here(layout, x.device, TIMEOUT)
    held = torch.arange(experts, dtype=torch.int32, device=x.device)
    quant = None if layer.scheme == "bf16" else get_scheme(layer.scheme).activation
    key = "" if quant is None else quant.key

    def send() -> tuple:
        return ops.symmetric_send_batched(
            x,
            None,
            weights,
            ids,
            torch.stack([held * 0, held]),
            held,
            window.peers,
            window.state,
            tokens,
            False,
            key,
        )

    yield Case("symmetric_send_batched", send, nbytes(x, weights, ids) + ids.numel() * x[0].nbytes)


if __name__ == "__main__":
    main("symmetric_batched", cases, SCHEMES)
