"""Grouped LoRA: a low-rank product for every slot, beside the product with its expert's weight.

Adapter l and expert e together are expert ``l * E + e`` of two grouped GEMMs of rank r, so that a
batch may mix adapters, and no weight ``W + B @ A`` is ever made.

Source:
    LoRA (arXiv 2106.09685); several adapters in a batch: S-LoRA (arXiv 2311.03285).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from moe_ops import checks, ops
from moe_ops.gradients import check_transforms, once, wanted
from moe_ops.pipeline.row_spaces import SlotRows, always
from moe_ops.scheme import UNQUANTIZED, Scheme
from moe_ops.tensors import Routing


class ExpertLora(NamedTuple):
    """The adapters of a call of `fused_experts`; L is the number of adapters.

    On several ranks the factors belong to the weights that a rank holds: to its El experts, in
    the order of its rows. If ranks cut experts along I (``tp_size``), B of ``w1`` has the rank's
    gate rows, then its up rows, and A of ``w2`` has its columns (padding included); A of ``w1`` and
    B of ``w2`` are whole, and the same on all of these ranks.
    """

    w1: tuple[Tensor, Tensor] | None
    """``(L, El, r, H)`` and ``(L, El, 2I, r)``, with the rows of ``w1``; None: no adapter."""
    w2: tuple[Tensor, Tensor] | None
    """``(L, El, r, I)`` and ``(L, El, H, r)``."""
    lora_ids: Tensor | None = None
    """``(T,)`` int32 or int64: each token's adapter; any number outside of 0..L - 1: none. None:
    adapter 0 for every token."""
    scaling: float | Tensor = 1
    """Factor of the low-rank products: one number, or one per adapter ``(L,)``."""

    def tokens(self, part: slice) -> ExpertLora:
        """The adapters of a slice of the tokens."""
        ids = self.lora_ids
        return self if ids is None else self._replace(lora_ids=ids[part])

    def of_padding(self) -> ExpertLora:
        """The adapters of one row of padding."""
        ids = self.lora_ids
        return self if ids is None else self._replace(lora_ids=ids.new_full((1,), -1))

    def detach(self) -> ExpertLora:
        """The adapters without autograd history."""
        w1, w2 = (None if x is None else (x[0].detach(), x[1].detach()) for x in self[:2])
        scaling = self.scaling
        scaling = scaling.detach() if isinstance(scaling, Tensor) else scaling
        return ExpertLora(w1, w2, self.lora_ids, scaling)


_LORA_IDS = "_moe_ops_lora_ids"
"""Attribute of the ids that prepare returns, by which the kernel finds their tokens' adapters."""


def attach_lora_ids(topk_ids: Tensor, lora_ids: Tensor) -> None:
    """Say what adapters the tokens have, in whose order prepare returns ``topk_ids``."""
    setattr(topk_ids, _LORA_IDS, lora_ids)


def attached_lora_ids(topk_ids: Tensor | None) -> Tensor | None:
    """The ids that `attach_lora_ids` was given for this tensor; None: none."""
    lora_ids: Tensor | None = getattr(topk_ids, _LORA_IDS, None)
    return lora_ids


class Factors(NamedTuple):
    """The adapter of one weight, as GEMMs take it: ``(L * E, r, K)`` and ``(L * E, N, r)``."""

    a: Tensor
    b: Tensor

    @staticmethod
    def of(a: Tensor, b: Tensor, scaling: float | Tensor, dtype: torch.dtype) -> Factors:
        """The factors in ``dtype``; the scaling is part of the second one."""
        if isinstance(scaling, Tensor):
            scaling = scaling.view(-1, 1, 1, 1)
        b = b if isinstance(scaling, (int, float)) and scaling == 1 else b * scaling
        return Factors(a.flatten(0, 1).to(dtype), b.flatten(0, 1).to(dtype))


def check_factors(
    name: str, pair: tuple[Tensor, Tensor] | None, num_experts: int, n: int, k: int
) -> int:
    """Check the adapters of a weight ``(El, N, K)``; returns L, 0 without adapters."""
    if pair is None:
        return 0
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{name} must be a tuple of lora_a and lora_b, got {type(pair).__name__}")
    a, b = pair
    for which, x in (("a", a), ("b", b)):
        checks.tensor(f"{name} lora_{which}", x, 4, checks.FLOATS)
    adapters, rank = a.shape[0], a.shape[2]
    checks.at_least(1, **{f"{name} rank": rank})
    checks.between(1, checks.MAX_EXPERTS, **{f"{name} L * El": adapters * num_experts})
    for which, x, rule in (
        ("a", a, (adapters, num_experts, rank, k)),
        ("b", b, (adapters, num_experts, n, rank)),
    ):
        if tuple(x.shape) != rule:
            raise ValueError(f"{name} lora_{which} must be {rule}, got shape {tuple(x.shape)}")
    return adapters


