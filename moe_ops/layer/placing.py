"""Places the tensors of a checkpoint in a layer one by one, and notes what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.parameters import ParameterSpec, parameter_specs
from moe_ops.layer.router_tensors import RouterTensors
from moe_ops.layer.stage import Stage
from moe_ops.layer.state import PLAIN
from moe_ops.layer.state_dict import STATE, parse_stored_as
from moe_ops.loading import names
from moe_ops.loading.act_order import ActOrder, sortable
from moe_ops.loading.derived import channel_scales, has_plain_scales, quantized_parts
from moe_ops.loading.names import SUFFIX, CheckpointLayout, Piece
from moe_ops.loading.sources import Entry
from moe_ops.loading.split import is_one_number, shared_part, split_gate_and_up
from moe_ops.loading.stored import Form, PlainWeightError, canonical, check_symmetric
from moe_ops.loading.transposed import matrix_shape, may_be_transposed


class Part(NamedTuple):
    """One expert's projection in one parameter."""

    spec: ParameterSpec
    expert: int
    shard: str

    def __str__(self) -> str:
        return f"{self.spec.name}[{self.expert}].{self.shard}"


class Placing:
    """Puts tensors into a layer that is being filled, and keeps track of them.

    Args:
        layer: the layer.
        stage: the state and the parameters that are filled; rows hold what its placement says.
        layout: what shapes do not say.
        quantize: whether weights are plain, to be quantized to the layer's scheme.
    """

    def __init__(
        self, layer: ExpertLayer, stage: Stage, layout: CheckpointLayout, *, quantize: bool
    ) -> None:
        self.layer, self.stage, self.layout, self.quantize = layer, stage, layout, quantize
        self.state = stage.state
        self.plain_weights: list[str] = []
        """Names of plain weights, where the layer is quantized."""
        self.specs = parameter_specs(self.state.sizes)
        self.router = RouterTensors(layer)
        self.has_shared = bool(layer.routing["num_fused_shared_experts"])
        self.saved = self.state.saved_sizes()
        """The sizes that a saved layer has."""
        self.is_saved: bool | None = None
        """Whether tensors by the layer's own names have these sizes; None: not known yet."""
        self.loaded: list[str] = []
        self.duplicated: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        self.unknown_shared: dict[str, str] = {}
        """Names that look like shared experts and mean nothing to the layer: whole names, and what
        comes after the block's prefix."""
        self._taken: dict[tuple[str, int, str], str] = {}
        self._later: list[tuple[Entry, Piece]] = []
        self.act_order = ActOrder()
        self._placed: list[tuple[Entry, Piece]] = []
        """Tensors to place again in another order, once the groups of all columns are known."""

    def take(self, entry: Entry, relative: str) -> None:
        """Take one tensor; ``relative`` is its name after the prefix."""
        piece = names.parse(relative)
        if relative.removeprefix("experts.") == STATE:
            self._check_state(entry)
        elif self.router.note(entry, relative):
            return
        elif piece is None or (piece.is_shared and not self.has_shared):
            if self.looks_shared(relative):
                self.unknown_shared[entry.name] = relative
                self.unexpected.append(entry.name)
            elif not names.is_beside_experts(relative):
                self.unexpected.append(entry.name)
        else:
            self._guarded(self._take, entry, self._own_shard(piece))

    def looks_shared(self, relative: str) -> bool:
        """Whether a tensor may belong to shared experts that the layer holds."""
        return self.has_shared and names.is_of_shared_experts(relative)

    def finish(self) -> None:
        """Place the tensors that had to wait for other tensors."""
        later, self._later = self._later, []
        self.is_saved = bool(self.is_saved)
        for entry, piece in later:
            if self._waits(entry, piece):
                field = "awq" if piece.suffix == "qzeros" else "transposed"
                rule = f"layout must set {field}, which no shape shows"
                self.mismatched.append(f"{entry.name}: {rule}")
            else:
                self._guarded(self._place, entry, piece)
        if self.act_order.columns:
            for entry, piece in self._placed:
                self._guarded(self._put, entry, piece)
        self._settle_router()

    def missing(self) -> Iterator[Part]:
        """Yield the parts that this rank needs and did not get: input scales for all experts."""
        gate_and_up = ("w1", "w3") if self.state.sizes.gated else ("w1",)
        experts = self.state.placement.rows
        for spec in self.specs.values():
            for expert, rows in experts.items():
                if not rows and spec.kind != "input_scale":
                    continue
                shards = gate_and_up if spec.is_w13 else ("w2",)
                absent = [s for s in shards if (spec.name, expert, s) not in self._taken]
                if spec.kind == "input_scale" and len(absent) < len(shards):
                    continue  # gate and up have the same input, so one of them is enough
                yield from (Part(spec, expert, shard) for shard in absent)

    def report(self) -> tuple[list[str], ...]:
        """Return the lists of a `LoadReport`."""
        missing = [*map(str, self.missing()), *self.router.missing()]
        return self.loaded, missing, self.duplicated, self.unexpected, self.mismatched

    def _settle_router(self) -> None:
        """Read the router's tensors; of several for one buffer the first counts."""
        for candidates in self.router.nearest():
            first, *others = candidates
            self.duplicated += [other.entry.name for other in others]
            try:
                self.router.read(first)
            except (TypeError, ValueError) as error:
                self.mismatched.append(f"{first.entry.name}: {error}")
            else:
                self.loaded.append(first.entry.name)

    def _guarded(self, step: Callable[[Entry, Piece], None], entry: Entry, piece: Piece) -> None:
        try:
            step(entry, piece)
        except (TypeError, ValueError) as error:
            if isinstance(error, PlainWeightError):
                self.plain_weights.append(entry.name)
            self.mismatched.append(f"{entry.name}: {error}")
            self._taken = {part: name for part, name in self._taken.items() if name != entry.name}

    def _take(self, entry: Entry, piece: Piece) -> None:
        if self.quantize and piece.kind not in ("weight", "bias", "input_scale"):
            raise ValueError("quantize must be False for weights that are quantized, got True")
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
        """Without a gate, the up projection is the whole first weight."""
        if self.state.sizes.gated or piece.shard == "w2":
            return piece
        return piece._replace(shard="w1")

    def _experts(self, entry: Entry, piece: Piece) -> list[int]:
        """Return the logical experts that a tensor belongs to."""
        count, shared = self.state.num_experts, self.layer.routing["num_fused_shared_experts"]
        if piece.is_shared:
            return [*range(count, count + shared)]
        if piece.expert is not None:
            return [piece.expert]
        if shared and self._is_own(entry) and entry.read().shape[:1] == (count + shared,):
            count += shared  # a layer saves them behind the others
        return [*range(count)]

    def _claim(self, entry: Entry, piece: Piece) -> bool:
        """Note which parts a tensor is for; return whether this rank must read it."""
        spec, experts = self._spec(piece), self._experts(entry, piece)
        if spec is None or experts[-1] not in self.state.placement.rows:
            self.unexpected.append(entry.name)
            return False
        shards = ("w1", "w3") if piece.shard == "w13" else (piece.shard,)
        is_local = any(map(self.stage.rows_of, experts))
        kinds = self._kinds(entry, piece) if is_local else (piece.kind,)
        fields = [self._spec(piece._replace(kind=kind)) for kind in kinds]
        parts = [
            (field.name, expert, shard)
            for field in filter(None, fields)
            for expert in experts
            for shard in shards
        ]
        if any(part in self._taken for part in parts):
            self.duplicated.append(entry.name)
            return False
        self._taken |= dict.fromkeys(parts, entry.name)
        return is_local or piece.kind == "input_scale"

    def _kinds(self, entry: Entry, piece: Piece) -> tuple[str, ...]:
        """Return the kinds of parameters that a tensor fills: several if some are derived."""
        quant = self.state.checkpoint_scheme.weight
        if self.quantize and quant is not None and piece.kind == "weight":
            return ("weight", *quant.parts)
        derives = piece.kind == "scale" and has_plain_scales("scale", entry.read(), quant)
        return ("scale", "channel_scale") if derives else (piece.kind,)

    def _waits(self, entry: Entry, piece: Piece) -> bool:
        """Whether the tensor's layout is not known yet. The shape of the tensor may show it."""
        layout = self.layout
        if self.is_saved is None and self._is_own(entry) and self._differs_when_saved():
            return True
        if piece.suffix in ("qweight", "qzeros") and layout.awq is None:
            if piece.suffix == "qzeros":
                return True
            rows = entry.read().shape[:1]
            self.layout = replace(layout, awq=rows == (self._form(piece).k,))
        return self._is_transposed(entry, piece) is None

    def _is_transposed(self, entry: Entry, piece: Piece) -> bool | None:
        """Whether the matrices of all experts have columns as rows; None: not known yet.

        Scales may be transposed beside weights that are not. Square ones are as the weights.
        """
        if not may_be_transposed(piece, self.state.checkpoint_scheme.weight):
            return False
        n, k = matrix_shape(piece, self._form(piece), is_plain=self.quantize)
        shape, of_weights = tuple(entry.read().shape[1:]), self.layout.transposed
        if piece.kind == "scale" and n != k:
            return shape == (k, n)
        if of_weights is None and self._is_own(entry):  # these are never transposed
            return False
        if of_weights is None:
            if n == k:
                return None
            of_weights = shape == (k, n)
            self.layout = replace(self.layout, transposed=of_weights)
        return of_weights

    def _is_own(self, entry: Entry) -> bool:
        """Whether a tensor has the name of a parameter of the layer."""
        return entry.name.rpartition(".")[2] in self.specs

    def _differs_when_saved(self) -> bool:
        """Whether a saved layer has other blocks or another I than its checkpoint."""
        sizes, state = self.saved, self.state
        same_width = sizes.intermediate_size == state.intermediate_size
        return not (same_width and sizes.scheme == state.checkpoint_scheme)

    def _form(self, piece: Piece) -> Form:
        spec = self._spec(piece)
        if spec is None:
            raise ValueError("no parameter takes it")
        form = self.stage.form(spec, piece.shard, self.layout)
        if piece.is_saved:
            saved, hidden = self.saved, self.state.model_hidden_size
            n, k = (saved.rows, hidden) if spec.is_w13 else (hidden, saved.intermediate_size)
            return form._replace(n=n, k=k, quant=saved.scheme.weight)
        if not piece.is_shared:
            return form
        count = self.layer.routing["num_fused_shared_experts"]
        if piece.shard == "w2":
            return form._replace(k=form.k * count)
        return form._replace(n=form.n * count)

    @property
    def _interleaved(self) -> bool:
        """Whether gate and up rows alternate in tensors of both."""
        stated = self.layout.interleaved
        return self.state.sizes.interleaved if stated is None else stated

    def _width(self) -> int:
        """I of an expert on all ranks together."""
        return self.stage.form(self.specs["w2_weight"], "w2", self.layout).k

    def _place(self, entry: Entry, piece: Piece) -> None:
        self._put(entry, piece)
        self.loaded.append(entry.name)
        if sortable(self.state.checkpoint_scheme.weight):
            self._placed.append((entry, piece))

    def _put(self, entry: Entry, piece: Piece) -> None:
        """Read a tensor and copy it to the rows of its experts."""
        x, stage, experts = entry.read(), self.stage, self._experts(entry, piece)
        piece = piece._replace(is_saved=bool(self.is_saved) and self._is_own(entry))
        of_all = piece.expert is None and not piece.is_shared
        if of_all:
            x = self._of_each(x, piece, len(experts))
        if self._is_transposed(entry, piece):
            x = x.transpose(-1, -2)
        for i, expert in enumerate(experts):
            if not stage.rows_of(expert) and piece.kind != "input_scale":
                continue
            one = x[i] if of_all else x
            if piece.kind != "input_scale":  # which the host reads
                one = one.to(stage.parameters["w13_weight"].device)
            share = (i, len(experts)) if piece.is_shared else (0, 1)
            try:
                self._put_expert(one, piece, expert, share)
            except (TypeError, ValueError) as error:
                if piece.expert is not None:
                    raise
                raise type(error)(f"expert {expert}: {error}") from None

    def _put_expert(self, x: Tensor, piece: Piece, expert: int, share: tuple[int, int]) -> None:
        """Copy one expert's tensor, and what is derived from it.

        Args:
            x: the tensor.
            piece: what the tensor is.
            expert: a logical expert.
            share: ``(i, n)``: the expert is number i of n experts that are side by side in ``x``.
        """
        if self.quantize and piece.kind == "weight":
            self._put_quantized(x, piece, expert, share)
            return
        stored = [(piece, x)]
        if has_plain_scales(piece.kind, x, self.state.checkpoint_scheme.weight):
            parts = channel_scales(x).items()
            stored = [(piece._replace(kind=k, suffix=SUFFIX[k]), part) for k, part in parts]
        for of, tensor in stored:
            form = self._form(of)
            for shard, part in self._shards(tensor, of, form):
                part = self.act_order.ordered(part, of.kind, expert, shard, form)
                part = shared_part(part, of.kind, shard, share, self._width(), form.own)
                self._copy(of.kind, shard, part, expert)

    def _put_quantized(self, x: Tensor, piece: Piece, expert: int, share: tuple[int, int]) -> None:
        """Quantize plain projections as a whole, in the layer's dtype, and copy them."""
        sizes, scheme = self.state.sizes, self.state.checkpoint_scheme
        form = self._form(piece)._replace(dtype=sizes.dtype, quant=None, own=None)
        width = self._width()
        whole = {
            shard: shared_part(part, "weight", shard, share, width, None).to(sizes.dtype)
            for shard, part in self._shards(x, piece, form)
        }
        for shard, kind, part in quantized_parts(whole, scheme, sizes.interleaved):
            spec = self._spec(piece._replace(kind=kind))
            if spec is not None:
                form = self.stage.form(spec, shard, self.layout)
                self._copy(kind, shard, canonical(kind, part, SUFFIX[kind], form), expert)

    def _of_each(self, x: Tensor, piece: Piece, count: int) -> Tensor:
        """Return a row per expert; unused rows of zero experts may follow.

        One number for all experts, as ModelOpt stores scales of whole tensors, is that of each.
        """
        quant = self.state.checkpoint_scheme.weight
        if x.numel() == 1 and is_one_number(piece.kind, quant):
            return x.reshape(1).expand(count)
        with_identity = count + (self.layer.routing["zero_expert_num"] or 0)
        if x.dim() == 0 or x.shape[0] not in (count, with_identity):
            raise ValueError(f"shape must begin with {count} experts, got {tuple(x.shape)}")
        return x

    def _shards(self, x: Tensor, piece: Piece, form: Form) -> Iterator[tuple[str, Tensor]]:
        """Yield canonical projections: two for a tensor of gate and up, else one."""
        if piece.shard == "w13":
            both = split_gate_and_up(piece, x, form, self._interleaved)
            return zip(("w1", "w3"), both, strict=True)
        return iter([(piece.shard, canonical(piece.kind, x, piece.suffix, form))])

    def _copy(self, kind: str, shard: str, x: Tensor, expert: int) -> None:
        spec = self.specs[f"{'w2' if shard == 'w2' else 'w13'}_{SUFFIX[kind]}"]
        rows = self.stage.rows_of(expert)
        if kind == "input_scale":
            self.stage.take_input_scale(spec, x, shard, expert, rows)
            return
        for row in rows:
            self.stage.place(self.stage.parameters[spec.name], spec, x, shard, row)

    def _check_state(self, entry: Entry) -> None:
        """Check a saved layer's entry ``_extra_state``: see `moe_ops.layer.state_dict`.

        Raises:
            ValueError: the tensors are stored in another form than this layer's checkpoints, or are
                packed, or their rows are not the experts in order.
        """
        quant = None if self.quantize else self.state.checkpoint_scheme.weight
        interleaved = self._interleaved
        stored = parse_stored_as(entry.read())
        problem = stored.differs_from(quant, interleaved=interleaved)
        saved = None if self.quantize else self.saved.scheme.weight
        self.is_saved = stored.differs_from(saved, interleaved=interleaved) is None
        if problem and not self.is_saved:
            raise ValueError(f"{entry.name}: {problem}")
        if stored.form != PLAIN:
            raise ValueError(
                f"{entry.name}: weights must be in the plain form (load_state_dict takes all, "
                f"FusedMoE.unpack_ converts), got the form {stored.form!r}"
            )
        try:
            stored.rank.check_whole(self.state)
        except ValueError as error:
            raise ValueError(f"{entry.name}: {error}") from None

    def _without_parameter(self, entry: Entry, piece: Piece) -> None:
        """Handle tensors without a parameter: some are redundant, some order columns."""
        if piece.kind == "input_scale":
            return  # the layer does not quantize tokens, or quantizes them dynamically
        quant = self.state.checkpoint_scheme.weight
        if piece.kind == "bias" and self._experts(entry, piece)[-1] in self.state.placement.rows:
            self._check_zeros(entry, piece)
        elif piece.kind in ("g_idx", "input_order") and quant is not None:
            self._take_order(entry, piece)
        elif piece.suffix == "qzeros" and quant is not None and not quant.element.exponent:
            offset = quant.element.offset or 2 ** (quant.element.bits - 1)
            check_symmetric(entry.read(), offset, self.layout)
        elif piece.kind == "shape":
            self._check_shape(entry, piece)
        else:
            self.unexpected.append(entry.name)

    def _check_zeros(self, entry: Entry, piece: Piece) -> None:
        """Check the biases that GPTQ writes for projections without one."""
        if any(map(self.stage.rows_of, self._experts(entry, piece))) and bool(entry.read().any()):
            raise ValueError("a layer without has_bias must be given biases of zeros, got others")

    def _take_order(self, entry: Entry, piece: Piece) -> None:
        """Note the groups of columns, or the order in which a saved layer has them."""
        experts = self._experts(entry, piece)
        if experts[-1] not in self.state.placement.rows:
            self.unexpected.append(entry.name)
            return
        form = self._form(piece._replace(kind="weight"))
        for expert in filter(self.stage.rows_of, experts):
            x = entry.read()
            if piece.expert is None and not piece.is_shared:
                x = x[expert] if len(x) > 1 else x[0]
            if piece.kind == "g_idx":
                self.act_order.note(expert, piece.shard, x, form)
            else:
                self.act_order.note_input(expert, x[: self.state.model_hidden_size])

    def _check_shape(self, entry: Entry, piece: Piece) -> None:
        """Check the size that compressed-tensors gives for a packed weight, without padding."""
        if piece.expert is None or not self.state.placement.rows.get(piece.expert):
            return
        form = self.stage.form(self.specs["w2_weight"], piece.shard, self.layout)
        numbers = entry.read()
        if numbers.numel() != 2:
            raise ValueError(f"there must be 2 numbers, got shape {tuple(numbers.shape)}")
        if numbers.flatten().tolist() != [form.n, form.k]:
            raise ValueError(f"numbers must be {[form.n, form.k]}, got {numbers.tolist()}")
