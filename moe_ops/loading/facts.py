"""How the weights of one layer's experts are stored, as the files beside them say."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from moe_ops.loading.names import CheckpointLayout
from moe_ops.scheme import UNQUANTIZED, WHOLE, Quant, Scheme, scheme_of


class Unread(ValueError):
    """The files say something about the experts that this library does not understand."""


@dataclass(frozen=True)
class Facts:
    """How the experts of a layer are stored. Without a ``weight`` they are not quantized."""

    weight: Quant | None = None
    activation: Quant | None = None
    layout: CheckpointLayout | None = None
    """How AWQ or GPTQ packs the weights, as far as it is said; None: another tool stored them."""

    @property
    def ignored(self) -> bool:
        """Whether the experts are not quantized."""
        return self.weight is None

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
        said, rows = self.weight, {self.weight.group.rows, quant.group.rows}
        return (
            _kind(said) == _kind(quant)
            and said.group.cols == quant.group.cols
            and (len(rows) == 1 or rows == {1, WHOLE})
            and said.zero_point <= quant.zero_point
        )

    def merged(self, other: Facts) -> Facts:
        """Return what two files say together.

        Names such as NVFP4 do not say whether activations are quantized, so a file that says they
        are not decides.

        Raises:
            ValueError: the files contradict each other.
        """
        if self.weight != other.weight or (self.layout is None) != (other.layout is None):
            raise ValueError(f"{self} and {other}")
        known = {self.activation, other.activation}
        if len(known) == 2 and None not in known:
            raise ValueError(f"{self} and {other}")
        activation = None if None in known else self.activation
        layout = self.layout and self.with_layout(other.layout or CheckpointLayout())
        return Facts(self.weight, activation, layout)

    def with_layout(self, layout: CheckpointLayout) -> CheckpointLayout:
        """Return a layout with what the files say.

        Raises:
            ValueError: the layout says something else than the files.
        """
        known = self.layout
        if known is None and layout.awq is not None:
            raise ValueError(f"no weights of AWQ or GPTQ, got {layout}")
        for field in fields(layout) if known is not None else ():
            said, given = getattr(known, field.name), getattr(layout, field.name)
            if said is not None and given not in (None, said):
                raise ValueError(f"{field.name}={said}, got {layout}")
            layout = replace(layout, **{field.name: said if given is None else given})
        return layout

    def __str__(self) -> str:
        if self.weight is None:
            return "weights that are not quantized"
        cols = self.weight.group.cols
        groups = (
            "with one scale a row or tensor" if cols == WHOLE else f"in groups of {cols} columns"
        )
        zero_points = " and zero points" if self.weight.zero_point else ""
        version = f" ({self.layout})" if self.layout is not None else ""
        return f"{_kind(self.weight)} {groups}{zero_points}{version}"


def _kind(quant: Quant) -> str:
    """The element's name, without the offset of stored integers."""
    return "int8" if quant.element.name == "uint8" else quant.element.name
