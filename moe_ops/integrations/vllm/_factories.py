"""Makes vLLM's layers of quantized weights choose, and be built of, this library's experts.

A method of vLLM makes a layer in four steps, each a function of an oracle: it selects a backend and
a class of experts, converts the weights into the backend's form, describes them in a
``FusedMoEQuantConfig``, and makes a kernel. All four are wrapped here, for the families of formats
in `FORMATS`. The wrapped selection may return a `Place` in place of a backend; the other steps then
do what this library needs. Without a `Place` vLLM's functions run.

This file is the one place that steps around what vLLM's factories take: they raise for backends
that they do not know, and some assert that the class of experts is one of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from typing import Any

from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

from moe_ops.integrations._engines import found, say_once
from moe_ops.integrations.vllm import _weights
from moe_ops.integrations.vllm._experts import (
    ENGINE,
    BatchedMoeOpsExperts,
    MoeOpsExperts,
    refusal,
)
from moe_ops.integrations.vllm._interface import FORMATS, ORACLES, missing_of, split
from moe_ops.integrations.vllm._place import Place
from moe_ops.integrations.vllm._requests import (
    Given,
    group_schemes,
    mxfp4_schemes,
    of_activation,
)
from moe_ops.scheme import SCHEMES, Scheme, get_scheme

Wrapper = Callable[[Callable], Callable]
Change = tuple[Any, str, Callable]
"""A module, a name in it, and the function that it gets."""
WRAPPED = "_wrapped_by_moe_ops"
REPLACED = {
    "TRITON", "TRITON_UNFUSED", "TRITON_MXFP8", "MARLIN", "BATCHED_MARLIN", "HUMMING", "CUTLASS",
    "EMULATION", "CPU", "ZEN_CPU",
}  # fmt: skip
"""vLLM's choices that this library goes before. ``CUTLASS`` is that of int4 under fp8. Others are
kernels for Blackwell, or for GPUs of other vendors."""
MXFP8 = get_scheme("|fp8:1x32:e8m0")
"""MXFP8 weights under activations in 16 bits, as in vLLM's Marlin and Humming."""


def changes() -> Iterator[Change]:
    """Yield what to set in vLLM's modules; a family whose interface differs is one log line."""
    for format, functions in FORMATS.items():
        lacks = missing_of(format)
        if lacks:
            say_once(ENGINE, f"vLLM's own experts run in {format}: it has no {lacks} as this "
                             "plug-in knows it")  # fmt: skip
            continue
        for name in functions:
            yield from everywhere(found(*split(name)), _WRAPPERS[name])


def everywhere(function: Callable, wrapper: Wrapper) -> Iterator[Change]:
    """Yield a function's replacement for every loaded module of vLLM that has it by its name.

    Modules that are imported later take it from the oracle. A function is wrapped once.
    """
    if getattr(function, WRAPPED, False):
        return
    wrapped = wraps(function)(wrapper(function))
    setattr(wrapped, WRAPPED, True)
    name = function.__name__
    for module in list(sys.modules.values()):
        known = vars(module).get("__name__", "") if module is not None else ""
        if known.split(".")[0] == "vllm" and vars(module).get(name) is function:
            yield module, name, wrapped


