"""Loading transformers models whose experts are quantized, or stay in host memory."""

from __future__ import annotations

import copy
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import cached_file

from moe_ops.integrations import _mxfp4
from moe_ops.integrations._by_expert import by_expert
from moe_ops.integrations._layers import NAME
from moe_ops.integrations._saving import RECORD, read_record
from moe_ops.loading.files import weight_map
from moe_ops.loading.sources import INDEX
from moe_ops.offload.model import put_on_host, resident_counts
from moe_ops.offload.targets import FINDERS
from moe_ops.quantization.chosen import found_in
from moe_ops.residency import parse_amount

FIXED = ("quantization_config", "state_dict", "key_mapping", "variant", "gguf_file")
"""Arguments of transformers that would choose other weights, names or files than the saved ones."""
OF_RANKS = ("tp_plan", "tp_size", "device_mesh", "distributed_config")
"""Arguments of transformers that cut a model over ranks."""
OF_HUB = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code", "code_revision",
)  # fmt: skip
"""Arguments of transformers that say where a configuration is, too."""


def from_pretrained(
    path: Any,
    *,
    auto_class: Any = None,
    resident_experts: float | str | None = None,
    **arguments: Any,
) -> Any:
    """Load a model that was quantized by `moe_ops.quantize_` and saved by ``save_pretrained``.

    Experts stay quantized, and run with ``experts_implementation="moe_ops"``. transformers' own
    ``from_pretrained`` would dequantize a folder in the format of compressed-tensors instead.

    With ``resident_experts`` the experts stay in host memory, as `moe_ops.offload_` puts them
    there, and are never all on the GPU; everything else goes to one device. Then the folder may
    also be one that transformers saved, with experts that are not quantized, in fp8, or in gpt-oss'
    MXFP4, which stays MXFP4. They are loaded one after the other, so that one expert at most is
    twice in host memory. (Transformers loads whole modules that it does not make of single experts,
    and MXFP4 weights that are held as fp8 are converted layer by layer: see the guide.)

    Args:
        path: a folder, or anything else that ``from_pretrained`` of transformers takes.
        auto_class: the class whose ``from_pretrained`` is called; None: ``AutoModelForCausalLM``.
        resident_experts: ``resident`` of `moe_ops.offload_`; None: all experts are on the device.
            With it, ``device_map`` is one device; None: the GPU, if there is one.
        **arguments: its other arguments, such as ``dtype`` and ``device_map``, except those in
            `FIXED` and `OF_RANKS`. ``config`` is copied.

    Returns:
        The model, with quantized experts.

    Raises:
        ValueError: a model that was not saved so; experts that the configuration and the model or
            its files do not share; tensors that are missing; a broken file; another
            ``experts_implementation``; an argument in `FIXED`; a ``device_map`` by which accelerate
            offloads quantized experts; ``resident_experts`` outside its range.
        NotImplementedError: an argument in `OF_RANKS`; ``resident_experts`` with a ``device_map``
            of several devices.
    """
    auto_class = auto_class or transformers.AutoModelForCausalLM
    if resident_experts is not None:
        parse_amount("resident_experts", resident_experts, [])
        device = _one_device(arguments.pop("device_map", None))
        with by_expert(resident_experts, device):
            model = _loaded(path, auto_class, arguments)
        targets = list(found_in(model, FINDERS))
        counts = resident_counts(targets, "resident_experts", resident_experts)
        both = zip(targets, counts, strict=True)
        left = [pair for pair in both if pair[0].host_experts() is None]
        put_on_host(left, device, progress=True)
        return model.to(device)
    return _quantized_model(path, auto_class, arguments)


def _one_device(device_map: Any) -> torch.device:
    """Return the device that a ``device_map`` names.

    Raises:
        NotImplementedError: it does not name one.
    """
    if device_map is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(device_map, dict) and len({*device_map.values()}) == 1:
        device_map = next(iter(device_map.values()))
    is_name = isinstance(device_map, str) and device_map not in ("auto", "balanced", "sequential")
    if is_name or isinstance(device_map, (int, torch.device)):
        return torch.device(device_map)
    raise NotImplementedError(
        f"device_map must be one device with resident_experts, got {device_map!r:.200}"
    )


def _loaded(path: Any, auto_class: Any, arguments: dict[str, Any]) -> Any:
    """Load a model that this library or transformers has saved, on the CPU."""
    config = arguments.get("config")
    if config is None:
        hub = {name: arguments[name] for name in OF_HUB if name in arguments}
        config = transformers.AutoConfig.from_pretrained(path, **hub)
    if not hasattr(config, RECORD) and _mxfp4.is_config(config):
        config = copy.deepcopy(config)
        setattr(config, RECORD, _mxfp4.record_of(config))
        arguments["config"] = config
    if hasattr(config, RECORD):
        return _quantized_model(path, auto_class, arguments)
    _check_arguments(arguments, ())
    return auto_class.from_pretrained(path, **{**arguments, "experts_implementation": NAME})


def _quantized_model(path: Any, auto_class: Any, arguments: dict[str, Any]) -> Any:
    """Load a model that this library has quantized."""
    _check_arguments(arguments, FIXED)
    arguments.pop("experts_implementation", None)
    config = arguments.pop("config", None)
    hub = {name: arguments[name] for name in OF_HUB if name in arguments}
    if config is None:
        config = transformers.AutoConfig.from_pretrained(path, **hub)
    config = copy.deepcopy(config)
    read_record(config)
    config.quantization_config = {"quant_method": NAME}
    try:
        return auto_class.from_pretrained(path, config=config, **arguments)
    except JSONDecodeError:
        _check_index(path, hub)
        raise


def _check_arguments(arguments: dict[str, Any], fixed: tuple[str, ...]) -> None:
    """Check arguments for transformers' ``from_pretrained``; ``fixed`` ones are refused."""
    chosen = arguments.get("experts_implementation")
    if chosen not in (None, NAME):
        raise ValueError(
            f"experts_implementation must be {NAME!r} or left out, because no other runs experts "
            f"that moe_ops.quantize_ has quantized, or that are in host memory, got {chosen!r}"
        )
    for names, error, rule in (
        (fixed, ValueError, "experts are read from the saved files as they are"),
        (OF_RANKS, NotImplementedError, "quantized experts are not cut over ranks here"),
    ):
        for name in names:
            if arguments.get(name) is not None:
                raise error(
                    f"{name} must be left out, because {rule}, got {arguments[name]!r:.200}"
                )


def _check_index(path: Any, hub: dict[str, Any]) -> None:
    """Raise ValueError with the name of a broken index, which transformers' error leaves out."""
    hub = {name: x for name, x in hub.items() if name not in ("trust_remote_code", "code_revision")}
    config = cached_file(path, "config.json", **hub)
    folder = Path(config or path).parent
    if (folder / INDEX).exists():
        weight_map(folder / INDEX)
