"""Exact numbers with a bound on the error of computing them in float32 with given roundings.

The bound follows from the problem alone (running error analysis): unit roundoffs of the specified
roundings, the lengths of float32 sums, half a quantization step of each quantized number. So a bug
in a reference cannot widen the bound. The analysis is first order. Rounding errors are taken as
independent and uniform within half a step, so the variances of a sum's terms add up.

Source:
    Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019: the error of a
    sum of n terms exceeds ``s * sqrt(n) * u`` with a probability below ``2 exp(-s**2 / 2)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_ops.activation import Formula
from moe_ops.reference import activation as activations
from moe_ops.scheme import Element, Quant

SIGMAS = 8.0
"""Bound of a sum of errors in standard deviations; ``2 exp(-32)``, 3 in 10**14, exceed it."""
UNIT = torch.finfo(torch.float32).eps / 2
"""Unit roundoff of float32."""
_FUNCTION_ROUNDINGS = 8.0
"""Error of a float32 activation in unit roundoffs, relative to its result and to ``g * u``."""


@dataclass(frozen=True)
class Bounded:
    """Exact numbers, and bounds on the errors of their float32 computation.

    ``x[rows]`` selects rows of all three tensors.
    """

    value: Tensor
    """float64."""
    variance: Tensor
    """Variance of the errors that have passed through sums of many terms."""
    limit: Tensor
    """Bound on the absolute error of the roundings since the last such sum."""

    @classmethod
    def exactly(cls, value: Tensor) -> Bounded:
        """Numbers without errors, on the CPU."""
        value = value.detach().cpu().double()
        return cls(value, torch.zeros_like(value), torch.zeros_like(value))

    @classmethod
    def unbounded(cls, value: Tensor) -> Bounded:
        """Numbers with an infinite bound, because their computation is not known."""
        return cls(value, torch.full_like(value, torch.inf), torch.zeros_like(value))

    @property
    def bound(self) -> Tensor:
        """Bound on the absolute error of each number."""
        return SIGMAS * self.variance.sqrt() + self.limit

    def __getitem__(self, rows: Tensor | slice | tuple[Tensor | slice, ...]) -> Bounded:
        """Select rows of all three tensors."""
        return self._each(lambda x: x[rows])

    def unflatten(self, *sizes: int) -> Bounded:
        """Split the first axis into several."""
        return self._each(lambda x: x.unflatten(0, sizes))

    def products(self, w: Tensor, expert: Tensor, stored: torch.dtype | None = None) -> Bounded:
        """Each row times the weight of its expert, summed in float32; zeros without an expert.

        Args:
            w: ``(E, N, K)``, the dequantized weights.
            expert: ``(R,)`` expert of each row, -1 for none.
            stored: dtype that the weights are rounded to before the product.
        """
        out = Bounded.exactly(self.value.new_zeros(len(self.value), w.shape[1]))
        variance = self.variance + self.limit**2 / 3
        # Roundings of a sum of n terms, and of the products with scales.
        roundings = UNIT * (min(w.shape[2], SIGMAS * w.shape[2] ** 0.5) + 4)
        for e in expert.unique().tolist():
            if e < 0:
                continue
            mine, weight = expert == e, w[e].detach().cpu().double().t()
            rows, terms = self.value[mine], variance[mine]
            if stored is not None:
                terms = terms + (torch.finfo(stored).eps / 2 * rows) ** 2 / 3
            out.value[mine] = rows @ weight
            if terms.any():
                out.variance[mine] = terms @ weight.square()
            out.limit[mine] = roundings * (rows.abs() @ weight.abs())
        return out

    def plus(self, x: Tensor) -> Bounded:
        """Add exact numbers in float32."""
        return replace(self, value=self.value + x.cpu().double())._rounded_by(UNIT)

    def times(self, factor: Tensor) -> Bounded:
        """Multiply by exact numbers in float32."""
        factor = factor.detach().cpu().double()
        scaled = (self.value * factor, self.variance * factor**2, self.limit * factor.abs())
        return Bounded(*scaled)._rounded_by(UNIT)

    def activated(self, rule: Formula) -> Bounded:
        """Apply the activation in float32.

        Errors are propagated by differences instead of derivatives: the variance from the changes
        at two standard deviations, the limit from the largest change at the limits. Where a clamp
        or a ReLU hides these changes, a sixteenth of the variance at SIGMAS deviations counts.
        """
        g, u = activations.split(self.value, rule)
        value = activations.apply(g, u, rule)

        def changes(off: Tensor) -> Tensor:
            off_g, off_u = activations.split(off, rule)
            ups = [None] if u is None or off_u is None else [u - off_u, u + off_u]
            gates = (g - off_g, g + off_g)
            return torch.stack([activations.apply(a, b, rule) - value for a in gates for b in ups])

        size = value.abs() + g.abs() * (1 if u is None else u.abs() + abs(rule.beta))
        limit = changes(self.limit).abs().amax(0) + _FUNCTION_ROUNDINGS * UNIT * size
        near, far = ((changes(m * self.variance.sqrt()) / m).square().mean(0) for m in (2, SIGMAS))
        return Bounded(value, torch.maximum(near, far / 16), limit)

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """Round to a dtype."""
        kind = torch.finfo(dtype)
        return self._rounded_by(kind.eps / 2, kind.smallest_normal * kind.eps / 2)

    def quantized(self, quant: Quant | None, scale_in: Tensor | None = None) -> Bounded:
        """Quantize and dequantize: half a step per number, plus what a given scale clips.

        Args:
            quant: the quantization; None: none. A per-tensor scale is shared by all rows.
            scale_in: the static scale or the global scale.
        """
        if quant is None:
            return self
        element, size = quant.element, self.value.abs()
        most = size + 3 * self.variance.sqrt() + self.limit
        scale = _specified_scale(most, quant, scale_in)
        typical = (size.square() + self.variance).sqrt() + self.limit
        step = scale * _half_step(typical / scale, element)
        cut = (size - element.largest * scale - step).clamp(min=0)
        step = torch.where(scale == 0, most, torch.minimum(step, size + self.bound))
        variance = self.variance + step.nan_to_num(0.0) ** 2 / 3
        return replace(self, variance=variance, limit=self.limit + cut)._rounded_by(4 * UNIT)

    def weighted_sum(self, weights: Tensor) -> Bounded:
        """``(T, k, N)`` times ``(T, k)``, summed over k in float32.

        Deviations of slots add up linearly, not by their squares: if a token has an expert twice,
        the errors of both slots are equal.
        """
        weights = weights.detach().cpu().double()[..., None]
        deviation = (weights.abs() * self.variance.sqrt()).sum(1)
        size = (weights.abs() * self.value.abs()).sum(1)
        limit = (weights.abs() * self.limit).sum(1) + (weights.shape[1] + 1) * UNIT * size
        return Bounded((weights * self.value).sum(1), deviation**2, limit)

    def _rounded_by(self, relative: float, least: float = 0.0) -> Bounded:
        size = self.value.abs() + self.bound
        step = torch.minimum((relative * size).clamp(min=least), size)
        return replace(self, limit=self.limit + step)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Bounded:
        return Bounded(change(self.value), change(self.variance), change(self.limit))


def _half_step(size: Tensor, element: Element) -> Tensor:
    """Half the distance between neighbouring numbers of an element at magnitude ``size``."""
    if element.name == "fp8":
        mantissa, smallest = 3, -6
    elif element.exponent:
        mantissa, smallest = _mantissa(element), 2 - 2 ** (element.exponent - 1)
    else:
        return torch.full_like(size, 0.5)
    return 2.0 ** (_exponent(size).clamp(smallest, _largest(element)) - mantissa - 1)


def _mantissa(element: Element) -> int:
    """Mantissa bits of a float narrower than a byte."""
    return element.bits - 1 - element.exponent


def _largest(element: Element) -> int:
    """The exponent of an element's largest number."""
    return math.frexp(element.largest)[1] - 1


