"""Loading tensors as they come, by their names: how weights of a running model are updated.

A base class of `moe_ops.FusedMoE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from torch import Tensor

from moe_ops import checks
from moe_ops.layer.own_names import OwnNames
from moe_ops.layer.placing import Placing
from moe_ops.layer.router_tensors import LogitsBiasError
from moe_ops.layer.shared import shared_hint
from moe_ops.layer.state_dict import STATE
from moe_ops.layer.weight_loader import WeightLoading
from moe_ops.loading.names import (
    KINDS,
    LAYOUTS,
    SHARDS,
    Piece,
    is_of_experts,
    is_of_shared_experts,
    parse,
    router_tensor,
)
from moe_ops.loading.sources import Entry, entry_of


class StreamsWeights(WeightLoading):
    """A layer with `load_weights`."""

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
            if not pieces and not _is_of_layers(relative, has_shared=has_shared):
                continue
            if stream is None:
                self.unpack_()
                stream = WeightStream(self)
            entry = Entry(name, partial(_numbers, name, read))
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


class WeightStream(Placing):
    """Places tensors in a layer that runs. Each counts, and one that does not fit raises."""

    layer: WeightLoading

    def __init__(self, layer: WeightLoading) -> None:
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
            self.layer.check_takes(spec, entry.name)
        super()._place(entry, piece)
        if not any(map(self.stage.rows_of, self._experts(piece))):
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


def _is_of_layers(relative: str | None, *, has_shared: bool) -> bool:
    """Whether a name after the prefix is one of the experts, the router or a saved layer."""
    if relative is None:
        return False
    is_state = relative.removeprefix("experts.") == STATE
    is_layers = parse(relative) or router_tensor(relative) or is_state
    looks_shared = has_shared and is_of_shared_experts(relative)
    return bool(is_layers) or looks_shared or is_of_experts(relative)


def _numbers(name: str, read: Callable[[], Tensor]) -> Tensor:
    """Return a tensor without its history; ValueError: it holds no numbers."""
    x = read()
    if x.is_meta:
        raise ValueError("must hold numbers, got a Tensor on meta")
    return x.detach()
