"""Scales that several projections share, while loaders pass them one at a time."""

from __future__ import annotations

from typing import NamedTuple


class Agreement(NamedTuple):
    """How much the scales of gate and up may differ, and the error message if they differ more."""

    tolerance: float
    rule: str


INPUT = Agreement(1e-5, "input_scales of w1 and w3 of a layer must be equal. But got")
SHARED = Agreement(0, "scales of w1 and w3 must be equal where their rows alternate, got")


class GivenScales:
    """The scales of one round of loading, which ends when the layer's weights are processed.

    In the next round the layer may be loaded with other scales.

    The input scale of a GEMM is one number for all experts: the largest of theirs. It must not
    depend on which experts a rank holds, so loaders pass the scales of all experts.
    """

    def __init__(self) -> None:
        self._given: dict[tuple[str, int], dict[str, float]] = {}

    def take(
        self, name: str, expert: int, shard: str, scale: float, agreement: Agreement = INPUT
    ) -> float:
        """Note the scale of a projection; it replaces an earlier one of this round.

        Args:
            name: name of the parameter.
            expert: any number that identifies the expert among the experts of this parameter.
            shard: ``w1``, ``w2`` or ``w3``.
            scale: the projection's scale.
            agreement: how gate and up must agree.

        Returns:
            The larger scale of gate and up, or the one that is known.

        Raises:
            ValueError: gate and up differ.
        """
        scales = self._given.get((name, expert), {})
        for earlier, other in scales.items():
            if earlier != shard and abs(scale - other) > agreement.tolerance:
                raise ValueError(f"{agreement.rule} {other} vs. {scale}")
        scales = self._given[name, expert] = {**scales, shard: scale}
        return max(scales.values())

    def largest(self, name: str) -> float:
        """Return the largest scale of a parameter in this round; 0 if there is none."""
        scales = (max(by_shard.values()) for (of, _), by_shard in self._given.items() if of == name)
        return max(scales, default=0.0)

    def clear(self) -> None:
        """Begin a new round."""
        self._given.clear()
