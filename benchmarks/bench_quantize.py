"""Time quantization: tokens before the first GEMM, activated rows before the second."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, main, nbytes

from moe_ops import SCHEMES, ops
from moe_ops.bench.problems import Inputs, Problem

SCHEMES_TIMED = ("fp8_tensor", "fp8_channel", "fp8_block128", "fp8_block128_ue8m0", "int8_channel")


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    x, _, ids, _ = inputs
    width = problem.intermediate_size
    gate_up = torch.randn((ids.numel(), 2 * width), dtype=x.dtype, device=x.device)
    for name in SCHEMES_TIMED:
        quant = SCHEMES[name].activation
        if quant is None:
            continue

        def quantize(key: str = quant.key) -> tuple:
            return ops.moe_quantize(x, None, None, None, None, problem.num_experts, key)

        def activation_quantize(key: str = quant.key) -> tuple:
            experts = problem.num_experts
            return ops.activation_quantize(gate_up, None, None, None, experts, "silu", key)

        moved = nbytes(x, *quantize()), nbytes(gate_up, *activation_quantize())
        yield Case(f"moe_quantize:{name}", quantize, moved[0])
        yield Case(f"activation_quantize:{name}", activation_quantize, moved[1])


if __name__ == "__main__":
    main("quantize", cases)
