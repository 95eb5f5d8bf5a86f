"""Hypothesis strategies: sizes, routings and settings of the layer."""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from hypothesis import strategies as st
from legs import INTERPRETED

from moe_ops.activation import MoEActivation
from moe_ops.scheme import SCHEMES, WHOLE, Group, Quant, Scheme, refusal
from moe_ops.scheme.values import ELEMENTS, SCALE_BITS
from moe_ops.testing import ROUTINGS, Problem

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = tuple(
    {"swigluoai_uninterleave": "swigluoai_uninterleave(clamp_limit=7.0,alpha=1.702,beta=1.0)",
     "situ": "situ(beta=1.5,linear_beta=2.0)"}.get(a.value, a.value)
    for a in MoEActivation
)  # fmt: skip
"""Every activation, with its required settings."""

LARGE = 24 if INTERPRETED else 200


@st.composite
def problems(draw) -> Problem:
    """Problems of the Standard format, small enough for the interpreter if that runs the tests."""
    num_experts = draw(st.sampled_from((1, 2, 3, 8, 17, 60)))
    local = draw(st.none() | st.integers(1, num_experts))
    return Problem(
        num_tokens=draw(st.integers(0, LARGE) | st.sampled_from((0, 1, 2, 16, 17))),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(num_experts, 10))),
        hidden_size=draw(st.sampled_from((16, 24, 40, 72, 130))),
        intermediate_size=draw(st.sampled_from((8, 16, 44, 70))),
        dtype=draw(st.sampled_from(DTYPES)),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        has_bias=draw(st.booleans()),
        on_input=draw(st.booleans()),
        num_local_experts=local,
        routing=draw(st.sampled_from(ROUTINGS)),
    )


@st.composite
def layers(draw, schemes=tuple(SCHEMES)) -> Problem:
    """Small problems in any scheme, for any format; any scale group may be partial."""
    num_experts = draw(st.sampled_from((1, 2, 5, 8)))
    return Problem(
        num_tokens=draw(st.integers(0, 6 if INTERPRETED else 40)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(num_experts, 3))),
        hidden_size=draw(st.sampled_from((32, 48) if INTERPRETED else (32, 72, 160))),
        intermediate_size=draw(st.sampled_from((16, 24) if INTERPRETED else (16, 40, 136))),
        dtype=draw(st.sampled_from(DTYPES)),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        has_bias=draw(st.booleans()),
        on_input=draw(st.booleans()),
        num_local_experts=draw(st.none() | st.integers(1, num_experts)),
        routing=draw(st.sampled_from(ROUTINGS)),
        scheme=draw(st.sampled_from(schemes)),
    )


@cache
def quants() -> tuple[Quant, ...]:
    """Every element, form of the scale and switch, with some groups."""
    groups = ((WHOLE, WHOLE), (1, WHOLE), (1, 16), (1, 64), (32, 32), (64, 16))
    switches = ({}, {"static": True}, {"zero_point": True}, {"global_scale": True})
    every = product(ELEMENTS.values(), groups, SCALE_BITS, switches)
    return tuple(Quant(e, Group(*group), scale, **more) for e, group, scale, more in every)


@cache
def weights_under(activation: Quant | None) -> tuple[Quant, ...]:
    """Weights that operators compute with such activations: some of those of plain rows."""
    weights = quants() if activation is None else weights_under(None)
    return tuple(w for w in weights if refusal(activation, w) is None)


@st.composite
def schemes(draw) -> Scheme:
    """Schemes that operators compute, registered or not, under any name."""
    rows = st.sampled_from(quants()).filter(weights_under)
    activation = draw(st.none() | rows)
    weight = draw(st.sampled_from(weights_under(activation)))
    return Scheme(draw(st.sampled_from(("mine", *SCHEMES))), activation, weight)


@st.composite
def topk_ids(draw, max_tokens: int = 60) -> tuple[torch.Tensor, int]:
    """Ids ``(T, k)`` with repeated, negative and too large ids, and the number of experts."""
    num_experts = draw(st.sampled_from((1, 2, 5, 8, 33, 64, 257)))
    tokens = draw(st.integers(0, max_tokens))
    k = draw(st.integers(1, 6))
    low, high = draw(st.sampled_from(((0, num_experts), (-2, num_experts + 3))))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    return torch.randint(low, high, (tokens, k), generator=generator, dtype=dtype), num_experts


@st.composite
def placements(draw) -> tuple[torch.Tensor, int, int, int]:
    """Ids, the first local expert, the number of local experts, and the rows per expert."""
    ids, num_experts = draw(topk_ids(max_tokens=12))
    first = draw(st.integers(0, num_experts - 1))
    here = draw(st.integers(1, min(num_experts - first, 40)))
    return ids, first, here, draw(st.sampled_from((1, 2, 5, 40)))
