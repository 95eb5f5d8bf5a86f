"""Loading a checkpoint into a layer: everything, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_ops import checks
from moe_ops.layer.forms import are_exact, in_forms
from moe_ops.layer.module import FusedMoE
from moe_ops.layer.parameters import parameter_specs
from moe_ops.layer.placing import Placing
from moe_ops.layer.rank_checks import check_own_weights, is_cut
from moe_ops.layer.shared import listed, shared_hint
from moe_ops.layer.stage import Stage
from moe_ops.layer.state import FP8, PLAIN
from moe_ops.loading.declared import layout_of
from moe_ops.loading.given import GivenScales
from moe_ops.loading.names import LAYOUTS, CheckpointLayout, parent_of, prefixes_of
from moe_ops.loading.patterns import ExpertNames
from moe_ops.loading.sources import Opened, Source, open_source


class LoadReport(NamedTuple):
    """What became of the tensors of a checkpoint."""

    loaded: tuple[str, ...]
    """Names of tensors that this rank took data from."""
    missing: tuple[str, ...]
    """Parts of parameters that no tensor was for: ``w13_weight[5].w1`` is the gate projection of
    expert 5. A tensor beside the experts that the layer holds: ``e_score_correction_bias``,
    ``hash_indices_table`` or ``shared_expert_gate_weight``."""
    duplicated: tuple[str, ...]
    """Names of tensors for parts that had been loaded already; the first tensor counts."""
    unexpected: tuple[str, ...]
    """Names under the prefix that mean nothing to this layer."""
    mismatched: tuple[str, ...]
    """Names of tensors that do not fit, and why."""

    @property
    def is_complete(self) -> bool:
        """Whether every tensor was there, and no other."""
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

    Tensors are read one by one, from one file at a time. For experts on other ranks only static
    input scales are read, because all experts share the largest one. New tensors are filled first,
    and copied into the parameters when they are complete: a load that fails leaves the layer as it
    was. Under `fully_shard` over replicas each rank reads its whole layer, and keeps its part.

    The tensors may be of one expert each (``experts.3.gate_proj.weight``,
    ``experts.3.w1.weight``) or of all experts (``experts.gate_up_proj``,
    ``experts.down_proj_blocks``, ``w13_weight``), with the scales and zero points of fine-grained
    fp8, compressed-tensors, ModelOpt, AWQ, GPTQ and gpt-oss. If a scheme's blocks do not fit a
    rank's part of I, they are refined: see `aligned_sizes`. A saved layer's state dict may hold
    refined blocks, too. Columns in act-order (``g_idx``) are sorted by group, without loss: columns
    of the down projection cost nothing later, while gate and up need the tokens' columns in their
    order, which the layer keeps as ``w13_input_order``.

    Formats with equal tensors are told apart by ``_extra_state`` of a saved layer, or by what
    ``config.json`` and the files of quantization tools beside the tensors say about these experts
    (``quantize_config.json``, ``quant_config.json``, ``hf_quant_config.json``). Without either,
    names and dtypes decide, which are the same for both 6-bit floats of MX.

    Args:
        layer: its parameters must hold memory (not ``meta``).
        source: a safetensors file, several of them, a folder, an index (files need the
            ``safetensors`` package), a mapping of names to tensors, or an iterable of
            ``(name, tensor)``.
        prefix: the beginning of this layer's names, up to or including ``experts``, with or without
            a dot at the end; empty: the layer's own prefix. Tensors of the router and of shared
            experts under it are ignored, except those that the layer holds: the correction bias
            (``gate.e_score_correction_bias``, ``moe_statics.e_score_correction_bias``,
            ``expert_bias``, ``router_bias``, and ``gate.bias`` in float32 for scores other than
            softmax), and the hash table (``gate.tid2eid``). They are also looked for beside
            ``experts``, if the prefix ends with it. So are the shared experts of a layer that has
            some (``shared_experts.up_proj.weight``, with ``shared_expert``, ``share_expert`` or
            ``shared_mlp`` too) and their gate (``shared_expert_gate.weight``); other names that
            look like theirs are unexpected, and so is a gate that the layer does not have.
        strict: raise for tensors that are missing, duplicated, unknown or do not fit. Otherwise
            load what fits, and leave the rest as it is: complete the layer, then call its
            ``process_weights_after_loading``.
        progress: show a progress bar, if tqdm is installed.
        quantize: the checkpoint's weights are plain: quantize them to the layer's scheme, expert by
            expert, as `quantize_weight` does with whole projections in the layer's dtype, before
            they are cut over ranks. Static input scales must be in the checkpoint.
        layout: a name in `LAYOUTS`, or a `CheckpointLayout`, for what neither shapes nor files say.

    Returns:
        A `LoadReport`.

    Raises:
        ValueError: an incomplete checkpoint with ``strict``; weights stored in another form; files
            beside the tensors that say other weights or another ``layout``, or contradict each
            other; a broken file; a layer on ``meta``; ``quantize`` for a layer without a scheme.
        FileNotFoundError: a file does not exist.
        ImportError: ``source`` is a file, and the ``safetensors`` package is not installed.
        TypeError: an unknown kind of source.
        NotImplementedError: blocks of several rows in a layer whose gate and up rows alternate; an
            expert whose gate and up columns are in different orders; weights that a wrapper holds
            or computes (a parametrization, `fully_shard` between forward and backward pass); with
            `fully_shard`, missing weights, or scales that change their shape.

    Source:
        The loaders of vLLM's and transformers' models, which leave missing parts undefined.
    """
    checks.instance("prefix", prefix, str)
    checks.flags(strict=strict, progress=progress, quantize=quantize)
    if isinstance(layout, str):
        checks.one_of("layout", layout, list(LAYOUTS))
        layout = LAYOUTS[layout]
    if not isinstance(layer, FusedMoE):
        raise TypeError(f"layer must be a FusedMoE, got {type(layer).__name__}{_layers_in(layer)}")
    if not is_cut(layer):
        check_own_weights(layer)
    if layer.w13_weight.is_meta:
        raise ValueError("layer must have memory (call to_empty first), got parameters on meta")
    if quantize and layer.checkpoint_scheme.weight is None:
        raise ValueError("quantize must be False for a layer without a scheme, got True")
    prefix = (prefix or layer.prefix).removesuffix(".")
    prefix += "." if prefix else ""
    layer.follow_dtype()
    with _stage_of(layer) as stage:
        placing = Placing(layer, stage, layout, quantize=quantize)
        return _load(layer, placing, source, prefix, strict=strict, progress=progress)


