"""Small layers that are loaded from a checkpoint."""

import torch
from checkpoints import Experts, per_expert

import moe_ops

E, K, H, I, T = 8, 2, 64, 32, 5  # noqa: E741
SECOND_OF_TWO = {"ep_size": 2, "ep_rank": 1}


def make(scheme=None, **options):
    return moe_ops.FusedMoE(E, K, H, I, scheme=scheme, **options)


def loaded(layer, scheme=None, seed=0):
    experts = Experts.random(E, H, I, seed=seed)
    source = per_expert(experts if scheme is None else experts.quantized(scheme))
    moe_ops.load_checkpoint(layer, source, progress=False)
    return layer


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(T, H, generator=g), torch.randn(T, E, generator=g)
