"""Saving and loading transformers models whose experts `quantize_` has quantized.

A saved model is a folder as transformers writes it. Experts are stored as engines read them, one
tensor for each expert and projection (``mlp.experts.0.gate_proj.weight_packed``), by the names of
the model's plain checkpoints. ``config.json`` has

* ``quantization_config``: that of compressed-tensors, if it expresses all schemes of the model;
  otherwise ``{"quant_method": "moe_ops"}``;
* ``moe_ops``: for each experts module its scheme, and its names in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_ops.integrations import _reach
from moe_ops.integrations._layers import (
    ACCELERATE,
    LAYER,
    NAME,
    new_layer,
    put_layer,
    quantized_layer,
)
from moe_ops.layer import load_checkpoint
from moe_ops.layer.saving import checkpoint_tensors
from moe_ops.loading.compressed import format_of, quantization_config
from moe_ops.loading.names import PROJECTIONS, scaled_experts
from moe_ops.loading.safetensors import SafetensorsFile
from moe_ops.scheme import Scheme, get_scheme

RECORD = "moe_ops"
"""The entry of ``config.json``."""
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Names of projections for models whose plain checkpoints hold all experts in one tensor."""
WRAPPED = ("base_layer", "original_module")
"""Names that PEFT's modules have for the module inside."""


