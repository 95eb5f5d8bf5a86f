"""Weights of SGLang's layers in the form that kernels of their GPU read, in SGLang's own memory.

Parameters stay what they are, and get other data. Two methods of SGLang bring int4 and int8 with
groups to its Triton runner in the plain form: that of AWQ and GPTQ (``moe_wna16``), and one of
compressed-tensors. Their weights are packed after each loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import is_cpu

from moe_ops.activation import Activation
from moe_ops.integrations.sglang._experts import runner_scheme, served_layer
from moe_ops.integrations.sglang._interface import COMPRESSED, WNA16
from moe_ops.pipeline.forms import form_of_gpu
from moe_ops.scheme import Scheme, is_packed, unpack_weight
from moe_ops.tensors import QTensor


def install() -> None:
    """Hook SGLang's methods of int4 and int8 with groups.

    Its method of compressed-tensors cannot load weights again.
    """
    for method in (WNA16, COMPRESSED):
        loaded = f"{method}.process_weights_after_loading"
        HookRegistry.register(loaded, pack_loaded, HookType.AROUND)
    before = f"{WNA16}.restore_weights_before_loading"
    HookRegistry.register(before, unpack_for_loading, HookType.AROUND)


def for_triton_alone() -> bool:
    """Whether SGLang's layers run in its Triton runner on a GPU, without an exchange of tokens."""
    backend, exchange = get_moe_runner_backend(), get_moe_a2a_backend()
    return (backend.is_triton() or backend.is_auto()) and exchange.is_none() and not is_cpu()


def pack_loaded(original: Callable[..., Any], method: Any, layer: Any) -> None:
    """Pack a layer's weights once SGLang has loaded them (``original``).

    A hook around ``process_weights_after_loading``. Layers that this library does not serve stay
    plain: SGLang's kernels run them, and its log then says why.
    """
    original(method, layer)
    if not for_triton_alone():
        return
    info, config = method.get_triton_quant_info(layer), method.moe_runner_config
    try:
        kind = served_layer(info, config)
    except (NotImplementedError, ValueError):
        return
    hold_in_form_of_gpu(info, config, *kind)


def unpack_for_loading(original: Callable[..., Any], method: Any, layer: Any) -> None:
    """Unpack a layer's weights in their own memory, since SGLang is going to load plain ones.

    A hook around ``restore_weights_before_loading``.
    """
    info = method.get_triton_quant_info(layer)
    for _, held, q in _both(info):
        if is_packed(q.data):
            plain: tuple[Any, ...] = unpack_weight(q, runner_scheme(info))
            for x, y in zip(held, plain, strict=False):
                if x is not None:
                    x.data = x.data.view(y.dtype).view(y.shape).copy_(y)
    original(method, layer)


def hold_in_form_of_gpu(info: Any, config: Any, scheme: Scheme, activation: Activation) -> None:
    """Pack the weights of a layer where its GPU reads that form, in their own memory.

    Args:
        info: SGLang's ``TritonMoeQuantInfo`` with the layer's parameters.
        config: SGLang's ``MoeRunnerConfig``.
        scheme: the scheme of the weights.
        activation: the layer's activation.
    """
    # The mode that is asked for with each call begins once the weights are loaded.
    invariant = get_exec().deterministic.enable_deterministic_inference
    for which, held, q in _both(info):
        q = form_of_gpu(
            q,
            scheme,
            config.params_dtype,
            batch_invariant=invariant,
            activation=activation.key if which == "w13" else "",
        )
        for x, y in zip(held, q, strict=False):
            if x is not None:
                x.data = y


def _both(info: Any) -> Iterator[tuple[str, list[Any], QTensor]]:
    """Yield both weights: the parameters of data, scales and zero points, and their tensors."""
    for which in ("w13", "w2"):
        held = [getattr(info, f"{which}_{part}") for part in ("weight", "scale", "zp")]
        tensors: list[Any] = [None if x is None else x.data for x in held]
        yield which, held, QTensor(*tensors)
