"""e4m3 numbers that are negative or NaN, and comparisons of what products make of them."""

import torch

from moe_ops.testing import assert_matches_reference

NANS = (0x7F, 0xFF)
"""Bytes that are NaN in e4m3."""


def negated(scale, seed=2):
    """About half of the scales negative."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, scale.shape, dtype=torch.uint8, generator=generator) << 7
    return (scale.view(torch.uint8) ^ signs).view(scale.dtype)


def with_byte(x, at, byte):
    """A copy of ``x`` with another byte at one place."""
    x = x.clone()
    x.view(torch.uint8)[at] = byte
    return x


def assert_same_nans(actual, exact, expected):
    """NaN where the reference has it; elsewhere as `assert_matches_reference`.

    ``exact``: any numbers where the reference has NaN.
    """
    nan, value = expected.isnan(), getattr(exact, "value", exact)
    assert torch.equal(actual.isnan(), nan)
    actual, expected = (torch.where(nan, value.to(x.dtype), x) for x in (actual, expected))
    assert_matches_reference(actual, exact, expected)
