"""Converting a layer's weights between the plain form, which loaders fill, and other forms.

* ``plain``: as `quantize_weight` returns them.
* ``packed``: words that kernels for Hopper decode in registers, see `moe_ops.scheme.packed`.
* ``fp8``: MXFP4 held as fp8 with a scale per row, see `moe_ops.scheme.exact_fp8`. The e8m0 scales
  stay beside them, as parameters of kind ``exponents``. Then the layer's scheme is one of fp8.

A base class of `moe_ops.FusedMoE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.rank_checks import check_own_weights
from moe_ops.layer.stage import Stage
from moe_ops.layer.state import FP8, PACKED, PLAIN, WEIGHTS
from moe_ops.loading.names import SUFFIX
from moe_ops.pipeline.forms import gains_by_fp8, reads_packed
from moe_ops.scheme import (
    ExactRows,
    Scheme,
    as_fp8,
    exact_fp8_scheme,
    exact_rows,
    from_fp8,
    is_packed,
    pack_weight,
    packs,
    unpack_weight,
)
from moe_ops.scheme.packed import check_packed, pack_weight_
from moe_ops.tensors import QTensor

FORM_KINDS = ("weight", "scale", "zero_point", "global_scale", "exponents")
"""Kinds of the parameters of a weight in any form: the fields of a `QTensor`, and ``exponents``."""

Stored = tuple[Any, ...]
"""A tensor or None for each of `FORM_KINDS`."""


class ConvertsForms(ExpertLayer):
    """A layer whose weights may be in the packed form, or held as fp8."""

    def pack_(self) -> None:
        """Convert the weights to the packed form, which kernels for Hopper decode in registers.

        ``process_weights_after_loading``, which `load_checkpoint` calls, does so by itself where a
        kernel of the layer's GPU reads that form. Each of ``w13`` and ``w2`` is packed if its sizes
        allow it (see `packs`), and neither if I is no multiple of 64 under a gate whose rows do not
        alternate. Parameters are replaced, one weight after the other: capture CUDA
        graphs after this call.

        Raises:
            ValueError, NotImplementedError: neither weight is packed; ``layer.kernel`` was
                set, whose experts hold the scales of the plain form.
        """
        sizes, scheme = self.sizes.weights, self.sizes.plain.scheme
        able = [which for which in WEIGHTS if packs(scheme, *sizes[which])]
        if not able or self.sizes.splits_chunks:
            for which, size in sizes.items():
                check_packed(f"{which}_weight", getattr(self, f"{which}_weight"), scheme, *size)
        self._convert(dict.fromkeys(able, PACKED))

    def as_fp8_(self) -> None:
        """Hold MXFP4 weights as fp8 with a scale per row, exactly, for kernels that multiply fp8.

        For ``mxfp4_w4a8_token`` and ``mxfp4_w4a8``. Weights take twice the memory, and no bit is
        lost: `unpack_` restores the plain form. ``layer.scheme`` becomes one with fp8 weights, such
        as ``fp8_channel``; ``layer.checkpoint_scheme`` stays.

        ``process_weights_after_loading``, which `load_checkpoint` calls, does so by itself on GPUs
        that multiply fp8 but not fp8 by fp4, if all rows of both weights are exact (see
        `moe_ops.scheme.exact_rows`). It leaves layers plain whose experts move between ranks
        (``enable_eplb``), because all ranks must hold one form: call this on all of them.

        Parameters are replaced: capture CUDA graphs after this call.

        Raises:
            ValueError: a row is not exact, and nothing has changed; ``layer.kernel`` was set.
            NotImplementedError: another scheme.
        """
        for which, exact in zip(WEIGHTS, exact_rows_of(self.stage()), strict=True):
            if not bool(exact.all()):
                expert, row = (~exact).nonzero()[0].tolist()
                raise ValueError(
                    f"{which}_weight must have rows that are exact as fp8 (see exact_rows), got "
                    f"{int((~exact).sum())} of {exact.numel()} that are not, such as row {row} of "
                    f"local expert {expert}"
                )
        self._convert(dict.fromkeys(WEIGHTS, FP8))

    def unpack_(self) -> None:
        """Convert packed weights, or those held as fp8, back to the plain form.

        Parameters are replaced.

        Raises:
            ValueError: ``layer.kernel`` was set, whose experts hold the scales of the other form.
        """
        self._convert({})

    def exact_fp8_rows(self) -> ExactRows | None:
        """Return how many rows are exact as fp8, for which the host waits.

        None for a scheme whose weights have no such form: see `as_fp8_`. `moe_ops.explain` of a
        layer says it too, and which form is used.
        """
        scheme = self.sizes.plain.scheme
        if exact_fp8_scheme(scheme) is None:
            return None
        rows = list(exact_rows_of(self.stage()))
        exact = sum(int(x.sum()) for x in rows)
        return ExactRows(scheme, exact, sum(x.numel() for x in rows))

    def _convert(self, forms: Mapping[str, str]) -> None:
        check_own_weights(self)
        state = self.state
        changes = any(forms.get(which, PLAIN) != form for which, form in state.forms.items())
        if state.kernel is not None and changes:
            raise ValueError(
                "layer.kernel must be None while weights change their form (its experts hold the "
                f"scales; set it again afterwards), got {type(state.kernel).__name__}"
            )
        convert(self, forms)


def form_names(which: str) -> tuple[str, ...]:
    """Return the names of the parameters of ``w13`` or ``w2``, one for each of `FORM_KINDS`."""
    return tuple(f"{which}_{SUFFIX[kind]}" for kind in FORM_KINDS)


def converted(stored: Stored, scheme: Scheme, form: str, *, in_place: bool = False) -> Stored:
    """Return a weight in a form.

    Args:
        stored: the weight's tensors in any form.
        scheme: the scheme of the plain form.
        form: ``plain``, ``packed`` or ``fp8``.
        in_place: whether a plain weight may be overwritten by its packed form.
    """
    q, exponents = QTensor(*stored[:4]), stored[4]
    if exponents is not None:
        if form == FP8:
            return stored
        q = from_fp8(q, exponents, scheme)
    if is_packed(q.data):
        if form == PACKED:
            return stored
        q = unpack_weight(q, scheme)
    if form == PACKED:
        q = (pack_weight_ if in_place else pack_weight)(q, scheme)
    if form == FP8:
        return (*as_fp8(q, scheme), q.scale)
    return (*q, None)


def convert(layer: ExpertLayer, forms: Mapping[str, str]) -> None:
    """Store a layer's ``w13`` and ``w2`` in these forms; plain if ``forms`` names none."""
    layer.take(in_forms(layer.stage(), forms))
    layer.renew_slots()


