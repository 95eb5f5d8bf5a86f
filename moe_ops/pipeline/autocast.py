"""The dtypes of a call under `torch.autocast`, which casts as it does for linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.pipeline.main_grads import cast
from moe_ops.scheme import FusedMoEQuantConfig

DEVICES = ("cuda", "cpu")


def autocast_dtype(x: Any) -> torch.dtype | None:
    """Return the dtype in which experts of tokens ``x`` compute; None: in that of the tokens.

    Without a tensor it is None, and the checks that follow raise.
    """
    kind = x.device.type if isinstance(x, Tensor) else ""
    if kind in DEVICES and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def under_autocast(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, config: FusedMoEQuantConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast tokens, and weights that are not quantized, if autocast is on.

    Raises:
        NotImplementedError: experts in host memory of another dtype.
    """
    dtype = autocast_dtype(hidden_states)
    if dtype is None:
        return hidden_states, w1, w2
    x = hidden_states.to(dtype)
    if config.scheme.weight is not None:
        return x, w1, w2
    if config.on_host is not None and w1.dtype != dtype:
        raise NotImplementedError(
            f"torch.autocast must have the dtype of experts in host memory, {w1.dtype}, got {dtype}"
        )
    return x, cast(w1, dtype), cast(w2, dtype)
