"""A small layer on the GPU, and CUDA graphs of it."""

import torch

import moe_ops
from moe_ops.testing import Problem, make_inputs

E, K, H, I = 32, 4, 256, 128  # noqa: E741


def layer_of(dtype=torch.bfloat16, **changes):
    inputs = make_inputs(Problem(4, E, K, H, I, dtype, **changes), "cuda")

    def layer(x, logits):
        weights, ids = moe_ops.fused_topk(x, logits, K, True)
        return moe_ops.fused_experts(x, inputs.w1, inputs.w2, weights, ids)

    return layer, inputs


def batch(tokens, seed=0, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=g).to(dtype).cuda()
    return x, (torch.randn(tokens, E, generator=g) * (1 + 20 * (seed % 3 == 2))).cuda()


def capture(function, *arguments, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = function(*arguments)
    return graph, out
