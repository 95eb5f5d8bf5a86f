"""The choice of the kernel and the tiles of an expert GEMM: host arithmetic on sizes."""

from moe_ops.dispatch.device import Device
from moe_ops.dispatch.gemm_plan import GemmPlan, plan_gemm
from moe_ops.dispatch.problem import GemmProblem

__all__ = ["Device", "GemmPlan", "GemmProblem", "plan_gemm"]
