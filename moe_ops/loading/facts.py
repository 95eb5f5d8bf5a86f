"""How the weights of one layer's experts are stored, as the files beside them say."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from moe_ops.loading.names import CheckpointLayout
from moe_ops.scheme import UNQUANTIZED, WHOLE, Quant, Scheme, scheme_of


class UnreadError(ValueError):
    """The files say something about the experts that this library does not understand."""

    def __init__(self, rule: str, layout: CheckpointLayout | None = None) -> None:
        super().__init__(rule)
        self.layout = layout
        """How AWQ or GPTQ packs the weights, if this much is understood."""


@dataclass(frozen=True)
class Facts:
    """How the experts of a layer are stored. Without a ``weight`` they are not quantized."""

    weight: Quant | None = None
    activation: Quant | None = None
    layout: CheckpointLayout | None = None
    """How AWQ or GPTQ packs the weights, as far as it is said; None: another tool stored them."""

    def scheme(self) -> Scheme:
        """Return the scheme; raises as `get_scheme` if operators do not compute it."""
        return UNQUANTIZED if self.weight is None else scheme_of(self.activation, self.weight)

    def fits(self, quant: Quant | None) -> bool:
        """Whether a layer whose weights are quantized so can take the stored ones.

        The form of the scales and an offset of integers are not compared, because loading converts
        them. A scheme with zero points takes weights without them.
        """
        if self.weight is None or quant is None:
            return self.weight is quant
        stored, rows = self.weight, {self.weight.group.rows, quant.group.rows}
        return (
            _kind(stored) == _kind(quant)
            and stored.group.cols == quant.group.cols
            and (len(rows) == 1 or rows == {1, WHOLE})
            and stored.zero_point <= quant.zero_point
        )

    def merged(self, other: Facts) -> Facts:
        """Return what two files say together.

        Names such as NVFP4 do not say whether activations are quantized, so a file that says they
        are not decides.

        Raises:
            ValueError: the files contradict each other.
        """
        activations = {self.activation, other.activation}
        agree = len(activations) == 1 or None in activations
        if self.weight != other.weight or not agree or (not self.layout) != (not other.layout):
            raise ValueError(f"{self} and {other}")
        activation = None if None in activations else self.activation
        layout = self.layout and with_known(self.layout, other.layout or CheckpointLayout())
        return Facts(self.weight, activation, layout)

    def __str__(self) -> str:
        if self.weight is None:
            return "weights that are not quantized"
        cols = self.weight.group.cols
        groups = "one scale a row or tensor" if cols == WHOLE else f"groups of {cols} columns"
        zero_points = " and zero points" if self.weight.zero_point else ""
        return f"{_kind(self.weight)} in {groups}{zero_points}"


def with_known(stated: CheckpointLayout | None, layout: CheckpointLayout) -> CheckpointLayout:
    """Return a layout with what files say about it.

    Args:
        stated: what files say; None: neither AWQ nor GPTQ stored the weights.
        layout: the layout that a caller gave.

    Raises:
        ValueError: the layout contradicts the files.
    """
    if stated is None:
        if layout.awq is not None:
            raise ValueError(f"awq=None, for weights of another tool, got {layout}")
        return layout
    for field in fields(layout):
        value, chosen = getattr(stated, field.name), getattr(layout, field.name)
        if value is not None and chosen not in (None, value):
            raise ValueError(f"{field.name}={value}, got {layout}")
        layout = replace(layout, **{field.name: value if chosen is None else chosen})
    return layout


def _kind(quant: Quant) -> str:
    """The element's name, without the offset of stored integers."""
    return "int8" if quant.element.name == "uint8" else quant.element.name
