"""Time ``gemm_sum``, the second expert GEMM with the weighted sum, by scheme.

A layer that runs eagerly calls it for one token only; for more there are no rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from stages import Case, Layer, main

SCHEMES = ("bf16", "fp8_channel", "fp8_block128", "int4_w4a8_g128")


def cases(layer: Layer) -> Iterator[Case]:
    yield from layer.cases("gemm_sum")


if __name__ == "__main__":
    main("gemm_sum", cases, SCHEMES)
