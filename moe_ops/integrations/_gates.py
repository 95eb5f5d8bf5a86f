"""Finds the activation of this library that equals the gate of an experts module, by running it.

Nothing is recognised by name. transformers' gate functions read a few numbers from their module
(``limit``, ``swiglu_alpha`` ...), or from modules inside (``act_fn.up_softcap.softcap``). The
function runs on a stand-in that has these numbers and nothing else, on values on both sides of
every number, and of all magnitudes up to the largest of bf16, since a limit may be written into the
code. The gate is fused only if an activation of this library returns the same. A gate that reads or
computes anything else runs unfused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import isfinite
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
"""transformers' activation modules, and the activations of this library that they are."""

_FUNCTIONS: dict[MoEActivation, Callable[[Tensor], Tensor]] = {
    MoEActivation.SILU: functional.silu,
    MoEActivation.GELU: functional.gelu,
    MoEActivation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    MoEActivation.RELU2: lambda x: functional.relu(x).square(),
}
LARGEST = torch.finfo(torch.bfloat16).max
MAGNITUDES = (*(2.0**e for e in (*range(-16, -2, 2), *range(3, 128, 2))), LARGEST)
"""Magnitudes on which every gate is probed, besides those near 0 and near its module's numbers."""
_NO_MUL = {kind: Activation(kind.without_mul()) for kind in _FUNCTIONS}


Inner = tuple[type, tuple[tuple[str, Any], ...]]
"""A module without tensors: its class, and the name and `Inner` of each of its modules."""


def activation_of(experts: Any) -> Activation | None:
    """Return what `fused_experts` computes instead of the gate of an experts module.

    Dynamo traces this function, but not the two functions below that it calls: they return
    constants. It guards on their arguments only, so equal layers share one compilation.

    Returns:
        None if the module's own gate must run.
    """
    act_fn = getattr(experts, "act_fn", None)
    kind = kind_of(act_fn)
    if not experts.has_gate:
        return None if kind is None else _NO_MUL[kind]
    if "_apply_gate" in experts.__dict__:
        return None
    gate = type(experts)._apply_gate
    inner = inner_of(act_fn) if kind is None and isinstance(act_fn, nn.Module) else None
    absent: tuple[str, ...] = ()
    names = attributes_read(gate, inner, absent)
    while names is not None and any(_value(experts, name) is None for name in names):
        absent += tuple(name for name in names if _value(experts, name) is None)
        names = attributes_read(gate, inner, absent)  # a gate may branch on what is None
    if names is None:
        return None
    values = []
    for name in names:
        value = _value(experts, name)
        if not isinstance(value, (int, float)):
            return None
        values.append(float(value).hex())  # as a string, because Dynamo turns floats into inputs
    return recognised(gate, kind, inner, absent, *values)


def _value(module: Any, path: str) -> Any:
    """Return an attribute of a module, or of one inside: ``act_fn.up_softcap.softcap``."""
    for name in path.split("."):
        module = getattr(module, name, "")  # not a number, and not None
    return module


def inner_of(module: nn.Module) -> Inner | None:
    """Return what stands for a module that computes by its class and numbers alone, or None."""
    if module._parameters or module._buffers or _is_changed(module):
        return None
    inner = []
    for name, child in module._modules.items():
        nested = None if child is None else inner_of(child)
        if nested is None:
            return None
        inner.append((name, nested))
    return type(module), tuple(inner)