@register_quantization_config(NAME)
class MoeOpsConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model with schemes that only this library knows."""

    def __init__(self, **rest: Any) -> None:
        self.quant_method = NAME  # type: ignore[assignment]


@register_quantizer(NAME)
class MoeOpsQuantizer(HfQuantizer):
    """Saves and loads models whose experts are quantized; calibrated and quantized elsewhere."""

    requires_calibration = True

    def is_serializable(self) -> bool:
        """Return True: `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters are, beside weights that stay as they are."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: `torch.compile` works."""
        return True

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
        """Return the tensors to save, most of them views; describe them in the model's config.

        None stands for the model's ``state_dict()``, of which transformers saves the adapters alone
        after ``model.add_adapter``.
        """
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}
        _check_unwrapped(model)
        record = _record(model)
        _describe(model, record)
        state = {
            name: x for name, x in model.state_dict().items() if f".{LAYER}." not in f".{name}"
        }
        for name, entry in record.items():
            names = entry["projections"]
            layer = quantized_layer(model.get_submodule(name))
            for expert, shard, suffix, x in () if layer is None else checkpoint_tensors(layer):
                state[f"{name}.{expert}.{names[shard]}.{suffix}"] = x
        return state, {}

    def _process_model_before_weight_loading(self, model: Any, **rest: Any) -> Any:
        """Give experts modules layers on ``meta``, for which transformers chooses the devices."""
        self._folder = Path(rest["checkpoint_files"][0]).parent
        if getattr(model.config, RECORD, None) is None:  # such as that of the text model inside
            raise ValueError(
                f"auto_class must make the model that was saved, whose config has an entry "
                f"{RECORD!r}, got {type(model).__name__} with {type(model.config).__name__}"
            )
        record = read_record(model.config)
        _check_modules(record, model)
        _match_files(record, map(Path, rest["checkpoint_files"]))
        for name, entry in record.items():
            experts = model.get_submodule(name)
            put_layer(experts, new_layer(experts, get_scheme(entry["scheme"])))
            # transformers would initialize weights that are gone; some blocks do so for experts.
            for module in (experts, model.get_submodule(name.rpartition(".")[0])):
                module._is_hf_initialized = True
        ours = rf"(^|\.){LAYER}\."
        names = {*record, *(entry["checkpoint"] for entry in record.values())}
        expected = rf"^({'|'.join(map(re.escape, names))})\."
        for attribute, pattern in (("missing", ours), ("unexpected", expected)):
            name = f"_keys_to_ignore_on_load_{attribute}"
            setattr(model, name, {*(getattr(model, name) or ()), pattern})
        return model

    def _process_model_after_weight_loading(self, model: Any, **rest: Any) -> Any:
        """Load the experts from the checkpoint's files."""
        for name, entry in read_record(model.config).items():
            experts = model.get_submodule(name)
            layer: Any = quantized_layer(experts)
            if hasattr(layer, ACCELERATE) and layer.w13_weight.is_meta:
                raise ValueError(
                    "device_map must leave quantized experts on GPUs, or all on the CPU "
                    f"(resident_experts keeps them in host memory), got {name} offloaded"
                )
            if layer.w13_weight.is_meta:  # in host memory, see `by_expert`
                layer._begin()
            else:
                layer.reset_parameters()
            prefix = entry["checkpoint"]
            others = [key for key in experts.state_dict() if not key.startswith(f"{LAYER}.")]
            options: dict[str, Any] = {"prefix": prefix, "progress": False, "strict": not others}
            report = load_checkpoint(layer, self._folder, **options)
            elsewhere = {f"{prefix}.{key}" for key in others}  # loaded by transformers: a norm
            report = report._replace(unexpected=tuple(sorted({*report.unexpected} - elsewhere)))
            if not report.is_complete:
                raise ValueError(
                    f"path must hold the experts of {name} exactly, got missing {report.missing}, "
                    f"duplicated {report.duplicated}, unexpected {report.unexpected}, mismatched "
                    f"{report.mismatched}"
                )
        return model


class _QuantizerOfParts:
    """The ``hf_quantizer`` of a model that has none, but of which parts are quantized.

    `moe_ops.quantize_` sees the part that it is given, and not the model around it, whose
    ``save_pretrained`` asks for this attribute. An attribute of the model itself comes first.
    """

    def __get__(self, model: PreTrainedModel | None, owner: type) -> MoeOpsQuantizer:
        if model is None or next(_quantized(model), None) is None:
            raise AttributeError("hf_quantizer")
        return MoeOpsQuantizer(MoeOpsConfig())


PreTrainedModel.hf_quantizer = _QuantizerOfParts()  # type: ignore[attr-defined]


def other_method(model: nn.Module) -> str:
    """Return the quantization method of another library in a model; empty if there is none."""
    for module in model.modules():
        quantizer = getattr(module, "hf_quantizer", None)
        if quantizer is not None and not isinstance(quantizer, MoeOpsQuantizer):
            return str(quantizer.quantization_config.quant_method)
    return ""


def make_saveable(model: nn.Module) -> None:
    """Let the outermost transformers models in a module save their quantized experts."""
    if isinstance(model, PreTrainedModel):
        model.hf_quantizer = MoeOpsQuantizer(MoeOpsConfig())  # type: ignore[assignment]
        model.is_quantized = True  # type: ignore[assignment]
        return
    for child in model.children():
        make_saveable(child)


def _check_unwrapped(model: nn.Module) -> None:
    """Raise if PEFT has wrapped modules of the model, which changes their names."""
    for name, module in model.named_modules():
        if not module._modules.keys().isdisjoint(WRAPPED):
            raise ValueError(
                "save_pretrained must be called on a quantized model without modules of PEFT "
                "(peft_model.save_pretrained saves the adapters, peft_model.unload() returns the "
                f"model without them), got {type(module).__name__} {name!r}"
            )


def read_record(config: Any) -> dict[str, Any]:
    """Return the entry of a configuration for each experts module."""
    record = getattr(config, RECORD, None)
    if not isinstance(record, dict) or not record:
        raise ValueError(
            f"config must have an entry {RECORD!r}, as save_pretrained writes it for a model that "
            f"moe_ops.quantize_ has quantized, got {record!r}"
        )
    for name, entry in record.items():
        words = entry if isinstance(entry, dict) else {}
        if not all(isinstance(words.get(key), str) for key in ("scheme", "checkpoint")):
            raise ValueError(
                f"config.{RECORD} must have a scheme and a checkpoint for {name}, got {entry!r}"
            )
    return record


def _check_modules(record: dict[str, Any], model: nn.Module) -> None:
    """Check that all experts of a record are experts modules of the model."""
    names = [
        name for name, module in _reach.expert_modules(model, "") if _reach.is_decorated(module)
    ]
    for name in record:
        if name not in names:
            raise ValueError(
                f"config.{RECORD} must name experts modules of the model ({', '.join(names)}), got "
                f"{name!r}"
            )


def _match_files(record: dict[str, Any], files: Iterable[Path]) -> None:
    """Let a record name its experts as the files do, and check that it has all experts in them.

    A folder that was saved with ``save_original_format=False`` has the modules' own names.

    Raises:
        ValueError: quantized experts that the record does not have; a broken file.
    """
    places = {
        experts: f"{file} holds {tensor}"
        for file in files
        for tensor in SafetensorsFile(file).names()
        if (experts := scaled_experts(tensor)) is not None
    }
    for name, entry in record.items():
        if name in places and entry["checkpoint"] not in places:
            entry["checkpoint"] = name
    stored = {entry["checkpoint"] for entry in record.values()}
    for experts, where in places.items():
        if experts not in stored:
            raise ValueError(
                f"config.{RECORD} must have an entry for each experts module that is stored "
                f"quantized, got none for {experts} ({where})"
            )


def _record(model: PreTrainedModel) -> dict[str, Any]:
    """Return the entries of all quantized experts modules."""
    entries = getattr(model.config, RECORD, None) or {}
    record: dict[str, Any] = {}
    for name, experts in _quantized(model):
        names = entries.get(name, {}).get("projections") or _projections(model, name, experts)
        layer: Any = quantized_layer(experts)
        stored = _stored_name(model, f"{name}.0.{names['w2']}.weight_scale").rsplit(".", 3)[0]
        record[name] = {
            "scheme": layer.checkpoint_scheme.key,
            "checkpoint": stored,
            "projections": names,
        }
    return record


def _quantized(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if quantized_layer(module) is not None:
            yield name, module


def _projections(model: PreTrainedModel, name: str, experts: Any) -> dict[str, str]:
    """Return the names of projections in the model's plain checkpoints, by shard.

    transformers converts a plain tensor of all experts that names each projection by a number.
    """
    layer: Any = quantized_layer(experts)
    shards = ("w1", "w3", "w2") if layer.sizes.gated else ("w1", "w2")
    numbers = torch.arange(len(shards), dtype=torch.float32, device="cpu")
    numbers = numbers.expand(layer.num_experts, -1)[..., None].clone()
    parts = (("gate_up_proj" if layer.sizes.gated else "up_proj", numbers[:, :-1]),
             ("down_proj", numbers[:, -1:]))  # fmt: skip
    plain = {f"{name}.{key}": x.mT if experts.is_transposed else x for key, x in parts}
    try:
        plain = revert_weight_conversion(model, plain)
    except ValueError:  # it needs other modules too: Ernie 4.5 VL stores text and vision as one
        plain = {}
    projections: dict[str, str] = {}
    for key, x in plain.items():
        match = re.search(r"\.0\.(\w+)\.weight$", key)
        if match and x.numel() == 1 and match[1] in PROJECTIONS:
            projections[shards[int(x)]] = match[1]
    if len(projections) == len(shards):
        return projections
    return NAMES if layer.sizes.gated else {"w1": NAMES["w3"], "w2": NAMES["w2"]}


def _stored_name(model: PreTrainedModel, name: str) -> str:
    """Return the name of a tensor in the model's checkpoints."""
    (stored,) = revert_weight_conversion(model, {name: torch.zeros(1, device="cpu")})
    return str(stored)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names in the checkpoint of all modules with a matrix that are not experts."""
    weights = {
        f"{name}.weight": torch.empty_like(module.weight, device="meta")
        for name, module in model.named_modules()
        if (weight := module._parameters.get("weight")) is not None and weight.dim() == 2
    }
    return [key.removesuffix(".weight") for key in revert_weight_conversion(model, weights)]


def _describe(model: PreTrainedModel, record: dict[str, Any]) -> None:
    """Write the entries of ``config.json``."""
    groups: dict[Scheme, list[str]] = {}
    for entry in record.values():
        groups.setdefault(get_scheme(entry["scheme"]), []).append(_pattern(entry["checkpoint"]))
    setattr(model.config, RECORD, record)
    model.config.quantization_config = {"quant_method": NAME}
    if all(map(format_of, groups)):
        plain = [name for name, _ in _reach.expert_modules(model, "") if name not in record]
        ignored = [_pattern(_stored_name(model, f"{name}.0").removesuffix(".0")) for name in plain]
        if len(groups) == 1:
            groups = {scheme: ["Linear"] for scheme in groups}
        config = quantization_config(groups, [*_linear_layers(model), *ignored])
        model.config.quantization_config = config


def _pattern(name: str) -> str:
    """Return the pattern of compressed-tensors for everything inside a module."""
    return rf"re:{re.escape(name)}\..*"
