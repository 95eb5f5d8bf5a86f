"""gpt-oss in MXFP4 with SGLang's Triton runner, which would dequantize its weights to bf16.

They stay in MXFP4 here, in a quarter of the memory: in the packed form where kernels of the GPU
read it, else in the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from moe_ops.integrations.sglang._experts import KeptWeights, say_that_sglang_runs, served_layer
from moe_ops.integrations.sglang._interface import MXFP4
from moe_ops.integrations.sglang._runner import run_to_combine
from moe_ops.integrations.sglang._weights import for_triton_alone, hold_in_form_of_gpu

KEPT = "_moe_ops_mxfp4"
"""Attribute of a layer whose weights stay in MXFP4: its `Mxfp4QuantInfo`."""


class Mxfp4QuantInfo(KeptWeights, TritonMoeQuantInfo):  # type: ignore[misc]
    """Weights ``(E, 2I, H / 2)`` and ``(E, H, I / 2)`` uint8 with e8m0 scales of 32 columns.

    Each may be in the packed form, see `moe_ops.pack_weight`.
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
    if for_triton_alone():
        info = Mxfp4QuantInfo(
            w13_weight=layer.w13_weight,
            w2_weight=layer.w2_weight,
            b13=getattr(layer, "w13_weight_bias", None),
            b2=getattr(layer, "w2_weight_bias", None),
            w13_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
        )
        try:
            kind = served_layer(info, layer.moe_runner_config)
        except (NotImplementedError, ValueError) as error:
            say_that_sglang_runs(error)
        else:
            hold_in_form_of_gpu(info, layer.moe_runner_config, *kind)
            setattr(layer, KEPT, info)
            return
    original(method, layer)


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
