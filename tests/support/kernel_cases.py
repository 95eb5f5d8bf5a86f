"""Systematic cases of kernels: layouts, remainders, two turns of each loop, and plans of a caller.

A family of kernels has a table of factors. `pairwise.cover` makes rows in which every two values
meet, and `check_all` checks all of them and reports every row that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from pairwise import Rules, cover
from plans import ids_of, planned, row_tile
from sum_calls import with_nan
from torch import Tensor

from moe_ops import ops
from moe_ops.activation import formula
from moe_ops.dispatch.device import NO_GPU, Device
from moe_ops.dispatch.tile_plan import unpack_plan
from moe_ops.dispatch.tiles import one_row_tile
from moe_ops.ops import STAGES
from moe_ops.reference.quantize import moe_quantize
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import Scheme, dequantize_rows, quantize_weight
from moe_ops.tensors import QTensor, Tiles
from moe_ops.testing import Bounded, assert_matches_reference

MOST_WRONG = 3
"""Rows after which nothing more is to be learnt: a kernel that hangs takes 20 s a row."""
EXPERTS = 4
COUNTS = (18, 0, 2, 17)
"""Slots of each expert: two tiles of 16 rows, no tile, a partial one, and two. The five of them are
two bands of two row tiles, and one of one."""
MAP = (3, -1, 0, 1, 9, 2)
"""Local experts of six experts, of which two are elsewhere."""
LAYOUTS = ("plain", "turned", "apart", "padded", "odd", "spaced")
"""Layouts in memory of a weight: see `laid_out`."""
ROUTINGS = ("plain", "mapped", "few", "few_mapped", "spoilt")
"""Routings: all experts here; with an expert map; so few slots that there is no plan, without and
with a map; a plan with entries that no sort writes (see `spoilt`)."""
ACTIVATIONS = ("", "relu2_no_mul", "silu", "swigluoai")
"""No activation, one without a gate, one with halves, one with alternating rows."""
GEMM_FACTORS: Mapping[str, tuple[Any, ...]] = {
    "activation": ACTIVATIONS,
    "layout": LAYOUTS,
    "routing": ROUTINGS,
    "top_k": (1, 2),
    "gap": (0, 8, 3),
    "has_bias": (False, True),
}
"""What every expert GEMM has. Its own table adds sizes: whole tiles, and remainders of 4 mod 8."""


def laid_out(w: Tensor, layout: str) -> Tensor:
    """The numbers of ``w`` ``(E, N, K)`` with other strides.

    ``turned``: stride 1 along N. ``apart``: gaps between experts. ``padded``: gaps between rows.
    ``boxed``: gaps between rows of 16 entries, as TMA takes them. ``odd``: gaps between rows, which
    begin at an odd address. ``spaced``: stride 2 along K.
    """
    if layout == "turned":
        return w.mT.contiguous().mT
    memory = w.view(torch.uint8) if w.itemsize == 1 else w
    experts, rows, columns = memory.shape
    if layout == "apart":
        memory = memory.new_zeros(experts, rows + 3, columns)[:, :rows]
    elif layout == "padded":
        memory = memory.new_zeros(experts, rows, columns + 4)[..., :columns]
    elif layout == "boxed":
        memory = memory.new_zeros(experts, rows, columns + 16)[..., :columns]
    elif layout == "odd":
        memory = memory.new_zeros(experts, rows, columns + 3)[..., 1 : columns + 1]
    elif layout == "spaced":
        memory = memory.new_zeros(experts, rows, 2 * columns)[..., ::2]
    else:
        return w
    return memory.view(w.dtype).copy_(w)


def gapped(x: Tensor, gap: int) -> Tensor:
    """The rows of ``x`` with so many entries between them."""
    memory = x.view(torch.uint8) if x.itemsize == 1 else x
    memory = memory.new_zeros(len(x), x.shape[1] + gap)[:, : x.shape[1]]
    return memory.view(x.dtype).copy_(x)


def spoilt(plan: Tensor, num_slots: int, tile: int) -> tuple[Tensor, Tensor]:
    """A plan whose padding is negative or very large, and whose last tile in use has no expert.

    Returns:
        The plan, and the slots ``(n,)`` of the tile that lost its expert.
    """
    plan = plan.clone()
    slots, experts, used = unpack_plan(plan, num_slots, EXPERTS, one_row_tile(tile))
    padding = slots >= num_slots
    odd = torch.tensor([-1, -(2**31), 2**31 - 1, num_slots], dtype=torch.int32)
    slots[padding] = odd[torch.arange(int(padding.sum())) % 4]
    last = int(used) // tile - 1
    experts[last] = EXPERTS + 1 if num_slots % 2 else -2
    lost = slots[last * tile : (last + 1) * tile]
    return plan, lost[(lost >= 0) & (lost < num_slots)].long()


class Routed:
    """Slots of experts, and the tiles that a GEMM gets.

    Args:
        routing: one of `ROUTINGS`.
        top_k: slots of a token.
        scheme: key of the scheme.
        tile: the row tile.
        counts: slots of each expert.
        facts: the GPU for which kernels are chosen.
    """

    def __init__(
        self,
        routing: str,
        top_k: int,
        scheme: str = "unquantized",
        tile: int = 16,
        counts: tuple[int, ...] = COUNTS,
        facts: Device = NO_GPU,
    ) -> None:
        few = routing.startswith("few")
        ids = torch.tensor([[3, 1]]).int().view(-1, top_k) if few else ids_of(counts, top_k)
        self.expert_map = None
        if routing.endswith("mapped"):
            self.expert_map = torch.tensor(MAP, dtype=torch.int32)
            ids = torch.tensor([2, 4, 5, 0, -1], dtype=torch.int32)[ids.long()]
        self.ids, self.top_k, self.tile, self.facts = ids, top_k, tile, facts
        self.expert = local_experts(ids, self.expert_map, EXPERTS)
        self.tiles = Tiles(None, ids, self.expert_map)
        """What the kernel gets."""
        if not few:
            with self.row_tile():
                self.tiles = planned(ids, self.expert_map, EXPERTS, scheme)
        self.sound = self.tiles
        """What the reference gets."""
        if routing == "spoilt":
            plan, lost = spoilt(self.tiles.plan, len(self.expert), tile)
            self.tiles = self.tiles._replace(plan=plan)
            self.expert[lost] = -1
        self.mine = self.expert >= 0
        """The slots whose rows are written."""

    def row_tile(self) -> Any:
        """Inside, plans have the row tile; kernels may be any."""
        return row_tile(self.tile, self.facts, portable_only=False)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def rows(self, x: Tensor, gap: int = 0) -> Tensor:
        """Rows of tokens, `gapped`; those that no slot reads are NaN.

        Not with a plan that is spoilt, where a NaN could also be a product that is written.
        """
        if self.tiles is self.sound:
            x = poisoned(x, self.mine.view(len(x), -1).any(1))
        return gapped(x, gap)

    def of_experts(self, x: Tensor | None) -> Tensor | None:
        """What each expert has; NaN for experts that no slot has."""
        return poisoned(x, torch.isin(torch.arange(EXPERTS), self.expert))

    def weights(self) -> Tensor:
        """Router weights ``(T, k)``: powers of two."""
        return 2.0 ** (torch.arange(self.ids.numel()).view(self.ids.shape) % 3 - 1)

    def exact(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
        activation: str = "",
        stored: torch.dtype | None = None,
    ) -> Bounded:
        """``f(weights * rows[s // k] @ weight[e].T + bias[e])`` in float64."""
        of_slots = Bounded.exactly(rows.double().repeat_interleave(self.top_k, 0))
        found = of_slots.products(weight.double(), self.expert, stored)
        if weights is not None:
            found = found.times(weights.view(-1, 1))
        if bias is not None:
            found = found.plus(bias[self.expert])
        return found.activated(formula(activation)) if activation else found


def assert_unwritten(out: Tensor, mine: Tensor) -> None:
    """Rows of slots that no tile has are as fresh memory is in these tests: NaN."""
    assert out[~mine].isnan().all(), "rows of skipped slots must not be written"


def compare(out: Tensor, exact: Bounded, expected: Tensor, routed: Routed, activation: str) -> None:
    """Every bit without an activation, else within the budget of the reference."""
    mine = routed.mine
    assert_unwritten(out, mine)
    if not activation:
        assert torch.equal(out[mine], exact.value[mine].float().to(out.dtype)), "every bit"
    assert_matches_reference(out[mine], exact.rounded(out.dtype)[mine], expected[mine])


def cases(rules: Rules = (), **factors: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Rows in which every two values of the factors meet; those of `GEMM_FACTORS` are included."""
    return cover({**GEMM_FACTORS, **factors}, rules)


def poisoned(x: Tensor | None, used: Tensor) -> Tensor | None:
    """``x`` with NaN in all but the used entries of its first axis, which no kernel may read."""
    return None if x is None else with_nan(x, ~used)


def check_all(rows: Iterable[dict[str, Any]], check: Callable[..., None]) -> None:
    """Call ``check`` with every row, and report all rows that fail, up to `MOST_WRONG`."""
    wrong = []
    for row in rows:
        try:
            check(**row)
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{row}: {type(error).__name__}: {error}")
        if len(wrong) == MOST_WRONG:
            break
    assert not wrong, "\n".join([f"{len(wrong)} cases are wrong", *wrong])


def whole(*shape: int, most: int = 3, seed: int = 0) -> Tensor:
    """float32 integers of at most ``most`` either way."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=g).float()


def powers(like: Tensor, seed: int = 0) -> Tensor:
    """Scales of 1/2, 1 and 2 in the form of other scales: bytes are e8m0 codes."""
    exponents = whole(*like.shape, most=1, seed=seed)
    if like.dtype == torch.uint8:
        return (exponents + 127).to(torch.uint8)
    return (2.0**exponents).to(like.dtype)


def whole_weight(scheme: Scheme, n: int, k: int, seed: int = 1, experts: int = EXPERTS) -> QTensor:
    """A stored weight of integers ``(experts, n, k)`` with scales of `powers`."""
    q = quantize_weight(whole(experts, n, k, most=6, seed=seed).bfloat16(), scheme)
    scales = {
        name: powers(scale, seed)
        for name, scale in q._asdict().items()
        if name in ("scale", "global_scale") and scale is not None
    }
    return q._replace(**scales)


def whole_rows(scheme: Scheme, tokens: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantized rows of integers with scales of `powers`, and their numbers in float64."""
    quant = scheme.activation
    given = torch.ones(1) if quant.static or quant.global_scale else None
    x = whole(tokens, k, most=6).bfloat16()
    q, scale = moe_quantize(x, given, None, None, None, 1, quant.key)
    scale = powers(scale, 5)
    return q, scale, dequantize_rows(q, scale, quant).double()


def same(name: str, *arguments: Any, skipped: Tensor | None = None) -> Any:
    """The kernel's result, which must be the reference's, bit by bit.

    Rows of ``skipped`` slots are not written: they hold what fresh memory does, NaN.
    """
    stage = import_module(f"moe_ops.reference.{STAGES[name]}")
    actual, expected = getattr(ops, name)(*arguments), getattr(stage, name)(*arguments)
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, expected)), strict=True)
    for i, (a, b) in enumerate(pairs):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (x.float() if x.itemsize == 1 and x.is_floating_point() else x for x in (a, b))
        if skipped is not None and a.dim() == 2 and len(a) == len(skipped):
            assert a[skipped].isnan().all()
            a, b = a[~skipped], b[~skipped]
        assert torch.equal(a, b), f"result {i} of {name}"
    return actual


def spaced(x: Tensor) -> Tensor:
    """Give ``x`` rows that lie apart."""
    return torch.cat([x, x], 1)[:, : x.shape[1]]
