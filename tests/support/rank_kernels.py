"""Problems and kernels of ranks that exchange tokens."""

from importlib import import_module

import pytest
import torch
from legs import INTERPRETED
from modular import layer_config
from ranks import config_of, device, experts_of

import moe_ops
from moe_ops.testing import Problem

SCHEMES = (
    "unquantized", "fp8_tensor", "fp8_tensor_static", "fp8_channel", "fp8_block128",
    "int8_channel", "int8_tensor", "int4_w4a16_g32", "mxfp4_w4a16", "mxfp4_mxfp8", "nvfp4",
)  # fmt: skip
COUNTS = {2: (7, 4), 4: (5, 0, 1, 5)}
PROBLEM = Problem(11, 6, 3, 64, 48, torch.bfloat16)
ANSWERS = 2.0 if INTERPRETED else 10.0
"""Seconds within which a rank answers in a window, however busy the cores are. A poll of an
interpreted kernel counts less than it takes."""


def one_program():
    """Make interpreted sends of one program: one that waits for the next would do so forever."""
    for stage in ("symmetric", "symmetric_batched"):
        import_module(f"moe_ops.kernels.{stage}").programs_of = lambda rows: 1


def kernel_of(s, rank, ranks, part, kind=moe_ops.pipeline.TritonExperts, **options):
    """A rank's kernel around a prepare-finalize, and the arguments that are not tokens."""
    held, expert_map = experts_of(rank, ranks, s.problem.num_experts)
    there = s.inputs[0].device
    experts = kind(layer_config(s.problem, there), config_of(s.config, held))
    kernel = moe_ops.FusedMoEKernel(part, experts, **options)
    expert_map = expert_map.to(there)
    weights = {"w1": s.inputs.w1[held], "w2": s.inputs.w2[held], "expert_map": expert_map}
    return kernel, s.arguments(**weights)


def part_of(arguments, tokens):
    """The arguments for some tokens."""
    names = ("hidden_states", "topk_weights", "topk_ids")
    return {**arguments, **{name: arguments[name][tokens] for name in names}}


def check_notices(call, message):
    """The call that waits in vain raises on a CPU; on a GPU, which it does not wait for: NaN."""
    if device().type == "cuda":
        out = call()
        synchronize()
        assert out.isnan().all()
    else:
        with pytest.raises(RuntimeError, match=message):
            call()


def synchronize():
    if device().type == "cuda":
        torch.cuda.synchronize()
