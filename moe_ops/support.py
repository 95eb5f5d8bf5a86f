"""The support table as data, from which the table of schemes and the compile tests are made."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ops.activation import MoEActivation
from moe_ops.dispatch.blackwell import BLOCK_SCALED
from moe_ops.scheme import SCHEMES, min_capability

ARCHITECTURES = (80, 90, 100, 120)
"""CUDA compute capabilities (times ten) that the tests compile kernels for."""


class Support(NamedTuple):
    """One row of the table: a scheme in an activation format."""

    scheme: str
    format: str
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of activations (and of weights, if they are not quantized)."""
    activations: tuple[MoEActivation, ...]
    architectures: tuple[int, ...]
    """CUDA compute capabilities (times ten) that the tests compile the kernels for."""
    measured: tuple[str, ...]
    """GPUs that the kernels have run on."""


MEASURED = {"H100": 90, "H200": 90}
"""GPUs on which the tests of every scheme have run in both formats, with their architecture."""

SUPPORT = tuple(
    Support(
        scheme=scheme.key,
        format=layout,
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        activations=tuple(MoEActivation),
        architectures=tuple(a for a in ARCHITECTURES if a >= min_capability(scheme.activation)),
        measured=tuple(MEASURED),
    )
    for scheme in SCHEMES.values()
    for layout in ("standard", "batched")
)


def block_scaled_note() -> str:
    """The note about block-scaled matrix instructions of Blackwell."""
    where = {
        f"`{name}`": ", ".join(f"sm_{a}" for a, names in BLOCK_SCALED.items() if name in names)
        for name in SCHEMES
    }
    texts: dict[str, list[str]] = {}
    for name, architectures in where.items():
        if architectures:
            texts.setdefault(architectures, []).append(name)
    lines = "; ".join(f"{', '.join(names)} on {on}" for on, names in texts.items())
    return (
        f"Block-scaled matrix instructions multiply these schemes as stored: {lines}. The tests "
        "compile that path for those GPUs and interpret it; **it has not run on one**. On other "
        "GPUs the kernel dequantizes both operands to bf16."
    )


def support_table() -> str:
    """The support table as Markdown; formats with equal entries share a line."""
    lines = [
        "| scheme | format | dtypes | activations | CPU | GPU kernels compiled for | run on |",
        "|---|---|---|---|---|---|---|",
    ]
    formats: dict[Support, list[str]] = {}
    for row in SUPPORT:
        formats.setdefault(row._replace(format=""), []).append(row.format)
    for row, layouts in formats.items():
        dtypes = ", ".join(str(d).removeprefix("torch.") for d in row.dtypes)
        every = len(row.activations) == len(MoEActivation)
        names = (
            f"all {len(MoEActivation)}" if every else ", ".join(a.value for a in row.activations)
        )
        architectures = ", ".join(f"sm_{a}" for a in row.architectures)
        measured = ", ".join(row.measured) or "-"
        lines.append(
            f"| {row.scheme} | {', '.join(layouts)} | {dtypes} | {names} | yes | {architectures} "
            f"| {measured} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(support_table(), block_scaled_note(), sep="\n\n")
