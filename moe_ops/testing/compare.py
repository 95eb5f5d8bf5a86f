"""Comparison of results with the oracle: error budgets per row and for a whole layer.

Three checks are made. The reference is as close to the oracle as its roundings allow (`Bounded`),
so that no bug in it widens a budget. Each row of the result is about as close to the oracle as the
reference. And neither result nor reference is scaled as a whole: rounding errors point in any
direction, the error of a wrong factor points along the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.testing.bounds import Bounded

_FLOAT32 = 8 * torch.finfo(torch.float32).eps
"""Error of a different summation order in float32, relative to the result."""
_COARSEST = 0.25
"""Unit roundoff of e2m1, the coarsest element."""


def assert_matches_reference(actual: Tensor, exact: Tensor | Bounded, reference: Tensor) -> None:
    """Assert that every row of ``actual`` is as close to ``exact`` as the reference's error allows.

    The budget of a row is ``2 * (largest error of the reference in it + eps * largest |exact|)``.
    Shape and dtype must be as in the reference, and ``actual`` contiguous. Neither tensor may be
    scaled as a whole: ``|<x - exact, exact>|`` is at most six times the norm of its parts by rows,
    plus a rounding of the dtype or twice the squared error.

    Args:
        actual: the result.
        exact: the oracle in float64. If it is a `Bounded` (from `bounded_oracle`), the reference
            must be within its bound. With a plain tensor the reference is trusted, unless it is
            scaled as a whole by more than a quarter, the unit roundoff of the coarsest element.
        reference: the same computation in the dtype of ``actual``.

    Raises:
        AssertionError: with the number of the reference that is furthest over its bound, the row
            that is furthest over its budget, or the factor by which a tensor is scaled.
    """
    _assert_same_kind(actual, reference)
    if actual.numel():
        exact = _assert_reference(reference, exact)
        error, allowed, largest = _row_errors(actual, exact.value, reference)
        _assert_rows(error, 2 * (allowed + torch.finfo(actual.dtype).eps * largest))
        _assert_unscaled("the result", actual, exact)


def assert_layer_matches(actual: Tensor, exact: Tensor | Bounded, reference: Tensor) -> None:
    """Assert that a layer's output is within budgets for each row and for the whole.

    Rows and arguments as in `assert_matches_reference`, but the reference's error in a row counts
    as at least the median row's error relative to the largest number of the row. The whole may be
    about as far from the oracle as the reference: ``|actual - exact| / |exact|`` (Frobenius norms)
    may be 1.05 times that of the reference, times ``1 + 2 / sqrt(n)`` for n numbers (the chance
    difference of two equally good roundings), plus the error of a different summation order.

    Raises:
        AssertionError: as `assert_matches_reference`, or with both errors of the whole.
    """
    _assert_same_kind(actual, reference)
    if actual.numel() == 0:
        return
    exact = _assert_reference(reference, exact)
    error, allowed, largest = _row_errors(actual, exact.value, reference)
    relative = allowed[largest > 0] / largest[largest > 0]
    typical = largest * relative.median() if len(relative) else largest
    allowed = torch.maximum(allowed, typical)
    _assert_rows(error, 2 * (allowed + torch.finfo(actual.dtype).eps * largest))
    _assert_unscaled("the result", actual, exact)
    norm = exact.value.norm()
    ours, theirs = (_rows(x).sub(exact.value).norm() for x in (actual, reference))
    chance = 1 + 2 / max(int(exact.value.count_nonzero()), 1) ** 0.5
    if not ours <= 1.05 * chance * theirs + _FLOAT32 * norm:
        raise AssertionError(
            f"the relative error of the layer is {ours / norm:.3e}, that of a reference with the "
            f"same roundings {theirs / norm:.3e}"
        )


def _rows(x: Tensor) -> Tensor:
    """float64 rows on the CPU."""
    return x.detach().cpu().double().reshape(-1, x.shape[-1])


def _assert_reference(reference: Tensor, exact: Tensor | Bounded) -> Bounded:
    """Check the reference against the oracle, and return the oracle as rows."""
    if isinstance(exact, Bounded):
        exact = Bounded(*map(_rows, (exact.value, exact.variance, exact.limit)))
    else:
        exact = Bounded.unbounded(_rows(exact))
    error, bound = (_rows(reference) - exact.value).abs(), exact.bound
    over = ~(error <= bound)
    if over.any():
        excess = torch.where(over, (error / bound).nan_to_num(torch.inf), -1.0)
        row, column = divmod(int(excess.argmax()), error.shape[1])
        raise AssertionError(
            f"{int(over.sum())} numbers of the reference are further from the oracle than its "
            f"roundings allow; row {row}, column {column}: error {error[row, column]:.3e}, "
            f"bound {bound[row, column]:.3e}"
        )
    _assert_unscaled("the reference", reference, exact)
    return exact


def _assert_unscaled(name: str, x: Tensor, exact: Bounded) -> None:
    """Raise AssertionError if ``x`` as a whole is a scaled copy of the oracle.

    The component of the error along the oracle has three limits:

    * If the errors of rows are independent and symmetric, ``|sum(along)|`` exceeds six times
      ``norm(along)`` with a probability below ``2 exp(-18)`` (Hoeffding, given their sizes). The
      asymmetric part is a rounding of the dtype, or twice the squared error: small floats are
      rounded down more often, by up to 1.5 squares.
    * No element is so coarse that it scales the whole by a quarter.
    * If a bound is known, at worst all errors of a row lie along the row.
    """
    value = exact.value
    error = _rows(x) - value
    along, square = (error * value).sum(1), value.square().sum()
    off, chance = along.sum().abs(), along.norm()
    if not square > 0:
        return
    second = error.square().sum() - off**2 / square
    rounding = (torch.finfo(x.dtype).eps / 2 + _FLOAT32) * square
    measured = 6 * chance + torch.maximum(2 * second, rounding)
    coarsest = torch.maximum(_COARSEST * square, 3 * chance)
    variance = exact.variance + exact.limit**2 / 3
    bound = 6 * (value.square().sum(1) * variance.sum(1)).sum().sqrt() + 1.5 * variance.sum()
    bound = bound.nan_to_num(torch.inf) + _FLOAT32 * square  # no bound: infinite, or NaN
    allowed = torch.stack([measured, coarsest, bound]).amin()
    if not off <= allowed:
        raise AssertionError(
            f"{name} as a whole is {1 + along.sum() / square:.5f} times the oracle; roundings "
            f"allow 1 +- {allowed / square:.1e}"
        )


def _assert_same_kind(actual: Tensor, reference: Tensor) -> None:
    if actual.shape != reference.shape or actual.dtype != reference.dtype:
        raise AssertionError(
            f"result must be {tuple(reference.shape)} {reference.dtype}, "
            f"got {tuple(actual.shape)} {actual.dtype}"
        )
    if not actual.is_contiguous():
        raise AssertionError(f"result must be contiguous, got strides {actual.stride()}")


def _row_errors(actual: Tensor, exact: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: the largest error, the reference's largest error, the oracle's largest magnitude."""
    errors = [(_rows(x) - exact).abs().amax(-1) for x in (actual, reference)]
    return errors[0], errors[1], exact.abs().amax(-1)


def _assert_rows(error: Tensor, budget: Tensor) -> None:
    """Raise AssertionError with the row furthest over its budget; NaN counts as over."""
    over = ~(error <= budget)
    if over.any():
        excess = torch.where(over, (error - budget).nan_to_num(torch.inf), -1.0)
        worst = int(excess.argmax())
        raise AssertionError(
            f"{int(over.sum())} of {len(over)} rows are over budget; row {worst}: error "
            f"{error[worst]:.3e}, budget {budget[worst]:.3e}"
        )
