"""What the configurations of quantization tools say about the experts of one layer.

A reader takes the configuration and the names of the experts, and returns their `Facts`; None: it
says nothing about weights. It raises `UnreadError` with the end of the sentence "must say ..".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from moe_ops.loading.facts import Facts, UnreadError
from moe_ops.loading.names import CheckpointLayout
from moe_ops.loading.operands import Settings, integers, named, operands, pair
from moe_ops.loading.patterns import ExpertNames, exact, parts, strings
from moe_ops.scheme.values import ELEMENTS

PLAIN = Facts()
PLAIN_DTYPES = ("bf16", "bfloat16", "fp16", "float16", "fp32", "float32")
LEFT_OUT = (
    "modules_to_not_convert", "modules_to_not_quantize", "ignored_layers", "ignore",
    "exclude_modules", "exclude", "llm_int8_skip_modules",
)  # fmt: skip
"""Names that tools have for the list of modules that are not quantized."""
SKIPPED = "-:"
"""How GPTQ begins a pattern of modules that are not quantized."""


def read_settings(method: Any, settings: Any, names: ExpertNames) -> Facts | None:
    """Return what the configuration of a tool says about some experts.

    Args:
        method: the ``quant_method``; None: what the entries of the configuration show.
        settings: the configuration.
        names: the names of the experts.

    Raises:
        UnreadError: an unknown tool, or something that is not understood.
        ValueError: words of integers in an order that loading does not know.
    """
    if not isinstance(settings, Mapping):
        raise UnreadError("an object")
    if method is None:
        method = "modelopt" if {"quant_algo", "quantization"} & {*settings} else None
        method = "compressed-tensors" if method is None and "config_groups" in settings else method
    if method == "compressed-tensors":  # a name there stands for one module alone
        return _compressed_tensors(settings, names)
    settings = _mapping(settings, "quantization") or settings
    if names.are_matched(parts(tuple(x for key in LEFT_OUT for x in strings(settings.get(key))))):
        return PLAIN
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise UnreadError("a quant_method that is known")
    return reader(settings, names)


def with_expert_dtype(facts: Facts | None, dtype: Any) -> Facts:
    """Return the facts of a model with an ``expert_dtype`` (DeepSeek-V4) beside its fp8 weights."""
    element = None if facts is None or facts.weight is None else facts.weight.element.name
    if element in (None, "fp8") and dtype in ("fp4", "mxfp4"):
        return named("mxfp4_w4a16")
    if element in (None, "fp8") and dtype in PLAIN_DTYPES:
        return PLAIN
    if facts is None or element != dtype:
        raise UnreadError(f"an expert_dtype that is known and fits the rest, got {dtype!r}")
    return facts


def _mapping(settings: Settings, key: str) -> Settings:
    """Return an entry, which may be absent."""
    entry = settings.get(key)
    if entry is not None and not isinstance(entry, Mapping):
        raise UnreadError(f"{key} as an object")
    return entry or {}


def _own_entry(settings: Settings, names: ExpertNames) -> Settings:
    """Return the first entry whose key names these experts in an object with keys for modules.

    Modules with equal entries count as one list: there may be an entry for each projection.
    """
    modules: dict[str, list[str]] = {}
    for name, entry in settings.items():
        modules.setdefault(repr(entry), []).append(name)
    for listed in modules.values():
        if names.are_matched(parts(tuple(listed))):
            return _mapping(settings, listed[0])
    return {}


def _fp8(settings: Settings, names: ExpertNames) -> Facts:
    """DeepSeek's and transformers' fp8."""
    block = settings.get("weight_block_size")
    if not block:
        static = settings.get("activation_scheme") == "static"
        return named("fp8_tensor_static" if static else "fp8_tensor")
    rows, cols = pair(block)
    suffix = "_ue8m0" if settings.get("scale_fmt") == "ue8m0" else ""
    return named(f"fp8_block{rows}x{cols}{suffix}")


def _gptq(settings: Settings, names: ExpertNames) -> Facts:
    quantized = strings(settings.get("modules_in_block_to_quantize"))
    own = _own_entry(_dynamic(settings), names)
    if SKIPPED in own or (quantized and not names.are_matched(parts(quantized))):
        return PLAIN
    settings = {**settings, **own}
    version = str(settings.get("checkpoint_format") or settings.get("format") or "").lower()
    versions = {"": None, "gptq": True, "gptq_v2": False}
    if version not in versions or settings.get("is_marlin_format"):
        raise ValueError(f"checkpoint_format must be gptq or gptq_v2, got {version or 'marlin'!r}")
    layout = CheckpointLayout(awq=False, zeros_plus_one=versions[version])
    zero_point = not settings.get("sym", True)
    return integers(
        settings.get("bits"), settings.get("group_size"), zero_point=zero_point, layout=layout
    )


def _dynamic(settings: Settings) -> dict[str, Settings]:
    """Return GPTQ's rules for modules by regular expression."""
    return {
        f"re:{pattern.removeprefix(SKIPPED).removeprefix('+:')}": (
            {SKIPPED: True} if pattern.startswith(SKIPPED) else changes
        )
        for pattern, changes in _mapping(settings, "dynamic").items()
    }


