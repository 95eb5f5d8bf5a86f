"""LoRA by its definition: each adapter's products added to the weights, in float64."""

from __future__ import annotations

import torch
from differentiable_layers import in_dtype, layer
from legs import HAS_CUDA, INTERPRETED
from torch import Tensor

from moe_ops.activation import MoEActivation
from moe_ops.pipeline.adapters import Adapters, LowRank
from moe_ops.testing import Inputs, Problem, assert_layer_matches

L, R = 3, 4
LAYOUTS = ("one", "apart", "shared", "apart and shared")
"""One pair of factors for all rows of the first weight or a pair for gate and up each; the first
weight's A and the second's B for each expert, or for all."""


def random(*shape, seed=0):
    """Numbers whose products with rows are about as large as the rows."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def parts_of(activation: str, layout: str) -> list[slice]:
    """The rows of the first weight that have factors of their own."""
    kind = MoEActivation.from_str(activation)
    if "apart" not in layout or not kind.is_gated:
        return [slice(None)]
    if kind.is_interleaved:
        return [slice(0, None, 2), slice(1, None, 2)]
    return [slice(None, 0), slice(0, None)]  # halves: `factors` knows I


def factors(
    experts: int, hidden: int, width: int, activation: str = "silu", layout: str = "one", count=L
) -> Adapters:
    """Factors in float32 for weights ``(El, N, H)`` and ``(El, H, I)``, in an engine's layout."""
    n = width * (1 + MoEActivation.from_str(activation).is_gated)
    common = 1 if "shared" in layout else experts
    rows = parts_of(activation, layout)
    if rows == [slice(None, 0), slice(0, None)]:
        rows = [slice(None, width), slice(width, None)]
    first = tuple(
        LowRank(
            random(count, common, R, hidden, seed=2 * i),
            random(count, experts, n // len(rows), R, seed=2 * i + 1),
            part,
        )
        for i, part in enumerate(rows)
    )
    second = LowRank(
        random(count, experts, R, width, seed=8), random(count, common, hidden, R, seed=9)
    )
    return Adapters(first, second)


def converted(adapters: Adapters, device: object, dtype: torch.dtype) -> Adapters:
    """The adapters on a device, in a dtype."""
    first, second = (
        [low._replace(a=low.a.to(device, dtype), b=low.b.to(device, dtype)) for low in lows]
        for lows in (adapters.first, [adapters.second])
    )
    return adapters._replace(first=tuple(first), second=second[0])


def merged(w: Tensor, lows: tuple[LowRank, ...], adapter: int) -> Tensor:
    """A weight ``(El, N, K)`` with one adapter added to it."""
    total = w.clone()
    for low in lows:
        total[:, low.rows] += low.b[adapter].to(w.dtype) @ low.a[adapter].to(w.dtype)
    return total


def exact_layer(problem: Problem, inputs: Inputs, adapters: Adapters) -> Tensor:
    """The layer in the dtype of ``inputs``: each token with the weights of its adapter."""
    ids, outs = adapters.lora_ids, torch.empty_like(inputs.hidden_states)
    for adapter in ids.unique().tolist():
        mine, given = ids == adapter, inputs
        if 0 <= adapter < adapters.num_adapters:
            given = given._replace(
                w1=merged(inputs.w1, adapters.first, adapter),
                w2=merged(inputs.w2, (adapters.second,), adapter),
            )
        given = given._replace(
            hidden_states=inputs.hidden_states[mine],
            topk_weights=inputs.topk_weights[mine],
            topk_ids=inputs.topk_ids[mine],
        )
        outs[mine] = layer(problem, given, inputs.w1.dtype)
    return outs


def pairs_of(adapters: Adapters, experts: int, n: int) -> list[Tensor]:
    """Return the adapters as one pair of factors for each expert of each weight."""
    first_a = [low.a.expand(-1, experts, -1, -1) for low in adapters.first]
    count, rank = adapters.num_adapters, sum(a.shape[2] for a in first_a)
    first_b, at = first_a[0].new_zeros(count, experts, n, rank), 0
    for low in adapters.first:
        first_b[:, :, low.rows, at : at + low.b.shape[3]] = low.b
        at += low.b.shape[3]
    second = [x.expand(-1, experts, -1, -1) for x in adapters.second[:2]]
    return [torch.cat(first_a, 2), first_b, *second]


def assert_merged(
    actual: Tensor, problem: Problem, exact: Inputs, adapters: Adapters, dtype: torch.dtype
) -> None:
    """Compare a layer's output with the oracle; the budget is that of the same roundings.

    Args:
        actual: ``(T, H)``.
        problem: the problem, of whose layer ``exact`` has the numbers.
        exact: the inputs, weights dequantized.
        adapters: the factors whose numbers the layer has read, with ids.
        dtype: the dtype of ``actual``.
    """
    adapters = converted(adapters, "cpu", torch.float64)
    adapters = adapters._replace(lora_ids=adapters.lora_ids.cpu())
    oracle = exact_layer(problem, in_dtype(exact, torch.float64), adapters)
    its = in_dtype(exact, torch.float32)
    if not (HAS_CUDA or INTERPRETED):  # kernels scale the sums of a row, not its weights
        its = its._replace(w1=its.w1.to(dtype).float(), w2=its.w2.to(dtype).float())
    pairs = [x.float() for x in pairs_of(adapters, len(its.w1), its.w1.shape[1])]
    reference = layer(problem, its, dtype, None, (pairs, adapters.lora_ids))
    assert_layer_matches(actual.cpu(), oracle, reference.to(dtype))