def _is_changed(module: nn.Module) -> bool:
    """Whether a module may compute something else than its class does."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool("forward" in module.__dict__ or hooks)


def kind_of(function: Any) -> MoEActivation | None:
    """Return the activation of this library that an ``act_fn`` is, or None."""
    if isinstance(function, nn.Module):
        return None if _is_changed(function) else _KINDS.get(type(function))
    return MoEActivation.SILU if function is functional.silu else None


@torch.compiler.assume_constant_result
def attributes_read(
    gate: Callable[..., Tensor], inner: Inner | None, absent: tuple[str, ...]
) -> tuple[str, ...] | None:
    """Return the names of the numbers that a gate reads from its module; None if it reads more.

    ``inner`` stands for an ``act_fn`` of its own, ``absent`` names the attributes that are None.
    """
    return _attributes_read(gate, inner, absent)


@torch.compiler.assume_constant_result
def recognised(
    gate: Callable[..., Tensor],
    kind: MoEActivation | None,
    inner: Inner | None,
    absent: tuple[str, ...],
    *values: str,
) -> Activation | None:
    """Return the activation that a gate is, with its ``act_fn`` and the numbers that it reads."""
    return _recognised(gate, kind, inner, absent, values)


class _StandIn:
    """Stands in for an experts module, or for a module inside: all attributes are numbers.

    Args:
        number: returns the number of an attribute, by its path; a function for ``act_fn``.
        inner: the class and modules of what this stands in for.
        path: the beginning of its attributes' paths.
    """

    def __init__(self, number: Callable[[str], Any], inner: Inner, path: str = "") -> None:
        self._number, (self._class, self._inner), self._path = number, inner, path

    def __getattr__(self, name: str) -> Any:
        for child, inner in self._inner:
            if child == name:
                return _StandIn(self._number, inner, f"{self._path}{name}.")
        return self._number(self._path + name)

    def __call__(self, *args: Any) -> Any:
        return self._class.forward(self, *args)  # type: ignore[attr-defined]


def _run_gate(
    gate: Callable[..., Tensor], number: Callable[[str], Any], inner: Inner | None, x: Tensor
) -> Tensor | None:
    """Run the gate on a stand-in; None if the gate needs more than the stand-in has."""
    stand_in = _StandIn(number, (nn.Module, () if inner is None else (("act_fn", inner),)))
    try:
        return gate(stand_in, x)
    except Exception:  # an unknown function may raise anything
        return None


@lru_cache(maxsize=256)
def _attributes_read(
    gate: Callable[..., Tensor], inner: Inner | None, absent: tuple[str, ...]
) -> tuple[str, ...] | None:
    read: list[str] = []

    def number(path: str) -> Any:
        if path == "act_fn":
            return functional.silu
        if path in absent:
            return None
        if path not in read:
            read.append(path)
        return 1.0 + read.index(path) / 4

    with _disable_current_modes(), torch.no_grad():
        if _run_gate(gate, number, inner, _probe([])) is None:
            return None
    return tuple(read)


@lru_cache(maxsize=256)
def _recognised(
    gate: Callable[..., Tensor],
    kind: MoEActivation | None,
    inner: Inner | None,
    absent: tuple[str, ...],
    values: tuple[str, ...],
) -> Activation | None:
    numbers = [float.fromhex(value) for value in values]
    names = _attributes_read(gate, inner, absent) or ()
    attributes: dict[str, Any] = {**dict.fromkeys(absent), **dict(zip(names, numbers, strict=True))}
    if kind is not None:
        attributes["act_fn"] = _FUNCTIONS[kind]
    limits = sorted({number for number in numbers if isfinite(number) and number > 0})
    with _disable_current_modes(), torch.no_grad():
        probes = (_probe(limits), _probe(limits, MAGNITUDES))
        expected = [_run_gate(gate, attributes.__getitem__, inner, x) for x in probes]
        for x, y in zip(probes, expected, strict=True):
            if not isinstance(y, Tensor) or y.shape != (x.shape[0], x.shape[1] // 2):
                return None
        for candidate in _candidates(kind, limits):  # most fail on the first, small probe
            if all(_same(candidate, x, y) for x, y in zip(probes, expected, strict=True)):
                return candidate
    return None


def _same(candidate: Activation, x: Tensor, expected: Any) -> bool:
    """Whether an activation returns what a gate does, up to rounding; infinities are equal.

    ``|actual - expected| <= 1e-5 * |expected| + 1e-6 * max(1, |up|)``. The second term is for
    values near 0, which one formula may round to 0; ``up`` multiplies the difference.
    """
    actual, expected = ops.activation(x, candidate.key), expected.float()
    up = x[:, 1::2] if candidate.kind.is_interleaved else x.chunk(2, dim=1)[1]
    near = (actual - expected).abs() <= 1e-5 * expected.abs() + 1e-6 * up.abs().clamp(min=1)
    return bool((near | (actual == expected) | (actual.isnan() & expected.isnan())).all())


def _probe(numbers: list[float], magnitudes: tuple[float, ...] = ()) -> Tensor:
    """Return two rows with all pairs of gate and up values: as halves, and alternating."""
    points = [x / 4 for x in range(-24, 25)]
    near = [f * n for n in numbers for f in (0.5, 0.99, 1.01, 2.0)]
    points += [sign * x for x in (*near, *magnitudes) for sign in (-1, 1)]
    values = torch.tensor(points, dtype=torch.float32, device="cpu").clamp(-LARGEST, LARGEST)
    gate, up = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    return torch.stack((torch.cat((gate, up)), torch.stack((gate, up), dim=1).flatten()))


def _candidates(kind: MoEActivation | None, numbers: list[float]) -> Iterator[Activation]:
    """Yield activations that a gate with these numbers may be, the plain one first."""
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
    for beta in numbers:
        for linear in (None, *numbers):
            yield Activation(MoEActivation.SITU, beta=beta, linear_beta=linear)
