"""The keyword arguments of a layer, in one documented list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.brief import brief
from moe_ops.layer.partition import LayerSizes, aligned_sizes
from moe_ops.layer.state import ExpertPlacement, LayerState, against_host_memory
from moe_ops.loading.names import check_mapping
from moe_ops.parallel import FusedMoEParallelConfig, maybe_roundup_hidden_size
from moe_ops.parallel.parallel_config import check_group
from moe_ops.parallel.placement import logical_experts, ranks_of_experts, rows_of_rank
from moe_ops.pipeline.row_spaces import check_batch_invariant
from moe_ops.routing import SCORING_FUNCS, CustomRouting, expert_groups
from moe_ops.scheme import UNQUANTIZED, Scheme, as_scheme

OF_THE_CONFIG = (
    "tp_size", "tp_rank", "dp_size", "dp_rank", "ep_size", "ep_rank", "all2all_backend",
)  # fmt: skip
"""Options that ``moe_parallel_config`` replaces."""
OF_EXCHANGES = ("max_num_tokens", "equal_num_tokens", "capacity_factor", "on_dead_rank")
"""Options of the exchange of tokens."""
_GROUPS, _BIAS = "use_grouped_topk", "e_score_correction_bias"
OTHER_ROUTERS = {
    "hash_indices_table": (_GROUPS, "custom_routing_function", _BIAS),
    "custom_routing_function": (_GROUPS, "scoring_func", _BIAS),
}
"""Options that must keep their defaults beside a router of the caller's."""
FORMER = "quant_config"
"""The former name of ``scheme``. Elsewhere it is a `FusedMoEQuantConfig`, of a scheme's tensors."""
OTHER_NAMES = {"dtype": "params_dtype", "bias": "has_bias"}
"""Keywords that callers try, and the keyword that is meant."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FusedMoEOptions:
    """Everything about a layer but its four sizes. None stands for the default of any option."""

    params_dtype: torch.dtype | None = None
    """Dtype of everything that is not quantized; None: torch's default dtype."""
    reduce_results: bool = False
    """Sum the result over the ranks that share the layer."""
    renormalize: bool = True
    """Divide a token's weights by their sum."""
    use_grouped_topk: bool = False
    """Choose experts within the best groups of experts."""
    num_expert_group: int | None = None
    topk_group: int | None = None
    """Number of groups that a token may choose from."""
    scheme: str | Scheme | None = None
    """How activations and weights are quantized: a scheme or its name; None: not at all."""
    tp_size: int = 1
    """Ranks of a tensor-parallel group. Each holds a part of every expert, cut along I, unless
    there is expert parallelism."""
    ep_size: int = 1
    """Ranks that share the experts. More than one means expert parallelism, in which no expert is
    cut. If ``tp_size`` is given too, these are the ranks of that group:
    ``ep_size = tp_size * dp_size``."""
    dp_size: int = 1
    """Data-parallel replicas, which share the experts: whole ones (``ep_size``), or parts of every
    expert. Every replica passes its own tokens, of any number, on all of its ``tp_size`` ranks, and
    gets their finished results."""
    tp_rank: int = 0
    ep_rank: int | None = None
    """None: the rank in the group of all ranks, ``dp_rank * tp_size + tp_rank``."""
    dp_rank: int = 0
    all2all_backend: str | None = None
    """How ranks exchange tokens: see `FusedMoEParallelConfig`."""
    moe_parallel_config: FusedMoEParallelConfig | None = None
    """Replaces the options above that it has too, which must not contradict it."""
    tp_group: Any = None
    """The ranks that share the layer, by replica: a process group, its name, a `RankGroup`, or a
    `DeviceMesh` of these ranks, such as one of dimensions ``("dp", "tp")``. None: all processes."""
    max_num_tokens: int | None = None
    """The largest number of tokens of a call on any rank, if ranks exchange tokens: what travels is
    padded to it. None: calls agree on a number; see `AllGatherPrepareAndFinalize`."""
    equal_num_tokens: bool = False
    """All ranks pass equally many tokens in every call, if ranks exchange tokens: nothing is padded
    to ``max_num_tokens``. Another number on a rank is an error on all ranks."""
    capacity_factor: float = 1
    """The part of ``max_num_tokens`` for which there is room: `FixedCapacityPrepareAndFinalize`."""
    on_dead_rank: str = "raise"
    """What calls do once a rank has died: see `SymmetricPrepareAndFinalize`. Layers share windows:
    with "mask" the ``kernel.prepare_finalize.set_live_ranks`` of one layer serves all of them."""
    prefix: str = ""
    """The layer's name in a checkpoint, unless loading is given another."""
    custom_routing_function: CustomRouting | None = None
    """The only router: ``f(hidden_states, router_logits, k, renormalize) -> (weights, ids)``."""
    scoring_func: str = "softmax"
    """``softmax``, ``sigmoid`` or ``sqrtsoftplus``."""
    routed_scaling_factor: float = 1
    """Factor by which the router multiplies the weights, once."""
    e_score_correction_bias: Tensor | None = None
    """``(E,)`` float32, added to the scores when experts are chosen, not to the weights."""
    hash_indices_table: Tensor | None = None
    """``(vocabulary, k)`` int32 or int64: the experts of each vocabulary id, looked up by the
    ``input_ids`` of a call. The logits only weight them. See `hash_topk`."""
    apply_router_weight_on_input: bool = False
    """Scale the tokens instead of the experts' results, for any k."""
    activation: MoEActivation | Activation | str = "silu"
    enable_eplb: bool = False
    """Map ids to physical experts and record their load; see `set_eplb_state`. Ranks that route
    tokens of their own count these; `EplbState.rebalance_` sums the counts over its group."""
    num_redundant_experts: int = 0
    """Physical experts beyond E, which hold copies of experts."""
    has_bias: bool = False
    """Whether both GEMMs have a bias."""
    is_sequence_parallel: bool = False
    """The tokens of a batch are split over the ranks, in any numbers. Every rank passes its own
    tokens, which the ranks exchange, and gets their finished results."""
    zero_expert_num: int = 0
    """Number of logits, the last ones, of experts that return their input."""
    zero_expert_type: str | None = None
    """Only ``identity``."""
    expert_mapping: Sequence[tuple[str, str, int, str]] | None = None
    """The mapping that `load_weights` uses, as `make_expert_params_mapping` returns it."""
    n_shared_experts: int = 0
    """Experts after the E routed ones, to which every token goes with weight 1."""
    shared_expert_gate: bool = False
    """Weight these experts by ``sigmoid(<token, gate>)`` instead, computed in float32. The gate is
    the parameter ``shared_expert_gate_weight (1, H)``, as Qwen2-MoE and Qwen3-Next have it."""
    shared_experts: nn.Module | None = None
    """A module on tokens whose result is returned beside the routed one."""
    expert_placement_strategy: str = "linear"
    """Which experts a rank holds: see `determine_expert_map`."""
    chunk_size: int | None = None
    """Run at most this many tokens at a time. Compiled, each number of chunks has its own graph."""
    device: torch.device | str | None = None
    """Device of the parameters."""
    batch_invariant: bool = False
    """The bits of a token's result do not depend on other tokens: see `fused_experts`. A custom
    router must ensure this for its own part."""
    fuse_wgrad_accumulation: bool = False
    """Backward passes add gradients to the float32 ``main_grad`` of each parameter that requires
    grad. The caller sets it: see `moe_ops.training.with_main_grad`."""

    resident_experts: int | float | str | None = None
    """Experts of this rank on the device, while all are in host memory: an int from ``top_k`` to
    all of them, a float in (0, 1] (their share, at least ``top_k``) or a size such as ``"20GB"``
    (1e9 bytes). Results have the bits of a layer without this option. None: all on the device. See
    `moe_ops.offload_`."""

    __repr__ = brief

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            value = option.default if value is None else checks.plain(value)
            object.__setattr__(self, option.name, value)
        parallel = self.moe_parallel_config
        if isinstance(parallel, FusedMoEParallelConfig) and parallel.enable_eplb:
            object.__setattr__(self, "enable_eplb", True)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> FusedMoEOptions:
        """Make the options that a layer's keywords give.

        ``quant_config``, the former name of ``scheme``, is accepted until version 0.3.

        Raises:
            TypeError: an unknown keyword; the message suggests a known one if a similar one exists.
        """
        if FORMER in arguments:
            warn(f"FusedMoE({FORMER}=..) is now scheme=..", DeprecationWarning, stacklevel=3)
            arguments = dict(arguments)
            former = arguments.pop(FORMER)
            if arguments.get("scheme") is not None:
                raise TypeError(f"FusedMoE takes scheme or {FORMER}, got both")
            arguments["scheme"] = former
        names = [option.name for option in fields(cls)]
        for name in arguments:
            if name not in names:
                meant = OTHER_NAMES.get(name)
                hint = f"; pass {meant}=" if meant else checks.did_you_mean(name, names)
                raise TypeError(f"FusedMoE has no option {name!r}{hint}")
        return cls(**arguments)

    @property
    def known_scheme(self) -> Scheme:
        """The scheme of the weights; without one they are not quantized."""
        return as_scheme(UNQUANTIZED if self.scheme is None else self.scheme)

    def check(self, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int) -> None:
        """Raise for wrong types, settings that contradict each other, and missing features."""
        self._check_kinds()
        checks.between(1, checks.MAX_EXPERTS, num_experts=num_experts)
        checks.at_least(1, hidden_size=hidden_size, intermediate_size=intermediate_size)
        self._check_ranks()
        weight = self.known_scheme.weight
        if weight is not None and hidden_size % weight.element.values_per_byte:
            raise ValueError(f"hidden_size must be even for 4-bit weights, got {hidden_size}")
        for name in ("num_redundant_experts", "n_shared_experts", "zero_expert_num"):
            checks.at_least(0, **{name: getattr(self, name)})
        num_logits = num_experts + self.zero_expert_num
        checks.topk("top_k", top_k, num_experts)
        checks.one_of("scoring_func", self.scoring_func, SCORING_FUNCS)
        checks.factor("routed_scaling_factor", self.routed_scaling_factor)
        if (bias := self.e_score_correction_bias) is not None:
            checks.tensor("e_score_correction_bias", bias, 1, (torch.float32,))
            name, size = "e_score_correction_bias.shape[0]", bias.shape[0]
            checks.size(name, size, "the number of logits", num_logits)
        self._check_router(top_k)
        if self.use_grouped_topk:
            expert_groups(num_logits, self.num_expert_group, self.topk_group, top_k=top_k)
        if self.num_redundant_experts and not self.enable_eplb:
            raise ValueError(
                "num_redundant_experts must be 0 without enable_eplb, "
                f"got {self.num_redundant_experts}"
            )
        if self.n_shared_experts and self.enable_eplb:
            raise NotImplementedError(
                "n_shared_experts must be 0 with enable_eplb, which has no replicas of shared "
                f"experts, got {self.n_shared_experts}"
            )
        self._check_gate()
        ranks, physical = self.parallel_config().ep_size, num_experts + self.num_redundant_experts
        if ranks > physical:
            raise ValueError(f"ep_size must be at most the {physical} experts, got {ranks}")
        if self.chunk_size is not None:
            checks.at_least(1, chunk_size=self.chunk_size)
        self._check_exchange()
        if self.batch_invariant:
            self._check_batch_invariant()
        self._check_main_grads()

    def _check_kinds(self) -> None:
        """Raise TypeError for a value that is not the flag, dtype, scheme or function wanted."""
        flags = [f.name for f in fields(self) if f.default is False]
        checks.flags(**{name: getattr(self, name) for name in flags}, renormalize=self.renormalize)
        checks.dtype_of("params_dtype", self.params_dtype, (*checks.FLOATS, None))
        checks.instance("prefix", self.prefix, str)
        checks.number("capacity_factor", self.capacity_factor)
        check_mapping(self.expert_mapping)
        if self.zero_expert_num or self.zero_expert_type is not None:
            checks.one_of("zero_expert_type", str(self.zero_expert_type), ("identity",))
        parallel = self.moe_parallel_config
        if self.device is not None:
            checks.device("device", self.device)
        if parallel is not None:
            checks.instance("moe_parallel_config", parallel, FusedMoEParallelConfig)
        for name in ("custom_routing_function", "shared_experts"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")

    def _check_exchange(self) -> None:
        """Check that only layers that exchange tokens have options of the exchange."""
        if self.max_num_tokens is not None:
            checks.at_least(1, max_num_tokens=self.max_num_tokens)
        if self.parallel_config().exchanges_tokens:
            return
        for name in OF_EXCHANGES:
            default, value = getattr(FusedMoEOptions, name), getattr(self, name)
            if value != default:
                raise ValueError(
                    f"{name} must be {default} unless ranks exchange tokens, got {value}"
                )

    def _check_gate(self) -> None:
        """Check that a gate has shared experts whose results it weights."""
        if self.shared_expert_gate and not self.n_shared_experts:
            raise ValueError(
                "shared_expert_gate must be False without n_shared_experts, which it weights, got "
                "True"
            )
        if self.shared_expert_gate and self.apply_router_weight_on_input:
            raise ValueError(
                "shared_expert_gate must be False with apply_router_weight_on_input, because the "
                "gate scales results of the shared experts, not their inputs, got True"
            )

    def _check_router(self, top_k: int) -> None:
        """Check that a table has ``top_k`` columns, and that one router chooses."""
        if (table := self.hash_indices_table) is not None:
            checks.tensor("hash_indices_table", table, 2, checks.INDICES)
            checks.size("hash_indices_table.shape[1]", table.shape[1], "top_k", top_k)
        for router, names in OTHER_ROUTERS.items():
            for name in () if getattr(self, router) is None else names:
                value = getattr(self, name)
                if isinstance(value, Tensor) or value != getattr(type(self), name):
                    rule = f"be left out with {router}, which chooses"
                    raise ValueError(f"{name} must {rule}, got {value}")

    def _check_batch_invariant(self) -> None:
        """Raise NotImplementedError for settings that make tokens depend on each other."""
        check_batch_invariant(self.known_scheme)
        parallel = self.parallel_config()
        ranks = parallel.tp_size * parallel.ep_size
        if self.enable_eplb and parallel.ep_size > 1:
            raise NotImplementedError(
                "batch_invariant must be False with enable_eplb over several ranks, because a "
                "token's index in the batch decides which rank computes it, got True"
            )
        if ranks > 2 and not parallel.exchanges_tokens and self.reduce_results:
            raise NotImplementedError(
                "batch_invariant must be False if results of more than two ranks are summed, whose "
                f"order may depend on the message size, got True with {ranks} ranks"
            )

    def _check_main_grads(self) -> None:
        """Raise NotImplementedError for weights without main gradients."""
        quantized = self.known_scheme.weight is not None
        names = (*["scheme"] * quantized, "enable_eplb", "resident_experts")
        for name in names if self.fuse_wgrad_accumulation else ():
            if getattr(self, name):
                raise NotImplementedError(
                    f"{name} must be left out with fuse_wgrad_accumulation, since experts that are "
                    "quantized, change their rows or are in host memory have no main gradients, "
                    f"got {getattr(self, name)}"
                )

    def _check_ranks(self) -> None:
        """Check that the six numbers fit each other and the config, and can be run."""
        for group in ("tp", "dp", "ep"):
            rank = getattr(self, f"{group}_rank")
            check_group(group, getattr(self, f"{group}_size"), 0 if rank is None else rank)
        whole, rank = self.tp_size * self.dp_size, self.dp_rank * self.tp_size + self.tp_rank
        if whole > 1 and self.ep_size not in (1, whole):
            raise ValueError(
                f"ep_size must be 1, or tp_size * dp_size = {whole}, the ranks that would share "
                f"the experts, got {self.ep_size}"
            )
        if whole > 1 and self.ep_size > 1 and self.ep_rank not in (None, rank):
            raise ValueError(
                f"ep_rank must be dp_rank * tp_size + tp_rank = {rank}, got {self.ep_rank}"
            )
        config = self.moe_parallel_config
        for option in fields(self) if config is not None else ():
            name, number = option.name, getattr(self, option.name)
            same = getattr(config, name, number)
            if name in OF_THE_CONFIG and number not in (option.default, same):
                raise ValueError(
                    f"{name} must be that of moe_parallel_config, {same}, got {number}"
                )
        parallel = self.parallel_config()
        lacks = parallel.lacks()
        if lacks is None and self.resident_experts is not None:
            lacks = against_host_memory(self.enable_eplb, parallel)
        if lacks is not None:
            raise NotImplementedError(lacks)
        strategy = self.expert_placement_strategy
        if self.enable_eplb and parallel.ep_size > 1 and strategy != "linear":
            raise NotImplementedError(
                "expert_placement_strategy must be linear with enable_eplb over several ranks, of "
                f"which each holds a range of physical experts, got {strategy!r}"
            )

    def parallel_config(self) -> FusedMoEParallelConfig:
        """Return the layer's groups: the given ones, or `FusedMoEParallelConfig.make`'s."""
        config = self.moe_parallel_config
        if config is None:
            use_ep, group = self.ep_size > 1, (self.tp_size, self.tp_rank)
            if use_ep and self.tp_size * self.dp_size == 1:
                group = (self.ep_size, self.ep_rank or 0)
            config = FusedMoEParallelConfig.make(
                *group, self.dp_size, self.dp_rank, enable_expert_parallel=use_ep
            )
        sp_size = config.sp_size
        if self.is_sequence_parallel and sp_size == 1:
            sp_size = config.tp_size * config.ep_size
        backend = config.all2all_backend if self.all2all_backend is None else self.all2all_backend
        return replace(
            config, sp_size=sp_size, enable_eplb=self.enable_eplb, all2all_backend=backend
        )

    def new_state(
        self, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int
    ) -> LayerState:
        """Return the state of a new layer with these sizes, whose experts are on its device."""
        parallel, (kind, activation) = self.parallel_config(), kind_and_key(self.activation)
        placement = self.placement(parallel, num_experts)
        dtype = self.params_dtype or torch.get_default_dtype()
        scheme = self.known_scheme
        sizes = LayerSizes(
            placement.num_local_experts,
            maybe_roundup_hidden_size(hidden_size, dtype, None, parallel),
            intermediate_size,
            scheme,
            kind.is_gated,
            kind.is_interleaved,
            self.has_bias,
            dtype,
        )
        if parallel.tp_size > 1 or not sizes.mixes_rows:  # which can be filled, not loaded
            sizes = aligned_sizes(sizes, intermediate_size, parallel.tp_size)
        return LayerState(
            num_experts,
            top_k,
            hidden_size,
            intermediate_size,
            sizes,
            scheme,
            placement,
            parallel,
            self.batch_invariant,
            activation=activation,
            ranks_agree=parallel.layer_size == 1,
        )

    def routing(self, global_num_experts: int) -> dict[str, Any]:
        """Return the arguments of `select_experts` that are the same in every call."""
        return {
            "use_grouped_topk": self.use_grouped_topk,
            "topk_group": self.topk_group,
            "num_expert_group": self.num_expert_group,
            "custom_routing_function": self.custom_routing_function,
            "routed_scaling_factor": self.routed_scaling_factor,
            "global_num_experts": global_num_experts - self.n_shared_experts,
            "zero_expert_num": self.zero_expert_num or None,
            "zero_expert_type": self.zero_expert_type,
            "num_fused_shared_experts": self.n_shared_experts,
        }

    def routes_plainly(self) -> bool:
        """Whether `fused_topk` is all of the routing."""
        more = (self.use_grouped_topk, self.custom_routing_function, self.enable_eplb)
        hashed = self.hash_indices_table is not None
        return not any((*more, hashed, self.zero_expert_num, self.n_shared_experts))

    def placement(
        self, parallel: FusedMoEParallelConfig, num_experts: int, rank: int | None = None
    ) -> ExpertPlacement:
        """Return which rows of a rank's parameters hold which experts; None: of this rank.

        Shared experts are on the first rank only, so that each is computed once.
        """
        ep_size, rank = parallel.ep_size, parallel.ep_rank if rank is None else rank
        redundant, even = self.num_redundant_experts, ep_size if self.enable_eplb else 1
        logical = logical_experts(num_experts, redundant, even)
        rows = rows_of_rank(ep_size, rank, len(logical), self.expert_placement_strategy)
        local = sum(row >= 0 for row in rows)
        for i in range(self.n_shared_experts):
            rows.append(local + i if rank == 0 else -1)
        shared = range(num_experts, num_experts + self.n_shared_experts)
        return ExpertPlacement((*logical, *shared), tuple(rows), ep_size > 1)

    def expert_ranks(self, parallel: FusedMoEParallelConfig, num_experts: int) -> Tensor:
        """Return int32 ``(physical,)`` on the CPU: the rank that holds each physical expert."""
        ranks = range(parallel.ep_size)
        rows = [self.placement(parallel, num_experts, rank).row for rank in ranks]
        return ranks_of_experts(torch.tensor(rows, dtype=torch.int32, device="cpu") >= 0)
