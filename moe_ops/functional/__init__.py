"""The public functions of single stages: alignment, permutation, combination, quantization."""

from moe_ops.functional.align import count_expert_num_tokens, moe_align_block_size
from moe_ops.functional.combine import apply_moe_activation, moe_fused_mul_sum
from moe_ops.functional.permute import moe_permute, moe_unpermute
from moe_ops.functional.quantize import (
    batched_moe_kernel_quantize_input,
    moe_kernel_quantize_input,
)

__all__ = [
    "apply_moe_activation",
    "batched_moe_kernel_quantize_input",
    "count_expert_num_tokens",
    "moe_align_block_size",
    "moe_fused_mul_sum",
    "moe_kernel_quantize_input",
    "moe_permute",
    "moe_unpermute",
]
