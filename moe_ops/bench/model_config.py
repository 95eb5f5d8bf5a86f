"""The MoE layer that the ``config.json`` of a transformers model describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ops.activation import Activation, MoEActivation
from moe_ops.bench.problems import Problem
from moe_ops.loading.files import read_object
from moe_ops.scheme import get_scheme

NESTED = ("thinker_config", "text_config", "llm_config", "language_config", "ffn_config")
"""Parts of a configuration that may hold the sizes; a later part may lie inside an earlier one."""
SPELLINGS = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k",
        "top_k_experts",
    ),
    "hidden_size": ("moe_latent_size", "hidden_size", "d_model"),
    "intermediate_size": (
        "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size",
    ),
}  # fmt: skip
"""Names of each size in the order of preference: in a model with dense layers too,
``intermediate_size`` is theirs if there is another name."""
ACTIVATIONS = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
"""Names of the activation; experts of models that have the first one have no gate."""


def read_config(path: str | Path) -> Problem:
    """The MoE layer of a model.

    Args:
        path: the model's ``config.json``, or the folder that holds it.

    Raises:
        ValueError: no such file, no JSON object, sizes that are missing or not known by their
            name, an activation or a quantization that this library does not have.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise ValueError(f"must be a config.json, or the folder of a model, got {str(path)!r}")
    config = read_object(file, "a model's configuration")
    merged = dict(config)
    for name in NESTED:
        if isinstance(merged.get(name), Mapping):
            merged |= merged[name]
    sizes = {size: _size(merged, names, file) for size, names in SPELLINGS.items()}
    scheme = _scheme(merged, file)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return Problem(name, **sizes, timed=False, activation=_activation(merged, file), scheme=scheme)


def _size(config: Mapping[str, Any], names: tuple[str, ...], file: Path) -> int:
    """The first size that is given; a list with one number for each layer must hold only one."""
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ValueError(f"{file}: {name} must be a positive integer, got {value!r}")
        return value
    raise ValueError(
        f"{file} must be the configuration of an MoE model and name one of {', '.join(names)}; "
        "for a model that spells it otherwise use --sizes E,k,H,I"
    )


def _activation(config: Mapping[str, Any], file: Path) -> str:
    """The key of the experts' activation; silu if the configuration names none."""
    key = next((name for name in ACTIVATIONS if config.get(name) is not None), None)
    name, limit = "silu" if key is None else config[key], config.get("swiglu_limit")
    try:
        kind = MoEActivation.from_str(name)
        if key == ACTIVATIONS[0]:
            return kind.without_mul().value
        if config.get("model_type") == "gpt_oss":
            kind = MoEActivation.SWIGLUOAI
        if limit is None or kind not in (MoEActivation.SILU, MoEActivation.SWIGLUOAI):
            return kind.value
        alpha = config.get("swiglu_alpha")  # of MiniMax-M3, whose gate adds 1 as gpt-oss's does
        beta = None if alpha is None else 1.0
        return Activation(kind, clamp_limit=limit, alpha=alpha, beta=beta).key
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {key}: {error}") from None


def _scheme(config: Mapping[str, Any], file: Path) -> str | None:
    """The name of the scheme of quantized experts; None: they are not quantized."""
    said = config.get("quantization_config", config.get("compression_config"))
    if said is None:
        return None
    try:
        return get_scheme(_of_method(said) or "").key
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        raise ValueError(
            f"{file}: quantization_config must say a scheme of this library, got {said!r:.300}; "
            "use --sizes E,k,H,I with --scheme NAME"
        ) from None


_MODELOPT = {
    "FP8": "fp8_tensor_static", "FP8_PB_WO": "fp8_w8a16_block128",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel", "MXFP8": "mxfp8", "NVFP4": "nvfp4",
}  # fmt: skip


