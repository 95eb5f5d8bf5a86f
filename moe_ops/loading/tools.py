"""What the configurations of quantization tools say about the experts of one layer.

A reader takes the configuration and the names of the experts. It returns their `Facts`, or raises
`Unread` with the end of the sentence "must say ..".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moe_ops.loading.compressed import INTEGERS
from moe_ops.loading.facts import Facts, Unread
from moe_ops.loading.names import CheckpointLayout
from moe_ops.loading.patterns import ExpertNames, exact, parts, strings
from moe_ops.scheme import WHOLE, Group, Quant, Scheme, get_scheme
from moe_ops.scheme.values import ELEMENTS

Said = Mapping[str, Any]
TENSOR, ROW = Group(WHOLE, WHOLE), Group(1, WHOLE)
PLAIN = Facts()
LEFT_OUT = "-:"
"""How GPTQ marks the pattern of modules that are not quantized."""
PLAIN_DTYPES = ("bf16", "bfloat16", "fp16", "float16", "fp32", "float32")


def read(method: Any, said: Said, names: ExpertNames) -> Facts:
    """Return what the configuration of a tool says about some experts.

    Args:
        method: the ``quant_method``.
        said: the configuration.
        names: the names of the experts.

    Raises:
        Unread: an unknown tool, or something that is not understood.
        ValueError: words of integers in an order that loading does not know.
    """
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise Unread("a quant_method that is known")
    return reader(said, names)


def with_expert_dtype(facts: Facts | None, dtype: Any) -> Facts:
    """Return the facts of a model with an ``expert_dtype`` (DeepSeek-V4) beside its fp8 weights."""
    element = None if facts is None or facts.weight is None else facts.weight.element.name
    if dtype in ("fp4", "mxfp4"):
        if element in (None, "fp8"):
            return _facts(get_scheme("mxfp4_w4a16"))
    elif dtype in PLAIN_DTYPES and element in (None, "fp8"):
        return PLAIN
    if facts is None or element != dtype:
        raise Unread(f"an expert_dtype that is known and fits the rest, got {dtype!r}")
    return facts


def _facts(scheme: Scheme) -> Facts:
    return Facts(scheme.weight, scheme.activation)


def _named(name: str) -> Facts:
    try:
        return _facts(get_scheme(name))
    except (NotImplementedError, ValueError) as error:
        raise Unread(f"sizes that are known ({error})") from None


def _positive(number: Any, what: str, *others: int) -> int:
    if type(number) is not int or not (number > 0 or number in others):
        raise Unread(f"a {what} that is a positive integer")
    return number


def _mapping(said: Any, key: str) -> Said:
    """Return the entry of ``said``, which may be absent."""
    found = said.get(key) if isinstance(said, Mapping) else None
    if found is not None and not isinstance(found, Mapping):
        raise Unread(f"{key} as an object")
    return found or {}


def _is_left_out(said: Said, names: ExpertNames) -> bool:
    """Whether a list of modules that are not quantized names these experts."""
    lists = ("modules_to_not_convert", "modules_to_not_quantize", "ignored_layers", "ignore",
             "exclude_modules", "exclude")  # fmt: skip
    left_out = tuple(name for key in lists for name in strings(said.get(key)))
    return names.are_matched(parts(left_out))


def _integers(bits: Any, group_size: Any, *, zero_point: bool) -> Quant:
    """Return integer weights under activations that are not quantized."""
    cols = _positive(group_size, "group_size", WHOLE)
    if bits not in (4, 8):
        raise Unread("bits that are 4 or 8")
    if cols == WHOLE and bits == 8 and not zero_point:
        return Quant(ELEMENTS["int8"], ROW, "vector")
    element = ELEMENTS["int4" if bits == 4 else "uint8"]
    return Quant(element, Group(1, cols), "input", zero_point=zero_point)


def _fp8(said: Said, names: ExpertNames) -> Facts:
    """DeepSeek's and transformers' fp8."""
    if _is_left_out(said, names):
        return PLAIN
    block = said.get("weight_block_size")
    if not block:
        static = said.get("activation_scheme") == "static"
        return _named("fp8_tensor_static" if static else "fp8_tensor")
    rows, cols = _pair(block)
    return _named(f"fp8_block{rows}x{cols}{'_ue8m0' if said.get('scale_fmt') == 'ue8m0' else ''}")


def _pair(block: Any) -> tuple[int, int]:
    """Return the rows and columns of a block; older files of compressed-tensors say ``128x128``."""
    sizes = [int(n) for n in block.split("x") if n.isdigit()] if isinstance(block, str) else block
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2:
        raise Unread("the size of a block as two numbers")
    return _positive(sizes[0], "block"), _positive(sizes[1], "block")


def _gptq(said: Said, names: ExpertNames) -> Facts:
    of_all = strings(said.get("modules_in_block_to_quantize"))
    if (of_all and not names.are_matched(parts(of_all))) or _is_left_out(said, names):
        return PLAIN
    own = _own_entry(_dynamic(said), names)
    if LEFT_OUT in own:
        return PLAIN
    said = {**said, **own}
    stored = said.get("checkpoint_format") or said.get("format")
    versions = {None: None, "gptq": True, "gptq_v2": False}
    if stored not in versions:
        raise ValueError(f"checkpoint_format must be gptq or gptq_v2, got {stored!r}")
    layout = CheckpointLayout(awq=False, zeros_plus_one=versions[stored])
    zero_point = not said.get("sym", True)
    return Facts(
        _integers(said.get("bits"), said.get("group_size"), zero_point=zero_point), None, layout
    )


def _dynamic(said: Said) -> dict[str, Said]:
    """Return the rules for single modules by regular expression; `LEFT_OUT` marks some."""
    return {
        f"re:{pattern.removeprefix(LEFT_OUT).removeprefix('+:')}": (
            {LEFT_OUT: True} if pattern.startswith(LEFT_OUT) else changes
        )
        for pattern, changes in _mapping(said, "dynamic").items()
    }


def _own_entry(said: Said, names: ExpertNames) -> Said:
    """Return the first entry of an object whose keys name modules, and whose modules the experts are.

    Modules with equal entries count as one list: there may be an entry for each projection.
    """
    modules: dict[str, list[str]] = {}
    for name, entry in said.items():
        modules.setdefault(repr(entry), []).append(name)
    for listed in modules.values():
        if names.are_matched(parts(tuple(listed))):
            return _mapping(said, listed[0])
    return {}


def _awq(said: Said, names: ExpertNames) -> Facts:
    """AutoAWQ, by the names of its own file too."""
    if _is_left_out(said, names):
        return PLAIN
    version = said.get("version") or said.get("format") or "gemm"
    if str(version).lower() != "gemm":
        raise ValueError(
            f"version of AWQ must be gemm, whose order of words is known, got {version!r}"
        )
    bits, group = (said.get(own, said.get(other)) for own, other in
                   (("w_bit", "bits"), ("q_group_size", "group_size")))  # fmt: skip
    weight = _integers(bits, group, zero_point=bool(said.get("zero_point", True)))
    return Facts(weight, None, CheckpointLayout(awq=True))


def _auto_round(said: Said, names: ExpertNames) -> Facts:
    blocks = strings(said.get("block_name_to_quantize", said.get("to_quant_block_names")))
    if (blocks and not names.are_matched(parts(blocks))) or _is_left_out(said, names):
        return PLAIN
    said = {**said, **_own_entry(_mapping(said, "extra_config"), names)}
    bits, kind = said.get("bits"), str(said.get("data_type", "int"))
    if type(bits) is int and bits >= 16:
        return PLAIN
    acts = said.get("act_bits")
    if kind != "int":
        schemes = {"mx_fp": ("mxfp4_w4a16", "mxfp4"), "nv_fp": ("nvfp4_w4a16", "nvfp4")}
        found = schemes.get(kind[:5])
        if bits != 4 or found is None or acts not in (None, 4, 16):
            raise Unread("a data_type that is known")
        return _checked_group(_named(found[acts == 4]), said.get("group_size"))
    if acts not in (None, 16):
        raise Unread("act_bits that are 16 beside integers")
    symmetric = bool(said.get("sym", True))
    weight = _integers(bits, said.get("group_size"), zero_point=not symmetric)
    return Facts(weight, None, _packing(str(said.get("packing_format", "")), symmetric=symmetric))


def _packing(packing: str, *, symmetric: bool) -> CheckpointLayout:
    """Return the layout by AutoRound's name. Its own stores zero points of asymmetric weights as is.

    A name that is left out may mean any layout, and symmetric weights were stored in two ways.
    """
    if packing.endswith(("awq", "awq_gemm")):
        return CheckpointLayout(awq=True)
    if "gptq" in packing:
        return CheckpointLayout(awq=False, zeros_plus_one=True)
    if packing == "auto_round":
        return CheckpointLayout(awq=False, zeros_plus_one=None if symmetric else False)
    if packing in ("", "auto"):
        return CheckpointLayout()
    raise ValueError(f"packing_format must be one of AWQ, GPTQ or auto_round, got {packing!r}")


def _checked_group(facts: Facts, group_size: Any) -> Facts:
    """Check that a group size, if there is one, is that of the scheme."""
    if group_size is not None and facts.weight and group_size != facts.weight.group.cols:
        raise Unread(f"a group_size of {facts.weight.group.cols}")
    return facts


_MODELOPT = {
    "FP8": "fp8_tensor_static", "FP8_PB_WO": "fp8_w8a16_block128",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel", "MXFP8": "mxfp8", "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4_w4a16", "NVFP4_W4A16": "nvfp4_w4a16", "W4A8_MXFP4_FP8": "mxfp4_w4a8",
    "W4A16_MXFP4": "mxfp4_w4a16", "W8A16": "int8_w8a16",
    "W4A16_AWQ": "int4_w4a16_g{}", "W4A8_AWQ": "int4_w4a8_g{}",
    "UNQUANTIZED": "unquantized", None: "unquantized",
}  # fmt: skip
"""Schemes of ModelOpt's algorithms; None: the cache of keys and values alone is quantized."""


