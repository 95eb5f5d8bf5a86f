"""Loading one tensor of a checkpoint into a layer: this rank's part, at its place.

A base class of `moe_ops.FusedMoE`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moe_ops import checks
from moe_ops.layer.forms import FORM_KINDS, ConvertsForms
from moe_ops.layer.parameters import (
    FusedMoeWeightScaleSupported,
    ParameterSpec,
    parameter_specs,
)
from moe_ops.layer.rank_checks import check_own_weights
from moe_ops.layer.stage import SHARD_DIMS
from moe_ops.layer.state import PLAIN
from moe_ops.layer.steps import LoadSteps
from moe_ops.loading.names import SHARDS, SHARED_GATE

QUANT_METHODS = [method.value for method in FusedMoeWeightScaleSupported]


class WeightLoading(LoadSteps, ConvertsForms):
    """A layer with `weight_loader`, and the steps from which `load_checkpoint` is made."""

    def weight_loader(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy one tensor of a checkpoint to its place in a parameter.

        Input scales of experts on other ranks are noted: all experts share the largest one, which
        ``process_weights_after_loading`` finds.

        Args:
            param: a parameter of this layer, or a tensor of the caller's with a ``quant_method``. A
                true ``is_transposed`` says that its last two axes are swapped, and those of
                ``loaded_weight``.
            loaded_weight: the whole projection of one expert or, for a parameter of this layer, of
                all experts, ``(E, N, K)``.
            weight_name: the tensor's name, whose end says how it is stored.
            shard_id: ``w1`` (gate), ``w2`` (down) or ``w3`` (up).
            expert_id: the physical expert, as `make_expert_params_mapping` numbers it; not used if
                ``loaded_weight`` is of all experts. It stands for the logical expert that it holds
                at first: the tensor goes to all rows of this rank that hold that expert now (see
                `EplbState.rebalance_`).
            return_success: whether to return anything.

        Returns:
            With ``return_success``, whether something was copied: False for an expert that is not
            on this rank, and for a tensor that belongs to no parameter.

        Raises:
            ValueError: a wrong ``shard_id`` or shape; input scales of gate and up that differ; zero
                points of AWQ or GPTQ, whose order cannot be known here; a weight that is not in the
                plain form (see `FusedMoE.unpack_`).
            TypeError: a wrong dtype.
            NotImplementedError: the layer holds weights in act-order, and their order would stay;
                a wrapper holds or computes its weights (`fully_shard`, a parametrization).

        Source:
            vLLM ``FusedMoE.weight_loader``.
        """
        checks.flags(return_success=return_success)
        checks.tensor("param", param, None, None)
        checks.tensor("loaded_weight", loaded_weight, None, None)
        if loaded_weight.is_meta:
            raise ValueError("loaded_weight must hold numbers, got a Tensor on meta")
        if not isinstance(weight_name, str):
            raise TypeError(f"weight_name must be a str, got {type(weight_name).__name__}")
        if shard_id not in SHARDS:
            raise ValueError(f"shard_id must be ['w1','w2','w3'] but got {shard_id}.")
        if param is self._parameters.get(SHARED_GATE):
            raise ValueError(f"param must belong to experts, got {SHARED_GATE} (copy_ into it)")
        check_own_weights(self)
        spec, stage = self._spec_of(param), self.stage().as_held()
        held = stage.state.placement.rows
        if spec is not None:
            self._check_plain(spec)
        if loaded_weight.dim() == 3 and spec is not None:
            rows = [
                (row, loaded_weight[expert])
                for expert in range(loaded_weight.shape[0])
                for row in held.get(expert, [])
            ]
        else:
            expert_id = self._logical_expert(expert_id)
            rows = [(row, loaded_weight) for row in held.get(expert_id, [])]
        if spec is not None and spec.kind == "input_scale":
            local = [row for row, _ in rows]
            scale = stage.stored(spec, loaded_weight, weight_name, shard_id, expert_id)
            stage.take_input_scale(spec, scale, shard_id, expert_id, local)
            return bool(local) if return_success else None
        done = False
        self.renew_slots()
        for row, x in rows:
            if spec is None:
                done = self._load_by_name(param, x, weight_name, shard_id, row)
            else:
                self.check_takes(spec, weight_name)
                stage.load_stored(param, spec, x, weight_name, shard_id, row)
                done = True
        return done if return_success else None

    def _check_plain(self, spec: ParameterSpec) -> None:
        """Refuse a parameter of a weight that is not in the plain form."""
        form = self.state.forms["w13" if spec.is_w13 else "w2"]
        if spec.kind in FORM_KINDS and form != PLAIN:
            raise ValueError(
                f"param must be in the plain form (call the layer's unpack_() first), got "
                f"{spec.name} in the form {form!r}"
            )

    def check_takes(self, spec: ParameterSpec, name: str) -> None:
        """Check that one tensor by itself can be loaded into a parameter.

        Raises:
            NotImplementedError: the layer holds weights in act-order, and their order would stay.
        """
        if spec.kind == "weight" and self.w13_input_order is not None:
            raise NotImplementedError(
                "weights must be loaded by load_checkpoint into a layer that holds others in "
                f"act-order (w13_input_order), got {name}"
            )

    def _load_by_name(self, param: Tensor, x: Tensor, name: str, shard_id: str, row: int) -> bool:
        """Load into a caller's tensor, by the tensor's name and ``quant_method``."""
        flipped = bool(getattr(param, "is_transposed", False))
        shard_dim, tp_rank = SHARD_DIMS[shard_id] ^ flipped, self.moe_parallel_config.tp_rank
        expert_data = param.data[row] if param.dim() > 1 else param.data
        if "g_idx" in name:
            self._load_g_idx(shard_id, expert_data, 0, x, tp_rank)
        elif any(word in name for word in ("scale", "zero", "offset")):
            method = getattr(param, "quant_method", None)
            if method not in QUANT_METHODS:
                raise ValueError(f"quant method must be one of {QUANT_METHODS}, got {method}")
            if method == "tensor":
                self._load_per_tensor_weight_scale(shard_id, param, x, row)
            elif method == "channel":
                self._load_per_channel_weight_scale(expert_data, shard_dim, shard_id, x, tp_rank)
            else:
                full = bool(getattr(param, "load_full_w2", False))
                self._load_model_weight_or_group_weight_scale(
                    shard_dim, expert_data, shard_id, x, tp_rank, full
                )
        elif "weight_shape" in name:
            self._load_single_value(param, x, row)
        elif "weight" in name:
            self._load_model_weight_or_group_weight_scale(
                shard_dim, expert_data, shard_id, x, tp_rank
            )
        else:
            return False
        return True

    def _logical_expert(self, expert_id: int) -> int:
        """Return the logical expert that a physical one holds at first."""
        checks.integer("expert_id", expert_id)
        is_logical = 0 <= expert_id < len(self.placement.row)
        if not is_logical:
            raise ValueError(
                f"expert_id must be in 0..{len(self.placement.row) - 1}, got {expert_id}"
            )
        return self.placement.logical[expert_id]

    def _spec_of(self, param: Tensor) -> ParameterSpec | None:
        specs: Mapping[str, ParameterSpec] = parameter_specs(self.sizes)
        for name, spec in specs.items():
            if self._parameters.get(name) is param:
                return spec
        return None
