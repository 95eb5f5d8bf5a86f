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


def cast_weights(
    w1: Tensor, w2: Tensor, dtype: torch.dtype, config: FusedMoEQuantConfig
) -> tuple[Tensor, Tensor]:
    """Cast weights that are not quantized.

    Raises:
        NotImplementedError: experts in host memory of another dtype.
    """
    if config.scheme.weight is not None:
        return w1, w2
    if config.on_host is not None and w1.dtype != dtype:
        raise NotImplementedError(
            f"torch.autocast must have the dtype of experts in host memory, {w1.dtype}, got {dtype}"
        )
    return cast(w1, dtype), cast(w2, dtype)
