"""Floating-point operations of the operators, for PyTorch's ``FlopCounterMode``.

As in PyTorch, only products of matrices count: ``2 * rows * N * K`` for a weight ``(N, K)`` of each
expert. Rows are all slots of a routing, T * k, whether one is skipped or not: which ones are is
known on the device alone. In the Batched format they are all rows of the buffer, El * M.

``torch.utils.flop_counter`` imports Triton, so the formulas are registered when somebody else
imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from moe_ops.scheme import UNQUANTIZED, get_scheme

Formula = Callable[[Mapping[str, Any]], int]
"""The number of operations of a call, by the arguments' names in the operator's schema."""
FORMULAS: dict[Any, Formula] = {}
"""Formula by operator."""
COUNTER = "torch.utils.flop_counter"


def product(arguments: Mapping[str, Any]) -> int:
    """``a`` by the experts' weights, or by their transposes."""
    w = arguments["weight"][0] if "weight" in arguments else arguments["w"]
    scheme = get_scheme(arguments.get("scheme", UNQUANTIZED.key))
    numbers = w.shape[1] * w.shape[2] * scheme.numbers_per_entry(w.dtype)
    return 2 * arguments["a"].shape[0] * arguments.get("top_k", 1) * numbers


def weight_gradient(arguments: Mapping[str, Any]) -> int:
    """``dy`` by ``x``, which have one row per slot or per token."""
    dy, (_, topk_ids, _) = arguments["dy"], arguments["tiles"]
    slots = dy.shape[0] if topk_ids is None else topk_ids.numel()
    return 2 * slots * dy.shape[1] * arguments["x"].shape[1]


def register() -> None:
    """Register the formulas, at once or when `COUNTER` is imported."""
    module = sys.modules.get(COUNTER)
    if module is None:
        sys.meta_path.insert(0, _Finder)
    else:
        _register(module)


def _register(module: ModuleType) -> None:
    for packet, formula in {op.overloadpacket: rule for op, rule in FORMULAS.items()}.items():
        module.register_flop_formula(packet, get_raw=True)(_counted(packet, formula))


def _counted(packet: Any, formula: Formula) -> Callable[..., int]:
    """The formula with the arguments of a packet's overloads, as the counter calls it."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        operator = packet.out if "out" in kwargs else packet.default
        names = (argument.name for argument in operator._schema.arguments)
        return formula({**dict(zip(names, args, strict=False)), **kwargs})

    return count


class _Finder:
    """Entry of ``sys.meta_path`` that finds `COUNTER` once, and registers when it is executed."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec that the other finders have."""
        if name != COUNTER:
            return None
        sys.meta_path.remove(cls)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def run(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec
