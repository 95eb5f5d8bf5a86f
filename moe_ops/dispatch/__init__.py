"""Which kernel computes an expert GEMM, and with which tiles: host arithmetic on sizes."""

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.gemm_plan import GemmPlan, plan_gemm
from moe_ops.dispatch.problem import GemmProblem

__all__ = ["Device", "GemmPlan", "GemmProblem", "plan_gemm"]