def _modelopt(said: Said, names: ExpertNames) -> Facts:
    """ModelOpt, in its own file or in ``config.json``."""
    said = _mapping(said, "quantization") or said
    if _is_left_out(said, names):
        return PLAIN
    layers, groups = _mapping(said, "quantized_layers"), _mapping(said, "config_groups")
    group = _group_of(groups, names) if groups else None
    chosen = _own_entry(layers, names)
    if not chosen and (layers or groups) and group is None:
        return PLAIN
    if not chosen:
        mixed = said.get("quant_algo", "MIXED_PRECISION") == "MIXED_PRECISION"
        chosen = group if mixed and group is not None else said
    if "quant_algo" not in chosen and "weights" in chosen:
        return _of_group(chosen)
    if "quant_algo" not in chosen:
        raise Unread("a quant_algo")
    algorithm, size = chosen["quant_algo"], chosen.get("group_size")
    name = _MODELOPT.get(algorithm) if isinstance(algorithm, (str, type(None))) else None
    if name is None:
        raise Unread("a quant_algo that is known")
    facts = _named(name.format(size or 128))
    if facts.weight is not None and facts.weight.local:
        _checked_group(facts, size)
    if group is not None and "input_activations" in group and group["input_activations"] is None:
        return Facts(facts.weight)
    return facts


