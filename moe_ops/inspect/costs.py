"""Cost of one call of a layer: tiles, bytes, operations, and a lower bound on their time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from moe_ops.activation import kind_and_key
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.gemm_plan import GemmPlan, PassedOver, passed_over, plan_gemm
from moe_ops.dispatch.hopper import KernelTiles
from moe_ops.dispatch.hopper_decode import DECODE_MANY, decodes_to_fp8
from moe_ops.dispatch.operands import layer_operands
from moe_ops.dispatch.problem import problem_of
from moe_ops.dispatch.row_tiles import BY_EXPERT, routed_among, row_tile_rule
from moe_ops.inspect.devices import TargetDevice
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.experts import FusedMoEExperts, FusedMoEExpertsModular
from moe_ops.pipeline.forms import serves_packed
from moe_ops.scheme import Scheme
from moe_ops.tensors import TensorSpec


@dataclass(frozen=True)
class Cost:
    """Cost of one call with ``num_tokens`` tokens on this rank, under a uniform routing."""

    num_tokens: int
    gemm1: KernelTiles | None
    """Config of GEMM 1; None if the GEMM has no tiles, or none that are known here."""
    gemm2: KernelTiles | None
    kernels: tuple[str, str] | None
    """Names of both GEMMs' kernels, as in `moe_ops.dispatch.gemm_plan`; None like `gemm1`."""
    tiles_from: tuple[str, str] | None
    """Where the tiles of GEMM 1 and of GEMM 2 come from."""
    passed_over: tuple[PassedOver, PassedOver] | None
    """Kernels that were passed over for GEMM 1 and for GEMM 2, each with why."""
    active_experts: float
    """Average number of local experts that have a token."""
    weight_bytes: int
    """Weights of the active experts, scales and biases included, read once."""
    activation_bytes: int
    """Input and output tokens."""
    intermediate_bytes: int
    """Activated rows and experts' output rows, each written and read once."""
    flops: int
    """Floating-point operations of both GEMMs; a multiplication and an addition count as two."""
    floor_us: float | None
    """The longer of two times: moving weights and tokens (no intermediates) at the measured read
    bandwidth, and computing the products at the measured rate of dense GEMMs. It is an estimate, no
    bound: a GPU may move bytes a little faster in another run."""
    workspace_bytes: int | None
    """Bytes of all buffers that the experts' ``workspace_shapes`` names, the output included. For
    the peak memory of a whole layer see `moe_ops.workspace_nbytes`."""
    parts: int = 1
    """Calls of the experts, one after the other. Tiles, active experts and workspace belong to the
    largest; everything else is the sum."""


def cost_in_parts(cost: Callable[[int], Cost], num_tokens: int, most: int | None) -> Cost:
    """The cost of a call whose experts get at most ``most`` tokens at a time; None: all of them.

    ``cost`` returns the cost of a number of tokens at once.
    """
    if most is None or num_tokens <= most:
        return cost(num_tokens)
    count, rest = divmod(num_tokens, most)
    first, last = cost(most), cost(rest or most)
    sums: dict[str, Any] = {}
    for name in ("weight_bytes", "activation_bytes", "intermediate_bytes", "flops", "floor_us"):
        one, other = getattr(first, name), getattr(last, name)
        sums[name] = None if one is None else count * one + (other if rest else 0)
    return replace(first, num_tokens=num_tokens, parts=count + bool(rest), **sums)


def cost_of(
    config: FusedMoEConfig,
    scheme: Scheme,
    experts: FusedMoEExperts,
    target: TargetDevice,
    shared: int,
    num_tokens: int,
) -> Cost:
    """The cost of a layer with the given experts on a device; ``shared`` have every token."""
    width, hidden, itemsize = config.intermediate_size, config.hidden_dim, config.in_dtype.itemsize
    slots = num_tokens * config.experts_per_token * config.num_local_experts / config.num_experts
    active = active_experts(config, num_tokens, shared)
    weight_bytes = round(active * bytes_per_expert(config, scheme))
    activation_bytes = 2 * num_tokens * hidden * itemsize
    h_bits = 8 * itemsize if scheme.activation is None else scheme.activation.element.stored_bits
    flops = round(2 * slots * sum(n * k for n, k in config.weight_shapes))
    both = _plans(config, scheme, experts, num_tokens, target.facts)
    plans = both and (both[0][0], both[1][0])
    return Cost(
        num_tokens=num_tokens,
        gemm1=plans and plans[0].config,
        gemm2=plans and plans[1].config,
        kernels=plans and (plans[0].kernel, plans[1].kernel),
        tiles_from=plans and (plans[0].source, plans[1].source),
        passed_over=both and (both[0][1], both[1][1]),
        active_experts=active,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        intermediate_bytes=round(2 * slots * (width * h_bits / 8 + hidden * itemsize)),
        flops=flops,
        floor_us=_floor_us(
            weight_bytes + activation_bytes, flops, math_of(scheme, itemsize), target
        ),
        workspace_bytes=_workspace_bytes(config, experts, num_tokens),
    )