def _load(
    layer: FusedMoE, placing: Placing, source: Source, prefix: str, *, strict: bool, progress: bool
) -> LoadReport:
    """Do what `load_checkpoint` does with arguments that were checked."""
    opened = open_source(source, partial(_is_listed, placing, prefix), progress=progress)
    names = ExpertNames.under(prefix, layer.num_experts)
    quant = layer.checkpoint_scheme.weight
    placing.layout = layout_of(
        opened.folder, names, quant, placing.layout, quantize=placing.quantize
    )
    ignored = _place_tensors(opened, placing, prefix)
    placing.finish()
    report = LoadReport(*map(tuple, placing.report()))
    if strict and not report.is_complete:
        near = {name: _after_block(prefix, name) for name in ignored}
        raise ValueError(_message(report, prefix, ignored) + _way_out(placing, near))
    stage = placing.stage
    order = placing.act_order.input_order(
        stage.state.placement.rows,
        layer.hidden_size,
        layer.compute_device,
        is_gated=stage.state.sizes.gated,
    )
    lacks_weights = any(placing.missing())
    cut = is_cut(layer)
    if lacks_weights and cut:
        raise NotImplementedError(
            f"layer must be loaded whole under fully_shard, got {_message(report, prefix, ignored)}"
        )
    if lacks_weights and (placing.act_order or layer.w13_input_order is not None):
        raise ValueError(f"with act-order, {_message(report, prefix, ignored)}")
    if lacks_weights:
        _keep_missing(layer, stage, placing)
    else:
        stage = layer.quant_method.finished(stage)
    _overwrite_all(layer, _in_forms_of(layer, stage))
    for buffer, x in placing.router.values.items():
        getattr(layer, buffer).copy_(x)
    if lacks_weights:
        layer.renew_slots()
    elif not cut:
        layer.quant_method.process_weights_after_loading(layer)
    _set_input_order(layer, order)
    return report


