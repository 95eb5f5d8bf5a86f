"""Quantized checkpoints as their formats store them, loaded by every rank."""

import torch
from checkpoints import RANKS, expected, held, numbers

import moe_ops
from moe_ops.scheme.formats import split_nibbles

E, K, H, I = 8, 2, 256, 512  # noqa: E741
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes, bits=4):
    """Numbers along the last axis into int32, the lowest bits first."""
    lanes = codes.long().unflatten(-1, (-1, 32 // bits))
    packed = sum(lanes[..., i] << (bits * i) for i in range(32 // bits))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def load_ranks(scheme, source, layout="auto", **options):
    layers = []
    for rank in RANKS:
        layer = moe_ops.FusedMoE(E, K, H, I, scheme=scheme, **rank, **options)
        assert moe_ops.load_checkpoint(layer, source, progress=False, layout=layout).is_complete
        layers.append(layer)
    return layers


def check_ranks(scheme, experts, source, **options):
    for layer in load_ranks(scheme, source, **options):
        wanted = expected(experts, scheme, layer, held(layer))
        assert all(map(torch.equal, numbers(layer), wanted))


def rewritten(experts, rules, base=None):
    """A checkpoint in which every projection is written by ``rules(q, e)``: suffix -> tensor."""
    out = {}
    for field, q in experts._asdict().items():
        name = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}[field]
        for e in range(E):
            for suffix, x in rules(q, e).items():
                out[f"experts.{e}.{name}.{suffix}"] = x
    return out


def codes_of(q, e, bits):
    return split_nibbles(q.data, 2)[e] if bits == 4 else q.data[e]
