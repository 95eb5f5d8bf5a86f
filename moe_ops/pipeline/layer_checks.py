"""Check that the arguments of a layer fit each other: every rule of `fused_experts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.activation import MoEActivation
from moe_ops.dispatch.device import device_facts
from moe_ops.pipeline.quant_checks import check_quantized
from moe_ops.scheme import TENSORS, UNQUANTIZED, FusedMoEQuantConfig, Scheme, what_lacks


@checks.remembered
def check_layer(
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    global_num_experts: int,
    *experts: Any,
) -> None:
    """Run `check_experts` on its arguments ``experts``, and check the routing."""
    check_experts(*experts)
    hidden_states, w1, *_ = experts
    check_routing(hidden_states, w1, topk_weights, topk_ids, global_num_experts, expert_map)


@checks.remembered
def check_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    kind: MoEActivation,
    scheme: Scheme = UNQUANTIZED,
    *quant_tensors: Tensor | None,
) -> None:
    """Check weights and quantization: everything that is known before the routing.

    ``quant_tensors`` are the tensors of a `FusedMoEQuantConfig`, passed one by one. Passed checks
    are remembered by the tensors' shapes, dtypes and so on, and must not keep the tensors alive.
    """
    if scheme.weight is not None:
        config = FusedMoEQuantConfig(scheme, **dict(zip(TENSORS, quant_tensors, strict=True)))
        check_quantized(hidden_states, w1, w2, kind, config)
        lacks = lacks_here(scheme, hidden_states.device)
        if lacks is not None:
            raise NotImplementedError(lacks)
        check_biases(hidden_states, w1, w2, w1_bias, w2_bias)
    else:
        check_weights(hidden_states, w1, w2, w1_bias, w2_bias, kind)


def lacks_here(scheme: Scheme, device: torch.device) -> str | None:
    """Why a device of this machine cannot run a scheme, and what works; None if it can.

    A CPU always can.
    """
    arch = known_arch(device)
    return None if arch is None else what_lacks(scheme, arch)


def known_arch(device: torch.device) -> int | None:
    """Architecture of a GPU in this machine; None while compiling: the kernel fails later."""
    if torch.compiler.is_compiling() or device.type != "cuda" or not torch.cuda.is_available():
        return None
    return device_facts(device).arch


def check_weights(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    kind: MoEActivation,
) -> None:
    """Check that unquantized weights fit the tokens and the activation."""
    checks.tensor("hidden_states", hidden_states, 2, checks.FLOATS)
    for name, w in (("w1", w1), ("w2", w2)):
        check_not_quantized(name, w)
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
    check_biases(hidden_states, w1, w2, w1_bias, w2_bias)


def check_not_quantized(name: str, w: Tensor) -> None:
    """Check that a weight is not quantized; the TypeError says what a quantized weight needs."""
    checks.tensor(name, w, 3, None)
    if w.dtype not in checks.FLOATS:
        raise TypeError(
            f"{name} must have a dtype of {list(checks.FLOATS)} without a quant_config (quantized "
            "weights need one with their scheme and scales, as FusedMoEQuantConfig.from_weights "
            f"makes it), got {w.dtype}"
        )


def check_routing(
    hidden_states: Tensor,
    w1: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    global_num_experts: int,
    expert_map: Tensor | None,
) -> None:
    """Check that the routing fits the tokens and the experts."""
    checks.topk_pair(topk_weights, topk_ids)
    checks.same_device("topk_ids", topk_ids, "hidden_states", hidden_states)
    checks.same_tokens("topk_ids", topk_ids, "hidden_states", hidden_states)
    num_experts = check_num_experts(w1, global_num_experts, expert_map, topk_ids)
    checks.topk("topk_ids.shape[1]", topk_ids.shape[1], num_experts)


def check_num_experts(
    w1: Tensor, global_num_experts: int, expert_map: Tensor | None, like: Tensor
) -> int:
    """Check that the experts fit the expert map, which is on the device of ``like``; returns E."""
    checks.integer("global_num_experts", global_num_experts)
    expected = None if global_num_experts == -1 else global_num_experts
    checks.expert_map(expert_map, like, expected)
    name, experts = ("w1", w1) if expert_map is None else ("expert_map", expert_map)
    num_experts = experts.shape[0]
    if num_experts == 0:
        raise ValueError(f"{name} must hold at least one expert, got shape {tuple(experts.shape)}")
    if expected is not None and expected != num_experts:
        raise ValueError(
            f"global_num_experts must be w1.shape[0] = {num_experts} without an expert_map, "
            f"got {expected}"
        )
    return num_experts


def check_biases(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, w1_bias: Tensor | None, w2_bias: Tensor | None
) -> None:
    """Check that each bias has one number for each row of each expert's weight."""
    for name, bias, w in (("w1_bias", w1_bias, w1), ("w2_bias", w2_bias, w2)):
        if bias is not None:
            checks.tensor(name, bias, 2, checks.FLOATS)
            checks.same_device(name, bias, "hidden_states", hidden_states)
            checks.size(f"{name}.shape[0]", bias.shape[0], "the number of experts", w.shape[0])
            checks.size(f"{name}.shape[1]", bias.shape[1], "the weight's rows", w.shape[1])
