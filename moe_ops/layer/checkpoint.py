"""Loading a checkpoint into a layer: all of it, or nothing."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_ops import checks
from moe_ops.layer.module import FusedMoE
from moe_ops.layer.parameters import parameter_specs
from moe_ops.layer.placing import Placing
from moe_ops.loading.declared import check_declared
from moe_ops.loading.given import GivenScales
from moe_ops.loading.names import LAYOUTS, CheckpointLayout, prefixes_of
from moe_ops.loading.sources import Opened, Source, open_source

SHOWN = 4
"""Names of each list that an error quotes."""


class LoadReport(NamedTuple):
    """What became of the tensors of a checkpoint."""

    loaded: tuple[str, ...]
    """Names of tensors of which this rank took something."""
    missing: tuple[str, ...]
    """Parts of parameters that nothing was loaded for: ``w13_weight[5].w1`` is the gate projection
    of expert 5."""
    duplicated: tuple[str, ...]
    """Names of tensors for parts that had been loaded before; the first one counts."""
    unexpected: tuple[str, ...]
    """Names under the prefix that mean nothing to this layer."""
    mismatched: tuple[str, ...]
    """Names of tensors that do not fit, and why."""

    @property
    def is_complete(self) -> bool:
        """Everything was there, and nothing else."""
        return not (self.missing or self.duplicated or self.unexpected or self.mismatched)


@torch.no_grad()
def load_checkpoint(
    layer: FusedMoE,
    source: Source,
    *,
    prefix: str = "",
    strict: bool = True,
    progress: bool = True,
    quantize: bool = False,
    layout: CheckpointLayout | str = "auto",
) -> LoadReport:
    """Load this rank's part of a layer from a checkpoint.

    Tensors are read one by one, from one file at a time. Of experts on other ranks only the static
    input scales are read: all experts share the largest one.
    They go into new tensors, which are copied into the parameters when everything is there: a load
    that fails leaves the layer as it was.

    Known are tensors of one expert (``experts.3.gate_proj.weight``, ``experts.3.w1.weight``) and of
    all of them (``experts.gate_up_proj``, ``experts.down_proj_blocks``, ``w13_weight``), with the
    scales and zero points of fine-grained fp8, compressed-tensors, ModelOpt, AWQ, GPTQ and gpt-oss.
    A scheme's blocks are refined where they would not fit a rank's part of I: `aligned_sizes`.
    Columns in act-order (``g_idx``) are sorted by their groups, without a loss: those of the down
    projection at no cost, while tokens are read in the order that gate and up have, which the layer
    keeps as ``w13_input_order``.

    Formats that look alike are told apart by the form that a saved layer says it has, and by the
    ``quantization_config`` of a ``config.json`` beside the files. Tensors that come without either
    are told apart by their names and dtypes, which are the same for both 6-bit floats of MX.

    Args:
        layer: its parameters hold real memory (not ``meta``).
        source: a safetensors file, several of them, a folder, an index (files need the
            ``safetensors`` package), a mapping of names to tensors, or an iterable of
            ``(name, tensor)``.
        prefix: what the names of this layer begin with, up to or including ``experts``, with or
            without a dot at the end; empty: the layer's own. The router's and shared experts'
            tensors under it are left alone, but for the correction bias of a layer that has one.
        strict: raise for anything that is missing, twice there, unknown or does not fit. Otherwise
            what fits is loaded, and the rest stays as it is: complete the layer, then call its
            ``process_weights_after_loading``.
        progress: show a bar, where tqdm is installed.
        quantize: the checkpoint's weights are plain: quantize them to the layer's scheme, expert by
            expert, as `quantize_weight` does with whole projections in the layer's dtype, before
            they are cut over ranks. Static input scales must be in the checkpoint.
        layout: a name of `LAYOUTS`, or a `CheckpointLayout`, for what shapes do not say.

    Returns:
        A `LoadReport`.

    Raises:
        ValueError: not complete and ``strict``; weights that are stored in another form; a broken
            file; a layer on ``meta``; ``quantize`` for a layer without a scheme.
        FileNotFoundError: a file that is not there.
        ImportError: a file, and the ``safetensors`` package is not installed.
        TypeError: no such kind of source.
        NotImplementedError: blocks of several rows in a layer whose gate and up rows alternate; an
            expert whose gate and up columns are in two orders.

    Source:
        The loading of vLLM's and transformers' models; there parts that are missing are left
        undefined.
    """
    checks.instance("prefix", prefix, str)
    checks.flags(strict=strict, progress=progress, quantize=quantize)
    if isinstance(layout, str):
        checks.one_of("layout", layout, list(LAYOUTS))
        layout = LAYOUTS[layout]
    if not isinstance(layer, FusedMoE):
        raise TypeError(f"layer must be a FusedMoE, got {type(layer).__name__}")
    if layer.w13_weight.is_meta:
        raise ValueError("layer must have memory (call to_empty first), got parameters on meta")
    if quantize and layer.checkpoint_scheme.weight is None:
        raise ValueError("quantize must be False for a layer without a scheme, got True")
    prefix = (prefix or layer.prefix).removesuffix(".")
    prefix += "." if prefix else ""
    stage = _staged(layer)
    placing = Placing(stage, layout, quantize=quantize)
    opened = open_source(source, prefix, progress=progress)
    check_declared(opened.folder, None if quantize else layer.checkpoint_scheme.weight)
    ignored = _read(opened, placing, prefix)
    placing.finish()
    report = LoadReport(*map(tuple, placing.report()))
    if strict and not report.is_complete:
        raise ValueError(_message(report, prefix, ignored) + _way_out(placing))
    order = placing.act_order.input_order(
        stage.placement.rows,
        stage.hidden_size,
        stage.w13_weight.device,
        is_gated=stage.sizes.gated,
    )
    if report.missing and (placing.act_order or layer.w13_input_order is not None):
        raise ValueError(f"with act-order, {_message(report, prefix, ignored)}")
    if not strict:
        _keep_missing(layer, stage, placing)
    if not report.missing:
        stage.quant_method.process_weights_after_loading(stage)
    _commit(layer, stage, placing)
    _set_input_order(layer, order)
    return report


def _read(opened: Opened, placing: Placing, prefix: str) -> list[str]:
    """Place what is under the prefix; the names of the rest."""
    ignored = []
    for entry in opened.entries:
        if entry.name.startswith(prefix):
            placing.take(entry, entry.name[len(prefix) :])
        else:
            ignored.append(entry.name)
    return ignored


def _staged(layer: FusedMoE) -> FusedMoE:
    """The same layer with parameters of its own, in the sizes that a checkpoint needs."""
    stage = copy.copy(layer)
    stage._parameters = {}
    stage.sizes, stage.given_scales = layer.aligned_sizes(), GivenScales()
    stage.quant_method.create_weights(stage, stage.sizes, layer.w13_weight.device)
    return stage


def _keep_missing(layer: FusedMoE, stage: FusedMoE, placing: Placing) -> None:
    """Parts that were not loaded are what they were; zeros where the sizes have changed."""
    if layer.sizes != stage.sizes:
        return
    for missing in placing.missing():
        for row in stage.rows_of(missing.expert):
            old, new = (getattr(x, missing.spec.name).data[row] for x in (layer, stage))
            stage.part(new, missing.spec, missing.shard).copy_(
                stage.part(old, missing.spec, missing.shard)
            )


def _commit(layer: FusedMoE, stage: FusedMoE, placing: Placing) -> None:
    """Overwrite the parameters where they are, so that captured graphs see them."""
    if layer.sizes != stage.sizes and layer.kernel is not None:
        raise ValueError(
            f"layer must get its kernel after loading, which makes its scheme "
            f"{stage.sizes.scheme.name}, got a kernel for {layer.sizes.scheme.name}"
        )
    for name in parameter_specs(stage.sizes):
        old: Any = getattr(layer, name)
        new: nn.Parameter = getattr(stage, name)
        if old.shape == new.shape:
            old.data.copy_(new)
        else:
            layer.register_parameter(name, new)
    layer.sizes, layer.given_scales = stage.sizes, stage.given_scales
    if placing.correction_bias is not None and layer.e_score_correction_bias is not None:
        layer.e_score_correction_bias.copy_(placing.correction_bias)


def _set_input_order(layer: FusedMoE, order: Tensor | None) -> None:
    old = layer.w13_input_order
    if old is not None and order is not None and old.shape == order.shape:
        old.copy_(order)
    else:
        layer.w13_input_order = order


def _message(report: LoadReport, prefix: str, ignored: list[str]) -> str:
    """What is wrong, with some names of each kind."""
    parts = []
    for kind in ("missing", "duplicated", "unexpected", "mismatched"):
        names = getattr(report, kind)
        if names:
            more = ", ..." if len(names) > SHOWN else ""
            parts.append(f"{len(names)} {kind} ({', '.join(names[:SHOWN])}{more})")
    message = f"source must hold this layer exactly, got {'; '.join(parts)}"
    if not report.loaded:
        known = prefixes_of([*ignored, *(prefix + name for name in report.unexpected)])
        if known:
            message += f". Nothing was loaded with prefix {prefix!r}: names begin with {known}"
    return message


def _way_out(placing: Placing) -> str:
    """How to load weights that are not quantized into a layer that is."""
    if not placing.plain_weights:
        return ""
    name = placing.layer.checkpoint_scheme.name
    return (
        f". {len(placing.plain_weights)} weights are not quantized (such as "
        f"{placing.plain_weights[0]}): pass quantize=True to quantize them to {name}"
    )
