"""Quantized weights as vLLM's layers hold them before vLLM converts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from checkpoint_formats import AWQ_ORDER, words

from moe_ops.scheme.formats import split_nibbles
from moe_ops.tensors import QTensor

BITS = {"int4": 4, "int8": 8}


class QuantizationArgs(SimpleNamespace):
    """compressed-tensors' description of weights."""


class AutoAWQConfig(SimpleNamespace):
    """vLLM's description of AWQ's weights."""


class AutoGPTQConfig(SimpleNamespace):
    """vLLM's description of GPTQ's weights."""


class Words(NamedTuple):
    """Integer weights as words of 32 bits, their scales, and words of zero points or None."""

    weight: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None


def bits_of(scheme: str) -> int:
    """The bits of a number of a scheme of integers."""
    return BITS[scheme[:4]]


def codes_of(q: QTensor, bits: int) -> torch.Tensor:
    """The stored numbers ``(E, N, K)``."""
    return split_nibbles(q.data, 2) if bits == 4 else q.data


def zeros_of(q: QTensor, bits: int) -> torch.Tensor | None:
    """The stored zero points ``(E, N, G)``."""
    if q.zero_point is None or bits == 8:
        return q.zero_point
    return split_nibbles(q.zero_point, 1)


def rows_first(q: QTensor, bits: int) -> Words:
    """compressed-tensors' order, which vLLM also makes of GPTQ's: ``(E, N, K / (32 / bits))``."""
    zeros = zeros_of(q, bits)
    if zeros is not None:
        zeros = words(zeros.transpose(1, 2), bits).transpose(1, 2).contiguous()
    return Words(words(codes_of(q, bits), bits), q.scale, zeros)


def columns_first(q: QTensor, bits: int) -> Words:
    """GPTQ's order in checkpoints: ``(E, K / (32 / bits), N)``."""
    weight, scale, _ = rows_first(q, bits)
    return Words(*(x.transpose(1, 2).contiguous() for x in (weight, scale)), None)


def awq(q: QTensor, bits: int) -> Words:
    """AWQ's order: ``(E, K, N / 8)``, whose words hold columns in `AWQ_ORDER`."""

    def packed(codes: torch.Tensor) -> torch.Tensor:
        lanes = codes.transpose(1, 2).unflatten(2, (-1, 8))
        return words(lanes[..., list(AWQ_ORDER)].flatten(2), bits)

    zeros = zeros_of(q, bits)
    scale = q.scale.transpose(1, 2).contiguous()
    return Words(packed(codes_of(q, bits)), scale, None if zeros is None else packed(zeros))


def described(kind: type, scheme: str, **more: Any) -> Any:
    """vLLM's description of integer weights in a scheme ``int{4,8}_w.a16_g{size}[_zp]``."""
    size = int(scheme.split("_")[2][1:])
    name = "num_bits" if kind is QuantizationArgs else "weight_bits"
    return kind(**{name: bits_of(scheme)}, group_size=size, **more)
