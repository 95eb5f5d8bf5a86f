"""The Standard-format pipeline: align, GEMM 1 with activation, GEMM 2, weighted sum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops import checks, ops
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.routing.topk import fused_topk
from moe_ops.tensors import TilePlan
from moe_ops.tiles import ROW_TILES


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
    quant_config: Any = None,
) -> Tensor:
    """Run every token through its experts and sum what they return.

    ``out[t] = sum_j w[t, j] * (act(x[t] @ w1[e].T + b1[e]) @ w2[e].T + b2[e])`` with
    ``e = topk_ids[t, j]``. Both products accumulate in float32 (float32 inputs: IEEE, no TF32);
    bias and activation are applied in float32 before the one rounding of the intermediate; each
    expert's row is rounded once; the sum runs in float32 over j = 0..k-1 and is rounded once.
    With ``apply_router_weight_on_input`` the token's row is scaled by ``w[t, j]`` (in float32)
    before the first product instead, for any k, and the sum has weight 1.

    A slot is skipped when its id is negative, not less than the number of experts, or mapped to -1
    by ``expert_map``: nothing of it is read, and a token whose slots are all skipped gets zeros.

    Args:
        hidden_states: ``(T, H)`` bf16, fp16 or fp32. ``T == 0`` is allowed.
        w1: ``(El, 2I, H)``, gate rows then up rows (alternating for ``swigluoai``); ``(El, I, H)``
            for an activation without a gate. Dtype of ``hidden_states``; contiguous along one of
            its last two axes, as is ``w2``.
        w2: ``(El, H, I)``.
        topk_weights: ``(T, k)`` fp32, bf16 or fp16; need not sum to one.
        topk_ids: ``(T, k)`` int32 or int64, ids of global experts.
        activation: a `MoEActivation`, its name, or an `Activation` with numbers.
        global_num_experts: E; -1 means the length of ``expert_map``, or El without one.
        expert_map: ``(E,)`` int32 or int64, the local expert of each global one, -1 if not local.
        apply_router_weight_on_input: see above.
        w1_bias: ``(El, 2I)`` (or ``(El, I)``), any of the three float dtypes.
        w2_bias: ``(El, H)``.
        quant_config: not supported yet.

    Returns:
        ``(T, H)``, contiguous, dtype of ``hidden_states``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes, devices or strides that do not fit; an unknown activation.
        NotImplementedError: an input that requires grad while grad mode is on; ``quant_config``.

    Source:
        vLLM ``fused_experts`` and ``TritonExperts``; there the router weight is rounded into the
        rows of GEMM 2 and k > 1 is rejected with ``apply_router_weight_on_input``.
    """
    if quant_config is not None:
        raise NotImplementedError(f"quant_config must be None in this version, got {quant_config}")
    kind, key = kind_and_key(activation)
    check_weights(hidden_states, w1, w2, w1_bias, w2_bias, kind)
    check_routing(hidden_states, w1, topk_weights, topk_ids, global_num_experts, expert_map)

    num_local_experts = w1.shape[0]
    tokens, k = topk_ids.shape
    on_input = topk_weights if apply_router_weight_on_input else None
    on_output = None if apply_router_weight_on_input else topk_weights
    plan = plan_tiles(topk_ids, expert_map, num_local_experts)
    h = ops.expert_gemm_act(hidden_states, w1, w1_bias, on_input, *plan, ROW_TILES, k, key)
    y = ops.expert_gemm(h, w2, w2_bias, None, None, *plan, ROW_TILES, 1)
    del h  # gone before the output is allocated: `workspace_nbytes` counts on it
    y = y.view(tokens, k, hidden_states.shape[1])
    return ops.moe_fused_mul_sum(y, on_output, topk_ids, expert_map, None, num_local_experts)


def plan_tiles(topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int) -> TilePlan:
    """The plan that both GEMMs of a layer follow: local experts only, tiles picked by the op."""
    return TilePlan(
        *ops.moe_align_block_size(topk_ids, expert_map, ROW_TILES, num_local_experts, False, True)
    )


def check_weights(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    kind: MoEActivation,
) -> None:
    """The weights fit the tokens and the activation, and none of them wants a gradient."""
    checks.tensor("hidden_states", hidden_states, 2, checks.FLOATS)
    for name, w in (("w1", w1), ("w2", w2)):
        checks.tensor(name, w, 3, checks.FLOATS)
        checks.same_dtype(name, w, "hidden_states", hidden_states)
        checks.same_device(name, w, "hidden_states", hidden_states)
        checks.one_unit_stride(name, w)
        reach = (w.shape[1] - 1) * w.stride(1) + (w.shape[2] - 1) * w.stride(2)
        if reach >= 2**31:  # kernels count within one expert in 32 bits
            raise NotImplementedError(
                f"{name} must reach over fewer than 2**31 elements an expert, got shape "
                f"{tuple(w.shape)} with strides {w.stride()}"
            )
    hidden_size, intermediate_size = hidden_states.shape[1], w2.shape[2]
    checks.size("w2.shape[0]", w2.shape[0], "w1.shape[0]", w1.shape[0])
    checks.size("w1.shape[2]", w1.shape[2], "hidden_states.shape[1]", hidden_size)
    checks.size("w2.shape[1]", w2.shape[1], "hidden_states.shape[1]", hidden_size)
    if kind.is_gated:
        if w1.shape[1] % 2:
            raise ValueError(
                f"w1 must have an even number of rows (gate and up) for activation {kind.value}, "
                f"got w1.shape[1] = {w1.shape[1]}"
            )
        checks.size("w1.shape[1]", w1.shape[1], "2 * w2.shape[2]", 2 * intermediate_size)
    else:
        checks.size("w1.shape[1]", w1.shape[1], "w2.shape[2]", intermediate_size)
    for name, bias, w in (("w1_bias", w1_bias, w1), ("w2_bias", w2_bias, w2)):
        if bias is not None:
            checks.tensor(name, bias, 2, checks.FLOATS)
            checks.same_device(name, bias, "hidden_states", hidden_states)
            checks.size(f"{name}.shape[0]", bias.shape[0], "the number of experts", w.shape[0])
            checks.size(f"{name}.shape[1]", bias.shape[1], "the weight's rows", w.shape[1])
    checks.inference_only(
        hidden_states=hidden_states, w1=w1, w2=w2, w1_bias=w1_bias, w2_bias=w2_bias
    )


def check_routing(
    hidden_states: Tensor,
    w1: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    global_num_experts: int,
    expert_map: Tensor | None,
) -> None:
    """The routing fits the tokens and the experts, and wants no gradient."""
    checks.topk_pair(topk_weights, topk_ids)
    checks.same_device("topk_ids", topk_ids, "hidden_states", hidden_states)
    checks.same_tokens("topk_ids", topk_ids, "hidden_states", hidden_states)
    given = None if global_num_experts == -1 else global_num_experts
    checks.expert_map(expert_map, topk_ids, given)
    num_experts = w1.shape[0] if expert_map is None else expert_map.shape[0]
    if num_experts == 0:
        raise ValueError(f"w1 must hold at least one expert, got shape {tuple(w1.shape)}")
    if given is not None and given != num_experts:
        raise ValueError(
            f"global_num_experts must be w1.shape[0] = {num_experts} without an expert_map, "
            f"got {given}"
        )
    checks.topk("topk_ids.shape[1]", topk_ids.shape[1], num_experts)
    checks.inference_only(topk_weights=topk_weights)


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
    quant_config: Any = None,
) -> Tensor:
    """Route with `fused_topk`, then `fused_experts`.

    Args:
        hidden_states: ``(T, H)``.
        w1: as in `fused_experts`, like every argument not named here.
        w2: see `fused_experts`.
        gating_output: ``(T, E)`` router logits, bf16, fp16 or fp32.
        topk: experts of a token.
        renormalize: whether a token's weights are divided by their sum.
        scoring_func: ``softmax`` or ``sigmoid``.
        activation: see `fused_experts`.
        global_num_experts: see `fused_experts`.
        expert_map: see `fused_experts`.
        apply_router_weight_on_input: see `fused_experts`.
        w1_bias: see `fused_experts`.
        w2_bias: see `fused_experts`.
        quant_config: see `fused_experts`.

    Returns:
        ``(T, H)``, contiguous, dtype of ``hidden_states``.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fused_topk` and `fused_experts`.
    """
    checks.tensor("gating_output", gating_output, 2, checks.FLOATS)
    checks.tensor("w1", w1, 3, checks.FLOATS)
    experts = w1.shape[0] if expert_map is None else expert_map.shape[0]
    checks.size("gating_output.shape[1]", gating_output.shape[1], "the number of experts", experts)
    topk_weights, topk_ids = fused_topk(
        hidden_states, gating_output, topk, renormalize, scoring_func=scoring_func
    )
    return fused_experts(
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation=activation,
        global_num_experts=global_num_experts,
        expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        quant_config=quant_config,
    )
