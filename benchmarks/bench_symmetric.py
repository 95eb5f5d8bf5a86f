"""Time the kernels that exchange rows through windows, on one rank that holds all experts.

Rows travel from memory to memory of one GPU. `moe_ops.bench.ranks` times several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import get_scheme, ops
from moe_ops.pipeline.exchange.memory import allocate_here
from moe_ops.windows import WindowLayout

SCHEMES = ("bf16", "fp8_channel", "fp8_block128")
TIMEOUT = 30.0
"""Seconds to wait for a rank."""


def cases(layer: Layer) -> Iterator[Case]:
    x, weights, ids, _ = layer.inputs
    (tokens, width), experts = x.shape, layer.problem.num_experts
    layout = WindowLayout(1, tokens, width, ids.shape[1], x.itemsize)
    (window,) = allocate_here(layout, x.device, TIMEOUT)
    where, holders = (window.peers, window.state), ids.new_zeros(experts, dtype=torch.int32)
    quant = None if layer.scheme == "bf16" else get_scheme(layer.scheme).activation

    def send() -> tuple:
        return ops.symmetric_send(
            x,
            None,
            weights,
            ids,
            holders,
            *where,
            tokens,
            experts,
            False,
            "" if quant is None else quant.key,
        )

    yield Case("symmetric_send", send, nbytes(x, weights, ids, send()))

    def send_back() -> torch.Tensor:
        return ops.symmetric_return(x, holders, *where, ids.shape[1])

    yield Case("symmetric_return", send_back, nbytes(x, ids, x))


if __name__ == "__main__":
    main("symmetric", cases, SCHEMES)
