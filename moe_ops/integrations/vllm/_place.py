"""What stands in a vLLM layer for the backend that vLLM would have chosen."""

from __future__ import annotations

from typing import Any

from moe_ops.integrations._engines import form_of_gpu
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

    def form(self, q: QTensor, *, batch_invariant: bool) -> QTensor:
        """Return a weight in the form that kernels of its GPU read; see `form_of_gpu`."""
        config = self.moe_config
        width = config.intermediate_size_per_partition
        return form_of_gpu(q, self.scheme, config.in_dtype, width, batch_invariant=batch_invariant)
