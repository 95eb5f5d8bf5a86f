"""The choice of a weight's form: packed where a kernel of its GPU reads that form."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.dispatch.device import device_facts
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper_decode import MEASURED, decodes
from moe_ops.dispatch.problem import layer_problem, sizes_of
from moe_ops.dispatch.row_tiles import tile_rule
from moe_ops.pipeline.layer_checks import known_arch
from moe_ops.scheme import Scheme, packs


def reads_packed(
    w: Tensor, scheme: Scheme, dtype: torch.dtype, *, batch_invariant: bool = False
) -> bool:
    """Whether a kernel of the GPU that holds a weight reads the weight's packed form.

    `plan_gemm` says so; kernels that read the packed form take any number of rows. As long as they
    are not `MEASURED`, none does.

    Args:
        w: data of the weight, in either form.
        scheme: the weight's scheme.
        dtype: dtype of the rows that the weight is multiplied with.
        batch_invariant: whether the GEMM is batch-invariant.
    """
    quant = scheme.weight
    if quant is None or known_arch(w.device) is None:
        return False
    experts, n, width = w.shape
    k = width * quant.numbers_per_entry(w.dtype)
    if not packs(scheme, n, k):
        return False
    rule = tile_rule(scheme.key, dtype, w.device, batch_invariant)
    sizes = sizes_of(1, (experts, n, k), dtype.itemsize, rule, "")
    served = MEASURED and decodes(quant, dtype)
    problem = layer_problem(sizes, scheme, "", None, 1)._replace(packed=True, boxes=served)
    try:
        plan_gemm(problem, device_facts(w.device))
    except NotImplementedError:
        return False
    return True
