"""What a checkpoint's ``config.json`` says of its quantized weights.

Some formats have tensors of the same names, shapes and dtypes, such as both 6-bit floats of MX; the
``quantization_config`` tells them apart. Anything it does not say, or says of an unknown tool, is
decided by the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
_QUARK = {
    "fp8_e4m3": "fp8", "fp4": "fp4", "int4": "int4", "fp6_e2m3": "fp6_e2m3", "fp6_e3m2": "fp6_e3m2",
}  # fmt: skip


class Declared(NamedTuple):
    """The weights of some of a checkpoint's layers."""

    elements: tuple[str, ...]
    """Names of the `Element` values that the weights may have."""
    cols: int | None = None
    """Columns that share a scale, or `WHOLE`; None: not said."""

    def fits(self, quant: Quant) -> bool:
        """Whether these may be the weights of a scheme."""
        return quant.element.name in self.elements and self.cols in (None, quant.group.cols)

    def __str__(self) -> str:
        groups = {None: "", WHOLE: " with one scale a row or tensor"}
        groups.setdefault(self.cols, f" in groups of {self.cols} columns")
        return " or ".join(self.elements) + groups[self.cols]


def check_declared(folder: Path | None, quant: Quant | None) -> None:
    """Compare the configuration in a checkpoint's folder with the weights of a layer's scheme.

    Raises:
        ValueError: the configuration says other weights, or is not a JSON object.
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
    """Yield the kinds of quantized weights that a ``config.json`` names; none: it does not say."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    for holder in (config, inner):
        for key in ("quantization_config", "compression_config"):
            said = holder.get(key)
            if isinstance(said, Mapping):
                # Dtypes of experts and rules for single layers are not read: the tensors decide.
                if "expert_dtype" in {**config, **inner, **said} or said.get("dynamic"):
                    return
                yield from filter(None, _of_method(said))
                return


def _of_method(said: Mapping[str, Any]) -> Iterable[Declared | None]:
    method = str(said.get("quant_method"))
    if method in ("gptq", "awq", "auto-round", "intel/auto-round"):
        return [_of_bits(said)]
    if method == "modelopt":
        algorithm = _MODELOPT.get(str(said.get("quant_algo")))
        return [Declared((algorithm,)) if algorithm else None]
    if method == "compressed-tensors":
        groups = said.get("config_groups")
        groups = groups.values() if isinstance(groups, Mapping) else ()
        return [_compressed(group["weights"]) for group in groups if _has(group, "weights")]
    if method == "quark":
        return [_quark(said)]
    fixed = {
        "fp8": _sized(("fp8",), _second(said.get("weight_block_size"))),
        "fbgemm_fp8": Declared(("fp8",), WHOLE),
        "mxfp4": Declared(("fp4",), 32),
    }
    return [fixed.get(method)]


def _has(holder: Any, key: str) -> bool:
    """Whether ``holder`` maps ``key`` to a mapping."""
    return isinstance(holder, Mapping) and isinstance(holder.get(key), Mapping)


def _whole(number: Any) -> int:
    return number if type(number) is int else 0


def _second(pair: Any) -> Any:
    return pair[1] if isinstance(pair, (list, tuple)) and len(pair) == 2 else None


def _sized(elements: tuple[str, ...] | None, group_size: Any) -> Declared | None:
    if elements is None:
        return None
    known = type(group_size) is int and (group_size > 0 or group_size == WHOLE)
    return Declared(elements, group_size if known else None)


def _of_bits(said: Mapping[str, Any]) -> Declared | None:
    """Return the weights of GPTQ, AWQ and AutoRound; AutoRound also writes MX formats."""
    if said.get("data_type", "int") != "int":
        return None
    return _sized(_INTEGERS.get(_whole(said.get("bits"))), said.get("group_size"))


def _compressed(weights: Mapping[str, Any]) -> Declared | None:
    """Return the weights of one group of compressed-tensors."""
    by_bits = _FLOATS if weights.get("type") == "float" else _INTEGERS
    elements, strategy = by_bits.get(_whole(weights.get("num_bits"))), weights.get("strategy")
    if strategy in ("tensor", "channel"):
        return _sized(elements, WHOLE)
    if strategy == "block":
        return _sized(elements, _second(weights.get("block_structure")))
    return _sized(elements, weights.get("group_size"))


def _quark(said: Mapping[str, Any]) -> Declared | None:
    """Return the weights of Quark's global configuration, unless single layers have their own."""
    if not _has(said.get("global_quant_config"), "weight") or said.get("layer_quant_config"):
        return None
    weight = said["global_quant_config"]["weight"]
    element = _QUARK.get(str(weight.get("dtype")))
    grouped = weight.get("qscheme") == "per_group"
    size = weight.get("group_size") if grouped else None
    return _sized((element,), size) if element else None
