"""The Mixture-of-Experts layer as a module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ops import checks
from moe_ops.activation import kind_and_key
from moe_ops.dispatch.tiles import cdiv
from moe_ops.gradients import refuse, wanted
from moe_ops.inspect.warmup import Variants, run_variants
from moe_ops.layer.adapters import adapters_of
from moe_ops.layer.host_memory import residency_of_new
from moe_ops.layer.methods import (
    QuantizedFusedMoEMethod,
    UnquantizedFusedMoEMethod,
    shared_experts_of,
)
from moe_ops.layer.moving import KeepsBits
from moe_ops.layer.options import FusedMoEOptions
from moe_ops.layer.rank_checks import (
    check_rank_call,
    compare_ranks,
    counts_of_ranks,
    option_facts,
    rank_group_of,
    refuse_kernel_without_exchange,
)
from moe_ops.layer.routing import RoutesTokens, token_arguments
from moe_ops.layer.shared import add_gate
from moe_ops.layer.signature import LayerArguments, takes_options, typed_as
from moe_ops.layer.state_dict import KeepsStateDict
from moe_ops.layer.weight_loader import LoadsWeights
from moe_ops.parallel import make_expert_params_mapping
from moe_ops.pipeline.exchange.backends import exchange_of
from moe_ops.pipeline.exchange.gradients import Added, Copied
from moe_ops.pipeline.kernel_checks import needless_input
from moe_ops.pipeline.lora import ExpertLora
from moe_ops.routing import SelectedExperts, check_tokens, select_experts


@takes_options
class FusedMoE(RoutesTokens, LoadsWeights, KeepsStateDict, KeepsBits):
    """The routed experts of a layer; the router's linear layer belongs to the caller.

    ``w13_weight (El, 2I, H)`` holds gate rows, then up rows (alternating for an interleaved
    activation; ``(El, I, H)`` without a gate), and ``w2_weight`` is ``(El, H, I)``. Both are stored
    as the scheme says. A scheme adds ``w13_weight_scale`` and ``w2_weight_scale``, and some schemes
    also ``*_weight_zero_point``, ``*_weight_scale_2`` (global scales, which multiply) and
    ``*_input_scale``. Biases are ``w13_bias`` and ``w2_bias``. With ``shared_expert_gate`` there is
    ``shared_expert_gate_weight (1, H)``, which no scheme quantizes; it begins with zeros.

    Weights that kernels dequantize may be in the packed form: see `pack_`.

    The parameters of an unquantized layer require grad, and `reset_parameters` initializes them as
    `torch.nn.Linear` does. A quantized layer's are constants, which hold zeros until
    `load_checkpoint`, `load_state_dict` or `weight_loader` (also an attribute of each parameter)
    fills them; the first forward warns if nothing did. `load_checkpoint` sets the buffer
    ``w13_input_order`` for weights in act-order. A state dict says in ``_extra_state`` how its
    tensors are stored, and a layer of another scheme refuses it.

    With several ranks, the result of a rank is its part of a sum. ``reduce_results`` sums over the
    ranks; without it the caller does. ``tp_size`` ranks cut every expert along I so that each rank
    has whole scales: `aligned_sizes` refines blocks or pads I, also on one rank if gate and up rows
    would share a block. ``ep_size`` ranks hold whole experts each. With ``dp_size`` or
    ``is_sequence_parallel`` ranks have tokens of their own, and get their finished results through
    the exchange that the ``all2all_backend`` of ``moe_parallel_config`` names:
    `AllGatherPrepareAndFinalize` unless another is chosen. With ``dp_size`` the ``tp_size`` ranks
    of a replica all pass the replica's tokens and get all of their results: see `ReplicaExchange`.

    Args:
        num_experts: E.
        top_k: k, experts per token.
        hidden_size: H.
        intermediate_size: I of one expert, over all ranks.
        **options: see `FusedMoEOptions`.

    Raises:
        TypeError: an unknown keyword, or a value of the wrong type.
        ValueError: k outside 1..E, an unknown name, or settings that contradict each other.
        NotImplementedError: ranks that would have to exchange tokens in a way that is not there
            yet (see `FusedMoEParallelConfig.lacks`); settings with which results cannot be
            ``batch_invariant``.

    Source:
        vLLM ``FusedMoE``. Its prefixes name layers in the graph, so they must differ; here a prefix
        is only a name for loading.
    """

    select_experts = staticmethod(select_experts)
    make_expert_params_mapping = staticmethod(make_expert_params_mapping)

    @typed_as(LayerArguments)
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        **options: Any,
    ) -> None:
        super().__init__()
        chosen = FusedMoEOptions.of(options)
        arguments = (num_experts, top_k, hidden_size, intermediate_size)
        num_experts, *_ = sizes = [checks.plain(size) for size in arguments]
        chosen.check(*sizes)
        self.activation = kind_and_key(chosen.activation)[1]
        self.renormalize, self.scoring_func = chosen.renormalize, chosen.scoring_func
        self.apply_router_weight_on_input = chosen.apply_router_weight_on_input
        self.reduce_results, self.enable_eplb = chosen.reduce_results, chosen.enable_eplb
        self.fuse_wgrad_accumulation = chosen.fuse_wgrad_accumulation
        self.chunk_size, self.shared_expert_gate = chosen.chunk_size, chosen.shared_expert_gate
        self.prefix, self.expert_mapping = chosen.prefix, chosen.expert_mapping
        self.option_facts = option_facts(chosen)
        state = chosen.new_state(*sizes)
        quantized = state.checkpoint_scheme.weight is not None
        method = QuantizedFusedMoEMethod if quantized else UnquantizedFusedMoEMethod
        self.state = replace(residency_of_new(state, chosen), quant_method=method())
        parallel, self.hidden_size = state.parallel, state.sizes.hidden_size
        self.exchanges_tokens, self.is_spread = parallel.exchanges_tokens, parallel.layer_size > 1
        self.rank_group = rank_group_of(parallel, chosen)
        self.global_num_experts = len(state.placement.row)
        device = chosen.device if self.resident_experts is None else "meta"  # see `_begin`
        self.quant_method.create_weights(self, state.sizes, device)
        add_gate(self, chosen)
        self.register_buffer("e_score_correction_bias", chosen.e_score_correction_bias)
        self.register_buffer("hash_indices_table", chosen.hash_indices_table)
        expert_map = state.placement.expert_map(chosen.device)
        self.register_buffer("expert_map", expert_map, persistent=False)
        self.register_buffer("w13_input_order", None)
        self.routing = chosen.routing(self.global_num_experts)
        self.num_logits = num_experts + chosen.zero_expert_num
        self.routes_plainly, self.shared_experts = chosen.routes_plainly(), chosen.shared_experts
        router = chosen.custom_routing_function
        if isinstance(router, torch.nn.Module):  # whose parameters are the layer's
            self.custom_routing_function = router
        if self.exchanges_tokens:
            self.quant_method.exchange = self._exchange_of(chosen, num_experts)
        self._begin()

    def _exchange_of(self, chosen: FusedMoEOptions, num_experts: int) -> Any:
        """How tokens reach the ranks of their experts."""
        return exchange_of(
            self.moe_config,
            self.rank_group,
            chosen.max_num_tokens,
            lambda: chosen.expert_ranks(self.moe_parallel_config, num_experts),
            self.top_k + chosen.n_shared_experts,
            equal_num_tokens=chosen.equal_num_tokens,
            capacity_factor=chosen.capacity_factor,
            on_dead_rank=chosen.on_dead_rank,
        )

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        shared_experts_input: Tensor | None = None,
        *,
        is_padding: Tensor | None = None,
        input_ids: Tensor | None = None,
        num_unpadded_tokens: Tensor | None = None,
        lora: ExpertLora | None = None,
        topk_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Route the tokens and run their experts. There may be several leading axes.

        Args:
            hidden_states: ``(T, H)``.
            router_logits: ``(T, E)``, with the logits of zero experts after the E columns.
            shared_experts_input: input of the shared experts instead of ``hidden_states``, such as
                the tokens before their projection to the experts' latent space.
            is_padding: ``(T,)`` bool, True for a padding token. Such a token is not routed, sent,
                computed or counted, whatever its row and its logits hold (NaN too), and its row of
                the result is zeros. The shared experts get all tokens. Mark padding for schemes
                with one dynamic scale for all tokens (``fp8_tensor``, ``int8_tensor``): otherwise
                padding takes part in that scale, and a NaN in it makes every row NaN.
            input_ids: ``(T,)`` int32 or int64, the tokens' ids in the vocabulary. Required with
                ``hash_indices_table``, refused without.
            num_unpadded_tokens: one int32 or int64 on the device: tokens from this index on are
                padding too.
            lora: adapters beside the experts' weights, in any scheme: see `ExpertLora`. Its
                ``lora_ids`` are ``(T,)``, or have the axes of ``hidden_states`` but the last. With
                several ranks the factors belong to this rank's weights, and gradients of
                what all ranks have are added as the result is (``reduce_results``, or an exchange).
            topk_ids: ``(T, k)`` int32 or int64 (or the axes of ``hidden_states`` but the last, and
                k), the experts to use instead of the router's choice, such as `set_capture_fn`
                reports them: routing replay. Their weights are those that the router gives to these
                experts, with gradients to the logits; -1 and other ids that are no expert skip
                their slot. A captured graph reads the tensor in every replay.

        Returns:
            ``(T, H)``. With shared experts (the layer's or its kernel's) a pair
            ``(shared, routed)``; the shared result is not summed over ranks. With a kernel, the
            shared experts run while rows come back from other ranks.

        Raises:
            TypeError: a wrong dtype.
            ValueError: shapes or devices that do not match; ``input_ids`` missing or not wanted;
                ``shared_experts_input`` without a module of shared experts;
                different shared experts in the layer and in its kernel. In the first eager call, on
                all ranks: layers that differ between ranks, or a ``tp_group`` of other ranks.
            NotImplementedError: ``is_sequence_parallel`` or ``dp_size > 1`` with a kernel that
                exchanges no tokens; ``topk_ids`` with a ``custom_routing_function`` that has no
                such parameter; ``lora`` with ``enable_eplb``, weights in act-order, experts
                that ranks both share out and cut, or a kernel without `takes_lora` parts.
        """
        check_tokens(hidden_states, router_logits)
        shape, tokens, logits = hidden_states.shape, hidden_states, router_logits
        if len(shape) != 2:
            tokens, logits = hidden_states[None].flatten(0, -2), router_logits[None].flatten(0, -2)
        plain = is_padding is None and input_ids is None
        if not (plain and num_unpadded_tokens is None and topk_ids is None):
            is_padding, input_ids, topk_ids = token_arguments(
                hidden_states, tokens, is_padding, input_ids, num_unpadded_tokens, topk_ids
            )
        if self.is_spread or self.enable_eplb:
            self._check_ranks(tokens)
        if lora is not None:
            lora = adapters_of(self, lora, hidden_states, tokens)
        own = self.shared_experts
        shared_experts = own if self.state.kernel is None else shared_experts_of(self)
        shared_input = hidden_states if shared_experts_input is None else shared_experts_input
        if shared_experts is None and shared_experts_input is not None:
            raise needless_input()
        in_kernel = shared_experts is not None and self.state.exchange is not None
        # Kernels that exchange tokens cut them into chunks after the exchange: ranks may need
        # different numbers of chunks.
        whole = self.chunk_size is None or self.exchanges_tokens
        run = self.forward_impl if whole else self.forward_impl_chunked
        out = run(
            tokens,
            logits,
            shared_experts_input=shared_input if in_kernel else None,
            is_padding=is_padding,
            input_ids=input_ids,
            lora=lora,
            topk_ids=topk_ids,
        )
        shared: Any = None
        if in_kernel:
            shared, out = out
        if self.reduce_results:
            out = self.maybe_all_reduce_tensor_model_parallel(out)
        if len(shape) != 2:
            out = out.view(shape)
        if shared_experts is None:
            return out
        return shared if in_kernel else shared_experts(shared_input), out

    if TYPE_CHECKING:
        __call__ = forward

    def _check_ranks(self, tokens: Tensor) -> None:
        """Check a call of a layer over several ranks: see `moe_ops.layer.rank_checks`."""
        check_rank_call(self, tokens)
        if self.exchanges_tokens:
            exchange = self.state.exchange
            if exchange is not None and not exchange.output_is_reduced():
                refuse_kernel_without_exchange(exchange)

    def forward_impl(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        shared_experts_input: Tensor | None = None,
        is_padding: Tensor | None = None,
        input_ids: Tensor | None = None,
        lora: ExpertLora | None = None,
        topk_ids: Tensor | None = None,
    ) -> Any:
        """Compute this rank's part of the result, ``(T, H)``; tokens are padded to the layer's H.

        With ``shared_experts_input`` the kernel runs the shared experts on it, and the result is
        ``(shared, routed)``. The other arguments are as in `forward`, with flat tokens.
        """
        routed = self.route(
            hidden_states,
            router_logits,
            is_padding=is_padding,
            input_ids=input_ids,
            topk_ids=topk_ids,
        )
        return self._run_experts(hidden_states, routed, shared_experts_input, lora)

    def forward_impl_chunked(
        self,
        full_hidden_states: Tensor,
        full_router_logits: Tensor,
        max_tokens_across_ranks: int | None = None,
        *,
        shared_experts_input: Tensor | None = None,
        is_padding: Tensor | None = None,
        input_ids: Tensor | None = None,
        lora: ExpertLora | None = None,
        topk_ids: Tensor | None = None,
    ) -> Any:
        """Run `forward_impl` with at most ``chunk_size`` tokens in the experts at a time.

        Args:
            full_hidden_states: ``(T, H)``.
            full_router_logits: ``(T, E)``.
            max_tokens_across_ranks: the largest T of the ranks that exchange tokens. All ranks run
                the same number of chunks; a rank without tokens left runs a row of padding.
            shared_experts_input: see `forward_impl`.
            is_padding: see `forward_impl`.
            input_ids: see `forward_impl`.
            lora: see `forward_impl`.
            topk_ids: see `forward_impl`.
        """
        size, num_tokens = self.chunk_size, full_hidden_states.shape[0]
        if size is None:
            raise ValueError("chunk_size must be given to run chunks, got None")
        more: dict[str, Any] = dict(is_padding=is_padding, input_ids=input_ids, topk_ids=topk_ids)
        chunks = cdiv(max_tokens_across_ranks or num_tokens, size)
        if chunks == 0:
            more |= dict(shared_experts_input=shared_experts_input, lora=lora)
            return self.forward_impl(full_hidden_states, full_router_logits, **more)
        routed = self.route(full_hidden_states, full_router_logits, **more)
        parts, shared, shared_input = [], None, shared_experts_input
        for i in range(chunks):
            tokens = full_hidden_states[i * size : (i + 1) * size]
            if i * size < num_tokens:
                chunk = routed.tokens(i * size, (i + 1) * size)
                part = None if lora is None else lora.tokens(slice(i * size, (i + 1) * size))
                out = self._run_experts(tokens, chunk, shared_input, part)
            else:
                tokens = pad(full_hidden_states[:0], (0, 0, 0, 1))  # with the tokens' history
                part = None if lora is None else lora.of_padding()
                out = self._run_experts(tokens, routed.of_padding(), shared_input, part)
            if shared_input is not None:  # the first chunk runs the shared experts on all tokens
                (shared, out), shared_input = out, None
            parts.append(out if i * size < num_tokens else out[:0])
        out = torch.cat(parts)
        return out if shared is None else (shared, out)

    def _run_experts(
        self,
        hidden_states: Tensor,
        routed: SelectedExperts,
        shared_experts_input: Tensor | None,
        lora: ExpertLora | None = None,
    ) -> Any:
        """Run the experts of tokens that are routed; the result is that of `forward_impl`."""
        weights, ids, zero = routed
        tokens, width, shared = hidden_states, hidden_states.shape[1], None
        if width != self.hidden_size:
            checks.size("hidden_states.shape[1]", width, "hidden_size", self.model_hidden_size)
            tokens = pad(tokens, (0, self.hidden_size - width))
        if torch.is_grad_enabled() and self._sums_over_ranks() and wanted(tokens, weights):
            tokens, weights = Copied.apply(self.rank_group, tokens, weights)
        inputs = (tokens, weights, ids)
        more: dict[str, Any] = {} if lora is None else {"lora": lora}
        if shared_experts_input is None:
            out = self.state.quant_method.apply(self, *inputs, **more)
        else:
            shared, out = self.state.quant_method.apply(self, *inputs, shared_experts_input, **more)
        if self.enable_eplb:
            out = self.refuse_training(out)
        if width != self.hidden_size:
            out = out[:, :width].contiguous()
        parallel = self.state.parallel
        first = parallel.tp_rank == 0 and parallel.ep_rank == 0
        if zero is not None and (first or self.must_reduce_shared_expert_outputs()):
            out = (out + zero).to(out.dtype)  # autocast's, whatever the tokens' is
        if zero is not None and self._sums_over_ranks():  # only one rank would have its gradient
            text = "zero_expert_num must be 0 where reduce_results sums over ranks"
            out = refuse(out, wanted(zero), "FusedMoE", text)
        return out if shared_experts_input is None else (shared, out)

    def _sums_over_ranks(self) -> bool:
        """Whether `forward` adds the parts of the result that the ranks have."""
        reduces = self.reduce_results and self.rank_group.size > 1
        return reduces and not self.must_reduce_shared_expert_outputs()

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Whether the kernel has summed the routed result over ranks; shared results are not."""
        exchange = self.state.exchange
        return exchange is not None and exchange.output_is_reduced()

    def maybe_all_reduce_tensor_model_parallel(self, final_hidden_states: Tensor) -> Tensor:
        """Sum over the layer's ranks, unless the kernel has done so.

        With ``reduce_results`` the gradients of tokens and router weights are summed too.
        """
        if self.must_reduce_shared_expert_outputs():
            return final_hidden_states
        if self.is_spread and not self.reduce_results:
            compare_ranks(self, final_hidden_states.shape[0])
        inputs = wanted(final_hidden_states) if self.rank_group.size > 1 else []
        if not inputs:
            return self.rank_group.all_reduce(final_hidden_states)
        if self.reduce_results:
            return Added.apply(self.rank_group, final_hidden_states)
        total = self.rank_group.all_reduce(final_hidden_states.detach())
        return refuse(total, inputs, "FusedMoE", "reduce_results must be True to sum over ranks")

    def warmup(self, num_tokens: int | Iterable[int], router_logits_dtype: Any = None) -> list[int]:
        """Run the layer with every kernel that ``num_tokens`` tokens need; see `moe_ops.warmup`.

        These tokens are neither counted (`set_eplb_state`) nor captured (`set_capture_fn`). If
        calls of ranks meet, all of them must call this with the same numbers.

        Args:
            num_tokens: the token counts to expect, or one number for every count up to it.
            router_logits_dtype: dtype of the logits; None means the dtype of the tokens.
        """
        host, dtype, exchange = self.host_experts, self.state.in_dtype, self.state.exchange
        w1, w2 = (self.w13_weight, self.w2_weight) if host is None else (host.w1, host.w2)
        checks.dtype_of("router_logits_dtype", router_logits_dtype, (*checks.FLOATS, None))
        if self.exchanges_tokens:
            compare_ranks(self)

        def run(tokens: int) -> None:
            x = torch.randn(tokens, self.model_hidden_size, device=w1.device, dtype=dtype)
            logits = torch.randn(tokens, self.num_logits, device=w1.device, dtype=torch.float32)
            hashed = self.hash_indices_table is not None
            words = torch.zeros(tokens, dtype=torch.int64, device=w1.device) if hashed else None
            self.forward_impl(x, logits.to(router_logits_dtype or dtype), input_ids=words)

        with self.unobserved():
            return run_variants(
                run,
                num_tokens,
                Variants(
                    w1,
                    w2,
                    self.top_k,
                    self.scheme,
                    dtype,
                    self.activation,
                    self.batch_invariant,
                    expert_map=self.expert_map,
                    arriving=None if exchange is None else exchange.num_arriving,
                ),
                partial(counts_of_ranks, self),
            )
