"""Problems of expert GEMMs: of a call's tensors, and of a layer's."""

import torch

from moe_ops.dispatch.operands import layer_operands, operands_of
from moe_ops.dispatch.problem import problem_of
from moe_ops.tensors import ExpertWeight


def problem_of_call(operator, w, w_scale=None, *, boxes=None, **given):
    """The problem of an operator's arguments; ``boxes``: as on a GPU, which tensors are not on."""
    weight = ExpertWeight(w, scale=w_scale)
    problem = problem_of(operands_of(operator, {**given, "weight": weight}))
    return problem if boxes is None else problem._replace(boxes=boxes)


def problem_of_layer(weight, scheme, rule, num_slots, **how):
    """The problem of a layer's GEMM of bf16 rows; ``how`` as `layer_operands` takes it."""
    return problem_of(layer_operands(weight, scheme, torch.bfloat16, rule, num_slots, **how))