def _bound(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Given:
    """Return the arguments of a call by their names, with defaults."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


# Selections


def _selecting(
    schemes: Callable[[Given], list[Scheme]], *, moves: bool = False, none: Any = ()
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
            chosen: Any = (None, None)
            failure = None
            try:
                chosen = function(*args, **kwargs)
            except (NotImplementedError, *none) as error:
                failure = error
            given = _bound(function, args, kwargs)
            ours = _chosen(given, chosen[0], schemes, moves=moves)
            if ours is None and failure is not None:
                raise failure
            return ours or chosen

        return select

    return wrapper


def _chosen(
    given: Given, backend: Any, schemes: Callable[[Given], list[Scheme]], *, moves: bool
) -> tuple[Place, type] | None:
    """Return what a layer keeps if this library serves it; None, and a log line, otherwise."""
    config = given["config"]
    batched = config.moe_parallel_config.use_batched_activation_format
    experts = BatchedMoeOpsExperts if batched else MoeOpsExperts
    theirs = None if backend is None else backend.value
    try:
        reason = _prevented(config, theirs, moves=moves)
        for scheme in [] if reason else schemes(given):
            format = experts.activation_format()
            supported, _ = experts.is_supported_config(experts, config, scheme, None, format)
            if supported:
                instead = "where vLLM has no experts" if theirs is None else f"before {theirs}"
                say_once(ENGINE, f"{scheme.name} goes {instead}")
                return Place(config, scheme), experts
    except Exception as error:  # whatever is wrong with this plug-in, vLLM serves the layer
        reason = str(error) or type(error).__name__
    if reason:
        say_once(ENGINE, f"vLLM's own experts run: {reason}")
    return None


def _prevented(config: Any, backend: str | None, *, moves: bool) -> str | None:
    """Return why a layer is not asked for, whatever its scheme, or None."""
    asked = config.moe_backend
    if asked not in ("auto", "triton"):
        return f"moe_backend is {asked!r}"
    if backend is not None and backend not in REPLACED:
        return f"vLLM chooses {backend}"
    if config.moe_parallel_config.enable_eplb and not moves:
        return "experts that move between ranks are not supported in this format"
    return None


# Steps


def _step(step: Callable[[Place, Given], Any]) -> Wrapper:
    """Wrap a step: ``step`` runs if the layer keeps a `Place`."""

    def wrapper(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = _bound(function, args, kwargs)
            place = next((x for x in given.values() if isinstance(x, Place)), None)
            return function(*args, **kwargs) if place is None else step(place, given)

        return call

    return wrapper


def _kernel(place: Place, given: Given) -> Any:
    """Make vLLM's modular kernel of this library's experts, as all of its factories do."""
    config, quant = given["moe_config"], given["moe_quant_config"]
    prepare = maybe_make_prepare_finalize(
        moe=config, quant_config=quant, routing_tables=given["routing_tables"],
        allow_new_interface=True, use_monolithic=False,
    )  # fmt: skip
    sizes = {}
    if prepare.activation_format == mk.FusedMoEActivationFormat.BatchedExperts:
        sizes = {
            "max_num_tokens": prepare.max_num_tokens_per_rank(),
            "num_dispatchers": prepare.num_dispatchers(),
        }
    experts = given["experts_cls"](moe_config=config, quant_config=quant, **sizes)
    return mk.FusedMoEKernel(prepare, experts)


def _mxfp4_weights(place: Place, given: Given) -> Any:
    """Convert MXFP4 weights, once it is known whether the checkpoint asks for fp8 activations."""
    asked = of_activation(given.get("activation_key"))
    if asked is not None and refusal(MoeOpsExperts.EXPERTS, place.moe_config, asked) is None:
        place.scheme = asked
    return _weights.mxfp4(place, given)


def _mxfp4_config(place: Place, given: Given) -> Any:
    """Describe MXFP4 weights under 16-bit activations, or under fp8 with a scale per token."""
    fp8 = place.scheme.activation is not None
    return FusedMoEQuantConfig.make(
        quant_dtype=place.scheme.activation.dtype if fp8 else None,  # type: ignore[union-attr]
        per_act_token_quant=fp8,
        weight_dtype="mxfp4",
        gemm1_clamp_limit=given["swiglu_limit"],
        **_named(given, "w1_scale", "w2_scale", "w1_bias", "w2_bias", "gemm1_alpha", "gemm1_beta"),
    )


def _mxfp8_config(place: Place, given: Given) -> Any:
    """Describe MXFP8 weights under 16-bit activations."""
    return FusedMoEQuantConfig.make(
        weight_dtype="mxfp8",
        gemm1_clamp_limit=given["swiglu_limit"],
        **_named(given, "w1_scale", "w2_scale", "w1_bias", "w2_bias", "gemm1_alpha", "gemm1_beta"),
    )


def _nvfp4_config(place: Place, given: Given) -> Any:
    """Describe NVFP4 weights under 16-bit activations."""
    return FusedMoEQuantConfig.make(
        weight_dtype="nvfp4",
        w1_scale=given["w13_scale"], w2_scale=given["w2_scale"],
        g1_alphas=given["w13_scale_2"], g2_alphas=given["w2_scale_2"],
        gemm1_alpha=given["swiglu_alpha"], gemm1_beta=given["swiglu_beta"],
        gemm1_clamp_limit=given["swiglu_limit"],
    )  # fmt: skip


def _named(given: Given, *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names}


_WRAPPERS: dict[str, Wrapper] = {
    f"{ORACLES}.{name}": wrapper
    for name, wrapper in {
        "int_wna16.select_wna16_moe_backend": _selecting(group_schemes, none=(ValueError,)),
        "int_wna16.convert_to_wna16_moe_kernel_format": _step(_weights.groups),
        "int_wna16.make_wna16_moe_kernel": _step(_kernel),
        "w4a8.select_w4a8_moe_backend": _selecting(
            lambda given: [SCHEMES["int4_w4a8_g128"]], none=(ValueError,)
        ),
        "w4a8.convert_to_w4a8_moe_kernel_format": _step(_weights.int4_under_fp8),
        "w4a8.make_w4a8_moe_kernel": _step(_kernel),
        "nvfp4.select_nvfp4_moe_backend": _selecting(
            lambda given: [SCHEMES["nvfp4_w4a16"]], none=(ValueError,)
        ),
        "nvfp4.convert_to_nvfp4_moe_kernel_format": _step(_weights.nvfp4),
        "nvfp4.make_nvfp4_moe_quant_config": _step(_nvfp4_config),
        "nvfp4.make_nvfp4_moe_kernel": _step(_kernel),
        "mxfp4.select_mxfp4_moe_backend": _selecting(mxfp4_schemes, moves=True),
        "mxfp4.select_deepseek_v4_mxfp4_moe_backend": _selecting(mxfp4_schemes, moves=True),
        "mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format": _step(_mxfp4_weights),
        "mxfp4.convert_weight_to_mxfp4_moe_kernel_format": _step(_mxfp4_weights),
        "mxfp4.make_mxfp4_moe_quant_config": _step(_mxfp4_config),
        "mxfp4.make_mxfp4_moe_kernel": _step(_kernel),
        "mxfp8.select_mxfp8_moe_backend": _selecting(lambda given: [MXFP8], none=(ValueError,)),
        "fp8.convert_to_fp8_moe_kernel_format": _step(_weights.mxfp8),
        "fp8.make_fp8_moe_quant_config": _step(_mxfp8_config),
        "fp8.make_fp8_moe_kernel": _step(_kernel),
    }.items()
}
"""The wrapper of each function in `FORMATS`."""
