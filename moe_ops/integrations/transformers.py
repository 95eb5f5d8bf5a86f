"""Hugging Face transformers: importing this module registers the experts implementation "moe_ops".

    import moe_ops
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_ops")

or ``model.set_experts_implementation("moe_ops")`` on a loaded model. (``import moe_ops`` imports
this module as soon as transformers' models are imported, before or after it.) If expert modules
keep transformers' code, one line of the log says so, `check` names them all, and `adapt` brings in
Llama 4, LongCat and the MXFP4 experts of gpt-oss. Experts whose activation this library has can be
trained; a backward pass through others raises. To train those, go back to an implementation of
transformers with ``model.set_experts_implementation("grouped_mm")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

try:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(
        "moe_ops.integrations.transformers needs transformers 5.17 or later: "
        f'pip install "transformers>=5.17" ({error})'
    ) from error

from moe_ops.integrations import _kept, _llama4, _longcat, _mxfp4, _offloaded, _peft, _quantized  # noqa: F401
from moe_ops.integrations._forwards import moe_ops_experts, moe_ops_fp8_experts
from moe_ops.integrations._layers import NAME
from moe_ops.integrations._pretrained import from_pretrained
from moe_ops.integrations._reach import Unreached, unreached
from moe_ops.integrations._replay import record_routing, replay_routing

__all__ = [
    "NAME",
    "Unreached",
    "adapt",
    "check",
    "from_pretrained",
    "moe_ops_experts",
    "moe_ops_fp8_experts",
    "record_routing",
    "replay_routing",
]

_BLOCKS: tuple[Any, ...] = (_llama4, _longcat, _mxfp4)
"""Kinds of blocks or experts that `adapt` gives another forward."""


def check(model: nn.Module) -> list[Unreached]:
    """Return the expert modules of a model that do not run this library, with the reason.

    What transformers dispatches is certain. Other modules are found by their looks: a class named
    ``...Experts`` (except ``Shared``, through which every token runs), a class with ``expert`` or
    ``moe`` in its name that holds 3-D parameters, a ``ModuleList`` or ``ModuleDict`` called
    ``experts``, and a class named ``...MoE`` with none of these inside. Experts with other names
    and forms are not found. Adapters of PEFT beside quantized weights or experts in host memory are
    named until `adapt` has seen them.

    Returns:
        ``(name, class_name, reason)`` of each module; empty if all run this library.
    """
    return list(unreached(model, NAME))


def adapt(model: nn.Module) -> list[str]:
    """Run this library in expert modules that transformers does not dispatch.

    These are the blocks of Llama 4 and the experts of LongCat, whose instances get a forward of
    their own (``del module.forward`` undoes it), and the MXFP4 experts of gpt-oss, whose weights
    are converted from triton_kernels' layout (for good: there may be no memory for a second copy).
    Experts with adapters of PEFT (``target_parameters``) run as grouped LoRA, without merged
    weights: call this after ``get_peft_model`` (for Llama 4 before or after). Quantized experts run
    adapters in no other way. Classes stay as they are. Adapted modules are skipped.

    Every module is checked, and every conversion tried, before the first module changes: if this
    raises, the model is as it was.

    Returns:
        The names of the modules that were adapted.

    Raises:
        NotImplementedError: an activation that this library does not have; blocks of transformers'
            tensor or expert parallelism; adapters beside weights that this library does not run.
        ValueError: a module has a forward of its own already; weights of unexpected sizes.
    """
    steps = [*_block_steps(model), *_wrapper_steps(model)]
    for _, step in steps:
        step()
    return [name for name, _ in steps]


def _block_steps(model: nn.Module) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each block that gets another forward, and what gives it that."""
    for name, module in model.named_modules():
        for kind in _BLOCKS:
            if kind.is_block(module) and not kind.is_adapted(module):
                yield name, kind.adaptation(name, module)


def _wrapper_steps(model: nn.Module) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each outermost wrapper of PEFT, and what adapts it."""
    inner = {id(m.base_layer) for m in model.modules() if _peft.is_wrapper(m)}
    for name, module in model.named_modules():
        outermost = _peft.is_wrapper(module) and id(module) not in inner
        if outermost and not _peft.is_adapted(module):
            _, experts = _peft.wrappers_of(module)
            if _peft.runs_this_library(experts):
                yield name, _peft.adaptation(name, module)


ALL_EXPERTS_FUNCTIONS.register(NAME, moe_ops_experts)
ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, moe_ops_fp8_experts)
_kept.install()
