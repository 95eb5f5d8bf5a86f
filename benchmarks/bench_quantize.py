"""Time quantization: tokens before the first GEMM, activated rows before the second."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import get_scheme, ops

SCHEMES = ("fp8_tensor", "fp8_channel", "fp8_block128", "fp8_block128_ue8m0", "int8_channel")


def cases(layer: Layer) -> Iterator[Case]:
    x, _, ids, _ = layer.inputs
    experts, width = layer.problem.num_experts, layer.problem.intermediate_size
    gate_up = torch.randn((ids.numel(), 2 * width), dtype=x.dtype, device=x.device)
    key = get_scheme(layer.scheme).quants[0].key

    def quantize() -> tuple:
        return ops.moe_quantize(x, None, None, None, None, experts, key)

    def activation_quantize() -> tuple:
        return ops.activation_quantize(gate_up, None, None, None, experts, "silu", key)

    yield Case("moe_quantize", quantize, nbytes(x, quantize()))
    yield Case("activation_quantize", activation_quantize, nbytes(gate_up, activation_quantize()))


if __name__ == "__main__":
    main("quantize", cases, SCHEMES)
