"""Whether this library serves a layer for which vLLM has chosen a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_ops.dispatch.device import device_facts
from moe_ops.integrations._engines import say_once
from moe_ops.integrations.vllm._experts import (
    ENGINE,
    BatchedMoeOpsExperts,
    MoeOpsExperts,
    layer_refusal,
)
from moe_ops.integrations.vllm._requests import Arguments
from moe_ops.scheme import Scheme

REPLACED = {
    "TRITON", "TRITON_UNFUSED", "TRITON_MXFP8", "MARLIN", "BATCHED_MARLIN", "HUMMING", "CUTLASS",
    "EMULATION", "CPU", "ZEN_CPU",
}  # fmt: skip
"""vLLM's choices that this library goes before. ``CUTLASS`` is that of int4 under fp8. Others are
kernels for Blackwell, or for GPUs of other vendors."""
FOR_OLDER_GPUS = ("MARLIN", "BATCHED_MARLIN", "HUMMING")
"""vLLM's choices that stay on GPUs before Hopper, where this library was not timed beside them."""


class Place:
    """What a layer that this library serves has where vLLM would have its backend.

    vLLM's methods keep the backend that a selection returned, compare it with those that they know,
    and pass it to the functions that convert weights and make kernels. It equals none of theirs.

    Args:
        moe_config: vLLM's ``FusedMoEConfig``.
        scheme: the scheme of the layer's experts.
    """

    name = value = "MOE_OPS"

    def __init__(self, moe_config: Any, scheme: Scheme) -> None:
        self.moe_config = moe_config
        self.scheme = scheme


def choose_experts(
    arguments: Arguments, backend: Any, schemes: Callable[[Arguments], list[Scheme]], *, moves: bool
) -> tuple[Place, type] | None:
    """Return what a layer keeps if this library serves it; None, and a log line, otherwise."""
    config = arguments["config"]
    batched = config.moe_parallel_config.use_batched_activation_format
    experts = BatchedMoeOpsExperts if batched else MoeOpsExperts
    theirs = None if backend is None else backend.value
    try:
        reason = _prevented(config, theirs, moves=moves)
        wanted = [] if reason else schemes(arguments)
        able = [x for x in wanted if layer_refusal(experts.EXPERTS, config, x) is None]
        for scheme in able[:1] or wanted[-1:]:  # if none, the last one's reason is the log line
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
    older = device_facts(torch.device(config.device)).arch < 90
    if older and backend in FOR_OLDER_GPUS and asked == "auto":
        where = "on a GPU before Hopper (--moe-backend triton asks for moe_ops)"
        return f"vLLM chooses {backend} {where}"
    if config.moe_parallel_config.enable_eplb and not moves:
        return "experts that move between ranks are not supported in this format"
    return None
