"""``FP8Experts`` modules with random weights, and a stand-in for transformers' kernel of them.

transformers runs fp8 experts with a kernel from its hub, on GPUs only. The stand-in computes what
that kernel does, in PyTorch: rows quantized with ``amax / 448`` (of a group of columns, or of a
whole row), sums in float32 of exact products times scales, rounded to the dtype of the rows.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

FP8 = torch.float8_e4m3fn
TAKES_DTYPE = "expert_dtype" in inspect.signature(FP8Experts.__init__).parameters
"""Whether the dtype is an argument; transformers 5.17 asks the configuration."""


def matmul(a, b, b_scale, block_size, output_dtype, activation_scale=None):
    """One expert's product, as ``kernels-community/finegrained-fp8`` dispatches it."""
    rows, cols = (b.shape[0] // b_scale.shape[0], a.shape[1]) if block_size is None else block_size
    scale = b_scale.float().repeat_interleave(rows, 0)[: len(b)]
    out = torch.zeros(len(a), len(b), device=a.device)
    for group, start in enumerate(range(0, a.shape[1], cols)):
        x, w = a[:, start : start + cols].float(), b[:, start : start + cols].float()
        given = activation_scale is not None
        s = activation_scale if given else x.abs().amax(1, keepdim=True) / 448.0
        q = (x / s.clamp(min=1e-12)).clamp(-448, 448).to(FP8).float()
        out += (q @ w.t()) * s * scale[:, group]
    return out.to(output_dtype)


def install(monkeypatch):
    """Let transformers find the stand-in where it would load its kernel."""
    kernel = finegrained_fp8.FineGrainedFP8(matmul, None, None)
    monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", kernel)


class Config:
    """What `FP8Experts` reads of a model's configuration."""

    _experts_implementation = "moe_ops"
    hidden_act = "silu"

    def __init__(self, hidden_size=160, moe_intermediate_size=128, num_experts=4, **more):
        self.hidden_size, self.moe_intermediate_size = hidden_size, moe_intermediate_size
        self.num_experts = num_experts
        self.__dict__.update(more)


def decorated(**arguments):
    """The class that transformers puts into a model: its own wrapping, on a class of its own."""
    plain = type("FP8Experts", (FP8Experts,), {})
    return use_experts_implementation(
        plain, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, **arguments
    )


@torch.no_grad()
def experts(config=None, *, has_gate=True, cls=None, expert_dtype="fp8", **arguments):
    """A module with random weights and scales, some of them large enough to reach limits."""
    make, config = cls or decorated(has_gate=has_gate), config or Config()
    if TAKES_DTYPE:
        arguments["expert_dtype"] = expert_dtype
    else:
        config.expert_dtype = expert_dtype
    module = make(config, has_gate=has_gate, **arguments)
    g = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if name.endswith("_activation_scale"):
            parameter.copy_(torch.rand(parameter.shape, generator=g) * 0.02 + 0.01)
        elif name.endswith("_scale_inv"):
            parameter.copy_(2.0 ** torch.randint(-9, -6, parameter.shape, generator=g))
            if parameter.dtype == torch.float32:
                parameter.mul_(torch.rand(parameter.shape, generator=g) + 0.5)
        elif parameter.dtype == torch.int8:
            parameter.copy_(torch.randint(-128, 128, parameter.shape, generator=g))
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 16)
    return module


def weight(module, name):
    """What a weight and its scales stand for, in float64."""
    stored, scale = getattr(module, name), getattr(module, f"{name}_scale_inv").double()
    if stored.dtype == torch.int8:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        grid = torch.cat((grid, -grid))
        codes = stored.view(torch.uint8).long()
        stored = torch.stack((grid[codes & 15], grid[codes >> 4]), 3).flatten(2)
        rows, cols = 1, 32
    else:
        per_expert = stored.shape[1] // scale.shape[1], stored.shape[2]
        rows, cols = module.block_size or per_expert
    scale = scale.repeat_interleave(rows, 1).repeat_interleave(cols, 2)
    return stored.double() * scale[:, : stored.shape[1], : stored.shape[2]]


@torch.no_grad()
def oracle(module, x, ids, weights):
    """The layer in float64 on dequantized weights, on the CPU; activations are not quantized."""
    module, x, ids, weights = copy.deepcopy(module).cpu(), x.cpu(), ids.cpu(), weights.cpu()
    w1, w2 = (
        weight(module, n) for n in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    )
    out = torch.zeros(x.shape, dtype=torch.float64)
    gate = module._apply_gate if module.has_gate else module.act_fn
    for e in range(module.num_experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        h = gate(x[token].double() @ w1[e].t())
        out.index_add_(0, token, (h @ w2[e].t()) * weights[token, slot, None].double())
    return out


def routed(tokens, config=None, k=2, dtype=torch.bfloat16, sentinels=True):
    """Tokens, ids with a sentinel of expert parallelism here and there, and weights."""
    config = config or Config()
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, config.hidden_size, generator=g).to(dtype)
    ids = torch.rand(tokens, config.num_experts, generator=g).topk(k).indices
    weights = torch.rand(tokens, k, generator=g) + 0.1
    if sentinels and tokens:
        ids[::3, 0] = config.num_experts
        weights[::3, 0] = 0
    return x, ids, weights.to(dtype)


def unrecognised(self, gate_up):
    """A gate that is no activation of the library."""
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.mish(gate) * (up + 0.5)


@torch.no_grad()
def outputs(module, *arguments):
    """Through "moe_ops" and through the model's own path."""
    ours = module(*arguments)
    own = copy.copy(module.config)
    own._experts_implementation = "eager"
    config, module.config = module.config, own
    theirs = module(*arguments)
    module.config = config
    return ours, theirs
