"""Time both expert GEMMs of two quantized operands, ``scaled_matmul``, by scheme.

The operator multiplies stored values, or dequantizes both operands. Where a layer lets it quantize
its rows, its time includes that.
"""

from __future__ import annotations

from collections.abc import Iterator

from stages import Case, Layer, main

SCHEMES = (
    "fp8_tensor", "fp8_channel", "fp8_block128", "int8_channel",
    "mxfp8", "mxfp4", "nvfp4", "int4_w4a8_g128",
)  # fmt: skip


def cases(layer: Layer) -> Iterator[Case]:
    yield from layer.cases("scaled_gemm")


if __name__ == "__main__":
    main("scaled_gemm", cases, SCHEMES)
