"""The GPUs that can run a scheme, and the schemes that other GPUs can run instead."""

from __future__ import annotations

from moe_ops.scheme.named import SCHEMES, Scheme
from moe_ops.scheme.values import min_capability


def schemes_instead(scheme: Scheme, capability: int) -> tuple[str, tuple[str, ...]]:
    """Schemes that a GPU of a compute capability (times ten) can run instead of a scheme.

    Returns:
        What happens to the weights, and the names of the schemes. These take the same stored
        weights; if there are none, the schemes that quantize weights only, to the same element.
    """
    able = [s for s in SCHEMES.values() if min_capability(s.activation) <= capability]
    same = tuple(s.name for s in able if s.weight == scheme.weight)
    if same or scheme.weight is None:
        return "the same weights", same
    element = scheme.weight.element
    alike = [s for s in able if s.activation is None and s.weight and s.weight.element == element]
    return "requantized weights", tuple(s.name for s in alike)


def what_lacks(scheme: Scheme, capability: int) -> str | None:
    """Why a GPU of a compute capability (times ten) cannot run a scheme, and what would work.

    None if the GPU can run it.

    Returns:
        A sentence with the rule and the schemes that would run, or None.
    """
    lowest = min_capability(scheme.activation)
    if capability >= lowest:
        return None
    why = "8-bit floats" if lowest > min_capability(None) else "matrix products"
    weights, names = schemes_instead(scheme, capability)
    works = f"{' or '.join(names)} would ({weights})" if names else "nothing would"
    return f"{scheme.name} does not run on sm_{capability}, {why} need sm_{lowest}: {works}"