def _awq(settings: Settings, names: ExpertNames) -> Facts:
    """AutoAWQ, by the names of its own file too."""
    versions = map(settings.get, ("version", "checkpoint_format", "format"))
    version = next(filter(None, versions), "gemm")
    if str(version).lower() != "gemm":
        raise ValueError(
            f"version must be gemm, the only order of AWQ that is known, got {version!r}"
        )
    bits, group_size = settings.get("w_bit", settings.get("bits")), settings.get("q_group_size")
    group_size = settings.get("group_size") if group_size is None else group_size
    zero_point, layout = bool(settings.get("zero_point", True)), CheckpointLayout(awq=True)
    return integers(bits, group_size, zero_point=zero_point, layout=layout)


def _auto_round(settings: Settings, names: ExpertNames) -> Facts:
    blocks = strings(settings.get("block_name_to_quantize", settings.get("to_quant_block_names")))
    if blocks and not names.are_matched(parts(blocks)):
        return PLAIN
    settings = {**settings, **_own_entry(_anywhere(_mapping(settings, "extra_config")), names)}
    bits, group_size, acts = (settings.get(key) for key in ("bits", "group_size", "act_bits"))
    if bits in (16, 32):
        return PLAIN
    small_floats = {"mx_fp": ("mxfp4_w4a16", "mxfp4"), "nv_fp": ("nvfp4_w4a16", "nvfp4")}
    schemes = small_floats.get(str(settings.get("data_type"))[:5])
    if schemes is not None and bits == 4 and acts in (None, 4, 16):
        return _with_group(named(schemes[acts == 4]), group_size)
    if settings.get("data_type", "int") != "int" or acts not in (None, 16):
        raise UnreadError("a data_type and act_bits that are known")
    symmetric = bool(settings.get("sym", True))
    layout = _packing(str(settings.get("packing_format", "")), symmetric=symmetric)
    return integers(bits, group_size, zero_point=not symmetric, layout=layout)


def _anywhere(settings: Settings) -> Settings:
    """Return AutoRound's entries for modules; its expressions may match in the middle of a name."""
    is_regex = re.compile(r"[*+?^$()\[\]{}|\\]").search
    return {
        f"re:.*(?:{name})" if is_regex(name) else name: entry for name, entry in settings.items()
    }


def _packing(packing: str, *, symmetric: bool) -> CheckpointLayout:
    """Return the layout by AutoRound's name for it.

    The plain name stores zero points of asymmetric weights as they are. It may mean either version
    for symmetric ones. Without a name nothing is known.
    """
    if "awq" in packing:
        return CheckpointLayout(awq=True)
    if "gptq" in packing:
        return CheckpointLayout(awq=False, zeros_plus_one=True)
    if packing == "auto_round":
        return CheckpointLayout(awq=False, zeros_plus_one=None if symmetric else False)
    if packing in ("", "auto"):
        return CheckpointLayout()
    raise ValueError(f"packing_format must be AWQ's, GPTQ's or auto_round, got {packing!r}")


def _with_group(facts: Facts, group_size: Any) -> Facts:
    """Check that the group size of a named scheme is that of the file, if it says one."""
    cols = None if facts.weight is None else facts.weight.shared_cols
    if cols is not None and group_size not in (None, cols):
        raise UnreadError(f"a group_size of {cols}")
    return facts


_MODELOPT = {
    "FP8": "fp8_tensor_static", "FP8_PB_WO": "fp8_w8a16_block128",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel", "MXFP8": "mxfp8", "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4_w4a16", "NVFP4_W4A16": "nvfp4_w4a16", "W4A8_MXFP4_FP8": "mxfp4_w4a8",
    "W4A16_MXFP4": "mxfp4_w4a16", "W8A16": "int8_w8a16", "UNQUANTIZED": "unquantized",
    "W4A16_AWQ": "int4_w4a16_g{}", "W4A8_AWQ": "int4_w4a8_g{}",
}  # fmt: skip
"""Schemes of ModelOpt's algorithms."""


