"""The attributes that all parts of a layer share, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.layer.host_memory import renewed
from moe_ops.layer.param_loader import attach_loader
from moe_ops.layer.partition import LayerSizes
from moe_ops.layer.set_kernel import with_kernel
from moe_ops.layer.stage import Stage
from moe_ops.layer.state import ExpertPlacement, LayerState
from moe_ops.loading.names import SHARED_GATE
from moe_ops.parallel import FusedMoEParallelConfig
from moe_ops.parallel.eplb_state import LayerEplbState
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.host_experts import HostExperts
from moe_ops.pipeline.modular_kernel import FusedMoEKernel
from moe_ops.residency import OffloadStats
from moe_ops.routing import CaptureFn, RoutingMethodType, get_routing_method_type
from moe_ops.scheme import Scheme


def _of_state(name: str) -> Any:
    """Return the property of a layer that is a field of its state."""
    return property(lambda layer: getattr(layer.state, name))


class ExpertLayer(nn.Module):
    """What routing, loading, moving and the methods of `FusedMoE` know of the layer.

    `FusedMoE` sets its attributes when it is made, and documents its parameters. After that only
    ``state``, the parameters and the buffers change.

    Each class between this one and `FusedMoE` is one interface of a layer: `RoutesTokens` chooses
    experts, `ConvertsForms` changes the form of weights, `LoadsWeights` takes tensors one by one
    (with the steps of vLLM, `LoadSteps`), `KeepsStateDict` saves and loads state dicts, and
    `KeepsBits` moves, copies, pickles and resets.
    """

    state: LayerState
    num_experts: int = _of_state("num_experts")
    top_k: int = _of_state("top_k")
    hidden_size: int
    """H of the parameters."""
    model_hidden_size: int = _of_state("model_hidden_size")
    intermediate_size: int = _of_state("intermediate_size")
    sizes: LayerSizes = _of_state("sizes")
    checkpoint_scheme: Scheme = _of_state("checkpoint_scheme")
    placement: ExpertPlacement = _of_state("placement")
    moe_parallel_config: FusedMoEParallelConfig = _of_state("parallel")
    resident_experts: int | None = _of_state("resident_experts")
    host_experts: HostExperts | None = _of_state("host_experts")
    eplb_state: LayerEplbState | None = _of_state("eplb_state")
    initial_seed: int | None = _of_state("initial_seed")
    ranks_agree: bool = _of_state("ranks_agree")
    capture_fn: CaptureFn | None = _of_state("capture_fn")
    capture_buffer: Tensor | None = _of_state("capture_buffer")
    global_num_experts: int
    """Physical experts of all ranks."""
    num_logits: int
    enable_eplb: bool
    rank_group: RankGroup
    """The ranks that share the layer."""
    exchanges_tokens: bool
    """`FusedMoEParallelConfig.exchanges_tokens` of ``moe_parallel_config``."""
    is_spread: bool
    """Whether several ranks share the layer."""
    option_facts: dict[str, str]
    """`moe_ops.layer.rank_checks.option_facts`."""
    activation: str
    """The key of an `Activation`."""
    renormalize: bool
    scoring_func: str
    apply_router_weight_on_input: bool
    reduce_results: bool
    batch_invariant: bool = _of_state("batch_invariant")
    fuse_wgrad_accumulation: bool
    shared_expert_gate: bool
    chunk_size: int | None
    routing: dict[str, Any]
    """The arguments of `select_experts` that are the same in every call."""
    shared_experts: Callable[[Tensor], Tensor] | None
    prefix: str
    expert_mapping: Sequence[tuple[str, str, int, str]] | None
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
        """The device on which the experts run: that of the slots, else that of the weights."""
        device = self.state.device
        return self.w13_weight.device if device is None else device

    def stage(self) -> Stage:
        """Return the layer's own state and parameters."""
        return Stage(self.state, self._parameters)

    def adopt(self, name: str, param: nn.Parameter | None) -> None:
        """Give an expert's parameter a ``weight_loader``; rank 0 alone trains the down bias."""
        if param is None or name == SHARED_GATE:  # like a router, a gate is no expert's
            return
        attach_loader(self, param)
        if name == "w2_bias" and self.state.parallel.tp_rank > 0:
            param.requires_grad_(False)

    def take(self, stage: Stage) -> None:
        """Set the state of a stage, once it has the layer's own parameters."""
        for name, param in self._parameters.items():
            self.adopt(name, param)
        if stage.state.host_experts is not None:
            for name, x in self._buffers.items():
                self._buffers[name] = None if x is None else x.to(stage.state.device)
        self.state = stage.state

    def follow_dtype(self) -> None:
        """Note the dtype of unquantized weights that was changed by ``assign`` or ``data``."""
        sizes = self.sizes.with_dtype(self.w13_weight.dtype)
        if sizes.dtype != self.sizes.dtype:
            self.state = replace(self.state, sizes=sizes, cast_dtype=None)

    def renew_slots(self) -> None:
        """Forget what the slots hold, once the parameters have changed, or make new slots.

        New ones are made if parameters were replaced: capture CUDA graphs after this. A layer whose
        experts are not in host memory stays as it is.
        """
        stage = renewed(self.stage())
        if stage.state is not self.state:
            self.take(stage)

    def offload_stats(self) -> OffloadStats:
        """Return hits, misses, copied bytes and waves so far. The host waits for nothing.

        All are 0 for a layer whose experts are all on its device.
        """
        host = self.state.host_experts
        return OffloadStats(0, 0, 0, 0) if host is None else host.residency.stats()

    @property
    def kernel(self) -> FusedMoEKernel | None:
        """The kernel that was set; else the method's own if ranks exchange tokens, else None."""
        state = self.state
        if state.kernel is None and self.exchanges_tokens:
            return state.quant_method.kernel_of(self)
        return state.kernel

    @kernel.setter
    def kernel(self, kernel: FusedMoEKernel | None) -> None:
        self.state = with_kernel(self, kernel)

    @property
    def quant_method(self) -> Any:
        """How the experts are stored and multiplied: a `FusedMoEMethodBase`."""
        return self.state.quant_method

    @quant_method.setter
    def quant_method(self, method: Any) -> None:
        is_class = isinstance(method, type)
        if is_class or not callable(getattr(method, "get_fused_moe_quant_config", None)):
            got = f"the class {method.__name__}" if is_class else type(method).__name__
            raise TypeError(
                f"layer.quant_method must be an instance of FusedMoEMethodBase, got {got}"
            )
        self.state = replace(self.state, quant_method=method)

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
            in_dtype=self.state.in_dtype,
            renormalize=self.renormalize,
            scoring_func=self.scoring_func,
            has_bias=sizes.has_bias,
            is_act_and_mul=sizes.gated,
            batch_invariant=self.batch_invariant,
        )

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
            **({"fuse_wgrad_accumulation": True} if self.fuse_wgrad_accumulation else {}),
        }
        return ", ".join(f"{name}={value}" for name, value in facts.items())