def _layers_in(module: Any) -> str:
    """Return a hint for an error: the paths of layers in a module that is no layer itself."""
    if not isinstance(module, nn.Module):
        return ""
    paths = [f".{name}" for name, inner in module.named_modules() if isinstance(inner, FusedMoE)]
    return f" (pass one of the layers in it: {listed(paths)})" if paths else ""


def _is_wanted(placing: Placing, prefix: str, name: str) -> bool:
    """Whether a tensor is under the prefix, or beside it: of the router, or of shared experts."""
    parent = parent_of(prefix)
    if parent is None or name.startswith(prefix) or not name.startswith(parent):
        return name.startswith(prefix)
    relative = name[len(parent) :]
    return placing.router.takes(relative) is not None or placing.looks_shared(relative)


def _is_listed(placing: Placing, prefix: str, name: str) -> bool:
    """Whether a tensor is wanted, or an error may name it: it looks like shared experts."""
    looks_shared = placing.looks_shared(_after_block(prefix, name))
    return looks_shared or _is_wanted(placing, prefix, name)


def _after_block(prefix: str, name: str) -> str:
    """Return the part of a name after all modules that it has in common with the prefix."""
    module, dot, _ = commonprefix((prefix, name)).rpartition(".")
    return name[len(module + dot) :]


def _place_tensors(opened: Opened, placing: Placing, prefix: str) -> list[str]:
    """Place the wanted tensors; return the names of the others."""
    ignored, parent = [], parent_of(prefix) or ""
    for entry in opened.entries:
        if entry.name.startswith(prefix):
            placing.take(entry, entry.name[len(prefix) :])
        elif _is_wanted(placing, prefix, entry.name):
            relative = entry.name[len(parent) :]
            if not placing.router.note(entry, relative, is_beside=True):
                placing.take(entry, relative)
        else:
            ignored.append(entry.name)
    return ignored


@contextmanager
def _stage_of(layer: FusedMoE) -> Iterator[Stage]:
    """Yield the stage in which tensors are placed, in the sizes that a checkpoint needs.

    It has parameters of its own, or the layer's if experts are in host memory and nothing has been
    loaded into them: then no expert is twice in memory, and an error makes the layer again what it
    was.
    """
    before, held = layer.state, layer.stage().as_held().state
    if before.resident_experts is None or before.initial_seed is None:
        sizes = before.aligned_sizes()
        yield Stage.new(replace(held, sizes=sizes), layer.w13_weight.device)
        return
    try:
        yield Stage(replace(held, given_scales=GivenScales()), layer._parameters)
    except BaseException:
        layer._empty_again(before)
        raise


def _in_forms_of(layer: FusedMoE, stage: Stage) -> Stage:
    """Convert weights to the forms that they have in the layer, unless these are plain.

    New weights that are not exact as fp8 stay plain.
    """
    new, old = stage.state.forms, layer.state.forms
    forms = {which: new[which] if form == PLAIN else form for which, form in old.items()}
    return in_forms(stage, forms) if FP8 not in forms.values() or are_exact(stage) else stage


