"""Scales that are handed over one projection at a time and that several projections share."""

from __future__ import annotations

from typing import NamedTuple


class Agreement(NamedTuple):
    """How far the scales of gate and up may be apart, and what to say if they are further apart."""

    tolerance: float
    rule: str


INPUT = Agreement(1e-5, "input_scales of w1 and w3 of a layer must be equal. But got")
SHARED = Agreement(0, "scales of w1 and w3 must be equal where their rows alternate, got")


class GivenScales:
    """Scales of one round of loading, which ends when the layer's weights are processed.

    In the next round a layer may be loaded again, with other scales.

    The input scale of a GEMM is one number for all experts: their largest. It must not depend on
    which experts a rank holds, so loaders hand over the scales of all of them.
    """

    def __init__(self) -> None:
        self._given: dict[tuple[str, int], dict[str, float]] = {}

    def take(
        self, name: str, expert: int, shard: str, scale: float, agreement: Agreement = INPUT
    ) -> float:
        """Note the scale of a projection, in place of one that was given in this round before.

        Args:
            name: of the parameter.
            expert: any number that tells the experts of this parameter apart.
            shard: ``w1``, ``w2`` or ``w3``.
            scale: its scale.
            agreement: what holds between gate and up.

        Returns:
            The larger scale of gate and up, as far as they are known.

        Raises:
            ValueError: gate and up differ.
        """
        given = self._given.get((name, expert), {})
        for known, other in given.items():
            if known != shard and abs(scale - other) > agreement.tolerance:
                raise ValueError(f"{agreement.rule} {other} vs. {scale}")
        given = self._given[name, expert] = {**given, shard: scale}
        return max(given.values())

    def largest(self, name: str) -> float:
        """The largest scale of a parameter in this round; 0 if none was given."""
        scales = (max(given.values()) for (of, _), given in self._given.items() if of == name)
        return max(scales, default=0.0)

    def clear(self) -> None:
        """Begin a new round."""
        self._given.clear()