def math_of(scheme: Scheme, itemsize: int = 2) -> str:
    """The dtype of the fastest kernel's products, as `devices.MEASURED` names it.

    int8, nominally as fast as fp8, is "fp8". ``itemsize``: bytes of a number of the tokens.
    """
    if scheme.activation is None:
        return "bf16" if itemsize == 2 else "fp32"
    return "bf16" if scheme.dequantizes_both and not decodes_to_fp8(DECODE_MANY, scheme) else "fp8"


def active_experts(config: FusedMoEConfig, num_tokens: int, shared: int = 0) -> float:
    """Average number of local experts that have a token, under a uniform routing.

    ``shared`` of the experts, which are among the ``experts_per_token``, have every token.
    """
    routed = config.num_experts - shared
    missed = (1 - (config.experts_per_token - shared) / routed) ** num_tokens
    return config.num_local_experts * (1 - missed * routed / config.num_experts)


def bytes_per_expert(config: FusedMoEConfig, scheme: Scheme) -> float:
    """Bytes of one expert: both weights with scales and biases."""
    itemsize = config.in_dtype.itemsize
    total: float = 0
    for n, k in config.weight_shapes:
        each = itemsize if scheme.weight is None else scheme.weight_bits(n, k) / 8
        total += n * k * each + n * itemsize * config.has_bias
    return total


def _floor_us(nbytes: int, flops: int, math: str, target: TargetDevice) -> float | None:
    speed = target.speed
    if speed is None:
        return None
    # Products whose rate was not measured count as 0.
    products = flops / speed.flops[math] if math in speed.flops else 0.0
    return 1e6 * max(nbytes / speed.read_bytes_per_s, products)


def _workspace_bytes(
    config: FusedMoEConfig, experts: FusedMoEExperts, num_tokens: int
) -> int | None:
    if not isinstance(experts, FusedMoEExpertsModular):
        return None
    *workspaces, output = experts.workspace_shapes(
        config.max_num_tokens or num_tokens,
        *config.weight_shapes[0],
        config.experts_per_token,
        config.num_experts,
        config.num_local_experts,
        None,
        config.activation_kind,
    )
    between = experts.workspace_dtype(config.in_dtype)
    return sum(map(prod, workspaces)) * between.itemsize + prod(output) * config.in_dtype.itemsize


def _plans(
    config: FusedMoEConfig,
    scheme: Scheme,
    experts: FusedMoEExperts,
    num_tokens: int,
    device: Device | None,
) -> tuple[tuple[GemmPlan, PassedOver], tuple[GemmPlan, PassedOver]] | None:
    """The plans of both GEMMs, as their launchers make them; None if the GEMMs have no plan.

    Beside each plan stand the kernels that come before the plan's.

    Weights are in the form in which a layer keeps them: packed where a kernel reads that.
    """
    fused = experts.ACTIVATES_IN_GEMM1
    if device is None or fused is None:
        return None
    num_experts, dtype = config.num_local_experts, config.in_dtype
    top_k, slots = config.experts_per_token, num_tokens * config.experts_per_token
    tokens: int | None = num_tokens
    most = config.max_num_tokens
    if most is not None:
        slots = num_experts * most
    if most is not None or not fused:  # rows are grouped by expert
        top_k, tokens = 1, None
    of_layer = kind_and_key(config.activation)[1]
    arch = device.arch if tokens is not None else BY_EXPERT
    rule = row_tile_rule(scheme.key, dtype.itemsize, arch, device.row_tile, config.batch_invariant)
    if tokens is not None:
        rule = routed_among(rule, config.num_experts)
    first, second = config.weight_shapes

    def plan(n: int, k: int, activation: str, top_k: int) -> tuple[GemmPlan, PassedOver]:
        shape, invariant = (num_experts, n, k), config.batch_invariant
        fragments = serves_packed(shape, scheme, dtype, device, invariant, activation)
        operands = layer_operands(
            shape,
            scheme,
            dtype,
            rule,
            slots,
            num_tokens=tokens,
            top_k=top_k,
            activation=activation if fused else "",
            fragments=fragments,
        )
        if most is not None and operands.a_scale is not None:
            scales = scheme.quants[0].batched_scale_shape(num_experts, most, k)
            scale = TensorSpec.contiguous(operands.a_scale.dtype, *scales)
            operands = operands._replace(a_scale=scale)
        problem = problem_of(operands)
        return plan_gemm(problem, device), passed_over(problem, device)

    return plan(*first, of_layer, top_k), plan(*second, "", 1)
