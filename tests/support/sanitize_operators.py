"""Cases of `sanitize.py`: calls of every operator, compared with its reference."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from operator_samples import I32, OF_WINDOWS, keywords, overload, samples
from plans import planned
from residencies import residency_of_weights, whole_weights
from sum_calls import SumCall, SumProblem, exact, sum_call
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from windows_here import Ranks

from moe_ops import ops
from moe_ops.ops import STAGES
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.reference import expert_product as reference
from moe_ops.reference.permute import moe_permutation
from moe_ops.reference.quantize import moe_quantize
from moe_ops.scheme import get_scheme
from moe_ops.tensors import ExpertWeight
from moe_ops.testing import assert_matches_reference

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BF = ("mxfp4_w4a16", torch.bfloat16)
"""A layer whose row tiles are the same on every GPU and on a CPU."""


class Case(NamedTuple):
    """One or a few calls."""

    name: str
    """``op/`` and the operator; or ``layer/``, ``format/`` or ``gemm/`` and the variant."""
    inputs: Callable[[], Any]
    """Makes a pytree of tensors on the CPU."""
    run: Callable[[Any], Any]
    """Runs the call on these tensors, on any device."""
    check: Callable[[Any, Any], None]
    """Takes the inputs and the result of `run`, both on the CPU; AssertionError if it is wrong."""


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Compare integers bitwise, floats with PyTorch's tolerances, 8-bit floats up to neighbours."""
    actual, expected = actual.cpu(), expected.cpu()
    if not expected.dtype.is_floating_point:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    elif expected.itemsize == 1:
        kind = torch.finfo(expected.dtype)
        near = {"rtol": kind.eps, "atol": kind.smallest_normal}
        torch.testing.assert_close(actual.float(), expected.float(), **near, equal_nan=True)
    else:
        torch.testing.assert_close(actual, expected, equal_nan=True)


def check_operator(qualified: str, arguments: Any, result: Any) -> None:
    """Assert that outputs, and inputs after the call, equal the reference's."""
    module = importlib.import_module(f"moe_ops.reference.{STAGES[qualified]}")
    args, kwargs = tree_map_only(Tensor, torch.clone, arguments)
    output = getattr(module, qualified.replace(".", "_"))(*args, **kwargs)
    expected = tree_leaves((output, (args, kwargs)))
    for actual, wanted in zip(tree_leaves(result), expected, strict=True):
        if isinstance(wanted, Tensor):
            assert_near(actual, wanted)


def check_sum(arguments: Any, result: Any) -> None:
    """Check rows against budgets, since 8-bit products have fewer bits on GPUs and sums cancel."""
    ((given, _), (actual, after)) = arguments, result
    if get_scheme(given[5]).activation is None and get_scheme(given[5]).weight is not None:
        check_operator("expert_product_sum", arguments, result)
        return
    expected = reference.expert_product_sum(*given)
    assert_matches_reference(actual, exact(SumCall(*given)), expected)
    for x, unchanged in zip(tree_leaves(after), tree_leaves(arguments), strict=True):
        if isinstance(unchanged, Tensor):
            assert_near(x, unchanged)


def operator_case(name: str, qualified: str, make: Callable[[], tuple[Any, ...]]) -> Case:
    """A case of an operator, which returns the outputs and the inputs after the call."""

    def inputs() -> Any:
        arguments = make()
        return list(arguments), keywords(qualified, arguments)

    def run(arguments: Any) -> Any:
        args, kwargs = arguments
        return overload(qualified)(*args, **kwargs), arguments

    check = check_sum if qualified == "expert_product_sum" else partial(check_operator, qualified)
    return Case(f"op/{name}", inputs, run, check)


