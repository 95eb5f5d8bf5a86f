"""The form of a layer's stored tensors, as an entry of its state dict.

Tensors of different schemes can have the same names, shapes and dtypes: int4 in groups of 32 and
MXFP4 differ only in the meaning of their bytes. So a state dict has one more entry,
``_extra_state``: JSON text in a uint8 tensor, which every format of saved tensors can hold. A state
dict without this entry comes from an earlier version, and is loaded without a check.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.forms import converted, form_names
from moe_ops.layer.parameters import parameter_specs
from moe_ops.layer.rank_tensor import plain_tensor
from moe_ops.layer.saved_rank import RankPart, RankState, rank_state
from moe_ops.layer.sharded import rank_tensors, refusal_of
from moe_ops.layer.state import FP8, PACKED, PLAIN, WEIGHTS
from moe_ops.scheme import Quant

STATE = "_extra_state"
"""Name of the entry, which PyTorch chooses."""
FORMS = (PLAIN, PACKED, FP8)
"""The forms that ``form`` names."""
MAX_BYTES = 65536
"""Largest size of the entry; a longer tensor is something else."""


class KeepsStateDict(ExpertLayer):
    """A layer whose state dict names the scheme of its weights and the order of their rows.

    With ``enable_eplb`` it also names the experts of the rows, which `EplbState.rebalance_` may
    change, and over several ranks the experts and the part of them that this rank holds (see
    `RankPart`). Loading puts rows where the layer holds their experts by then. A state dict without
    the experts, which a layer over several ranks must trust, is loaded with a warning.
    """

    def get_extra_state(self) -> Tensor:
        """Return the scheme of the plain parameters as a uint8 tensor on the CPU."""
        scheme = self.sizes.plain.scheme
        entries: dict[str, Any] = {
            "scheme": scheme.key,
            "weight": scheme.weight and scheme.weight.key,
            "interleaved": self.sizes.interleaved,
        }
        forms = {*self.state.forms.values()} - {PLAIN}
        if forms:  # of one weight, or of both
            entries["form"] = min(forms)
        entry = _json_tensor(entries | RankPart.of(self.state).entries())
        return (
            rank_state(entry, _json_tensor(entries), refusal_of(self)) if self.is_spread else entry
        )

    def set_extra_state(self, state: Any) -> None:
        """Compare the form in a state dict with the layer's; nothing is stored.

        Raises:
            ValueError: another scheme, or another order of rows.
        """
        if isinstance(state, Tensor) and state.is_meta:
            return  # has no content
        for entry in (state, getattr(state, "whole", state)):  # loaded with a whole layer's tensors
            problem = parse_stored_as(entry).differs_from(
                self.sizes.plain.scheme.weight, interleaved=self.sizes.interleaved
            )
            if problem:
                raise ValueError(problem)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as `nn.Module` does; tensors of one rank know their place in the whole layer's."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.is_spread or keep_vars:
            return
        own = {name: destination[prefix + name] for name, _ in self.named_parameters(recurse=False)}
        for name, x in rank_tensors(self, own).items():
            destination[prefix + name] = x

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: Any,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as `nn.Module` does, but copy nothing from a state dict of another form.

        The columns' order ``w13_input_order`` is loaded or removed together with ``w13_weight``.
        Rows are loaded where the layer holds their experts now, and weights in the layer's form:
        plain, packed or held as fp8.
        """
        state_dict = {
            name: x if isinstance(x, RankState) else plain_tensor(x)
            for name, x in state_dict.items()
        }
        saved, order_key = state_dict.get(prefix + STATE), prefix + "w13_input_order"
        try:
            self.set_extra_state(self.get_extra_state() if saved is None else saved)
            self._reorder(state_dict, prefix, saved)
            self._convert_saved(state_dict, prefix)
            order = self._checked_order(state_dict.get(order_key))
        except (TypeError, ValueError, NotImplementedError) as error:
            error_msgs.append(f"{prefix.removesuffix('.') or type(self).__name__}: {error}")
            return
        state_dict[prefix + STATE] = self.get_extra_state()
        if order is not None:
            state_dict[order_key] = order
            if self.w13_input_order is None or self.w13_input_order.shape != order.shape:
                self.w13_input_order = torch.empty_like(order, device=self.compute_device)
        elif prefix + "w13_weight" in state_dict:
            self.w13_input_order = None
        self.state.given_scales.clear()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.follow_dtype()
        self.renew_slots()

    def _reorder(self, state_dict: dict[str, Any], prefix: str, saved: Any) -> None:
        """Replace tensors whose rows hold other experts than the layer's do now.

        Without experts in ``saved``, rows are all experts in order, as a layer of one rank without
        replicas saves them, or as in the first placement.

        Raises:
            ValueError: the tensors lack an expert that this rank holds, are of another part of the
                experts, have other numbers of rows than named experts, or replicas that differ.
        """
        named = isinstance(saved, Tensor) and not saved.is_meta
        stored = parse_stored_as(saved).rank if named else RankPart()
        stored.check_fits(self.state)
        names = {*parameter_specs(self.sizes), "w13_input_order"}
        names |= {name for which in WEIGHTS for name in form_names(which)}
        tensors = {prefix + name: state_dict.get(prefix + name) for name in names}
        rows = {name: x for name, x in tensors.items() if isinstance(x, Tensor) and x.dim()}
        if rows and self.is_spread and (stored.experts is None or stored.part is None):
            warn(
                f"{STATE} does not name the experts of the state dict's rows (an earlier version, "
                "or a layer of one rank, saved it), so it cannot be checked that they are those of "
                "this rank",
                UserWarning,
                stacklevel=2,
            )
        if stored.experts is None:
            every = range(self.state.num_experts)
            count = max(map(len, rows.values()), default=0)
            in_order = count == len(every) and not self.is_spread
            stored = RankPart(tuple(every if in_order else self.placement.experts))
        else:
            stored.check_rows(rows)
        state_dict.update(stored.reordered(rows, self.state.held_placement().experts))

    def _convert_saved(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Convert weights of a state dict, which are in any form, to the layer's form.

        Raises:
            TypeError, ValueError, NotImplementedError: tensors that do not fit each other or the
                layer; rows that are not exact as fp8, in a layer whose weights are held so.
        """
        scheme = self.sizes.plain.scheme
        for which, form in self.state.forms.items():
            names = [prefix + name for name in form_names(which)]
            saved = tuple(state_dict.get(name) for name in names)
            if isinstance(saved[0], Tensor):
                for name, x in zip(names, converted(saved, scheme, form), strict=True):
                    if x is None:
                        state_dict.pop(name, None)
                    else:
                        state_dict[name] = x

    def _checked_order(self, order: Any) -> Tensor | None:
        """Return ``order`` as int32 ``(1 or El, H)``; kernels index by its permutations."""
        if order is None:
            return None
        experts, width = self.sizes.num_experts, self.sizes.hidden_size
        if not isinstance(order, Tensor) or order.dtype not in (torch.int32, torch.int64):
            got = getattr(order, "dtype", type(order).__name__)
            raise TypeError(f"w13_input_order must be an int32 Tensor, got {got}")
        if tuple(order.shape) not in ((1, width), (experts, width)):
            raise ValueError(
                f"w13_input_order must have shape {(1, width)} or {(experts, width)}, "
                f"got {tuple(order.shape)}"
            )
        columns = torch.arange(width, device=order.device)
        if not order.is_meta and not bool((order.sort(1).values == columns).all()):
            raise ValueError(
                f"w13_input_order must have permutations of 0..{width - 1} as rows, got others"
            )
        return order.int()


def _json_tensor(entries: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(entries).encode()), dtype=torch.uint8, device="cpu")


class StoredAs(NamedTuple):
    """The form of the tensors of a state dict, as its entry says."""

    name: str
    """The scheme's key."""
    weight: str | None
    """The key of the weight's `Quant`; None: not quantized."""
    interleaved: bool
    """Whether gate and up rows alternate."""
    rank: RankPart
    """What the rows hold."""
    form: str
    """The form of the weights; ``packed`` if ``w13`` or ``w2`` is."""

    def differs_from(self, wanted: Quant | None, *, interleaved: bool) -> str | None:
        """Say why a layer cannot load tensors of this form; None: it can.

        Scales that are powers of two may be loaded as other scales. One scale per row may have an
        axis for groups.

        Args:
            wanted: how the layer stores its weights.
            interleaved: whether gate and up rows alternate in the layer.
        """
        if _numbers(self.weight, wanted) != _numbers(wanted.key if wanted else None, wanted):
            rule = "must not be quantized" if wanted is None else f"must be stored as {wanted.key}"
            return f"weights {rule}, got those of {self.name} ({self.weight})"
        if interleaved != self.interleaved:
            orders = ("one after the other", "alternating")
            return (
                f"gate and up rows must be {orders[interleaved]}, as the layer's activation "
                f"takes them, got {orders[self.interleaved]}"
            )
        return None


def _numbers(key: str | None, wanted: Quant | None) -> str | None:
    """Return a key without the parts that do not change the numbers that a layer reads."""
    if key is None:
        return None
    key = key.replace(":vector", ":float32")
    if wanted is not None and wanted.scale == "pow2":
        return key
    return key.replace(":pow2", ":float32")


def parse_stored_as(state: Any) -> StoredAs:
    """Parse an ``_extra_state`` entry.

    Raises:
        ValueError: it is not such an entry.
    """
    rule = f"{STATE} must be a layer's form, JSON in a uint8 Tensor"
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.numel() > MAX_BYTES:
        got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"{rule}, got {got}")
    try:
        entries = json.loads(bytes(state.flatten().tolist()))
        name, weight, interleaved = (entries[key] for key in ("scheme", "weight", "interleaved"))
        form = entries.get("form", PLAIN)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{rule}, got {error!r}") from None
    kinds = ((name, (str,)), (weight, (str, type(None))), (interleaved, (bool,)), (form, (str,)))
    if not all(isinstance(value, kind) for value, kind in kinds):
        raise ValueError(f"{rule}, got {entries}")
    if form not in FORMS:
        raise ValueError(f"{rule}, whose form is one of {list(FORMS)}, got {form!r}")
    try:
        rank = RankPart.parse(entries)
    except ValueError as error:
        raise ValueError(f"{rule}, got {error}") from None
    return StoredAs(name, weight, interleaved, rank, form)
