"""Moving a layer without rounding what must not be rounded."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor, nn


def apply_keeping(
    layer: nn.Module, fn: Callable[[Tensor], Tensor], cast: Container[str]
) -> Callable[[Tensor], Tensor]:
    """``fn`` as `nn.Module._apply` is to use it: tensors not named in ``cast`` keep their dtypes.

    ``fn`` sees them as bytes, which no ``.to(dtype)`` touches, and moves them.
    """
    tensors = {**layer._parameters, **layer._buffers}
    kept = {id(x) for name, x in tensors.items() if name not in cast and x is not None}

    def moved(x: Tensor) -> Tensor:
        if id(x) not in kept:
            return fn(x)
        stored = x.data.contiguous()
        return fn(stored.view(torch.uint8)).view(stored.dtype)

    return moved