def _keep_missing(layer: FusedMoE, stage: Stage, placing: Placing) -> None:
    """Copy missing parts from the layer; if the sizes have changed, they stay zeros."""
    if stage.parameters is layer._parameters or layer.sizes.plain != stage.state.sizes:
        return
    plain = in_forms(Stage(layer.state, {**layer._parameters}), {})
    for missing in placing.missing():
        for row in stage.rows_of(missing.expert):
            spec = missing.spec
            old, new = (x.parameters[spec.name].data[row] for x in (plain, stage))
            stage.part(new, spec, missing.shard).copy_(stage.part(old, spec, missing.shard))


def _overwrite_all(layer: FusedMoE, stage: Stage) -> None:
    """Overwrite the parameters in place, so that captured graphs read the new values."""
    held, new_sizes = layer.state, stage.state.sizes
    if held.sizes != new_sizes and held.kernel is not None:
        raise ValueError(
            f"layer.kernel must be set after loading, which changes the scheme to "
            f"{new_sizes.scheme.name}, got a kernel for {held.sizes.scheme.name}"
        )
    own = layer._parameters
    for name in {**parameter_specs(held.sizes), **parameter_specs(new_sizes)}:
        old, new = own.get(name), stage.parameters.get(name)
        if old is new:
            continue
        if old is not None and new is not None and _takes_values(old, new):
            _overwrite(old, new.data)
        elif old is not None and hasattr(old, "device_mesh"):
            got = None if new is None else tuple(new.shape)
            raise NotImplementedError(
                f"{name} must keep its shape {tuple(old.shape)} under fully_shard, got {got}: "
                "load before fully_shard"
            )
        else:
            own[name] = new
    layer.take(Stage(held.holding(stage.state), own))


def _takes_values(old: Tensor, new: Tensor) -> bool:
    """Whether a parameter can hold values. One that was cast, in whatever way, casts them."""
    same = old.dtype == new.dtype or (old.dtype in checks.FLOATS and new.dtype in checks.FLOATS)
    return old.shape == new.shape and same


def _overwrite(parameter: Any, whole: Tensor) -> None:
    """Overwrite a parameter in place, or the part of it that `fully_shard` leaves this rank."""
    if hasattr(parameter, "device_mesh"):
        # Whoever made the parameter has imported this module, which `import torch` does not.
        cut = torch.distributed.tensor.distribute_tensor
        mesh, placements = parameter.device_mesh, parameter.placements
        whole = cut(whole, mesh, placements, src_data_rank=None).to_local()
        parameter = parameter.to_local()
    parameter.data.copy_(whole)


def _set_input_order(layer: FusedMoE, order: Tensor | None) -> None:
    old = layer.w13_input_order
    if old is not None and order is not None and old.shape == order.shape:
        old.copy_(order)
    else:
        layer.w13_input_order = order


def _message(report: LoadReport, prefix: str, ignored: list[str]) -> str:
    """Return the error message, with some names of each kind."""
    parts = []
    for kind in ("missing", "duplicated", "unexpected", "mismatched"):
        names = getattr(report, kind)
        if names:
            parts.append(f"{len(names)} {kind} ({listed(names)})")
    message = f"source must hold this layer exactly, got {'; '.join(parts)}"
    if not report.loaded:
        prefixes = prefixes_of([*ignored, *report.unexpected])
        if prefixes:
            message += f". Nothing was loaded with prefix {prefix!r}: names begin with {prefixes}"
    return message


def _way_out(placing: Placing, ignored: Mapping[str, str]) -> str:
    """Return hints: for plain weights and a layer that is quantized, and for shared experts.

    Args:
        placing: what was found.
        ignored: other names, and for each what comes after the block's prefix.
    """
    unknown, missing = dict(placing.unknown_shared), placing.missing()
    if any(part.expert >= placing.layer.num_experts for part in missing):
        unknown |= {name: x for name, x in ignored.items() if placing.looks_shared(x)}
    hint = shared_hint(placing.layer, unknown)
    if not placing.plain_weights:
        return hint
    name = placing.layer.checkpoint_scheme.name
    return hint + (
        f". {len(placing.plain_weights)} weights are not quantized (such as "
        f"{placing.plain_weights[0]}): pass quantize=True to quantize them to {name}"
    )
