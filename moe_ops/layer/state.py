"""The state of a layer: what its tensors hold, and where, as one value.

Staging, converting, moving, saving and loading go from one state to the next. A layer has one, its
attribute ``state``; beside it change only its parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.layer.parameters import Held
from moe_ops.layer.partition import LayerSizes, aligned_sizes
from moe_ops.loading.given import GivenScales
from moe_ops.parallel import FusedMoEParallelConfig
from moe_ops.parallel.eplb_state import LayerEplbState
from moe_ops.pipeline.host_experts import HostExperts
from moe_ops.pipeline.modular_kernel import FusedMoEKernel
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalize
from moe_ops.routing import CaptureFn
from moe_ops.scheme import Scheme, exact_fp8_scheme

WEIGHTS = ("w13", "w2")
PLAIN, PACKED, FP8 = "plain", "packed", "fp8"


@dataclass(frozen=True)
class ExpertPlacement:
    """Where experts are. The experts' kernels get the ids of physical experts."""

    logical: tuple[int, ...]
    """The logical expert that each physical one holds; shared experts come after E; -1: none."""
    row: tuple[int, ...]
    """The row of each physical expert in this rank's parameters; -1: another rank has it."""
    is_shared_out: bool
    """Whether other ranks hold experts that this rank does not."""

    @property
    def num_local_experts(self) -> int:
        """Number of rows of the parameters."""
        return sum(row >= 0 for row in self.row)

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """The rows of this rank that hold each logical expert."""
        rows: dict[int, list[int]] = {expert: [] for expert in self.logical if expert >= 0}
        for expert, row in zip(self.logical, self.row, strict=True):
            if row >= 0 and expert >= 0:
                rows[expert].append(row)
        return rows

    @property
    def experts(self) -> list[int]:
        """The logical expert that each row of this rank holds; -1: none."""
        pairs = zip(self.row, self.logical, strict=True)
        return [expert for _, expert in sorted(pair for pair in pairs if pair[0] >= 0)]

    def expert_map(self, device: torch.device | str | None) -> Tensor | None:
        """Return int32 ``(physical,)``, or None if this rank holds all experts."""
        if not self.is_shared_out:
            return None
        return torch.tensor(self.row, dtype=torch.int32, device=device)


class Made(NamedTuple):
    """What was made of a state and of parameters, and is right as long as they are these."""

    value: Any
    held: Held


def short(experts: Sequence[int]) -> str:
    """Return a list of experts for a message, shortened."""
    if len(experts) <= 8:
        return str([*experts])
    return f"[{', '.join(map(str, experts[:4]))}, .., {experts[-1]}]"


def _beside(default: Any = None) -> Any:
    """A field that is no part of the value: it is neither compared nor printed."""
    return field(default=default, compare=False, repr=False)


