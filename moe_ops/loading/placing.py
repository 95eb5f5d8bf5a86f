"""Tensors of a checkpoint, one after another, into the experts of a layer; and what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moe_ops.layers.parameters import SUFFIX, ParameterSpec, parameter_specs
from moe_ops.loading import names
from moe_ops.loading.act_order import ActOrder, sortable
from moe_ops.loading.names import CheckpointLayout, Piece
from moe_ops.loading.sources import Entry
from moe_ops.loading.split import halves
from moe_ops.loading.stored import Form, canonical

if TYPE_CHECKING:
    from moe_ops.layer import FusedMoE


class Part(NamedTuple):
    """One expert's projection in one parameter."""

    spec: ParameterSpec
    expert: int
    shard: str

    def __str__(self) -> str:
        return f"{self.spec.name}[{self.expert}].{self.shard}"


class Placing:
    """Puts tensors into a layer that is being filled, and keeps account.

    Args:
        layer: is overwritten.
        layout: what shapes do not say.
    """

    def __init__(self, layer: FusedMoE, layout: CheckpointLayout) -> None:
        self.layer, self.layout = layer, layout
        self.specs = parameter_specs(layer.sizes)
        self.correction_bias: Tensor | None = None
        self.loaded: list[str] = []
        self.duplicated: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        self._taken: dict[tuple[str, int, str], str] = {}
        self._later: list[tuple[Entry, Piece]] = []
        self.act_order = ActOrder()
        self._placed: list[tuple[Entry, Piece]] = []
        """Those that may have to be sorted, once all of the groups are known."""

    def take(self, entry: Entry, relative: str) -> None:
        """One tensor, by its name behind the prefix."""
        piece = names.parse(relative)
        has_shared = len(self.layer.placement.logical) > self._shared_from()
        if names.is_correction_bias(relative):
            self._take_correction_bias(entry)
        elif piece is None or (piece.is_shared and not has_shared):
            if not names.is_beside_experts(relative):
                self.unexpected.append(entry.name)
        else:
            self._guarded(self._take, entry, self._own_shard(piece))

    def finish(self) -> None:
        """What had to wait for other tensors."""
        later, self._later = self._later, []
        for entry, piece in later:
            if self._waits(entry, piece):
                field = "awq" if piece.suffix == "qzeros" else "transposed"
                self.mismatched.append(f"{entry.name}: layout must say {field}: no shape does")
            else:
                self._guarded(self._place, entry, piece)
        if self.act_order.columns:
            for entry, piece in self._placed:
                self._guarded(self._put, entry, piece)

    def missing(self) -> Iterator[Part]:
        """What this rank needs and did not get."""
        gate_and_up = ("w1", "w3") if self.layer.sizes.gated else ("w1",)
        experts = [expert for expert, rows in self.layer.placement.rows.items() if rows]
        for spec in self.specs.values():
            for expert in experts:
                shards = gate_and_up if spec.is_w13 else ("w2",)
                absent = [s for s in shards if (spec.name, expert, s) not in self._taken]
                if spec.kind == "input_scale" and len(absent) < len(shards):
                    continue  # gate and up have the same input
                yield from (Part(spec, expert, shard) for shard in absent)

    def report(self) -> tuple[list[str], ...]:
        """The lists of a `LoadReport`."""
        missing = list(map(str, self.missing()))
        return self.loaded, missing, self.duplicated, self.unexpected, self.mismatched

    def _guarded(self, step: Callable[[Entry, Piece], None], entry: Entry, piece: Piece) -> None:
        try:
            step(entry, piece)
        except (TypeError, ValueError) as error:
            self.mismatched.append(f"{entry.name}: {error}")
            self._taken = {part: name for part, name in self._taken.items() if name != entry.name}

    def _take(self, entry: Entry, piece: Piece) -> None:
        if self._spec(piece) is None:
            self._without_parameter(entry, piece)
        elif self._claim(entry, piece):
            if self._waits(entry, piece):
                self._later.append((entry, piece))
            else:
                self._place(entry, piece)

    def _spec(self, piece: Piece) -> ParameterSpec | None:
        which = "w2" if piece.shard == "w2" else "w13"
        return self.specs.get(f"{which}_{SUFFIX.get(piece.kind)}")

    def _own_shard(self, piece: Piece) -> Piece:
        """Without a gate, the projection up is the whole first weight."""
        if self.layer.sizes.gated or piece.shard == "w2":
            return piece
        return piece._replace(shard="w1")

    def _shared_from(self) -> int:
        return len(self.layer.placement.logical) - self.layer.routing["num_fused_shared_experts"]

    def _experts(self, piece: Piece) -> list[int]:
        """The logical experts that a tensor is of."""
        if piece.is_shared:
            first = self.layer.num_experts
            return [*range(first, first + self.layer.routing["num_fused_shared_experts"])]
        return [piece.expert] if piece.expert is not None else [*range(self.layer.num_experts)]

    def _claim(self, entry: Entry, piece: Piece) -> bool:
        """Note what a tensor is for; whether this rank is to read it."""
        spec, experts = self._spec(piece), self._experts(piece)
        if spec is None or experts[-1] not in self.layer.placement.rows:
            self.unexpected.append(entry.name)
            return False
        shards = ("w1", "w3") if piece.shard == "w13" else (piece.shard,)
        parts = [(spec.name, expert, shard) for expert in experts for shard in shards]
        if any(part in self._taken for part in parts):
            self.duplicated.append(entry.name)
            return False
        self._taken |= dict.fromkeys(parts, entry.name)
        return any(map(self.layer.rows_of, experts))

    def _waits(self, entry: Entry, piece: Piece) -> bool:
        """Whether its layout is not known yet; tensors that show it are looked at."""
        layout = self.layout
        if piece.suffix in ("qweight", "qzeros") and layout.awq is None:
            if piece.suffix == "qzeros":
                return True
            rows = entry.read().shape[0]
            self.layout = replace(layout, awq=rows == self._form(piece).k)
        if self._may_be_transposed(piece) and layout.transposed is None:
            form, shape = self._form(piece), tuple(entry.read().shape[1:])
            if form.n == form.k:
                return True
            self.layout = replace(layout, transposed=shape == (form.k, form.n))
        return False

    def _may_be_transposed(self, piece: Piece) -> bool:
        one_or_packed = piece.expert is not None or piece.is_shared
        unquantized = self.layer.sizes.scheme.weight is None
        return piece.kind == "weight" and unquantized and not one_or_packed

    def _form(self, piece: Piece) -> Form:
        spec = self._spec(piece)
        if spec is None:
            raise ValueError("no parameter takes it")
        form = self.layer.form(spec, piece.shard, self.layout)
        if not piece.is_shared:
            return form
        count = self.layer.routing["num_fused_shared_experts"]
        return (
            form._replace(k=form.k * count)
            if piece.shard == "w2"
            else (form._replace(n=form.n * count))
        )

    def _place(self, entry: Entry, piece: Piece) -> None:
        self._put(entry, piece)
        self.loaded.append(entry.name)
        quant = self.layer.checkpoint_scheme.weight
        if quant is not None and sortable(quant):
            self._placed.append((entry, piece))

    def _put(self, entry: Entry, piece: Piece) -> None:
        """Read a tensor and copy it to the rows of its experts."""
        x, layer = entry.read(), self.layer
        experts, form = self._experts(piece), self._form(piece)
        if piece.expert is None and not piece.is_shared:
            self._check_count(x, len(experts))
        if self._may_be_transposed(piece) and self.layout.transposed:
            x = x.transpose(-1, -2)
        for i, expert in enumerate(experts):
            rows = layer.rows_of(expert)
            if not rows:
                continue
            one = x[i] if piece.expert is None and not piece.is_shared else x
            for shard, part in self._canonical(one, piece, form, expert):
                part = self.act_order.ordered(part, piece.kind, expert, shard, form)
                if piece.is_shared and len(experts) > 1 and part.dim():
                    axis = min(int(shard == "w2"), part.dim() - 1)
                    part = part.chunk(len(experts), axis)[i]
                self._copy(piece, shard, part, rows)

    def _check_count(self, x: Tensor, count: int) -> None:
        """A row for each expert; identity experts may have rows too, which are not used."""
        with_identity = count + (self.layer.routing["zero_expert_num"] or 0)
        if x.dim() == 0 or x.shape[0] not in (count, with_identity):
            raise ValueError(f"shape must begin with {count} experts, got {tuple(x.shape)}")

    def _canonical(
        self, x: Tensor, piece: Piece, form: Form, expert: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Shards of one expert; an error says which one it is, where the name does not."""
        x = x.to(self.layer.w13_weight.device)
        interleaved = self.layout.interleaved
        if interleaved is None:
            interleaved = self.layer.sizes.interleaved
        try:
            if piece.shard == "w13":
                return zip(("w1", "w3"), halves(piece, x, form, interleaved), strict=True)
            return iter([(piece.shard, canonical(piece.kind, x, piece.suffix, form))])
        except (TypeError, ValueError) as error:
            if piece.expert is not None:
                raise
            raise type(error)(f"expert {expert}: {error}") from None

    def _copy(self, piece: Piece, shard: str, x: Tensor, rows: list[int]) -> None:
        spec = self._spec(piece)
        if spec is None:
            return
        for row in rows:
            self.layer.place(getattr(self.layer, spec.name), spec, x, shard, row)

    def _take_correction_bias(self, entry: Entry) -> None:
        if self.layer.e_score_correction_bias is None:
            return
        x, shape = entry.read(), tuple(self.layer.e_score_correction_bias.shape)
        if x.numel() != shape[0]:
            self.mismatched.append(f"{entry.name}: shape must be {shape}, got {tuple(x.shape)}")
            return
        self.correction_bias = x.reshape(shape)
        self.loaded.append(entry.name)

    def _without_parameter(self, entry: Entry, piece: Piece) -> None:
        """Tensors that a layer of this scheme may lack: such that say nothing new."""
        if piece.kind == "input_scale":
            return  # tokens that are not quantized, or by their own data
        quant = self.layer.checkpoint_scheme.weight
        if piece.kind in ("g_idx", "input_order") and quant is not None:
            self._take_order(entry, piece)
        elif piece.suffix == "qzeros" and quant is not None and quant.element.offset:
            self._check_symmetric(entry.read(), quant.element.offset)
        elif piece.kind == "shape":
            self._check_shape(entry, piece)
        else:
            self.unexpected.append(entry.name)

    def _take_order(self, entry: Entry, piece: Piece) -> None:
        """To which groups columns belong, or in which order a saved layer has them."""
        experts = self._experts(piece)
        if experts[-1] not in self.layer.placement.rows:
            self.unexpected.append(entry.name)
            return
        form = self._form(piece._replace(kind="weight"))
        for expert in filter(self.layer.rows_of, experts):
            x = entry.read()
            if piece.expert is None and not piece.is_shared:
                x = x[expert] if len(x) > 1 else x[0]
            if piece.kind == "g_idx":
                self.act_order.note(expert, piece.shard, x, form)
            else:
                self.act_order.note_input(expert, x[: self.layer.model_hidden_size])

    def _check_shape(self, entry: Entry, piece: Piece) -> None:
        """compressed-tensors says what a packed weight's size is, without what fills words up."""
        if piece.expert is None or not self.layer.placement.rows.get(piece.expert):
            return
        form, found = (
            self.layer.form(self.specs["w2_weight"], piece.shard, self.layout),
            entry.read(),
        )
        if found.flatten().tolist() != [form.n, form.k]:
            raise ValueError(f"numbers must be {[form.n, form.k]}, got {found.tolist()}")

    def _check_symmetric(self, words: Tensor, offset: int) -> None:
        """Zero points of a scheme without any are all the offset; GPTQ's may be one less."""
        values = words.contiguous().view(torch.uint8)
        codes = torch.stack((values & 15, values >> 4)) if offset == 8 else values
        offsets = [offset]
        if self.layout.zeros_plus_one and not self.layout.awq:
            offsets.append(offset - 1)
        if not any(bool((codes == number).all()) for number in offsets):
            raise ValueError(f"zero points must all be {offset} for a scheme without them")
