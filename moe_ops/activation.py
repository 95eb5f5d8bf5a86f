"""The activations of a Mixture-of-Experts layer, as named values.

``g`` is the gate half of a row, ``u`` the up half, ``d`` the width of the output. Kernels and
references never see the names: they get a :class:`Formula`, the resolved function and its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple

from moe_ops import checks


class MoEActivation(Enum):
    """Activation names, as in vLLM's ``MoEActivation``; ``*_no_mul`` have no gate."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SITU = "situ"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @classmethod
    def from_str(cls, name: str) -> MoEActivation:
        """The activation called ``name``, aliases included; ValueError for an unknown one."""
        checks.instance("activation", name, str)
        member = _BY_NAME.get(name)
        if member is None:
            hint = checks.did_you_mean(name, _BY_NAME, _MEANT)
            raise ValueError(f"activation must be one of {sorted(_BY_NAME)}, got {name!r}{hint}")
        return member

    @property
    def is_gated(self) -> bool:
        """Whether the input holds gate and up: ``(.., 2d)`` rather than ``(.., d)``."""
        return not self.value.endswith("_no_mul")

    @property
    def is_interleaved(self) -> bool:
        """Whether gate and up alternate (even and odd columns) instead of being two halves."""
        return self is MoEActivation.SWIGLUOAI

    def without_mul(self) -> MoEActivation:
        """This function without a gate; ValueError if there is no such activation."""
        name = self.value if not self.is_gated else f"{self.value}_no_mul"
        return MoEActivation.from_str(name)


_ALIASES = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}
_MEANT = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "squared_relu": "relu2"}
"""Names elsewhere of activations with a gate, for the hint of an error."""
_BY_NAME = {a.value: a for a in MoEActivation}
_BY_NAME.update({alias: _BY_NAME[name] for alias, name in _ALIASES.items()})


class Formula(NamedTuple):
    """The function that a kernel computes, and its numbers (``None``: not applied).

    `expression` writes it out. Ungated functions have no ``u``.
    """

    function: str
    gated: bool
    interleaved: bool
    limit: float | None
    alpha: float
    beta: float
    linear_beta: float | None

    def expression(self, named: Collection[str] = ()) -> str:
        """Write the function of ``g`` and ``u`` in Python's notation.

        Args:
            named: settings of the activation that appear as names instead of numbers.

        Returns:
            For example ``min(g, 7) * sigmoid(1.702 * min(g, 7)) * (clamp(u, -7, 7) + 1)``.
        """
        numbers = (self.limit, self.alpha, self.beta, self.linear_beta)
        limit, alpha, beta, linear_beta = (
            name if name in named else None if number is None else f"{number:g}"
            for name, number in zip(_SETTINGS, numbers, strict=True)
        )
        u = "u" if limit is None else f"clamp(u, -{limit}, {limit})"
        if self.function == "swiglu":
            g = "g" if limit is None else f"min(g, {limit})"
            gate = f"{g} * sigmoid({g if alpha == '1' else f'{alpha} * {g}'})"
            u = u if beta == "0" else f"({u} + {beta})"
        elif self.function == "swiglustep":
            gate = "g * sigmoid(g)" if limit is None else f"min(g * sigmoid(g), {limit})"
        elif self.function == "situ":
            gate = f"{beta} * tanh(g / {beta}) * sigmoid(g)"
            u = u if linear_beta is None else f"{linear_beta} * tanh(u / {linear_beta})"
        else:
            gate = _GATES[self.function]
        return f"{gate} * {u}" if self.gated else gate


_GATES = {
    "gelu": "0.5 * g * (1 + erf(g / sqrt(2)))",
    "gelu_tanh": "0.5 * g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3)))",
    "relu2": "max(g, 0) ** 2",
}
"""Functions of the gate alone that take no settings."""


class _Rule(NamedTuple):
    """The function of a name, the settings it takes (with defaults), and required settings."""

    function: str
    defaults: dict[str, float | None]
    required: tuple[str, ...] = ()


_SWIGLU: dict[str, float | None] = {"clamp_limit": None, "alpha": 1.0, "beta": 0.0}
_RULES = {
    MoEActivation.SILU: _Rule("swiglu", _SWIGLU),
    MoEActivation.SWIGLUOAI: _Rule("swiglu", {"clamp_limit": 7.0, "alpha": 1.702, "beta": 1.0}),
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: _Rule("swiglu", _SWIGLU, ("clamp_limit",)),
    MoEActivation.SWIGLUSTEP: _Rule("swiglustep", {"clamp_limit": 7.0}),
    MoEActivation.SITU: _Rule("situ", {"beta": None, "linear_beta": None}, ("beta",)),
    MoEActivation.GELU: _Rule("gelu", {}),
    MoEActivation.GELU_TANH: _Rule("gelu_tanh", {}),
    MoEActivation.RELU2: _Rule("relu2", {}),
    MoEActivation.SILU_NO_MUL: _Rule("swiglu", {}),
    MoEActivation.GELU_NO_MUL: _Rule("gelu", {}),
    MoEActivation.GELU_TANH_NO_MUL: _Rule("gelu_tanh", {}),
    MoEActivation.RELU2_NO_MUL: _Rule("relu2", {}),
}
_SETTINGS = ("clamp_limit", "alpha", "beta", "linear_beta")


