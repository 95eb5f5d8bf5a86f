"""Which rank holds which expert, and the names of experts in checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.dispatch.tiles import cdiv
from moe_ops.parallel.parallel_config import FusedMoEParallelConfig
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.scheme.named import MXFP4
from moe_ops.tensors import narrowed

PLACEMENT_STRATEGIES = ("linear", "round_robin")
DEEPEP_LL_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""The hidden sizes that DeepEP's low-latency kernels are compiled for."""
DEEPEP_HT_BYTES = 512
"""DeepEP's high-throughput kernels need rows of a multiple of this many bytes."""


def determine_expert_map(
    ep_size: int,
    ep_rank: int,
    global_num_experts: int,
    expert_placement_strategy: str = "linear",
    num_fused_shared_experts: int = 0,
) -> tuple[int, Tensor | None, Tensor | None]:
    """Return which of the E experts rank ``ep_rank`` holds, and where.

    The first ``E % ep_size`` ranks hold one expert more than the others.

    Args:
        ep_size: ranks that share the experts.
        ep_rank: the rank in question.
        global_num_experts: E; with redundant experts the number of physical ones.
        expert_placement_strategy: ``linear`` (a range of experts each) or ``round_robin`` (experts
            ``ep_rank``, ``ep_rank + ep_size``, ...).
        num_fused_shared_experts: shared experts with ids from E on, which every rank has.

    Returns:
        ``(local_num_experts, expert_map, expert_mask)``. ``expert_map`` int32 ``(E,)`` is the local
        expert of each global one, or -1. ``expert_mask`` int32 ``(E + shared + 1,)`` is 1 for each
        expert of this rank and each shared one, and ends with a 0. Both are None with one rank.

    Raises:
        ValueError: a size below 1, a rank outside 0..ep_size-1, or an unknown strategy.

    Source:
        vLLM ``determine_expert_map``.
    """
    checks.at_least(0, num_fused_shared_experts=num_fused_shared_experts)
    rows = rows_of_rank(ep_size, ep_rank, global_num_experts, expert_placement_strategy)
    if ep_size == 1:
        return global_num_experts, None, None
    expert_map = torch.tensor(rows, dtype=torch.int32)
    shared = expert_map.new_ones(num_fused_shared_experts)
    mask = torch.cat(((expert_map >= 0).to(torch.int32), shared, shared.new_zeros(1)))
    return max(rows) + 1, expert_map, mask


def rows_of_rank(
    ep_size: int, ep_rank: int, global_num_experts: int, expert_placement_strategy: str
) -> list[int]:
    """Return the local expert of each of the E global ones on rank ``ep_rank``, or -1.

    A list, for readers on the host: a tensor has no numbers on meta or under a `FakeTensorMode`.

    Args:
        ep_size: see `determine_expert_map`.
        ep_rank: the rank in question.
        global_num_experts: E.
        expert_placement_strategy: see `determine_expert_map`.

    Raises:
        ValueError: as `determine_expert_map`.
    """
    checks.at_least(1, ep_size=ep_size, global_num_experts=global_num_experts)
    checks.integer("ep_rank", ep_rank)
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank must be in 0..{ep_size - 1}, got {ep_rank}")
    checks.one_of("expert_placement_strategy", expert_placement_strategy, PLACEMENT_STRATEGIES)
    base, remainder = divmod(global_num_experts, ep_size)
    if expert_placement_strategy == "linear":
        first = ep_rank * base + min(ep_rank, remainder)
        held = range(first, first + base + (ep_rank < remainder))
    else:
        held = range(ep_rank, global_num_experts, ep_size)
    return [held.index(expert) if expert in held else -1 for expert in range(global_num_experts)]


