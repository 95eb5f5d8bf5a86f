"""The loading steps that vLLM's loaders have, each on one expert's part of a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.layer.state import LayerState
from moe_ops.loading.given import SHARED


class LoadSteps:
    """Places a projection in an expert's parameter, and selects the part of this rank.

    A rank takes ``[rank * each, (rank + 1) * each)`` of the checkpoint's axis, where ``each`` is
    the length of the rank's parameter. The last ranks may get less, or nothing.

    Source:
        vLLM ``FusedMoE._load_w13`` and its neighbours.
    """

    state: LayerState

    def _load_model_weight_or_group_weight_scale(
        self,
        shard_dim: int,
        expert_data: Tensor,
        shard_id: str,
        loaded_weight: Tensor,
        tp_rank: int,
        load_full_w2: bool = False,
    ) -> None:
        """Load weights, or scales and zero points of groups and blocks."""
        if shard_id == "w2":
            self._load_w2(expert_data, shard_dim, loaded_weight, tp_rank, load_full_w2)
        else:
            self._load_w13(expert_data, shard_dim, shard_id, loaded_weight, tp_rank)

    def _load_w13(
        self,
        expert_data: Tensor,
        shard_dim: int,
        shard_id: str,
        loaded_weight: Tensor,
        tp_rank: int,
        load_full: bool = False,
    ) -> None:
        """Copy gate rows to the first half (or even rows), up rows to the other half."""
        if shard_id not in ("w1", "w3"):
            raise ValueError(f"shard_id must be w1 or w3, got {shard_id}")
        dest = expert_data
        if self.state.sizes.gated and self.state.sizes.interleaved:
            dest = dest.unflatten(shard_dim, (-1, 2)).select(shard_dim + 1, int(shard_id == "w3"))
        elif self.state.sizes.gated:
            half = dest.shape[shard_dim] // 2
            dest = dest.narrow(shard_dim, half if shard_id == "w3" else 0, half)
        elif shard_id == "w3":
            raise ValueError("shard_id must be w1 or w2 for an activation without a gate, got w3")
        _copy_shard(dest, shard_dim, loaded_weight, 0 if load_full else tp_rank)

    def _load_w2(
        self,
        expert_data: Tensor,
        shard_dim: int,
        loaded_weight: Tensor,
        tp_rank: int,
        load_full: bool = False,
    ) -> None:
        """Copy the columns of this rank."""
        _copy_shard(expert_data, shard_dim, loaded_weight, 0 if load_full else tp_rank)

    def _load_per_channel_weight_scale(
        self,
        expert_data: Tensor,
        shard_dim: int,
        shard_id: str,
        loaded_weight: Tensor,
        tp_rank: int,
    ) -> None:
        """Copy one scale per row; every rank has all scales of ``w2``."""
        if shard_id == "w2":
            copy_front(expert_data, loaded_weight)
        else:
            self._load_w13(expert_data, shard_dim, shard_id, loaded_weight, tp_rank)

    def _load_alternating_zero_points(
        self, expert_data: Tensor, shard_id: str, codes: Tensor, tp_rank: int
    ) -> None:
        """Copy 4-bit zero points of gate to low nibbles, or zero points of up to high nibbles."""
        shift, kept = (4, 0x0F) if shard_id == "w3" else (0, 0xF0)
        part = torch.zeros_like(expert_data)
        _copy_shard(part, 0, codes << shift, tp_rank)
        expert_data.copy_(expert_data & kept | part)

    def _load_per_tensor_weight_scale(
        self, shard_id: str, param: Tensor, loaded_weight: Tensor, expert_id: int
    ) -> None:
        """Set one scale in ``(El, 2)`` (gate, up) or ``(El,)``, which gate and up share."""
        if param.dim() == 1 and self.state.sizes.gated and shard_id != "w2":
            value = float(loaded_weight)
            self.state.given_scales.take(f"of {id(param)}", expert_id, shard_id, value, SHARED)
        at = (expert_id, int(shard_id == "w3")) if param.dim() == 2 else expert_id
        param.data[at] = loaded_weight.reshape(()).to(param.dtype)

    def _load_combined_w13_weight_scale(
        self, shard_dim: int, loaded_weight: Tensor, param: Tensor, tp_rank: int
    ) -> None:
        """Copy scales of gate and up that are in one tensor."""
        _copy_shard(param.data, shard_dim, loaded_weight, tp_rank)

    def _load_g_idx(
        self,
        shard_id: str,
        expert_data: Tensor,
        shard_dim: int,
        loaded_weight: Tensor,
        tp_rank: int,
    ) -> None:
        """Copy the group of each column; ranks share the columns of ``w2``."""
        if shard_id == "w2":
            self._load_w2(expert_data, shard_dim, loaded_weight, tp_rank)
        else:
            copy_front(expert_data, loaded_weight)

    def _load_single_value(self, param: Tensor, loaded_weight: Tensor, expert_id: int) -> None:
        """Copy one number, or a few."""
        param.data[expert_id] = loaded_weight.to(param.device)


def _copy_shard(dest: Tensor, dim: int, x: Tensor, rank: int) -> None:
    """Copy the part of one rank of ``x``; a part that ``x`` lacks stays as it is in ``dest``."""
    if x.dim() != dest.dim():
        raise ValueError(
            "loaded_weight must have as many axes as the parameter's part "
            f"{tuple(dest.shape)}, got shape {tuple(x.shape)}"
        )
    each = dest.shape[dim]
    length = min(each, x.shape[dim] - rank * each)
    if length > 0:
        copy_front(dest, x.narrow(dim, rank * each, length))


def copy_front(dest: Tensor, x: Tensor) -> None:
    """Copy to the front of ``dest``, whose rest is padding; ValueError if ``x`` does not fit."""
    if x.dim() > dest.dim() or any(n > room for n, room in zip(x.shape, dest.shape, strict=False)):
        raise ValueError(
            f"loaded_weight must fit into shape {tuple(dest.shape)}, got {tuple(x.shape)}"
        )
    for axis, length in enumerate(x.shape):
        dest = dest.narrow(axis, 0, length)
    dest.copy_(x)
