"""The routing of a layer: logits to experts, load balancing, and capture of the chosen experts.

A base class of `moe_ops.FusedMoE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moe_ops import checks
from moe_ops.gradients import refuse, wanted
from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.methods import FusedMoEMethodBase
from moe_ops.layer.parameters import parameter_specs
from moe_ops.layer.rank_checks import check_own_weights
from moe_ops.parallel.eplb_state import LayerEplbState, layer_of
from moe_ops.parallel.trained import training_state, watch
from moe_ops.routing import CaptureFn, SelectedExperts, fused_topk, select_experts


def token_arguments(
    hidden_states: Tensor,
    tokens: Tensor,
    is_padding: Tensor | None,
    input_ids: Tensor | None,
    num_unpadded_tokens: Tensor | None,
    topk_ids: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Flatten ``is_padding`` (a mask, a number of tokens, or both), ``input_ids``, ``topk_ids``.

    Args:
        hidden_states: ``(.., H)``.
        tokens: the same, flat: ``(T, H)``.
        is_padding: see `FusedMoE.forward`.
        input_ids: see `FusedMoE.forward`.
        num_unpadded_tokens: see `FusedMoE.forward`.
        topk_ids: see `FusedMoE.forward`.

    Returns:
        Padding and words ``(T,)``, experts ``(T, k)``; None for what was not given.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or device.
    """
    like = ("hidden_states", hidden_states)
    if input_ids is not None:
        input_ids = flat_tokens("input_ids", input_ids, hidden_states, tokens, checks.INDICES)
    if is_padding is not None:
        is_padding = flat_tokens("is_padding", is_padding, hidden_states, tokens, (torch.bool,))
    if num_unpadded_tokens is not None:
        name = "num_unpadded_tokens"
        checks.device_scalar(name, num_unpadded_tokens, checks.INDICES, *like)
        token = torch.arange(tokens.shape[0], device=tokens.device)
        behind = token >= num_unpadded_tokens.reshape(())
        is_padding = behind if is_padding is None else is_padding | behind
    if topk_ids is not None:
        topk_ids = flat_ids(topk_ids, hidden_states)
    return is_padding, input_ids, topk_ids


def flat_tokens(
    name: str, x: Tensor, hidden_states: Tensor, tokens: Tensor, dtypes: Sequence[torch.dtype]
) -> Tensor:
    """Return ``x`` as ``(T,)``; it may have all axes of ``hidden_states`` but the last."""
    checks.tensor(name, x, None, dtypes)
    checks.same_device(name, x, "hidden_states", hidden_states)
    axes = hidden_states.shape[:-1]
    if x.dim() != 1 and (x.dim() != len(axes) or _differ(x.shape, axes)):
        raise ValueError(
            f"{name} must be (T,) or have the axes of hidden_states but the last, {tuple(axes)}, "
            f"got shape {tuple(x.shape)}"
        )
    x = x.reshape(-1)
    checks.same_tokens(name, x, "hidden_states", tokens)
    return x


def flat_ids(topk_ids: Tensor, hidden_states: Tensor) -> Tensor:
    """Return experts as ``(T, k)``; they may have all axes of ``hidden_states`` but the last."""
    checks.tensor("topk_ids", topk_ids, None, checks.INDICES)
    checks.same_device("topk_ids", topk_ids, "hidden_states", hidden_states)
    axes, shape = hidden_states.shape[:-1], topk_ids.shape
    if len(shape) != 2 and (len(shape) != len(axes) + 1 or _differ(shape[:-1], axes)):
        raise ValueError(
            "topk_ids must be (T, k) or have the axes of hidden_states but the last and k, "
            f"{(*axes, 'k')}, got shape {tuple(shape)}"
        )
    return topk_ids.reshape(-1, shape[-1])


def _differ(shape: torch.Size, other: torch.Size) -> bool:
    """Compare shapes in eager calls; a compiler does not know sizes, so there they are equal."""
    return not torch.compiler.is_compiling() and shape != other