def determine_expert_ranks(
    ep_size: int, global_num_experts: int, expert_placement_strategy: str = "linear"
) -> Tensor:
    """Return int32 ``(E,)``: the rank that holds each expert as `determine_expert_map` places it.

    Args:
        ep_size: ranks that share the experts.
        global_num_experts: E; with redundant experts the number of physical ones.
        expert_placement_strategy: see `determine_expert_map`.

    Returns:
        int32 ``(E,)``: the rank of each expert.

    Raises:
        ValueError: as `determine_expert_map`.
    """
    checks.at_least(1, ep_size=ep_size)
    sizes = (global_num_experts, expert_placement_strategy)
    maps = [determine_expert_map(ep_size, rank, *sizes)[1] for rank in range(ep_size)]
    present = [expert_map for expert_map in maps if expert_map is not None]
    if not present:
        return torch.zeros(global_num_experts, dtype=torch.int32)
    return ranks_of_experts(torch.stack(present) >= 0)


def ranks_of_experts(held: Tensor) -> Tensor:
    """Return int32 ``(E,)``: the rank that holds each expert; ``held[r, e]``: rank r holds e."""
    return held.int().argmax(0).int()


def get_compressed_expert_map(expert_map: Tensor) -> str:
    """Format the experts of this rank for a log line: ``"0->4, 1->5"`` is ``local->global``.

    Returns:
        A pair for each expert of this rank, joined by commas.

    Raises:
        TypeError, ValueError: ``expert_map`` is not a 1-D tensor of int32 or int64, or on meta.
    """
    checks.tensor("expert_map", expert_map, 1, checks.INDICES)
    if expert_map.is_meta:
        raise ValueError("expert_map must hold numbers, got a Tensor on meta")
    return ", ".join(
        f"{local}->{expert}" for expert, local in enumerate(expert_map.tolist()) if local != -1
    )


def remap_topk_to_local(topk_ids: Tensor, expert_map: Tensor, dtype: torch.dtype) -> Tensor:
    """Map global ids to local ones; -1 for an id that is out of range or of another rank.

    Args:
        topk_ids: ``(T, k)`` int32 or int64.
        expert_map: ``(E,)``, the local expert of each global one, or -1.
        dtype: dtype of the result, int32 or int64.

    Returns:
        ``(T, k)`` in ``dtype``.

    Raises:
        TypeError, ValueError: a wrong dtype, shape or device.

    Source:
        vLLM ``remap_topk_to_local``.
    """
    checks.tensor("topk_ids", topk_ids, 2, checks.INDICES)
    checks.tensor("expert_map", expert_map, 1, checks.INDICES)
    checks.same_device("expert_map", expert_map, "topk_ids", topk_ids)
    if dtype not in checks.INDICES:
        raise ValueError(f"dtype must be one of {list(checks.INDICES)}, got {dtype}")
    checks.at_least(1, **{"expert_map.shape[0]": expert_map.shape[0]})
    valid = (topk_ids >= 0) & (topk_ids < expert_map.shape[0])
    local = expert_map[torch.where(valid, topk_ids, 0).long()]
    return narrowed(torch.where(valid, local, -1), dtype)


def initial_physical_to_logical_map(
    num_experts: int, num_redundant_experts: int = 0, ep_size: int = 1
) -> Tensor:
    """Return the logical expert of each physical one before any load is known: int64 ``(P,)``.

    Every expert comes once, then experts 0, 1, 2, ... again until all redundant ones are filled.

    Returns:
        int64 ``(P,)``.

    Raises:
        ValueError: ``P = num_experts + num_redundant_experts`` is not a multiple of ``ep_size``.

    Source:
        vLLM's initial EPLB map.
    """
    return torch.tensor(logical_experts(num_experts, num_redundant_experts, ep_size))


def logical_experts(
    num_experts: int, num_redundant_experts: int = 0, ep_size: int = 1
) -> list[int]:
    """Return the numbers of `initial_physical_to_logical_map`, for readers on the host.

    Raises:
        ValueError: as `initial_physical_to_logical_map`.
    """
    checks.at_least(1, num_experts=num_experts, ep_size=ep_size)
    checks.at_least(0, num_redundant_experts=num_redundant_experts)
    num_physical = num_experts + num_redundant_experts
    if num_physical % ep_size:
        raise ValueError(
            "num_experts + num_redundant_experts must be a multiple of ep_size = "
            f"{ep_size}, got {num_physical}"
        )
    return [expert % num_experts for expert in range(num_physical)]


