"""The `Scheme` type, the registered schemes, and the schemes that `get_scheme` makes from keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from moe_ops import checks
from moe_ops.scheme.limits import Refusal, dequantizes_both, refusal
from moe_ops.scheme.values import ELEMENTS, SCALE_BITS, WHOLE, Group, Quant, parse_quant

Quants = tuple[Quant | None, Quant | None]
"""How activations and weights are quantized."""


def _w8a8(element: str, activation: Group, weight: Group, **more) -> Quants:
    e = ELEMENTS[element]
    return Quant(e, activation, **more), Quant(e, weight, more.get("scale", "float32"))


def _weight_only(element: str, group: Group, scale: str, **more) -> Quants:
    return None, Quant(ELEMENTS[element], group, scale, **more)


def _int4_under_fp8(cols: int) -> Quants:
    weight = Quant(ELEMENTS["int4"], Group(1, cols), "e4m3", global_scale=True)
    return Quant(ELEMENTS["fp8"], ROW), weight


TENSOR, ROW = Group(WHOLE, WHOLE), Group(1, WHOLE)
MXFP8 = Quant(ELEMENTS["fp8"], Group(1, 32), "e8m0")
MXFP4 = Quant(ELEMENTS["fp4"], Group(1, 32), "e8m0")
NVFP4 = Quant(ELEMENTS["fp4"], Group(1, 16), "e4m3", global_scale=True)
_NAMED: dict[str, Quants] = {
    "unquantized": (None, None),
    "fp8_tensor": _w8a8("fp8", TENSOR, TENSOR),
    "fp8_tensor_static": _w8a8("fp8", TENSOR, TENSOR, static=True),
    "fp8_channel": _w8a8("fp8", ROW, ROW),
    "fp8_block128": _w8a8("fp8", Group(1, 128), Group(128, 128)),
    "fp8_block128_ue8m0": _w8a8("fp8", Group(1, 128), Group(128, 128), scale="pow2"),
    "int8_tensor": _w8a8("int8", TENSOR, TENSOR),
    "int8_channel": _w8a8("int8", ROW, ROW),
    "int8_block128": _w8a8("int8", Group(1, 128), Group(128, 128)),
    "fp8_w8a16": _weight_only("fp8", ROW, "float32"),
    "fp8_w8a16_block128": _weight_only("fp8", Group(128, 128), "float32"),
    "int8_w8a16": _weight_only("int8", ROW, "vector"),
    "int8_w8a16_g128": _weight_only("uint8", Group(1, 128), "input"),
    "int4_w4a16_g32": _weight_only("int4", Group(1, 32), "input"),
    "int4_w4a16_g128": _weight_only("int4", Group(1, 128), "input"),
    "int4_w4a16_g128_zp": _weight_only("int4", Group(1, 128), "input", zero_point=True),
    "int4_w4a16_channel": _weight_only("int4", ROW, "input"),
    "nvfp4_w4a16": _weight_only("fp4", Group(1, 16), "e4m3", global_scale=True),
    "mxfp4_w4a16": _weight_only("fp4", Group(1, 32), "e8m0"),
    "mxfp6_e2m3": _weight_only("fp6_e2m3", Group(1, 32), "e8m0"),
    "mxfp6_e3m2": _weight_only("fp6_e3m2", Group(1, 32), "e8m0"),
    "mxfp8": (MXFP8, MXFP8),
    "mxfp4": (MXFP4, MXFP4),
    "mxfp4_mxfp8": (MXFP8, MXFP4),
    "mxfp4_w4a8": (Quant(ELEMENTS["fp8"], TENSOR, static=True), MXFP4),
    "mxfp4_w4a8_token": (Quant(ELEMENTS["fp8"], ROW), MXFP4),
    "nvfp4": (NVFP4, NVFP4),
    "int4_w4a8_g128": _int4_under_fp8(128),
}

_BLOCKS = re.compile(r"(fp8|int8)(_w8a16)?_block(\d+)(?:x(\d+))?(_ue8m0)?", re.ASCII)
_GROUPS = re.compile(r"(int4_w4a16|int8_w8a16)_g(\d+)(_zp)?", re.ASCII)
_GROUPS_UNDER_FP8 = re.compile(r"int4_w4a8_g(\d+)", re.ASCII)


@lru_cache(maxsize=256)
def _of_family(name: str) -> Quants | None:
    """The quants of a name that contains group sizes; None: no such name."""
    if match := _GROUPS.fullmatch(name):
        element = {"int4_w4a16": "int4", "int8_w8a16": "uint8"}[match[1]]
        group = Group(1, int(match[2]))
        return _weight_only(element, group, "input", zero_point=bool(match[3]))
    if match := _GROUPS_UNDER_FP8.fullmatch(name):
        return _int4_under_fp8(int(match[1]))
    if match := _BLOCKS.fullmatch(name):
        rows, cols = int(match[3]), int(match[4] or match[3])
        scale = "pow2" if match[5] else "float32"
        if match[2]:
            return _weight_only(match[1], Group(rows, cols), scale)
        return _w8a8(match[1], Group(1, cols), Group(rows, cols), scale=scale)
    return None


def _composite(activation: Quant | None, weight: Quant | None) -> str:
    return "|".join("" if quant is None else quant.key for quant in (activation, weight))


_SHORT = {_composite(*quants): name for name, quants in _NAMED.items()}


def _key(activation: Quant | None, weight: Quant | None) -> str:
    """The name that `get_scheme` knows for these quants; if there is none, the quants' keys."""
    text = _composite(activation, weight)
    if text in _SHORT or weight is None:
        return _SHORT.get(text, text)
    element, (rows, cols) = weight.element.name, weight.group
    if WHOLE in weight.group:
        return text
    size = f"{rows}" if rows == cols else f"{rows}x{cols}"
    names = (
        *(f"{kind}_g{cols}{zp}" for kind in ("int4_w4a16", "int8_w8a16") for zp in ("", "_zp")),
        f"int4_w4a8_g{cols}",
        *(f"{element}{a}_block{size}{s}" for a in ("", "_w8a16") for s in ("", "_ue8m0")),
    )
    families = ((name, _of_family(name)) for name in names)
    return next((name for name, quants in families if quants and _composite(*quants) == text), text)


