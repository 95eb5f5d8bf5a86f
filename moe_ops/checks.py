"""Argument validation: one error format, ``<argument> must <rule>, got <value>``.

Wrong types and dtypes raise TypeError; wrong shapes, values and devices raise ValueError; features
that the library lacks raise NotImplementedError. Checks read shapes, dtypes and devices only, so no
check synchronizes with the device. Ids out of range are not checked; kernels skip them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDICES = (torch.int32, torch.int64)
SCORING_FUNCS = ("softmax", "sigmoid", "sqrtsoftplus")
"""Scoring functions ``f`` of ``s = f(logits)``, rounded to float32: softmax over all experts, the
logistic function, ``sqrt(softplus(x))``."""
MAX_EXPERTS = 4096
MAX_SIZE = 2**31 - 1
LARGEST_FACTOR = torch.finfo(torch.float32).max
TORCHSCRIPT = (
    "TorchScript (torch.jit.trace, torch.jit.script, torch.onnx.export with dynamo=False) must not "
    "contain moe_ops: use torch.export.export or torch.compile"
)
SYMBOLIC = (
    "torch.fx.symbolic_trace cannot trace moe_ops: use torch.export.export, or a torch.fx.Tracer "
    "whose is_leaf_module is true for moe_ops.FusedMoE"
)
REMEMBERED = 4096
"""The most sets of arguments that one check caches. Token counts are part of a set."""


def remembered(check: Callable[..., None]) -> Callable[..., None]:
    """Skip ``check`` if it passed before with equal arguments.

    Tensors are equal if their shapes, strides, dtypes and devices are, also in lists and tuples;
    the check must not read anything else of them. Failures are not cached, and calls with symbolic
    sizes are checked every time. A compiler traces the check itself.
    """
    passed: set[tuple[Any, ...]] = set()

    @wraps(check)
    def checked(*arguments: Any, **named: Any) -> None:
        if torch.compiler.is_compiling():
            check(*arguments, **named)
            return
        try:
            parts: list[Any] = []
            values: list[Any] = [*arguments, *named.items()]
            for x in values:  # lists and tuples append what they hold
                if isinstance(x, Tensor):
                    parts += (x.shape, x.stride(), x.dtype, x.device)
                elif isinstance(x, (list, tuple)):
                    parts += (x.__class__, len(x))
                    values += x
                else:  # with its type, since ``True == 1 == 1.0``
                    parts += (x.__class__, x)
            key = tuple(parts)
            has_passed = key in passed
        # An unhashable value or a tensor without strides: symbolic, or the check will raise.
        except (TypeError, RuntimeError) as error:
            if "as a constant" in str(error):  # the tracer's own error, after which it is gone
                raise NotImplementedError(TORCHSCRIPT) from error
            not_traced()
            check(*arguments, **named)
            return
        if not has_passed:
            not_traced()
            check(*arguments, **named)
            if len(passed) >= REMEMBERED:
                passed.clear()
            passed.add(key)

    return checked


def not_traced() -> None:
    """Check that `torch.jit.trace` does not trace this call.

    Sizes are tensors while it traces, so no call is known to `remembered` then.

    Raises:
        NotImplementedError: it does; so does `torch.onnx.export` with ``dynamo=False``.
    """
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(TORCHSCRIPT)


def tensor(name: str, x: Tensor, ndim: int | None, dtypes: Sequence[torch.dtype] | None) -> None:
    """Check that ``x`` is a dense tensor with ``ndim`` axes and one of ``dtypes`` (None: any)."""
    if not isinstance(x, Tensor):
        if isinstance(x, torch.fx.Proxy):
            raise NotImplementedError(f"{name} must be a Tensor, got Proxy: {SYMBOLIC}")
        hint = " (pass its data)" if isinstance(x, tuple) and hasattr(x, "data") else ""
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}{hint}")
    if x.layout is not torch.strided or x.is_nested:
        got = "a nested Tensor" if x.is_nested else x.layout
        raise TypeError(f"{name} must be a dense Tensor (torch.strided), got {got}")
    if dtypes is None and x.is_quantized:
        raise TypeError(f"{name} must not have a quantized dtype of PyTorch, got {x.dtype}")
    if ndim is not None and x.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {tuple(x.shape)}")
    if dtypes is not None and x.dtype not in dtypes:
        raise TypeError(f"{name} must have a dtype of {list(dtypes)}, got {x.dtype}")


def same_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Check that ``x`` is on the device of ``other``."""
    if x.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name}, {other.device}, got {x.device}"
        )


