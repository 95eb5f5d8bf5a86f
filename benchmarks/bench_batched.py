"""Time the batched format on one of eight ranks: dispatch, activation, quantization, rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, main, nbytes

from moe_ops import SCHEMES, ops
from moe_ops.bench.problems import Inputs, Problem

RANKS, MOST_TOKENS = 8, 512
"""The number of ranks, of which one has an eighth of the experts, and its most rows per expert."""


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    x, _, ids, _ = inputs
    experts = max(1, problem.num_experts // RANKS)
    here = (0, experts, min(x.shape[0], MOST_TOKENS))
    counts = ops.batched_dispatch(x, None, None, ids, *here, "")[2]
    used = int(counts.sum())
    shape = (experts, here[2], 2 * problem.intermediate_size)
    gate_up = torch.randn(shape, dtype=x.dtype, device=x.device)
    read = used * gate_up[0, 0].nbytes  # padding rows are not read

    for name in ("unquantized", "fp8_tensor", "fp8_channel", "fp8_block128"):
        quant = SCHEMES[name].activation
        key = "" if quant is None else quant.key

        def dispatch(key: str = key) -> tuple:
            return ops.batched_dispatch(x, None, None, ids, *here, key)

        moved = used * x[0].nbytes + nbytes(ids, *dispatch())
        yield Case(f"batched_dispatch:{name}", dispatch, moved)

    def rows() -> torch.Tensor:
        return ops.batched_rows(ids, *here)

    yield Case("batched_rows", rows, nbytes(ids, rows()))

    def activation() -> torch.Tensor:
        return ops.batched_activation(gate_up, counts, "silu")

    h = activation()
    yield Case("batched_activation", activation, read + nbytes(h))
    for name in ("fp8_channel", "fp8_block128"):
        quant = SCHEMES[name].activation
        key = "" if quant is None else quant.key

        def quantize(key: str = key) -> tuple:
            return ops.batched_quantize(h, None, counts, key)

        def activation_quantize(key: str = key) -> tuple:
            return ops.batched_activation_quantize(gate_up, None, counts, "silu", key)

        written = nbytes(*quantize())
        yield Case(f"batched_quantize:{name}", quantize, read // 2 + written)
        yield Case(f"batched_activation_quantize:{name}", activation_quantize, read + written)


if __name__ == "__main__":
    main("batched", cases)
