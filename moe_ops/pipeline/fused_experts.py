"""The Standard-format pipeline: align, GEMM 1 with activation, GEMM 2, weighted sum."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.gradients import check_transforms, refuse, wanted
from moe_ops.pipeline.autocast import under_autocast
from moe_ops.pipeline.backward import differentiable_experts, lacking
from moe_ops.pipeline.forward import Pass, forward
from moe_ops.pipeline.gathering import Settings
from moe_ops.pipeline.gemms import expert_weights
from moe_ops.pipeline.layer_checks import (
    check_experts,
    check_layer,
    check_not_quantized,
    check_num_experts,
)
from moe_ops.pipeline.lora import ExpertLora, check_lora
from moe_ops.pipeline.row_spaces import check_batch_invariant
from moe_ops.routing.arguments import check_logits, check_scoring
from moe_ops.routing.backward import differentiable_topk
from moe_ops.scheme import FusedMoEQuantConfig, Scheme
from moe_ops.tensors import Routing, Rows

NOT_QUANTIZED = FusedMoEQuantConfig("unquantized")


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: MoEActivation | Activation | str = "silu",
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
    batch_invariant: bool = False,
    lora: ExpertLora | None = None,
) -> Tensor:
    """Run every token through its experts and sum the experts' outputs.

    ``out[t] = sum_j w[t, j] * (act(x[t] @ w1[e].T + b1[e]) @ w2[e].T + b2[e])`` with
    ``e = topk_ids[t, j]``. Both products accumulate in float32 (float32 inputs: IEEE, no TF32);
    bias and activation are applied in float32 before the one rounding of the intermediate; each
    expert's row is rounded once; the sum runs in float32 over j = 0..k-1 and is rounded once.
    With ``apply_router_weight_on_input`` the token's row is scaled by ``w[t, j]`` (in float32)
    before the first product instead, for any k, and the sum has weight 1.

    Tokens, router weights, biases and weights that are not quantized have gradients, once, and the
    result has the same bits with and without them. (The backward pass reads the product of the
    first GEMM rounded to the dtype of ``hidden_states``.) Quantized weights are constants, and the
    gradient passes the quantization of rows unchanged. Under ``torch.autocast`` tokens are cast to
    its dtype, and so are weights that are not quantized.

    Quantized: rows are quantized before each product (the intermediate after its rounding to the
    dtype of ``hidden_states``), products of stored values are exact, scales and biases are applied
    in float32.

    A slot is skipped when its id is negative, not less than the number of experts, or mapped to -1
    by ``expert_map``: nothing of it is read, and a token whose slots are all skipped gets zeros.
    In the schemes with one dynamic scale for all tokens (``fp8_tensor``, ``int8_tensor``) padding
    tokens need ids of -1 (see `adjust_routing`): the scale is computed from the tokens that have a
    local expert, and one NaN among them makes every row NaN.

    Args:
        hidden_states: ``(T, H)`` bf16, fp16 or fp32. ``T == 0`` is allowed.
        w1: ``(El, 2I, H)``, gate rows then up rows (alternating for ``swigluoai``); ``(El, I, H)``
            for an activation without a gate. Dtype of ``hidden_states``; contiguous along one of
            its last two axes, as is ``w2``. Stored as the scheme of ``quant_config`` says, or in
            the packed form (see `pack_weight`).
        w2: ``(El, H, I)``, in either form.
        topk_weights: ``(T, k)`` fp32, bf16 or fp16; need not sum to one.
        topk_ids: ``(T, k)`` int32 or int64, ids of global experts.
        activation: a `MoEActivation`, its name, or an `Activation` with numbers.
        global_num_experts: E; -1 means the length of ``expert_map``, or El without one.
        expert_map: ``(E,)`` int32 or int64, the local expert of each global one, -1 if not local.
        apply_router_weight_on_input: scale rows before the first product instead; see above.
        w1_bias: ``(El, 2I)`` (or ``(El, I)``), any of the three float dtypes.
        w2_bias: ``(El, H)``.
        quant_config: the weights' scheme and scales, and how activations are quantized; None: not
            quantized. Biases may be given here or as arguments, which take precedence.
        batch_invariant: whether the bits of a token's result depend on that token and its routing
            alone, not on the number, values or order of other tokens in the call. One row tile is
            then used at every load, so most loads take longer.
        lora: adapters beside both products, whatever the scheme: ``W x + scaling * B A x`` for the
            adapter of each token; see `ExpertLora`. They read rows that are not quantized.

    Returns:
        ``(T, H)``, contiguous, dtype of ``hidden_states``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes, devices or strides that do not fit; an unknown activation.
        NotImplementedError: ``batch_invariant`` with a scheme whose activations share one scale of
            all tokens; a packed weight on a GPU without a kernel for it; a backward pass with
            quantized weights or scales that require grad; forward-mode derivatives and transforms
            of ``torch.func``.

    Source:
        vLLM ``fused_experts`` and ``TritonExperts``; there the router weight is rounded into the
        rows of GEMM 2 and k > 1 is rejected with ``apply_router_weight_on_input``.
    """
    return _enter(
        hidden_states,
        (w1, w2, w1_bias, w2_bias),
        Routing(topk_weights, topk_ids, expert_map),
        activation=activation,
        global_num_experts=global_num_experts,
        flags=(apply_router_weight_on_input, batch_invariant),
        config=quant_config,
        lora=lora,
    )


def expert_rows(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    routing: Routing,
    *,
    activation: MoEActivation | Activation | str,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
    lora: ExpertLora | None = None,
) -> Tensor:
    """`fused_experts` before the weighted sum: row ``t * k + j`` is slot j of token t.

    All arguments are as in `fused_experts`; the weights of ``routing`` are checked and not used.

    Returns:
        ``(T * k, H)``, with gradients; the rows of skipped slots are undefined (also NaN).

    Raises:
        TypeError, ValueError, NotImplementedError: as `fused_experts`.
    """
    return _enter(
        hidden_states,
        (w1, w2, w1_bias, w2_bias),
        routing._replace(topk_weights=routing.topk_weights.detach()),
        activation=activation,
        global_num_experts=-1,
        flags=(False, False),
        config=quant_config,
        lora=lora,
        summed=False,
    )


class Router(NamedTuple):
    """The routing of `fused_moe`, before it is made; the fields are its arguments."""

    gating_output: Tensor
    topk: int
    renormalize: bool
    scoring_func: str
    expert_map: Tensor | None

    def route(self) -> Routing:
        """Route the tokens, with a gradient of the logits if it may be asked for."""
        logits, topk, renormalize, scoring_func, expert_map = self
        if torch.is_grad_enabled() and logits.requires_grad:
            weighing = topk, renormalize, scoring_func, 1.0
            routed = differentiable_topk("fused_topk", logits, None, weighing)
        else:
            routed = ops.fused_topk(logits, None, topk, renormalize, scoring_func, 1.0)
        return Routing(*routed, expert_map)


@checks.remembered
def _check_fused_call(
    routing: Routing | Router,
    apply_router_weight_on_input: bool,
    batch_invariant: bool,
    global_num_experts: int,
    *experts: Any,
) -> None:
    """Check the arguments of a call; ``experts`` are the arguments of `check_experts`."""
    hidden_states, w1, w2, _, _, _, scheme, *_ = experts
    if isinstance(routing, Router):
        _check_router(routing, hidden_states, w1, w2, scheme)
    checks.flags(
        apply_router_weight_on_input=apply_router_weight_on_input, batch_invariant=batch_invariant
    )
    if isinstance(routing, Router):
        check_experts(*experts)
        check_num_experts(w1, global_num_experts, routing.expert_map, routing.gating_output)
    else:
        check_layer(*routing, global_num_experts, *experts)
    if batch_invariant:
        check_batch_invariant(scheme)


def _check_router(
    router: Router, hidden_states: Tensor, w1: Tensor, w2: Tensor, scheme: Scheme
) -> None:
    """Check the arguments of `fused_moe` that `fused_experts` lacks, and the numbers of experts."""
    logits, topk, renormalize, scoring_func, expert_map = router
    check_logits(hidden_states, logits, topk)
    checks.same_device("gating_output", logits, "hidden_states", hidden_states)
    check_scoring(logits, scoring_func, None)
    checks.expert_map(expert_map, logits)
    checks.flags(renormalize=renormalize)
    for name, w in (("w1", w1), ("w2", w2)):
        if scheme.weight is None:
            check_not_quantized(name, w)
        else:
            checks.tensor(name, w, 3, None)
    experts = w1.shape[0] if expert_map is None else expert_map.shape[0]
    checks.size("gating_output.shape[1]", logits.shape[1], "the number of experts", experts)


def _enter(
    hidden_states: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    routing: Routing | Router,
    *,
    activation: MoEActivation | Activation | str,
    global_num_experts: int,
    flags: tuple[bool, bool],
    config: FusedMoEQuantConfig | None,
    lora: ExpertLora | None = None,
    summed: bool = True,
) -> Tensor:
    """Check a call, decide what gradients it has, and run it.

    ``weights``: both weights, and both biases. ``flags``: ``apply_router_weight_on_input`` and
    ``batch_invariant``. ``summed=False`` returns the slots' rows: see `expert_rows`.
    """
    if config is None:
        config = NOT_QUANTIZED
    elif not isinstance(config, FusedMoEQuantConfig):
        raise not_a_config(config)
    scheme, (w1, w2, b1, b2) = config.scheme, weights
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        hidden_states, w1, w2 = under_autocast(hidden_states, w1, w2, config)
    kind, key = kind_and_key(activation)
    b1, b2 = config.w1_bias if b1 is None else b1, config.w2_bias if b2 is None else b2
    quantization = () if scheme.weight is None else config.tensors
    _check_fused_call(
        routing,
        *flags,
        global_num_experts,
        hidden_states,
        w1,
        w2,
        b1,
        b2,
        kind,
        scheme,
        *quantization,
    )
    settings = Settings(scheme, key, *flags, hidden_states.dtype, summed)
    step = Pass(expert_weights(w1, w2, config, (b1, b2)), settings)
    source = routing.route if isinstance(routing, Router) else routing
    inputs: list[Tensor] = []
    if torch.is_grad_enabled():  # the first field: router weights, or what they are made of
        inputs = wanted(hidden_states, w1, w2, routing[0], b1, b2, config, lora)
    if lora is not None:
        check_lora(lora, hidden_states, w1, w2, scheme)
    elif not inputs:
        return forward(step, hidden_states, source)
    trained = step._replace(through=partial(_differentiable, step, config, lora))
    reason = lacking((w1, w2), config)
    if reason is not None:
        with torch.no_grad():
            out = forward(step if lora is None else trained, hidden_states, source)
        return refuse(out, inputs, "fused_experts", reason)
    check_transforms("fused_experts")
    return forward(trained, hidden_states, source)


def not_a_config(value: Any) -> TypeError:
    """Return the error about a ``quant_config`` of another kind."""
    return TypeError(
        "quant_config must be a FusedMoEQuantConfig, as FusedMoEQuantConfig.from_weights makes it "
        f"of a scheme and its weights, got {type(value).__name__}"
    )


def _differentiable(
    step: Pass,
    config: FusedMoEQuantConfig,
    lora: ExpertLora | None,
    rows: list[Rows],
    _: None,
    routing: Routing,
) -> Tensor:
    """`forward` of the same step as a node of the graph: see `Pass.through`."""
    x = rows.pop().data
    return differentiable_experts(x, step.weights, routing, step.settings, config, lora)


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool = True,
    *,
    scoring_func: str = "softmax",
    activation: MoEActivation | Activation | str = "silu",
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Route as `fused_topk` does, then run `fused_experts`.

    Args:
        hidden_states: ``(T, H)``.
        w1: as in `fused_experts`, like every argument not named here.
        w2: see `fused_experts`.
        gating_output: ``(T, E)`` router logits, bf16, fp16 or fp32.
        topk: experts per token.
        renormalize: whether a token's weights are divided by their sum.
        scoring_func: as in `fused_topk`.
        activation: see `fused_experts`.
        global_num_experts: see `fused_experts`.
        expert_map: see `fused_experts`.
        apply_router_weight_on_input: see `fused_experts`.
        w1_bias: see `fused_experts`.
        w2_bias: see `fused_experts`.
        quant_config: see `fused_experts`.
        batch_invariant: see `fused_experts`; routing is always batch-invariant.

    Returns:
        ``(T, H)``, contiguous, dtype of ``hidden_states``.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fused_topk` and `fused_experts`.
    """
    return _enter(
        hidden_states,
        (w1, w2, w1_bias, w2_bias),
        Router(gating_output, topk, renormalize, scoring_func, expert_map),
        activation=activation,
        global_num_experts=global_num_experts,
        flags=(apply_router_weight_on_input, batch_invariant),
        config=quant_config,
    )
