"""The router kernels where scores tie, underflow or are no numbers, bit by bit as references.

Each way to choose experts meets every kind of logits, in the interpreter.
"""

from itertools import cycle, product

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("runs kernels in the interpreter", allow_module_level=True)

from kernel_cases import check_all, same, spaced, whole  # noqa: E402
from pairwise import cover  # noqa: E402

from moe_ops.kernels import routing  # noqa: E402

pytestmark = pytest.mark.kernel
F32 = torch.float32


def underflowing(x):
    """One score; in the second row some logits are larger than others with a lower id."""
    experts = x.shape[1]
    last = min(experts - 1, experts // 2 + 3)
    x = -150.0 - x.abs() * 20
    x[1] = -200.0
    x[1, experts // 2 : last] = -140.0 - torch.arange(last - experts // 2)
    x[:, experts // 2 - 1] = 0.0
    return x


def close(x):
    """The best scores are rounded to one number, though a later logit is larger.

    Their keys differ in more than the bits that positions replace.
    """
    x = x.abs() * -3 - 1
    x[:, :4] = 2.0**-7 - torch.tensor([2.0**-31, 0.0, 2.0**-31, 0.0])
    return x


def behind(x):
    """Scores that fall in their lowest bits, until a last one that is larger."""
    x = (0.25 - torch.arange(x.shape[1]) * 2.0**-21).repeat(len(x), 1)
    x[:, 20:] = 0.0
    x[:, -1] = 0.25 + 2.0**-21
    return x


def lane(x):
    """A lane of a warp has all of the best."""
    for first in (0, x.shape[1] // 4):
        x[:, first : first + 4] += 9.0
    return x


def broken(x):
    """NaN and infinities; one number beside -inf."""
    x[0, ::3], x[1, 1::4], x[2] = torch.nan, torch.inf, -torch.inf
    x[2, -1] = -3.0
    return x


def negative(x):
    """NaN with a sign, which is below any number."""
    x.view(torch.int32)[:, 2:] = -1
    return x


KINDS = {
    "equal": lambda x: torch.full_like(x, 0.3),
    "underflowing": underflowing,
    "close": close,
    "behind": behind,
    "lane": lane,
    "steps": lambda x: (x * 2).round() / 2,
    "near": lambda x: 0.25 + (x * 64).round() * 2.0**-23,
    "broken": broken,
    "negative": negative,
}
"""Logits of three tokens, made from random ones."""
BY_LOGITS = ("underflowing", "close")
"""Kinds in which the order of logits is not that of scores: what softmax chooses by."""


def chosen(kind, experts, k, dtype, how, renormalize, many):
    k, (scoring, biased) = min(8 if kind == "lane" else k, experts), how
    logits = torch.randn(3, experts, generator=torch.Generator().manual_seed(experts))
    logits = KINDS[kind](logits).to(F32 if kind == "close" else dtype)  # 16 bits hold no such ones
    bias = whole(experts, most=2) / 4 if biased else None
    if biased and kind == "broken":
        bias -= 2
        bias[::3], bias[1::3] = torch.nan, -torch.inf  # chosen last
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "MANY_TOKENS", 1 if many or kind == "lane" else 2**30)
        same("fused_topk", spaced(logits), bias, k, renormalize, scoring, 2.5)
        if experts % 4 == 0 and k <= experts // 2:
            same("grouped_topk", spaced(logits), bias, k, renormalize, scoring, 2.5, 4, 2)


def test_choices():
    factors = {
        "kind": tuple(KINDS), "experts": (60, 4096), "k": (1, 3, 8),
        "dtype": (torch.bfloat16, torch.float16, F32),
        "how": tuple(product(("softmax", "sigmoid", "sqrtsoftplus"), (False, True))),
    }  # fmt: skip
    rules = [(("kind", "how"), lambda kind, how: kind not in BY_LOGITS or how[0] == "softmax")]
    flags = cycle(product((False, True), (False, True)))
    rows = [
        {**row, "renormalize": renormalize, "many": many}
        for row, (renormalize, many) in zip(cover(factors, rules, 3), flags, strict=False)
    ]
    check_all(rows, chosen)
