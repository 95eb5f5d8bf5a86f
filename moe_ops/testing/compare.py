"""Whether results are right: budgets for each row and for a whole layer."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_matches_reference(actual: Tensor, exact: Tensor, reference: Tensor) -> None:
    """Every row of ``actual`` is as close to ``exact`` as the reference's own error allows.

    The budget of a row is ``2 * (largest error of the reference in it + eps * largest |exact|)``;
    shape, dtype and contiguity are those of the reference.

    Raises:
        AssertionError: naming the row that is furthest over its budget.
    """
    _assert_same_kind(actual, reference)
    if actual.numel():
        error, allowed, largest = _row_errors(actual, exact, reference)
        _assert_rows(error, 2 * (allowed + torch.finfo(actual.dtype).eps * largest))


def assert_layer_matches(actual: Tensor, exact: Tensor, reference: Tensor) -> None:
    """For a layer: budgets for each row, and for the whole.

    Rows as in `assert_matches_reference`, where a row in which the reference was lucky has the
    error, relative to its largest number, of the median row. The whole is no further from the
    oracle than the reference: ``|actual - exact| / |exact|`` (Frobenius norms) may be 1.05 times
    that of the reference, times ``1 + 2 / sqrt(n)`` for n numbers (by so much two roundings that
    are equally good differ by chance), plus what another order of float32 sums makes.

    Raises:
        AssertionError: naming a row, or both errors.
    """
    _assert_same_kind(actual, reference)
    if actual.numel() == 0:
        return
    error, allowed, largest = _row_errors(actual, exact, reference)
    relative = allowed[largest > 0] / largest[largest > 0]
    typical = largest * relative.median() if len(relative) else largest
    allowed = torch.maximum(allowed, typical)
    _assert_rows(error, 2 * (allowed + torch.finfo(actual.dtype).eps * largest))
    norm = exact.double().norm()
    ours, theirs = ((x.detach().cpu().double() - exact).norm() for x in (actual, reference))
    chance = 1 + 2 / max(int(exact.count_nonzero()), 1) ** 0.5
    if not ours <= 1.05 * chance * theirs + 8 * torch.finfo(torch.float32).eps * norm:
        raise AssertionError(
            f"the relative error of the layer is {ours / norm:.3e}, that of a reference with the "
            f"same roundings {theirs / norm:.3e}"
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
    """The largest error of each row, that of the reference's row, and the largest number."""
    rows = (-1, actual.shape[-1])
    exact = exact.detach().cpu().double().reshape(rows)
    errors = [
        (x.detach().cpu().double().reshape(rows) - exact).abs().amax(-1)
        for x in (actual, reference)
    ]
    return errors[0], errors[1], exact.abs().amax(-1)


def _assert_rows(error: Tensor, budget: Tensor) -> None:
    """AssertionError that names the row furthest over its budget; a NaN is over."""
    over = ~(error <= budget)
    if over.any():
        excess = torch.where(over, (error - budget).nan_to_num(torch.inf), -1.0)
        worst = int(excess.argmax())
        raise AssertionError(
            f"{int(over.sum())} of {len(over)} rows are over budget; row {worst}: error "
            f"{error[worst]:.3e}, budget {budget[worst]:.3e}"
        )
