"""Time the batched format on one of eight ranks: dispatch, activation, quantization, rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import get_scheme, ops

SCHEMES = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block128")
RANKS, MOST_TOKENS = 8, 512
"""The number of ranks, of which one has an eighth of the experts, and its most rows per expert."""


def cases(layer: Layer) -> Iterator[Case]:
    x, _, ids, _ = layer.inputs
    experts = max(1, layer.problem.num_experts // RANKS)
    here = (0, experts, min(x.shape[0], MOST_TOKENS))
    quant = None if layer.scheme == "bf16" else get_scheme(layer.scheme).activation
    key = "" if quant is None else quant.key

    def dispatch() -> tuple:
        return ops.batched_dispatch(x, None, None, ids, *here, key)

    counts = dispatch()[2]
    used = int(counts.sum())
    yield Case("batched_dispatch", dispatch, used * x[0].nbytes + nbytes(ids, dispatch()))

    shape = (experts, here[2], 2 * layer.problem.intermediate_size)
    gate_up = torch.randn(shape, dtype=x.dtype, device=x.device)
    read = used * gate_up[0, 0].nbytes  # padding rows are not read

    def activation() -> torch.Tensor:
        return ops.batched_activation(gate_up, counts, "silu")

    h = activation()
    if quant is None:

        def rows() -> torch.Tensor:
            return ops.batched_rows(ids, *here)

        yield Case("batched_rows", rows, nbytes(ids, rows()))
        yield Case("batched_activation", activation, read + nbytes(h))
    else:

        def quantize() -> tuple:
            return ops.batched_quantize(h, None, counts, key)

        def activation_quantize() -> tuple:
            return ops.batched_activation_quantize(gate_up, None, counts, "silu", key)

        written = nbytes(quantize())
        yield Case("batched_quantize", quantize, read // 2 + written)
        yield Case("batched_activation_quantize", activation_quantize, read + written)


if __name__ == "__main__":
    main("batched", cases, SCHEMES)
