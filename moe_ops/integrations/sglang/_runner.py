"""The functions and the runner core that SGLang calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.moe_runner.runner import (
    _CUSTOM_RUNNER_CORE_FACTORIES,
    register_moe_runner_core,
)
from sglang.srt.layers.moe.token_dispatcher.standard import (
    StandardCombineInput,
    StandardDispatchOutput,
)
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from moe_ops.integrations.sglang._experts import is_kept, run, say_that_sglang_runs
from moe_ops.integrations.sglang._interface import RUNNERS

NAME = "moe_ops"
"""Name of the runner backend."""
PLACE = ("none", "triton")
"""Exchange of tokens and runner backend whose fused function is replaced."""


def install() -> bool:
    """Hook SGLang's choice of a fused function, and register the runner core.

    Returns whether this call did it, and no earlier one.
    """
    is_new = NAME not in _CUSTOM_RUNNER_CORE_FACTORIES
    if is_new:
        register_moe_runner_core(NAME, MoeOpsRunnerCore)
        target = f"{RUNNERS}.base.FusedOpPool.get_fused_func"
        HookRegistry.register(target, get_fused_func, HookType.AROUND)
        HookRegistry.register(f"{RUNNERS}.runner.MoeRunner.run", run_in_triton, HookType.AROUND)
    return is_new


def get_fused_func(
    original: Callable[..., Any], cls: type, dispatch_name: str, runner_name: str
) -> Callable[..., Any] | None:
    """Return SGLang's fused function of a pair of names; ours, which falls back to it, at `PLACE`.

    A hook around ``FusedOpPool.get_fused_func``.
    """
    function = original(cls, dispatch_name, runner_name)
    if function is None or (dispatch_name, runner_name) != PLACE:
        return function
    return with_fallback(function)


@cache
def with_fallback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fused function that runs this library, or ``function`` on what is not served."""

    @wraps(function)
    def fused_experts(dispatch_output: Any, quant_info: Any, runner_config: Any) -> Any:
        layer = (dispatch_output, quant_info, runner_config)
        return run_or(partial(function, *layer), *layer)

    return fused_experts


def run_in_triton(
    original: Callable[..., Any],
    runner: Any,
    dispatch_output: Any,
    quant_info: Any,
    lora_info: Any = None,
) -> Any:
    """Run a layer with LoRA, for which SGLang asks no fused function; else ``original``.

    A hook around ``MoeRunner.run``. Weights that SGLang's kernels cannot read run here in any case.
    """
    adapts = lora_info is not None and isinstance(dispatch_output, StandardDispatchOutput)
    ours = runner.runner_backend.is_triton() and (adapts or is_kept(quant_info))
    theirs = partial(original, runner, dispatch_output, quant_info, lora_info)
    if ours:
        return run_or(theirs, dispatch_output, quant_info, runner.config, lora_info)
    return theirs()


def run_or(
    original: Callable[[], Any],
    dispatch_output: Any,
    info: Any,
    runner_config: Any,
    lora_info: Any = None,
) -> Any:
    """Run a layer; ``original`` on what is not served.

    Raises:
        NotImplementedError, TypeError, ValueError: a layer that is not served, whose weights
            SGLang's kernels cannot read.
    """
    try:
        return run_to_combine(dispatch_output, info, runner_config, lora_info)
    except (NotImplementedError, TypeError, ValueError) as error:
        if is_kept(info):
            raise
        say_that_sglang_runs(error)
        return original()


def run_to_combine(
    dispatch_output: Any, quant_info: Any, runner_config: Any, lora_info: Any = None
) -> Any:
    """Run a layer; returns SGLang's ``StandardCombineInput``.

    Raises:
        NotImplementedError, TypeError, ValueError: a layer that is not served.
    """
    invariant = bool(is_batch_invariant_mode_enabled())
    layer = (dispatch_output, quant_info, runner_config)
    out = run(*layer, batch_invariant=invariant, lora_info=lora_info)
    return StandardCombineInput(hidden_states=out)


class MoeOpsRunnerCore(DispatchMoeRunnerCore):
    """Runner core of the backend ``moe_ops``, which raises for what is not served."""

    @property
    def runner_backend(self) -> Any:
        """The backend that SGLang registered under `NAME`."""
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
    ) -> Any:
        """Run a layer.

        Raises:
            NotImplementedError: LoRA ``hooks``; a layer that is not served.
        """
        if hooks is not None:
            raise NotImplementedError(f"hooks must be None, got {type(hooks).__name__}")
        return run_to_combine(dispatch_output, quant_info, runner_config)