def check_lora(lora: ExpertLora, x: Tensor, w1: Tensor, w2: Tensor, scheme: Scheme) -> None:
    """Check the adapters of a layer's weights, which are checked already."""
    if not isinstance(lora, ExpertLora):
        raise TypeError(f"lora must be an ExpertLora or None, got {type(lora).__name__}")
    experts, n, hidden = w1.shape[0], w1.shape[1], x.shape[1]
    quant = scheme.weight
    each = 1 if quant is None else quant.numbers_per_entry(w2.dtype)
    width = w2.shape[2] * each
    first = check_factors("lora.w1's", lora.w1, experts, n, hidden)
    second = check_factors("lora.w2's", lora.w2, experts, w2.shape[1], width)
    if first and second:
        checks.size("lora.w2's L", second, "L of lora.w1", first)
    if lora.lora_ids is not None:
        checks.same_tokens("lora.lora_ids", lora.lora_ids, "hidden_states", x)
    check_adapter_choice(lora.lora_ids, lora.scaling, first or second)
    _check_devices(x, ("lora.lora_ids", lora.lora_ids), ("lora.scaling", lora.scaling))
    for name, pair in (("lora.w1", lora.w1), ("lora.w2", lora.w2)):
        _check_devices(x, *((name, factor) for factor in pair or ()))


def pairs_of(
    routing: Routing, num_experts: int, lora_ids: Tensor | None, num_adapters: int
) -> Tensor:
    """``(T, k)`` int32: ``l * El + e`` for local expert e and adapter l; -1: no product."""
    ids, expert_map = routing.topk_ids, routing.expert_map
    pairs: Tensor = ops.adapter_ids(ids, expert_map, lora_ids, num_experts, num_adapters)[0]
    return pairs


def adapter_rows(
    ids: Tensor, num_experts: int, dtype: torch.dtype, invariant: bool, plan: Tensor | None = None
) -> SlotRows:
    """The row space of `pairs_of`; ``num_experts`` counts pairs of adapter and expert."""
    routing = Routing(ids, ids)  # the weights are not read
    return SlotRows.of(routing, num_experts, UNQUANTIZED, dtype, invariant, plan)


def grouped_gemm(rows: Tensor, w: Tensor, space: SlotRows, top_k: int) -> Tensor:
    """``rows[s // top_k] @ w[e].T`` for every slot s; undefined for slots without an expert."""
    tiles, scheme, invariant = [*space.tiles], UNQUANTIZED.key, space.batch_invariant
    return ops.expert_product(
        rows, None, [w], None, tiles, top_k, scheme, rows.dtype, batch_invariant=invariant
    )


def add_product(
    total: Tensor,
    rows: Tensor,
    w: Tensor,
    space: SlotRows,
    weights: Tensor | None = None,
    top_k: int = 1,
    columns: slice | None = None,
) -> None:
    """Add ``weights[s] * rows[s // top_k] @ w[e].T`` to ``total[s]`` of each slot with an adapter.

    The sum is that of ``total``, which is rounded already, and of the product in float32.
    Column c of the product is added to the c-th of ``columns``; None: to column c.
    """
    tiles, invariant = [*space.tiles], space.batch_invariant
    first, step = (0, 1) if columns is None else (columns.start or 0, columns.step or 1)
    ops.expert_product_out(rows, [w], weights, tiles, top_k, invariant, first, step, out=total)


def grouped_wgrad(dy: Tensor, x: Tensor, weights: Tensor | None, space: SlotRows) -> Tensor:
    """``(weights * dy).T @ x`` over the slots of each expert, or pair of adapter and expert."""
    tiles, experts = [*space.tiles], space.num_local_experts
    scheme, invariant = UNQUANTIZED.key, space.batch_invariant
    return ops.expert_wgrad(dy, x, weights, tiles, experts, scheme, dy.dtype, invariant)