def in_forms(stage: Stage, forms: Mapping[str, str], *, in_place: bool = False) -> Stage:
    """Convert the parameters of a stage to these forms, and return the stage that has them.

    One weight is converted after the other, so that there is memory for one beside all.
    ``in_place``: see `converted`.
    """
    plain = stage.state.sizes.plain.scheme
    for which in WEIGHTS:
        names = form_names(which)
        old = tuple(map(stage.parameters.get, names))
        new = converted(old, plain, forms.get(which, PLAIN), in_place=in_place)
        for name, x, y in zip(names, old, new, strict=True):
            if x is not y:
                stage.parameters[name] = None if y is None else nn.Parameter(y, False)
        del old, x
    return Stage(stage.state.in_forms(forms), stage.parameters)


def in_forms_for_device(stage: Stage) -> Stage:
    """Convert a stage to the form that kernels of its GPU run fastest.

    Packing takes the memory of the plain weights, so that a model loads with memory for three
    experts beside its weights.

    A layer whose ``kernel`` was set stays as it is, because the kernel holds the layer's scales.
    """
    state, parameters, device = stage.state, stage.parameters, stage.compute_device
    forms, scheme = state.forms, state.sizes.scheme
    if state.kernel is not None:
        return stage
    for which, form in forms.items():
        reads = form == PLAIN and reads_packed(
            parameters[f"{which}_weight"],
            scheme,
            state.in_dtype,
            device,
            batch_invariant=state.batch_invariant,
            activation=state.activation if which == "w13" else "",
        )
        if reads:
            forms[which] = PACKED
    moves = state.parallel.enable_eplb and state.placement.is_shared_out
    if gains_by_fp8(device, scheme) and not moves and are_exact(stage):
        forms = dict.fromkeys(WEIGHTS, FP8)
    return in_forms(stage, forms, in_place=True)


def exact_rows_of(stage: Stage) -> Iterator[Tensor]:
    """Yield which rows of ``w13``, then of ``w2``, are exact as fp8: bool ``(E, N)``."""
    scheme = stage.state.sizes.scheme
    for which, form in stage.state.forms.items():
        q = QTensor(*(stage.parameters.get(name) for name in form_names(which)[:4]))  # type: ignore[arg-type]
        if form == FP8:
            yield q.data.new_ones(q.data.shape[:2], dtype=torch.bool)
        else:
            yield exact_rows(unpack_weight(q, scheme) if form == PACKED else q, scheme)


def are_exact(stage: Stage) -> bool:
    """Return whether all rows of both weights are exact as fp8."""
    return all(bool(exact.all()) for exact in exact_rows_of(stage))
