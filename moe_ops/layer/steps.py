"""The steps of the field's loaders of weights, each on one expert's part of a parameter."""

from __future__ import annotations

from torch import Tensor

from moe_ops.layer.base import ExpertLayer
from moe_ops.loading.given import SHARED


class LoadSteps(ExpertLayer):
    """Where a projection goes in an expert's parameter, and which part of it is this rank's.

    Ranks take parts as long as their parameter is: ``[rank * each, (rank + 1) * each)`` of what
    there is, so that the last ones may have less, or nothing.

    Source:
        vLLM ``FusedMoE._load_w13`` and its neighbours.
    """

    def _load_model_weight_or_group_weight_scale(
        self,
        shard_dim: int,
        expert_data: Tensor,
        shard_id: str,
        loaded_weight: Tensor,
        tp_rank: int,
        load_full_w2: bool = False,
    ) -> None:
        """Weights, and scales and zero points of groups and blocks."""
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
        """Gate rows to the first half (or the even rows), up rows to the second (odd rows)."""
        if shard_id not in ("w1", "w3"):
            raise ValueError(f"shard_id must be w1 or w3, got {shard_id}")
        dest = expert_data
        if self.sizes.gated and self.sizes.interleaved:
            dest = dest.unflatten(shard_dim, (-1, 2)).select(shard_dim + 1, int(shard_id == "w3"))
        elif self.sizes.gated:
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
        """Columns of this rank."""
        _copy_shard(expert_data, shard_dim, loaded_weight, 0 if load_full else tp_rank)

    def _load_per_channel_weight_scale(
        self,
        expert_data: Tensor,
        shard_dim: int,
        shard_id: str,
        loaded_weight: Tensor,
        tp_rank: int,
    ) -> None:
        """One for each row: those of ``w2`` are on every rank."""
        if shard_id == "w2":
            copy_front(expert_data, loaded_weight)
        else:
            self._load_w13(expert_data, shard_dim, shard_id, loaded_weight, tp_rank)

    def _load_per_tensor_weight_scale(
        self, shard_id: str, param: Tensor, loaded_weight: Tensor, expert_id: int
    ) -> None:
        """Into ``(El, 2)`` (gate, up) or ``(El,)``, which gate and up share."""
        if param.dim() == 1 and self.sizes.gated and shard_id != "w2":
            value = float(loaded_weight)
            self.given_scales.take(f"of {id(param)}", expert_id, shard_id, value, SHARED)
        at = (expert_id, int(shard_id == "w3")) if param.dim() == 2 else expert_id
        param.data[at] = loaded_weight.reshape(()).to(param.dtype)

    def _load_combined_w13_weight_scale(
        self, shard_dim: int, loaded_weight: Tensor, param: Tensor, tp_rank: int
    ) -> None:
        """Scales of gate and up that are together already."""
        _copy_shard(param.data, shard_dim, loaded_weight, tp_rank)

    def _load_g_idx(
        self,
        shard_id: str,
        expert_data: Tensor,
        shard_dim: int,
        loaded_weight: Tensor,
        tp_rank: int,
    ) -> None:
        """Groups of columns: ranks share those of ``w2``."""
        if shard_id == "w2":
            self._load_w2(expert_data, shard_dim, loaded_weight, tp_rank)
        else:
            copy_front(expert_data, loaded_weight)

    def _load_single_value(self, param: Tensor, loaded_weight: Tensor, expert_id: int) -> None:
        """A number, or a few."""
        param.data[expert_id] = loaded_weight.to(param.device)


def _copy_shard(dest: Tensor, dim: int, x: Tensor, rank: int) -> None:
    """Of ``x`` the part of one rank; where it ends before the rank's, what is behind is zero."""
    if x.dim() != dest.dim():
        raise ValueError(
            f"loaded_weight must have the axes of the parameter's part, {tuple(dest.shape)}, got "
            f"shape {tuple(x.shape)}"
        )
    each = dest.shape[dim]
    length = min(each, x.shape[dim] - rank * each)
    if length > 0:
        copy_front(dest, x.narrow(dim, rank * each, length))


def copy_front(dest: Tensor, x: Tensor) -> None:
    """To the front of ``dest``, whose rest is padding; ValueError where it does not fit."""
    if x.dim() > dest.dim() or any(n > room for n, room in zip(x.shape, dest.shape, strict=False)):
        raise ValueError(
            f"loaded_weight must fit into shape {tuple(dest.shape)}, got {tuple(x.shape)}"
        )
    for axis, length in enumerate(x.shape):
        dest = dest.narrow(axis, 0, length)
    dest.copy_(x)
