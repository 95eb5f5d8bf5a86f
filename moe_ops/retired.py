"""Operators of earlier versions, which exported programs still name.

A program is loaded only if the schemas of its operators are registered, so `moe_ops.ops` registers
these. Calling one raises an error that says which version exported the program. No operator gets
one of these names again: `tests/project/test_operator_names.py` checks that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

SCHEMAS = {
    "0.2": (
        "expert_matmul(Tensor a, Tensor w, Tensor? bias, Tensor? topk_weights, Tensor?[] tiles,"
        ' SymInt top_k, str activation="", bool expert_order=False, bool batch_invariant=False)'
        " -> Tensor",
        "expert_matmul_add(Tensor a, Tensor w, Tensor? topk_weights, Tensor?[] tiles, SymInt top_k,"
        " bool batch_invariant=False, *, Tensor(a!) out) -> ()",
        "scaled_matmul(Tensor a, Tensor? a_scale, Tensor w, Tensor w_scale, Tensor? w_global_scale,"
        " Tensor? bias, Tensor?[] tiles, SymInt top_k, str scheme, ScalarType out_dtype,"
        ' str activation="", bool batch_invariant=False) -> Tensor',
        "weight_only_matmul(Tensor a, Tensor w, Tensor? w_scale, Tensor? w_zero_point,"
        " Tensor? w_global_scale, Tensor? bias, Tensor? topk_weights, Tensor?[] tiles,"
        ' SymInt top_k, str scheme, str activation="", bool batch_invariant=False) -> Tensor',
        "gemm_sum(Tensor a, Tensor? a_scale, Tensor w, Tensor? w_scale, Tensor? bias,"
        " Tensor? topk_weights, Tensor?[] tiles, str scheme, ScalarType? out_dtype=None,"
        " bool expert_order=False, bool batch_invariant=False, Tensor? w_global_scale=None)"
        " -> Tensor",
        "weight_only_sum(Tensor a, Tensor w, Tensor? w_scale, Tensor? w_zero_point,"
        " Tensor? w_global_scale, Tensor? bias, Tensor? topk_weights, Tensor?[] tiles, str scheme,"
        " bool batch_invariant=False) -> Tensor",
        "topk_plan(Tensor gating_output, Tensor? e_score_correction_bias, SymInt topk,"
        " bool renormalize, str scoring_func, float routed_scaling_factor, Tensor? expert_map,"
        " SymInt num_local_experts, str scheme, ScalarType dtype, bool batch_invariant=False)"
        " -> (Tensor topk_weights, Tensor topk_ids, Tensor plan)",
    ),
}
"""Schemas by the last version that had the operators."""


def retired_operator(name: str, version: str) -> Callable[..., NoReturn]:
    """The implementation of a retired operator: it raises NotImplementedError."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"moe_ops::{name} was an operator of moe_ops {version}; export the program again with "
            f"this version (it was exported by moe_ops {version})"
        )

    return call
