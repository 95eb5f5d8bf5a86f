"""The choice of a weight's form: packed, or held as fp8, where that suits kernels of its GPU.

One rule says which weights are packed, `serves_packed`: that of layers, of engines' plug-ins, of
transformers' experts, of ``explain`` and of the benchmarks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.dispatch.blackwell import is_block_scaled
from moe_ops.dispatch.device import Device, device_facts
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper_decode import dequantizes
from moe_ops.dispatch.operands import layer_operands
from moe_ops.dispatch.problem import problem_of
from moe_ops.dispatch.row_tiles import row_tile_rule
from moe_ops.pipeline.layer_checks import known_arch
from moe_ops.scheme import Scheme, exact_fp8_scheme, is_packed, min_capability, pack_weight, packs
from moe_ops.scheme.packed import pack_weight_
from moe_ops.tensors import QTensor


def form_of_gpu(
    q: QTensor,
    scheme: Scheme,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
    activation: str = "",
    in_place: bool = True,
) -> QTensor:
    """Return a weight in the form that kernels of its GPU read: packed, or as it is.

    Args:
        q: the weight, in either form.
        scheme: its scheme.
        dtype: dtype of the rows that it is multiplied with.
        batch_invariant: whether the GEMM is batch-invariant.
        activation: key of the activation that the GEMM applies to its product; empty: none.
        in_place: whether ``q`` is packed in its own memory, and lost, so that loading a model needs
            memory for three experts beside its weights.
    """
    converts = not is_packed(q.data) and reads_packed(
        q.data, scheme, dtype, batch_invariant=batch_invariant, activation=activation
    )
    return (pack_weight_ if in_place else pack_weight)(q, scheme) if converts else q


def reads_packed(
    w: Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device | None = None,
    *,
    batch_invariant: bool = False,
    activation: str = "",
) -> bool:
    """Whether a kernel of the GPU that multiplies a weight reads the weight's packed form.

    Args:
        w: data of the weight, in either form.
        scheme: the weight's scheme.
        dtype: dtype of the rows that the weight is multiplied with.
        device: where it is multiplied; None: where it is.
        batch_invariant: whether the GEMM is batch-invariant.
        activation: key of the activation that the GEMM applies to its product; empty: none.
    """
    device = device or w.device
    if scheme.weight is None or known_arch(device) is None:
        return False
    experts, n, width = w.shape
    shape = (experts, n, width * scheme.numbers_per_entry(w.dtype))
    facts = device_facts(device)
    return serves_packed(shape, scheme, dtype, facts, batch_invariant, activation)


def serves_packed(
    shape: tuple[int, int, int],
    scheme: Scheme,
    dtype: torch.dtype,
    device: Device,
    batch_invariant: bool,
    activation: str = "",
) -> bool:
    """Whether a kernel of a GPU reads the packed form of a weight ``(E, N, K)``.

    `plan_gemm` says so; kernels that read the packed form take any number of rows.
    """
    if not packs(scheme, *shape[1:]) or not dequantizes(scheme, dtype):
        return False
    rule = row_tile_rule(scheme.key, dtype.itemsize, device.arch, device.row_tile, batch_invariant)
    operands = layer_operands(shape, scheme, dtype, rule, 1, activation=activation, fragments=True)
    try:
        plan_gemm(problem_of(operands), device)
    except NotImplementedError:
        return False
    return True


def gains_by_fp8(device: torch.device, scheme: Scheme) -> bool:
    """Whether a GPU of this machine multiplies MXFP4 faster as fp8, if that is exact."""
    arch = known_arch(device)
    return arch is not None and multiplies_fp8(scheme, arch)


def multiplies_fp8(scheme: Scheme, arch: int) -> bool:
    """Whether a GPU has instructions for fp8 instead of the scheme, see `exact_fp8_scheme`.

    Blackwell's block-scaled instructions multiply the plain form.
    """
    if exact_fp8_scheme(scheme) is None or is_block_scaled(scheme.key, arch):
        return False
    return arch >= min_capability(scheme.activation)
