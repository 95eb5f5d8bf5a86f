"""Calls of the library on the CPU, and the library's own functions that such a call enters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import moe_ops
from moe_ops.testing import run_ranks

T, E, K, H, I = 33, 8, 2, 256, 128  # noqa: E741
BELOW = ("/reference/", "/fake_impls/")
"""Folders of what operators run."""
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Functions of Python 3.11 that later versions of Python inline."""


def weights(scheme):
    w1, w2 = torch.randn(E, 2 * I, H).bfloat16() / 16, torch.randn(E, H, I).bfloat16() / 11
    if scheme == "unquantized":
        return w1, w2, None
    q1, q2 = (moe_ops.quantize_weight(w, scheme) for w in (w1, w2))
    return q1.data, q2.data, moe_ops.FusedMoEQuantConfig.from_weights(scheme, q1, q2)


def call_of(kind, **options):
    """A call of ``"layer"``, a `FusedMoE` with these options, or of `fused_moe` in a scheme."""
    x, logits = torch.randn(T, H).bfloat16(), torch.randn(T, E)
    if kind == "layer":
        layer = moe_ops.FusedMoE(E, K, H, I, params_dtype=torch.bfloat16, **options)
        for p in layer.parameters():
            p.data.normal_(0, 0.05)
        return lambda: layer(x, logits.bfloat16())
    w1, w2, config = weights(kind)
    return lambda: moe_ops.fused_moe(x, w1, w2, logits, K, quant_config=config)


def followed(call: Callable[[], Any], follow: Callable[..., None]) -> None:
    """Run a call with a profile function of this thread."""
    previous = sys.getprofile()
    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(previous)


def own_calls(call: Callable[[], Any]) -> list[str]:
    """The functions of the library that a call enters, outside the code of references and fakes.

    Functions that a reference calls count, those of `moe_ops.testing` do not.
    """
    entered = []

    def follow(frame, event, _):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        own = "/moe_ops/" in file and not any(part in file for part in (*BELOW, "/testing/"))
        if event == "call" and own and name not in INLINED:
            entered.append(f"{file.rpartition('/moe_ops/')[2]}: {name}")

    followed(call, follow)
    return entered


@torch.no_grad()
def own_calls_of(kind: str) -> list[str]:
    """`own_calls` of the second call of a scheme, of a ``"layer"``, or of one of two ranks.

    The layer ``"dp+ep"`` holds half of the experts and exchanges tokens with another rank.
    """

    def second(**options):
        call = call_of("layer" if kind == "dp+ep" else kind, **options)
        call()
        return own_calls(call)

    def rank(r, group):
        return second(dp_size=2, dp_rank=r, ep_size=2, ep_rank=r, tp_group=group)

    return run_ranks(2, rank)[0] if kind == "dp+ep" else second()
