"""Time both expert GEMMs whose weights alone are quantized, ``weight_only_matmul``, by scheme."""

from __future__ import annotations

from collections.abc import Iterator

from stages import Case, Layer, main

SCHEMES = (
    "int4_w4a16_g128", "mxfp4_w4a16", "nvfp4_w4a16", "fp8_w8a16_block128", "int8_w8a16",
)  # fmt: skip


def cases(layer: Layer) -> Iterator[Case]:
    yield from layer.cases("weight_only_gemm")


if __name__ == "__main__":
    main("weight_only_gemm", cases, SCHEMES)