def _of_method(said: Mapping[str, Any]) -> str | None:
    """The scheme of a ``quantization_config``; None if it is not known."""
    method = said.get("quant_method")
    if method == "fp8":
        return _of_fp8(said)
    if method in ("awq", "gptq"):
        zero_point = said.get("zero_point", not said.get("sym", True))
        return _of_integers(said.get("bits"), said.get("group_size"), zero_point=bool(zero_point))
    if method == "modelopt":
        algorithm, group = said.get("quant_algo"), said.get("group_size", 128)
        by_group = {"W4A16_AWQ": f"int4_w4a16_g{group}", "W4A8_AWQ": f"int4_w4a8_g{group}"}
        return {**_MODELOPT, **by_group}.get(str(algorithm))
    if method == "compressed-tensors":
        return _of_compressed_tensors(said)
    return {"mxfp4": "mxfp4_w4a16", "fbgemm_fp8": "fp8_channel"}.get(str(method))


def _of_fp8(said: Mapping[str, Any]) -> str:
    """The scheme of DeepSeek's and transformers' fp8."""
    block = said.get("weight_block_size")
    if not block:
        static = said.get("activation_scheme") == "static"
        return "fp8_tensor_static" if static else "fp8_tensor"
    rows, cols = block
    size = f"{rows}" if rows == cols else f"{rows}x{cols}"
    return f"fp8_block{size}{'_ue8m0' if said.get('scale_fmt') == 'ue8m0' else ''}"


def _of_integers(bits: Any, group: Any, *, zero_point: bool) -> str | None:
    """The scheme of integer weights alone; ``group`` is -1 for whole rows."""
    if group == -1:
        return {4: "int4_w4a16_channel", 8: "int8_w8a16"}.get(bits) if not zero_point else None
    return f"{'int4_w4a16' if bits == 4 else 'int8_w8a16'}_g{group}{'_zp' if zero_point else ''}"


def _of_compressed_tensors(said: Mapping[str, Any]) -> str | None:
    """The scheme of compressed-tensors, if all groups of layers have the same."""
    groups = said.get("config_groups")
    found = {_of_group(group) for group in groups.values()} if isinstance(groups, Mapping) else ()
    return next(iter(found)) if len(found) == 1 else None


_FLOAT4 = {
    (16, None): "nvfp4_w4a16", (16, 4): "nvfp4",
    (32, None): "mxfp4_w4a16", (32, 4): "mxfp4", (32, 8): "mxfp4_mxfp8",
}  # fmt: skip
"""Schemes of 4-bit floats in compressed-tensors, by group size and bits of the activations."""
_FLOAT8_ROWS = {"token": "mxfp4_w4a8_token", "tensor": "mxfp4_w4a8"}
"""The same of groups of 32 beside fp8 activations whose scales are not per group."""


def _of_group(group: Mapping[str, Any]) -> str | None:
    weights, inputs = group["weights"], group.get("input_activations") or {}
    bits, strategy, size = (weights.get(name) for name in ("num_bits", "strategy", "group_size"))
    if weights.get("type") == "float" and bits == 4:
        if (size, inputs.get("num_bits")) == (32, 8) and inputs.get("strategy") in _FLOAT8_ROWS:
            return _FLOAT8_ROWS[inputs["strategy"]]
        return _FLOAT4.get((size, inputs.get("num_bits")))
    if weights.get("type") == "int" and not inputs:
        whole = -1 if strategy == "channel" else size
        return _of_integers(bits, whole, zero_point=not weights.get("symmetric", True))
    if bits == 4 and inputs.get("type") == "float":
        return f"int4_w4a8_g{size}"
    if bits != 8:
        return None
    element = "fp8" if weights.get("type") == "float" else "int8"
    if strategy == "block":
        rows, cols = weights.get("block_structure") or (128, 128)
        return f"{element}{'' if inputs else '_w8a16'}_block{rows}x{cols}"
    if strategy == "tensor" and inputs.get("strategy") == "tensor":
        return f"{element}_tensor{'' if inputs.get('dynamic') else '_static'}"
    wanted = {None: f"{element}_w8a16", "token": f"{element}_channel"}
    return wanted.get(inputs.get("strategy")) if strategy == "channel" else None