class RoutesTokens(ExpertLayer):
    """A layer that routes: `route`, the state of load balancing, and the capture of experts."""

    routes_plainly: bool
    """Whether `fused_topk` is all of the routing."""
    eplb_step: Tensor
    """Number of calls without gradients since `set_eplb_state`, if that got no ``step``."""

    def set_eplb_state(
        self,
        moe_layer_idx: int,
        expert_load_view: Tensor,
        logical_to_physical_map: Tensor,
        logical_replica_count: Tensor,
        *,
        record_enabled: Tensor | None = None,
        seed: int | None = None,
        step: Tensor | None = None,
    ) -> None:
        """Take row ``moe_layer_idx`` of each tensor of an `EplbState`, as views.

        Token t of a call goes to the replica that the hash of ``t + seed + step`` chooses: see
        `eplb_map_to_physical_and_record`. Without ``step`` the layer counts its calls on the
        device, in the buffer ``eplb_step``, so that decoding few tokens reaches every replica, in
        replays of a CUDA graph too. The count starts at 0 here, so equal calls after this one
        choose equal replicas. A call that records gradients leaves the count as it is, because a
        checkpoint computes the call again, and must send its tokens to the same ranks.

        The rows of this layer must hold the experts that these maps say: set the state of a new
        model before its checkpoint is loaded. Later `EplbState.rebalance_` moves both together, and
        loaders put each expert where it is by then. A copied or unpickled layer has maps of its
        own, with which it runs: set a state before its experts move.

        Args:
            moe_layer_idx: the row.
            expert_load_view: ``(L, P)`` int32 or int64: **mutated** by every call.
            logical_to_physical_map: ``(L, E, R)`` int32 or int64.
            logical_replica_count: ``(L, E)`` int32 or int64.
            record_enabled: one bool or integer on the device; 0 counts nothing. None counts.
            seed: a number in 0..2**31 - 1. Ranks that route tokens of their own need different
                seeds, so that the first tokens of all ranks do not go to the same replica; ranks
                that have the same tokens need the same seed. None: that, from the layer's ranks.
            step: one integer on the device, which the caller advances (once for all layers that
                share it). A constant one gives each token of a call the same replicas in every
                call.

        Raises:
            TypeError, ValueError: a wrong dtype, number of axes, device or seed; a
                ``moe_layer_idx`` out of range.
        """
        state = (expert_load_view, logical_to_physical_map, logical_replica_count)
        views = layer_of(moe_layer_idx, *state, self.num_experts, self.global_num_experts)
        like = ("expert_load_view", expert_load_view)
        dtypes = (torch.bool, *checks.INDICES)
        checks.device_scalar("record_enabled", record_enabled, dtypes, *like)
        checks.device_scalar("step", step, checks.INDICES, *like)
        seed = self.moe_parallel_config.tokens_rank if seed is None else seed
        checks.integer("seed", seed)
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed must be in 0..{2**31 - 1}, got {seed}")
        if step is None:  # a buffer, which Inductor's CUDA graphs may mutate
            with torch.inference_mode(False):  # calls write to it
                calls = torch.zeros(1, dtype=torch.int64, device=expert_load_view.device)
            self.register_buffer("eplb_step", calls, persistent=False)
        eplb = LayerEplbState(*views, record_enabled, seed, step)
        self.state = replace(self.state, eplb_state=eplb, eplb_state_is_copied=False)
        watch(x for x in self._parameters.values() if x is not None)

    def refuse_training(self, out: Tensor) -> Tensor:
        """Let the backward pass raise if a method of the caller's would train replicas apart."""
        replicas = self.global_num_experts - self.num_experts
        reads_weights = type(self.state.quant_method).apply is not FusedMoEMethodBase.apply
        weights = wanted(*self._parameters.values()) if replicas and reads_weights else []
        text = (
            "num_redundant_experts must be 0 to train with a quant_method that has an apply of its "
            f"own, got {replicas}"
        )
        return refuse(out, weights, "FusedMoE", text)

    def expert_tensors(self, optimizer: Optimizer | None = None) -> list[Tensor]:
        """Return this rank's tensors that have a row per expert: what `EplbState.rebalance_` moves.

        These are the parameters (without the shared experts' own), and ``w13_input_order`` if each
        expert has its own.

        Args:
            optimizer: the optimizer of trained weights, whose state moves with them, also right
                after it was loaded. Then the list also has the gradients that there are, and the
                optimizer's tensors of each parameter. All ranks must have taken equally many steps.

        Raises:
            ValueError: an optimizer that does not have a parameter that requires grad; a copied or
                unpickled layer, whose maps no `EplbState` changes, before `set_eplb_state`.
            NotImplementedError: weights in act-order in a layer of several ranks, whose orders may
                differ between ranks; weights that a wrapper holds or computes (`fully_shard`); an
                optimizer's tensor that has another number of rows.
        """
        check_own_weights(self)
        if self.state.eplb_state_is_copied:
            raise ValueError(
                "set_eplb_state must be called before the experts of a copied layer move, with "
                "maps that say where they are, got copies of maps, which no EplbState changes"
            )
        own = {name: self._parameters[name] for name in parameter_specs(self.sizes)}
        held = {name: x for name, x in own.items() if x is not None}
        tensors: list[Tensor] = [*held.values()]
        if optimizer is not None:
            tensors = training_state(held, optimizer)
        order = self.w13_input_order
        if order is not None and self.placement.is_shared_out:
            raise NotImplementedError(
                "w13_input_order must be None to move experts between ranks, got weights in "
                "act-order"
            )
        if order is not None and order.shape[0] == self.sizes.num_experts:
            tensors.append(order)
        return tensors

    def set_capture_fn(self, fn: CaptureFn | None, *, buffer: Tensor | None = None) -> None:
        """Pass the experts that each call chooses to ``fn``, or write them into ``buffer``.

        The ids ``(T, k)`` name logical experts, in the order of the router: before replicas
        are chosen, and without fused shared experts (``n_shared_experts``). Zero experts have ids
        from E on; the slots of padding tokens are -1. Ranks that exchange tokens capture those that
        they were called with.

        Args:
            fn: called with the ids after routing, in eager calls only: compiled layers, replays and
                captures of CUDA graphs do not call it. It must not write to the ids. None: no
                function.
            buffer: ``(N, k)`` int32 or int64, with any strides, such as one layer's view of
                ``(N, L, k)``. Every call, compiled and replayed ones too, writes the ids into the
                first T <= N rows and leaves the others. None: no buffer.

        Raises:
            TypeError: ``fn`` is not callable; a wrong dtype of ``buffer``.
            ValueError: a wrong shape of ``buffer``; in a call, more tokens than it has rows.
        """
        if fn is not None and not callable(fn):
            raise TypeError(f"fn must be callable or None, got {type(fn).__name__}")
        if buffer is not None:
            checks.tensor("buffer", buffer, 2, checks.INDICES)
            checks.size("buffer.shape[1]", buffer.shape[1], "top_k", self.top_k)
        self.state = replace(self.state, capture_fn=fn, capture_buffer=buffer)

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Context in which calls are not captured, and what they count is forgotten."""
        before, state = self.state, self.eplb_state
        self.set_capture_fn(None)
        counters = [] if state is None else [state.expert_load_view]
        if state is not None and state.step is None:
            counters.append(self.eplb_step)
        kept = [counter.clone() for counter in counters]
        try:
            yield
        finally:
            self.set_capture_fn(before.capture_fn, buffer=before.capture_buffer)
            for counter, value in zip(counters, kept, strict=True):
                counter.copy_(value)

    def route(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        is_padding: Tensor | None = None,
        input_ids: Tensor | None = None,
        topk_ids: Tensor | None = None,
    ) -> SelectedExperts:
        """Route ``(T, H)`` tokens by ``(T, E)`` logits: weights and ids, each ``(T, k)``.

        Given ``topk_ids (T, k)`` are weighted, and nothing is chosen. The ids have the dtype that
        the layer's kernel asks for; see `select_experts`.
        """
        if self.routing["custom_routing_function"] is None:
            experts = router_logits.shape[-1]
            if experts != self.num_logits:
                rule = "the number of experts"
                checks.size("router_logits.shape[1]", experts, rule, self.num_logits)
        exchange, top_k = self.state.exchange, self.state.top_k
        indices_type = None if exchange is None else exchange.topk_indices_dtype()
        captures = self.state.capture_fn is not None or self.state.capture_buffer is not None
        if self.routes_plainly and is_padding is None and input_ids is None and topk_ids is None:
            # The result of `select_experts`, without the cost of checking its options.
            weights, ids = fused_topk(
                hidden_states,
                router_logits,
                top_k,
                self.renormalize,
                indices_type,
                self.scoring_func,
                self.e_score_correction_bias,
                self.routing["routed_scaling_factor"],
            )
            if captures:
                self._capture(ids)
            return SelectedExperts(weights, ids, None)
        state = self.eplb_state if self.enable_eplb else None
        if self.enable_eplb and state is None:
            raise ValueError(
                "set_eplb_state must be called before a layer with enable_eplb runs, got no state"
            )
        routed = select_experts(
            hidden_states,
            router_logits,
            top_k,
            renormalize=self.renormalize,
            scoring_func=self.scoring_func,
            e_score_correction_bias=self.e_score_correction_bias,
            indices_type=indices_type,
            enable_eplb=self.enable_eplb,
            hash_indices_table=self.hash_indices_table,
            input_ids=input_ids,
            is_padding=is_padding,
            capture_fn=self._capture if captures else None,
            shared_expert_gate=self.shared_expert_gate_weight if self.shared_expert_gate else None,
            topk_ids=topk_ids,
            **self.routing,
            **({} if state is None else self._balancing(state)),
        )
        if state is not None and state.step is None:
            recorded = wanted(hidden_states, router_logits, *self._parameters.values())
            if len(recorded) == 0:
                self.eplb_step.add_(1)
        return routed

    def _balancing(self, state: LayerEplbState) -> dict[str, Any]:
        """Return the arguments of `select_experts` for load balancing."""
        step = self.eplb_step if state.step is None else state.step
        return {**state._asdict(), "step": step}

    def _capture(self, topk_ids: Tensor) -> None:
        """Pass ids on as `set_capture_fn` says."""
        fn, buffer = self.capture_fn, self.capture_buffer
        if buffer is not None:
            tokens = topk_ids.shape[0]
            if tokens > buffer.shape[0]:
                raise ValueError(
                    f"buffer of set_capture_fn must have a row for each of {tokens} tokens, got "
                    f"{buffer.shape[0]}"
                )
            buffer.narrow(0, 0, tokens).copy_(topk_ids)
        if fn is None or torch.compiler.is_compiling():
            return
        if not (topk_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            fn(topk_ids)
