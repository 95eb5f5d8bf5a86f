"""What a tensor's name in a checkpoint says: the projection, the expert, and the kind of tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

SHARDS = ("w1", "w2", "w3")
"""Gate, down and up projection, by their names in Mixtral's checkpoints."""

PROJECTIONS = {
    "w1": "w1", "gate_proj": "w1", "linear": "w1", "linear_gate": "w1",
    "w3": "w3", "up_proj": "w3", "linear_v": "w3",
    "w2": "w2", "down_proj": "w2", "linear_1": "w2", "output_linear": "w2",
    "w13": "w13", "gate_up_proj": "w13", "input_linear": "w13",
    "w13_weight": "w13", "w2_weight": "w2",
}  # fmt: skip
"""Names of projections; ``w13`` is gate and up in one tensor."""

KINDS = {
    "weight": "weight", "weight_packed": "weight", "qweight": "weight", "blocks": "weight",
    "weight_scale": "scale", "weight_scale_inv": "scale", "scale": "scale", "scales": "scale",
    "scale_inv": "scale", "qscale_weight": "scale",
    "weight_scale_2": "global_scale", "weight_global_scale": "global_scale",
    "weight_chan_scale": "channel_scale", "weight_zero_point": "zero_point", "qzeros": "zero_point",
    "input_scale": "input_scale", "activation_scale": "input_scale",
    "qscale_act": "input_scale", "input_global_scale": "input_scale",
    "bias": "bias", "weight_g_idx": "g_idx", "g_idx": "g_idx", "weight_shape": "shape",
    "input_order": "input_order",
}  # fmt: skip
# Tensors of all experts may leave out a word: ``gate_up_proj_packed``, ``down_proj_scale_2``.
KINDS |= {k.removeprefix("weight_"): kind for k, kind in KINDS.items() if k.startswith("weight_")}
"""Kinds by the last part of a name. Scales multiply, except those in `DIVISORS`."""

SUFFIX = {
    "weight": "weight",
    "scale": "weight_scale",
    "zero_point": "weight_zero_point",
    "global_scale": "weight_scale_2",
    "channel_scale": "weight_chan_scale",
    "exponents": "weight_exponents",
    "input_scale": "input_scale",
    "bias": "bias",
}
"""For each kind of tensor, how the names of a layer's parameters end."""

DIVISORS = ("weight_global_scale", "global_scale", "input_global_scale")
"""Scales that checkpoints divide by."""


class Piece(NamedTuple):
    """What one tensor of a checkpoint is."""

    shard: str
    """``w1``, ``w2``, ``w3``, or ``w13`` for gate and up together."""
    kind: str
    suffix: str
    expert: int | None = None
    """None: all experts, along the first axis."""
    is_shared: bool = False
    """Whether the tensor is of the shared experts, which are side by side along I."""
    is_saved: bool = False
    """Whether the tensor is a parameter of a saved layer, whose blocks may be refined."""


class RouterTensor(NamedTuple):
    """What one tensor of a router is."""

    buffer: str
    """The layer's buffer or parameter that takes it."""
    is_gate_bias: bool = False
    """Whether the name is `GATE_BIAS`, which other models have for a bias of the logits."""


@dataclass(frozen=True)
class CheckpointLayout:
    """What the shapes of a checkpoint do not say. ``None``: found out from shapes.

    Args:
        transposed: tensors of all experts are ``(E, H, 2I)`` and ``(E, I, H)`` instead of
            ``(E, 2I, H)`` and ``(E, H, I)``. None: found out unless both tensors are square; those
            by the names of a layer's parameters (``w13_weight``) are not.
        interleaved: gate and up rows alternate in tensors of both. None: as the layer's activation
            takes them.
        awq: 4-bit ``qweight`` is packed as AWQ does. None: by its shape.
        zeros_plus_one: GPTQ's ``qzeros`` are the zero points less one (version 1 of the format).
            None: unless the files say otherwise.
    """

    transposed: bool | None = None
    interleaved: bool | None = None
    awq: bool | None = None
    zeros_plus_one: bool | None = None