def _modelopt(settings: Settings, names: ExpertNames) -> Facts | None:
    """ModelOpt, in its own file or in ``config.json``.

    With mixed precision an object has an algorithm for each module that is quantized, or groups
    have them. Otherwise there is one algorithm, for the targets of the groups if there are groups.
    """
    layers, groups = _mapping(settings, "quantized_layers"), _mapping(settings, "config_groups")
    group, own = _group_of(groups, names) if groups else None, _own_entry(layers, names)
    if group is None and not own and (groups or layers):
        return PLAIN
    mixed = settings.get("quant_algo", "MIXED_PRECISION") == "MIXED_PRECISION"
    chosen = own or (group if mixed and group else settings)
    if "quant_algo" not in chosen and "weights" in chosen:
        return _of_group(chosen)
    algorithm, size = chosen.get("quant_algo"), chosen.get("group_size")
    if algorithm is None and "quant_algo" in chosen:
        return None  # keys and values alone are quantized
    name = _MODELOPT.get(algorithm) if isinstance(algorithm, str) else None
    if name is None:
        raise UnreadError("a quant_algo that is known")
    facts = _with_group(named(name.format(size or 128)), size)
    if group and group.get("input_activations", group) is None:
        return Facts(facts.weight)
    return facts


def _compressed_tensors(settings: Settings, names: ExpertNames) -> Facts:
    if names.are_matched(exact(strings(settings.get("ignore")))):
        return PLAIN
    groups, form = settings.get("config_groups"), str(settings.get("format"))
    if not isinstance(groups, Mapping) or "sparse" in form or "24" in form:
        raise UnreadError("config_groups, and a format without sparsity")
    group = _group_of(groups, names)
    return PLAIN if group is None else _of_group(group)


_CLASSES = (("FusedMoE", "RoutedExperts"), ("Linear", "LinearBase"))
"""Classes of modules that hold experts, in the order of preference; Linear: of projections."""


def _group_of(groups: Settings, names: ExpertNames) -> Settings | None:
    """Return the group that targets the experts: by whole names, else patterns, else classes."""
    targets: list[tuple[Settings, tuple[str, ...]]] = []
    for key in groups:
        group = _mapping(groups, key)
        targets.append((group, strings(group.get("targets", ["Linear"]))))
    for is_pattern in (False, True):
        for group, targeted in targets:
            chosen = tuple(name for name in targeted if name.startswith("re:") is is_pattern)
            if names.are_matched(exact(chosen)):
                return group
    for classes in _CLASSES:
        for group, targeted in targets:
            if not set(classes).isdisjoint(targeted):
                return group
    unknown = [
        t for _, targeted in targets for t in targeted if "Expert" in t or "MoE" in t or "Moe" in t
    ]
    if unknown:
        raise UnreadError(f"targets that are known, got {unknown}")
    return None


def _of_group(group: Settings) -> Facts:
    return operands(_mapping(group, "weights"), _mapping(group, "input_activations"))


_QUARK = {
    "fp8_e4m3": "fp8", "fp4": "fp4", "int8": "int8", "int4": "int4",
    "fp6_e2m3": "fp6_e2m3", "fp6_e3m2": "fp6_e3m2",
}  # fmt: skip
_STRATEGIES = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group"}


def _quark(settings: Settings, names: ExpertNames) -> Facts:
    config = _own_entry(_mapping(settings, "layer_quant_config"), names)
    config = config or _mapping(_mapping(settings, "layer_type_quant_config"), "Linear")
    config = config or _mapping(settings, "global_quant_config")
    weight, inputs = _mapping(config, "weight"), _mapping(config, "input_tensors")
    return operands(_quark_operand(weight), _quark_operand(inputs) if inputs else {})


def _quark_operand(settings: Settings) -> Settings:
    """Return an operand of Quark in the words of compressed-tensors."""
    element = _QUARK.get(str(settings.get("dtype")))
    strategy = _STRATEGIES.get(str(settings.get("qscheme")))
    if element is None or strategy is None:
        raise UnreadError("a dtype and qscheme that are known")
    dynamic = settings.get("is_dynamic", False)
    operand = {"element": element, "strategy": strategy, "dynamic": dynamic}
    if strategy == "group":
        operand["group_size"] = settings.get("group_size")
    if not ELEMENTS[element].exponent:
        operand["symmetric"] = settings.get("symmetric")
    return operand


def _moe_ops(settings: Settings, names: ExpertNames) -> Facts:
    """This library's own: a scheme for each experts module that is quantized.

    Files have its name in the plain checkpoint, or its own (``save_original_format=False``).
    """
    for name, entry in settings.items():
        stored = entry.get("checkpoint") if isinstance(entry, Mapping) else None
        if isinstance(stored, str) and names.are_matched(exact((stored, name))):
            return named(str(entry.get("scheme")))
    return PLAIN


_READERS: dict[str, Callable[[Settings, ExpertNames], Facts | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda settings, names: named("fp8_channel"),
    "mxfp4": lambda settings, names: named("mxfp4_w4a16"),
    "gptq": _gptq,
    "awq": _awq,
    **dict.fromkeys(("auto-round", "auto_round", "intel/auto-round"), _auto_round),
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), _modelopt),
    "quark": _quark,
    "moe_ops": _moe_ops,
}
