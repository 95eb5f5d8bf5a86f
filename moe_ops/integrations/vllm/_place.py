"""What stands in a vLLM layer for the backend that vLLM would have chosen."""

from __future__ import annotations

from typing import Any

from moe_ops.integrations.vllm._experts import weight_of_layer
from moe_ops.scheme import Scheme
from moe_ops.tensors import QTensor


class Place:
    """The backend of a layer that this library serves.

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

    def form(self, which: str, q: QTensor) -> QTensor:
        """Return ``w13`` or ``w2`` in the form that kernels of its GPU read."""
        return weight_of_layer(which, q, self.scheme, self.moe_config)
