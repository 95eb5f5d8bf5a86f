"""Behaviour of functions without a derivative: forward passes run, backward passes raise.

`fused_experts`, `fused_moe`, `FusedMoEKernel` and the routers have gradients: see
`pipeline/backward.py` and `routing/backward.py`. For all else: the weights of a model require grad
by default, even if nobody trains it. So a call in grad mode runs without recording history, and its
result goes through ``moe_ops::no_gradient``, an operator whose backward raises. No gradient is ever
silently missing or zero:

* `inference_only` wraps Python functions, with one such operator for a whole pipeline.
* `asked_for` and `refusing` do the same in every operator's eager implementations, for callers of
  ``torch.ops.moe_ops``; `traced` does so for AOTAutograd.
* `once` wraps the backward passes of all functions that have one: what they return has no second
  derivative, and says so.
* Forward-mode derivatives and transforms of ``torch.func`` raise in the forward pass. One gap
  remains: an operator called directly (``torch.ops.moe_ops``) cannot see ``torch.func.grad`` (torch
  warns). ``torch.vmap`` runs operators sample by sample.

The two operators defined here compute nothing; `moe_ops.ops` defines the operators of the stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

from moe_ops.scheme import FusedMoEQuantConfig

P = ParamSpec("P")
R = TypeVar("R")

_library = torch.library.Library("moe_ops", "FRAGMENT")


TRAINED = "gradients are those of the layer, the modular kernel, the routers and expert_lora"
"""The default reason of an error."""


def message(
    function: str,
    kind: str = "gradients",
    reason: str = TRAINED,
    instead: str = "call under torch.no_grad()",
) -> str:
    """Text of the error for ``function``, with the alternatives."""
    return (
        f"{kind} of {function} are not implemented ({reason}): train with another "
        'implementation, in transformers by model.set_experts_implementation("grouped_mm"), or '
        f"{instead}"
    )


TRANSFORMS = {
    "Grad": "torch.func.grad and what is made of it (vjp, jacrev): take gradients with backward() "
    "or torch.autograd.grad (torch.autograd.functional.jacobian for jacrev)",
    "Jvp": "torch.func.jvp and what is made of it (jacfwd, hessian): take gradients in reverse "
    "mode, with backward() or torch.autograd.grad",
    "Vmap": "torch.vmap of calls that record gradients: call it under torch.no_grad(), which runs "
    "samples one by one, or loop over the samples",
    "Functionalize": "torch.func.functionalize: use torch.export.export or torch.compile, "
    "or call under torch.no_grad()",
}
"""What an error says about a transform of ``torch.func``, by torch's name for its kind."""


def _in_transform() -> bool:
    """Whether a transform of ``torch.func`` runs this call."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def check_transforms(function: str) -> None:
    """Check that a function with gradients is not called by a transform of ``torch.func``.

    Raises:
        NotImplementedError: it is; the error names the transform, and what to use instead.
    """
    if _in_transform():
        kind = torch._C._functorch.peek_interpreter_stack().key().name
        raise NotImplementedError(f"{function} does not take {TRANSFORMS[kind]}")


def inference_only(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` without autograd history; a backward pass through its result raises.

    Considers tensors among the arguments, in tuples and lists, in a `FusedMoEQuantConfig`, and the
    parameters of modules. Costs nothing if grad mode is off.
    """
    name = function.__name__

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        inputs = wanted(*args, *kwargs.values())
        if not inputs:
            return function(*args, **kwargs)
        with torch.no_grad():
            out = function(*args, **kwargs)
        return refuse(out, inputs, name)

    return run


