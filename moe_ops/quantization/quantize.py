"""`quantize_`: the experts of a model, layer by layer, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from moe_ops import checks
from moe_ops.quantization.chosen import Modules, found_in, targets_chosen, with_progress
from moe_ops.quantization.peaks import Peaks
from moe_ops.quantization.targets import FINDERS, Target
from moe_ops.scheme import Scheme, as_scheme

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def quantize_(
    model: ModelT,
    scheme: str | Scheme,
    *,
    modules: Modules | None = None,
    calibrate: Callable[[ModelT], Any] | None = None,
    progress: bool = True,
) -> ModelT:
    """Quantize the experts of a model in place, layer by layer.

    Experts are the ones of transformers models that `moe_ops.integrations.transformers` runs, and
    `FusedMoE` layers in any module (or the module itself). Everything else stays as it is:
    attention, routers, shared experts, embeddings.

    Every expert's projections are quantized as `load_checkpoint` with ``quantize=True`` does, bit
    for bit. Memory is needed for the weights of one layer twice, on the device that they are on.
    All modules are checked first; what cannot be quantized raises before anything is changed.

    A quantized transformers model runs with ``experts_implementation="moe_ops"``, which is set
    here; any other implementation raises. `save_pretrained` writes the model, and
    `moe_ops.integrations.transformers.from_pretrained` reads it. A quantized `FusedMoE` is one
    that was constructed with ``scheme=scheme``.

    Args:
        model: a transformers model, a part of one, or any `torch.nn.Module` that holds experts.
            ``save_pretrained`` of a model writes the quantized experts of its parts too.
        scheme: a name, a key or a `Scheme`.
        modules: which experts modules; None: all. A name as in ``named_modules``, a pattern of
            `fnmatch`, several of these, or a function of name and module.
        calibrate: a function of the model that runs it on typical data, for schemes with static
            activation scales (``fp8_tensor_static``, ``mxfp4_w4a8``, ``nvfp4``); other schemes
            take none. The largest inputs of both GEMMs of each layer, over everything that it
            runs, set the scales. Such as ``lambda model: model(**batch)``. Compiled models run
            eagerly meanwhile.
        progress: show a progress bar on stderr, if tqdm is installed.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument of another type.
        ValueError: a model without experts; a pattern that fits none; an unknown scheme; weights
            that are quantized already, on ``meta`` or not finite; a scheme with static scales
            without ``calibrate``, or another scheme with it; a layer that ``calibrate`` does not
            run.
        NotImplementedError: experts of another kind, or spread over ranks; blocks of several rows
            in experts whose gate and up rows alternate.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    checks.flags(progress=progress)
    scheme = as_scheme(scheme)
    if scheme.weight is None:
        raise ValueError(f"scheme must quantize weights, got {scheme.name!r}")
    _check_calibrate(calibrate, scheme)
    targets = targets_chosen(list(targets_of(model)), modules)
    for target in with_progress(targets, "checking", progress=progress):
        target.check(scheme)
    scales = _calibrated(model, targets, scheme, calibrate)
    pairs = list(zip(targets, scales, strict=True))
    for target, peaks in with_progress(pairs, "quantizing", progress=progress):
        target.quantize(scheme, peaks)
    kinds: list[type[Target]] = list({type(target): None for target in targets})
    for kind in kinds:
        kind.finish(model)
    return model


def targets_of(model: nn.Module) -> Iterator[Target]:
    """Yield what has experts in a model, in the order of ``named_modules``."""
    return found_in(model, FINDERS)


def _check_calibrate(calibrate: Any, scheme: Scheme) -> None:
    if calibrate is not None and not callable(calibrate):
        raise TypeError(f"calibrate must be a function or None, got {type(calibrate).__name__}")
    if scheme.input_scale_names and calibrate is None:
        raise ValueError(
            f"calibrate must be a function that runs the model, since {scheme.name} has static "
            "activation scales (such as calibrate=lambda model: model(**batch)), got None"
        )
    if not scheme.input_scale_names and calibrate is not None:
        raise ValueError(
            f"calibrate must be None for {scheme.name}, which has no static activation scales"
        )


def _calibrated(
    model: Any, targets: list[Target], scheme: Scheme, calibrate: Callable[[Any], Any] | None
) -> list[tuple[float, float] | None]:
    """Return the input scales of each target; None where the scheme has none."""
    if calibrate is None:
        return [None] * len(targets)
    peaks = [Peaks() for _ in targets]
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for target, seen in zip(targets, peaks, strict=True):
            stack.enter_context(target.observed(seen))
        calibrate(model)
    return [seen.input_scales(t.name, scheme) for t, seen in zip(targets, peaks, strict=True)]
