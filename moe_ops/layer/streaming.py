"""Tensors that are placed as they come, by their names: see `moe_ops.FusedMoE.load_weights`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.parameters import ParameterSpec
from moe_ops.layer.placing import Placing
from moe_ops.layer.router_tensors import LogitsBiasError
from moe_ops.layer.shared import shared_hint
from moe_ops.layer.state_dict import STATE
from moe_ops.loading.names import (
    LAYOUTS,
    Piece,
    is_of_experts,
    is_of_shared_experts,
    parse,
    router_tensor,
)
from moe_ops.loading.sources import Entry


class WeightStream(Placing):
    """Places tensors in a layer that runs. Each counts, and one that does not fit raises."""

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__(layer, layer.stage().as_held(), LAYOUTS["auto"], quantize=False)

    def load(self, entry: Entry, relative: str, *, by_mapping: bool) -> None:
        """Load a tensor by its name.

        Args:
            entry: the tensor.
            relative: its name after the prefix.
            by_mapping: whether a mapping names the tensors of single experts.

        Raises:
            ValueError: the tensor is of the layer's experts, and nothing takes it.
        """
        piece = parse(relative)
        if not by_mapping or piece is None or piece.expert is None:
            self._load(entry, partial(self.take, entry, relative))
        elif self.stage.rows_of(piece.expert):
            raise ValueError(f"{entry.name} must be in expert_mapping, which has no such name")

    def load_pieces(self, entry: Entry, pieces: list[Piece]) -> None:
        """Load a tensor of which it is known what it is, for each expert that takes it."""
        for piece in pieces:
            own = self._own_shard(piece)
            self._load(entry, partial(self._guarded, self._take, entry, own))

    def loaded_names(self) -> list[str]:
        """Return the names that were loaded since the last call."""
        names, self.loaded = list(dict.fromkeys(self.loaded)), []
        return names

    def finish(self) -> None:
        """Load the tensors that had to wait, and the router's.

        Raises:
            ValueError: a tensor whose layout no other tensor showed.
        """
        super().finish()
        if self.mismatched:
            name = self.mismatched[0].partition(":")[0]
            raise ValueError(
                f"{name} must come with the layer's other fused weight, because a square tensor "
                "does not show whether it is transposed, got it alone"
            )

    def _load(self, entry: Entry, step: Callable[[], None]) -> None:
        self._taken.clear()  # a part may come again
        step()
        self._placed.clear()  # nothing is placed again
        if self.unexpected:
            raise ValueError(
                f"{entry.name} must name a tensor of this layer's {self.state.num_experts} experts "
                f"in scheme {self.state.checkpoint_scheme.name}, got one that nothing takes"
                + shared_hint(self.layer, self.unknown_shared)
            )

    def _guarded(self, step: Callable[[Entry, Piece], None], entry: Entry, piece: Piece) -> None:
        try:
            step(entry, piece)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{entry.name}: {error}") from None

    def _waits(self, entry: Entry, piece: Piece) -> bool:
        if piece.suffix == "qzeros":
            raise ValueError("qzeros must be loaded by load_checkpoint, which knows their order")
        return super()._waits(entry, piece)

    def _place(self, entry: Entry, piece: Piece) -> None:
        spec = self._spec(piece)
        if spec is not None:
            check_takes(self.layer, spec, entry.name)
        super()._place(entry, piece)
        if not any(map(self.stage.rows_of, self._experts(entry, piece))):
            self.loaded.remove(entry.name)  # an input scale, which is only noted

    def _put_expert(self, x: Tensor, piece: Piece, expert: int, share: tuple[int, int]) -> None:
        spec = self._spec(piece)
        param = None if spec is None else self.stage.parameters[spec.name]
        flipped = getattr(param, "is_transposed", False) and piece.expert is not None
        super()._put_expert(x.t() if flipped and x.dim() == 2 else x, piece, expert, share)

    def _take_order(self, entry: Entry, piece: Piece) -> None:
        super()._take_order(entry, piece)
        if self.act_order:
            raise NotImplementedError(
                f"{entry.name} must be in the order of the columns (load_checkpoint takes "
                "act-order), got another order"
            )

    def _settle_router(self) -> None:
        """Load the router's tensors in place; pass by what turns out to be a bias of logits."""
        for candidates in self.router.nearest():
            entry = candidates[-1].entry
            try:
                self.router.read(candidates[-1])
            except LogitsBiasError:
                continue
            except (TypeError, ValueError) as error:
                raise type(error)(f"{entry.name}: {error}") from None
            self.loaded.append(entry.name)
        for buffer, x in self.router.values.items():
            getattr(self.layer, buffer).data.copy_(x)


def check_takes(layer: ExpertLayer, spec: ParameterSpec, name: str) -> None:
    """Check that one tensor by itself can be loaded into a parameter.

    Raises:
        NotImplementedError: the layer holds weights in act-order, and their order would stay.
    """
    if spec.kind == "weight" and layer.w13_input_order is not None:
        raise NotImplementedError(
            "weights must be loaded by load_checkpoint into a layer that holds others in "
            f"act-order (w13_input_order), got {name}"
        )


def is_of_layers(relative: str | None, *, has_shared: bool) -> bool:
    """Whether a name after the prefix is one of the experts, the router or a saved layer."""
    if relative is None:
        return False
    is_state = relative.removeprefix("experts.") == STATE
    is_layers = parse(relative) or router_tensor(relative) or is_state
    looks_shared = has_shared and is_of_shared_experts(relative)
    return bool(is_layers) or looks_shared or is_of_experts(relative)


def numbers(name: str, read: Callable[[], Tensor]) -> Tensor:
    """Return a tensor without its history; ValueError: it holds no numbers."""
    x = read()
    if x.is_meta:
        raise ValueError("must hold numbers, got a Tensor on meta")
    return x.detach()
