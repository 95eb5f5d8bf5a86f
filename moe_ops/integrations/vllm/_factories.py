"""Makes vLLM's layers of quantized weights choose, and be built of, this library's experts.

A method of vLLM makes a layer in four steps, each a function of an oracle: it selects a backend and
a class of experts, converts the weights into the backend's form, describes them in a
``FusedMoEQuantConfig``, and makes a kernel. All four are wrapped here, for the families of formats
in `FORMATS`. The wrapped selection may return a `Place` in place of a backend; the other steps then
do what this library needs. Without a `Place` vLLM's functions run. Two methods that select nothing
are wrapped as a whole, see `_methods`.

This file is the one place that steps around what vLLM's factories take: they raise for backends
that they do not know, and some assert that the class of experts is one of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from typing import Any

from moe_ops.integrations._engines import attribute_of, say_once, split_name
from moe_ops.integrations.vllm import _kernels, _weights
from moe_ops.integrations.vllm._choice import Place, choose_experts
from moe_ops.integrations.vllm._experts import ENGINE, MoeOpsExperts, layer_refusal
from moe_ops.integrations.vllm._interface import FORMATS, ORACLES, missing_of
from moe_ops.integrations.vllm._methods import choosing, processing
from moe_ops.integrations.vllm._requests import (
    Arguments,
    group_schemes,
    mxfp4_schemes,
    of_activation,
)
from moe_ops.scheme import SCHEMES, Scheme, get_scheme

Wrapper = Callable[[Callable], Callable]
Change = tuple[Any, str, Callable]
"""A module, a name in it, and the function that it gets."""
WRAPPED = "_wrapped_by_moe_ops"
MXFP8 = get_scheme("|fp8:1x32:e8m0")
"""MXFP8 weights under activations in 16 bits, as in vLLM's Marlin and Humming."""


def changes() -> Iterator[Change]:
    """Yield what to set in vLLM's modules; a family whose interface differs is one log line."""
    served = [format for format in FORMATS if _is_offered(format)]  # imports all modules first
    for name in (name for format in served for name in FORMATS[format]):
        owner, _, last = name.rpartition(".")
        if name in _WRAPPERS:
            yield from everywhere(attribute_of(*split_name(name)), _WRAPPERS[name])
        elif last in _METHOD:
            method = wrapped(attribute_of(*split_name(name)), _METHOD[last])
            yield from [] if method is None else [(attribute_of(*split_name(owner)), last, method)]


def _is_offered(format: str) -> bool:
    """Whether vLLM has what a family needs; if not, its log says so."""
    lacks = missing_of(format)
    if lacks:
        text = f"vLLM's own experts run in {format}: it has no {lacks} as this plug-in knows it"
        say_once(ENGINE, text)
    return lacks is None


def everywhere(function: Callable, wrapper: Wrapper) -> Iterator[Change]:
    """Yield a function's replacement for every loaded module of vLLM that has it by its name.

    Modules that are imported later take it from the oracle. A function is wrapped once.
    """
    value, name = wrapped(function, wrapper), function.__name__
    if value is None:
        return
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is function and str(names.get("__name__")).split(".")[0] == "vllm":
            yield module, name, value


def wrapped(function: Callable, wrapper: Wrapper) -> Callable | None:
    """Return a wrapped function, or None for one that this plug-in has wrapped before."""
    if getattr(function, WRAPPED, False):
        return None
    value = wraps(function)(wrapper(function))
    setattr(value, WRAPPED, True)
    return value


