"""The layer benchmark's layers inside SGLang's ``MoeRunner``, with two of its backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from moe_ops.bench.problems import Call, Experts, Inputs
from moe_ops.scheme import UNQUANTIZED, QTensor, dequantize_weight
from peers.installed import lacks, named, package, reason

MOE = "sglang.srt.layers.moe"
RUNNERS = f"{MOE}.moe_runner"
TILES = f"{RUNNERS}.triton_utils.fused_moe_triton_config"
PLUGIN = "moe_ops.integrations.sglang"
OURS, TRITON = "moe_ops", "triton"
"""Runner backends: the runner core that the plug-in registers, and SGLang's Triton kernels."""


def flags_by_scheme(size: int) -> dict[str, dict[str, Any]]:
    """Scheme -> what SGLang's quantization method of it tells the Triton runner.

    Args:
        size: rows and columns of blocks, and columns of groups, that share a scale.
    """
    fp8, int8, rows = {"use_fp8_w8a8": True}, {"use_int8_w8a8": True}, {"per_channel_quant": True}
    blocks, groups = {"block_shape": [size, size]}, {"block_shape": [0, size]}
    int4 = {"use_int4_w4a16": True, **groups}
    return {
        f"fp8_block{size}": fp8 | blocks,
        "fp8_channel": fp8 | rows,
        "fp8_tensor": fp8,
        f"int8_block{size}": int8 | blocks,
        "int8_channel": int8 | rows,
        f"int4_w4a16_g{size}": int4,
        f"int4_w4a16_g{size}_zp": int4,
        f"int8_w8a16_g{size}": {"use_int8_w8a16": True, **groups},
    }


FLAGS = {"bf16": {}, **flags_by_scheme(128)}
TRITON_INFO = f"{RUNNERS}.triton.TritonMoeQuantInfo"
INFOS = {"mxfp4_w4a16": f"{PLUGIN}._mxfp4.Mxfp4QuantInfo"}
"""Scheme that SGLang's Triton runner does not have -> what the plug-in gives its core."""


@cache
def started() -> None:
    """Publish SGLang's default server arguments, and register the plug-in's runner core.

    Hooks of plug-ins are not applied, so the Triton runner is SGLang's own. Its kernels ask for the
    group of ranks before they allocate a result, and one rank without symmetric memory has none.
    """
    runtime = import_module("sglang.srt.runtime_context")
    runtime.get_context().override_server_args().install()
    runtime.get_parallel().override_permanently(tp_group=None)
    import_module(PLUGIN).register()


def missing(backend: str) -> str | None:
    """What is missing of SGLang for a runner backend."""
    fault = package("sglang") or reason(started)
    if fault:
        return fault
    if backend == TRITON:
        return lacks("sglang", f"{RUNNERS}.triton_utils.fused_moe")
    interface = import_module(f"{PLUGIN}._interface")
    other = interface.formats()[interface.TRITON]
    return f"{other} as the plug-in knows it" if other else None


def served(backend: str, experts: Experts, inputs: Inputs) -> Call:
    """A ``MoeRunner`` of SGLang, on what the standard dispatcher and a method pass to it.

    The result has memory of its own, since a call must not change the tokens of the next one.

    Args:
        backend: `OURS` or `TRITON`.
        experts: weights in a scheme of `FLAGS`.
        inputs: tokens with their routing.
    """
    started()
    weights, ids = inputs.topk_weights, inputs.topk_ids
    routed = named(f"{MOE}.topk.StandardTopKOutput")(weights, ids, weights.new_empty(0))
    dispatched = named(f"{MOE}.token_dispatcher.standard.StandardDispatchOutput")(
        hidden_states=inputs.x, hidden_states_scale=None, topk_output=routed
    )
    count, hidden, inner = experts.w1.shape[0], inputs.x.shape[1], experts.w1.shape[1] // 2
    config = named(f"{RUNNERS}.base.MoeRunnerConfig")(
        num_experts=count,
        num_local_experts=count,
        hidden_size=hidden,
        intermediate_size_per_partition=inner,
        top_k=ids.shape[1],
        params_dtype=inputs.x.dtype,
        activation=experts.activation,
        inplace=False,
    )
    name = named(f"{MOE}.utils.resolve_moe_runner_backend")(backend)
    runner, info = named(f"{RUNNERS}.runner.MoeRunner")(name, config), quant_info(experts)
    return lambda: runner.run(dispatched, info).hidden_states


def quant_info(experts: Experts) -> Any:
    """The weights' ``TritonMoeQuantInfo``, or a subclass of the plug-in, on the same memory."""
    made, tensors = named(INFOS.get(experts.scheme.name, TRITON_INFO)), {}
    for which, weight in zip(("w13", "w2"), experts.stored, strict=True):
        tensors |= {f"{which}_scale": weight.scale, f"{which}_zp": weight.zero_point}
    return made(experts.w1, experts.w2, **_flags(experts), **tensors)


def in_bf16(experts: Experts) -> Experts:
    """MXFP4 weights as SGLang's method of gpt-oss gives them to the Triton runner, dequantized."""
    w1, w2 = (dequantize_weight(q, experts.scheme, torch.bfloat16) for q in experts.stored)
    return Experts.of(UNQUANTIZED, QTensor(w1), QTensor(w2), experts.activation)


HELD: dict[str, Callable[[Experts], Experts]] = {"mxfp4_w4a16": in_bf16}


def held(experts: Experts) -> Experts:
    """The weights as SGLang's own Triton runner gets them."""
    return HELD.get(experts.scheme.name, lambda same: same)(experts)


def core(experts: Experts, inputs: Inputs) -> Call:
    """A ``MoeRunner`` with the plug-in's core, on weights in the form that the GPU reads."""
    return served(OURS, experts.loaded, inputs)


def triton(experts: Experts, inputs: Inputs) -> Call:
    """A ``MoeRunner`` with SGLang's Triton kernels."""
    return served(TRITON, held(experts), inputs)


def has_tuned_tiles(experts: Experts) -> bool:
    """Whether SGLang ships tiles of its Triton kernels for these weights on this GPU.

    Args:
        experts: what `held` returns.
    """
    tiles, flags = import_module(TILES), dict(_flags(experts))
    rows, columns = flags.pop("block_shape", (0, 0))
    by_channel = flags.pop("per_channel_quant", False)
    dtype = tiles.get_config_dtype_str(torch.bfloat16, **flags)
    count, _, inner = experts.w2.shape
    of = tiles.get_moe_configs(count, inner, dtype, rows, columns, per_channel_quant=by_channel)
    return of is not None


def _flags(experts: Experts) -> dict[str, Any]:
    return FLAGS.get(experts.scheme.name, {})
