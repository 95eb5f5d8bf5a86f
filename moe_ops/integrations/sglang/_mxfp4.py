"""gpt-oss in MXFP4 with SGLang's Triton runner, which would dequantize its weights to bf16.

They stay in MXFP4 here, in a quarter of the memory: in the packed form where kernels of the GPU
read it, else in the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import is_cpu
from torch import nn

from moe_ops.integrations._engines import form_of_gpu
from moe_ops.integrations.sglang._experts import KeptWeights, say_that_sglang_runs, served_layer
from moe_ops.integrations.sglang._interface import MXFP4
from moe_ops.integrations.sglang._runner import run_to_combine
from moe_ops.scheme import SCHEMES
from moe_ops.tensors import QTensor

KEPT = "_moe_ops_mxfp4"
"""Attribute of a layer whose weights stay in MXFP4: its `Mxfp4QuantInfo`."""


class Mxfp4QuantInfo(KeptWeights, TritonMoeQuantInfo):  # type: ignore[misc]
    """Weights ``(E, 2I, H / 2)`` and ``(E, H, I / 2)`` uint8 with e8m0 scales of 32 columns.

    Or both in the packed form, see `moe_ops.pack_weight`.
    """

    scheme_name = "mxfp4_w4a16"


def install() -> None:
    """Hook SGLang's method of gpt-oss."""
    loaded = f"{MXFP4}.process_weights_after_loading"
    HookRegistry.register(loaded, keep_weights, HookType.AROUND)
    HookRegistry.register(f"{MXFP4}.apply", run_kept, HookType.AROUND)


def keep_weights(original: Callable[..., Any], method: Any, layer: Any) -> None:
    """Leave a layer's weights in MXFP4, or dequantize them as SGLang does (``original``).

    A hook around ``Mxfp4MoEMethod.process_weights_after_loading``. SGLang's Triton runner has no
    kernels for these weights, so what this library does not serve must be known here.
    """
    backend, exchange = get_moe_runner_backend(), get_moe_a2a_backend()
    if (backend.is_triton() or backend.is_auto()) and exchange.is_none() and not is_cpu():
        info = Mxfp4QuantInfo(
            w13_weight=layer.w13_weight,
            w2_weight=layer.w2_weight,
            b13=getattr(layer, "w13_weight_bias", None),
            b2=getattr(layer, "w2_weight_bias", None),
            w13_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
        )
        try:
            served_layer(info, layer.moe_runner_config)
        except (NotImplementedError, ValueError) as error:
            say_that_sglang_runs(error)
        else:
            setattr(layer, KEPT, in_form_of_gpu(layer, info))
            return
    original(method, layer)


def in_form_of_gpu(layer: Any, info: Mxfp4QuantInfo) -> Mxfp4QuantInfo:
    """Pack the weights of a layer where its GPU reads that form, in their own memory."""
    scheme = SCHEMES[info.scheme_name]
    width = info.w2_weight.shape[2] * scheme.numbers_per_entry(info.w2_weight.dtype)
    # The mode that is asked for with each call begins once the weights are loaded.
    invariant = get_exec().deterministic.enable_deterministic_inference
    for which in ("w13", "w2"):
        weight, scale = getattr(info, f"{which}_weight"), getattr(info, f"{which}_scale")
        q = form_of_gpu(
            QTensor(weight.data, scale.data),
            scheme,
            torch.bfloat16,  # as SGLang runs gpt-oss
            width,
            batch_invariant=invariant,
        )
        info = replace(info, **{f"{which}_weight": q.data, f"{which}_scale": q.scale})
        for name, tensor in ((f"{which}_weight", q.data), (f"{which}_weight_scale", q.scale)):
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))  # type: ignore[arg-type]
    return info


def run_kept(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Run a layer whose weights stayed in MXFP4; else ``original``.

    A hook around ``Mxfp4MoEMethod.apply``.

    Raises:
        NotImplementedError, ValueError: tokens of another form.
    """
    info = getattr(layer, KEPT, None)
    if info is None:
        return original(method, layer, dispatch_output)
    return run_to_combine(dispatch_output, info, method.moe_runner_config)
