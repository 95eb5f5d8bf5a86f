"""Operands of a scheme, from the words in which quantization tools describe them.

The words come from compressed-tensors (``QuantizationArgs``): `operands` is the inverse of
`moe_ops.loading.compressed.config_group`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_ops.loading.compressed import INTEGERS
from moe_ops.loading.facts import Facts, UnreadError
from moe_ops.loading.names import CheckpointLayout
from moe_ops.scheme import WHOLE, Group, Quant, get_scheme
from moe_ops.scheme.values import ELEMENTS

Settings = Mapping[str, Any]
TENSOR, ROW = Group(WHOLE, WHOLE), Group(1, WHOLE)
_ELEMENTS = {("float", 8): "fp8", ("float", 4): "fp4", ("int", 8): "int8", ("int", 4): "int4"}


def named(name: str) -> Facts:
    """Return the operands of a scheme's name, which may hold sizes that a file gives."""
    try:
        scheme = get_scheme(name)
    except (NotImplementedError, ValueError) as error:
        raise UnreadError(f"sizes of a scheme ({error})") from None
    return Facts(scheme.weight, scheme.activation)


def integers(
    bits: Any, group_size: Any, *, zero_point: bool, layout: CheckpointLayout | None = None
) -> Facts:
    """Return integer weights under activations that are not quantized.

    Args:
        bits: 4 or 8.
        group_size: columns that share a scale, or `WHOLE`.
        zero_point: whether groups have zero points.
        layout: how AWQ or GPTQ packs the weights.
    """
    if bits not in (4, 8) or not _is_size(group_size, WHOLE):
        raise UnreadError("bits that are 4 or 8 and a group_size", layout)
    if group_size == WHOLE and bits == 8 and not zero_point:
        weight = Quant(ELEMENTS["int8"], ROW, "vector")
    else:
        element = ELEMENTS["int4" if bits == 4 else "uint8"]
        weight = Quant(element, Group(1, group_size), "input", zero_point=zero_point)
    return Facts(weight, None, layout)


def operands(weights: Settings, inputs: Settings) -> Facts:
    """Return the operands of one group of modules.

    Args:
        weights: how weights are quantized.
        inputs: how activations are; empty: they are not.
    """
    element, group = _element(weights), _group(weights)
    symmetric = weights.get("symmetric") is not False
    if element in INTEGERS and group.rows == 1 and not inputs:
        return integers(ELEMENTS[element].bits, group.cols, zero_point=not symmetric)
    if not symmetric or inputs.get("symmetric") is False:
        raise UnreadError("zero points of integer weights alone, in groups or rows")
    if element == "int4" and inputs and group.cols != WHOLE:
        if _element(inputs) != "fp8" or inputs.get("strategy") not in (None, "token"):
            raise UnreadError("fp8 activations with one scale a token beside int4 weights")
        return named(f"int4_w4a8_g{group.cols}")
    weight = _quant(element, group)
    return Facts(weight, _row_quant(inputs, weight) if inputs else None)


def _quant(element: str, group: Group) -> Quant:
    """Return an operand. Formats of MX and NVFP4 have scales of one byte."""
    if element == "fp4" and group == (1, 16):
        return Quant(ELEMENTS["fp4"], group, "e4m3", global_scale=True)
    if element not in INTEGERS and group == (1, 32):
        return Quant(ELEMENTS[element], group, "e8m0")
    if ELEMENTS[element].exponent:
        raise UnreadError("groups of 16 or 32 columns for small floats")
    return Quant(ELEMENTS[element], group)


def _row_quant(inputs: Settings, weight: Quant) -> Quant:
    """Return how rows are quantized: in the weight's groups, if their size is not said."""
    element, strategy = _element(inputs), inputs.get("strategy")
    if strategy in ("token", "channel"):
        return Quant(ELEMENTS[element], ROW)
    if strategy == "tensor":
        return Quant(ELEMENTS[element], TENSOR, static=not inputs.get("dynamic", False))
    cols = inputs.get("group_size") or weight.group.cols
    if not _is_size(cols):
        raise UnreadError("the strategy of activations")
    return _quant(element, Group(1, cols))


def _element(settings: Settings) -> str:
    """Return the name of an `Element`."""
    bits = settings.get("num_bits")
    default = _ELEMENTS.get((str(settings.get("type", "int")), bits)) if type(bits) is int else None
    name = settings.get("element", default)
    if name is None:
        raise UnreadError("a type and num_bits that are known")
    return str(name)


def _group(weights: Settings) -> Group:
    """Return the group of a weight's scales."""
    strategy: Any = weights.get("strategy")
    size: Any = weights.get("group_size")
    if strategy in ("tensor", "channel"):
        return TENSOR if strategy == "tensor" else ROW
    if strategy == "block":
        return Group(*pair(weights.get("block_structure") or (128, 128)))
    if strategy in (None, "group", "tensor_group") and _is_size(size, WHOLE):
        return Group(1, size)
    raise UnreadError("the strategy and group_size of weights")


def pair(block: Any) -> tuple[int, int]:
    """Return the rows and columns of a block; older files of compressed-tensors say ``128x128``."""
    sizes = [int(n) for n in block.split("x") if n.isdigit()] if isinstance(block, str) else block
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2 or not all(map(_is_size, sizes)):
        raise UnreadError("the size of a block as two numbers")
    return sizes[0], sizes[1]


def _is_size(number: Any, *others: int) -> bool:
    return type(number) is int and (number > 0 or number in others)
