"""Calls of `ops.expert_product_sum`, and the two operators that it stands for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from moe_ops import ops
from moe_ops.dispatch.row_tiles import TileRule, gemm_rule
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.reference.quantize import moe_quantize
from moe_ops.reference.slots import local_experts, planned_rows
from moe_ops.scheme import get_scheme, quantize_weight
from moe_ops.scheme.weights import spread_scale
from moe_ops.tensors import ExpertWeight, Routing
from moe_ops.testing import Bounded

SIZES = {
    "k": st.integers(1, 12),
    "n": st.sampled_from((64, 192)),
    "kk": st.sampled_from((64, 128, 320, 704)),
    "bias": st.booleans(),
    "scaled": st.booleans(),
    "holes": st.booleans(),
    "local": st.sampled_from((None, 3)),
}
"""Strategies of calls of one token: slots, N, K, and what there is besides."""


def one_token(
    generator: torch.Generator, top_k: int, experts: int, *, holes: bool, local: int | None
) -> tuple[Tensor, Tensor | None]:
    """Ids ``(1, k)`` of one token, half of them invalid with ``holes``, and the expert map.

    ``local``: so many experts are on this rank, the first ones; None: all, without a map.
    """
    ids = torch.randint(experts, (1, top_k), generator=generator).to(torch.int32)
    if holes:
        ids[0, ::2] = torch.tensor([-1, 2**31 - 1])[torch.arange(len(ids[0, ::2])) % 2].int()
    if not local:
        return ids, None
    place = torch.arange(experts, dtype=torch.int32)
    return ids, torch.where(place < local, place, -1)


class SumProblem(NamedTuple):
    """Sizes and settings of a call."""

    tokens: int = 1
    top_k: int = 2
    experts: int = 4
    """Local ones."""
    hidden: int = 32
    width: int = 16
    scheme: str = "unquantized"
    dtype: torch.dtype = torch.bfloat16
    """Of rows that are not quantized, and of the result."""
    has_bias: bool = False
    weighted: bool = True
    routing: str = "plain"
    """``plain``, ``holes`` (ids that are negative or too large) or ``map`` (with such, too)."""
    stored: bool = False
    """Whether rows are quantized before."""
    expert_order: bool = False
    invariant: bool = False


class SumCall(NamedTuple):
    """The arguments of `ops.expert_product_sum`, in its order."""

    a: Tensor
    a_scale: Tensor | None
    weight: ExpertWeight
    topk_weights: Tensor | None
    tiles: list[Tensor | None]
    scheme: str
    out_dtype: torch.dtype
    expert_order: bool = False
    batch_invariant: bool = False

    @property
    def used(self) -> Tensor:
        """Which slots are not skipped, ``(T, k)``."""
        return (self.experts >= 0).view(self.topk_ids.shape)

    @property
    def topk_ids(self) -> Tensor:
        return self.tiles[1]

    def routed_to(self, topk_ids: Tensor) -> SumCall:
        """The same with other ids."""
        return self._replace(tiles=[self.tiles[0], topk_ids, self.tiles[2]])

    @property
    def experts(self) -> Tensor:
        """The local expert of each slot."""
        return local_experts(*self.tiles[1:], len(self.weight[0]))


def routed(p: SumProblem, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Ids, which may repeat, and an expert map where there is one."""
    ids = torch.randint(p.experts, (p.tokens, p.top_k), generator=generator).to(torch.int32)
    if p.routing != "plain":
        hole = torch.rand(p.tokens, p.top_k, generator=generator)
        ids[hole < 0.3] = -1
        ids[hole < 0.2] = p.experts + 2
        ids[hole < 0.1] = 2**31 - 1
    if p.routing != "map":
        return ids, None
    here = torch.randperm(p.experts + 2, generator=generator)
    return ids, torch.where(here < p.experts, here, -1).to(torch.int32)