LAYOUTS = {
    "auto": CheckpointLayout(),
    "fused": CheckpointLayout(transposed=False, interleaved=False),
    "llama4": CheckpointLayout(transposed=True, interleaved=False),
    "gpt_oss": CheckpointLayout(transposed=True, interleaved=True),
    "awq": CheckpointLayout(awq=True),
    "gptq": CheckpointLayout(awq=False, zeros_plus_one=True),
    "gptq_v2": CheckpointLayout(awq=False, zeros_plus_one=False),
}
"""The layouts by name."""

# Compiled when a checkpoint is loaded, not when the library is imported.
_PROJECTION = "|".join(sorted(PROJECTIONS, key=len, reverse=True))
_SUFFIX = "|".join(sorted(KINDS, key=len, reverse=True))
_EXPERT = r"(0|[1-9][0-9]{0,8})"  # ASCII digits, and one way to write a number
_ONE = rf"(?:experts\.)?{_EXPERT}\.({_PROJECTION})\.({_SUFFIX})"
_ALL = rf"(?:experts\.)?({_PROJECTION})(?:[._]({_SUFFIX}))?"
_SHARED = rf"(?:shared?_experts?|shared_mlp)\.({_PROJECTION})\.({_SUFFIX})"
_WHERE = r"(?:experts\.|(?:gate\.|router\.)?(?:moe_statics\.)?)"
_OTHERS = r"(gate|router|wg|shared?_experts?|shared_mlp|shared_experts?_gate|fc[12]_latent_proj)\."

GATE_BIAS = "gate.bias"
"""The correction bias in DeepSeek's own files, or a bias of the gate's logits (gpt-oss)."""
# Names whose meaning is certain. A bias of logits belongs to a linear module: ``router.bias``,
# ``router.classifier.bias``. So ``router_bias`` (Step-3.5) beside the gate's weight is none.
_SURE_BIAS = rf"{_WHERE}(?:e_score_correction_bias|expert_bias|balancing_biases)|router_bias"
_TABLE = rf"{_WHERE}(?:tid2eid|hash_indices_table)"
_SURE = rf"(?:{_SURE_BIAS}|{_TABLE})"
SHARED_GATE = "shared_expert_gate_weight"
"""The parameter of a layer whose shared experts have a gate."""
_GATE = r"shared_expert_gate[._]weight"
_ROUTER = {
    "e_score_correction_bias": rf"{_SURE_BIAS}|{re.escape(GATE_BIAS)}",
    "hash_indices_table": _TABLE,
    SHARED_GATE: _GATE,
}
"""Names of the router's tensors, by the layer's buffer or parameter that takes them."""
ROUTER_TENSORS = tuple(_ROUTER)
"""Buffers of a layer that choose experts, and the gate of its shared experts."""
SHARED_EXPERTS = ("shared_experts.up_proj.weight", "shared_mlp.down_proj.weight")
"""Examples of names of shared experts that `parse` knows."""


def check_mapping(mapping: Any) -> None:
    """Raise TypeError for an ``expert_mapping`` that is neither None nor a list of four values."""
    is_list = mapping is None or isinstance(mapping, (list, tuple))
    for row in (mapping or ()) if is_list else [mapping]:
        kinds = [type(value) for value in row] if isinstance(row, (list, tuple)) else None
        if kinds != [str, str, int, str]:
            raise TypeError(
                "expert_mapping must be a list of (param_name, weight_name, expert_id, shard_id), "
                f"as make_expert_params_mapping returns it, got {row!r}"
            )


