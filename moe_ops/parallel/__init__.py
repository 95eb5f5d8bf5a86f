"""Several ranks: how they share a layer, which rank holds which expert, and load balancing."""

from moe_ops.parallel.eplb import eplb_map_to_physical_and_record
from moe_ops.parallel.eplb_state import EplbState
from moe_ops.parallel.moves import move_experts
from moe_ops.parallel.parallel_config import ALL2ALL_BACKENDS, FusedMoEParallelConfig
from moe_ops.parallel.placement import (
    PLACEMENT_STRATEGIES,
    determine_expert_map,
    determine_expert_ranks,
    get_compressed_expert_map,
    initial_physical_to_logical_map,
    make_expert_params_mapping,
    maybe_roundup_hidden_size,
    remap_topk_to_local,
)
from moe_ops.parallel.rebalance import LogicalMaps, compute_logical_maps, rebalance_experts
from moe_ops.parallel.simulate import BalanceReport, imbalance, simulate_balance

__all__ = [
    "ALL2ALL_BACKENDS",
    "PLACEMENT_STRATEGIES",
    "BalanceReport",
    "EplbState",
    "FusedMoEParallelConfig",
    "LogicalMaps",
    "compute_logical_maps",
    "determine_expert_map",
    "determine_expert_ranks",
    "eplb_map_to_physical_and_record",
    "get_compressed_expert_map",
    "imbalance",
    "initial_physical_to_logical_map",
    "make_expert_params_mapping",
    "maybe_roundup_hidden_size",
    "move_experts",
    "rebalance_experts",
    "remap_topk_to_local",
    "simulate_balance",
]