def _bound(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments of a call by their names, with defaults."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


# Selections


def _selecting(
    schemes: Callable[[Arguments], list[Scheme]], *, moves: bool = False, none: Any = ()
) -> Wrapper:
    """Wrap a selection: where vLLM's choice is one of `REPLACED`, this library is asked.

    Args:
        schemes: returns the schemes that may serve, the best one first; raises NotImplementedError
            or ValueError with the reason why none does.
        moves: whether vLLM's methods let experts move between ranks, whatever the backend.
        none: what the selection raises if vLLM has no kernel, besides NotImplementedError.
    """

    def wrapper(function: Callable) -> Callable:
        def select(*args: Any, **kwargs: Any) -> Any:
            theirs: Any = (None, None)
            failure = None
            try:
                theirs = function(*args, **kwargs)
            except (NotImplementedError, *none) as error:
                failure = error
            arguments = _bound(function, args, kwargs)
            ours = choose_experts(arguments, theirs[0], schemes, moves=moves)
            if ours is None and failure is not None:
                raise failure
            return ours or theirs

        return select

    return wrapper


# Steps


def _step(step: Callable[[Place, Arguments], Any]) -> Wrapper:
    """Wrap a step: ``step`` runs if the layer keeps a `Place`."""

    def wrapper(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = _bound(function, args, kwargs)
            place = next((x for x in arguments.values() if isinstance(x, Place)), None)
            return function(*args, **kwargs) if place is None else step(place, arguments)

        return call

    return wrapper


def _mxfp4_weights(place: Place, arguments: Arguments) -> Any:
    """Convert MXFP4 weights, once it is known whether the checkpoint asks for fp8 activations."""
    asked = of_activation(arguments.get("activation_key"))
    if asked is not None and layer_refusal(MoeOpsExperts.EXPERTS, place.moe_config, asked) is None:
        place.scheme = asked
    return _weights.mxfp4(place, arguments)


_WRAPPERS: dict[str, Wrapper] = {
    f"{ORACLES}.{name}": wrapper
    for name, wrapper in {
        "int_wna16.select_wna16_moe_backend": _selecting(group_schemes, none=(ValueError,)),
        "int_wna16.convert_to_wna16_moe_kernel_format": _step(_weights.groups),
        "int_wna16.make_wna16_moe_kernel": _step(_kernels.kernel),
        "w4a8.select_w4a8_moe_backend": _selecting(
            lambda arguments: [SCHEMES["int4_w4a8_g128"]], none=(ValueError,)
        ),
        "w4a8.convert_to_w4a8_moe_kernel_format": _step(_weights.int4_under_fp8),
        "w4a8.make_w4a8_moe_kernel": _step(_kernels.kernel),
        "nvfp4.select_nvfp4_moe_backend": _selecting(
            lambda arguments: [SCHEMES["nvfp4_w4a16"]], none=(ValueError,)
        ),
        "nvfp4.convert_to_nvfp4_moe_kernel_format": _step(_weights.nvfp4),
        "nvfp4.make_nvfp4_moe_quant_config": _step(_kernels.nvfp4_config),
        "nvfp4.make_nvfp4_moe_kernel": _step(_kernels.kernel),
        "mxfp4.select_mxfp4_moe_backend": _selecting(mxfp4_schemes, moves=True),
        "mxfp4.select_deepseek_v4_mxfp4_moe_backend": _selecting(mxfp4_schemes, moves=True),
        "mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format": _step(_mxfp4_weights),
        "mxfp4.convert_weight_to_mxfp4_moe_kernel_format": _step(_mxfp4_weights),
        "mxfp4.make_mxfp4_moe_quant_config": _step(_kernels.mx_config),
        "mxfp4.make_mxfp4_moe_kernel": _step(_kernels.kernel),
        "mxfp8.select_mxfp8_moe_backend": _selecting(lambda arguments: [MXFP8], none=(ValueError,)),
        "fp8.convert_to_fp8_moe_kernel_format": _step(_weights.mxfp8),
        "fp8.make_fp8_moe_quant_config": _step(_kernels.mx_config),
        "fp8.make_fp8_moe_kernel": _step(_kernels.kernel),
    }.items()
}
_METHOD: dict[str, Wrapper] = {
    "__init__": choosing,
    "process_weights_after_loading": processing,
}
"""The wrapper of each function in `FORMATS`."""