def once(function: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the backward pass of an autograd ``Function``; a second derivative raises.

    The backward pass is called with ``ctx``, the saved tensors and the gradients, without grad
    mode. With ``create_graph=True`` its results depend on every tensor that they may be a function
    of, the saved tensors and the gradients, with a backward pass that raises. (The decorator
    ``once_differentiable`` of PyTorch considers the gradients alone, so that a gradient without
    history, as of ``out.sum()``, makes the second derivative zero.)

    The saved tensors are unpacked once, as checkpoints without reentry ask for.

    Args:
        function: name of the differentiable function in the error.
    """
    text = message(
        function,
        "second derivatives",
        "its backward pass records no history",
        "take its gradients without create_graph=True",
    )

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(ctx: Any, *grads: Tensor) -> Any:
            saved = ctx.saved_tensors
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                gradients = backward(ctx, saved, *grads)
            inputs = wanted(saved, grads)
            if not inputs:
                return gradients
            one = _One.apply(text, *inputs)  # a product has the bits of the gradient
            return tuple(x if x is None else x * one for x in gradients)

        return run

    return decorate


class _One(Function):
    """The number 1 as a function of ``inputs`` that has no derivative."""

    generate_vmap_rule = True  # for gradients of several losses at once

    @staticmethod
    def forward(text: str, *inputs: Tensor) -> Tensor:
        """Return 1."""
        return torch.ones((), device=inputs[0].device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the text of the error."""
        ctx.text = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Raise the error."""
        raise NotImplementedError(ctx.text)


def wanted(*values: Any) -> list[Tensor]:
    """The tensors among ``values`` that require grad; an empty list if grad mode is off.

    Where a bool is needed take its length: Dynamo of torch 2.11 cannot trace ``bool`` of a list.
    """
    if not torch.is_grad_enabled():
        return []
    return [x for x in _tensors(values) if x.requires_grad]


def refuse(out: Any, inputs: list[Tensor], function: str, reason: str = TRAINED) -> Any:
    """Make ``out`` depend on ``inputs`` with a backward pass that raises; float tensors are copied.

    Args:
        out: a tensor, or a tuple of tensors and other values.
        inputs: the result of `wanted`. If it is empty, ``out`` is returned as it is.
        function: name of the function in the error.
        reason: why there are no gradients, in the error.

    Raises:
        NotImplementedError: under a transform of ``torch.func``, such as ``grad``.
    """
    if not inputs:
        return out
    if _in_transform():
        raise NotImplementedError(message(function, reason=reason))
    if isinstance(out, tuple):
        parts = [refuse(x, inputs, function, reason) for x in out]
        return out._make(parts) if hasattr(out, "_make") else tuple(parts)
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return out
    if any(out is x for x in inputs):  # an input that is returned as it is
        return out
    return torch.ops.moe_ops.no_gradient(out, inputs, message(function, reason=reason))


def _tensors(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, FusedMoEQuantConfig):
            tensors += _tensors(value.tensors)
        elif isinstance(value, nn.Module):
            tensors += [*value.parameters()]  # Dynamo of torch 2.11 adds no generator to a list
        elif isinstance(value, (tuple, list)):
            tensors += _tensors(value)
    return tensors


def asked_for(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a gradient of an operator's result may be requested.

    Raises:
        NotImplementedError: as `check_forward_mode`; or an ``out`` argument is given, whose history
            the operator cannot change.
    """
    check_forward_mode(name, args)
    if not torch.is_grad_enabled():
        return False
    values = (*args, *kwargs.values())  # torch sees no tensor in a list that also has None
    lists = [x for value in values if isinstance(value, (list, tuple)) for x in value]
    if not torch._C._any_requires_grad(*values, *lists):
        return False
    if kwargs.get("out") is not None:
        raise NotImplementedError(message(name))
    return True


def check_forward_mode(name: str, args: Any) -> None:
    """Raise NotImplementedError in forward-mode differentiation if there is a float input.

    Any float input counts, because ``torch.func`` removes tangents before an operator's
    implementation runs.
    """
    if forward_ad._current_level >= 0 and any(x.is_floating_point() for x in _tensors(args)):
        instead = "take gradients in reverse mode, with backward() or torch.autograd.grad"
        raise NotImplementedError(message(name, "forward-mode derivatives", instead=instead))


def refusing(name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of an operator's implementation ``run``, with a backward pass that raises."""
    with torch.no_grad():
        result = run(*args, **kwargs)
    return refuse(result, wanted(*args, *kwargs.values()), name)


def traced(operator: Any, name: str) -> Callable[..., Any]:
    """The Autograd implementation of ``operator`` that AOTAutograd traces; eager mode has none."""

    def below_autograd(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        if asked_for(name, args, kwargs):
            return refusing(name, below_autograd, args, kwargs)
        return below_autograd(*args, **kwargs)

    return run


_library.define("no_gradient(Tensor x, Tensor[] inputs, str text) -> Tensor")
_library.define("raise_no_gradient(Tensor grad, str text) -> Tensor")


def _no_gradient(x: Tensor, inputs: list[Tensor], text: str) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _raise_no_gradient(grad: Tensor, text: str) -> Tensor:
    raise NotImplementedError(text)


def _fake_no_gradient(x: Tensor, inputs: list[Tensor], text: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, tensors, ctx.text = inputs
    ctx.layouts = [(x.shape, x.dtype) for x in tensors]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients from ``raise_no_gradient``, so that a compiler can trace the backward pass."""
    none = torch.ops.moe_ops.raise_no_gradient(grad, ctx.text)
    return None, [none.to(dtype).expand(shape) for shape, dtype in ctx.layouts], None


_library.impl("no_gradient", _no_gradient, "CompositeExplicitAutograd")
_library.impl("raise_no_gradient", _raise_no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("moe_ops::no_gradient", _fake_no_gradient, lib=_library)
torch.library.register_fake(
    "moe_ops::raise_no_gradient", lambda grad, text: grad.new_empty(()), lib=_library
)
torch.library.register_autograd(
    "moe_ops::no_gradient", _backward, setup_context=_setup_context, lib=_library
)