def some(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Normal random numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ids_of(tokens: int, experts: int, top_k: int) -> Tensor:
    """Distinct experts per token, with some skipped slots."""
    ids = some(tokens, experts).topk(top_k, 1).indices.to(I32)
    ids[::5, 0] = -1
    return ids


def larger() -> dict[str, list[tuple[Any, ...]]]:
    """Calls in which rows, slots or experts take more than one program or step."""
    many, few = ids_of(700, 6, 2), ids_of(40, 6, 2)
    mapping = torch.tensor([0, 2, -1, 1, 3, -1], dtype=I32)
    x, weights = some(33, 1100, dtype=BF16), some(33, 4).abs()
    ids, counts = ids_of(33, 8, 4), torch.tensor([5, 0, 17], dtype=I32)
    batch = some(3, 17, 2200, dtype=F16)
    bias, order = some(60), moe_permutation(many, mapping, 4)
    of_slots = planned(ids_of(400, 3, 1), None, 3).plan
    every = ids_of(700, 2, 1).clamp(min=0)  # rows of skipped slots are not written
    of_two, turned = planned(every, None, 2).plan, some(2, 136, 264, dtype=BF16).mT
    return {
        "fused_topk": [(some(65, 60), bias, 4, True, name, 1.5)
                       for name in ("softmax", "sigmoid", "sqrtsoftplus")]
        + [(some(2053, 8, dtype=BF16), None, 2, False, "softmax", 1.0)],
        "grouped_topk": [(some(9, 256), some(256), 8, True, "sigmoid", 2.5, 8, 4)],
        "sparsemixer": [(some(21, 16), 0.01)],
        "moe_align_block_size": [(t, mapping, 16, 4, True, True) for t in (few, many)],
        "plan_slots": [(t, mapping, 4, *BF) for t in (few, many)],
        "plan_permuted": [(order[0], many.numel(), "unquantized")],
        "plan_batched": [(counts, 40, "unquantized")],
        "count_expert_num_tokens": [(many, mapping, 4)],
        "adapter_ids": [(many, mapping, many[:, 0].contiguous() - 1, 4, 3)],
        "moe_permutation": [(many, mapping, 4)],
        "moe_quantize": [
            (x, *[None] * 4, 0, key)
            for key in ("fp8:1x*:float32", "fp8:1x128:float32", "int8:*x*:float32")
        ],
        "activation": [(x, "silu"), (batch[0], "swigluoai")],
        "activation_quantize": [(x, None, None, None, 0, "silu", "fp8:1x128:float32")],
        "batched_dispatch": [(x, None, weights, ids, 2, 3, 20, "fp8:1x128:float32")],
        "batched_rows": [(many, 1, 4, 300)],
        "batched_quantize": [(batch, None, counts, "fp8:*x*:float32")],
        "expert_product": [
            (some(700, 136, dtype=BF16), None, [turned], None, [of_two, None, None], 1,
             "unquantized", BF16),
        ],
        "expert_product_sum": [
            tuple(sum_call(SumProblem(1, 10, 80, 144, 272, scheme, routing="map", has_bias=True)))
            for scheme in ("unquantized", "fp8_channel", "fp8_block128")
        ],
        "expert_wgrad": [
            (some(400, 136, dtype=BF16), some(400, 264, dtype=BF16), None, [of_slots, None, None],
             3, "unquantized", F32),
        ],
        "expert_wgrad.out": [
            (some(400, 136, dtype=BF16), some(400, 264, dtype=BF16), None, [of_slots, None, None],
             3),
        ],
        "moe_fused_mul_sum": [(some(33, 4, 1100, dtype=BF16), weights, ids, None, None, 8)],
    }  # fmt: skip


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


def operator_cases() -> Iterator[Case]:
    """Cases of every operator: the calls of `operator_samples`, and of `larger`."""
    sources = {"sample": cache(partial(samples, "cpu")), "larger": cache(larger)}
    for source, calls in sources.items():
        for qualified, several in calls().items():
            if qualified in OF_WINDOWS:
                continue
            for number in range(len(several)):
                pick = lambda c=calls, q=qualified, n=number: c()[q][n]  # noqa: E731
                yield operator_case(f"{qualified}/{source}{number}", qualified, pick)
    for quant in ("", "fp8:1x16:float32", "int8:1x*:float32"):
        yield batched_window_case(quant)
        for qualified in ("symmetric_send", "symmetric_return"):
            yield window_case(qualified, quant)
    yield from map(host_case, (1, 20))