def sum_call(p: SumProblem, device: str = "cpu", seed: int = 0) -> SumCall:
    """Random operands, with a plan where kernels read one."""
    g, scheme = torch.Generator().manual_seed(seed), get_scheme(p.scheme)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(p.dtype).to(device)

    ids, expert_map = (None if x is None else x.to(device) for x in routed(p, g))
    weights = torch.rand(p.tokens, p.top_k, generator=g).to(device) + 0.1
    a, w = normal(p.tokens * p.top_k, p.width), normal(p.experts, p.hidden, p.width)
    bias = normal(p.experts, p.hidden) if p.has_bias else None
    a_scale = w_scale = None
    if scheme.weight is not None:
        w, w_scale, *_ = quantize_weight(w, scheme)
    if p.stored and scheme.activation is not None:
        slots = (ids, expert_map, p.experts)
        a, a_scale = ops.moe_quantize(a, None, None, *slots, scheme.activation.key)
    layer = (p.experts, scheme, p.dtype, p.invariant)
    space = SlotRows.of(Routing(weights, ids, expert_map), *layer)
    how = (weights if p.weighted else None, [*space.tiles], p.scheme, p.dtype)
    return SumCall(a, a_scale, ExpertWeight(w, bias, w_scale), *how, p.expert_order, p.invariant)


def apart(call: SumCall, operators: Any = ops) -> Tensor:
    """The GEMM, then the sum."""
    how = (call.scheme, call.out_dtype, "", call.expert_order, call.batch_invariant)
    y = operators.expert_product(*call[:3], None, call.tiles, 1, *how)
    skipping = (*call.tiles[1:], None, len(call.weight[0]))
    return operators.moe_fused_mul_sum(y, call.topk_weights, *skipping)


def exact(call: SumCall) -> Bounded:
    """The result in float64, of the numbers that are multiplied; on the CPU."""
    rule = gemm_rule(call.scheme, call.a, call.tiles, call.batch_invariant)  # the device's
    call = SumCall(*(x.cpu() if isinstance(x, Tensor) else x for x in call))
    call, weight = (
        call._replace(tiles=[None if x is None else x.cpu() for x in call.tiles]),
        ExpertWeight(*(None if x is None else x.cpu() for x in call.weight)),
    )
    expert, w = call.experts, weight.data.double()
    if weight.scale is not None:
        w *= spread_scale(weight.scale.double(), get_scheme(call.scheme).weight, *w.shape[1:])
    y = Bounded.exactly(_rows(call, rule)).products(w, expert)
    y = y if weight.bias is None else y.plus(weight.bias[expert])
    weights = call.used.double()
    weights = weights if call.topk_weights is None else weights * call.topk_weights.double()
    y = y.rounded(call.out_dtype).unflatten(*call.topk_ids.shape)
    return y.weighted_sum(weights).rounded(call.out_dtype)


def _rows(call: SumCall, rule: TileRule) -> Tensor:
    """Numbers of the rows of slots in float64, by slot; ``rule``: that of the call's plan."""
    quant, num_experts = get_scheme(call.scheme).activation, len(call.weight[0])
    if quant is None:
        rows = call.a.double()
        if call.expert_order:
            slots, _, _, between, _ = planned_rows(call.tiles, rule, len(rows), num_experts)
            rows = torch.zeros_like(rows).index_copy(0, slots, rows[between])
        return rows
    q, scale = call.a, call.a_scale
    if scale is None:
        slots = (*call.tiles[1:], num_experts)
        q, scale = moe_quantize(q, None, None, *slots, quant.key)
    width = q.shape[1] if quant.group.cols < 0 else quant.group.cols
    return q.double() * scale.double().repeat_interleave(width, 1)[:, : q.shape[1]]


def with_nan(x: Tensor, rows: Any) -> Tensor:
    """A copy with NaN in some rows; int8 has none."""
    x = x.clone()
    if x.dtype.is_floating_point and x.itemsize == 1:
        x.view(torch.uint8)[rows] = 0x7F
    elif x.dtype.is_floating_point:
        x[rows] = torch.nan
    return x


def sum_samples(device: str) -> list[tuple[Any, ...]]:
    """One token and more, in every scheme that has products of its own in the operator."""
    problems = (
        SumProblem(has_bias=True),
        SumProblem(5, routing="map", weighted=False, expert_order=True, dtype=torch.float32),
        SumProblem(1, 3, 32, 48, 32, "int8_channel", routing="holes", has_bias=True, stored=True),
        SumProblem(3, 2, 4, 32, 48, "fp8_channel", torch.float16, routing="map"),
        SumProblem(1, 4, 32, 136, 144, "fp8_block128", routing="map"),
    )
    return [tuple(sum_call(problem, device)) for problem in problems]
