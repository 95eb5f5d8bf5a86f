"""Methods of vLLM that choose Marlin by themselves, without a selection that could be wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.model_executor.utils import replace_parameter

from moe_ops.integrations.vllm._choice import Place, choose_experts
from moe_ops.integrations.vllm._kernels import kernel
from moe_ops.integrations.vllm._requests import mxfp4_schemes
from moe_ops.integrations.vllm._weights import formed


def choosing(function: Callable) -> Callable:
    """Wrap ``__init__`` of an MXFP4 method: this library is asked where it chooses Marlin."""

    def __init__(self: Any, moe: Any) -> None:  # noqa: N807 - vLLM's
        function(self, moe)
        if self.experts_cls is not None and self.experts_cls.__name__ == "MarlinExperts":
            ours = choose_experts({"config": moe}, self.mxfp4_backend, mxfp4_schemes, moves=False)
            if ours is not None:
                self.mxfp4_backend, self.experts_cls = ours

    return __init__


def processing(function: Callable) -> Callable:
    """Wrap ``process_weights_after_loading`` of an MXFP4 method, which would repack for Marlin."""

    def process_weights_after_loading(self: Any, layer: nn.Module) -> None:
        place = self.mxfp4_backend
        if not isinstance(place, Place):
            function(self, layer)
            return
        for which in ("w13", "w2"):
            scale = getattr(layer, f"{which}_weight_scale")
            q = formed(place, which, getattr(layer, f"{which}_weight_packed"), scale)
            delattr(layer, f"{which}_weight_packed")
            parameter = nn.Parameter(q.data, requires_grad=False)
            layer.register_parameter(f"{which}_weight", parameter)
            replace_parameter(layer, f"{which}_weight_scale", q.scale)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        arguments = {
            "moe_config": self.moe,
            "moe_quant_config": self.moe_quant_config,
            "experts_cls": self.experts_cls,
            "routing_tables": layer._expert_routing_tables(),  # type: ignore[operator]
        }
        self.moe_kernel = kernel(place, arguments)

    return process_weights_after_loading
