"""Implementations of the experts, each with a declaration of what it supports."""

from moe_ops.pipeline.experts.base import (
    FusedMoEExperts,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
)
from moe_ops.pipeline.experts.monolithic import MonolithicExperts
from moe_ops.pipeline.experts.naive import NaiveBatchedExperts
from moe_ops.pipeline.experts.own import (
    BatchedGroupedGemmExperts,
    BatchedTritonExperts,
    GroupedGemmExperts,
    OperatorExperts,
    TritonExperts,
)
from moe_ops.pipeline.experts.supports import EVERY_SCHEME, Supports

__all__ = [
    "EVERY_SCHEME",
    "BatchedGroupedGemmExperts",
    "BatchedTritonExperts",
    "FusedMoEExperts",
    "FusedMoEExpertsModular",
    "FusedMoEExpertsMonolithic",
    "GroupedGemmExperts",
    "MonolithicExperts",
    "NaiveBatchedExperts",
    "OperatorExperts",
    "Supports",
    "TritonExperts",
]
