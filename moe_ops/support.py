"""What runs where, as data: the README's table and the compile tests are made from it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ops.activation import MoEActivation
from moe_ops.scheme import SCHEMES


class Support(NamedTuple):
    """One row: a scheme in a format."""

    scheme: str
    format: str
    dtypes: tuple[torch.dtype, ...]
    """Of activations (and of weights, where those are not quantized)."""
    activations: tuple[MoEActivation, ...]
    architectures: tuple[int, ...]
    """CUDA compute capabilities (times ten) that the kernels are compiled for in the tests."""
    measured: tuple[str, ...]
    """GPUs that the kernels have run on."""


SUPPORT = (
    Support(
        scheme=SCHEMES["unquantized"].name,
        format="standard",
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        activations=tuple(MoEActivation),
        architectures=(80, 90, 100, 120),
        measured=("H200",),
    ),
)


def support_table() -> str:
    """The table of the README, as Markdown."""
    lines = [
        "| scheme | format | dtypes | activations | CPU | GPU kernels compiled for | run on |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in SUPPORT:
        dtypes = ", ".join(str(d).removeprefix("torch.") for d in row.dtypes)
        every = len(row.activations) == len(MoEActivation)
        names = (
            f"all {len(MoEActivation)}" if every else ", ".join(a.value for a in row.activations)
        )
        architectures = ", ".join(f"sm_{a}" for a in row.architectures)
        lines.append(
            f"| {row.scheme} | {row.format} | {dtypes} | {names} | yes | {architectures} "
            f"| {', '.join(row.measured)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(support_table())
