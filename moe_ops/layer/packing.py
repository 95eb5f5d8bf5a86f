"""Converting a layer's weights between the plain form, which loaders fill, and the packed form.

A base class of `moe_ops.FusedMoE`.
"""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from moe_ops.layer.base import ExpertLayer
from moe_ops.loading.names import SUFFIX
from moe_ops.pipeline.packing import reads_packed
from moe_ops.scheme import is_packed, pack_weight, packs, unpack_weight
from moe_ops.scheme.packed import check_packed
from moe_ops.tensors import QTensor

WEIGHTS = ("w13", "w2")
FORM_KINDS = ("weight", "scale", "zero_point", "global_scale")
"""Kinds of the parameters that are the fields of a `QTensor`."""


class PacksWeights(ExpertLayer):
    """A layer whose weights may be in the packed form."""

    def pack_(self) -> None:
        """Convert the weights to the packed form, which kernels for Hopper decode in registers.

        ``process_weights_after_loading``, which `load_checkpoint` calls, does so by itself where a
        kernel of the layer's GPU reads that form. Each of ``w13`` and ``w2`` is packed if its sizes
        allow it (see `packs`). Parameters are replaced, one weight after the other: capture CUDA
        graphs after this call.

        Raises:
            ValueError, NotImplementedError: neither weight has a packed form; ``layer.kernel`` was
                set, whose experts hold the scales of the plain form.
        """
        sizes = self.sizes.weights
        able = tuple(which for which in WEIGHTS if packs(self.scheme, *sizes[which]))
        if not able:
            check_packed("w13_weight", self.w13_weight, self.scheme, *sizes["w13"])
        self._convert(able)

    def unpack_(self) -> None:
        """Convert packed weights back to the plain form; parameters are replaced.

        Raises:
            ValueError: ``layer.kernel`` was set, whose experts hold the scales of the packed form.
        """
        self._convert(())

    def _convert(self, packed: tuple[str, ...]) -> None:
        if self._kernel is not None and packed != packed_of(self):
            raise ValueError(
                "layer.kernel must be None while weights change their form (its experts hold the "
                f"scales; set it again afterwards), got {type(self._kernel).__name__}"
            )
        convert(self, packed)


def packed_of(layer: ExpertLayer) -> tuple[str, ...]:
    """Return which of ``w13`` and ``w2`` are in the packed form."""
    return tuple(which for which in WEIGHTS if is_packed(getattr(layer, f"{which}_weight")))


def form_names(which: str) -> tuple[str, ...]:
    """Return the names of the parameters of ``w13`` or ``w2`` that a `QTensor` holds."""
    return tuple(f"{which}_{SUFFIX[kind]}" for kind in FORM_KINDS)


def converted(q: QTensor, layer: ExpertLayer, *, packed: bool) -> QTensor:
    """Return one of the layer's weights in the packed or in the plain form."""
    if is_packed(q.data) == packed:
        return q
    return (pack_weight if packed else unpack_weight)(q, layer.scheme)


def convert(layer: ExpertLayer, packed: Container[str]) -> None:
    """Store these of ``w13`` and ``w2`` in the packed form, and the others in the plain form."""
    for which in WEIGHTS:
        names = form_names(which)
        old = QTensor(*(getattr(layer, name) for name in names))
        new = converted(old, layer, packed=which in packed)
        for name, x, y in zip(names, old, new, strict=True):
            if y is not None and x is not y:
                layer.register_parameter(name, nn.Parameter(y, requires_grad=False))


def pack_for_device(layer: ExpertLayer) -> None:
    """Pack the weights that a kernel of the layer's GPU reads in the packed form.

    A layer whose ``kernel`` was set stays as it is, because the kernel holds the layer's scales.
    """
    if layer._kernel is not None:
        return
    how = (layer.scheme, layer.sizes.dtype)
    read = {
        which
        for which in WEIGHTS
        if reads_packed(getattr(layer, f"{which}_weight"), *how,
                        batch_invariant=layer.batch_invariant)
    }  # fmt: skip
    convert(layer, {*read, *packed_of(layer)})
