"""The attributes that all parts of a layer share, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.layer.options import ExpertPlacement
from moe_ops.layer.partition import LayerSizes, aligned_sizes
from moe_ops.loading.given import GivenScales
from moe_ops.parallel import FusedMoEParallelConfig
from moe_ops.parallel.eplb_state import LayerEplbState
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.host_experts import HostExperts
from moe_ops.pipeline.modular_kernel import FusedMoEKernel
from moe_ops.routing import RoutingMethodType, get_routing_method_type
from moe_ops.scheme import Scheme


class ExpertLayer(nn.Module):
    """What routing, loading, moving and the methods of `FusedMoE` know of the layer.

    `FusedMoE` sets all of these attributes and documents its parameters.
    """

    num_experts: int
    """E, without redundant and shared experts."""
    top_k: int
    hidden_size: int
    """H of the parameters."""
    model_hidden_size: int
    """H of the tokens."""
    intermediate_size: int
    """I of one expert, all ranks together."""
    global_num_experts: int
    """Physical experts of all ranks."""
    num_logits: int
    sizes: LayerSizes
    """Sizes of this rank's parameters."""
    checkpoint_scheme: Scheme
    """The scheme of the layer's checkpoints, whose blocks may be larger than those of ``sizes``."""
    placement: ExpertPlacement
    """The first placement; see `held_placement`."""
    enable_eplb: bool
    eplb_state: LayerEplbState | None
    moe_parallel_config: FusedMoEParallelConfig
    rank_group: RankGroup
    """The ranks that share the layer."""
    exchanges_tokens: bool
    """That of ``moe_parallel_config``."""
    is_spread: bool
    """Whether several ranks share the layer."""
    ranks_agree: bool
    """Whether the ranks have compared their layers: see `moe_ops.layer.rank_checks`."""
    option_facts: dict[str, str]
    """`moe_ops.layer.rank_checks.option_facts`."""
    activation: str
    """The key of an `Activation`."""
    renormalize: bool
    scoring_func: str
    apply_router_weight_on_input: bool
    reduce_results: bool
    batch_invariant: bool
    shared_expert_gate: bool
    chunk_size: int | None
    routing: dict[str, Any]
    """The arguments of `select_experts` that are the same in every call."""
    given_scales: GivenScales
    quant_method: Any
    shared_experts: Callable[[Tensor], Tensor] | None
    prefix: str
    expert_mapping: Sequence[tuple[str, str, int, str]] | None
    resident_experts: int | None = None
    """Number of experts on the device, if all are in host memory; None: all are on the device."""
    host_experts: HostExperts | None = None
    initial_seed: int | None = None
    """The seed of `initialize`, if the layer holds nothing else; None: weights may be loaded."""
    w13_weight: Tensor
    w2_weight: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    w13_input_order: Tensor | None
    e_score_correction_bias: Tensor | None
    hash_indices_table: Tensor | None
    expert_map: Tensor | None
    shared_expert_gate_weight: Tensor | None

    @property
    def compute_device(self) -> torch.device:
        """The device on which the experts run."""
        return self.w13_weight.device

    def renew_slots(self) -> None:
        """See `moe_ops.layer.host_memory`."""

    @property
    def kernel(self) -> FusedMoEKernel | None:
        """The kernel that was set; else the method's own if ranks exchange tokens, else None."""
        own: FusedMoEKernel | None = self._kernel
        if own is None and self.exchanges_tokens:
            return self.quant_method.kernel_of(self)
        return own

    @kernel.setter
    def kernel(self, kernel: FusedMoEKernel | None) -> None:
        self._kernel = kernel

    @property
    def scheme(self) -> Scheme:
        """The scheme of the parameters; one of fp8 if MXFP4 is held so (`FusedMoE.as_fp8_`)."""
        return self.sizes.scheme

    @property
    def moe_config(self) -> FusedMoEConfig:
        """The layer as a value, from which a kernel is chosen."""
        sizes, routing = self.sizes, self.routing
        method = RoutingMethodType.Custom
        if routing["custom_routing_function"] is None and self.hash_indices_table is None:
            bias = self.e_score_correction_bias is not None
            groups = routing["num_expert_group"] if routing["use_grouped_topk"] else None
            method = get_routing_method_type(
                self.scoring_func, self.top_k, self.renormalize, groups, bias
            )
        return FusedMoEConfig(
            self.global_num_experts,
            self.top_k,
            self.hidden_size,
            sizes.intermediate_size,
            sizes.num_experts,
            self.activation,
            self.compute_device,
            method,
            self.moe_parallel_config,
            in_dtype=sizes.dtype,
            renormalize=self.renormalize,
            scoring_func=self.scoring_func,
            has_bias=sizes.has_bias,
            is_act_and_mul=sizes.gated,
            batch_invariant=self.batch_invariant,
        )

    def held_placement(self) -> ExpertPlacement:
        """Return the placement with the logical experts that the rows hold now.

        `EplbState.rebalance_` changes the maps that `FusedMoE.set_eplb_state` has set: they are
        read here, for which the host waits.
        """
        state = self.eplb_state if self.enable_eplb else None
        if state is None or state.logical_to_physical_map.is_meta:
            return self.placement
        return replace(self.placement, logical=state.held_experts(len(self.placement.row)))

    def aligned_sizes(self) -> LayerSizes:
        """Sizes with which every rank has whole scales, and gate and up have their own.

        These are the sizes of the plain parameters from the start.
        """
        tp_size = self.moe_parallel_config.tp_size
        return aligned_sizes(self.sizes.plain, self.intermediate_size, tp_size)

    def saved_sizes(self) -> LayerSizes:
        """Sizes of this layer on one rank, whose state dict `load_checkpoint` reads."""
        sizes = replace(self.sizes.plain, scheme=self.checkpoint_scheme)
        return aligned_sizes(sizes, self.intermediate_size, 1)

    def extra_repr(self) -> str:
        """Sizes, ranks, scheme and routing."""
        parallel, sizes, routing = self.moe_parallel_config, self.sizes, self.routing
        shared = routing["num_fused_shared_experts"]
        facts = {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "hidden_size": self.hidden_size,
            "global_num_experts": self.global_num_experts,
            "local_num_experts": sizes.num_experts,
            "intermediate_size_per_partition": sizes.intermediate_size,
            "tp_size": parallel.tp_size,
            "ep_size": parallel.ep_size,
            "reduce_results": self.reduce_results,
            "scheme": sizes.plain.scheme.name,
            **({} if sizes.exact_of is None else {"held_as": sizes.scheme.name}),
            "activation": self.activation,
            "scoring_func": self.scoring_func,
            "renormalize": self.renormalize,
            "use_grouped_topk": routing["use_grouped_topk"],
            **({"n_shared_experts": shared} if shared else {}),
            **({"shared_expert_gate": True} if self.shared_expert_gate else {}),
            "batch_invariant": self.batch_invariant,
        }
        return ", ".join(f"{name}={value}" for name, value in facts.items())
