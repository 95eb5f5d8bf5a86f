"""Several ranks: how a layer is spread over them, and which rank holds which expert."""

from moe_ops.parallel.parallel_config import ALL2ALL_BACKENDS, FusedMoEParallelConfig

__all__ = ["ALL2ALL_BACKENDS", "FusedMoEParallelConfig"]
