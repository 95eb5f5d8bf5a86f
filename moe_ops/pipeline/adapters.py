"""Low-rank products beside both GEMMs of a forward pass, added to rounded products.

`Adapters` holds factors as serving engines stack them. A call without gradients runs them; training
takes the factors of an `ExpertLora`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moe_ops import checks, ops
from moe_ops.pipeline.forward import Pass
from moe_ops.pipeline.gathering import by_slot
from moe_ops.pipeline.gemms import activated, quantized
from moe_ops.pipeline.lora import adapter_rows, add_product, grouped_gemm
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.tensors import Routing, Rows


class LowRank(NamedTuple):
    """The factors of L adapters of a weight, or of some of its rows."""

    a: Tensor
    """``(L, El, r, K)``, or ``(L, 1, r, K)``: the same for all experts."""
    b: Tensor
    """``(L, El, n, r)`` or ``(L, 1, n, r)`` for n rows of the weight; scaled already."""
    rows: slice = slice(None)
    """The n rows of the weight: all, the gate's or up's."""

    def check(self, name: str, num_experts: int, n: int, k: int) -> None:
        """Check factors of a weight ``(El, N, K)``.

        Raises:
            TypeError: a factor that is not bf16, fp16 or fp32, or two dtypes.
            ValueError: shapes that do not fit; more than 4096 pairs of adapter and expert.
        """
        a, b = self.a, self.b
        n = len(range(n)[self.rows])
        for which, x in (("a", a), ("b", b)):
            checks.tensor(f"{name}.{which}", x, 4, checks.FLOATS)
        if a.dtype != b.dtype:
            raise TypeError(f"{name}.b must have the dtype of a, {a.dtype}, got {b.dtype}")
        adapters, rank = a.shape[0], a.shape[2]
        checks.between(1, checks.MAX_EXPERTS, **{f"{name}'s L * El": adapters * num_experts})
        for which, x, sizes in (("a", a, (rank, k)), ("b", b, (n, rank))):
            fits = [(adapters, experts, *sizes) for experts in (num_experts, 1)]
            if tuple(x.shape) not in fits:
                rule = f"{fits[0]} or {fits[1]}"
                raise ValueError(f"{name}.{which} must be {rule}, got shape {tuple(x.shape)}")


class Adapters(NamedTuple):
    """Adapters of a call without gradients, whose factors no step copies.

    All factors are contiguous and have the dtype of the tokens.
    """

    first: tuple[LowRank, ...]
    """Beside the first weight: one for all rows, or one for gate rows and one for up rows."""
    second: LowRank
    """Beside the second weight."""
    lora_ids: Tensor | None = None
    """``(T,)`` int32 or int64: see `ExpertLora`."""

    def check(self, num_experts: int, n: int, hidden: int, intermediate: int) -> None:
        """Check the factors for weights ``(El, N, H)`` and ``(El, H, I)``.

        Raises:
            TypeError, ValueError: as `LowRank.check`; other numbers of adapters.
        """
        self.second.check("second", num_experts, hidden, intermediate)
        for low in self.first:
            low.check("first", num_experts, n, hidden)
            checks.size("first's L", low.a.shape[0], "L of second", self.num_adapters)

    @property
    def num_adapters(self) -> int:
        """L."""
        return self.second.a.shape[0]

    def beside(self, step: Pass, x: Tensor, routing: Routing) -> Pass:
        """The step with these adapters between its GEMMs.

        Args:
            step: a step whose rows lie in slot order.
            x: ``(T, H)``, not quantized.
            routing: the tokens' routing.

        Raises:
            NotImplementedError: rows that are permuted, or padded by expert.
        """
        if step.gather is not by_slot:
            raise NotImplementedError(
                "adapters need experts that keep rows in slot order, as TritonExperts do, got "
                "experts that gather rows in another order"
            )
        settings = step.settings._replace(rounds_product=True)
        experts, dtype, invariant = len(step.weights.w1.data), x.dtype, settings.batch_invariant
        of_slots, of_all, of_tokens = ops.adapter_ids(
            routing.topk_ids, routing.expert_map, self.lora_ids, experts, self.num_adapters
        )
        pairs = adapter_rows(of_slots, self.num_adapters * experts, dtype, invariant)
        shared = tokens = pairs
        if any(x.shape[1] < experts for low in (*self.first, self.second) for x in low[:2]):
            shared = adapter_rows(of_all, self.num_adapters, dtype, invariant)
            tokens = adapter_rows(of_tokens, self.num_adapters, dtype, invariant)
        spaces, k = (pairs, shared, tokens), of_slots.shape[1]
        on_input = routing.topk_weights if settings.on_input else None
        first = tuple(Product.of(low, spaces, k) for low in self.first)
        second = Product.of(self.second, (pairs, shared, shared), 1)
        between = Beside(x, on_input, first, second, [])
        return step._replace(settings=settings, between=between)


class Product(NamedTuple):
    """A low-rank product, ready to run: two GEMMs, each with a row space of its own."""

    a: Tensor
    """``(A, r, K)``."""
    b: Tensor
    """``(B, n, r)``."""
    into: SlotRows
    """Row space of ``rows @ a.T``."""
    out_of: SlotRows
    """Row space of the slots to whose rows products are added."""
    top_k: int = 1
    """Rows of ``into`` for each row that is multiplied."""
    repeats: int = 1
    """Slots for each row of ``into``."""
    columns: slice | None = None
    """Columns of the slots' rows; None: all of them. (Dynamo of torch 2.11 takes no slice as a
    field's default.)"""

    @staticmethod
    def of(low: LowRank, spaces: tuple[SlotRows, SlotRows, SlotRows], top_k: int) -> Product:
        """The product of rows with ``top_k`` slots each.

        A first factor that all experts share is multiplied once per row.

        Args:
            low: the factors.
            spaces: slots by adapter and expert, slots by adapter, and rows by adapter.
            top_k: slots per row.
        """
        pairs, shared, rows = spaces
        experts = pairs.num_local_experts // low.a.shape[0]
        a_is_shared, b_is_shared = (x.shape[1] < experts for x in low[:2])
        return Product(
            low.a.flatten(0, 1),
            low.b.flatten(0, 1),
            rows if a_is_shared else pairs,
            shared if b_is_shared else pairs,
            1 if a_is_shared else top_k,
            top_k if a_is_shared else 1,
            low.rows,
        )

    def add_to(self, total: Tensor, rows: Tensor, weights: Tensor | None = None) -> None:
        """Add the products of rows, times the slots' weights, to the slots' rows of ``total``."""
        low = grouped_gemm(rows, self.a, self.into, self.top_k)
        add_product(total, low, self.b, self.out_of, weights, self.repeats, self.columns)


class Beside(NamedTuple):
    """Low-rank products beside both GEMMs: the `Between` of a forward pass."""

    x: Tensor
    """``(T, H)``."""
    on_input: Tensor | None
    """Router weights, if they multiply the rows of the first GEMM."""
    first: tuple[Product, ...]
    second: Product | None
    activated: list[Tensor]
    """The activated rows that the second product reads."""

    def activate(self, product: Tensor, space: Any, step: Pass) -> Rows:
        """Add the first products, then activate."""
        weights, (scheme, key, *_) = step.weights, step.settings
        for low in self.first:
            low.add_to(product, self.x, self.on_input)
        if self.second is None:
            return activated(product, weights, space, scheme, key)
        rows = ops.activation(product, key)
        self.activated.append(rows)
        return quantized(rows, weights.a2_scale, weights.w2, space, scheme)

    def after(self, y: Tensor) -> Tensor:
        """Add the second product."""
        if self.second is not None:
            self.second.add_to(y, self.activated.pop())
        return y
