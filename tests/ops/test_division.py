"""Quotients without a division for each number: bit by bit those of true divisions.

`rounding.correct` of the kernels may round a quotient wrongly. That is seen only where `encode`
turns to the next stored value: these quotients are enumerated.
"""

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import fma
from quantize_oracle import assert_bits

from moe_ops import ops
from moe_ops.kernels._runtime.slots import next_power_of_2, row_parts

reference = importlib.import_module("moe_ops.reference.quantize")

TURNS = {
    "fp8": [k * 2.0**-10 for k in range(1, 16, 2)] + [1 + k / 16 for k in range(1, 16, 2)],
    "int8": [k + 0.5 for k in range(127)],
}
"""Where rounding turns to the next value. Those of higher exponents are the same times 2**n."""
FURTHEST = 8
"""Twice as far as a quotient may be off, see `hard_quotients`."""
SCALES = (
    1e-10 / 448, 1e-10 / 127, 2.0**-149, 1e-40, 2.0**-126, 1e-30, 0.03, 1 / 3, 1.0, 1.9999999, 7.77,
    1e20, 1e35, 2.0**127, 3e38, -0.3, float("inf"),
)  # fmt: skip


def hard_quotients(element):
    """Every x and scale whose quotient is next to where a rounded one may be a turn or not.

    Such a place is halfway between a turn and the float next to it: m = M 2**i, M odd and below
    2**25. With 24-bit integers X and S, ``|X / S 2**n - m| / m = |X 2**c - M S| / M S`` where the
    numerator is an integer, not 0 as S has no factor 2**c. A quotient is off by 2**-47 of itself
    before it is rounded: (2**-24 + 2**-24) of the first product times 2**-24 of the reciprocal. So
    only numerators up to ``2**25 2**24 2**-47 = 4`` matter, and these have few solutions.
    """
    pairs = set()
    for turn in TURNS[element]:
        for towards in (0, np.inf):
            neighbour = np.nextafter(np.float32(turn), np.float32(towards))
            middle = (float(neighbour) + turn) / 2
            odd = middle.as_integer_ratio()[0]
            assert odd % 2 and odd < 2**25
            for c in (22, 23, 24, 25, 26):
                inverse = pow(odd, -1, 2**c)
                for numerator in range(-FURTHEST, FURTHEST + 1):
                    for s in range(-numerator * inverse % 2**c, 2**24, 2**c):
                        x = (odd * s + numerator) >> c
                        if numerator and s >= 2**23 and 2**23 <= x < 2**24:
                            pairs.add((x * 2.0 ** round(np.log2(middle * s / x)), float(s)))
    return np.array(sorted(pairs), np.float32).T


def corrected(x, scale):
    """`divide` in numpy."""
    inverse = np.float32(1) / scale
    ratio = x * inverse
    return fma(fma(ratio, scale, -x), -inverse, ratio)


@pytest.mark.parametrize(("element", "fewest"), [("fp8", 150), ("int8", 1000)])
def test_hard_quotients_are_right(element, fewest):
    x, scale = hard_quotients(element)
    assert len(x) > fewest
    assert np.array_equal(corrected(x, scale), x / scale)


@given(st.integers(0, 2**32 - 1))
def test_fma(seed):
    """Rounded once: against integers, as wide as it takes."""
    g = np.random.default_rng(seed)
    a, b, c = (int(v) for v in g.integers(1, 2**24, 3))
    shift = int(g.integers(0, 50))
    exact = a * b * 2 - (c << shift)
    step = 1 << max(abs(exact).bit_length() - 24, 0)
    down, rest = divmod(exact, step)
    up = 2 * rest > step or (2 * rest == step and down % 2)
    found = fma(np.float32([a * 2]), np.float32([b]), np.float32([-(c << shift)]))
    assert int(found[0]) == (down + up) * step


