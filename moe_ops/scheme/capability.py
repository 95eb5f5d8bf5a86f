"""Which GPUs run a scheme, and what others run in its place."""

from __future__ import annotations

from moe_ops.scheme.named import SCHEMES
from moe_ops.scheme.values import Scheme, min_capability


def schemes_instead(scheme: Scheme, capability: int) -> tuple[str, tuple[str, ...]]:
    """What a GPU of a compute capability (times ten) runs in place of a scheme.

    Returns:
        What becomes of the weights, and the names of schemes: those that take the very weights that
        are stored; if there are none, those that quantize weights only, to the same element.
    """
    able = [s for s in SCHEMES.values() if min_capability(s.activation) <= capability]
    same = tuple(s.name for s in able if s.weight == scheme.weight)
    if same or scheme.weight is None:
        return "the same weights", same
    element = scheme.weight.element
    alike = [s for s in able if s.activation is None and s.weight and s.weight.element == element]
    return "weights quantized anew", tuple(s.name for s in alike)


def what_lacks(scheme: Scheme, capability: int) -> str | None:
    """Why a GPU of a compute capability (times ten) cannot run a scheme, and what works there.

    None where it can.
    """
    lowest = min_capability(scheme.activation)
    if capability >= lowest:
        return None
    why = "8-bit floats" if lowest > min_capability(None) else "matrix products"
    weights, names = schemes_instead(scheme, capability)
    works = f"{' or '.join(names)} would ({weights})" if names else "nothing would"
    return f"{scheme.name} does not run on sm_{capability}, {why} need sm_{lowest}: {works}"
