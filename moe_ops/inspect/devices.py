"""Known GPUs, so that a layer can be explained on a machine without them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ops import checks
from moe_ops.dispatch.device import Device, device_facts


class Speed(NamedTuple):
    """Best measured rates of a GPU, for a long read and for large dense products."""

    read_bytes_per_s: float
    flops: dict[str, float]
    """FLOP/s by the dtype of the products."""


MEASURED = {
    "NVIDIA H200": Speed(4.67e12, {"bf16": 758e12, "fp8": 1490e12}),
    "NVIDIA H100 80GB HBM3": Speed(3.11e12, {"bf16": 761e12, "fp8": 1449e12}),
}
"""Rates by `torch.cuda.get_device_name`; other GPUs have no estimate of times."""


class TargetDevice(NamedTuple):
    """A device to explain a layer for."""

    name: str
    """``cpu``, or ``sm_90`` and the like."""
    gpu: str | None
    """Name of the GPU that the facts describe."""
    facts: Device | None
    """Facts by which tiles are chosen; None: references run, which have no tiles."""

    @property
    def speed(self) -> Speed | None:
        """Measured rates, or None."""
        return None if self.gpu is None else MEASURED.get(self.gpu)

    def torch_device(self) -> torch.device:
        """A device of the target's type."""
        return torch.device("cpu" if self.facts is None else "cuda")


def _gpu_target(gpu: str, arch: int, shared_memory: int, processors: int) -> TargetDevice:
    return TargetDevice(f"sm_{arch}", gpu, Device(arch, shared_memory, processors, gpu))


TARGETS = {
    target.name: target
    for target in (
        TargetDevice("cpu", None, None),
        _gpu_target("NVIDIA A100", 80, 166912, 108),
        _gpu_target("NVIDIA RTX A6000", 86, 101376, 84),
        _gpu_target("NVIDIA L40S", 89, 101376, 142),
        _gpu_target("NVIDIA H200", 90, 232448, 132),
        _gpu_target("NVIDIA B200", 100, 232448, 148),
        _gpu_target("NVIDIA RTX PRO 6000", 120, 101376, 188),
    )
}
"""Targets by architecture, for each of which one GPU stands."""
GPUS = {
    "a100": TARGETS["sm_80"],
    "a6000": TARGETS["sm_86"],
    "l40s": TARGETS["sm_89"],
    "h100": _gpu_target("NVIDIA H100 80GB HBM3", 90, 232448, 132),
    "h200": TARGETS["sm_90"],
    "b200": TARGETS["sm_100"],
    "rtx_pro_6000": TARGETS["sm_120"],
}
"""Targets by the short names of GPUs."""


def target_named(name: str) -> TargetDevice:
    """The target of an architecture (``sm_90``), of a GPU (``h100``, ``NVIDIA H200``), or ``cpu``.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    targets = {**TARGETS, **GPUS}
    full = {target.gpu: target for target in GPUS.values()}
    if isinstance(name, str) and name in full:
        return full[name]
    plain = str(name).lower().replace(" ", "_")
    if plain not in targets:
        checks.one_of("device", name, list(targets))
    return targets[plain]


def target_of(device: torch.device) -> TargetDevice:
    """The target of a device; an H200 for a CUDA device on a machine without a GPU."""
    if device.type != "cuda":
        return TARGETS["cpu"]
    if not torch.cuda.is_available():
        return TARGETS["sm_90"]
    facts = device_facts(device)
    return TargetDevice(f"sm_{facts.arch}", facts.name, facts)