@dataclass(frozen=True)
class LayerState:
    """Sizes, scheme, forms, placement, ranks and residency of a layer, as a value."""

    num_experts: int
    """E, without redundant and shared experts."""
    top_k: int
    model_hidden_size: int
    """H of the tokens."""
    intermediate_size: int
    """I of one expert, all ranks together."""
    sizes: LayerSizes
    """Sizes of this rank's parameters."""
    checkpoint_scheme: Scheme
    """The scheme of the layer's checkpoints, which may have larger blocks than ``sizes`` has."""
    placement: ExpertPlacement
    """The first placement; see `held_placement`."""
    parallel: FusedMoEParallelConfig
    """The ranks."""
    batch_invariant: bool = False
    fragments: tuple[str, ...] = ()
    """Which of ``w13`` and ``w2`` are in fragments: the form ``packed``."""
    resident_experts: int | None = None
    """Number of experts on the device, if all are in host memory; None: all are on the device."""
    device: torch.device | None = None
    """The device on which the experts run; None: that of the parameters."""
    activation: str = _beside(default="")
    """Key of the experts' activation."""
    cast_dtype: torch.dtype | None = _beside()
    """Dtype to which the layer was cast, also if its weights and scales keep theirs; None: none."""
    quant_method: Any = _beside()
    """How the layer's experts are stored and multiplied: a `FusedMoEMethodBase`."""
    kernel: FusedMoEKernel | None = _beside()
    """The kernel that a caller has set."""
    beside_kernel: Held | None = _beside()
    """The layer's scales and biases when ``kernel`` was set."""
    host_experts: HostExperts | None = _beside()
    """Store and slots, if the experts are in host memory."""
    eplb_state: LayerEplbState | None = _beside()
    """The layer's part of an `EplbState`."""
    eplb_state_is_copied: bool = _beside(default=False)
    """Whether ``eplb_state`` was copied with the layer or unpickled: no `EplbState` changes it."""
    capture_fn: CaptureFn | None = _beside()
    """See `FusedMoE.set_capture_fn`."""
    capture_buffer: Tensor | None = _beside()
    given_scales: GivenScales = field(default_factory=GivenScales, compare=False, repr=False)
    """The static scales of the loading that is going on."""
    initial_seed: int | None = _beside()
    """The seed of `initialize`, if the layer holds nothing else; None: weights may be loaded."""
    ranks_agree: bool = _beside(default=False)
    """Whether the ranks have compared their layers: see `moe_ops.layer.rank_checks`."""
    exchange: FusedMoEPrepareAndFinalize | None = field(init=False, compare=False, repr=False)
    """What sends tokens to other ranks: a part of the kernel; None: nothing does."""
    made: dict[str, Made] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The configuration and the kernel of calls. A new state has none."""

    def __post_init__(self) -> None:
        exchange, method = None, self.quant_method
        if self.kernel is not None:
            exchange = self.kernel.prepare_finalize
        elif self.parallel.exchanges_tokens and method is not None:
            exchange = method.maybe_make_prepare_finalize()
        object.__setattr__(self, "exchange", exchange)

    def __repr__(self) -> str:
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        for name in ("sizes", "placement", "fragments"):
            del facts[name]
        local = {f"local_{name}": size for name, size in vars(self.sizes).items()}
        scheme, held = local.pop("local_exact_of"), local.pop("local_scheme")
        facts |= {**local, "scheme": scheme or held, "held_as": scheme and held}
        facts |= {"forms": self.forms, "local_experts": short(self.placement.experts)}
        named = {name: x.name if isinstance(x, Scheme) else x for name, x in facts.items()}
        shown = (f"{name}={x}" for name, x in named.items() if x is not None)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def in_dtype(self) -> torch.dtype:
        """Dtype of the tokens to expect."""
        return self.sizes.dtype if self.cast_dtype is None else self.cast_dtype

    @property
    def forms(self) -> dict[str, str]:
        """The form of ``w13`` and of ``w2``: see `moe_ops.layer.forms`."""
        if self.sizes.exact_of is not None:
            return dict.fromkeys(WEIGHTS, FP8)
        return {which: PACKED if which in self.fragments else PLAIN for which in WEIGHTS}

    def in_forms(self, forms: Mapping[str, str]) -> LayerState:
        """Return the state after weights were converted; plain if ``forms`` names none."""
        plain = self.sizes.plain
        held = exact_fp8_scheme(plain.scheme) if FP8 in forms.values() else None
        sizes = plain if held is None else replace(plain, scheme=held, exact_of=plain.scheme)
        fragments = tuple(which for which in WEIGHTS if forms.get(which) == PACKED)
        return replace(self, sizes=sizes, fragments=fragments)

    def holding(self, other: LayerState) -> LayerState:
        """Return the state of a layer that has got the weights of another state."""
        return replace(
            self,
            sizes=other.sizes,
            fragments=other.fragments,
            checkpoint_scheme=other.checkpoint_scheme,
            quant_method=other.quant_method,
            given_scales=other.given_scales,
        )

    def held_placement(self) -> ExpertPlacement:
        """Return the placement with the logical experts that the rows hold now.

        `EplbState.rebalance_` changes the maps that `FusedMoE.set_eplb_state` has set: they are
        read here, for which the host waits.
        """
        eplb = self.eplb_state if self.parallel.enable_eplb else None
        if eplb is None or eplb.logical_to_physical_map.is_meta:
            return self.placement
        return replace(self.placement, logical=eplb.held_experts(len(self.placement.row)))

    def aligned_sizes(self) -> LayerSizes:
        """Sizes with which every rank has whole scales, and gate and up have their own.

        These are the sizes of the plain parameters from the start.
        """
        return aligned_sizes(self.sizes.plain, self.intermediate_size, self.parallel.tp_size)

    def saved_sizes(self) -> LayerSizes:
        """Sizes of this layer on one rank, whose state dict `load_checkpoint` reads."""
        sizes = replace(self.sizes.plain, scheme=self.checkpoint_scheme)
        return aligned_sizes(sizes, self.intermediate_size, 1)


def against_host_memory(enable_eplb: bool, parallel: FusedMoEParallelConfig) -> str | None:
    """Say why the experts of a layer cannot be in host memory; None: they can."""
    if enable_eplb:
        return (
            "enable_eplb must be False with resident_experts, since experts that move between "
            "ranks must all be on the device, got True"
        )
    if parallel.exchanges_tokens:
        return (
            "dp_size must be 1 and is_sequence_parallel False with resident_experts, since kernels "
            "behind an exchange of tokens do not read experts from host memory yet, got "
            f"dp_size = {parallel.dp_size} and sp_size = {parallel.sp_size}"
        )
    return None
