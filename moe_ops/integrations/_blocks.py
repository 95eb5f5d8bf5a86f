"""Conditions under which a MoE block of transformers may be given another forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def is_of_model(module: nn.Module, name: str, model: str) -> bool:
    """Whether a module is a class of transformers' model, and not just one of the same name."""
    place = f"transformers.models.{model}."
    return any(c.__name__ == name and c.__module__.startswith(place) for c in type(module).__mro__)


def runs(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a module has been given a forward: by `partial`, with which it can be pickled."""
    return getattr(module.__dict__.get("forward"), "func", None) is forward


def check_whole(name: str, block: Any) -> None:
    """Raise NotImplementedError if transformers has split a block's experts over ranks.

    Its tensor and expert parallelism mark the modules whose forward or parameters they replace:
    every module of the model before transformers 5.21, from then on only modules that the plan
    names, such as the experts but not the block.
    """
    for inner, module in block.named_modules():
        if getattr(module, "_is_hooked", False):
            where = f"{name}.{inner}".strip(".")
            raise NotImplementedError(
                f"{name} must hold all its experts to be adapted, got {where} under transformers' "
                "tensor or expert parallelism"
            )


def check_forward(name: str, module: Any, *own: Any) -> None:
    """Raise ValueError if a module has a forward of its own, such as a hook of accelerate.

    Args:
        name: the module's name in the error.
        module: the module whose forward will be replaced, or will not be called any more.
        *own: functions that may be the module's own forward.
    """
    forward = module.__dict__.get("forward")
    if forward is not None and getattr(forward, "__func__", forward) not in own:
        raise ValueError(
            f"{name} must not have a forward of its own (adapt a model before accelerate's hooks "
            f"are added), got {forward}"
        )