def make_expert_params_mapping(
    ckpt_gate_proj_name: str,
    ckpt_down_proj_name: str,
    ckpt_up_proj_name: str,
    num_experts: int,
    num_redundant_experts: int = 0,
) -> list[tuple[str, str, int, str]]:
    """Return which tensor of a checkpoint goes to which part of which physical expert.

    Returns:
        ``(param_name, weight_name, expert_id, shard_id)`` for the gate (``w1``), down (``w2``) and
        up (``w3``) projection of every physical expert in order. ``weight_name`` names the logical
        expert that it holds at first (see `initial_physical_to_logical_map`).

    Raises:
        TypeError: a name that is no str.
        ValueError: no expert, or a negative number of redundant ones.

    Source:
        vLLM ``FusedMoE.make_expert_params_mapping``.
    """
    names = (ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name)
    for projection, name in zip(("gate", "down", "up"), names, strict=True):
        checks.instance(f"ckpt_{projection}_proj_name", name, str)
    logical = logical_experts(num_experts, num_redundant_experts)
    shards = (
        ("w1", "experts.w13_", ckpt_gate_proj_name),
        ("w2", "experts.w2_", ckpt_down_proj_name),
        ("w3", "experts.w13_", ckpt_up_proj_name),
    )
    return [
        (param_name, f"experts.{logical_id}.{weight_name}.", expert_id, shard_id)
        for expert_id, logical_id in enumerate(logical)
        for shard_id, param_name, weight_name in shards
    ]


def maybe_roundup_hidden_size(
    hidden_size: int,
    act_dtype: torch.dtype,
    quant_config: FusedMoEQuantConfig | None,
    moe_parallel_config: FusedMoEParallelConfig,
) -> int:
    """Return the hidden size that a layer's buffers need for the kernels of other libraries.

    * DeepEP high-throughput: rows of a multiple of 512 bytes.
    * DeepEP low-latency: the next size that its kernels are compiled for.
    * mxfp4 weights: the next multiple of 128, or of 256 with quantized activations.

    The kernels of this library take any hidden size.

    Args:
        hidden_size: H of the model.
        act_dtype: dtype of the activations that are exchanged.
        quant_config: the layer's quantization, or None.
        moe_parallel_config: how ranks share the layer.

    Returns:
        The rounded size, at least ``hidden_size``.

    Raises:
        ValueError: a hidden size above DeepEP's largest.

    Source:
        vLLM ``maybe_roundup_hidden_size``.
    """
    checks.at_least(1, hidden_size=hidden_size)
    for name, value, kind in (
        ("moe_parallel_config", moe_parallel_config, FusedMoEParallelConfig),
        ("quant_config", quant_config, (FusedMoEQuantConfig, type(None))),
        ("act_dtype", act_dtype, torch.dtype),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind}, got {type(value).__name__}")
    if moe_parallel_config.use_deepep_ht_kernels:
        elements = DEEPEP_HT_BYTES // act_dtype.itemsize
        hidden_size = cdiv(hidden_size, elements) * elements
    if moe_parallel_config.use_deepep_ll_kernels:
        hidden_size = _next_deepep_ll_size(hidden_size)
    if quant_config is not None and quant_config.scheme.weight == MXFP4:
        multiple = 128 if quant_config.scheme.activation is None else 256
        hidden_size = cdiv(hidden_size, multiple) * multiple
    return hidden_size


def _next_deepep_ll_size(hidden_size: int) -> int:
    for size in DEEPEP_LL_HIDDEN_SIZES:
        if hidden_size <= size:
            return size
    raise ValueError(
        f"hidden_size must be at most {DEEPEP_LL_HIDDEN_SIZES[-1]} with deepep_low_latency, "
        f"got {hidden_size}"
    )