def same_dtype(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Check that ``x`` has the dtype of ``other``."""
    if x.dtype != other.dtype:
        raise TypeError(f"{name} must have the dtype of {other_name}, {other.dtype}, got {x.dtype}")


def size(name: str, actual: int, rule: str, expected: int) -> None:
    """Check that a static size equals the size that another argument requires."""
    if actual != expected:
        raise ValueError(f"{name} must be {rule} = {expected}, got {actual}")


def same_tokens(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Check that ``x`` and ``other`` have equally many tokens, also if the number is symbolic."""
    if torch.compiler.is_compiling():
        torch._check(x.shape[0] == other.shape[0])
    elif x.shape[0] != other.shape[0]:
        raise ValueError(
            f"{name} must have the {other.shape[0]} tokens of {other_name}, got {x.shape[0]}"
        )


def device_scalar(
    name: str, x: Tensor | None, dtypes: Sequence[torch.dtype], other_name: str, other: Tensor
) -> None:
    """Check that ``x`` is None or one number on the device of ``other``; its value is not read."""
    if x is None:
        return
    tensor(name, x, None, dtypes)
    size(f"{name}.numel()", x.numel(), "one number", 1)
    same_device(name, x, other_name, other)


def topk_pair(
    topk_weights: Tensor, ids: Tensor, name: str = "topk_ids", weights_name: str = "topk_weights"
) -> None:
    """Check ``(T, k)`` weights and ids (or rows) against each other."""
    tensor(name, ids, 2, INDICES)
    tensor(weights_name, topk_weights, 2, FLOATS)
    size(f"{weights_name}.shape[1]", topk_weights.shape[1], f"{name}.shape[1]", ids.shape[1])
    same_tokens(weights_name, topk_weights, name, ids)
    same_device(weights_name, topk_weights, name, ids)


def expert_map(expert_map: Tensor | None, like: Tensor, num_experts: int | None = None) -> None:
    """Check that ``expert_map`` is None or an integer vector over the global experts."""
    if expert_map is None:
        return
    tensor("expert_map", expert_map, 1, INDICES)
    same_device("expert_map", expert_map, "topk_ids", like)
    if num_experts is not None:
        size("expert_map.shape[0]", expert_map.shape[0], "the number of experts", num_experts)


def one_unit_stride(name: str, w: Tensor) -> None:
    """Check that a weight ``(El, N, K)`` is contiguous along one of its last two axes."""
    if w.stride(-1) != 1 and w.stride(-2) != 1:
        raise ValueError(f"{name} must have stride 1 on one of its last two axes, got {w.stride()}")


def instance(name: str, value: Any, kind: type) -> None:
    """Check that a value is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def dtype_of(name: str, value: Any, choices: Sequence[torch.dtype | None]) -> None:
    """Check for one of some dtypes; None is one if ``choices`` has it."""
    if not (value is None or isinstance(value, torch.dtype)) or value not in choices:
        raise TypeError(f"{name} must be one of {list(choices)}, got {value}")


def device(name: str, value: torch.device | str | int) -> torch.device:
    """The torch.device of a device argument."""
    rule = f"{name} must be a torch.device or its name, such as 'cuda:0'"
    try:
        return torch.device(value)
    except (RuntimeError, ValueError):  # an int of more than 64 bits is a ValueError
        raise ValueError(f"{rule}, got {value!r}") from None
    except TypeError:
        raise TypeError(f"{rule}, got {type(value).__name__}") from None


def integer(name: str, value: int) -> None:
    """Check for an integer (Python's, numpy's or a SymInt) that is not a bool."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {_shown(value)}")


def plain(value: Any) -> Any:
    """Python's own number for one of numpy's, which Dynamo takes for a tensor; or the value."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def at_least(least: int, **numbers: int) -> None:
    """Check sizes and counts: at least ``least``, and within the 32 bits that kernels count in."""
    for name, value in numbers.items():
        integer(name, value)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
        if value > MAX_SIZE:
            raise ValueError(f"{name} must be at most {MAX_SIZE}, got {value}")


def between(least: int, most: int, **numbers: int) -> None:
    """Check that integers are in ``least .. most``."""
    for name, value in numbers.items():
        integer(name, value)
        if not least <= value <= most:
            raise ValueError(f"{name} must be in {least}..{most}, got {value}")


def number(name: str, value: float) -> None:
    """Check for an int or a float that is not a bool."""
    if isinstance(value, (int, float, torch.SymFloat)) and not isinstance(value, bool):
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {_shown(value)}")


def factor(name: str, value: float) -> None:
    """Check for a number that is finite in float32.

    Under a compiler the value is not compared, because each float that Dynamo reads becomes a graph
    input.
    """
    number(name, value)
    if not torch.compiler.is_compiling() and not abs(value) <= LARGEST_FACTOR:
        raise ValueError(f"{name} must be a finite number of float32, got {value}")


def flags(**values: bool) -> None:
    """Check that every value is True or False; 0, 1 and other objects are rejected."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {_shown(value)}")


def _shown(value: Any) -> str:
    """The type of a value for an error, with the value if it is a bool, int, float or str."""
    kind = type(value).__name__
    return f"{kind} {value!r}" if isinstance(value, (bool, int, float, str)) else kind


def topk(name: str, k: int, num_experts: int) -> None:
    """Check that k is an integer from 1 to the number of experts."""
    integer(name, k)
    if not 1 <= k <= num_experts:
        raise ValueError(f"{name} must be between 1 and the {num_experts} experts, got {k}")


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Check for a known name; the error suggests the nearest known name."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {list(choices)}, got {type(value).__name__}")
    if value not in choices:
        hint = did_you_mean(value, choices)
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}{hint}")


def did_you_mean(value: str, choices: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """Suffix of an error about an unknown name; empty if no known name is near.

    Args:
        value: the unknown name.
        choices: all names.
        meant: known names by what others call them; these come first. Then comes the shortest name
            that begins with ``value``, then the most similar one.
    """
    if torch.compiler.is_compiling():  # Dynamo would trace the search
        return ""
    plain, by_lower = value.lower(), {name.lower(): name for name in choices}
    near = [by_lower[n] for n in difflib.get_close_matches(plain, by_lower, n=1)]
    longer = sorted((by_lower[n] for n in by_lower if plain and n.startswith(plain)), key=len)
    called = [name for name in [(meant or {}).get(plain)] if name is not None]
    best = next(iter([*called, *longer, *near]), None)
    return "" if best is None else f"; did you mean {best!r}?"
