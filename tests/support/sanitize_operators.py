"""Cases of `sanitize.py` that are calls of operators: `operator_cases`, windows and host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from operator_cases import BF16, Case, assert_near, copied_cases, ids_of, some
from operator_samples import I32
from residencies import residency_of_weights, whole_weights
from windows_here import Ranks

from moe_ops import ops
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.reference.quantize import moe_quantize
from moe_ops.tensors import ExpertWeight


def window_case(qualified: str, quant: str) -> Case:
    """A send of one rank, and what comes back: in windows that are made where the case runs."""

    def inputs() -> Any:
        x, weights, ids = some(150, 80, dtype=BF16), some(150, 2), ids_of(150, 6, 2)
        return x, weights, ids, torch.zeros(6, dtype=I32), some(160, 80, dtype=BF16)

    def run(given: Any) -> Any:
        x, weights, ids, expert_ranks, sums = given
        ranks = Ranks.of(1, x.device, 200, 80, 2, 2)
        arrived = ranks.send(0, x, None, weights, ids, expert_ranks, 160, 6, False, quant)
        if qualified == "symmetric_send":
            return [t[:150].clone() for t in arrived]
        return ranks.send_back(0, sums, expert_ranks, 2)

    def check(given: Any, result: Any) -> None:
        x, weights, ids, _, sums = given
        used = (ids >= 0).any(1)
        if qualified == "symmetric_return":
            assert_near(result[:150][used], sums[:150][used])
            assert not result[:150][~used].any() and not result[150:].any()
            return
        rows = moe_quantize(x, *[None] * 4, 0, quant) if quant else (x,)
        for actual, wanted in zip(result, rows, strict=False):
            assert_near(actual[used], wanted[used])
        assert_near(result[2], weights)
        assert_near(result[3], ids)

    return Case(f"op/{qualified}/window-{quant or 'plain'}", inputs, run, check)


def batched_window_case(quant: str) -> Case:
    """A send of one rank into its own experts' rows, against a dispatch."""

    def inputs() -> Any:
        return some(50, 80, dtype=BF16), some(50, 2), ids_of(50, 6, 2)

    def run(given: Any) -> Any:
        x, weights, ids = given
        (window,) = Ranks.of(1, x.device, 60, 80, 2, 2, 6).windows
        experts = torch.arange(6, dtype=I32, device=x.device)
        where = (torch.stack([experts * 0, experts]), experts, window.peers, window.state, 60)
        rows, scale, counts, *_ = ops.symmetric_send_batched(
            x, None, weights, ids, *where, False, quant
        )
        used = torch.arange(60, device=x.device) < counts[:, None]
        return [t[used].clone() for t in ([rows, scale] if quant else [rows])] + [counts]

    def check(given: Any, result: Any) -> None:
        x, _, ids = given
        known = torch.where((ids >= 0) & (ids < 6), ids, -1)
        rows, scale, counts, _ = ops.batched_dispatch(x, None, None, known, 0, 6, 60, quant)
        used = torch.arange(60) < counts[:, None]
        wanted = [t[used] for t in ([rows, scale] if quant else [rows])] + [counts]
        for actual, expected in zip(result, wanted, strict=True):
            assert_near(actual, expected)

    return Case(f"op/symmetric_send_batched/window-{quant or 'plain'}", inputs, run, check)


def host_case(tokens: int) -> Case:
    """A layer whose experts are in host memory, in waves and for one token."""

    def inputs() -> Any:
        w1, w2 = some(6, 160, 80, dtype=BF16) / 8, some(6, 80, 80, dtype=BF16) / 8
        return some(tokens, 80, dtype=BF16), w1, w2, some(tokens, 2).abs(), ids_of(tokens, 6, 2)

    def run(given: Any) -> Any:
        x, w1, w2, weights, ids = given
        owner = residency_of_weights(ExpertWeight(w1), ExpertWeight(w2), 2)
        first, second = whole_weights(owner)
        tiles = [ops.plan_slots(ids, None, 6, "unquantized", BF16), ids, None]
        h = ops.expert_product(x, None, first, None, tiles, 2, "unquantized", BF16, "silu")
        return ops.expert_product_sum(h, None, second, weights, tiles, "unquantized", BF16)

    def check(given: Any, result: Any) -> None:
        x, w1, w2, weights, ids = given
        assert_near(result, fused_experts(x, w1, w2, weights, ids))

    return Case(f"op/expert_product/host{tokens}", inputs, run, check)


def of_operators() -> Iterator[Case]:
    """Cases of every operator."""
    yield from copied_cases()
    for quant in ("", "fp8:1x16:float32", "int8:1x*:float32"):
        yield batched_window_case(quant)
        for qualified in ("symmetric_send", "symmetric_return"):
            yield window_case(qualified, quant)
    yield from map(host_case, (1, 20))