def parse(name: str) -> Piece | None:
    """Parse a tensor's name after the prefix; None: it does not belong to the experts.

    ``experts.3.gate_proj.weight_scale_inv``, ``3.w1.weight``, ``experts.gate_up_proj``,
    ``experts.down_proj_bias``, ``w13_weight``, ``shared_experts.up_proj.weight``.
    """
    if match := re.fullmatch(_ONE, name):
        return Piece(PROJECTIONS[match[2]], KINDS[match[3]], match[3], int(match[1]))
    if match := re.fullmatch(_SHARED, name):
        return Piece(PROJECTIONS[match[1]], KINDS[match[2]], match[2], is_shared=True)
    if match := re.fullmatch(_ALL, name):
        suffix = match[2] or "weight"
        return Piece(PROJECTIONS[match[1]], KINDS[suffix], suffix)
    return None


def router_tensor(name: str) -> RouterTensor | None:
    """Parse the name of a tensor that chooses experts or weights shared ones; None: any other.

    ``gate.e_score_correction_bias``, ``moe_statics.e_score_correction_bias``, ``router_bias``,
    ``gate.bias``, ``gate.tid2eid``, ``shared_expert_gate.weight``.
    """
    for buffer, pattern in _ROUTER.items():
        if re.fullmatch(pattern, name):
            return RouterTensor(buffer, name == GATE_BIAS)
    return None


def is_beside_experts(name: str) -> bool:
    """Whether the tensor belongs to another part of the same block, which the caller loads."""
    return router_tensor(name) is not None or re.match(_OTHERS, name) is not None


def is_of_shared_experts(name: str) -> bool:
    """Whether a name after the block's prefix looks like that of shared experts or their gate.

    `parse` knows some of these names: ``residual_mlp.w1.weight`` and
    ``shared_mlp.gate_and_up_proj.weight`` it does not.
    """
    return re.match("share|residual_mlp", name) is not None


def is_of_experts(name: str) -> bool:
    """Whether the tensor must be one of the experts', even if its name cannot be parsed."""
    return re.match(rf"experts\.|{_EXPERT}\.({_PROJECTION})\.|(w13|w2)_", name) is not None


def scaled_experts(name: str) -> str | None:
    """Return the experts module that a tensor of scales of one expert belongs to; else None.

    ``model.layers.3.mlp.experts.0.gate_proj.weight_scale`` is of ``model.layers.3.mlp.experts``.
    """
    match = re.fullmatch(rf"(.+)\.{_EXPERT}\.(?:{_PROJECTION})\.({_SUFFIX})", name)
    return match[1] if match and KINDS[match[3]] == "scale" else None


def split_at_experts(name: str, *, has_shared: bool) -> tuple[str, str] | None:
    """Split a name before its experts or its router's tensor; None: it has neither.

    ``model.layers.3.mlp.experts.0.w1.weight`` is ``model.layers.3.mlp.`` and the rest. With
    ``has_shared`` names are split before shared experts and their gate too.
    """
    shared = rf"|{_SHARED}|{_GATE}" if has_shared else ""
    rest = rf"experts\..+|(?:w13|w2)_(?:{_SUFFIX})|{_SURE}{shared}"
    match = re.fullmatch(rf"(|.*?\.)({rest})", name)
    return (match[1], match[2]) if match else None


def parent_of(prefix: str) -> str | None:
    """Return the prefix of the block, for a prefix of its experts; else None.

    ``model.layers.3.mlp.experts.`` is below ``model.layers.3.mlp.``, where the router is.
    """
    parent = prefix.removesuffix("experts.")
    return parent if parent != prefix and parent[-1:] in ("", ".") else None


def suffix_of(weight_name: str) -> str:
    """Return the last part of a name if it is in `KINDS`, else ``""``."""
    match = re.search(rf"(?:^|[._])({_SUFFIX})$", weight_name)
    return match[1] if match else ""


def prefixes_of(names: list[str]) -> list[str]:
    """Return the prefixes of experts in ``names``, which a caller may have meant."""
    matches = (re.match(r"(|.*?\.)experts\.", name) for name in names)
    return list(dict.fromkeys(match[1] for match in matches if match))[:5]
