"""Loading tensors into a layer that runs, one at a time, or by their names as they come.

A base class of `moe_ops.FusedMoE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from torch import Tensor

from moe_ops import checks
from moe_ops.layer.forms import FORM_KINDS, ConvertsForms
from moe_ops.layer.own_names import OwnNames
from moe_ops.layer.parameters import (
    FusedMoeWeightScaleSupported,
    ParameterSpec,
    parameter_specs,
)
from moe_ops.layer.rank_checks import check_own_weights
from moe_ops.layer.stage import SHARD_DIMS
from moe_ops.layer.state import PLAIN
from moe_ops.layer.steps import LoadSteps
from moe_ops.layer.streaming import WeightStream, check_takes, is_of_layers, numbers
from moe_ops.loading.names import KINDS, SHARDS, SHARED_GATE, Piece
from moe_ops.loading.sources import Entry, entry_of

QUANT_METHODS = [method.value for method in FusedMoeWeightScaleSupported]


class LoadsWeights(LoadSteps, ConvertsForms):
    """A layer with `weight_loader` and `load_weights`."""

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
                true ``is_transposed`` says that its last two axes are swapped, and the last two of
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
                check_takes(self, spec, weight_name)
                stage.load_stored(param, spec, x, weight_name, shard_id, row)
                done = True
        return done if return_success else None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Load tensors as they come; yield the names of those that this rank took data from.

        This is a generator, as vLLM's is: nothing is loaded until the names are consumed, as in
        ``loaded = set(layer.load_weights(weights))``, and a consumer that stops early leaves the
        rest unloaded.

        Names are read as `load_checkpoint` reads them: of one expert, of all experts in one tensor,
        or of the layer's own parameters. They begin with the layer's ``prefix``, with the last
        parts of it, or with nothing. A layer without a prefix takes the names of one layer,
        whatever they begin with. With ``expert_mapping`` the tensors of single experts go where it
        says, and names of single experts that it lacks are unknown.

        A call may bring any part of the layer. The last one of several tensors for one part counts.
        Tensors of other layers, of experts on other ranks and of other parts of the model are
        passed by. The router's tensors that the layer holds are loaded at the end, and so are fused
        weights whose layout only a later tensor shows.

        The first tensor of the layer converts weights to the plain form. After the last call,
        ``layer.quant_method.process_weights_after_loading(layer)`` finishes static scales, and
        converts weights to the form for the GPU again. An error leaves what was loaded before it:
        `load_checkpoint` loads everything or nothing, and checks that nothing is missing.

        Args:
            weights: pairs of a name and a tensor.

        Raises:
            ValueError: a tensor of this layer's experts that nothing takes, or that does not fit;
                names of two layers if this one has no prefix; a layer on ``meta``; zero points of
                AWQ or GPTQ, whose order cannot be known here.
            TypeError: a wrong dtype; an item that is not a pair of a name and a tensor.
            NotImplementedError: weights in act-order, which `load_checkpoint` takes; weights that
                a wrapper holds or computes (`fully_shard`, a parametrization).

        Source:
            vLLM ``FusedMoE.load_weights``.
        """
        if self.w13_weight.is_meta:
            raise ValueError("layer must have memory (call to_empty first), got parameters on meta")
        has_shared = bool(self.routing["num_fused_shared_experts"])
        own, stream = OwnNames(self.prefix, has_shared=has_shared), None
        for item in weights:
            name, read = entry_of(item, "weights")
            pieces = self._mapped(name, own)
            relative = own.relative(name)
            if not pieces and not is_of_layers(relative, has_shared=has_shared):
                continue
            if stream is None:
                self.unpack_()
                stream = WeightStream(self)
            entry = Entry(name, partial(numbers, name, read))
            if pieces:
                stream.load_pieces(entry, pieces)
            else:
                stream.load(entry, relative or "", by_mapping=self.expert_mapping is not None)
            yield from stream.loaded_names()
        if stream is not None:
            stream.finish()
            self.renew_slots()
            yield from stream.loaded_names()

    def _mapped(self, name: str, own: OwnNames) -> list[Piece]:
        """Return what a tensor is by ``expert_mapping``: one piece for each expert that takes it.

        ``weight_name`` may be anywhere in a name, before the kind of the tensor.
        """
        pieces: dict[Piece, None] = {}
        qualified = name if name.startswith("experts.") else f"experts.{name}"
        for _, weight_name, expert, shard in self.expert_mapping or ():
            start = qualified.find(weight_name)
            suffix = qualified[start + len(weight_name) :]
            head = qualified[:start].removeprefix("experts.")
            if start >= 0 and suffix in KINDS and own.owns(head):
                checks.one_of("shard_id", shard, SHARDS)
                piece = Piece(shard, KINDS[suffix], suffix, self._logical_expert(expert))
                pieces[piece] = None
        return [*pieces]

    def _check_plain(self, spec: ParameterSpec) -> None:
        """Refuse a parameter of a weight that is not in the plain form."""
        form = self.state.forms["w13" if spec.is_w13 else "w2"]
        if spec.kind in FORM_KINDS and form != PLAIN:
            raise ValueError(
                f"param must be in the plain form (call the layer's unpack_() first), got "
                f"{spec.name} in the form {form!r}"
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
        logical = self.placement.logical
        if not 0 <= expert_id < len(logical):
            raise ValueError(f"expert_id must be in 0..{len(logical) - 1}, got {expert_id}")
        return logical[expert_id]

    def _spec_of(self, param: Tensor) -> ParameterSpec | None:
        specs = parameter_specs(self.sizes).items()
        return next((spec for name, spec in specs if self._parameters.get(name) is param), None)