@dataclass(frozen=True, eq=False, repr=False)
class Scheme:
    """A quantization scheme; ``None`` means the operand is not quantized.

    Two schemes are equal if they mean the same, whatever their names: operators, tuned files and
    caches know a scheme by its `key`.

    Raises:
        TypeError: an operand that is neither a `Quant` nor None.
    """

    name: str
    """The name in messages."""
    activation: Quant | None
    weight: Quant | None

    key: str = field(init=False, repr=False)
    """The string that represents this value in operator calls, from which `get_scheme` makes an
    equal one: a name that `get_scheme` knows, if there is one for these quants; otherwise
    ``<activation.key>|<weight.key>``, where an operand that is not quantized has no key."""
    dequantizes_both: bool = field(init=False, repr=False)
    """Whether the GEMM dequantizes both operands to bf16.

    Tensor cores before Blackwell's (see `dispatch.blackwell`) cannot multiply operands of different
    elements, of fewer than 8 bits, or with one-byte scales. In bf16 all of these numbers, times
    their group's scale, are exact.
    """
    refusal: Refusal | None = field(init=False, repr=False)
    """Why no operator computes the scheme; None: they do. See `as_scheme`."""

    def __post_init__(self) -> None:
        # Attributes, because traced code reads them: Dynamo cannot trace how names are parsed.
        a, w = self.activation, self.weight
        for which, quant in (("activation", a), ("weight", w)):
            if not (quant is None or isinstance(quant, Quant)):
                raise TypeError(f"{which} must be a Quant or None, got {type(quant).__name__}")
        both = a is not None and w is not None and dequantizes_both(a, w)
        derived = {"key": _key(a, w), "dequantizes_both": both}
        derived["refusal"] = refusal(a, w)
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Scheme({self.name!r}, {self.activation!r}, {self.weight!r})"

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Scheme) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def quants(self) -> tuple[Quant, Quant]:
        """How activations and weights are quantized; ValueError unless both are."""
        if self.activation is None or self.weight is None:
            raise ValueError(f"scheme must quantize activations and weights, got {self.name!r}")
        return self.activation, self.weight

    @property
    def input_scale_names(self) -> tuple[str, ...]:
        """The fields of a `FusedMoEQuantConfig` with the given scales of the inputs of both GEMMs.

        Empty if no scales are given, because activations are not quantized or by their own data.
        """
        if self.activation is None or not (self.activation.static or self.activation.global_scale):
            return ()
        return (
            ("a1_gscale", "a2_gscale") if self.activation.global_scale else ("a1_scale", "a2_scale")
        )

    @property
    def weight_parts(self) -> tuple[str, ...]:
        """`Quant.parts` of weights; of weights that are not quantized, none."""
        return () if self.weight is None else self.weight.parts

    @property
    def block_shape(self) -> list[int] | None:
        """``[rows, cols]`` of a weight's block, as in vLLM; None if scales are not per block."""
        if self.weight is None or WHOLE in self.weight.group or self.weight.group.rows == 1:
            return None
        return list(self.weight.group)

    def numbers_per_entry(self, dtype: torch.dtype) -> int:
        """Numbers per entry of a weight with this dtype; 1 if weights are not quantized."""
        return 1 if self.weight is None else self.weight.numbers_per_entry(dtype)

    def weight_bits(self, n: int, k: int) -> float:
        """Bits per weight of an ``(N, K)`` expert, with all scales but one of the whole weight."""
        if self.weight is None:
            return 16.0
        quant, scales = self.weight, 1
        for length in quant.weight_scale_shape(1, n, k):
            scales *= length
        each = SCALE_BITS[quant.scale] + quant.element.stored_bits * quant.zero_point
        of_row = SCALE_BITS["float32"] * quant.channel_scale / k
        return quant.element.stored_bits + each * scales / (n * k) + of_row


