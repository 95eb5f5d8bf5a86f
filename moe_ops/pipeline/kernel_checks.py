"""Check that the parts of a modular kernel fit each other, and that a call fits the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.activation import MoEActivation, kind_and_key
from moe_ops.pipeline.autocast import autocast_dtype
from moe_ops.pipeline.backward import lacking
from moe_ops.pipeline.calls import Call
from moe_ops.pipeline.experts import FusedMoEExperts
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat, PrepareResult
from moe_ops.pipeline.layer_checks import check_experts, check_layer
from moe_ops.pipeline.lora import ExpertLora, check_lora
from moe_ops.pipeline.prepare_finalize import (
    FusedMoEPrepareAndFinalize,
    FusedMoEPrepareAndFinalizeModular,
)
from moe_ops.pipeline.row_spaces import depends_on_batch
from moe_ops.scheme import Scheme


def check_parts(prepare_finalize: Any, fused_experts: Any) -> None:
    """Check that both parts are instances, and that both or neither route tokens themselves.

    Raises:
        TypeError: an argument that is not an instance of its interface, such as a class.
        ValueError: one monolithic part and one modular part.
    """
    for name, part, kind in (
        ("prepare_finalize", prepare_finalize, FusedMoEPrepareAndFinalize),
        ("fused_experts", fused_experts, FusedMoEExperts),
    ):
        if not isinstance(part, kind):
            what = part.__name__ if isinstance(part, type) else type(part).__name__
            raise TypeError(f"{name} must be an instance of {kind.__name__}, got {what}")
    modular = isinstance(prepare_finalize, FusedMoEPrepareAndFinalizeModular)
    if modular is fused_experts.is_monolithic():
        raise ValueError(
            "prepare_finalize and fused_experts must both be either monolithic or "
            f"non-monolithic but got {type(prepare_finalize).__name__} and "
            f"{type(fused_experts).__name__}"
        )


def check_options(
    fused_experts: FusedMoEExperts, shared_experts: Any, inplace: bool, chunk_size: int | None
) -> None:
    """Check that the experts and the options work together.

    Raises:
        TypeError: shared experts that are not callable.
        ValueError: ``inplace`` with shared experts; either of them with monolithic experts; a chunk
            size that is not positive, or a chunk size for experts that take all tokens at once.
    """
    checks.flags(inplace=inplace)
    if shared_experts is not None and not callable(shared_experts):
        raise TypeError(f"shared_experts must be callable, got {type(shared_experts).__name__}")
    if inplace and shared_experts is not None:
        raise ValueError("inplace must be False with shared_experts, which read the tokens too")
    monolithic = fused_experts.is_monolithic()
    if monolithic and (inplace or shared_experts is not None):
        raise ValueError(
            "inplace must be False and shared_experts None with monolithic experts, got "
            f"inplace={inplace} and {shared_experts}"
        )
    if chunk_size is None:
        return
    checks.at_least(1, chunk_size=chunk_size)
    if monolithic or not fused_experts.supports_chunking():
        raise ValueError(
            f"chunk_size must be None for {type(fused_experts).__name__}, which takes "
            f"all tokens at once, got {chunk_size}"
        )


def needless_input() -> ValueError:
    """The error of a call with ``shared_experts_input`` that no module of shared experts reads."""
    return ValueError(
        "shared_experts_input must be None without shared_experts, the module that it is for, got "
        "a value"
    )


def needless_map(fused_experts: FusedMoEExperts) -> ValueError:
    """The error of a call with an ``expert_map`` that its experts do not take."""
    return ValueError(
        "expert_map must be None unless fused_experts takes it (supports_expert_map), got a map "
        f"and {type(fused_experts).__name__}"
    )


def check_formats(
    prepare_finalize: FusedMoEPrepareAndFinalize, fused_experts: FusedMoEExperts
) -> None:
    """Raise ValueError unless prepare-finalize produces the format that the experts take."""
    ours, theirs = fused_experts.activation_format(), prepare_finalize.activation_format
    if ours is not theirs:
        raise ValueError(
            f"fused_experts must take the format of prepare_finalize, {theirs.value[0]} "
            f"({type(prepare_finalize).__name__}), got {ours.value[0]} "
            f"({type(fused_experts).__name__})"
        )


def check_call(fused_experts: FusedMoEExperts, call: Call) -> None:
    """Check that the arguments fit each other and the experts' configuration.

    Raises:
        TypeError, ValueError, NotImplementedError: the message names argument, rule and value.
    """
    config, layer = fused_experts.quant_config, fused_experts.moe_config
    dtype = layer.in_dtype
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        dtype = autocast_dtype(call.hidden_states) or dtype
    _check_call(
        dtype,
        layer.has_bias,
        call.apply_router_weight_on_input,
        (call.activation, layer.activation, fused_experts.SUPPORTS.activations),
        (call.topk_weights, call.topk_ids, call.expert_map, call.global_num_experts),
        (call.hidden_states, call.w1, call.w2, config.w1_bias, config.w2_bias),
        config.scheme,
        () if config.scheme.weight is None else config.tensors,
    )


@checks.remembered
def _check_call(
    in_dtype: torch.dtype,
    has_bias: bool,
    apply_router_weight_on_input: bool,
    activations: tuple[Any, ...],
    routing: tuple[Any, ...],
    experts: tuple[Any, ...],
    scheme: Scheme,
    quantization: tuple[Any, ...],
) -> None:
    """Check a call of experts for tokens of ``in_dtype``; the rest is that of `check_layer`."""
    checks.flags(apply_router_weight_on_input=apply_router_weight_on_input)
    check_layer(*routing, *experts, _checked_kind(*activations), scheme, *quantization)
    _check_dtype(in_dtype, experts[0])
    _check_biases(has_bias, *experts[3:])


def _checked_kind(activation: Any, of_layer: Any, supported: Any) -> MoEActivation:
    """Return the kind of a call's activation, which the experts must support.

    Raises:
        ValueError: the default in a layer with another activation, which the caller left out; an
            activation that the experts' ``SUPPORTS`` exclude.
    """
    (kind, key), wanted = kind_and_key(activation), kind_and_key(of_layer)[1]
    if key == MoEActivation.SILU.value != wanted:
        raise ValueError(
            f"activation must be {wanted}, as in moe_config, or one that is not the default, got "
            f"{key}"
        )
    if supported is not None and kind not in supported:
        names = [x.value for x in MoEActivation if x in supported]
        raise ValueError(f"activation must be one that the experts support, {names}, got {key}")
    return kind


def lacks_gradients(kernel: Any, call: Call) -> str | None:
    """Why a call of a modular kernel that is asked for gradients has none; None: it has them."""
    if kernel.inplace:
        return "inplace must be False"
    prepare, experts = kernel.prepare_finalize, kernel.fused_experts
    for name, part in (("prepare_finalize", prepare), ("fused_experts", experts)):
        if not part.has_gradients():
            return f"{name} must have gradients, got {type(part).__name__}"
    return _scale_of_all_tokens(kernel) or lacking((call.w1, call.w2), experts.quant_config)


def _scale_of_all_tokens(kernel: Any) -> str | None:
    """Why experts cannot quantize what prepare would; None: they can."""
    experts = kernel.fused_experts
    config, format = experts.quant_config, experts.activation_format()
    at_once = kernel.prepare_finalize.num_dispatchers() == 1 and kernel.chunk_size is None
    at_once = at_once and format is FusedMoEActivationFormat.Standard
    if at_once or not depends_on_batch(config.scheme.activation):
        return None
    return (
        "activations must not have one scale for all tokens, in the Batched format, on several "
        f"ranks or in chunks, got {config.scheme.name}"
    )


def check_adapters(kernel: Any, call: Call, lora: ExpertLora) -> None:
    """Check the adapters of a call whose other arguments are checked already.

    Raises:
        TypeError, ValueError: as `fused_experts` for its ``lora``.
        NotImplementedError: a part that takes no adapters, or activations that only prepare can
            quantize: with adapters the experts get rows that are not quantized.
    """
    experts = kernel.fused_experts
    check_lora(lora, call.hidden_states, call.w1, call.w2, experts.quant_config.scheme)
    for name, part in (("prepare_finalize", kernel.prepare_finalize), ("fused_experts", experts)):
        if not part.takes_lora():
            raise NotImplementedError(
                f"lora must be None unless {name} takes adapters (takes_lora), got adapters and "
                f"{type(part).__name__}"
            )
    reason = _scale_of_all_tokens(kernel)
    if reason is not None:
        raise NotImplementedError(f"lora must be None: {reason}")


def check_tokens_to_send(
    prepare_finalize: FusedMoEPrepareAndFinalize, call: Call, most: int
) -> None:
    """Raise ValueError if there are more tokens than prepare may send at once.

    While compiling the number of tokens is a symbol, so prepare must check it instead.
    """
    tokens = call.hidden_states.shape[0]
    if not torch.compiler.is_compiling() and tokens > most:
        raise ValueError(
            f"hidden_states must have at most max_num_tokens = {most} tokens, all that "
            f"{type(prepare_finalize).__name__} has room for, got {tokens}"
        )


def check_prepared(prepare_finalize: FusedMoEPrepareAndFinalize, call: Call, prepared: Any) -> None:
    """Check what the ``prepare`` of a caller's own class has returned for a call.

    Raises:
        TypeError: no `PrepareResult`; unquantized rows of another dtype than the call's, a routing
            of no dtype of routings, or counts that are no `ExpertTokensMetadata`.
        ValueError: rows of another width or number than the format has; ids and weights of
            different shapes; tensors on another device than the call's.
    """
    name = f"prepare of {type(prepare_finalize).__name__} must return"
    if not isinstance(prepared, PrepareResult):
        raise TypeError(f"{name} a PrepareResult, got {type(prepared).__name__}")
    x, (rows, scale, meta, ids, weights) = call.hidden_states, prepared
    ids = call.topk_ids if ids is None else ids
    weights = call.topk_weights if weights is None else weights
    for part, value, axes, dtypes in (
        ("rows", rows, None, None),
        ("topk_ids", ids, 2, checks.INDICES),
        ("topk_weights", weights, 2, checks.FLOATS),
    ):
        checks.tensor(f"{name} {part}, which", value, axes, dtypes)
        checks.same_device(f"{name} {part}, which", value, "hidden_states", x)
    if meta is not None:
        checks.instance(f"{name} expert_tokens_meta, which", meta, ExpertTokensMetadata)
    if scale is None and rows.dtype != x.dtype:
        raise TypeError(f"{name} unquantized rows of dtype {x.dtype}, got {rows.dtype}")
    if torch.compiler.is_compiling():  # sizes are symbols there
        return
    if ids.shape != weights.shape:
        raise ValueError(
            f"{name} topk_ids and topk_weights of one shape, got {tuple(ids.shape)} and "
            f"{tuple(weights.shape)} (None: the caller's)"
        )
    tokens, k = ids.shape
    shapes: tuple[tuple[int, ...], ...] = ((tokens,), (tokens * k,))
    if prepare_finalize.activation_format is FusedMoEActivationFormat.BatchedExperts:
        shapes = ((call.w1.shape[0], rows.shape[1]),)
    if scale is None:
        shapes = tuple((*shape, x.shape[1]) for shape in shapes)
        if rows.shape not in shapes:
            raise ValueError(f"{name} rows of a shape of {[*shapes]}, got {tuple(rows.shape)}")


def not_tokens(kernel: Any, call: Call, output: Any) -> Exception:
    """The error of a ``finalize`` that returned anything but a row for each token, in its dtype."""
    name = f"finalize of {type(kernel.prepare_finalize).__name__} must return"
    if not isinstance(output, Tensor):
        return TypeError(f"{name} a Tensor, got {type(output).__name__}")
    x, experts = call.hidden_states, kernel.fused_experts
    reduce = type(experts.finalize_weight_and_reduce_impl()).__name__
    whose = f"({reduce} of {type(experts).__name__})"
    if output.shape == x.shape:
        return TypeError(
            f"{name} the dtype of hidden_states, {x.dtype}, got {output.dtype} {whose}"
        )
    return ValueError(
        f"{name} a row for each token, {tuple(x.shape)}, got shape {tuple(output.shape)} {whose}"
    )


def check_monolithic_call(
    fused_experts: FusedMoEExperts,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    router_logits: Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: Tensor | None,
) -> None:
    """`check_call` for experts that route tokens themselves."""
    config = fused_experts.quant_config
    check_experts(
        hidden_states,
        w1,
        w2,
        config.w1_bias,
        config.w2_bias,
        _checked_kind(
            activation, fused_experts.moe_config.activation, fused_experts.SUPPORTS.activations
        ),
        config.scheme,
        *config.tensors,
    )
    wanted = autocast_dtype(hidden_states) or fused_experts.moe_config.in_dtype
    _check_dtype(wanted, hidden_states)
    _check_biases(fused_experts.moe_config.has_bias, config.w1_bias, config.w2_bias)
    checks.tensor("router_logits", router_logits, 2, checks.FLOATS)
    checks.same_device("router_logits", router_logits, "hidden_states", hidden_states)
    checks.same_tokens("router_logits", router_logits, "hidden_states", hidden_states)
    checks.expert_map(expert_map, router_logits)
    num_experts = w1.shape[0] if expert_map is None else expert_map.shape[0]
    checks.size("router_logits.shape[1]", router_logits.shape[1], "E", num_experts)
    if global_num_experts != -1:
        checks.size("global_num_experts", global_num_experts, "E", num_experts)


def _check_biases(has_bias: bool, w1_bias: Tensor | None, w2_bias: Tensor | None) -> None:
    if has_bias and w1_bias is None and w2_bias is None:
        raise ValueError(
            "quant_config of fused_experts must have w1_bias or w2_bias when moe_config.has_bias, "
            "got None"
        )


def _check_dtype(wanted: torch.dtype, hidden_states: Tensor) -> None:
    if hidden_states.dtype != wanted:
        raise TypeError(
            f"hidden_states must have the in_dtype of moe_config, {wanted}, "
            f"got {hidden_states.dtype}"
        )
