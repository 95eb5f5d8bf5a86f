"""Every operator's calls, small ones of every kind and some larger ones, and what they must give.

One list for what every operator must do: `ops/test_ops.py` compares kernels with references, in the
interpreter and on the GPU, and `sanitize.py` runs the same calls under compute-sanitizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from operator_samples import COPIED, I32, keywords, overload, samples
from plans import planned
from sum_calls import SumCall, SumProblem, exact, sum_call
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from moe_ops.ops import STAGES
from moe_ops.reference import expert_product as reference
from moe_ops.reference.permute import moe_permutation
from moe_ops.scheme import get_scheme
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
    """Assert that outputs, and inputs after the call, equal the reference's, with its strides."""
    module = importlib.import_module(f"moe_ops.reference.{STAGES[qualified]}")
    args, kwargs = tree_map_only(Tensor, torch.clone, arguments)
    output = getattr(module, qualified.replace(".", "_"))(*args, **kwargs)
    expected = tree_leaves((output, (args, kwargs)))
    for actual, wanted in zip(tree_leaves(result), expected, strict=True):
        if isinstance(wanted, Tensor):
            assert (actual.dtype, actual.stride()) == (wanted.dtype, wanted.stride())
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


def copied(tree: Any, device: str) -> Any:
    """A copy of a pytree with its tensors on a device; strides are kept."""
    return tree_map_only(
        Tensor, lambda t: t.clone() if t.device.type == device else t.to(device), tree
    )


SOURCES = {"sample": cache(partial(samples, "cpu")), "larger": cache(larger)}
"""What makes the calls of operators, by the name that their cases have."""


def cases_of(qualified: str) -> Iterator[Case]:
    """The cases of an operator: its calls in `operator_samples`, and in `larger`."""
    for source, calls in SOURCES.items():
        for number in range(len(calls().get(qualified, ()))):
            pick = lambda c=calls, n=number: c()[qualified][n]  # noqa: E731
            yield operator_case(f"{qualified}/{source}{number}", qualified, pick)


def copied_cases() -> Iterator[Case]:
    """The cases of all operators in `COPIED`."""
    for qualified in COPIED:
        yield from cases_of(qualified)