def _specified_scale(size: Tensor, quant: Quant, scale_in: Tensor | None) -> Tensor:
    """The scale of each number from the specification, independent of the library's quantizer."""
    factor = 1.0 if scale_in is None else float(scale_in.max())
    if scale_in is not None and not quant.global_scale:
        return torch.full_like(size, factor)
    raw = _amax(size, quant) / quant.element.largest / factor
    if quant.scale == "e4m3":
        raw = raw.clamp(max=448).to(torch.float8_e4m3fn).double()
    elif quant.scale == "e8m0" and quant.element.exponent:
        element = (
            quant.element
        )  # the largest magnitude is rounded to the element, and so may reach the next exponent
        near = 1 - 2.0 ** -(_mantissa(element) + 2)
        raw = 2.0 ** (_exponent(raw * element.largest / near) - _largest(element))
    elif quant.scale in ("pow2", "e8m0"):
        raw = 2.0 ** -_exponent(1 / raw.clamp(min=1e-30))
    return raw * factor


def _exponent(x: Tensor) -> Tensor:
    """``floor(log2(x))``."""
    return (torch.frexp(x.clamp(min=1e-300))[1] - 1).double()


def _amax(size: Tensor, quant: Quant) -> Tensor:
    """The largest magnitude of each number's group, for rows ``(R, K)``."""
    if size.numel() == 0 or quant.per_tensor:
        return size.new_full((1, 1), float(size.max()) if size.numel() else 0.0).expand_as(size)
    cols = quant.shared_cols or size.shape[1]
    groups = torch.nn.functional.pad(size, (0, -size.shape[1] % cols)).unflatten(1, (-1, cols))
    return groups.amax(2).repeat_interleave(cols, 1)[:, : size.shape[1]]
