"""What a layer holds before anything is loaded: random weights, or nothing if it is quantized."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from warnings import warn

import torch
from torch import Tensor
from torch.nn import init

from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.parameters import ParameterSpec, parameter_specs

LOADED = "_is_hf_initialized"
"""The mark of transformers on parameters that it has loaded; its `torch.nn.init` skips them."""
SEEDS = 2**62
"""Number of seeds that a layer may draw."""
PARAMETERS = 4
"""Number of parameters of an unquantized layer: both weights and both biases."""
OWN = ("moe_ops", "torch")
"""Packages whose frames a warning leaves out."""


def initialize(layer: ExpertLayer, seed: int | None = None) -> int | None:
    """Fill the parameters of an unquantized layer, which hold zeros, with random numbers.

    A quantized layer stays as it is.

    Each projection of each expert, and its bias, is uniform within ``1 / sqrt(fan_in)``, as in
    `torch.nn.Linear`. ``fan_in`` is H of the tokens for gate and up, and I of all ranks for down.
    Padding stays zero, and so does the down bias on all ranks but the first.

    The numbers follow from the logical expert and one seed, which is drawn from torch's generator
    of the parameters' device. So replicas of an expert are equal, and ranks whose generators have
    the same state initialize parts of one layer, however they share it. A distributed tensor (of
    FSDP2) gets its part. Nothing is drawn for tensors without memory.

    Args:
        layer: the layer.
        seed: the seed; None: one is drawn.

    Returns:
        The seed, which makes the same numbers again (quantized: 0); None: the layer has no memory.
    """
    weight = layer.w13_weight
    if not holds_numbers(weight) and not hasattr(weight, "placements"):
        return None
    if layer.sizes.scheme.weight is not None:
        return 0
    if seed is None:
        seed = int(torch.randint(SEEDS, (), device=weight.device))
    for number, (name, spec) in enumerate(parameter_specs(layer.sizes).items()):
        param = getattr(layer, name)
        if getattr(param, LOADED, False):
            continue
        if holds_numbers(param):
            _fill(layer, param, spec, seed + number)
            continue
        whole = torch.zeros(spec.shape, dtype=param.dtype, device=param.device)
        _fill(layer, whole, spec, seed + number)
        layout = (param.device_mesh, param.placements)
        shard = torch.distributed.tensor.distribute_tensor(whole, *layout, src_data_rank=None)
        param.data.copy_(shard)
    return seed


def _fill(layer: ExpertLayer, param: Tensor, spec: ParameterSpec, seed: int) -> None:
    """Draw the whole projections of this rank's experts, and place the rank's part of each."""
    hidden, width = layer.model_hidden_size, layer.intermediate_size
    n, k = (width, hidden) if spec.is_w13 else (hidden, width)
    x = param.data.new_zeros((n,) if spec.kind == "bias" else (n, k))
    first = ("w1", "w3") if layer.sizes.gated else ("w1",)
    generator, bound = torch.Generator(param.device), k**-0.5
    stage = layer.stage().as_held()
    for expert, rows in stage.state.placement.rows.items():
        generator.manual_seed(seed + PARAMETERS * expert)
        for shard in (first if spec.is_w13 else ("w2",)) if rows else ():
            init.uniform_(x, -bound, bound, generator)
            for row in rows:
                stage.place(param, spec, x, shard, row)


def holds_numbers(x: Tensor) -> bool:
    """Whether a tensor has memory of its own: not on meta, fake, distributed or under vmap."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return type(x.data) is Tensor and not x.is_meta


def warn_if_empty(scales: Iterable[Tensor | None]) -> bool:
    """Warn that nothing was loaded into a quantized layer if all of its weights' scales are zeros.

    The host waits for the scales, unless a CUDA graph is being captured.

    Returns:
        Whether a warning was given.
    """
    for scale in scales:
        if scale is None or not scale.numel() or not holds_numbers(scale):
            return False
        if scale.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        # Some formats of one byte lack `any`; larger numbers have no bytes unless K is innermost.
        if (scale.data.view(torch.uint8) if scale.element_size() == 1 else scale.data).any():
            return False
    text = (
        "a quantized FusedMoE runs before anything was loaded into it: all of its scales are zeros "
        "(call moe_ops.load_checkpoint, load_state_dict or the parameters' weight_loader, or "
        "moe_ops.quantize_ on a layer with weights)"
    )
    warn(text, UserWarning, stacklevel=_depth_of_caller())
    return True


def _depth_of_caller() -> int:
    """Return the ``stacklevel`` with which the caller of this function warns the user's code."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in OWN:
        depth, frame = depth + 1, frame.f_back
    return depth
