"""Compile and load every kernel before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.activation import kind_and_key
from moe_ops.dispatch.device import device_facts
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.operands import layer_operands
from moe_ops.dispatch.problem import GemmProblem, problem_of
from moe_ops.dispatch.row_tiles import tile_rule
from moe_ops.dispatch.tiles import MANY_TOKENS, is_direct, scan_sizes
from moe_ops.pipeline.fused_experts import NOT_QUANTIZED, fused_experts, not_a_config
from moe_ops.pipeline.gemms import apart
from moe_ops.pipeline.layer_checks import check_not_quantized, check_num_experts
from moe_ops.routing import fused_topk
from moe_ops.scheme import FusedMoEQuantConfig, Scheme, is_packed

EVERY = 4096
"""Up to this many tokens, every token count is checked for its variant."""
RANGES = 64
"""Number of ranges into which each doubling of larger token counts is divided."""


def warmup(
    w1: Tensor,
    w2: Tensor,
    top_k: int,
    num_tokens: int | Iterable[int],
    *,
    topk_weights_dtype: torch.dtype = torch.float32,
    topk_ids_dtype: torch.dtype = torch.int32,
    scoring_func: str = "softmax",
    router_logits_dtype: torch.dtype | None = None,
    hidden_dtype: torch.dtype | None = None,
    **experts: Any,
) -> list[int]:
    """Run a layer once with every kernel that it will use, on random tokens.

    Afterwards no call with these weights and settings compiles or loads a kernel: not the first
    request, and not a CUDA graph's capture (where compiling is an error). On a machine without a
    GPU this runs the references, which need no warming.

    Args:
        w1: the layer's weights, as in `fused_experts`; they are read, not copied.
        w2: see `fused_experts`.
        top_k: k.
        num_tokens: the token counts that calls will have, up to 2**31 - 1. A single number means
            all counts from 1 to it; only counts that differ in a kernel are run.
        topk_weights_dtype: dtype of the weights that calls will pass.
        topk_ids_dtype: dtype of the ids that calls will pass.
        scoring_func: scoring function of `fused_topk`, which is warmed up too.
        router_logits_dtype: dtype of the logits of `fused_topk`; None: the tokens' dtype.
        hidden_dtype: dtype of the tokens; None: the dtype of ``w1``, or bf16 if that is quantized.
        **experts: keywords of `fused_experts` (activation, expert_map, quant_config, biases, ..).

    Returns:
        The token counts that were run.

    Raises:
        TypeError: quantized weights without a ``quant_config``; a flag that is not a bool; a wrong
            dtype; counts that are not integers.
        ValueError: k not in 1..E, a negative count; and as `fused_experts`.
    """
    config = experts.get("quant_config")
    if not (config is None or isinstance(config, FusedMoEQuantConfig)):
        raise not_a_config(config)
    scheme = (config or NOT_QUANTIZED).scheme
    for name, w in (("w1", w1), ("w2", w2)):
        if scheme.weight is None:
            check_not_quantized(name, w)
        checks.tensor(name, w, 3, None)
    expert_map = experts.get("expert_map")
    num_experts = check_num_experts(w1, -1, expert_map, w1)
    checks.topk("top_k", top_k, num_experts)
    checks.dtype_of("topk_weights_dtype", topk_weights_dtype, checks.FLOATS)
    checks.dtype_of("topk_ids_dtype", topk_ids_dtype, checks.INDICES)
    checks.dtype_of("router_logits_dtype", router_logits_dtype, (*checks.FLOATS, None))
    checks.dtype_of("hidden_dtype", hidden_dtype, (*checks.FLOATS, None))
    dtype = hidden_dtype or (w1.dtype if scheme.weight is None else torch.bfloat16)
    activation = kind_and_key(experts.get("activation", "silu"))[1]
    invariant = experts.get("batch_invariant", False)
    checks.flags(batch_invariant=invariant)

    def run(tokens: int) -> None:
        x = torch.randn(tokens, w2.shape[1], device=w1.device, dtype=dtype)
        logits = torch.randn(tokens, num_experts, device=w1.device, dtype=torch.float32)
        logits = logits.to(router_logits_dtype or dtype)
        weights, ids = fused_topk(x, logits, top_k, True, scoring_func=scoring_func)
        weights, ids = weights.to(topk_weights_dtype), ids.to(topk_ids_dtype)
        fused_experts(x, w1, w2, weights, ids, **experts)

    variants = Variants(w1, w2, int(top_k), scheme, dtype, activation, invariant, expert_map)
    return run_variants(run, num_tokens, variants)


class Variants(NamedTuple):
    """Everything besides the token count that decides which binaries a call runs."""

    w1: Tensor
    w2: Tensor
    top_k: int
    scheme: Scheme
    dtype: torch.dtype
    """Dtype of the tokens."""
    activation: str
    batch_invariant: bool
    expert_map: Tensor | None = None
    arriving: Callable[[int], int] | None = None
    """From the tokens of each rank to those that arrive at the experts; None: the same number."""

    def of(self, num_tokens: int) -> tuple:
        """A key for a token count: token counts with equal keys run the same binaries."""
        arriving = num_tokens if self.arriving is None else self.arriving(num_tokens)
        num_experts, slots = self.w1.shape[0], arriving * self.top_k
        device = device_facts(self.w1.device)
        plans = (plan_gemm(problem, device) for problem in self._problems(arriving))
        gemms = ((plan.kernel, plan.config, plan.quantizes_rows) for plan in plans)
        routing = num_tokens >= MANY_TOKENS, num_tokens == 1
        sorting = is_direct(slots, num_experts), scan_sizes(slots)
        return (*gemms, *sorting, *routing)

    def _problems(self, num_tokens: int) -> Iterator[GemmProblem]:
        """The problems of both GEMMs, with and without tensors that TMA can read."""
        num_experts, rows, _ = self.w1.shape
        _, hidden, width = self.w2.shape
        width *= self.scheme.numbers_per_entry(self.w2.dtype)
        rule = tile_rule(
            self.scheme.key, self.dtype, self.w1.device, self.batch_invariant, self.expert_map
        )
        for w, shape, activation, top_k in (
            (self.w1, (num_experts, rows, hidden), self.activation, self.top_k),
            (self.w2, (num_experts, hidden, width), "", 1),
        ):
            # References take any form, though kernels are planned for an assumed GPU.
            fragments = w.is_cuda and is_packed(w)
            problem = problem_of(
                layer_operands(
                    shape,
                    self.scheme,
                    self.dtype,
                    rule,
                    num_tokens * self.top_k,
                    num_tokens=num_tokens,
                    top_k=top_k,
                    activation=activation,
                    fragments=fragments,
                )
            )
            if fragments:
                yield problem  # no other kernel reads it
            else:
                yield from (problem, problem._replace(boxes=False))


def first_counts(variant_of: Callable[[int], Any], most: int) -> dict[Any, int]:
    """For each variant, the smallest of the counts 1..``most`` that has it.

    Up to `EVERY`, every count is checked. Larger counts are divided into ranges, `RANGES` to each
    doubling, and the ends of each range are compared: no kernel serves less than one such range.
    """
    chosen: dict[Any, int] = {}
    low = min(most, EVERY)
    for tokens in range(1, low + 1):
        chosen.setdefault(variant_of(tokens), tokens)
    while low < most:
        high = min(most, low + low // RANGES)
        for tokens in _changes(variant_of, low, high):
            chosen.setdefault(variant_of(tokens), tokens)
        low = high
    return chosen


def _changes(variant_of: Callable[[int], Any], low: int, high: int) -> Iterator[int]:
    """The counts in ``low + 1..high`` whose variant differs from that of the count before."""
    if variant_of(low) == variant_of(high):
        return
    if high == low + 1:
        yield high
        return
    middle = (low + high) // 2
    yield from _changes(variant_of, low, middle)
    yield from _changes(variant_of, middle, high)


@torch.no_grad()
def run_variants(
    run: Callable[[int], Any],
    num_tokens: int | Iterable[int],
    variants: Variants,
    agree: Callable[[list[int]], list[int]] = list,
) -> list[int]:
    """Call ``run`` with the token counts that differ in a kernel, and wait for the device.

    ``agree`` gets these counts, and returns those that ranks run together.
    """
    if isinstance(num_tokens, Integral) or not isinstance(num_tokens, Iterable):
        checks.at_least(0, num_tokens=num_tokens)  # type: ignore[arg-type]
        chosen = first_counts(variants.of, int(num_tokens))  # type: ignore[arg-type]
    else:
        chosen = {}
        for tokens in num_tokens:
            checks.at_least(0, num_tokens=tokens)
            chosen.setdefault(variants.of(int(tokens)), int(tokens))
    agreed = agree([*chosen.values()])
    for tokens in agreed:
        run(tokens)
        if tokens == 1 and variants.w1.is_cuda:
            with apart():  # compiled graphs have a kernel of their own: see `kernels._runtime`
                run(tokens)
    if variants.w1.is_cuda:
        torch.cuda.synchronize(variants.w1.device)
    return agreed
