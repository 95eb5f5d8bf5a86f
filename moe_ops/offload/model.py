"""`offload_`: the experts of a model in host memory, layer by layer, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from moe_ops import checks
from moe_ops.offload.targets import FINDERS, HostTarget
from moe_ops.quantization.chosen import Modules, found_in, targets_chosen, with_progress
from moe_ops.residency import OffloadStats, parse_amount
from moe_ops.residency.host import check_host_room

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def offload_(
    model: ModelT,
    *,
    resident: float | str,
    modules: Modules | None = None,
    progress: bool = True,
) -> ModelT:
    """Put the experts of a model in host memory, in place; each layer has some on its device, too.

    Results have the bits of the model with all experts on the device. Which experts are on the
    device is decided there, by what tokens want: the one that was used longest ago makes room. The
    host waits for nothing, so `torch.compile` and CUDA graphs work. A call that wants more experts
    of a layer than there is room for runs them in waves.

    Experts are in transformers models that `moe_ops.integrations.transformers` runs, and in
    `FusedMoE` layers of any module (or the module itself). Call this last: after `quantize_`, PEFT
    and ``adapt``, and before `torch.compile` and the capture of CUDA graphs. Parameters and state
    dicts keep their names and hold all experts; they are on the host, in pinned memory if the
    device is a GPU, and ``model.to()`` leaves them there. They no longer require grad: a backward
    pass raises. Adapters (`ExpertLora`, PEFT) stay on the device.

    All modules are checked first; what cannot be moved raises before anything is changed. Memory
    is needed for one layer twice. On a GPU the rest of the model is best moved there afterwards, so
    that its experts never are: ``offload_(model, ..).to("cuda")``.

    Args:
        model: a transformers model, a part of one, or any `torch.nn.Module` that holds experts.
        resident: experts of each layer on the device: an int from ``top_k`` to E; a float in
            (0, 1], the share of E (at least ``top_k``); or a number of gigabytes such as ``"20GB"``
            (1e9 bytes) for the experts on the device of all layers, with scales and biases. All
            of them: the layer is as without this call, and costs nothing.
        modules: which experts modules; None: all. A name as in ``named_modules``, a pattern of
            `fnmatch`, several of these, or a function of name and module.
        progress: show a progress bar on stderr, if tqdm is installed.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument of another type.
        ValueError: ``resident`` outside its range; a model without experts; a pattern that fits
            none; experts on ``meta``.
        NotImplementedError: experts of a kind that cannot be in host memory, such as layers with
            ``enable_eplb``, or whose ranks exchange tokens.
        RuntimeError: too little host memory, or CUDA cannot register it. The message has both
            numbers, and the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    checks.flags(progress=progress)
    _refuse_engines(model)
    targets = targets_chosen(list(found_in(model, FINDERS)), modules)
    put_on_host(
        [*zip(targets, resident_counts(targets, "resident", resident), strict=True)],
        None,
        progress=progress,
    )
    return model


def resident_counts(targets: Sequence[HostTarget], name: str, resident: float | str) -> list[int]:
    """Check what `offload_` checks, and return how many experts of each module are resident.

    Args:
        targets: the modules.
        name: the name of the argument ``resident`` in errors.
        resident: see `offload_`.
    """
    for target in targets:
        target.check()
    return parse_amount(name, resident, [target.amount() for target in targets])


def put_on_host(
    pairs: Sequence[tuple[HostTarget, int]], device: torch.device | None, *, progress: bool
) -> None:
    """Do what `offload_` does with modules that were chosen.

    Args:
        pairs: the modules, and how many experts of each are resident: see `resident_counts`.
        device: the device on which experts run; None: where they are.
        progress: see `offload_`.
    """
    if not pairs:
        return
    for target, _ in pairs:
        if any(x.is_meta for x in target.module.parameters()):
            raise ValueError(
                f"model.{target.name} must hold numbers, got parameters on meta (a device_map that "
                "offloads to the CPU or the disk leaves them there; load onto one device)"
            )
    _check_memory(pairs)
    done: list[tuple[HostTarget, int | None, torch.device]] = []
    try:
        for target, count in with_progress(pairs, "moving", progress=progress):
            host, own = target.host_experts(), target.device()
            done.append((target, None if host is None else host.residency.num_slots, own))
            target.put(count, device or own)
    except BaseException:  # the module that failed is as it was
        for target, before, own in done[:-1][::-1]:
            target.put(before, own)
        raise


def _refuse_engines(model: nn.Module) -> None:
    """Raise NotImplementedError for a model of vLLM, whose weights vLLM loads and moves."""
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "vllm":
            raise NotImplementedError(
                "model must not be one of vLLM, whose own offloader moves weights "
                f"(cpu_offload_gb), got {type(module).__name__} {name!r}"
            )


def _check_memory(pairs: Sequence[tuple[HostTarget, int]]) -> None:
    """Raise RuntimeError if the host has too little memory for what is on GPUs, or for one copy."""
    sizes = {
        target: amount.num_experts * amount.expert_bytes
        for target, count in pairs
        if count < (amount := target.amount()).num_experts
    }
    on_gpu = sum(size for target, size in sizes.items() if _is_on_gpu(target.module))
    check_host_room(max(on_gpu, max(sizes.values(), default=0)))


def _is_on_gpu(module: nn.Module) -> bool:
    return any(x.is_cuda for x in module.parameters())


def offload_stats(model: nn.Module) -> OffloadStats:
    """Return hits, misses, copied bytes and waves of all experts in host memory of a model.

    The host waits for nothing: the device may be ahead of, or behind, what it has counted.

    Args:
        model: any module.

    Returns:
        The sums since `offload_`; zeros if no experts are in host memory.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    hosts: list[Any] = [target.host_experts() for target in found_in(model, FINDERS)]
    stats = [host.residency.stats() for host in hosts if host is not None]
    return OffloadStats(*(sum(x[i] for x in stats) for i in range(len(OffloadStats._fields))))