def settings_of(kind: MoEActivation) -> dict[str, str]:
    """The settings that an activation takes, each with its default, ``none`` or ``required``."""
    rule = _RULES[kind]
    defaults = {name: "none" if n is None else f"{n:g}" for name, n in rule.defaults.items()}
    return {**defaults, **dict.fromkeys(rule.required, "required")}


def row_steps(rule: Formula | None, n: int) -> tuple[int, int]:
    """Distances in weight rows: from one output column to the next, and from gate row to up row.

    Args:
        rule: the activation after the product; None: none.
        n: output columns.

    Returns:
        ``(step, up)``; ``up`` is 0 without a gate.
    """
    if rule is None or not rule.gated:
        return 1, 0
    return (2, 1) if rule.interleaved else (1, n)


@dataclass(frozen=True)
class Activation:
    """An activation with its settings; ``None`` means the default of its kind.

    Args:
        kind: a :class:`MoEActivation` or its name.
        clamp_limit: bound L of the swiglu family (silu: none; swigluoai and swiglustep: 7).
        alpha: factor inside the sigmoid (silu: 1, swigluoai: 1.702).
        beta: added to ``u`` (silu: 0, swigluoai: 1); for situ the scale of the gate's tanh.
        linear_beta: situ only, the scale of the tanh of ``u``.

    Raises:
        ValueError: unknown kind, a setting that the kind does not take, a missing required one, or
            a ``clamp_limit`` or situ scale that is not positive.
    """

    kind: MoEActivation
    clamp_limit: float | None = None
    alpha: float | None = None
    beta: float | None = None
    linear_beta: float | None = None
    key: str = field(init=False, repr=False, compare=False)
    """The string that represents this value in operator calls. Computed once here, because Dynamo
    would turn floats that it reads from an object into graph inputs."""

    def __post_init__(self) -> None:
        if isinstance(self.kind, str):
            object.__setattr__(self, "kind", MoEActivation.from_str(self.kind))
        if not isinstance(self.kind, MoEActivation):
            raise TypeError(f"kind must be a MoEActivation or its name, got {self.kind!r}")
        rule = _RULES[self.kind]
        for name in _SETTINGS:
            value = getattr(self, name)
            if value is not None:
                checks.number(f"activation {name}", value)
            if value is not None and not isfinite(value):
                raise ValueError(f"activation {name} must be finite, got {value}")
            if value is None and name in rule.required:
                raise ValueError(f"activation {self.kind.value} needs {name}, got None")
            if value is not None and name not in rule.defaults:
                raise ValueError(f"activation {self.kind.value} takes no {name}, got {value}")
        for name in ("clamp_limit", "linear_beta", *(("beta",) if rule.function == "situ" else ())):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"activation {name} must be positive, got {value}")
        settings = [(n, getattr(self, n)) for n in _SETTINGS if getattr(self, n) is not None]
        text = ",".join(f"{name}={float(value)!r}" for name, value in settings)
        key = f"{self.kind.value}({text})" if text else self.kind.value
        object.__setattr__(self, "key", key)

    @classmethod
    def parse(cls, key: str) -> Activation:
        """The inverse of :attr:`key`; a bare name or alias is a key too."""
        match = re.fullmatch(r"(\w+)(?:\((.*)\))?", key)
        if match is None:
            raise ValueError(f"activation must look like name or name(setting=number), got {key!r}")
        settings: dict[str, Any] = {}
        for item in filter(None, (match[2] or "").split(",")):
            name, _, number = item.partition("=")
            if name not in _SETTINGS:
                raise ValueError(f"activation settings are {_SETTINGS}, got {item!r}")
            settings[name] = float(number)
        return cls(MoEActivation.from_str(match[1]), **settings)

    def formula(self) -> Formula:
        """Resolve the kind and the settings to a `Formula`."""
        rule = _RULES[self.kind]
        numbers = {n: _either(getattr(self, n), rule.defaults.get(n)) for n in _SETTINGS}
        return Formula(
            function=rule.function,
            gated=self.kind.is_gated,
            interleaved=self.kind.is_interleaved,
            limit=numbers["clamp_limit"],
            alpha=_either(numbers["alpha"], 1.0),
            beta=_either(numbers["beta"], 0.0),
            linear_beta=numbers["linear_beta"],
        )


def _either(value: Any, default: Any) -> Any:
    return default if value is None else float(value)


_PLAIN = {name: (kind, kind.value) for name, kind in _BY_NAME.items() if not _RULES[kind].required}
"""Results of `kind_and_key` for names without required settings."""


@lru_cache(maxsize=256)
def formula(key: str) -> Formula:
    """The `Formula` of an operator's ``activation`` argument."""
    return Activation.parse(key).formula()


def kind_and_key(activation: MoEActivation | Activation | str) -> tuple[MoEActivation, str]:
    """The kind and the key of an ``activation`` argument: an enum value, an `Activation` or a str.

    Simple enough for Dynamo to trace; TypeError for other types.
    """
    if isinstance(activation, str):
        plain = _PLAIN.get(activation)
        if plain is not None:
            return plain
        if "(" in activation:
            parsed = Activation.parse(activation)
            return parsed.kind, parsed.key
        activation = MoEActivation.from_str(activation)
    if isinstance(activation, MoEActivation):
        if _RULES[activation].required:
            Activation(activation)  # raises and names the missing setting
        return activation, activation.value
    if isinstance(activation, Activation):
        return activation.kind, activation.key
    raise TypeError(
        f"activation must be a MoEActivation, Activation or str, got {type(activation)}"
    )