def _compressed_tensors(said: Said, names: ExpertNames) -> Facts:
    """Read llm-compressor's configuration, or one that this library wrote."""
    if names.are_matched(exact(strings(said.get("ignore")))):
        return PLAIN
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping):
        raise Unread("config_groups")
    if "sparse" in str(said.get("format")) or "24" in str(said.get("format")):
        raise Unread("a format without sparsity")
    group = _group_of(groups, names)
    return PLAIN if group is None else _of_group(group)


_CLASSES = (("FusedMoE", "RoutedExperts"), ("Linear", "LinearBase"))
"""Classes of modules that hold experts, in the order of preference; Linear: of projections."""


def _group_of(groups: Said, names: ExpertNames) -> Said | None:
    """Return the group whose targets the experts are: whole names before patterns before classes."""
    targets = []
    for group in groups.values():
        if not isinstance(group, Mapping):
            raise Unread("config_groups as objects")
        targets.append((group, strings(group.get("targets", "Linear"))))
    choices: tuple[Callable[[str], bool], ...] = (
        lambda target: not target.startswith("re:"),
        lambda target: target.startswith("re:"),
    )
    for among in choices:
        for group, said in targets:
            if names.are_matched(exact(tuple(filter(among, said)))):
                return group
    for classes in _CLASSES:
        found = [group for group, said in targets if not set(classes).isdisjoint(said)]
        if found:
            return found[0]
    unknown = [t for _, said in targets for t in said if "Expert" in t or "MoE" in t or "Moe" in t]
    if unknown:
        raise Unread(f"targets that are known, got {unknown}")
    return None


def _of_group(group: Said) -> Facts:
    """Return the operands of one group: ``QuantizationArgs`` of weights and activations."""
    weights, inputs = _mapping(group, "weights"), _mapping(group, "input_activations")
    return _operands(weights, inputs)


def _operands(weights: Said, inputs: Said) -> Facts:
    element, group = _element(weights), _group(weights)
    symmetric = weights.get("symmetric") is not False
    if element in INTEGERS and group.rows == 1 and not inputs:
        return Facts(_integers(weights.get("num_bits"), group.cols, zero_point=not symmetric))
    if not symmetric:
        raise Unread("symmetric weights under quantized activations")
    if element == "int4" and inputs and group.cols != WHOLE:
        if _element(inputs) != "fp8" or inputs.get("strategy") not in (None, "token"):
            raise Unread("fp8 activations with one scale a token beside int4 weights")
        return _named(f"int4_w4a8_g{group.cols}")
    weight = _block_scaled(element, group) or Quant(ELEMENTS[element], group)
    return Facts(weight, _activation(inputs, weight) if inputs else None)


