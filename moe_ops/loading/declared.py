"""What the configuration beside a checkpoint says of its quantized weights.

Some formats have tensors of the same names, shapes and dtypes, such as both 6-bit floats of MX. The
``quantization_config`` of a ``config.json`` tells them apart. What it does not say, or says of a
tool that is not known here, is left to the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_ops.loading.files import read_object
from moe_ops.scheme import WHOLE, Quant

CONFIG = "config.json"
_INTEGERS = {4: ("int4",), 8: ("int8", "uint8")}
_FLOATS = {4: ("fp4",), 8: ("fp8",)}
_MODELOPT = {
    "FP8": "fp8", "FP8_PB_WO": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "MXFP8": "fp8",
    "NVFP4": "fp4", "W4A16_AWQ": "int4", "W4A8_AWQ": "int4",
}  # fmt: skip


class Declared(NamedTuple):
    """The weights of some of a checkpoint's layers."""

    elements: tuple[str, ...]
    """Names of `Element` values, of which the weights have one."""
    cols: int | None = None
    """Columns that share a scale, or `WHOLE`; None: not said."""

    def fits(self, quant: Quant) -> bool:
        """Whether weights of a scheme can be those."""
        return quant.element.name in self.elements and self.cols in (None, quant.group.cols)

    def __str__(self) -> str:
        group = {None: "", WHOLE: " with one scale a row or tensor"}
        return " or ".join(self.elements) + group.get(
            self.cols, f" in groups of {self.cols} columns"
        )


def check_declared(folder: Path | None, quant: Quant | None) -> None:
    """Compare the configuration in a checkpoint's folder with the weights of a layer's scheme.

    Raises:
        ValueError: the configuration is of other weights, or is no JSON object.
    """
    if folder is None or quant is None or not (folder / CONFIG).exists():
        return
    config = read_object(folder / CONFIG, "a model's configuration")
    said = tuple(declared(config))
    if said and not any(one.fits(quant) for one in said):
        raise ValueError(
            f"quant_config must be a scheme with weights as {folder / CONFIG} says, "
            f"{'; or '.join(map(str, said))}, got weights {quant.key}"
        )


def declared(config: Mapping[str, Any]) -> Iterator[Declared]:
    """The kinds of quantized weights that a ``config.json`` speaks of; none: it does not say."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    for holder in (config, inner):
        for key in ("quantization_config", "compression_config"):
            said = holder.get(key)
            if isinstance(said, Mapping):
                # Experts of their own dtype, and rules for single layers, are not looked into.
                if "expert_dtype" in {**config, **inner, **said} or said.get("dynamic"):
                    return
                yield from filter(None, _of_method(said))
                return


def _of_method(said: Mapping[str, Any]) -> Iterator[Declared | None]:
    method = str(said.get("quant_method"))
    if method == "fp8":
        yield _sized(("fp8",), _second(said.get("weight_block_size")))
    elif method == "fbgemm_fp8":
        yield Declared(("fp8",), WHOLE)
    elif method == "mxfp4":
        yield Declared(("fp4",), 32)
    elif method in ("gptq", "awq", "auto-round", "intel/auto-round"):
        yield _sized(_INTEGERS.get(_whole(said.get("bits"))), said.get("group_size"))
    elif method == "modelopt" and said.get("quant_algo") in _MODELOPT:
        yield Declared((_MODELOPT[said["quant_algo"]],))
    elif method == "compressed-tensors":
        groups = said.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            yield _compressed(group.get("weights") if isinstance(group, Mapping) else None)
    elif method == "quark":
        whole = said.get("global_quant_config")
        weight = whole.get("weight") if isinstance(whole, Mapping) else None
        layers = said.get("layer_quant_config")
        if isinstance(weight, Mapping) and not layers:
            yield _quark(weight)


def _whole(number: Any) -> int:
    return number if type(number) is int else 0


def _second(pair: Any) -> Any:
    return pair[1] if isinstance(pair, (list, tuple)) and len(pair) == 2 else None


def _sized(elements: tuple[str, ...] | None, group_size: Any) -> Declared | None:
    if elements is None:
        return None
    known = type(group_size) is int and (group_size > 0 or group_size == WHOLE)
    return Declared(elements, group_size if known else None)


def _compressed(weights: Any) -> Declared | None:
    """The weights of a group of compressed-tensors."""
    if not isinstance(weights, Mapping):
        return None
    by_bits = _FLOATS if weights.get("type") == "float" else _INTEGERS
    elements, strategy = by_bits.get(_whole(weights.get("num_bits"))), weights.get("strategy")
    if strategy in ("tensor", "channel"):
        return _sized(elements, WHOLE)
    if strategy == "block":
        return _sized(elements, _second(weights.get("block_structure")))
    return _sized(elements, weights.get("group_size"))


def _quark(weight: Mapping[str, Any]) -> Declared | None:
    """The weights of Quark's global configuration."""
    names = {"fp8_e4m3": "fp8", "fp4": "fp4", "int4": "int4", "int8": "int8"}
    element = str(weight.get("dtype"))
    element = names.get(element, element)
    if element not in (*names.values(), "fp6_e2m3", "fp6_e3m2"):
        return None
    grouped = weight.get("qscheme") == "per_group"
    return _sized((element,), weight.get("group_size") if grouped else None)