def expert_lora(
    hidden_states: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    topk_ids: Tensor,
    lora_ids: Tensor | None = None,
    scaling: float | Tensor = 1,
) -> Tensor:
    """The low-rank product of every slot: ``scaling * B[l, e] @ A[l, e] @ x``, with gradients.

    Args:
        hidden_states: ``(T, K)``, or one row per slot ``(T * k, K)``; bf16, fp16 or fp32.
        lora_a: ``(L, E, r, K)``, any of the three dtypes; computed in that of ``hidden_states``.
        lora_b: ``(L, E, N, r)``.
        topk_ids: ``(T, k)`` int32 or int64.
        lora_ids: see `ExpertLora`.
        scaling: see `ExpertLora`.

    Returns:
        ``(T * k, N)`` in slot order, dtype of ``hidden_states``; zeros for a slot without an expert
        or an adapter.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit; more than 4096 pairs of adapter and expert.
        NotImplementedError: forward-mode derivatives and transforms of ``torch.func``.
    """
    checks.tensor("hidden_states", hidden_states, 2, checks.FLOATS)
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.tensor("lora_a", lora_a, 4, checks.FLOATS)
    checks.tensor("lora_b", lora_b, 4, checks.FLOATS)
    factors = (("lora_a", lora_a), ("lora_b", lora_b))
    experts, n = lora_a.shape[1], lora_b.shape[2]
    adapters = check_factors("expert_lora's", (lora_a, lora_b), experts, n, hidden_states.shape[1])
    check_adapter_choice(lora_ids, scaling, adapters)
    chosen = (("topk_ids", topk_ids), ("lora_ids", lora_ids), ("scaling", scaling))
    _check_devices(hidden_states, *factors, *chosen)
    if wanted(hidden_states, lora_a, lora_b):
        check_transforms("expert_lora")
    a, b = Factors.of(lora_a, lora_b, scaling, hidden_states.dtype)
    ids = pairs_of(Routing(topk_ids, topk_ids), experts, lora_ids, adapters)
    top_k = _slots_of_a_row(hidden_states, topk_ids)
    return _Lora.apply(hidden_states, a, b, ids, top_k)


def _slots_of_a_row(rows: Tensor, topk_ids: Tensor) -> int:
    """Slots per row: k for tokens, 1 for slots.

    What holds for all sizes comes first: under a compiler, every other comparison adds a guard.
    """
    (tokens, k), count = topk_ids.shape, rows.shape[0]
    if k == 1 or always(count == tokens):
        return k
    if always(count == tokens * k) or count == tokens * k:
        return 1
    if count == tokens:
        return k
    raise ValueError(
        f"hidden_states must have {tokens} rows, one per token, or {tokens * k}, one per slot, got "
        f"{count}"
    )


def check_adapter_choice(lora_ids: Tensor | None, scaling: float | Tensor, adapters: int) -> None:
    """Check which adapter each token has, and the factors of adapters."""
    if lora_ids is not None:
        checks.tensor("lora_ids", lora_ids, 1, checks.INDICES)
    if isinstance(scaling, Tensor):
        numbers = (*checks.FLOATS, torch.float64, *checks.INDICES)
        checks.tensor("scaling", scaling, None, numbers)
        checks.size("scaling.numel()", scaling.numel(), "the number of adapters", adapters)
    else:
        checks.factor("scaling", scaling)


def _check_devices(x: Tensor, *others: tuple[str, float | Tensor | None]) -> None:
    for name, other in others:
        if isinstance(other, Tensor):
            checks.same_device(name, other, "hidden_states", x)


class _Lora(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, ids: Tensor, top_k: int) -> Tensor:
        """Two grouped GEMMs; the rows of rank r are computed again in the backward pass."""
        space = adapter_rows(ids, a.shape[0], x.dtype, invariant=False)
        ctx.top_k = top_k
        ctx.save_for_backward(x, a, b, ids, space.tiles.plan)
        out = grouped_gemm(grouped_gemm(x, a, space, top_k), b, space, 1)
        return out.masked_fill_((ids < 0).view(-1, 1), 0.0)

    @staticmethod
    @once("expert_lora")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> Any:
        """The gradients of the rows and of both factors."""
        x, a, b, ids, plan = saved
        space = adapter_rows(ids, a.shape[0], x.dtype, invariant=False, plan=plan)
        dx = da = db = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[2]:
            db = grouped_wgrad(grad, grouped_gemm(x, a, space, ctx.top_k), None, space)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            low = grouped_gemm(grad, b.transpose(1, 2), space, 1)
            if ctx.needs_input_grad[1]:
                da = grouped_wgrad(low, x, None, space)
            if ctx.needs_input_grad[0]:
                rows = grouped_gemm(low, a.transpose(1, 2), space, 1)
                each = ids if ctx.top_k > 1 else ids.view(-1, 1)
                dx = ops.moe_fused_mul_sum(rows, None, each, None, None, a.shape[0])
        return dx, da, db, None, None
