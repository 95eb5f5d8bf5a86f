"""The MoE layer that the ``config.json`` of a transformers model describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ops.activation import Activation, MoEActivation
from moe_ops.bench.problems import Problem
from moe_ops.loading.declared import CONFIG, Declared, config_parts, in_config, in_folder
from moe_ops.loading.files import read_object
from moe_ops.loading.patterns import ExpertNames

SPELLINGS = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k",
        "top_k_experts", "experts_per_token",
    ),
    "hidden_size": ("moe_latent_size", "moe_hidden_size", "hidden_size", "d_model"),
    "intermediate_size": (
        "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size",
    ),
}  # fmt: skip
"""Names of each size in the order of preference: in a model with dense layers too,
``intermediate_size`` is theirs if there is another name."""
ACTIVATIONS = (
    "mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function", "ffn_act_fn",
)  # fmt: skip
"""Names of the activation; experts of models that have the first one have no gate."""

FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Names of the first layer with experts."""
MANY = 128
"""Number of layers of a model that does not say it."""
STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
"""Names of the number of layers to the next one with experts; the first of them has none."""


def read_config(path: str | Path) -> Problem:
    """The MoE layer of a model.

    Args:
        path: the model's ``config.json``, or the folder that holds it.

    Raises:
        ValueError: no such file, no JSON object, sizes that are missing or not known by their
            name, an activation or a quantization that this library does not have.
    """
    file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise ValueError(f"must be a config.json, or the folder of a model, got {str(path)!r}")
    config = read_object(file, "a model's configuration")
    merged: dict[str, Any] = {}
    for part in config_parts(config):
        merged |= {name: value for name, value in part.items() if value is not None}
    sizes = {size: _size(merged, names, file) for size, names in SPELLINGS.items()}
    declared = in_folder(file.parent) if file.name == CONFIG else in_config(config, file)
    scheme = _scheme_name(declared, merged, sizes["num_experts"])
    name = file.resolve().parent.name if file.name == CONFIG else file.stem
    activation = _activation_key(merged, file)
    try:
        return Problem(name, **sizes, timed=False, activation=activation, scheme=scheme)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _size(config: Mapping[str, Any], names: tuple[str, ...], file: Path) -> int:
    """The first size that is given.

    A list has a number for each layer, which is null or 0 for layers without experts. The others
    must be equal.
    """
    for name in names:
        value = config.get(name)
        if isinstance(value, list):
            sizes = [x for x in value if x not in (None, 0)]
            value = sizes[0] if sizes and sizes.count(sizes[0]) == len(sizes) else value
        if value is None:
            continue
        if isinstance(value, list):
            raise ValueError(
                f"{file}: {name} must be one number for all experts, got {value}; use --sizes "
                "E,k,H,I for one kind of them"
            )
        if type(value) is not int or value < 1:
            raise ValueError(f"{file}: {name} must be a positive integer, got {value!r}")
        return value
    raise ValueError(
        f"{file} must be the configuration of an MoE model and name one of {', '.join(names)}; "
        "for a model that spells it otherwise use --sizes E,k,H,I"
    )


def _activation_key(config: Mapping[str, Any], file: Path) -> str:
    """The key of the experts' activation; silu if the configuration names none."""
    key = next((name for name in ACTIVATIONS if config.get(name) is not None), None)
    name, limit = "silu" if key is None else config[key], config.get("swiglu_limit")
    if isinstance(name, Mapping):  # DBRX's
        name = name.get("name", "silu")
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


def _scheme_name(declared: Declared, config: Mapping[str, Any], num_experts: int) -> str | None:
    """The name of the scheme of quantized experts; None: they are not quantized.

    If experts of some layers are not quantized, the scheme is that of the others.
    """
    try:
        layers = [ExpertNames.of_layer(i, num_experts) for i in _layers_with_experts(config)]
        declarations = set(filter(None, map(declared.of, layers)))
        schemes = {facts.scheme().key for facts in declarations if facts.weight is not None}
        if len(schemes) > 1:
            raise ValueError(f"experts must have one scheme, got {sorted(schemes)}")
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"{error}; use --sizes E,k,H,I with --scheme NAME") from None
    return next(iter(schemes), None)


def _layers_with_experts(config: Mapping[str, Any]) -> list[int]:
    """The indices of the layers with experts, as far as the configuration tells them apart."""
    first, step = max(_first_integer(config, FIRST, 0), 0), max(_first_integer(config, STEPS, 1), 1)
    count = min(_first_integer(config, ("num_hidden_layers",), MANY), 8 * MANY)
    lists = (config.get(name) for name in ("mlp_layer_types", "moe_layers", "mlp_only_layers"))
    kinds, listed, dense = (x if isinstance(x, list) else [] for x in lists)
    kinds = kinds or list(str(config.get("hybrid_override_pattern") or ""))
    indices = [
        i
        for i in range(first, count)
        if (i + 1) % step == 0
        and i not in dense
        and (not listed or i in listed)
        and (i >= len(kinds) or kinds[i] in ("E", "sparse"))
    ]
    return indices or [first]


def _first_integer(config: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    return next((config[name] for name in names if type(config.get(name)) is int), default)
