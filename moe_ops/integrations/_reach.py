"""Expert modules of a model that do not run this library, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from moe_ops import checks
from moe_ops.integrations import _fp8, _llama4, _longcat, _mxfp4, _peft, _torchao
from moe_ops.integrations._experts import HOST, axes_of
from moe_ops.layer import FusedMoE

_ADAPTED = {"Llama4TextExperts": "Llama 4", _longcat.EXPERTS: "LongCat"}
"""Models whose experts, by their class, `adapt` gives another forward."""
_MXFP4 = "MXFP4 experts of gpt-oss run triton_kernels: adapt(model) reaches them"


class Unreached(NamedTuple):
    """An expert module that runs transformers' code."""

    name: str
    """Path of the module in the model, as in ``named_modules``."""
    class_name: str
    reason: str


def unreached(model: nn.Module, implementation: str) -> Iterator[Unreached]:
    """Yield the expert modules that ``implementation`` does not reach, outermost first."""
    for name, module in expert_modules(model, ""):
        reason = _reason(module, implementation) or _outer_reason(model, name, module)
        if reason:
            yield Unreached(name, type(module).__name__, reason)


def is_decorated(module: Any) -> bool:
    """Whether a module has the attributes that ``use_experts_implementation`` sets."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))


def expert_modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model that look like experts, outermost first.

    A `FusedMoE` is none: it runs this library in any model.
    """
    if isinstance(module, FusedMoE):
        return
    if _is_expert_module(module, name):
        yield name, module
        return
    inner = [
        named
        for child_name, child in module.named_children()
        for named in expert_modules(child, f"{name}.{child_name}".lstrip("."))
    ]
    yield from inner
    # A block whose experts are not recognised (Doge's are embeddings).
    if not inner and type(module).__name__.endswith("MoE") and not _is_model(module):
        yield name, module


def _is_expert_module(module: nn.Module, name: str) -> bool:
    class_name = type(module).__name__
    if is_decorated(module) or _llama4.is_adapted(module):
        return True
    if _is_model(module) or "Shared" in class_name:  # shared experts need no routing
        return False
    named = "expert" in class_name.lower() or "moe" in class_name.lower()
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return len(module) > 1 and (named or name.rsplit(".", 1)[-1] == "experts")
    stacked = any(p.dim() == 3 and p.shape[0] > 1 for p in module.parameters(recurse=False))
    return "Experts" in class_name or (named and stacked)


def _is_model(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel)


def _reason(module: Any, implementation: str) -> str:
    """Return why a module is not reached; empty if it is."""
    if _llama4.is_adapted(module) or _longcat.is_adapted(module) or _mxfp4.is_experts(module):
        return ""
    if not is_decorated(module):
        model = _ADAPTED.get(type(module).__name__)
        if model is not None:
            return f"{model} is not dispatched by transformers: adapt(model) reaches it"
        return "its class is not dispatched by transformers (no @use_experts_implementation)"
    weights = _weights_reason(module)
    if weights:
        return weights
    chosen = getattr(module.config, "_experts_implementation", None)
    if chosen != implementation:
        return f"its experts_implementation is {chosen!r}, not {implementation!r}"
    return ""


def _outer_reason(model: nn.Module, name: str, experts: Any) -> str:
    """Return why the modules around experts do not run them here; empty if they do.

    These are PEFT's wrappers, and the blocks of MXFP4 experts.
    """
    while name.rpartition(".")[2] == "base_layer":
        name = name.rpartition(".")[0]
    outer = model.get_submodule(name)
    if _mxfp4.is_experts(experts):
        if outer is not experts:
            return f"not supported: {_mxfp4.NO_ADAPTERS}"
        block = model.get_submodule(name.rpartition(".")[0])
        return "" if _mxfp4.is_adapted(block) else _MXFP4
    if outer is experts or _peft.is_adapted(outer) or not _peft.needs_adapting(experts):
        return ""
    where = "in host memory" if HOST in experts.__dict__ else "with quantized weights"
    return f"PEFT's adapters cannot run beside experts {where}: adapt(model) runs them"


def unquantizable(module: Any) -> str:
    """Return why `quantize_` does not take a module that looks like experts; empty if it does."""
    if _mxfp4.is_experts(module):
        return "its weights are MXFP4 already"
    if not is_decorated(module):
        return "its class is not dispatched by transformers (no @use_experts_implementation)"
    parameters = list(module.parameters(recurse=False))
    if _fp8.is_quantized(module) or any(map(_torchao.is_torchao_tensor, parameters)):
        return "its weights are quantized already"
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or parameter.dtype not in checks.FLOATS:
            kind = type(parameter).__name__
            return f"weights that are {kind} of {parameter.dtype} are not supported"
    return ""


def _weights_reason(module: Any) -> str:
    """Return why a dispatched module's weights are not supported; empty if they are."""
    if _fp8.is_quantized(module):
        reason = _fp8.unsupported(module)
        return f"not supported: {reason}" if reason else ""
    weights = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    if any(map(_torchao.is_torchao_tensor, weights)):
        first = module.gate_up_proj if module.has_gate else module.up_proj
        reason = _torchao.unsupported_pair(first, module.down_proj, axes_of(module))
        return f"not supported: {reason}" if reason else ""
    dtypes = {p.dtype for p in module.parameters(recurse=False)} - set(checks.FLOATS)
    if dtypes:
        return f"weights of {', '.join(sorted(map(str, dtypes)))} are not supported"
    return ""