def _block_scaled(element: str, group: Group) -> Quant | None:
    """Return the operand of MX and NVFP4 formats, whose scales have a byte."""
    if element == "fp4" and group == (1, 16):
        return Quant(ELEMENTS["fp4"], group, "e4m3", global_scale=True)
    if element[:3] in ("fp4", "fp6", "fp8") and group == (1, 32):
        return Quant(ELEMENTS[element], group, "e8m0")
    if element[:3] in ("fp4", "fp6"):
        raise Unread("groups of 16 or 32 columns for small floats")
    return None


def _activation(inputs: Said, weight: Quant) -> Quant:
    element, strategy = _element(inputs), inputs.get("strategy")
    size = inputs.get("group_size")
    if strategy in ("token", "channel"):
        return Quant(ELEMENTS[element], ROW)
    if strategy == "tensor":
        return Quant(ELEMENTS[element], TENSOR, static=not inputs.get("dynamic", False))
    cols = _positive(weight.group.cols if size is None else size, "group_size")
    return _block_scaled(element, Group(1, cols)) or Quant(ELEMENTS[element], Group(1, cols))


def _element(said: Said) -> str:
    """Return the name of an `Element`."""
    known = {("float", 8): "fp8", ("float", 4): "fp4", ("int", 8): "int8", ("int", 4): "int4"}
    key = said.get("type", "int"), said.get("num_bits")
    found = said.get("element") or (known.get(key) if all(map(_is_plain, key)) else None)
    if found is None:
        raise Unread("a type and num_bits that are known")
    return str(found)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, str))


def _group(weights: Said) -> Group:
    """Return the group of a weight's scales."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy in ("tensor", "channel"):
        return TENSOR if strategy == "tensor" else ROW
    if strategy == "block":
        return Group(*_pair(weights.get("block_structure") or (128, 128)))
    if strategy not in (None, "group", "tensor_group"):
        raise Unread("a strategy that is known")
    return Group(1, _positive(size, "group_size", WHOLE))


_QUARK = {
    "fp8_e4m3": "fp8", "fp4": "fp4", "int8": "int8", "int4": "int4",
    "fp6_e2m3": "fp6_e2m3", "fp6_e3m2": "fp6_e3m2",
}  # fmt: skip


def _quark(said: Said, names: ExpertNames) -> Facts:
    if _is_left_out(said, names):
        return PLAIN
    config = _mapping(said, "global_quant_config")
    config = _mapping(said, "layer_type_quant_config").get("Linear", config)
    config = _own_entry(_mapping(said, "layer_quant_config"), names) or config
    weight = _mapping(config, "weight")
    if not weight:
        raise Unread("the weights of the experts")
    inputs = _mapping(config, "input_tensors")
    return _operands(_quark_operand(weight), _quark_operand(inputs) if inputs else {})


def _quark_operand(said: Said) -> Said:
    """Return an operand of Quark in the words of compressed-tensors."""
    scheme, dtype = said.get("qscheme"), str(said.get("dtype"))
    strategies = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group"}
    strategy = strategies.get(scheme) if isinstance(scheme, str) else None
    if dtype not in _QUARK or strategy is None:
        raise Unread("a dtype and qscheme that are known")
    bits = ELEMENTS[_QUARK[dtype]].bits
    found = {"element": _QUARK[dtype], "num_bits": bits, "strategy": strategy,
             "dynamic": said.get("is_dynamic", False)}  # fmt: skip
    symmetric = {"symmetric": said.get("symmetric") is not False} if "int" in dtype else {}
    return (
        found | symmetric | ({"group_size": said.get("group_size")} if strategy == "group" else {})
    )


def _fixed(scheme: str) -> Callable[[Said, ExpertNames], Facts]:
    """Return a reader for a tool with one scheme."""
    return lambda said, names: PLAIN if _is_left_out(said, names) else _named(scheme)


def _moe_ops(said: Said, names: ExpertNames) -> Facts:
    """This library's own: a scheme for each experts module that is quantized."""
    for entry in said.values():
        stored = entry.get("checkpoint") if isinstance(entry, Mapping) else None
        if isinstance(stored, str) and names.are_matched(exact((stored,))):
            return _named(str(entry.get("scheme")))
    return PLAIN


def method_of(said: Iterable[str]) -> str | None:
    """Return the tool whose configuration has such keys and no ``quant_method``."""
    keys = set(said)
    if keys & {"quant_algo", "quantization"}:
        return "modelopt"
    return "compressed-tensors" if "config_groups" in keys else None


_READERS: dict[str, Callable[[Said, ExpertNames], Facts]] = {
    "fp8": _fp8, "fbgemm_fp8": _fixed("fp8_channel"), "mxfp4": _fixed("mxfp4_w4a16"),
    "gptq": _gptq, "awq": _awq, "auto-round": _auto_round, "auto_round": _auto_round,
    "intel/auto-round": _auto_round, "modelopt": _modelopt, "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed_tensors, "quark": _quark, "moe_ops": _moe_ops,
}  # fmt: skip