SCHEMES: dict[str, Scheme] = {name: Scheme(name, *quants) for name, quants in _NAMED.items()}
"""Every registered scheme by its name."""
UNQUANTIZED = SCHEMES["unquantized"]
_MEANT = {
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "fp32", "none"), "unquantized"),
    "fp8": "fp8_channel", "w8a8": "fp8_channel", "int8": "int8_channel",
    "int4": "int4_w4a16_g128", "w4a16": "int4_w4a16_g128", "fp4": "mxfp4_w4a16",
}  # fmt: skip
"""The usual scheme of a format that is no name of a scheme, for the hint of an error."""


@lru_cache(maxsize=256)
def get_scheme(name: str) -> Scheme:
    """The scheme of a name or key: a registered one, one with other group sizes, or any other.

    For example, ``fp8_block64x128`` has weight blocks of 64 rows x 128 columns and activation
    groups of 128, and ``int4_w4a16_g64_zp`` has groups of 64 along K. Any other scheme is named by
    its `Scheme.key`: ``|int8:1x64:float32`` has int8 weights in groups of 64 along K.

    Returns:
        The scheme; the same object on every call.

    Raises:
        TypeError: not a str.
        ValueError: an unknown name (the error suggests the nearest known name), or a group size
            that is not a power of two of at least 16 (of rows also 1).
        NotImplementedError: a key that operators cannot compute.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    checks.instance("name", name, str)
    if "|" in name:
        return as_scheme(Scheme(name, *_parsed(name)))
    quants = _of_family(name)
    if quants is None:
        hint = checks.did_you_mean(name, SCHEMES, _MEANT)
        raise ValueError(f"scheme must be one of {sorted(SCHEMES)}, got {name!r}{hint}")
    return as_scheme(Scheme(name, *quants))


def _parsed(key: str) -> Quants:
    """The inverse of `_composite`."""
    parts = key.split("|")
    if len(parts) != 2:
        raise ValueError(f"scheme must be a name or '<activation.key>|<weight.key>', got {key!r}")
    activation, weight = (parse_quant(part) if part else None for part in parts)
    return activation, weight


def scheme_of(activation: Quant | None, weight: Quant | None) -> Scheme:
    """The scheme of two operands, named by its key; raises as `get_scheme`.

    Returns:
        The scheme, whose name is its key or a registered name.

    Raises:
        ValueError, NotImplementedError: as `get_scheme`.
    """
    return get_scheme(Scheme("", activation, weight).key)


def as_scheme(scheme: str | Scheme) -> Scheme:
    """The scheme of a name or key; a `Scheme` is checked and returned.

    Returns:
        The scheme.

    Raises:
        TypeError: neither a name nor a `Scheme`.
        ValueError, NotImplementedError: an unknown name; a `Scheme` that operators cannot compute,
            with the field, the rule and the value.
    """
    if isinstance(scheme, str):
        return get_scheme(scheme)
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme must be a Scheme or its name, got {type(scheme).__name__}")
    if scheme.refusal is not None:
        error, text = scheme.refusal
        raise error(f"{text} in scheme {scheme.name!r}")
    return scheme
