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
    if actual.shape != reference.shape or actual.dtype != reference.dtype:
        raise AssertionError(
            f"result must be {tuple(reference.shape)} {reference.dtype}, "
            f"got {tuple(actual.shape)} {actual.dtype}"
        )
    if not actual.is_contiguous():
        raise AssertionError(f"result must be contiguous, got strides {actual.stride()}")
    if actual.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    rows = (-1, actual.shape[-1])
    exact = exact.detach().cpu().double().reshape(rows)
    error = (actual.detach().cpu().double().reshape(rows) - exact).abs().amax(-1)
    allowed = (reference.detach().cpu().double().reshape(rows) - exact).abs().amax(-1)
    budget = 2 * (allowed + eps * exact.abs().amax(-1))
    over = torch.where(error <= budget, 0.0, 1.0)  # a NaN is over
    if over.any():
        excess = torch.where(error <= budget, -1.0, (error - budget).nan_to_num(torch.inf))
        worst = int(excess.argmax())
        raise AssertionError(
            f"{int(over.sum())} of {len(over)} rows are over budget; row {worst}: error "
            f"{error[worst]:.3e}, budget {budget[worst]:.3e}"
        )


def assert_layer_matches(actual: Tensor, exact: Tensor, reference: Tensor) -> None:
    """`assert_matches_reference`, and the whole is no further from the oracle than the reference.

    ``|actual - exact| / |exact|`` (Frobenius norms) may be 1.05 times that of the reference, plus
    what another order of float32 sums makes.

    Raises:
        AssertionError: naming a row, or both errors.
    """
    assert_matches_reference(actual, exact, reference)
    norm = exact.double().norm()
    error, allowed = ((x.detach().cpu().double() - exact).norm() for x in (actual, reference))
    budget = 1.05 * allowed + 8 * torch.finfo(torch.float32).eps * norm
    if not error <= budget:
        raise AssertionError(
            f"the relative error of the layer is {error / norm:.3e}, that of a reference with the "
            f"same roundings {allowed / norm:.3e}"
        )
