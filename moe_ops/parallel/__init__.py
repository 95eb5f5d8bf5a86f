"""Several ranks: how a layer is spread over them, and which rank holds which expert."""

from moe_ops.parallel.eplb import eplb_map_to_physical_and_record
from moe_ops.parallel.parallel_config import ALL2ALL_BACKENDS, FusedMoEParallelConfig

__all__ = ["ALL2ALL_BACKENDS", "FusedMoEParallelConfig", "eplb_map_to_physical_and_record"]
