"""Log lines about models that were told to run "moe_ops" and keep transformers' code.

transformers takes an experts implementation for any model, and does nothing where experts do not
ask for one. The methods by which a model gets its implementation are wrapped here: afterwards the
model is looked through, and the log names what is not reached.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from transformers import PreTrainedModel

from moe_ops.integrations._engines import say_once
from moe_ops.integrations._layers import NAME
from moe_ops.integrations._reach import unreached

CHOOSING = ("from_pretrained", "_from_config", "set_experts_implementation")
"""Methods of ``PreTrainedModel`` that choose an implementation."""
WRAPPED = "_wrapped_by_moe_ops"
_INSIDE = ContextVar("inside a method of CHOOSING", default=False)


def install() -> None:
    """Wrap the methods of `CHOOSING`; calling this again changes nothing."""
    for name in CHOOSING:
        method = inspect.getattr_static(PreTrainedModel, name, None)
        if method is None or hasattr(method, WRAPPED):
            continue
        wrapped = _looking(method)
        setattr(wrapped, WRAPPED, True)
        setattr(PreTrainedModel, name, wrapped)


def _looking(method: Any) -> Any:
    """Return a method that looks through the model after it; only the outermost call does."""
    makes = isinstance(method, classmethod)
    function: Callable[..., Any] = method.__func__ if makes else method

    @wraps(function)
    def wrapper(owner: Any, *args: Any, **named: Any) -> Any:
        outer = _INSIDE.get()
        token = _INSIDE.set(True)
        try:
            result = function(owner, *args, **named)
        finally:
            _INSIDE.reset(token)
        if not outer:
            asked = named.get("experts_implementation", None if makes else next(iter(args), None))
            say_what_is_kept(result if makes else owner, asked)
        return result

    return classmethod(wrapper) if makes else wrapper


def say_what_is_kept(made: Any, asked: Any) -> None:
    """Write one line to transformers' log if expert modules of a model keep transformers' code.

    Args:
        made: a model, or a tuple that begins with one.
        asked: the implementation that was asked for, or a dict with one for each part of the
            model; a configuration may also have it.
    """
    model = made[0] if isinstance(made, tuple) else made
    if not isinstance(model, PreTrainedModel):
        return
    named = asked.values() if isinstance(asked, dict) else [asked]
    if NAME not in {*named, *model.get_experts_implementation().values()}:
        return
    kept = list(unreached(model, NAME))
    if kept:
        first = kept[0]
        many = "1 expert module" if len(kept) == 1 else f"{len(kept)} expert modules"
        say_once(
            "transformers",
            f"{type(model).__name__} keeps transformers' code in {many}, the first of which is "
            f"{first.name} ({first.class_name}): {first.reason}. "
            "moe_ops.integrations.transformers.check(model) lists them",
            logging.WARNING,
        )
