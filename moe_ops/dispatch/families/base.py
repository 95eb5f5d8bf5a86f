"""What a family of kernels answers: which GEMMs it takes, with which tiles, and how it runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.plan import DEFAULT, BufferSpec, GemmPlan, quantized_rows
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.dispatch.tiles import is_direct, own_plan, plan_sizes, with_own_plan
from moe_ops.scheme import get_scheme


class Condition(NamedTuple):
    """What kernels require of a GEMM and of the GPU."""

    must: str
    """What must hold, and what was got: a template, see `broken`."""
    holds: Callable[[GemmProblem, Device], bool]


def broken(conditions: Iterable[Condition], problem: GemmProblem, device: Device) -> str | None:
    """The text of the first condition that does not hold; None: all hold.

    ``problem``, ``device``, ``scheme`` and ``mode`` (" batch-invariant", or empty) are filled in.
    """
    mode = " batch-invariant" if problem.sizes.rule.batch_invariant else ""
    values = {
        "problem": problem, "device": device, "scheme": get_scheme(problem.scheme), "mode": mode,
    }  # fmt: skip
    texts = (each.must.format(**values) for each in conditions if not each.holds(problem, device))
    return next(texts, None)


@dataclass(frozen=True)
class Family:
    """The kernels that are compiled from one source, under the name that plans give them.

    `plan_gemm` takes the first family that takes a GEMM. Launchers, `explain` and the tuner ask
    the same family.
    """

    kernel: str
    """The name in `GemmPlan.kernel`, in tuned files and in explanations."""
    launcher: str
    """``module:class`` below `moe_ops.kernels`: made of a problem and a plan."""
    kind: tuple[Condition, ...]
    """The kind of GEMM that the kernel is for: its formats, and what follows the product."""
    conditions: tuple[Condition, ...]
    """What a GEMM of this kind must have besides, whatever its tiles."""
    tiles: Callable[[GemmProblem, Device], Any]
    """Analytic tiles of a GEMM that the family takes."""
    preferred: tuple[Condition, ...] = ()
    """What the analytic tiles require besides, to be faster than the next family's."""
    quantizes: tuple[str, ...] = ()
    """States of rows (`GemmProblem.rows`) that the kernel quantizes itself."""
    buffers: Callable[[GemmProblem], tuple[BufferSpec, ...]] = quantized_rows
    """Buffers for rows that are written before the GEMM."""
    keeps_product: Callable[[GemmProblem], bool] = lambda problem: False
    """Whether the kernel stores the product before an activation, too, if a call asks for it."""
    sums: bool = False
    """Whether the kernel also computes the weighted sum over the slots of a token."""
    sorts: bool = False
    """Whether slots are sorted again for tiles that do not divide the plan's."""
    fragments: bool = False
    """Whether weights are in the packed form, the order of tensor-core fragments."""
    source: str = DEFAULT
    """Where analytic tiles come from."""

    def why_not(self, problem: GemmProblem, device: Device) -> str | None:
        """Why the kernel computes a GEMM with no tiles at all; None: it takes the GEMM."""
        return broken((*self.kind, *self.conditions), problem, device)

    def why_another(self, problem: GemmProblem, device: Device) -> str | None:
        """Why the family is not chosen without tuned tiles; None: it is, unless another was."""
        return broken((*self.kind, *self.conditions, *self.preferred), problem, device)

    def plan(self, problem: GemmProblem, tiles: Any, source: str) -> GemmPlan:
        """The plan of a GEMM with these tiles."""
        scratch = self.buffers(problem)
        if self.sorts and own_plan(problem.sizes, tiles):
            own = with_own_plan(problem.sizes, tiles)
            entries = plan_sizes(own.num_slots, own.num_experts, own.rule).entries
            scratch = (*scratch, BufferSpec("plan", 4 * entries))
        return GemmPlan(self.kernel, tiles, self.quantizes_rows(problem), 0, scratch, source)

    def quantizes_rows(self, problem: GemmProblem) -> bool:
        """Whether the kernel, or the pass that gathers its rows, quantizes them."""
        return problem.rows in self.quantizes

    def has(self, tiles: KernelTiles) -> bool:
        """Whether set or tuned tiles are a config of the family; False if tiles are fixed."""
        return False

    def unfit(self, tiles: Any, problem: GemmProblem, device: Device) -> str | None:
        """Why a GEMM that the family takes cannot have these tiles; None: it can."""
        return None


class Tunable(Family):
    """A family whose tiles may be set, tuned and searched for."""

    LEAST_STAGES: ClassVar[int] = 1
    """The fewest stages with which the kernel works."""

    @abstractmethod
    def most_stages(self, tiles: Any, problem: GemmProblem, device: Device) -> int:
        """The most stages with which the kernel can run."""

    def unfit(self, tiles: Any, problem: GemmProblem, device: Device) -> str | None:
        """Why a GEMM that the family takes cannot have these tiles; None: it can."""
        most = self.most_stages(tiles, problem, device)
        if self.LEAST_STAGES <= tiles.num_stages <= most:
            return None
        return f"has {tiles.num_stages} stages, must have {self.LEAST_STAGES} to {most}"

    @abstractmethod
    def worth(self, tiles: Any, problem: GemmProblem) -> bool:
        """Whether the tuner compiles tiles that fit."""

    @abstractmethod
    def steps(
        self, tiles: Any, size: str, problem: GemmProblem, device: Device
    ) -> Sequence[KernelTiles]:
        """Tiles that differ in one field by a step, of which some may not fit."""


def served_by(*archs: int) -> Condition:
    """The GPU is one of an architecture for which the kernels were written."""
    names = " or ".join(f"sm_{arch}" for arch in archs)
    must = f"the GPU must be {names} with its own kernels, got sm_{{device.arch}}"
    return Condition(must, lambda _, device: device.arch in archs and not device.portable_only)


PLAIN = Condition(
    "w must be in the plain form, got {scheme.name} in the packed form",
    lambda problem, _: not problem.fragments,
)
NO_SUM = Condition(
    "the weighted sum must be a kernel of its own", lambda problem, _: not problem.summed
)
SUM = Condition("GEMM 2 must have the weighted sum", lambda problem, _: problem.summed)
BOXES = Condition(
    "operands must be aligned, with contiguous rows and float32 scales",
    lambda problem, _: problem.boxes,
)
FOLLOWS_LOAD = Condition(
    "the GEMM must not be batch-invariant",
    lambda problem, _: not problem.sizes.rule.batch_invariant,
)
ONE_TOKEN = Condition(
    "the routing must be of one token, got {problem.num_tokens}",
    lambda problem, _: problem.one_token,
)
ROUTED = Condition("the routing must be known", lambda problem, _: problem.num_tokens is not None)
DIRECT = Condition(
    "slots must be so few that each is a tile, got {problem.sizes.num_slots}",
    lambda p, _: is_direct(p.sizes.num_slots, p.sizes.num_experts),
)
PLANNED = Condition(
    "rows are packed by a plan, and so few slots have none, got {problem.sizes.num_slots}",
    lambda p, _: not is_direct(p.sizes.num_slots, p.sizes.num_experts),
)
