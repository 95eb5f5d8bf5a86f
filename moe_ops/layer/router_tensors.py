"""Tensors beside the experts that a layer holds, found in a checkpoint under any known name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.layer.base import ExpertLayer
from moe_ops.loading.names import (
    GATE_BIAS,
    ROUTER_TENSORS,
    SHARED_GATE,
    CheckpointLayout,
    RouterTensor,
    router_tensor,
)
from moe_ops.loading.sources import Entry
from moe_ops.loading.stored import Form, canonical


class LogitsBiasError(ValueError):
    """A tensor that could be a correction bias, and is a bias of the gate's logits."""


class BufferSource(NamedTuple):
    """A tensor of a checkpoint that may fill a buffer."""

    entry: Entry
    tensor: RouterTensor
    is_beside: bool
    """Whether the tensor is beside the prefix of the experts, not under it."""

    @property
    def rank(self) -> tuple[bool, bool]:
        """Sorts candidates of one buffer: certain names first, then names under the prefix."""
        return self.tensor.is_gate_bias, self.is_beside


class RouterTensors:
    """Collects the tensors for the buffers of a layer's router, and reads the nearest ones.

    A checkpoint may keep such a tensor under the prefix or beside it, and a saved model may hold it
    twice, in its gate and in the layer. ``gate.bias`` counts only if no other name is there.
    """

    def __init__(self, layer: ExpertLayer) -> None:
        self._layer = layer
        self._found: dict[str, list[BufferSource]] = {
            name: [] for name in ROUTER_TENSORS if getattr(layer, name) is not None
        }
        self.values: dict[str, Tensor] = {}
        """The new numbers of each buffer that was read."""

    def takes(self, relative: str) -> RouterTensor | None:
        """Return what a tensor is, if the layer has the buffer for it; else None."""
        tensor = router_tensor(relative)
        return tensor if tensor is not None and tensor.buffer in self._found else None

    def note(self, entry: Entry, relative: str, *, is_beside: bool = False) -> bool:
        """Note a tensor by its name after the prefix; return whether it is for a buffer."""
        tensor = self.takes(relative)
        if tensor is not None:
            self._found[tensor.buffer].append(BufferSource(entry, tensor, is_beside))
        return tensor is not None

    def nearest(self) -> Iterator[list[BufferSource]]:
        """Yield the candidates of the best rank for each buffer that has any, in their order."""
        for candidates in filter(None, self._found.values()):
            best = min(candidate.rank for candidate in candidates)
            yield [candidate for candidate in candidates if candidate.rank == best]

    def read(self, candidate: BufferSource) -> None:
        """Read a tensor into `values`.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong shape; numbers beyond the buffer's dtype.
            LogitsBiasError: a bias of the gate's logits.
        """
        buffer, x = candidate.tensor.buffer, candidate.entry.read()
        if candidate.tensor.is_gate_bias:
            self._check_gate_bias(x)
        held = getattr(self._layer, buffer)
        take = {"hash_indices_table": _table, SHARED_GATE: _gate}.get(buffer, _correction_bias)
        self.values[buffer] = take(x, held)

    def missing(self) -> list[str]:
        """Return the names of the buffers that were not read."""
        return [name for name in self._found if name not in self.values]

    def _check_gate_bias(self, x: Tensor) -> None:
        """Refuse a bias that is added to the gate's logits.

        DeepSeek's files, whose scores are sigmoid or sqrtsoftplus, store the correction bias as
        ``gate.bias`` in float32. A gate's own bias has the dtype of its weight, and comes before a
        softmax (gpt-oss).
        """
        if x.dtype != torch.float32:
            raise LogitsBiasError(
                f"dtype must be torch.float32 for a correction bias named {GATE_BIAS} (a bias of "
                f"logits has the gate's dtype), got {x.dtype}"
            )
        if self._layer.scoring_func == "softmax":
            raise LogitsBiasError(
                f"scoring_func must not be softmax for a correction bias named {GATE_BIAS}, which "
                "would be a bias of logits (rename it to gate.e_score_correction_bias if it is "
                "none), got softmax"
            )


def _correction_bias(x: Tensor, held: Tensor) -> Tensor:
    """Return a correction bias ``(E,)``, which Ernie stores as ``(1, E)``."""
    if x.dim() == 2 and x.shape[0] == 1:
        x = x[0]
    form = Form(held.shape[0], 0, held.dtype, None, None, CheckpointLayout())
    return canonical("bias", x, "bias", form)


def _gate(x: Tensor, held: Tensor) -> Tensor:
    """Return the gate of shared experts, ``(1, H)``."""
    n, k = held.shape
    form = Form(n, k, held.dtype, None, None, CheckpointLayout())
    return canonical("weight", x, "weight", form)


def _table(x: Tensor, held: Tensor) -> Tensor:
    """Return a hash table ``(vocabulary, k)`` in the buffer's dtype."""
    if x.dtype not in checks.INDICES:
        raise TypeError(f"dtype must be one of {list(checks.INDICES)}, got {x.dtype}")
    if x.shape != held.shape:
        raise ValueError(f"shape must be {tuple(held.shape)}, got {tuple(x.shape)}")
    converted = x.to(held.dtype)
    if not torch.equal(converted.to(x.dtype), x):
        raise ValueError(f"numbers must be within {held.dtype}, got some that are not")
    return converted