def same(x, scale, key, device):
    """The kernel's numbers and scales are the reference's; a NaN's sign is nobody's."""
    arguments = (None, None, None, 0, key)
    actual = ops.moe_quantize(x.to(device), None if scale is None else scale.to(device), *arguments)
    for a, b in zip(actual, reference.moe_quantize(x, scale, *arguments), strict=True):
        nan = b.float().isnan()
        assert torch.equal(a.cpu().float().isnan(), nan)
        kind = torch.uint8 if a.element_size() == 1 else torch.int32
        assert torch.equal(a.cpu().view(kind)[~nan], b.view(kind)[~nan])


def all_bf16():
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("element", ["fp8", "int8"])
@pytest.mark.parametrize("scale", SCALES)
def test_every_bf16_over_given_scales(element, scale, device):
    x = all_bf16()
    if element == "int8":  # what a NaN becomes is not defined
        x = x[x.isfinite()]
    same(x.view(-1, 256), torch.tensor(scale), f"{element}:*x*:float32:static", device)


@pytest.mark.kernel
@pytest.mark.parametrize("element", ["fp8", "int8"])
@pytest.mark.parametrize("less", [1.0, 2.0**-90, 2.0**80])
def test_hard_quotients_over_given_scales(element, less, device):
    """Of both signs; as they are, and of numbers and scales that are far smaller or larger."""
    x, scale = (torch.from_numpy(v) for v in hard_quotients(element))
    x, scale = torch.stack([x, -x], 1) * less, scale * less
    same(x, scale, f"{element}:1x*:float32:static", device)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("quant", ["fp8:1x128:float32", "fp8:1x32:pow2", "int8:1x128:float32"])
@pytest.mark.parametrize("most", [0, 1e-38, 1e-10, 1e-5, 0.7, 1, 1.75, 3.34, 447, 1e30, 3.3e38])
def test_every_bf16_below_the_largest(quant, most, device):
    """Each group has the largest magnitude in front."""
    most, x = torch.tensor(most, dtype=torch.bfloat16), all_bf16()
    x = x[x.abs() <= most]
    cols = int(quant.split("x")[1].split(":")[0])
    x = torch.cat([x, most.expand(-len(x) % (cols - 1))]).view(-1, cols - 1)
    same(torch.cat([most.expand(len(x), 1), x], 1), None, quant, device)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(
    seed=st.integers(0, 99), size=st.floats(2.0**-126, 2.0**120, width=32),
    special=st.sampled_from((None, torch.inf, -torch.inf, -0.0, 1e-45)),
    quant=st.sampled_from(("fp8:1x128:float32", "fp8:1x*:float32", "fp8:1x128:pow2")),
)  # fmt: skip
def test_float32_of_any_size(seed, size, special, quant, device):
    x = torch.randn(4, 384, generator=torch.Generator().manual_seed(seed)) * size
    if special is not None:
        x[2, 5::7] = special
    same(x, None, quant, device)


@pytest.mark.kernel
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 16, 127, 129, 384, 768, 1100, 2880, 5120, 14336])
@pytest.mark.parametrize("quant", ["1x128", "1x*", "*x*", "*x*:static", "1x*:static"])
def test_rows_of_any_width(quant, width, rows, device):
    """Several rows to a program, several programs to a row, and rows of several parts."""
    group, *static = quant.split(":")
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).bfloat16()
    scale = torch.rand(rows if group == "1x*" else 1) + 0.01 if static else None
    same(x, scale, ":".join(("fp8", group, "float32", *static)), device)


@given(width=st.integers(1, 40000))
def test_parts_hold_a_row(width):
    cols, parts = row_parts(width)
    assert cols == next_power_of_2(cols) and (parts - 1) * cols < width <= parts * cols
    assert parts == 1 or 8 * parts * cols <= 9 * width


@pytest.mark.kernel
def test_same_rows_in_any_number(device):
    """A row is quantized as if it were alone."""
    x = torch.randn(70, 768, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    for group in ("1x128", "1x*"):
        key = f"fp8:{group}:float32"
        q, scale = ops.moe_quantize(x, None, None, None, None, 0, key)
        for row in (0, 33, 69):
            alone = ops.moe_quantize(x[row, None], None, None, None, None, 0, key)
            assert_bits(q[row, None], alone[0])
            assert_bits(scale[row, None], alone[1])
