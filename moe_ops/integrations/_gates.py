"""Which activation of this library the gate of an experts module is: found by running the gate.

Nothing is recognised by name. transformers' gate functions read a few numbers from their module
(``limit``, ``swiglu_alpha`` ...). The function runs on a stand-in that has the module's numbers and
nothing else: on values on both sides of every number, and of all magnitudes up to the largest of
bf16, since a limit may be written into the code. It is fused only if an activation of ours returns
the same; a gate that reads anything else, or computes anything else, runs unfused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import isfinite
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from transformers import activations

from moe_ops import ops
from moe_ops.activation import Activation, MoEActivation

_KINDS: dict[type, MoEActivation] = {
    nn.SiLU: MoEActivation.SILU,
    activations.SiLUActivation: MoEActivation.SILU,
    activations.GELUActivation: MoEActivation.GELU,
    activations.GELUTanh: MoEActivation.GELU_TANH,
    activations.NewGELUActivation: MoEActivation.GELU_TANH,
    activations.ReLUSquaredActivation: MoEActivation.RELU2,
}
"""transformers' activation modules that are activations of this library."""

_FUNCTIONS: dict[MoEActivation, Callable[[Tensor], Tensor]] = {
    MoEActivation.SILU: functional.silu,
    MoEActivation.GELU: functional.gelu,
    MoEActivation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    MoEActivation.RELU2: lambda x: functional.relu(x).square(),
}
LARGEST = torch.finfo(torch.bfloat16).max
MAGNITUDES = (*(2.0**e for e in (*range(-16, -2, 2), *range(3, 128, 2))), LARGEST)
"""Magnitudes that every gate is probed on, beside those near 0 and near its module's numbers."""
_NO_MUL = {kind: Activation(kind.without_mul()) for kind in _FUNCTIONS}


def activation_of(experts: Any) -> Activation | None:
    """What `fused_experts` computes instead of the gate of an experts module, if it can.

    Dynamo traces this: what it must not look into are the two functions below that return
    constants, and it guards on their arguments only, so equal layers share one compilation.

    Returns:
        None where the module's own gate must run.
    """
    kind = kind_of(getattr(experts, "act_fn", None))
    if not experts.has_gate:
        return None if kind is None else _NO_MUL[kind]
    if "_apply_gate" in experts.__dict__:
        return None
    gate = type(experts)._apply_gate
    absent: tuple[str, ...] = ()
    names = attributes_read(gate, absent)
    while names is not None and any(getattr(experts, name, 0) is None for name in names):
        absent += tuple(name for name in names if getattr(experts, name, 0) is None)
        names = attributes_read(gate, absent)  # a gate may branch on what is None
    if names is None:
        return None
    values = []
    for name in names:
        value = getattr(experts, name, None)
        if not isinstance(value, (int, float)):
            return None
        values.append(float(value).hex())  # a string: Dynamo makes inputs of floats
    return recognised(gate, kind, absent, *values)


def kind_of(function: Any) -> MoEActivation | None:
    """The activation that an ``act_fn`` is, if it is one of this library."""
    if isinstance(function, nn.Module):
        if "forward" in function.__dict__ or function._forward_hooks or function._forward_pre_hooks:
            return None  # what it computes is more than its class says
        return _KINDS.get(type(function))
    return MoEActivation.SILU if function is functional.silu else None


@torch.compiler.assume_constant_result
def attributes_read(gate: Callable[..., Tensor], absent: tuple[str, ...]) -> tuple[str, ...] | None:
    """Names of the numbers that a gate function reads from its module; None if it reads more.

    ``absent``: attributes that are None.
    """
    return _attributes_read(gate, absent)


@torch.compiler.assume_constant_result
def recognised(
    gate: Callable[..., Tensor], kind: MoEActivation | None, absent: tuple[str, ...], *values: str
) -> Activation | None:
    """The activation that a gate function is, for an ``act_fn`` and the numbers it reads."""
    return _recognised(gate, kind, absent, values)


