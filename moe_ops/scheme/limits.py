"""The rules of a `Scheme`: which combinations of quantized operands operators compute.

References, fakes and kernels rely on these rules without checking them, and compute every
combination that the rules allow.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_ops.scheme.values import WHOLE, Quant

ROW_ELEMENTS = ("fp8", "int8", "fp4", "fp6_e2m3", "fp6_e3m2")
"""Elements that rows are quantized to. Integers with an offset are stored offline only."""
SMALL = ("fp4", "fp6_e2m3", "fp6_e3m2", "int4")
"""Elements of at most 4 significant bits: times an e4m3 scale they are exact in bf16."""
EXACT_SCALES = ("pow2", "e8m0", "e4m3")
"""Forms of group scales that multiply numbers in bf16 without rounding them."""
SMALLEST_GROUP = 16

Refusal = tuple[type[Exception], str]
"""The exception to raise, and its text."""
_Rules = Iterator[tuple[bool, type[Exception], str, str, object]]
"""Whether the rule holds, the exception if not, the field, the rule and the field's value."""


def dequantizes_both(activation: Quant, weight: Quant) -> bool:
    """Whether a GEMM dequantizes both operands instead of multiplying stored values."""
    # Compared by name: comparing the tuples reads the float `largest`, which Dynamo of torch 2.11
    # makes an input of the graph until a tensor operation uses it, and then compiles everything
    # again.
    a, w = activation.element, weight.element
    return a.name != w.name or a.bits < 8 or activation.scale in ("e8m0", "e4m3")


def refusal(activation: Quant | None, weight: Quant | None) -> Refusal | None:
    """Why no operator computes operands quantized so; None: all of them do.

    Returns:
        The class of the error and its text, or None.
    """
    for holds, error, name, rule, value in _rules(activation, weight):
        if not holds:
            return error, f"scheme.{name} must {rule}, got {value}"
    return None


def _rules(activation: Quant | None, weight: Quant | None) -> _Rules:
    if weight is None:
        alone = activation is None
        yield alone, NotImplementedError, "weight", "be quantized if activations are", None
        return
    yield from _weight_rules(weight)
    if activation is not None:
        yield from _activation_rules(activation)
        yield (
            not weight.zero_point,
            NotImplementedError,
            "weight.zero_point",
            ("be False if activations are quantized"),
            True,
        )
        if dequantizes_both(activation, weight):
            yield from _dequantized_rules(activation, weight)
        else:
            yield from _multiplied_rules(activation, weight)


def _group_rules(name: str, quant: Quant) -> _Rules:
    sizes = [n for n in quant.group if n not in (1, WHOLE)]
    rule = f"have sizes that are powers of two >= {SMALLEST_GROUP}, or WHOLE"
    good = all(n >= SMALLEST_GROUP and n & (n - 1) == 0 for n in sizes) and quant.group.cols != 1
    yield good, ValueError, f"{name}.group", rule, quant.group
    rows, cols = quant.group
    spans = rows in (1, WHOLE) if cols == WHOLE else rows != WHOLE
    rule = "have one row or all rows if it spans K, and not all rows otherwise"
    yield spans, NotImplementedError, f"{name}.group", rule, quant.group


def _weight_rules(quant: Quant) -> _Rules:
    yield from _group_rules("weight", quant)
    element, scale, group = quant.element.name, quant.scale, quant.group
    yield not quant.static, ValueError, "weight.static", "be False: weights are data", True
    if scale == "vector":
        yield quant.per_row, ValueError, "weight.group", "be (1, WHOLE) for vector scales", group
    if scale == "e4m3":
        rule = f"be in {SMALL} for e4m3 scales"
        yield element in SMALL, NotImplementedError, "weight.element", rule, element
    if scale == "pow2":  # the quantizer of int4 does not round scales up
        rule = "not be int4 for pow2 scales"
        yield element != "int4", NotImplementedError, "weight.element", rule, element
    if quant.global_scale:
        rule = "be e4m3 with a global scale"
        yield scale == "e4m3", NotImplementedError, "weight.scale", rule, scale
    if quant.zero_point:
        rule = "be stored with an offset (int4, uint8) with zero points"
        yield quant.element.offset > 0, ValueError, "weight.element", rule, element
        rule = "be float32 or input with zero points"
        has_zero_points = scale in ("float32", "input")
        yield has_zero_points, NotImplementedError, "weight.scale", rule, scale
        rule = "have one row with zero points"
        yield group.rows == 1, NotImplementedError, "weight.group", rule, group


def _activation_rules(quant: Quant) -> _Rules:
    yield from _group_rules("activation", quant)
    element, scale, group = quant.element.name, quant.scale, quant.group
    rule = f"be in {ROW_ELEMENTS}"
    yield element in ROW_ELEMENTS, NotImplementedError, "activation.element", rule, element
    rule = "have one row, or all rows and columns"
    whole = group.rows == 1 or quant.per_tensor
    yield whole, NotImplementedError, "activation.group", rule, group
    is_written = scale in ("float32", "pow2", "e8m0", "e4m3")
    rule = "be float32, pow2, e8m0 or e4m3"
    yield is_written, NotImplementedError, "activation.scale", rule, scale
    rule = "be False"
    yield not quant.zero_point, NotImplementedError, "activation.zero_point", rule, True
    if scale in ("e8m0", "e4m3"):
        rule = f"have columns for {scale} scales"
        yield quant.local, NotImplementedError, "activation.group", rule, group
    if scale == "e4m3":
        rule = "be a float of fewer than 8 bits for e4m3 scales"
        small = quant.element.exponent > 0
        yield small, NotImplementedError, "activation.element", rule, element
    if quant.static:
        rule = "be (WHOLE, WHOLE) if the scale is static"
        yield quant.per_tensor, NotImplementedError, "activation.group", rule, group
        rule = "be float32 if it is static"
        yield scale == "float32", NotImplementedError, "activation.scale", rule, scale
    if quant.global_scale:
        rule = "be e4m3 with a global scale"
        yield scale == "e4m3", NotImplementedError, "activation.scale", rule, scale


def _dequantized_rules(activation: Quant, weight: Quant) -> _Rules:
    """Group scales multiply the numbers in bf16, which must not round."""
    for name, quant in (("activation", activation), ("weight", weight)):
        exact = quant.group.cols == WHOLE or quant.scale in EXACT_SCALES
        rule = f"be in {EXACT_SCALES} for groups of columns if both operands are dequantized"
        yield exact, NotImplementedError, f"{name}.scale", rule, quant.scale
    if activation.global_scale:
        rule = "be True if the activations have a global scale"
        yield weight.global_scale, NotImplementedError, "weight.global_scale", rule, False


def _multiplied_rules(activation: Quant, weight: Quant) -> _Rules:
    """Stored values are multiplied: a group along K has one scale of each operand."""
    cols, shared = weight.group.cols, activation.group.cols
    rule = f"have {'all' if shared == WHOLE else shared} columns, as scheme.activation.group has"
    yield cols == shared, NotImplementedError, "weight.group", rule, weight.group
