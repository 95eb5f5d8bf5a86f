"""Gate functions as in transformers' experts classes, and functions that only resemble them."""

import torch
from torch import nn
from torch.nn import functional


def limited(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    gate = gate.clamp(max=self.limit)
    return functional.silu(gate) * up.clamp(-self.limit, self.limit)


def limited_below_too(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    gate = gate.clamp(-self.limit, self.limit)
    return functional.silu(gate) * up.clamp(-self.limit, self.limit)


def half_more(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return functional.silu(gate) * (up + 0.5)


def swapped(self, rows):
    up, gate = rows.chunk(2, dim=-1)
    return functional.silu(gate) * up


def interleaved(self, rows):
    return self.act_fn(rows[..., ::2]) * rows[..., 1::2]


def step(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


def above_a_thousand(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return functional.silu(gate) * up.clamp(max=1000 * self.limit) * (1 if self.limit < 5 else 2)


def of_the_config(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return functional.silu(gate * self.config.alpha) * up


def of_a_buffer(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return functional.silu(gate) * up * self.scale


def default(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def limited_in_code(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)


def limited_far_out(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate) * up.clamp(max=1e30)


def lost_far_out(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate) * up.where((up < 2.0**70) | (up > 2.0**100), 0)


def limited_below(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate) * up.clamp(min=-100.0)


def limited_product(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return (self.act_fn(gate) * up).clamp(max=1e5)


def zero_near_zero(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(functional.hardshrink(gate, 0.01)) * up


def of_gate_and_up(self, rows):
    return self.act_fn(*rows.chunk(2, dim=-1))


class Softcap(nn.Module):
    def __init__(self, softcap):
        super().__init__()
        self.softcap = softcap

    def forward(self, x):
        return torch.tanh(x / self.softcap) * self.softcap


class SoftcappedSwiGLU(nn.Module):
    """The activation of Inkling2, whose numbers are those of modules inside."""

    def __init__(self, gate, up):
        super().__init__()
        self.gate, self.up = Softcap(gate), Softcap(up)

    def forward(self, gate, up):
        return self.gate(gate) * torch.sigmoid(gate) * self.up(up)


class SoftcappedInside(SoftcappedSwiGLU):
    """The sigmoid of the bounded gate."""

    def forward(self, gate, up):
        return functional.silu(self.gate(gate)) * self.up(up)


class WithAParameter(SoftcappedSwiGLU):
    def __init__(self, gate, up):
        super().__init__(gate, up)
        self.up.scale = nn.Parameter(torch.ones(()))
