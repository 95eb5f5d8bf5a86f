"""The Mixture-of-Experts layer as a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ops import checks
from moe_ops.activation import kind_and_key
from moe_ops.dispatch.tiles import cdiv
from moe_ops.layer.collectives import RankGroup
from moe_ops.layer.methods import (
    FusedMoEMethodBase,
    QuantizedFusedMoEMethod,
    UnquantizedFusedMoEMethod,
    shared_experts_of,
)
from moe_ops.layer.moving import KeepsBits
from moe_ops.layer.options import FusedMoEOptions, takes_options
from moe_ops.layer.partition import LayerSizes
from moe_ops.layer.routing import RoutesTokens, token_arguments
from moe_ops.layer.state import SchemeState
from moe_ops.layer.weight_loader import WeightLoading
from moe_ops.loading.given import GivenScales
from moe_ops.parallel import make_expert_params_mapping, maybe_roundup_hidden_size
from moe_ops.parallel.eplb_state import LayerEplbState
from moe_ops.pipeline.warmup import Variants, run_variants
from moe_ops.routing import SelectedExperts, check_tokens, select_experts
from moe_ops.scheme import UNQUANTIZED, get_scheme


@takes_options
class FusedMoE(RoutesTokens, WeightLoading, SchemeState, KeepsBits):
    """Routed experts of one layer; the router's linear layer stays the caller's.

    Parameters: ``w13_weight (El, 2I, H)`` (gate rows, then up rows; alternating for an interleaved
    activation; ``(El, I, H)`` without a gate) and ``w2_weight (El, H, I)``, stored as the scheme
    says; with a scheme ``w13_weight_scale``, ``w2_weight_scale`` and where it has them
    ``*_weight_zero_point``, ``*_weight_scale_2`` (global scales, factors) and ``*_input_scale``;
    with biases ``w13_bias``, ``w2_bias``. They need no grad and hold zeros until they are loaded,
    by `load_checkpoint`, `load_state_dict` or `weight_loader`, which is also an attribute of each.
    `load_checkpoint` of weights in act-order adds a buffer, ``w13_input_order``. A state dict also
    says how its tensors are stored (``_extra_state``): a layer of another scheme refuses it.

    Spread over ranks, a rank's result is its part of a sum: ``reduce_results`` sums it, or the
    caller does. Experts are cut along I (``tp_size``), so that each rank has whole scales (blocks
    are refined or I is padded where they would not fit: see `aligned_sizes`), or each rank holds
    some of them (``ep_size``).

    Args:
        num_experts: E.
        top_k: k, experts of a token.
        hidden_size: H.
        intermediate_size: I, of one expert, of all ranks together.
        **options: see `FusedMoEOptions`.

    Raises:
        TypeError: an unknown keyword, or a value of another kind.
        ValueError: k not in 1..E, an unknown name, settings that do not fit each other.
        NotImplementedError: ranks that would have to exchange tokens, such as ``dp_size > 1``; what
            ``batch_invariant`` cannot keep.

    Source:
        vLLM ``FusedMoE``. There prefixes must differ between layers, because they name the layer in
        the graph; here they are names for loading only, and no graph has them.
    """

    select_experts = staticmethod(select_experts)
    make_expert_params_mapping = staticmethod(make_expert_params_mapping)

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        **options: Any,
    ) -> None:
        super().__init__()
        given = FusedMoEOptions.of(options)
        given.check(num_experts, top_k, hidden_size, intermediate_size)
        kind, self.activation = kind_and_key(given.activation)
        self.num_experts, self.top_k = num_experts, top_k
        self.intermediate_size, self.model_hidden_size = intermediate_size, hidden_size
        self.renormalize, self.scoring_func = given.renormalize, given.scoring_func
        self.apply_router_weight_on_input = given.apply_router_weight_on_input
        self.reduce_results, self.enable_eplb = given.reduce_results, given.enable_eplb
        self.chunk_size, self.batch_invariant = given.chunk_size, given.batch_invariant
        self.prefix, self.expert_mapping = given.prefix, given.expert_mapping
        self.moe_parallel_config = parallel = given.parallel_config()
        self.placement = given.placement(parallel, num_experts)
        self.global_num_experts = len(self.placement.row)
        self.rank_group = RankGroup.of(parallel.tp_size * parallel.ep_size, given.tp_group)
        dtype = given.params_dtype or torch.get_default_dtype()
        scheme = given.quant_config or UNQUANTIZED
        # What checkpoints are stored in; a rank's own scheme may have smaller blocks.
        self.checkpoint_scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
        self.hidden_size = maybe_roundup_hidden_size(hidden_size, dtype, None, parallel)
        self.sizes = LayerSizes(
            self.placement.num_local_experts, self.hidden_size, intermediate_size,
            self.checkpoint_scheme, kind.is_gated, kind.is_interleaved, given.has_bias, dtype,
        )  # fmt: skip
        if parallel.tp_size > 1:
            self.sizes = self.aligned_sizes()
        self.given_scales = GivenScales()
        quantized = self.checkpoint_scheme.weight is not None
        method = QuantizedFusedMoEMethod if quantized else UnquantizedFusedMoEMethod
        self.quant_method: FusedMoEMethodBase = method()
        self.quant_method.create_weights(self, self.sizes, given.device)
        self.register_buffer("e_score_correction_bias", given.e_score_correction_bias)
        self.register_buffer("hash_indices_table", given.hash_indices_table)
        expert_map = self.placement.expert_map(given.device)
        self.register_buffer("expert_map", expert_map, persistent=False)
        self.register_buffer("w13_input_order", None)
        self.kernel = None
        self.routing = given.routing(self.global_num_experts)
        self.num_logits = num_experts + given.zero_expert_num
        self.routes_plainly, self.shared_experts = given.routes_plainly(), given.shared_experts
        self.eplb_state: LayerEplbState | None = None

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        shared_experts_input: Tensor | None = None,
        *,
        is_padding: Tensor | None = None,
        input_ids: Tensor | None = None,
        num_unpadded_tokens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Route the tokens and run their experts; leading axes may be more than one.

        Args:
            hidden_states: ``(T, H)``.
            router_logits: ``(T, E)``, and behind them those of the zero experts.
            shared_experts_input: what the shared experts get instead of ``hidden_states``, such as
                tokens before they were projected to the experts' latent space.
            is_padding: ``(T,)`` bool, True where a token is padding: it is not routed, sent,
                computed or counted, whatever it and its logits hold (NaN, too), and its row of the
                result is zeros. The shared experts get all tokens. Mark padding for schemes with
                one dynamic scale of all tokens (``fp8_tensor``, ``int8_tensor``): unmarked, it
                takes part in that scale, and one NaN in it makes every row NaN.
            input_ids: ``(T,)`` int32 or int64, the words of the tokens; needed by a layer with
                ``hash_indices_table``, and by no other.
            num_unpadded_tokens: one int32 or int64 on the device; tokens from it on are padding,
                as well as those of ``is_padding``.

        Returns:
            ``(T, H)``; with shared experts (the layer's, or its kernel's) ``(their result,
            (T, H))``. Their result is not summed over ranks here. With a kernel they run while rows
            come back from other ranks.

        Raises:
            TypeError: a wrong dtype.
            ValueError: shapes or devices that do not fit; ``input_ids`` missing or not wanted;
                shared experts in the layer and others in its kernel; with ``is_sequence_parallel``
                numbers of tokens that differ between ranks (see `RankGroup.check_equal_counts`).
            NotImplementedError: ``is_sequence_parallel`` and a kernel that exchanges no tokens.
        """
        check_tokens(hidden_states, router_logits)
        shape, tokens, logits = hidden_states.shape, hidden_states, router_logits
        if len(shape) != 2:
            tokens = hidden_states.reshape(-1, shape[-1])
            logits = router_logits.reshape(-1, router_logits.shape[-1])
        if not (is_padding is None and input_ids is None and num_unpadded_tokens is None):
            rows = (is_padding, input_ids, num_unpadded_tokens)
            is_padding, input_ids = token_arguments(hidden_states, tokens, *rows)
        in_parts = self.moe_parallel_config.is_sequence_parallel
        gathered = in_parts and not self.must_reduce_shared_expert_outputs()
        if gathered:
            self._check_gathered(tokens)
            of_ranks = (tokens, logits, is_padding, input_ids)
            tokens, logits, is_padding, input_ids = map(self.rank_group.all_gather, of_ranks)
        shared_experts, given = shared_experts_of(self), shared_experts_input
        if given is None:
            given = hidden_states
        in_kernel = self.kernel is not None and shared_experts is not None
        run = self.forward_impl if self.chunk_size is None else self.forward_impl_chunked
        out = run(
            tokens,
            logits,
            shared_experts_input=given if in_kernel else None,
            is_padding=is_padding,
            input_ids=input_ids,
        )
        shared: Any = None
        if in_kernel:
            shared, out = out
        if gathered:
            out = self.rank_group.reduce_scatter(out)
        elif self.reduce_results:
            out = self.maybe_all_reduce_tensor_model_parallel(out)
        if len(shape) != 2:
            out = out.view(shape)
        if shared_experts is None:
            return out
        return shared if in_kernel else shared_experts(given), out

    def _check_gathered(self, tokens: Tensor) -> None:
        """Tokens of all ranks can be gathered here, for experts that do not exchange them."""
        if self.kernel is not None:
            part = type(self.kernel.prepare_finalize).__name__
            raise NotImplementedError(
                "layer.kernel must be None with is_sequence_parallel, or have a prepare_finalize "
                f"that exchanges tokens between ranks (output_is_reduced), got {part}"
            )
        self.rank_group.check_equal_counts(tokens)

    def forward_impl(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        shared_experts_input: Tensor | None = None,
        is_padding: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Any:
        """``(T, H)``: what this rank adds to the result. Tokens are padded to the layer's H.

        With ``shared_experts_input`` the kernel runs the shared experts on that, and the result is
        ``(theirs, (T, H))``. The rest as in `forward`, of flat tokens.
        """
        routed = self.route(
            hidden_states, router_logits, is_padding=is_padding, input_ids=input_ids
        )
        return self._run_experts(hidden_states, routed, shared_experts_input)

    def forward_impl_chunked(
        self,
        full_hidden_states: Tensor,
        full_router_logits: Tensor,
        max_tokens_across_ranks: int | None = None,
        *,
        shared_experts_input: Tensor | None = None,
        is_padding: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Any:
        """`forward_impl` whose experts run on ``chunk_size`` tokens at a time.

        Args:
            full_hidden_states: ``(T, H)``.
            full_router_logits: ``(T, E)``.
            max_tokens_across_ranks: the largest T of the ranks that exchange tokens: all run as
                many chunks, and one that has no tokens left a row of padding.
            shared_experts_input: see `forward_impl`.
            is_padding: see `forward_impl`.
            input_ids: see `forward_impl`.
        """
        size, num_tokens = self.chunk_size, full_hidden_states.shape[0]
        if size is None:
            raise ValueError("chunk_size must be given to run chunks, got None")
        routed = self.route(
            full_hidden_states, full_router_logits, is_padding=is_padding, input_ids=input_ids
        )
        parts, shared, given = [], None, shared_experts_input
        for i in range(max(1, cdiv(max_tokens_across_ranks or num_tokens, size))):
            tokens = full_hidden_states[i * size : (i + 1) * size]
            if i * size < num_tokens:
                out = self._run_experts(tokens, routed.tokens(i * size, (i + 1) * size), given)
            else:
                tokens = full_hidden_states.new_zeros(1, full_hidden_states.shape[1])
                out = self._run_experts(tokens, routed.of_padding(), given)
            if given is not None:  # the shared experts take all tokens at once, in the first chunk
                (shared, out), given = out, None
            if i * size < num_tokens:
                parts.append(out)
        out = torch.cat(parts) if parts else torch.empty_like(full_hidden_states)
        return out if shared is None else (shared, out)

    def _run_experts(
        self, hidden_states: Tensor, routed: SelectedExperts, shared_experts_input: Tensor | None
    ) -> Any:
        """`forward_impl` of tokens that are routed."""
        weights, ids, zero = routed
        tokens, width, shared = hidden_states, hidden_states.shape[1], None
        if width != self.hidden_size:
            checks.size("hidden_states.shape[1]", width, "hidden_size", self.model_hidden_size)
            tokens = pad(tokens, (0, self.hidden_size - width))
        if shared_experts_input is None:
            out = self.quant_method.apply(self, tokens, weights, ids)
        else:
            shared, out = self.quant_method.apply(self, tokens, weights, ids, shared_experts_input)
        if width != self.hidden_size:
            out = out[:, :width].contiguous()
        parallel = self.moe_parallel_config
        if zero is not None and parallel.tp_rank == 0 and parallel.ep_rank == 0:
            out = out + zero
        return out if shared_experts_input is None else (shared, out)

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Whether the routed result is summed over ranks already, and the shared one is not."""
        return self.kernel is not None and self.kernel.output_is_reduced()

    def maybe_all_reduce_tensor_model_parallel(self, final_hidden_states: Tensor) -> Tensor:
        """The sum over the layer's ranks, unless the kernel has summed already."""
        if self.must_reduce_shared_expert_outputs():
            return final_hidden_states
        return self.rank_group.all_reduce(final_hidden_states)

    def warmup(self, num_tokens: int | Iterable[int], router_logits_dtype: Any = None) -> list[int]:
        """Run the layer with every kernel that ``num_tokens`` tokens need; see `moe_ops.warmup`.

        These tokens are neither counted (`set_eplb_state`) nor captured (`set_capture_fn`).

        Args:
            num_tokens: the token counts to come, or one number for all up to it.
            router_logits_dtype: dtype of the logits; None means that of the tokens.
        """
        w1, w2, dtype = self.w13_weight, self.w2_weight, self.sizes.dtype

        def run(tokens: int) -> None:
            x = torch.randn(tokens, self.hidden_size, device=w1.device, dtype=dtype)
            logits = torch.randn(tokens, self.num_logits, device=w1.device)
            hashed = self.hash_indices_table is not None
            words = torch.zeros(tokens, dtype=torch.int64, device=w1.device) if hashed else None
            self.forward_impl(x, logits.to(router_logits_dtype or dtype), input_ids=words)

        how = (self.scheme, dtype, self.activation, self.batch_invariant)
        with self.unobserved():
            return run_variants(run, num_tokens, Variants(w1, w2, self.top_k, *how))