class _Recorder:
    """Stands for an experts module: attributes are numbers, and asking for one is noted."""

    def __init__(self, absent: tuple[str, ...]) -> None:
        self.read: list[str] = []
        self.__dict__.update(dict.fromkeys(absent))

    def __getattr__(self, name: str) -> Any:
        if name == "act_fn":
            return functional.silu
        if name not in self.read:
            self.read.append(name)
        return 1.0 + self.read.index(name) / 4


def _run(gate: Callable[..., Tensor], stand_in: Any, x: Tensor) -> Tensor | None:
    """What the gate returns for a stand-in, or None when it wants more than that has."""
    try:
        return gate(stand_in, x)
    except Exception:  # whatever an unknown function does with a stand-in, it is not recognised
        return None


@lru_cache(maxsize=256)
def _attributes_read(
    gate: Callable[..., Tensor], absent: tuple[str, ...]
) -> tuple[str, ...] | None:
    recorder = _Recorder(absent)
    with _disable_current_modes(), torch.no_grad():
        if _run(gate, recorder, _probe([])) is None:
            return None
    return tuple(recorder.read)


@lru_cache(maxsize=256)
def _recognised(
    gate: Callable[..., Tensor],
    kind: MoEActivation | None,
    absent: tuple[str, ...],
    values: tuple[str, ...],
) -> Activation | None:
    numbers = [float.fromhex(value) for value in values]
    names = _attributes_read(gate, absent) or ()
    stand_in = SimpleNamespace(**dict.fromkeys(absent), **dict(zip(names, numbers, strict=True)))
    if kind is not None:
        stand_in.act_fn = _FUNCTIONS[kind]
    limits = sorted({number for number in numbers if isfinite(number) and number > 0})
    with _disable_current_modes(), torch.no_grad():
        probes = (_probe(limits), _probe(limits, MAGNITUDES))
        expected = [_run(gate, stand_in, x) for x in probes]
        for x, y in zip(probes, expected, strict=True):
            if not isinstance(y, Tensor) or y.shape != (x.shape[0], x.shape[1] // 2):
                return None
        for candidate in _candidates(kind, limits):  # most of them fail on the first, small probe
            if all(_same(candidate, x, y) for x, y in zip(probes, expected, strict=True)):
                return candidate
    return None


def _same(candidate: Activation, x: Tensor, expected: Any) -> bool:
    """Whether an activation returns what a gate does, but for roundings; infinities are equal.

    ``|actual - expected| <= 1e-5 * |expected| + 1e-6 * max(1, |up|)``: where an activation is
    nearly 0, one way of writing it may round it to 0, and ``up`` multiplies the difference.
    """
    actual, expected = ops.activation(x, candidate.key), expected.float()
    up = x[:, 1::2] if candidate.kind.is_interleaved else x.chunk(2, dim=1)[1]
    near = (actual - expected).abs() <= 1e-5 * expected.abs() + 1e-6 * up.abs().clamp(min=1)
    return bool((near | (actual == expected) | (actual.isnan() & expected.isnan())).all())


def _probe(numbers: list[float], magnitudes: tuple[float, ...] = ()) -> Tensor:
    """Two rows in which every gate value meets every up value: as halves, and alternating."""
    points = [x / 4 for x in range(-24, 25)]
    near = [f * n for n in numbers for f in (0.5, 0.99, 1.01, 2.0)]
    points += [sign * x for x in (*near, *magnitudes) for sign in (-1, 1)]
    values = torch.tensor(points, dtype=torch.float32, device="cpu").clamp(-LARGEST, LARGEST)
    gate, up = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    return torch.stack((torch.cat((gate, up)), torch.stack((gate, up), dim=1).flatten()))


def _candidates(kind: MoEActivation | None, numbers: list[float]) -> Iterator[Activation]:
    """Activations that a gate with these numbers may be, the plain one first."""
    if kind is not None:
        yield Activation(kind)
    if kind not in (None, MoEActivation.SILU):
        return
    for limit in (None, *numbers):
        for alpha in (1.0, *numbers):
            for beta in (0.0, 1.0):
                yield Activation(MoEActivation.SILU, limit, alpha, beta)
                if limit is not None:
                    yield Activation(MoEActivation.SWIGLUOAI, limit, alpha, beta)
        if limit is not None:
            yield Activation(MoEActivation.SWIGLUSTEP, limit)
