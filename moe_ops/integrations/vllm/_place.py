"""What stands in a vLLM layer for the backend that vLLM would have chosen."""

from __future__ import annotations

from typing import Any

from moe_ops.pipeline.forms import reads_packed
from moe_ops.scheme import Scheme
from moe_ops.scheme.packed import CHUNK, pack_weight, pack_weight_
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
        """Return a weight in the form that kernels of its GPU read.

        The packed form takes the memory of a contiguous ``q.data``, so that loading a model needs
        memory for three experts beside its weights.
        """
        config = self.moe_config
        # Gate and up rows each begin at a chunk of the packed form, or both weights stay plain.
        whole = config.intermediate_size_per_partition % CHUNK == 0
        reads = whole and reads_packed(
            q.data, self.scheme, config.in_dtype, batch_invariant=batch_invariant
        )
        if not reads:
            return q
        pack = pack_weight_ if q.data.is_contiguous() else pack_weight
        return pack(q, self.scheme)
